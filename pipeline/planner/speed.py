"""How long a step takes in a layout, on paper: bytes that travel, and the seconds they cost.

Compute is five parts, each at a rate of configs/cluster: matmuls, routed matmuls and attention by their FLOPs, what
happens between them by the bytes that autograd keeps, the optimizer's update by those of its states (all of account).
Communication is counted exactly, as bytes that a rank sends in a step; a ring leaves a node over all its links at once,
an all-to-all of experts over each GPU's own. ZeRO's collectives run beside the compute, those of experts make it wait.
Tensor and pipeline parallelism do not exist here. docs/SCALE.md holds all this against published runs.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from pipeline.config.parts import GQA, Dtype, MoE, Recompute
from pipeline.config.schema import Cluster, Rates, RunConfig
from pipeline.config.shape import Model
from pipeline.planner import count as account
from pipeline.planner.memory import USABLE, Layout, Memory, memory, model_memory

# HOP_S and EXPOSED are fitted to 117 published dense runs together with the rates of configs/cluster; those before them
# are measured on one H200: a compiled 1.1B model, micro-batches of 8 × 2048 (docs/LOG.md).
TOUCHES = 5  # passes over the kept activations: written, read, their gradients too, and one more: 13% of the step
BLOCK_S = 2e-4  # that the device waits per block and micro-batch: 1.6% of the step
UPDATE_BYTES = 36  # moved per parameter by norm, AdamW and cast: 10 ms
HOP_S = 8e-6  # of a ring, per collective and rank it passes
EXPOSED = 0.5  # of the shorter of compute and collectives: what runs beside the other slows it
ERROR = 0.2  # of a dense step's time, and of a routed one's twice that: docs/SCALE.md


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank sends in a step."""

    gradients: int
    weights: int
    tokens: int  # to experts and back
    heads: int  # to ranks that share a sequence, and back

    @property
    def total(self) -> int:
        return self.gradients + self.weights + self.tokens + self.heads


@dataclass(frozen=True, slots=True)
class Estimate:
    layout: Layout
    memory: Memory
    traffic: Traffic
    compute_s: float
    collectives_s: float
    exchanges_s: float  # of tokens and heads
    step_s: float
    tokens_s: float  # of all ranks
    mfu: float
    gpu_hours: float  # of the whole run
    fits: bool
    error: float  # to expect of step_s, either way


def traffic(model: Model, layout: Layout, *, dtype: Dtype, micros: int) -> Traffic:
    """ZeRO 0 all-reduces gradients once a step; 1 scatters them and gathers weights; 2 scatters after each micro-batch;
    3 gathers the weights there too, twice. A token goes to its experts and home, its gradient likewise; ranks that
    share a sequence swap tokens for heads before attention, and back."""
    size, total = account.BYTES[dtype], 0
    for held, ranks in _groups(model, layout):
        total += size * held * (ranks - 1) // ranks
    each = micros * layout.micro_batch * model.seq // layout.sp
    trips = each * (
        6 if layout.recompute else 4
    )  # selective too: the feed-forward is what it repeats
    tokens = trips * _rows_bytes(model, size) * (layout.ep - 1) // layout.ep
    swaps = each * (3 if layout.recompute is True else 2)
    heads = swaps * _heads_bytes(model, layout.sp, size) * (layout.sp - 1) // layout.sp
    gradients = (2, 1, micros, micros)[layout.zero]
    weights = (0, 1, 1, 2 * micros)[layout.zero]
    return Traffic(gradients * total, weights * total, tokens, heads)


def estimate(config: RunConfig, layout: Layout) -> Estimate:
    """One step of a resolved config in a layout, on a cluster whose rates are known."""
    model, train, rates, peak = (
        config.model,
        config.train,
        config.cluster.rates,
        config.cluster.peak_flops,
    )
    dtype, batch = train.dtype, train.batch_tokens
    assert dtype != "auto" and batch != "auto" and train.steps, "resolve the recipe first"
    assert rates is not None and peak is not None, "the cluster gives no rates"
    assert train.loss_chunk != "auto", "resolve the recipe first"
    micros = batch * layout.sp // (model.seq * layout.micro_batch * layout.ranks)
    sent = traffic(model, layout, dtype=dtype, micros=micros)
    compute = (
        batch // layout.ranks * _token_s(model, layout.recompute, dtype, peak, rates)
        + micros * len(_blocks(model)) * BLOCK_S
        + _update_s(model, layout, rates)
    )
    collectives = _collectives_s(config.cluster, rates, model, layout, sent, micros)
    exchanges = _exchange_s(config.cluster, rates, layout.ep, sent.tokens)
    exchanges += _exchange_s(config.cluster, rates, layout.sp, sent.heads)
    step = max(compute, collectives) + EXPOSED * min(compute, collectives) + exchanges
    held = memory(config, layout)
    return Estimate(
        layout=layout,
        memory=held,
        traffic=sent,
        compute_s=compute,
        collectives_s=collectives,
        exchanges_s=exchanges,
        step_s=step,
        tokens_s=batch / step,
        mfu=account.flops_per_token(model).model * batch / step / layout.ranks / peak,
        gpu_hours=train.steps * step * layout.ranks / 3600,
        fits=config.cluster.memory_bytes is None
        or held.total <= USABLE * config.cluster.memory_bytes,
        error=ERROR * (2 if layout.ep > 1 else 1),
    )


