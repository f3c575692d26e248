"""Routed experts: a router in fp32, a dispatch of rows to experts, and grouped matmuls.

B batch · S sequence · T = B·S tokens · W width · E experts · K experts per token
N = T·K rows: each token has one row for each of its experts. order_N sorts the rows by expert, and
home_N is the inverse of order_N.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.config.parts import MoE
from pipeline.model.attention import Sequence
from pipeline.model.ffn import FeedForward, activate


class Routing(NamedTuple):
    """Losses and statistics of a routed layer. The decoder stacks those of all layers."""

    loss: Tensor  # weighted balance loss and z-loss
    load_E: Tensor  # number of rows that chose each expert
    dropped: Tensor  # share of rows that were dropped
    entropy: Tensor  # entropy of the router, mean over tokens, in nats


class Choice(NamedTuple):
    """The experts of every token. Slots exist only if experts have a capacity."""

    experts_TK: Tensor
    weights_TK: Tensor
    load_E: Tensor
    capacity: int | None = None  # the most rows of these tokens that one expert accepts
    # The row's slot among those of all experts: expert · capacity + place in the expert. A dropped
    # row has the slot after the last, experts · capacity.
    slots_TK: Tensor | None = None


# Rows sorted by expert, rows per expert → rows.
RunExperts = Callable[[Tensor, Tensor], Tensor]
# Computes the shared experts, while rows travel to routed experts; the result is added to theirs.
Beside = Callable[[], Tensor] | None
# Sends every token to its experts, runs them, and sums their weighted results.
Dispatch = Callable[[Tensor, Choice, RunExperts, Beside], Tensor]


def local_dispatch(x_TW: Tensor, choice: Choice, run: RunExperts, beside: Beside) -> Tensor:
    """The dispatch for a process that has every expert."""
    extra_TW = None if beside is None else beside()
    order_N, home_N = sort_by_expert(choice.experts_TK)
    rows_NW = dispatch_rows(x_TW, order_N, home_N, choice.experts_TK.shape[1])
    y_TW = combine_rows(run(rows_NW, choice.load_E), order_N, home_N, choice.weights_TK)
    return y_TW if extra_TW is None else y_TW + extra_TW


def sort_by_expert(experts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the stable order that sorts all rows by expert, and its inverse."""
    order_N = experts.flatten().argsort(stable=True)
    numbers_N = torch.arange(len(order_N), device=order_N.device)
    return order_N, torch.empty_like(order_N).scatter_(0, order_N, numbers_N)


def dispatch_rows(x_TW: Tensor, order_N: Tensor, home_N: Tensor, top_k: int) -> Tensor:
    """Return each token's row once per expert that it chose, sorted by expert."""
    rows_NW: Tensor = _Permute.apply(x_TW, order_N, home_N, top_k)  # type: ignore[no-untyped-call]
    return rows_NW


def combine_rows(y_NW: Tensor, order_N: Tensor, home_N: Tensor, weights_TK: Tensor) -> Tensor:
    """Return the weighted sum of each token's rows."""
    y_TKW = permute_rows(y_NW, home_N, order_N).view(*weights_TK.shape, -1)
    return (y_TKW * weights_TK.unsqueeze(-1)).sum(1).type_as(y_NW)


