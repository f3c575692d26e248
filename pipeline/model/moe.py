"""Routed experts: a router in fp32, experts as one grouped matmul over rows sorted by expert, and the dispatch between.

B batch · S sequence · T = B·S tokens · W width · E experts · K experts per token · N = T·K rows
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.config.parts import MoE
from pipeline.model.attention import Sequence
from pipeline.model.ffn import FeedForward, activate


class Routing(NamedTuple):
    """What a routed layer says of itself beside its output; the decoder stacks the layers' into one."""

    loss: Tensor  # balance and z terms, weighted
    load_E: Tensor  # rows that chose each expert
    dropped: Tensor  # share of rows
    entropy: Tensor  # of the router, mean over tokens, in nats


class Choice(NamedTuple):
    experts_TK: Tensor
    weights_TK: Tensor
    load_E: Tensor
    capacity: int | None = (
        None  # the most rows of these tokens that one expert takes: where they have a capacity
    )
    slots_TK: Tensor | None = (
        None  # expert · room + the place there, or experts · room where there is none left
    )


RunExperts = Callable[[Tensor, Tensor], Tensor]  # rows sorted by expert, rows per expert → rows


class Dispatch(Protocol):
    """Carry every token to its experts, run them, bring the answers home and sum them by weight. `beside` is work that
    needs no expert and can run while rows travel; its result is added."""

    def __call__(
        self, x_TW: Tensor, choice: Choice, run: RunExperts, beside: Callable[[], Tensor] | None
    ) -> Tensor: ...


def local_dispatch(
    x_TW: Tensor, choice: Choice, run: RunExperts, beside: Callable[[], Tensor] | None
) -> Tensor:
    extra_TW = None if beside is None else beside()
    order_N, home_N = sort_by_expert(choice.experts_TK)
    rows_NW = dispatch_rows(x_TW, order_N, home_N, choice.experts_TK.shape[1])
    y_TW = combine_rows(run(rows_NW, choice.load_E), order_N, home_N, choice.weights_TK)
    return y_TW if extra_TW is None else y_TW + extra_TW


def sort_by_expert(experts: Tensor) -> tuple[Tensor, Tensor]:
    """The order that sorts the T·K rows by expert, tokens in order within each, and its inverse."""
    order_N = experts.flatten().argsort(stable=True)
    home_N = torch.empty_like(order_N).scatter_(
        0, order_N, torch.arange(len(order_N), device=order_N.device)
    )
    return order_N, home_N


def dispatch_rows(x_TW: Tensor, order_N: Tensor, home_N: Tensor, top_k: int) -> Tensor:
    """Each token's row once per expert it chose, sorted."""
    rows: Tensor = _Spread.apply(x_TW, order_N, home_N, top_k)  # type: ignore[no-untyped-call]
    return rows


def combine_rows(y_NW: Tensor, order_N: Tensor, home_N: Tensor, weights_TK: Tensor) -> Tensor:
    """Rows back at their tokens, summed by weight."""
    y_TKW = permute_rows(y_NW, home_N, order_N).view(*weights_TK.shape, -1)
    return (y_TKW * weights_TK.unsqueeze(-1)).sum(1).type_as(y_NW)


def permute_rows(x_NW: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
    y: Tensor = _Permute.apply(x_NW, order_N, inverse_N)  # type: ignore[no-untyped-call]
    return y


class _Spread(torch.autograd.Function):
    """Autograd's own backward of indexing adds rows by atomics, slowly and in any order; the inverse order gathers."""

    @staticmethod
    def forward(ctx: Any, x_TW: Tensor, order_N: Tensor, home_N: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(home_N)
        ctx.top_k = top_k
        return x_TW[order_N // top_k]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (home_N,) = ctx.saved_tensors
        return grads[0][home_N].view(-1, ctx.top_k, grads[0].shape[1]).sum(1), None, None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NW: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_N)
        return x_NW[order_N]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse_N,) = ctx.saved_tensors
        return grads[0][inverse_N], None, None


def move_rows(x_NW: Tensor, order_M: Tensor, inverse_N: Tensor) -> Tensor:
    """Row order[m] at m, and nothing where that lies behind the last; `inverse` leads back."""
    y: Tensor = _Move.apply(x_NW, order_M, inverse_N)  # type: ignore[no-untyped-call]
    return y


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NW: Tensor, order_M: Tensor, inverse_N: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_N)
        return F.pad(x_NW, (0, 0, 0, 1))[order_M]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse_N,) = ctx.saved_tensors
        return F.pad(grads[0], (0, 0, 0, 1))[inverse_N], None, None


