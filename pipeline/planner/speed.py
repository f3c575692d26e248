"""Predict the step time of a layout, and find the fastest layout.

Compute has five parts, each with a rate from configs/cluster: matmuls, expert matmuls and attention
by their FLOPs, all other operations by the bytes that autograd keeps, and the update by the
optimizer's bytes. Communication is counted as the bytes that one rank sends in a step. A ring uses
all links of a node at once; an all-to-all of experts uses each GPU's own link. ZeRO's collectives
overlap with compute, all-to-alls do not. docs/SCALE.md has a comparison with published runs.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from pipeline.config.parts import GQA, Dtype, MoE, Recompute
from pipeline.config.schema import Cluster, Rates, RunConfig, RunSpec
from pipeline.config.shape import Model, divisors
from pipeline.planner import count
from pipeline.planner.memory import (
    USABLE,
    Layout,
    Memory,
    matrix_params,
    memory,
    model_memory,
    uses_muon,
)
from pipeline.planner.work import adapted_flops, teacher_model, trained_params, training_flops

# Measured on one H200: a compiled 1.1B model, micro-batches of 8 × 2048 (docs/LOG.md).
TOUCHES = 5  # passes over the kept activations, forward and backward: 13% of the step
BLOCK_S = 2e-4  # idle time of the device per block and micro-batch: 1.6% of the step
UPDATE_BYTES = 36  # bytes per parameter that norm, AdamW and cast read and write: 10 ms
# Additional bytes per parameter for Muon with its recipe, counted by operation in optim/muon.py: 98
# for momentum, update and weights, 22 to normalize, 32 to decay cautiously, less AdamW's 28.
MUON_BYTES = 124
# Fitted to 117 published dense runs together with the rates of configs/cluster.
HOP_S = 8e-6  # latency of a ring, per collective and rank
EXPOSED = 0.5  # share of the shorter of compute and collectives that overlap does not hide
ERROR = 0.2  # relative error of the step time, dense; twice that if routed (docs/SCALE.md)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank sends in a step."""

    gradients: int
    weights: int
    tokens: int  # to experts and back
    heads: int  # to ranks that share a sequence, and back
    updates: int = 0  # updates of Muon's matrices, to their owners and back

    @property
    def total(self) -> int:
        return self.gradients + self.weights + self.tokens + self.heads + self.updates


@dataclass(frozen=True, slots=True)
class Estimate:
    layout: Layout
    memory: Memory
    traffic: Traffic
    compute_s: float
    collectives_s: float
    exchanges_s: float  # all-to-alls of tokens, heads and Muon's updates
    step_s: float
    tokens_s: float  # tokens per second of all ranks
    mfu: float
    gpu_hours: float  # for the whole run
    fits: bool
    error: float  # expected relative error of step_s, either way

    def figures(self) -> dict[str, Any]:
        traffic = {**asdict(self.traffic), "total": self.traffic.total}
        return {**asdict(self), "memory": self.memory.figures(), "traffic": traffic}