def permute_rows(x_NW: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
    """Return row order[n] at n."""
    y_NW: Tensor = _Permute.apply(x_NW, order_N, inverse_N, 1)  # type: ignore[no-untyped-call]
    return y_NW


def move_rows(x_NW: Tensor, order_M: Tensor, inverse_N: Tensor) -> Tensor:
    """Return row order[m] at m, or zeros if order[m] = N; `inverse` reverses the move."""
    y_MW: Tensor = _Move.apply(x_NW, order_M, inverse_N)  # type: ignore[no-untyped-call]
    return y_MW


# The backward passes of these two functions gather by the inverse order. Autograd's own backward of
# indexing adds rows with atomics, which is slow and has no fixed order.


class _Permute(torch.autograd.Function):
    """Permutes `copies` neighboring copies of each row, which need not exist in memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order_N: Tensor, inverse_N: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse_N)
        ctx.copies = copies
        return x[order_N if copies == 1 else order_N // copies]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse_N,) = ctx.saved_tensors
        grad_NW = grads[0][inverse_N]
        if ctx.copies > 1:
            grad_NW = grad_NW.view(-1, ctx.copies, grad_NW.shape[1]).sum(1)
        return grad_NW, None, None, None


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NW: Tensor, order_M: Tensor, inverse_N: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_N)
        return F.pad(x_NW, (0, 0, 0, 1))[order_M]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse_N,) = ctx.saved_tensors
        return F.pad(grads[0], (0, 0, 0, 1))[inverse_N], None, None


def _top_indices(scores_BSE: Tensor, top_k: int) -> Tensor:
    """Return the indices of the k best. For k ≤ 2, fused reductions are faster than topk."""
    if top_k > 2:
        return scores_BSE.topk(top_k, dim=-1, sorted=False).indices
    first = scores_BSE.argmax(-1, keepdim=True)
    if top_k == 1:
        return first
    second = scores_BSE.scatter(-1, first, float("-inf")).argmax(-1, keepdim=True)
    return torch.cat((first, second), dim=-1)


class Router(nn.Module):
    """Chooses the experts of every token and their weights, in fp32."""

    def __init__(self, width: int, cfg: MoE) -> None:
        super().__init__()
        self.cfg = cfg
        self.weight = nn.Parameter(torch.empty(cfg.experts, width))
        self.sequence = Sequence()
        # The balancing bias, counted in steps: casting the model to bf16 keeps integers exact.
        steps = torch.zeros(cfg.experts, dtype=torch.int32) if cfg.bias_step else None
        self.register_buffer("steps", steps)
        self.steps: Tensor | None

    def forward(self, x_BSW: Tensor) -> tuple[Choice, Routing]:
        c = self.cfg
        softmax = c.router == "softmax"
        # In fp32: with bf16 logits, equal scores would be common and choices arbitrary.
        logits_BSE = F.linear(x_BSW.float(), self.weight.float())
        scores_BSE = logits_BSE.softmax(-1) if softmax else logits_BSE.sigmoid()
        # The choice has no gradient; the weights below have one.
        experts_BSK = _top_indices(self._ranking(scores_BSE.detach()), c.top_k)
        weights_BSK = scores_BSE.gather(-1, experts_BSK)
        if c.normalize:
            weights_BSK = weights_BSK / (weights_BSK.sum(-1, keepdim=True) + 1e-20)
        experts_BN = experts_BSK.flatten(1)
        ones_BN = torch.ones_like(experts_BN, dtype=scores_BSE.dtype)
        load_BE = scores_BSE.new_zeros(len(experts_BN), c.experts)
        load_BE = load_BE.scatter_add(1, experts_BN, ones_BN)
        weights_TK = weights_BSK.flatten(0, 1) * c.scale
        choice = Choice(experts_BSK.flatten(0, 1), weights_TK, load_BE.sum(0))
        before_BE, whole_BE = self.sequence.counts(load_BE)
        dropped = logits_BSE.new_zeros(())
        if c.capacity is not None:
            capacity, slots_BN = self._slots(experts_BN, load_BE, before_BE, c.capacity)
            slots_TK = slots_BN.view_as(choice.experts_TK)
            kept_TK = slots_TK < c.experts * capacity
            weights_TK = choice.weights_TK * kept_TK
            choice = choice._replace(weights_TK=weights_TK, capacity=capacity, slots_TK=slots_TK)
            dropped = 1 - kept_TK.float().mean()
        chance_BSE = scores_BSE if softmax else scores_BSE / scores_BSE.sum(-1, keepdim=True)
        with torch.no_grad():
            entropy = -(chance_BSE * chance_BSE.clamp(min=1e-20).log()).sum(-1).mean()
        loss = self._loss(logits_BSE, chance_BSE, whole_BE)
        return choice, Routing(loss, choice.load_E, dropped, entropy)

    def _ranking(self, scores_BSE: Tensor) -> Tensor:
        """Return the scores by which experts are chosen: with the balancing bias, and only in the
        best groups. A group is ranked by its best expert under softmax (DeepSeek-V2) and by the
        sum of its best two under sigmoid (DeepSeek-V3)."""
        c = self.cfg
        if self.steps is not None:
            steps_E = self.steps.float()
            # The mean is subtracted, because only differences change the ranking.
            scores_BSE = scores_BSE + c.bias_step * (steps_E - steps_E.mean())
        if c.groups == 1:
            return scores_BSE
        grouped = scores_BSE.view(*scores_BSE.shape[:2], c.groups, -1)
        best = min(2 if c.router == "sigmoid" else 1, grouped.shape[-1])
        rank = grouped.topk(best, dim=-1).values.sum(-1)
        top = rank.topk(c.top_groups, dim=-1).indices
        chosen = torch.zeros_like(rank, dtype=torch.bool).scatter_(-1, top, True)
        return grouped.masked_fill(~chosen.unsqueeze(-1), float("-inf")).flatten(-2)

    def _slots(
        self, experts_BN: Tensor, load_BE: Tensor, before_BE: Tensor, capacity: float
    ) -> tuple[int, Tensor]:
        """Return the slots per expert, and the slot of each row (see `Choice`). An expert accepts
        the first rows of each sequence, so that every layout drops the same rows."""
        batch, rows = experts_BN.shape
        experts = self.cfg.experts
        device = experts_BN.device
        per_sequence = math.ceil(capacity * rows * self.sequence.parts / experts)
        sequence_B = torch.arange(batch, device=device)[:, None]
        # The place of a row is its rank among the rows of the same sequence and expert.
        key = (experts_BN + experts * sequence_B).flatten()
        order, home = sort_by_expert(key)
        load = load_BE.flatten()
        before = before_BE.expand_as(load_BE).flatten()
        first = load.cumsum(0) - load - before  # row at which each expert's place 0 would be
        place = torch.arange(len(key), device=device) - first[key[order]]
        place_BN = place.long()[home].view_as(experts_BN)
        slots = batch * per_sequence
        slots_BN = experts_BN * slots + sequence_B * per_sequence + place_BN
        return slots, torch.where(place_BN < per_sequence, slots_BN, experts * slots)

    def _loss(self, logits_BSE: Tensor, chance_BSE: Tensor, load_BE: Tensor) -> Tensor:
        """Return the z-loss and Switch's balance losses, over the micro-batch and within sequences.
        A balance loss is 1, before its weight, if all experts have the same load."""
        c = self.cfg
        loss = logits_BSE.new_zeros(())
        share_BE = load_BE * (c.experts / (logits_BSE.shape[1] * self.sequence.parts * c.top_k))
        mean_BE = chance_BSE.mean(1)
        if c.aux_loss:
            loss = loss + c.aux_loss * (share_BE.mean(0) * mean_BE.mean(0)).sum()
        if c.seq_aux_loss:
            loss = loss + c.seq_aux_loss * (share_BE * mean_BE).sum(-1).mean()
        if c.z_loss:
            loss = loss + c.z_loss * logits_BSE.logsumexp(-1).square().mean()
        return loss

    @torch.no_grad()
    def balance(self, load_E: Tensor) -> None:
        """Favor experts that got less than their share of the batch (arXiv 2408.15664)."""
        if self.steps is not None:
            self.steps += torch.sign(load_E.mean() - load_E).to(self.steps.dtype)


class Experts(nn.Module):
    """The stacked weights of `count` experts, beginning with expert number `first`."""

    def __init__(self, width: int, cfg: MoE, first: int, count: int) -> None:
        super().__init__()
        self.activation = cfg.activation
        self.up = nn.Parameter(torch.empty(count, width, cfg.hidden * (2 if cfg.gated else 1)))
        self.out = nn.Parameter(torch.empty(count, cfg.hidden, width))
        for stack in (self.up, self.out):
            # Checkpoints store each expert under its own key.
            stack.expert = (first, cfg.experts)  # type: ignore[attr-defined]

    def forward(self, rows_NW: Tensor, load_E: Tensor) -> Tensor:
        ends_E = load_E.cumsum(0).to(torch.int32)
        hidden = activate(F.grouped_mm(rows_NW, self.up, offs=ends_E), self.activation)
        return F.grouped_mm(hidden, self.out, offs=ends_E)


class MixtureOfExperts(nn.Module):
    """A routed feed-forward layer. `experts` are those that this process holds."""

    def __init__(self, width: int, cfg: MoE, experts: range) -> None:
        super().__init__()
        self.router = Router(width, cfg)
        self.experts = Experts(width, cfg, experts.start, len(experts))
        # Shared experts are one wider layer: the same result in fewer matmuls.
        hidden = cfg.shared * cfg.hidden
        self.shared = FeedForward(width, hidden, cfg.activation) if cfg.shared else None
        self.dispatch: Dispatch = local_dispatch  # parallel/expert.py replaces this function

    def forward(self, x_BSW: Tensor) -> tuple[Tensor, Routing]:
        choice, routing = self.router(x_BSW)
        x_TW = x_BSW.flatten(0, 1)
        shared = self.shared
        beside = None if shared is None else lambda: shared(x_TW)
        return self.dispatch(x_TW, choice, self.experts, beside).view_as(x_BSW), routing
