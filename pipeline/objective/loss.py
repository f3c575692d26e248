"""Next-token loss straight from hidden states, so that the logits of a batch never exist at once.

T tokens · W width · V vocabulary

Each chunk of tokens makes its logits, its loss and, when training, its gradients in the forward pass, and drops the
logits. The backward pass only scales the stored gradients: no logit is computed twice. A negative target is a place
that predicts nothing, such as the padding of a packed row.
"""

from typing import Any

import torch
from torch import Tensor


def terms(
    logits_TV: Tensor, targets_T: Tensor, share_T: Tensor, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A chunk's part of the mean loss, of the mean squared log-sum-exp, and the gradient of their sum."""
    if logits_TV.is_cuda:
        from pipeline.objective.loss_kernel import (
            cross_entropy,  # Triton comes with torch where there is a GPU
        )

        return cross_entropy(logits_TV, targets_T, share_T, z_loss)
    return few_passes(logits_TV, targets_T, share_T, z_loss)


def few_passes(
    logits_TV: Tensor, targets_T: Tensor, share_T: Tensor, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Max, softmax in place and one scatter: each pass over the logits counts where nothing fuses them."""
    logits = logits_TV.float()
    top, at = logits.max(dim=-1, keepdim=True)
    grad = logits.softmax(dim=-1)
    lse = (top - grad.gather(1, at).log()).squeeze(1)  # of the largest, the share is at least 1/V
    picked = logits.gather(1, targets_T[:, None]).squeeze(1)
    grad.mul_((share_T * (1 + 2 * z_loss * lse))[:, None]).scatter_add_(
        1, targets_T[:, None], -share_T[:, None]
    )
    return (
        ((lse - picked) * share_T).sum(),
        (lse.square() * share_T).sum(),
        grad.to(logits_TV.dtype),
    )


def _add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """into += a @ b, in fp32. A GPU adds inside the matmul, without rounding the product first."""
    if a.is_cuda and a.dtype != into.dtype:
        torch.addmm(into, a, b, out_dtype=into.dtype, out=into)
    else:
        into += a @ b


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_TW: Tensor,
        weight_VW: Tensor,
        targets_T: Tensor,
        count: Tensor,
        z_loss: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        share_T = (targets_T >= 0) / count  # of the mean: nothing where nothing is predicted
        targets_T = targets_T.clamp(min=0)
        train = h_TW.requires_grad or weight_VW.requires_grad
        grad_h = torch.empty_like(h_TW) if train else None
        grad_w = torch.zeros_like(weight_VW, dtype=torch.float32) if train else None
        nll, z = h_TW.new_zeros((2,), dtype=torch.float32)
        for start in range(0, h_TW.shape[0], chunk):
            part = slice(start, start + chunk)
            part_nll, part_z, grad = terms(
                h_TW[part] @ weight_VW.T, targets_T[part], share_T[part], z_loss
            )
            nll, z = nll + part_nll, z + part_z
            if grad_h is not None and grad_w is not None:
                torch.mm(grad, weight_VW, out=grad_h[part])
                _add_product(grad_w, grad.T, h_TW[part])
        if grad_h is not None and grad_w is not None:
            ctx.save_for_backward(grad_h, grad_w.to(weight_VW.dtype))
        ctx.mark_non_differentiable(nll)
        return nll + z_loss * z, nll

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        grad_h, grad_w = torch._foreach_mul(
            ctx.saved_tensors, grads[0].to(ctx.saved_tensors[0].dtype)
        )  # `*` is slower
        return grad_h, grad_w, None, None, None, None


def next_token_loss(
    h_TW: Tensor,
    weight_VW: Tensor,
    targets_T: Tensor,
    count: Tensor | None = None,
    *,
    z_loss: float,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """What is minimised (with the z term), and the mean negative log likelihood in nats, which is what is reported.
    `count` is what the sum is divided by, where these targets are not all that the mean is over."""
    count = (targets_T >= 0).sum().clamp(min=1) if count is None else count
    total, nll = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        h_TW, weight_VW, targets_T, count, z_loss, chunk
    )
    return total, nll
