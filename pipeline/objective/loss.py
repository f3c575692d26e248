"""Next-token loss straight from hidden states, so that the logits of a batch never exist at once.

T tokens · W width · V vocabulary

Each chunk of tokens makes its logits, its loss and, when training, its gradients in the forward pass, and drops the
logits. The backward pass only scales the stored gradients: no logit is computed twice. A negative target is a place
that predicts nothing, such as the padding of a packed row.
"""

from typing import Any

import torch
from torch import Tensor


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_TW: Tensor, weight_VW: Tensor, targets_T: Tensor, z_loss: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        predicts_T = targets_T >= 0
        share_T = predicts_T / predicts_T.sum().clamp(min=1)  # of the mean: nothing where nothing is predicted
        targets_T = targets_T.clamp(min=0)
        train = h_TW.requires_grad or weight_VW.requires_grad
        grad_h = torch.empty_like(h_TW) if train else None
        grad_w = torch.zeros_like(weight_VW, dtype=torch.float32) if train else None
        nll = h_TW.new_zeros((), dtype=torch.float32)
        z = h_TW.new_zeros((), dtype=torch.float32)
        for start in range(0, h_TW.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = (h_TW[part] @ weight_VW.T).float()
            lse = logits.logsumexp(dim=-1)
            picked = logits.gather(1, targets_T[part, None]).squeeze(1)
            nll += (lse - picked) @ share_T[part]
            z += lse.square() @ share_T[part]
            if grad_h is None or grad_w is None:
                continue
            # d(nll + z_loss·lse²)/dlogits = softmax·(1 + 2·z_loss·lse) − onehot
            grad = logits.sub_(lse[:, None]).exp_().mul_((1 + 2 * z_loss * lse)[:, None])
            grad[torch.arange(grad.shape[0], device=grad.device), targets_T[part]] -= 1
            grad = grad.mul_(share_T[part, None]).to(h_TW.dtype)
            torch.mm(grad, weight_VW, out=grad_h[part])
            grad_w += grad.T @ h_TW[part]
        if grad_h is not None and grad_w is not None:
            ctx.save_for_backward(grad_h, grad_w.to(weight_VW.dtype))
        ctx.mark_non_differentiable(nll)
        return nll + z_loss * z, nll

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_h, grad_w = ctx.saved_tensors
        return grad_h * grads[0].to(grad_h.dtype), grad_w * grads[0].to(grad_w.dtype), None, None, None


def next_token_loss(
    h_TW: Tensor, weight_VW: Tensor, targets_T: Tensor, *, z_loss: float, chunk: int
) -> tuple[Tensor, Tensor]:
    """What is minimised (with the z term), and the mean negative log likelihood in nats, which is what is reported."""
    total, nll = _ChunkedCrossEntropy.apply(h_TW, weight_VW, targets_T, z_loss, chunk)  # type: ignore[no-untyped-call]
    return total, nll
