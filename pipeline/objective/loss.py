"""Next-token loss from hidden states, without the logits of a whole batch in memory.

T tokens · W width · V vocabulary

Each chunk of tokens computes its logits, its loss and, when training, its gradients in the forward
pass, and drops the logits. The backward pass only scales the stored gradients, so no logit is
computed twice. A negative target predicts nothing, such as the padding of a packed row.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


def cap(logits: Tensor, softcap: float | None) -> Tensor:
    """Return c·tanh(logits/c), computed in fp32: no result exceeds c (arXiv 2408.00118)."""
    if softcap is None:
        return logits
    return (softcap * torch.tanh(logits.float() / softcap)).type_as(logits)


def eager_terms(
    logits_TV: Tensor,
    targets_T: Tensor,
    share_T: Tensor,
    z_loss: float,
    softcap: float | None = None,
    smoothing: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a chunk's part of the mean loss, its part of the terms that training adds, and the
    gradient for the given logits. A GPU uses a kernel for this (loss_kernel.py).

    Training adds the squared log-sum-exp times z_loss, and the effect of label smoothing. `share_T`
    is the weight of each token in the mean. The loss and the terms use the capped logits."""
    logits_TV_fp32 = cap(logits_TV.float(), softcap)
    top_T1, at_T1 = logits_TV_fp32.max(dim=-1, keepdim=True)
    grad_TV = logits_TV_fp32.softmax(dim=-1)
    # The softmax of the largest logit is at least 1/V, so its log is safe.
    lse_T = (top_T1 - grad_TV.gather(1, at_T1).log()).squeeze(1)
    picked_T = logits_TV_fp32.gather(1, targets_T[:, None]).squeeze(1)
    # The gradient of nll + z_loss·lse² is softmax·(1 + 2·z_loss·lse), less 1 at the target.
    grad_TV.mul_((share_T * (1 + 2 * z_loss * lse_T))[:, None])
    grad_TV.scatter_add_(1, targets_T[:, None], (smoothing - 1) * share_T[:, None])
    more = z_loss * (lse_T.square() * share_T).sum()
    if smoothing:
        # With smoothing, the loss is lse - (1 - smoothing)·picked - smoothing·mean.
        more = more + smoothing * ((picked_T - logits_TV_fp32.mean(-1)) * share_T).sum()
        grad_TV.sub_(share_T[:, None] * (smoothing / logits_TV.shape[1]))
    if softcap is not None:
        # The derivative of the cap is 1 - tanh².
        grad_TV.mul_(logits_TV_fp32.div_(softcap).square_().neg_().add_(1))
    nll = ((lse_T - picked_T) * share_T).sum()
    return nll, more, grad_TV.to(logits_TV.dtype)