def _best(scores_BSE: Tensor, top_k: int) -> Tensor:
    """Indices of the k best. For one or two of them reductions that the compiler fuses beat torch's topk by far."""
    if top_k > 2:
        return scores_BSE.topk(top_k, dim=-1, sorted=False).indices
    first = scores_BSE.argmax(-1, keepdim=True)
    if top_k == 1:
        return first
    return torch.cat(
        (first, scores_BSE.scatter(-1, first, float("-inf")).argmax(-1, keepdim=True)), dim=-1
    )


class Router(nn.Module):
    def __init__(self, width: int, cfg: MoE) -> None:
        super().__init__()
        self.cfg, self.weight = cfg, nn.Parameter(torch.empty(cfg.experts, width))
        self.sequence = Sequence()
        # the balancing bias as a whole number of steps: exact, and no cast to bf16 can blur it
        self.register_buffer(
            "steps", torch.zeros(cfg.experts, dtype=torch.int32) if cfg.bias_step else None
        )
        self.steps: Tensor | None

    def forward(self, x_BSW: Tensor) -> tuple[Choice, Routing]:
        c = self.cfg
        logits_BSE = F.linear(x_BSW.float(), self.weight.float())
        scores_BSE = logits_BSE.softmax(-1) if c.router == "softmax" else logits_BSE.sigmoid()
        experts_BSK = _best(self._choose(scores_BSE.detach()), c.top_k)
        weights_BSK = scores_BSE.gather(-1, experts_BSK)
        if c.normalise:
            weights_BSK = weights_BSK / (weights_BSK.sum(-1, keepdim=True) + 1e-20)
        experts_BN = experts_BSK.flatten(1)
        load_BE = scores_BSE.new_zeros(len(experts_BN), c.experts)
        load_BE = load_BE.scatter_add(
            1, experts_BN, torch.ones_like(experts_BN, dtype=load_BE.dtype)
        )
        choice = Choice(
            experts_BSK.flatten(0, 1), weights_BSK.flatten(0, 1) * c.scale, load_BE.sum(0)
        )
        before_BE, whole_BE = self.sequence.counts(load_BE)
        dropped = logits_BSE.new_zeros(())
        if c.capacity is not None:
            room, slots_TK = self._slots(experts_BN, load_BE, before_BE, c.capacity)
            slots_TK = slots_TK.view_as(choice.experts_TK)
            kept_TK = slots_TK < c.experts * room
            choice = choice._replace(
                weights_TK=choice.weights_TK * kept_TK, capacity=room, slots_TK=slots_TK
            )
            dropped = 1 - kept_TK.float().mean()
        probability_BSE = (
            scores_BSE if c.router == "softmax" else scores_BSE / scores_BSE.sum(-1, keepdim=True)
        )
        with torch.no_grad():
            entropy = -(probability_BSE * probability_BSE.clamp(min=1e-20).log()).sum(-1).mean()
        loss = self._loss(logits_BSE, probability_BSE, whole_BE)
        return choice, Routing(loss, choice.load_E, dropped, entropy)

    def _choose(self, scores_BSE: Tensor) -> Tensor:
        """What the choice goes by: scores with the balancing bias, and only in the best groups. Groups are ranked by
        their best expert under softmax (DeepSeek-V2) and by their best two under sigmoid (DeepSeek-V3)."""
        c = self.cfg
        if self.steps is not None:
            steps = self.steps.float()
            scores_BSE = scores_BSE + c.bias_step * (
                steps - steps.mean()
            )  # zero-mean: it ranks, it does not add
        if c.groups == 1:
            return scores_BSE
        grouped = scores_BSE.view(*scores_BSE.shape[:2], c.groups, -1)
        best = grouped.topk(
            min(2 if c.router == "sigmoid" else 1, grouped.shape[-1]), dim=-1
        ).values.sum(-1)
        chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(
            -1, best.topk(c.top_groups, dim=-1).indices, True
        )
        return grouped.masked_fill(~chosen.unsqueeze(-1), float("-inf")).flatten(-2)

    def _slots(
        self, experts_BN: Tensor, load_BE: Tensor, before_BE: Tensor, capacity: float
    ) -> tuple[int, Tensor]:
        """What an expert has room for: the first rows of each sequence, so that no layout changes what is dropped."""
        (batch, rows), experts, device = experts_BN.shape, self.cfg.experts, experts_BN.device
        most = math.ceil(capacity * rows * self.sequence.parts / experts)
        sequence_B = torch.arange(batch, device=device)[:, None]
        key = (experts_BN + experts * sequence_B).flatten()
        order, home = sort_by_expert(key)
        load, before = load_BE.flatten(), before_BE.expand_as(load_BE).flatten()
        place = torch.arange(len(key), device=device) - (load.cumsum(0) - load - before)[key[order]]
        place_BN = place.long()[home].view_as(experts_BN)
        room = batch * most
        slots_BN = experts_BN * room + sequence_B * most + place_BN
        return room, torch.where(place_BN < most, slots_BN, experts * room)

    def _loss(self, logits_BSE: Tensor, probability_BSE: Tensor, load_BE: Tensor) -> Tensor:
        """Switch's balance loss, 1 at perfect balance, over the micro-batch and within sequences, and the z loss."""
        c, loss = self.cfg, logits_BSE.new_zeros(())
        share_BE = load_BE * (c.experts / (logits_BSE.shape[1] * self.sequence.parts * c.top_k))
        mean_BE = probability_BSE.mean(1)
        if c.aux_loss:
            loss = loss + c.aux_loss * (share_BE.mean(0) * mean_BE.mean(0)).sum()
        if c.seq_aux_loss:
            loss = loss + c.seq_aux_loss * (share_BE * mean_BE).sum(-1).mean()
        if c.z_loss:
            loss = loss + c.z_loss * logits_BSE.logsumexp(-1).square().mean()
        return loss

    @torch.no_grad()
    def balance(self, load_E: Tensor) -> None:
        """One step towards the experts that got less than their share (arXiv 2408.15664); the whole batch's load."""
        if self.steps is not None:
            self.steps += torch.sign(load_E.mean() - load_E).to(self.steps.dtype)


