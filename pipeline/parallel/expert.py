"""Expert parallelism: every rank of a group holds its share of the experts, and rows travel to theirs and back.

T tokens · W width · E experts · K experts per token · N rows on this rank · M rows that arrived · P ranks of the group

Groups are of consecutive ranks, so that rows stay within a node where they can. Ranks that hold the same experts, one
in each group, reduce their gradients among themselves; DeepSpeed does it for layers that it takes for its own.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.module_inject import auto_ep_layer as announced
from deepspeed.utils import groups
from torch import Tensor, nn

from pipeline.model.moe import (
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
    """The dispatch that crosses ranks; `beside` runs while the rows travel. Experts that take any number of rows have
    their sizes exchanged first and read on the host, the one wait per layer. To those with a capacity that many travel
    always, and no host waits."""

    def __init__(self, group: dist.ProcessGroup, experts: int) -> None:
        self._group, self._ranks, self._experts = group, group.size(), experts

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(
        self, x_TW: Tensor, choice: Choice, run: RunExperts, beside: Callable[[], Tensor] | None
    ) -> Tensor:
        if choice.capacity is not None and choice.slots_TK is not None:
            return self._padded(
                x_TW, choice.weights_TK, choice.slots_TK.flatten(), choice.capacity, run, beside
            )
        order_N, home_N = sort_by_expert(choice.experts_TK)
        rows_NW = dispatch_rows(x_TW, order_N, home_N, choice.experts_TK.shape[1])
        load_E = choice.load_E.long()
        load_PE = torch.empty_like(load_E)  # what each rank sends to each of our experts
        dist.all_to_all_single(load_PE, load_E, group=self._group)
        load_PE = load_PE.view(self._ranks, -1)
        sent, arriving = torch.stack((load_E.view(self._ranks, -1).sum(1), load_PE.sum(1))).tolist()
        rows_MW, wait = _travel(rows_NW, arriving, sent, self._group)
        extra_TW = None if beside is None else beside()
        rows_MW = wait(rows_MW)
        # they lie by sender and then by expert; the experts want them by expert
        local = torch.arange(load_PE.shape[1], device=x_TW.device).repeat(self._ranks)
        by_expert, by_sender = sort_by_expert(
            local.repeat_interleave(load_PE.flatten(), output_size=sum(arriving))
        )
        done_MW = run(permute_rows(rows_MW, by_expert, by_sender), load_PE.sum(0))
        back_NW, wait = _travel(
            permute_rows(done_MW, by_sender, by_expert), sent, arriving, self._group
        )
        y_TW = combine_rows(wait(back_NW), order_N, home_N, choice.weights_TK)
        return y_TW if extra_TW is None else y_TW + extra_TW

    def _padded(
        self,
        x_TW: Tensor,
        weights_TK: Tensor,
        slots_N: Tensor,
        room: int,
        run: RunExperts,
        beside: Callable[[], Tensor] | None,
    ) -> Tensor:
        """By slots instead of rows: each expert has `room` of them for each rank, and some stay empty."""
        tokens, top_k = weights_TK.shape
        slots, share = self._experts * room, self._experts // self._ranks
        rows_S = slots_N.new_full((slots + 1,), tokens * top_k)
        rows_S = rows_S.scatter_(0, slots_N, torch.arange(tokens * top_k, device=x_TW.device))[
            :slots
        ]
        rows_NW = x_TW[:, None].expand(-1, top_k, -1).flatten(0, 1)
        sizes = [slots // self._ranks] * self._ranks
        there_SW, wait = _travel(move_rows(rows_NW, rows_S, slots_N), sizes, sizes, self._group)
        extra_TW = None if beside is None else beside()
        by_expert = wait(there_SW).view(self._ranks, share, room, -1).transpose(0, 1).flatten(0, 2)
        done_SW = run(by_expert, slots_N.new_full((share,), self._ranks * room))
        by_sender = done_SW.view(share, self._ranks, room, -1).transpose(0, 1).flatten(0, 2)
        back_SW, wait = _travel(by_sender, sizes, sizes, self._group)
        y_TKW = move_rows(wait(back_SW), slots_N, rows_S).view(tokens, top_k, -1)
        y_TW = (y_TKW * weights_TK.unsqueeze(-1)).sum(1).type_as(x_TW)
        return y_TW if extra_TW is None else y_TW + extra_TW


def _travel(
    x: Tensor, arriving: list[int], sent: list[int], group: dist.ProcessGroup
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Rows that are still on their way, and what waits for them: to be called on them before their first use."""
    there, home = _Exchange(arriving, sent, group), _Exchange(sent, arriving, group)
    rows: Tensor = _Begin.apply(x, there, home)  # type: ignore[no-untyped-call]
    return rows, lambda rows: _End.apply(rows, there, home)  # type: ignore[no-untyped-call]


class _Exchange:
    """Of rows among all ranks of a group: every one takes part, also one that has no row."""

    def __init__(self, arriving: list[int], sent: list[int], group: dist.ProcessGroup) -> None:
        self._arriving, self._sent, self._group = arriving, sent, group

    def begin(self, x: Tensor) -> Tensor:
        self._rows, self._out = x.contiguous(), x.new_empty(sum(self._arriving), x.shape[1])
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
    """The gradients travel the other way round: theirs begins where the rows' ends, so that what lies between, `beside`
    and its gradient, runs while either is on its way."""

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
        return (
            grads[0],
            None,
            None,
        )  # in place of those that begin to arrive: autograd wants as many


class _Announced(MixtureOfExperts, announced.AutoEPMoELayer):  # type: ignore[misc]
    """A routed layer that DeepSpeed takes for one of its own: it knows expert parameters by their layer's class alone,
    and reduces those of any other over the whole world, without a word."""

    def set_deepspeed_parallelism(self, *_args: object, **_kwargs: object) -> None:
        if self.ep_group_name not in groups._get_expert_parallel_group_dict():
            groups._create_expert_and_data_parallel(self.ep_size)
        self.dispatch = AllToAll(
            groups._get_expert_parallel_group(self.ep_group_name), self.router.cfg.experts
        )


def announce(model: nn.Module, ep: int) -> None:
    """Present the routed layers of a model, built with this rank's experts, to DeepSpeed (internals of 0.19.8)."""
    layers: list[Any] = [
        module for module in model.modules() if isinstance(module, MixtureOfExperts)
    ]
    name = f"ep_size_{ep}"
    for layer in layers:
        layer.__class__ = _Announced
        layer.num_experts, layer.ep_size, layer.ep_group_name = layer.router.cfg.experts, ep, name
        for stack in layer.experts.parameters():
            stack.allreduce, stack.group_name = False, name
            stack.ds_zero_placement_family, stack.ds_zero_partition_group_name = (
                "autoep_expert",
                name,
            )