def traffic(
    model: Model, layout: Layout, *, dtype: Dtype, micros: int, muon: bool = False
) -> Traffic:
    """Count the bytes of a step.

    ZeRO-0 all-reduces gradients once per step. ZeRO-1 reduce-scatters them and gathers weights.
    ZeRO-2 reduce-scatters in each micro-batch, and ZeRO-3 also gathers weights twice in each. A
    token travels to its experts and back, and so does its gradient. Ranks that share a sequence
    exchange tokens for heads before attention, and heads for tokens after it."""
    size = count.BYTES[dtype]
    parameters = sum(size * held * (ranks - 1) // ranks for held, ranks in _groups(model, layout))
    tokens = micros * layout.micro_batch * model.seq // layout.sp
    # Selective recomputation repeats the feed-forward, so the experts' exchange too.
    trips = tokens * (6 if layout.recompute else 4)
    swaps = tokens * (3 if layout.recompute is True else 2)
    return Traffic(
        gradients=(2, 1, micros, micros)[layout.zero] * parameters,
        weights=(0, 1, 1, 2 * micros)[layout.zero] * parameters,
        tokens=trips * _expert_bytes(model, size) * (layout.ep - 1) // layout.ep,
        heads=swaps * _head_bytes(model, layout.sp, size) * (layout.sp - 1) // layout.sp,
        updates=_update_bytes(model, layout) if muon else 0,
    )


def estimate(config: RunConfig, layout: Layout) -> Estimate:
    """Predict one step in a layout, on a cluster whose rates are known."""
    cluster = config.cluster
    rates = cluster.rates
    peak = cluster.peak_flops
    assert rates is not None and peak is not None, "the cluster gives no rates"
    model = config.model
    dtype = config.train.dtype
    batch = config.train.batch_tokens
    micros = batch * layout.sp // (model.seq * layout.micro_batch * layout.ranks)
    muon = uses_muon(config)
    sent = traffic(model, layout, dtype=dtype, micros=micros, muon=muon)
    predicted = config.objective.most_targets(model.seq)
    generator = model.generator_model
    own = None if generator else predicted
    token_s = _token_s(model, layout.recompute, dtype, peak, rates, own)
    if generator is not None:
        token_s += _token_s(generator, layout.recompute, dtype, peak, rates, predicted)
    update_s = _update_s(model, layout, rates)
    if config.lora is not None:
        # Only the trained parameters have gradients to send and are updated.
        whole = count.flops_per_token(model, predicted=own)
        token_s *= adapted_flops(whole, model, config.lora).model / whole.model
        share = trained_params(model, config.lora) / count.params(model).total
        update_s *= share
        gradients = int(share * sent.gradients)
        sent = replace(sent, gradients=gradients, weights=int(share * sent.weights))
    teacher = teacher_model(config)
    if teacher is not None:
        # A forward pass, which keeps no activations.
        token_s += _token_s(teacher, False, dtype, peak, rates, predicted) / 3
    tokens_s = batch // layout.ranks * token_s
    idle_s = micros * (model.layers + model.source_layers + model.mtp) * BLOCK_S
    compute = tokens_s + idle_s + update_s
    if muon:
        compute += _muon_s(model, layout, peak, rates)
    collectives = _collectives_s(cluster, rates, model, layout, sent, micros)
    exchanges = _exchange_s(cluster, rates, layout.ep, sent.tokens)
    exchanges += _exchange_s(cluster, rates, layout.sp, sent.heads)
    exchanges += _exchange_s(cluster, rates, layout.ranks, sent.updates)
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
        mfu=training_flops(config).model * batch / step / layout.ranks / peak,
        gpu_hours=config.train.steps * step * layout.ranks / 3600,
        fits=held.total <= USABLE * (cluster.memory_bytes or math.inf),
        error=ERROR * (2 if layout.ep > 1 else 1),
    )


def _groups(model: Model, layout: Layout) -> Iterator[tuple[int, int]]:
    """Yield parameters of a rank and how many ranks share them: dense ones, then experts."""
    counted = count.params(model)
    yield counted.total - counted.experts, layout.ranks
    if counted.experts:
        yield counted.experts // layout.ep, layout.ranks // layout.ep


def _expert_bytes(model: Model, size: int) -> int:
    """Bytes of one token sent to its experts, in all routed layers."""
    if not isinstance(model.ffn, MoE):
        return 0
    slots = model.ffn.top_k * (model.ffn.capacity or 1)  # the slots of a capacity travel empty too
    return int(sum(map(model.routed, count.block_layers(model))) * slots * model.width * size)


def _head_bytes(model: Model, sp: int, size: int) -> int:
    """Bytes of one token's queries, keys, values and results, in all layers."""
    a = model.attention
    # With fewer key/value heads than ranks, several ranks have copies of the same head.
    kv_heads = math.lcm(a.kv_heads, sp) if isinstance(a, GQA) else a.heads
    blocks = model.layers + model.source_layers + model.mtp
    return blocks * (a.heads + kv_heads) * (a.score_dim + a.value_dim) * size


@lru_cache
def _token_s(
    model: Model,
    recompute: Recompute,
    dtype: Dtype,
    peak: float,
    rates: Rates,
    predicted: int | None,
) -> float:
    flops = count.flops_per_token(model, recompute=recompute, predicted=predicted)
    routed = 0
    if isinstance(model.ffn, MoE):
        routed = 6 * count.params(model).experts * model.ffn.top_k // model.ffn.experts
    matmul = (flops.matmul - routed) / rates.matmul_share + routed / rates.expert_share
    arithmetic = (matmul + flops.attention / rates.attention_share) / peak
    arithmetic *= flops.hardware / flops.model
    held = model_memory(model, Layout(ranks=1, zero=3), dtype)
    kept = held.activations / model.seq
    # Two of the five passes belong to the forward, which recomputation repeats.
    passes = TOUCHES * {False: 1, "selective": 1.2, True: 1.4}[recompute]
    return arithmetic + passes * kept / rates.hbm_bytes_s


