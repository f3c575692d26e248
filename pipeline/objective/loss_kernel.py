"""The loss in Triton, where the compiler falls short, beside the plain torch of `loss` that it must equal.

T tokens · V vocabulary
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy(logits, targets, shares, nll, z, V, z_loss, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    target, share = tl.load(targets + row), tl.load(shares + row)
    picked = tl.load(logits + row * V + target).to(tl.float32)
    top = -float("inf")
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(
        0, V, BLOCK
    ):  # the largest so far, and lane by lane the sum over e^(logit - largest)
        x = tl.load(logits + row * V + start + at, mask=start + at < V, other=-float("inf")).to(
            tl.float32
        )
        above = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - above) + tl.exp(x - above)
        top = above
    lse = top + tl.log(tl.sum(total, 0))
    for start in range(0, V, BLOCK):  # again, from the cache
        x = tl.load(logits + row * V + start + at, mask=start + at < V, other=-float("inf")).to(
            tl.float32
        )
        grad = tl.exp(x - lse) * (share * (1 + 2 * z_loss * lse)) - tl.where(
            start + at == target, share, 0.0
        )
        tl.store(logits + row * V + start + at, grad, mask=start + at < V)
    tl.store(nll + row, (lse - picked) * share)
    tl.store(z + row, lse * lse * share)


def cross_entropy(
    logits_TV: Tensor, targets_T: Tensor, share_T: Tensor, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What `loss.few_passes` gives, the gradient in the logits' own place: one reading and one writing of
    memory. Where the vocabulary is no power of two, the compiler takes twice as long."""
    nll, z = share_T.new_empty(2, len(share_T))
    _cross_entropy[(len(share_T),)](
        logits_TV, targets_T, share_T, nll, z, logits_TV.shape[1], z_loss, BLOCK=8192, num_warps=8
    )
    return nll.sum(), z.sum(), logits_TV
