"""How long a step takes in a layout, on paper: bytes that travel, seconds they cost, and the layout to take.

Compute is five parts, each at a rate of configs/cluster: matmuls, routed matmuls and attention by their FLOPs, what
happens between them by the bytes that autograd keeps, the optimizer's update by those of its states (all of account).
Communication is counted exactly, as bytes that a rank sends in a step; a ring leaves a node over all its links at once,
an all-to-all of experts over each GPU's own. ZeRO's collectives run beside the compute, those of experts make it wait.
Tensor and pipeline parallelism do not exist here. docs/SCALE.md holds all this against published runs.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from pipeline import account
from pipeline.config.frozen import Auto, Dtype, Recompute
from pipeline.config.model import Model
from pipeline.config.parts import GQA, MoE
from pipeline.config.schema import Cluster, Offload, Rates, RunConfig
from pipeline.errors import ConfigError

# HOP_S and EXPOSED are fitted to 117 published dense runs together with the rates of configs/cluster; those before them
# are measured on one H200: a compiled 1.1B model, micro-batches of 8 × 2048 (docs/LOG.md).
TOUCHES = 5  # passes over the kept activations: written, read, their gradients too, and one more: 13% of the step
BLOCK_S = 2e-4  # that the device waits per block and micro-batch: 1.6% of the step
UPDATE_BYTES = 36  # moved per parameter by norm, AdamW and cast: 10 ms
HOP_S = 8e-6  # of a ring, per collective and rank it passes
EXPOSED = 0.5  # of the shorter of compute and collectives: what runs beside the other slows it
ERROR = 0.2  # of a dense step's time, and of a routed one's twice that: docs/SCALE.md
USABLE = 0.92  # of a GPU's memory: the rest is the driver's, NCCL's, and lost between allocations


@dataclass(frozen=True, slots=True)
class Layout:
    ranks: int
    zero: int
    ep: int = 1
    micro_batch: int = 1
    recompute: Recompute = False
    sp: int = 1

    @classmethod
    def of(cls, config: RunConfig, ranks: int) -> "Layout":
        micro = config.train.micro_batch
        assert micro != "auto", "resolve the recipe first"
        at = config.parallel
        return cls(ranks, at.zero, at.ep, micro, config.train.recompute, at.sp)

    def flags(self, before: "Layout | None" = None) -> str:
        """As the command line says it: what differs from another layout, or from the defaults."""
        spelled = {
            "zero": f"--zero {self.zero}",
            "ep": f"--ep {self.ep}",
            "sp": f"--sp {self.sp}",
            "micro_batch": f"--set train.micro_batch={self.micro_batch}",
            "recompute": f"--set train.recompute={str(self.recompute).lower()}",
        }
        before = before or Layout(self.ranks, zero=-1, micro_batch=-1)
        return " ".join(text for key, text in spelled.items() if getattr(self, key) != getattr(before, key))


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
    memory: account.Memory
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
    trips = each * (6 if layout.recompute else 4)  # selective too: the feed-forward is what it repeats
    tokens = trips * _rows_bytes(model, size) * (layout.ep - 1) // layout.ep
    swaps = each * (3 if layout.recompute is True else 2)
    heads = swaps * _heads_bytes(model, layout.sp, size) * (layout.sp - 1) // layout.sp
    gradients = (2, 1, micros, micros)[layout.zero]
    weights = (0, 1, 1, 2 * micros)[layout.zero]
    return Traffic(gradients * total, weights * total, tokens, heads)


def estimate(config: RunConfig, layout: Layout) -> Estimate:
    """One step of a resolved config in a layout, on a cluster whose rates are known."""
    model, train, rates, peak = config.model, config.train, config.cluster.rates, config.cluster.peak_flops
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
        fits=config.cluster.memory_bytes is None or held.total <= USABLE * config.cluster.memory_bytes,
        error=ERROR * (2 if layout.ep > 1 else 1),
    )


def memory(config: RunConfig, layout: Layout) -> account.Memory:
    """Of one rank, of a resolved config."""
    train = config.train
    assert train.dtype != "auto" and train.loss_chunk != "auto", "resolve the recipe first"
    held = account.memory(
        config.model,
        dtype=train.dtype,
        zero=layout.zero,
        ranks=layout.ranks,
        micro_batch=layout.micro_batch,
        loss_chunk=train.loss_chunk,
        recompute=layout.recompute,
        ep=layout.ep,
        sp=layout.sp,
    )
    away = config.parallel.offload
    return replace(held, optimizer=0 if away.optimizer else held.optimizer, weights=0 if away.params else held.weights)


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
    return sum(map(model.routed, _blocks(model))) * model.ffn.top_k * model.width * size


def _heads_bytes(model: Model, sp: int, size: int) -> int:
    """Of one token's queries, keys, values and what comes of them, all layers together."""
    a = model.attention
    kv_heads = math.lcm(a.kv_heads, sp) if isinstance(a, GQA) else a.heads  # of too few, several ranks have the same
    return len(_blocks(model)) * (a.heads + kv_heads) * (a.score_dim + a.value_dim) * size


