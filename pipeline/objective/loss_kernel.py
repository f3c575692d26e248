"""The loss of a chunk of logits in Triton; `loss.eager_terms` is the same in plain torch.

A separate file, because Triton exists only where torch was built for a GPU.

T tokens · V vocabulary
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _tanh(x, EXACT: tl.constexpr):
    """Without EXACT, use the GPU's own instruction. Its relative error of 2^-11 is below that of
    bf16 logits, and an exact tanh would take as long as the rest of the loss."""
    if EXACT:
        y = 1 - 2 / (1 + tl.exp(2 * x))
    else:
        y = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def _cross_entropy_kernel(logits, targets, shares, nll, more, V, z_loss, softcap, smoothing,
                          CAP: tl.constexpr, BOUNDED: tl.constexpr, EXACT: tl.constexpr,
                          SMOOTH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    share = tl.load(shares + row)
    inverse = 1 / softcap
    picked = tl.load(logits + row * V + target).to(tl.float32)
    if CAP:
        picked = softcap * _tanh(picked * inverse, EXACT)
    # No logit is larger than the cap, so a small cap can replace the largest logit.
    top = softcap if BOUNDED else -float("inf")
    total = tl.zeros((BLOCK,), tl.float32)
    summed = tl.zeros((BLOCK,), tl.float32)  # sum of the logits, for their mean
    # First pass: the largest logit so far and, per lane, the sum of e^(logit - largest).
    for start in range(0, V, BLOCK):
        inside = start + at < V
        x = tl.load(logits + row * V + start + at, mask=inside, other=-float("inf"))
        x = x.to(tl.float32)
        if CAP:
            # The cap is finite, so lanes beyond the vocabulary are hidden after it.
            x = tl.where(inside, softcap * _tanh(x * inverse, EXACT), -float("inf"))
        if BOUNDED:
            total += tl.exp(x - top)
        else:
            above = tl.maximum(top, tl.max(x, 0))
            total = total * tl.exp(top - above) + tl.exp(x - above)
            top = above
        if SMOOTH:
            summed += tl.where(inside, x, 0.0)
    lse = top + tl.log(tl.sum(total, 0))
    scale = share * (1 + 2 * z_loss * lse)
    # Second pass: the gradient replaces the logits, which now come from the cache.
    for start in range(0, V, BLOCK):
        inside = start + at < V
        x = tl.load(logits + row * V + start + at, mask=inside, other=-float("inf"))
        x = x.to(tl.float32)
        slope = 1.0
        if CAP:
            tanh = _tanh(x * inverse, EXACT)
            x = softcap * tanh
            slope = 1 - tanh * tanh
        grad = tl.exp(x - lse) * scale
        grad = grad - tl.where(start + at == target, share * (1 - smoothing), 0.0)
        if SMOOTH:
            grad = grad - share * smoothing / V
        tl.store(logits + row * V + start + at, grad * slope, mask=inside)
    tl.store(nll + row, (lse - picked) * share)
    added = z_loss * lse * lse
    if SMOOTH:
        added += smoothing * (picked - tl.sum(summed, 0) / V)
    tl.store(more + row, added * share)


def cross_entropy(
    logits_TV: Tensor,
    targets_T: Tensor,
    share_T: Tensor,
    z_loss: float,
    softcap: float | None = None,
    smoothing: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`eager_terms` that overwrites the logits with their gradient. Compiled code takes twice as
    long, unless the vocabulary is a power of two."""
    nll, more = share_T.new_empty(2, len(share_T))
    # Blocks of 8,192 were the fastest; with a cap, 16 warps were faster than 8 (docs/LOG.md).
    _cross_entropy_kernel[(len(share_T),)](
        *(logits_TV, targets_T, share_T, nll, more, logits_TV.shape[1]),
        *(z_loss, softcap or 1.0, smoothing),
        CAP=softcap is not None,
        # e^(-2·40) is still an fp32 number, so the sum of a row with low logits only is not 0.
        BOUNDED=softcap is not None and softcap <= 40,
        # Triton's interpreter, on a CPU, has no GPU instructions.
        EXACT=logits_TV.dtype == torch.float32 or not logits_TV.is_cuda,
        SMOOTH=smoothing > 0,
        BLOCK=8192,
        num_warps=8 if softcap is None else 16,
    )
    return nll.sum(), more.sum(), logits_TV
