"""Sequence parallelism (Ulysses, arXiv 2309.14509): each rank has a part of each row's tokens.

B batch · H query heads · G key/value heads · S sequence · D width · P ranks of the group

Attention needs every token, but computes each head separately. An all-to-all before attention gives
each rank all tokens for its share of the heads, and one after it reverses that. For ZeRO these are
ordinary data-parallel ranks: each rank's loss is its part of the rows' mean, times P.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from pipeline.model.attention import Sequence


class SharedSequence(Sequence):
    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = group.rank()
        self.parts = group.size()

    def counts(self, count: Tensor) -> tuple[Tensor, Tensor]:
        counts = count.new_empty(self.parts, *count.shape)
        dist.all_gather_into_tensor(counts.flatten(0, 1), count.contiguous(), self._group)
        return counts[: self.rank].sum(0), counts.sum(0)

    def to_heads(
        self, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        kv_heads = k_BGKD.shape[1]
        # With fewer key/value heads than ranks, several ranks get the same head.
        copies = math.lcm(kv_heads, self.parts) // kv_heads
        if copies > 1:
            k_BGKD = k_BGKD.repeat_interleave(copies, 1)
            v_BGKE = v_BGKE.repeat_interleave(copies, 1)
        q, k, v = (self._swap(t, give=1, take=2) for t in (q_BHQD, k_BGKD, v_BGKE))
        return q, k, v

    def to_tokens(self, y_BHQE: Tensor) -> Tensor:
        return self._swap(y_BHQE, give=2, take=1)

    def _swap(self, x: Tensor, give: int, take: int) -> Tensor:
        """Keep this rank's share of dimension `give`, and collect all of dimension `take`."""
        parts = torch.stack(x.chunk(self.parts, give))
        return torch.cat(all_to_all_single_autograd(parts, None, None, self._group).unbind(), take)


def share_sequences(model: nn.Module, sp: int) -> None:
    """Replace the `Sequence` of every module, which works on whole rows; every rank calls this."""
    # Consecutive ranks, so that heads travel within a node where possible.
    group, _ = dist.new_subgroups(sp)  # type: ignore[no-untyped-call]
    sequence = SharedSequence(group)
    for module in model.modules():
        if hasattr(module, "sequence"):
            module.sequence = sequence  # type: ignore[assignment]