@lru_cache
def _token_s(model: Model, recompute: Recompute, dtype: Dtype, peak: float, rates: Rates) -> float:
    flops = account.flops_per_token(model, recompute=recompute)
    routed = 0
    if isinstance(model.ffn, MoE):
        routed = 6 * _count(model).experts * model.ffn.top_k // model.ffn.experts
    kept = account.memory(model, dtype=dtype, zero=3, ranks=1, micro_batch=1, loss_chunk=1).activations / model.seq
    again = flops.hardware / flops.model
    matmul = (flops.matmul - routed) / rates.matmul_share + routed / rates.expert_share
    arithmetic = (matmul + flops.attention / rates.attention_share) / peak
    passes = TOUCHES * {False: 1, "selective": 1.2, True: 1.4}[recompute]  # the forward's two of five once more
    return again * arithmetic + passes * kept / rates.hbm_bytes_s


def _update_s(model: Model, layout: Layout, rates: Rates) -> float:
    held = sum(of // (ranks if layout.zero else 1) for of, ranks in _groups(model, layout))
    return UPDATE_BYTES * held / rates.hbm_bytes_s


def _collectives_s(cluster: Cluster, rates: Rates, model: Model, layout: Layout, sent: Traffic, micros: int) -> float:
    """The bytes of each group at what its ring reaches, and a latency for every collective it takes."""
    groups = [(held * (ranks - 1) / ranks, ranks) for held, ranks in _groups(model, layout)]
    whole = sum(share for share, _ in groups) or 1
    count = (1, 2, 1 + micros, 3 * micros * len(_blocks(model)))[layout.zero]
    time = 0.0
    for index, (share, ranks) in enumerate(groups):
        near = cluster.gpus_per_node if index == 0 else max(1, cluster.gpus_per_node // layout.ep)
        inside = layout.ranks <= cluster.gpus_per_node
        rate = rates.intra_bytes_s if inside else min(rates.intra_bytes_s, near * rates.inter_bytes_s)
        time += (sent.gradients + sent.weights) * share / whole / rate + HOP_S * count * (ranks - 1)
    return time


def _exchange_s(cluster: Cluster, rates: Rates, ranks: int, sent: int) -> float:
    """An all-to-all: what stays in the node and what leaves it travel at once."""
    near = min(ranks, cluster.gpus_per_node)
    away = (ranks - near) / max(1, ranks - 1)
    return sent * max((1 - away) / rates.intra_bytes_s, away / rates.inter_bytes_s)


def plan(config: RunConfig, ranks: int, micro_batch: int | Auto = "auto") -> list[Estimate]:
    """For every ZeRO stage and every ep that the experts and ranks allow, its best micro-batch and recomputation."""
    sp = config.parallel.sp
    micros = micro_batches(config, ranks, sp) if micro_batch == "auto" else [micro_batch]
    again: tuple[Recompute, ...] = (False, "selective", True)
    return [
        best([estimate(config, Layout(ranks, zero, ep, micro, way, sp)) for way in again for micro in micros])
        for zero in range(4)
        for ep in degrees(config.model, ranks)
    ]


def degrees(model: Model, ranks: int) -> list[int]:
    """Of expert parallelism: what divides experts and ranks."""
    most = math.gcd(model.ffn.experts, ranks) if isinstance(model.ffn, MoE) else 1
    return [ep for ep in range(1, most + 1) if most % ep == 0]


def shares(model: Model, ranks: int) -> list[int]:
    """Of sequence parallelism: what divides heads, sequence and ranks."""
    most = math.gcd(model.attention.heads, model.seq, ranks)
    return [sp for sp in range(1, most + 1) if most % sp == 0]


def micro_batches(config: RunConfig, ranks: int, sp: int = 1, most: int = 64) -> list[int]:
    """What divides a reader's share of the batch."""
    assert config.train.batch_tokens != "auto"
    rows = config.train.batch_tokens // config.model.seq * sp // ranks
    return [m for m in range(1, min(rows, most) + 1) if rows % m == 0]


def widen(
    config: RunConfig, ranks: int, memory_bytes: int | None, device: str, *, shared: bool
) -> tuple[RunConfig, str]:
    """With the largest micro-batch that account expects to fit, and the figure that this follows from."""
    limits = []
    if memory_bytes is not None:
        limits.append((memory_bytes / ranks if shared else USABLE * memory_bytes, f"this {device}"))
    if config.cluster.memory_bytes is not None:
        limits.append((USABLE * config.cluster.memory_bytes, "cluster.memory_bytes"))
    if not limits:
        raise ConfigError("train.auto_batch: how much memory a device has is unknown from here; give --cluster")
    have, whose = min(limits)
    now = Layout.of(config, ranks)
    micros = micro_batches(config, ranks, now.sp, most=sys.maxsize)
    needs = {micro: memory(config, replace(now, micro_batch=micro)).total for micro in micros}
    micro = max((micro for micro, need in needs.items() if need <= have), default=1)
    train = config.train.model_copy(update={"micro_batch": micro})
    return config.model_copy(update={"train": train}), (
        f"micro-batch {micro} of {micros[-1]}: account expects {needs[micro] / 2**30:,.2f} GiB per rank, {whose} gives "
        f"{have / 2**30:,.2f} GiB"
    )


def best(estimates: Sequence[Estimate]) -> Estimate:
    """The fastest that fits: of those within 1% of it, the smallest; and where none fits, the smallest of all."""
    fitting = [e for e in estimates if e.fits] or estimates
    fastest = min(e.step_s for e in fitting)
    near = [e for e in fitting if e.step_s <= 1.01 * fastest] if fitting[0].fits else fitting
    return min(near, key=lambda e: e.memory.total)


def check(
    config: RunConfig, ranks: int, *, memory_bytes: int | None = None, device: str = "GPU", shared: bool = False
) -> None:
    """Refuse, in one line that names the nearest layout that works, what cannot work on so many ranks; what is wrong
    with any number of them the types refuse. `shared`: the ranks share one memory, as on a CPU."""
    now = Layout.of(config, ranks)
    config.parallel.readers(ranks)
    if ranks % now.ep:
        near = min(degrees(config.model, ranks), key=lambda ep: abs(math.log(ep / now.ep)))
        up = -(-ranks // now.ep) * now.ep
        raise ConfigError(f"parallel.ep={now.ep} does not divide the {ranks} ranks; try --ep {near}, or {up} ranks")
    if memory_bytes is None:
        return
    have = memory_bytes if shared else int(USABLE * memory_bytes)
    where = config.parallel.model_copy(update={"offload": Offload()})  # what a CPU offloads stays in its memory
    held = config.model_copy(update={"parallel": where}) if shared else config

    def need(layout: Layout) -> int:
        return memory(held, layout).total * (ranks if shared else 1)

    if need(now) <= have:
        return
    remedy = "take a smaller --size"
    if fitting := _nearest(config, now, lambda layout: need(layout) <= have):
        remedy = f"try {fitting.flags(now)}"
    elif not shared and (more := enough(config, ranks, memory_bytes)):
        remedy = f"take {more.ranks} of them with {more.flags()}"
    raise ConfigError(
        f"size={config.model.size} needs about {need(now) / 2**30:,.1f} GiB with {now.flags()} on {ranks} ranks and "
        f"this {device} gives {have / 2**30:,.1f} GiB{' to all of them' if shared else ' to each'}; {remedy}"
    )


def _nearest(config: RunConfig, now: Layout, fits: Callable[[Layout], bool]) -> Layout | None:
    """That fits with the fewest changes; the stage is changed before the micro-batch, ep, and what is recomputed, and
    sequences are shared where nothing else helps."""
    stages = range(now.zero, 4) if config.parallel.engine == "deepspeed" else [now.zero]
    options = (
        Layout(now.ranks, zero, ep, micro, again, sp)
        for sp in shares(config.model, now.ranks)
        for zero in stages
        for ep in (degrees(config.model, now.ranks) if config.parallel.engine == "deepspeed" else [now.ep])
        for micro in micro_batches(config, now.ranks, sp)
        for again in {now.recompute, True}
    )

    def distance(option: Layout) -> tuple[float, ...]:
        again, ep, micro = option.recompute != now.recompute, option.ep != now.ep, option.micro_batch != now.micro_batch
        changes = again + ep + micro + (option.zero != now.zero)
        return abs(math.log(option.sp / now.sp)), changes, again, ep, micro, option.zero, -option.micro_batch

    return next((option for option in sorted(options, key=distance) if fits(option)), None)


def enough(config: RunConfig, ranks: int, memory_bytes: int) -> Layout | None:
    """The first doubling of the GPUs on which the smallest layout fits."""
    for more in (ranks << k for k in range(1, 11)):
        for ep in degrees(config.model, more):
            layout = Layout(more, 3, ep, 1, True, config.parallel.sp)
            if memory(config, layout).total <= USABLE * memory_bytes:
                return layout
    return None