def _update_s(model: Model, layout: Layout, rates: Rates) -> float:
    held = sum(of // (ranks if layout.zero else 1) for of, ranks in _groups(model, layout))
    return UPDATE_BYTES * held / rates.hbm_bytes_s


def _muon_s(model: Model, layout: Layout, peak: float, rates: Rates) -> float:
    """Additional time for Muon's matrices: each is orthogonalized on one rank, in bf16."""
    flops = sum(
        number * count.orthogonalization_flops(m, n) for m, n, number in count.matrices(model)
    )
    held = matrix_params(model) // (layout.ranks if layout.zero else 1)
    passes = MUON_BYTES * held / rates.hbm_bytes_s
    return flops / layout.ranks / (peak * rates.matmul_share) + passes


def _update_bytes(model: Model, layout: Layout) -> int:
    """Bytes of Muon's updates in bf16. At ZeRO-3 a rank sends its parts to the owners, which return
    them. At ZeRO-0 owners send results to all. At ZeRO-1 and 2 most matrices are on one rank."""
    whole = 2 * matrix_params(model) * (layout.ranks - 1) // layout.ranks
    return (whole, 0, 0, 2 * whole // layout.ranks)[layout.zero]


def _collectives_s(
    cluster: Cluster, rates: Rates, model: Model, layout: Layout, sent: Traffic, micros: int
) -> float:
    """Time for the bytes of each group at the rate of its ring, plus each collective's latency."""
    groups = [(held * (ranks - 1) / ranks, ranks) for held, ranks in _groups(model, layout)]
    whole = sum(part for part, _ in groups) or 1
    blocks = model.layers + model.source_layers + model.mtp
    calls = (1, 2, 1 + micros, 3 * micros * blocks)[layout.zero]
    seconds = 0.0
    for index, (part, ranks) in enumerate(groups):
        # The second group is the experts; each node has gpus_per_node / ep copies of them.
        links = cluster.gpus_per_node if index == 0 else max(1, cluster.gpus_per_node // layout.ep)
        rate = rates.intra_bytes_s
        if layout.ranks > cluster.gpus_per_node:
            rate = min(rate, links * rates.inter_bytes_s)
        latency_s = HOP_S * calls * (ranks - 1)
        seconds += (sent.gradients + sent.weights) * part / whole / rate + latency_s
    return seconds


def _exchange_s(cluster: Cluster, rates: Rates, ranks: int, sent: int) -> float:
    """Time of an all-to-all, in which traffic within the node overlaps with that to other nodes."""
    near = min(ranks, cluster.gpus_per_node)
    away = (ranks - near) / max(1, ranks - 1)
    return sent * max((1 - away) / rates.intra_bytes_s, away / rates.inter_bytes_s)


def micro_batches(config: RunConfig, ranks: int, sp: int = 1, most: int = 64) -> list[int]:
    """Return the divisors of a rank's rows of the batch; none if the batch is not divisible."""
    rows, rest = divmod(config.rows * sp, ranks)
    return [] if rest else [m for m in divisors(rows) if m <= most]


def plan(
    config: RunConfig, ranks: int, spec: RunSpec | None = None, most_ranks: int | None = None
) -> list[Estimate]:
    """For every ZeRO stage and every possible ep, choose the best micro-batch and recomputation, or
    use those of the spec. The micro-batch must also divide the rows of a rank of `most_ranks`."""
    sp = config.parallel.sp
    ways: tuple[Recompute, ...] = (False, "selective", True)
    micros = micro_batches(config, ranks, sp)
    if most_ranks is not None:
        micros = [m for m in micros if m in micro_batches(config, most_ranks, sp)]
    if spec is not None and spec.train.micro_batch != "auto":
        micros = [spec.train.micro_batch]
    if spec is not None and spec.train.recompute != "auto":
        ways = (spec.train.recompute,)
    return [
        best(
            [estimate(config, Layout(ranks, zero, ep, m, way, sp)) for way in ways for m in micros]
        )
        for zero in range(4)
        for ep in config.model.expert_degrees(ranks)
    ]


def best(estimates: Sequence[Estimate]) -> Estimate:
    """Return the smallest layout within 1% of the fastest that fits; if none fits, the smallest."""
    fitting = [e for e in estimates if e.fits]
    if not fitting:
        return min(estimates, key=lambda e: e.memory.total)
    fastest = min(e.step_s for e in fitting)
    near = [e for e in fitting if e.step_s <= 1.01 * fastest]
    return min(near, key=lambda e: e.memory.total)


def recommend(spec: RunSpec, estimates: Sequence[Estimate]) -> Estimate | None:
    """Return the best estimate with the spec's ZeRO stage and ep; None if none of them fits."""
    parallel = spec.parallel
    ddp = parallel.engine == "accelerate"
    # DeepSpeed's ZeRO-1 was faster than stage 0 even on one GPU (docs/LOG.md).
    least = max(parallel.offload.least_zero, 1 if parallel.zero == "auto" else 0)
    zeros = (0,) if ddp else range(least, 4)
    possible = [
        e
        for e in estimates
        if e.layout.zero in zeros and parallel.zero in ("auto", e.layout.zero)
        if parallel.ep in ("auto", e.layout.ep) and (not ddp or e.layout.ep == 1)
    ]
    chosen = best(possible) if possible else None
    return chosen if chosen is not None and chosen.fits else None