class Experts(nn.Module):
    """The weights of experts `first` to `first + count` of all, stacked."""

    def __init__(self, width: int, cfg: MoE, first: int, count: int) -> None:
        super().__init__()
        self.activation, self.first = cfg.activation, first
        self.up = nn.Parameter(torch.empty(count, width, cfg.hidden * (2 if cfg.gated else 1)))
        self.out = nn.Parameter(torch.empty(count, cfg.hidden, width))
        for stack in (self.up, self.out):
            stack.expert = (first, cfg.experts)  # type: ignore[attr-defined]  # a checkpoint keys each expert by itself

    def forward(self, rows_NW: Tensor, load_E: Tensor) -> Tensor:
        ends_E = load_E.cumsum(0).to(torch.int32)
        hidden = activate(F.grouped_mm(rows_NW, self.up, offs=ends_E), self.activation)
        return F.grouped_mm(hidden, self.out, offs=ends_E)


class MixtureOfExperts(nn.Module):
    def __init__(self, width: int, cfg: MoE, experts: range) -> None:
        super().__init__()
        self.router = Router(width, cfg)
        self.experts = Experts(width, cfg, experts.start, len(experts))
        self.shared = (
            FeedForward(width, cfg.shared * cfg.hidden, cfg.activation) if cfg.shared else None
        )
        self.dispatch: Dispatch = (
            local_dispatch  # parallel/expert.py swaps in one that crosses ranks
        )

    def forward(self, x_BSW: Tensor) -> tuple[Tensor, Routing]:
        choice, routing = self.router(x_BSW)
        x_TW, shared = x_BSW.flatten(0, 1), self.shared
        beside = None if shared is None else lambda: shared(x_TW)
        return self.dispatch(x_TW, choice, self.experts, beside).view_as(x_BSW), routing
