"""Expert parallelism: each rank of a group has some of the experts; rows are sent there and back.

T tokens · W width · E experts · K experts per token · N rows on this rank · M rows that arrived
P ranks of the group · S slots

Groups consist of consecutive ranks, so that rows stay within a node where possible. Ranks with the
same experts, one in each group, reduce their gradients among themselves. DeepSpeed does this for
layers that it recognizes as its own.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.module_inject import auto_ep_layer
from deepspeed.utils import groups
from torch import Tensor, nn

from pipeline.model.moe import (
    Beside,
    Choice,
    MixtureOfExperts,
    RunExperts,
    combine_rows,
    dispatch_rows,
    move_rows,
    permute_rows,
    sort_by_expert,
)


class AllToAll:
    """Sends rows to the ranks of their experts and back; `beside` runs during the exchange.

    Dropless experts accept any number of rows: the counts are exchanged first and read on the
    host, which waits for the device once per layer. Experts with a capacity always get that many
    rows, and the host never waits."""

    def __init__(self, group: dist.ProcessGroup, experts: int) -> None:
        self._group = group
        self._ranks = group.size()
        self._experts = experts

    # One graph break around the layer's exchange, instead of one at every host read.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, x_TW: Tensor, choice: Choice, run: RunExperts, beside: Beside) -> Tensor:
        if choice.capacity is not None and choice.slots_TK is not None:
            slots_N = choice.slots_TK.flatten()
            return self._padded(x_TW, choice.weights_TK, slots_N, choice.capacity, run, beside)
        order_N, home_N = sort_by_expert(choice.experts_TK)
        rows_NW = dispatch_rows(x_TW, order_N, home_N, choice.experts_TK.shape[1])
        # Each rank first learns how many rows will arrive for each of its experts.
        load_E = choice.load_E.long()
        load_PE = torch.empty_like(load_E)  # rows that each rank sends to each local expert
        dist.all_to_all_single(load_PE, load_E, group=self._group)
        # `tolist` waits for the device: an exchange of rows needs its sizes on the host.
        load_PE = load_PE.view(self._ranks, -1)
        sent, arriving = torch.stack((load_E.view(self._ranks, -1).sum(1), load_PE.sum(1))).tolist()
        rows_MW, wait = _exchange(rows_NW, arriving, sent, self._group)
        extra_TW = None if beside is None else beside()
        rows_MW = wait(rows_MW)
        # The rows arrive ordered by sender, then by expert. The experts need them by expert.
        local = torch.arange(load_PE.shape[1], device=x_TW.device).repeat(self._ranks)
        by_expert, by_sender = sort_by_expert(
            local.repeat_interleave(load_PE.flatten(), output_size=sum(arriving))
        )
        # Run the local experts, then send the rows back the way they came.
        done_MW = run(permute_rows(rows_MW, by_expert, by_sender), load_PE.sum(0))
        done_MW = permute_rows(done_MW, by_sender, by_expert)
        back_NW, wait = _exchange(done_MW, sent, arriving, self._group)
        y_TW = combine_rows(wait(back_NW), order_N, home_N, choice.weights_TK)
        return y_TW if extra_TW is None else y_TW + extra_TW

    def _padded(
        self,
        x_TW: Tensor,
        weights_TK: Tensor,
        slots_N: Tensor,
        capacity: int,
        run: RunExperts,
        beside: Beside,
    ) -> Tensor:
        """Exchange slots, not rows: each expert has `capacity` of them per rank, some empty."""
        tokens, top_k = weights_TK.shape
        slots = self._experts * capacity
        share = self._experts // self._ranks
        # The row in each slot. One past the last row marks an empty slot, which travels as zeros.
        rows_S = slots_N.new_full((slots + 1,), tokens * top_k)
        numbers_N = torch.arange(tokens * top_k, device=x_TW.device)
        rows_S = rows_S.scatter_(0, slots_N, numbers_N)[:slots]  # the last slot is for dropped rows
        rows_NW = x_TW[:, None].expand(-1, top_k, -1).flatten(0, 1)
        sizes = [slots // self._ranks] * self._ranks
        there_SW, wait = _exchange(move_rows(rows_NW, rows_S, slots_N), sizes, sizes, self._group)
        extra_TW = None if beside is None else beside()
        # From (sender, expert, slot) to (expert, sender, slot), as the grouped matmul needs them.
        by_expert = (
            wait(there_SW).view(self._ranks, share, capacity, -1).transpose(0, 1).flatten(0, 2)
        )
        done_SW = run(by_expert, slots_N.new_full((share,), self._ranks * capacity))
        by_sender = done_SW.view(share, self._ranks, capacity, -1).transpose(0, 1).flatten(0, 2)
        back_SW, wait = _exchange(by_sender, sizes, sizes, self._group)
        y_TKW = move_rows(wait(back_SW), slots_N, rows_S).view(tokens, top_k, -1)
        y_TW = (y_TKW * weights_TK.unsqueeze(-1)).sum(1).type_as(x_TW)
        return y_TW if extra_TW is None else y_TW + extra_TW


def _exchange(
    x: Tensor, arriving: list[int], sent: list[int], group: dist.ProcessGroup
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Start an exchange of rows; return them, and a function that waits until they are valid."""
    there = _Exchange(arriving, sent, group)
    home = _Exchange(sent, arriving, group)
    rows: Tensor = _Begin.apply(x, there, home)  # type: ignore[no-untyped-call]
    return rows, lambda rows: _End.apply(rows, there, home)  # type: ignore[no-untyped-call]