_count = lru_cache(account.params)  # a plan asks hundreds of times


def _groups(model: Model, layout: Layout) -> Iterator[tuple[int, int]]:
    """Parameters that a rank answers for, and the ranks it shares them with: the experts' share is smaller by ep."""
    count = _count(model)
    yield count.total - count.experts, layout.ranks
    if count.experts:
        yield count.experts // layout.ep, layout.ranks // layout.ep


def _blocks(model: Model) -> list[int]:
    return [*range(model.layers), *[model.layers - 1] * model.mtp]


def _rows_bytes(model: Model, size: int) -> int:
    """Of one token on its way to its experts, all routed layers together."""
    if not isinstance(model.ffn, MoE):
        return 0
    slots = model.ffn.top_k * (model.ffn.capacity or 1)  # those of a capacity travel empty too
    return int(sum(map(model.routed, _blocks(model))) * slots * model.width * size)


def _heads_bytes(model: Model, sp: int, size: int) -> int:
    """Of one token's queries, keys, values and what comes of them, all layers together."""
    a = model.attention
    kv_heads = (
        math.lcm(a.kv_heads, sp) if isinstance(a, GQA) else a.heads
    )  # of too few, several ranks have the same
    return len(_blocks(model)) * (a.heads + kv_heads) * (a.score_dim + a.value_dim) * size


@lru_cache
def _token_s(model: Model, recompute: Recompute, dtype: Dtype, peak: float, rates: Rates) -> float:
    flops = account.flops_per_token(model, recompute=recompute)
    routed = 0
    if isinstance(model.ffn, MoE):
        routed = 6 * _count(model).experts * model.ffn.top_k // model.ffn.experts
    kept = (
        model_memory(model, dtype=dtype, zero=3, ranks=1, micro_batch=1, loss_chunk=1).activations
        / model.seq
    )
    again = flops.hardware / flops.model
    matmul = (flops.matmul - routed) / rates.matmul_share + routed / rates.expert_share
    arithmetic = (matmul + flops.attention / rates.attention_share) / peak
    passes = (
        TOUCHES * {False: 1, "selective": 1.2, True: 1.4}[recompute]
    )  # the forward's two of five once more
    return again * arithmetic + passes * kept / rates.hbm_bytes_s


def _update_s(model: Model, layout: Layout, rates: Rates) -> float:
    held = sum(of // (ranks if layout.zero else 1) for of, ranks in _groups(model, layout))
    return UPDATE_BYTES * held / rates.hbm_bytes_s


def _collectives_s(
    cluster: Cluster, rates: Rates, model: Model, layout: Layout, sent: Traffic, micros: int
) -> float:
    """The bytes of each group at what its ring reaches, and a latency for every collective it takes."""
    groups = [(held * (ranks - 1) / ranks, ranks) for held, ranks in _groups(model, layout)]
    whole = sum(share for share, _ in groups) or 1
    count = (1, 2, 1 + micros, 3 * micros * len(_blocks(model)))[layout.zero]
    time = 0.0
    for index, (share, ranks) in enumerate(groups):
        near = cluster.gpus_per_node if index == 0 else max(1, cluster.gpus_per_node // layout.ep)
        inside = layout.ranks <= cluster.gpus_per_node
        rate = (
            rates.intra_bytes_s if inside else min(rates.intra_bytes_s, near * rates.inter_bytes_s)
        )
        time += (sent.gradients + sent.weights) * share / whole / rate + HOP_S * count * (ranks - 1)
    return time


def _exchange_s(cluster: Cluster, rates: Rates, ranks: int, sent: int) -> float:
    """An all-to-all: what stays in the node and what leaves it travel at once."""
    near = min(ranks, cluster.gpus_per_node)
    away = (ranks - near) / max(1, ranks - 1)
    return sent * max((1 - away) / rates.intra_bytes_s, away / rates.inter_bytes_s)