class Soft(NamedTuple):
    """The input and the weights of a teacher's head, and the weights of both losses
    (config/distill.py). The teacher's logits, too, exist for one chunk at a time."""

    h_TW: Tensor
    weight_VW: Tensor
    bias_V: Tensor | None
    softcap: float | None
    temperature: float
    soft: float
    hard: float

    def terms(
        self, logits_TV: Tensor, part: slice, share_T: Tensor, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """Return a chunk's part of T²·KL(teacher p ‖ student q) at the temperature T, and the
        gradient for the student's logits.

        T² keeps the gradient's size independent of the temperature."""
        theirs_TV = torch.nn.functional.linear(self.h_TW[part], self.weight_VW, self.bias_V)
        log_p_TV = cap(theirs_TV.float(), self.softcap).div_(self.temperature).log_softmax(-1)
        p_TV = log_p_TV.exp()
        capped_TV = cap(logits_TV.float(), softcap)
        log_q_TV = (capped_TV / self.temperature).log_softmax(-1)
        divergence_T = (p_TV * (log_p_TV - log_q_TV)).sum(-1)
        loss = self.temperature**2 * (divergence_T * share_T).sum()
        grad_TV = log_q_TV.exp_().sub_(p_TV).mul_(self.temperature * share_T[:, None])
        if softcap is not None:
            grad_TV.mul_(1 - (capped_TV / softcap).square())
        return loss, grad_TV


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
        softcap: float | None,
        smoothing: float,
        bias_V: Tensor | None,
        soft: Soft | None,
    ) -> tuple[Tensor, Tensor]:
        share_T = (targets_T >= 0) / count  # zero without a target
        targets_T = targets_T.clamp(min=0)
        train = h_TW.requires_grad or weight_VW.requires_grad
        grad_h = torch.empty_like(h_TW) if train else None
        # In fp32, since it is a sum over all chunks.
        grad_w = None
        if weight_VW.requires_grad:  # not frozen, as with LoRA
            grad_w = torch.zeros_like(weight_VW, dtype=torch.float32)
        grad_b = None
        if bias_V is not None and bias_V.requires_grad:
            grad_b = torch.zeros_like(bias_V, dtype=torch.float32)
        nll, more = h_TW.new_zeros((2,), dtype=torch.float32)
        terms = eager_terms
        if h_TW.is_cuda:
            from pipeline.objective.loss_kernel import cross_entropy as terms
        for start in range(0, h_TW.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = torch.nn.functional.linear(h_TW[part], weight_VW, bias_V)
            # Before `terms`, which overwrites the logits on a GPU.
            taught = soft.terms(logits, part, share_T[part], softcap) if soft else None
            part_nll, part_more, grad = terms(
                logits, targets_T[part], share_T[part], z_loss, softcap, smoothing
            )
            if soft is not None and taught is not None:
                # The total is `nll + more`, and `nll` stays the plain loss.
                part_more = soft.hard * (part_nll + part_more) + soft.soft * taught[0] - part_nll
                grad = soft.hard * grad + (soft.soft * taught[1]).type_as(grad)
            nll = nll + part_nll
            more = more + part_more
            if grad_h is not None:
                torch.mm(grad, weight_VW, out=grad_h[part])
            if grad_w is not None:
                _add_product(grad_w, grad.T, h_TW[part])
            if grad_b is not None:
                grad_b += grad.sum(0, dtype=torch.float32)
        grads = (grad_h, grad_w, grad_b)
        like = (h_TW, weight_VW, bias_V)
        saved = [
            grad.type_as(tensor)
            for grad, tensor in zip(grads, like, strict=True)
            if grad is not None and tensor is not None
        ]
        ctx.has = [grad is not None for grad in grads]
        ctx.save_for_backward(*saved)
        # Training minimizes the first output. The second one is logged.
        ctx.mark_non_differentiable(nll)
        return nll + more, nll

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale = grads[0].to(ctx.saved_tensors[0].dtype)
        # `*` with a scalar tensor does not vectorize: 0.5 ms more of 125m's step (docs/LOG.md).
        scaled = iter(torch._foreach_mul(ctx.saved_tensors, scale))
        grad_h, grad_w, grad_b = (next(scaled) if has else None for has in ctx.has)
        return grad_h, grad_w, *[None] * 6, grad_b, None


def next_token_loss(
    h_TW: Tensor,
    weight_VW: Tensor,
    targets_T: Tensor,
    count: Tensor | None = None,
    *,
    z_loss: float,
    chunk: int,
    softcap: float | None = None,
    smoothing: float = 0.0,
    bias_V: Tensor | None = None,
    soft: Soft | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the loss to minimize, with z-loss, label smoothing and the divergence from a teacher,
    and the mean negative log likelihood in nats.

    `count` divides the sums; give it if the mean covers more targets than these."""
    count = (targets_T >= 0).sum().clamp(min=1) if count is None else count
    total, nll = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        h_TW, weight_VW, targets_T, count, z_loss, chunk, softcap, smoothing, bias_V, soft
    )
    return total, nll