class _Exchange:
    """One all-to-all of rows. Every rank takes part, also one without rows."""

    def __init__(self, arriving: list[int], sent: list[int], group: dist.ProcessGroup) -> None:
        self._arriving = arriving
        self._sent = sent
        self._group = group

    def begin(self, x: Tensor) -> Tensor:
        # Kept until `end`: the exchange reads and writes them in the background.
        self._rows = x.contiguous()
        self._out = x.new_empty(sum(self._arriving), x.shape[1])
        self._work = dist.all_to_all_single(
            self._out, self._rows, self._arriving, self._sent, group=self._group, async_op=True
        )
        return self._out

    def end(self) -> Tensor:
        self._work.wait()
        out = self._out
        del self._work, self._rows, self._out
        return out


class _Begin(torch.autograd.Function):
    """Starts the exchange of the rows; its backward pass waits for the exchange of their gradients.

    Gradients are sent in the other direction: `_End`'s backward pass starts their exchange. The
    operations between the two, `beside` and its gradient, run during the exchanges."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: _Exchange, home: _Exchange) -> Tensor:
        ctx.home = home
        return there.begin(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.home.end(), None, None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: _Exchange, home: _Exchange) -> Tensor:
        ctx.home = home
        there.end()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.home.begin(grads[0])
        # A placeholder of the shape that autograd expects; `_Begin` returns the real gradient.
        return grads[0], None, None


class _AnnouncedLayer(MixtureOfExperts, auto_ep_layer.AutoEPMoELayer):  # type: ignore[misc]
    """A routed layer that DeepSpeed recognizes.

    DeepSpeed identifies expert parameters only by the class of their layer. The gradients of other
    classes are reduced over the whole world, without an error."""

    def set_deepspeed_parallelism(self, *_args: object, **_kwargs: object) -> None:
        # DeepSpeed calls this for every layer. The groups are created once.
        if self.ep_group_name not in groups._get_expert_parallel_group_dict():
            groups._create_expert_and_data_parallel(self.ep_size)
        group = groups._get_expert_parallel_group(self.ep_group_name)
        self.dispatch = AllToAll(group, self.router.cfg.experts)


def announce(model: nn.Module, ep: int) -> None:
    """Present the routed layers of a rank's model to DeepSpeed (internals of version 0.19.8)."""
    name = f"ep_size_{ep}"
    for layer in model.modules():
        if not isinstance(layer, MixtureOfExperts):
            continue
        announced: Any = layer
        announced.__class__ = _AnnouncedLayer
        announced.num_experts = layer.router.cfg.experts
        announced.ep_size = ep
        announced.ep_group_name = name
        for parameter in announced.experts.parameters():
            # Reduce over the ranks with the same experts, not over the world.
            parameter.allreduce = False
            parameter.group_name = name
            parameter.ds_zero_placement_family = "autoep_expert"
            parameter.ds_zero_partition_group_name = name
