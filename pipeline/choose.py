"""Which layout to take: those that can work, the fastest of them, and the nearest to one that cannot."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from pipeline.account import params
from pipeline.config.frozen import Auto, Recompute
from pipeline.config.load import load, names
from pipeline.config.schema import Offload, RunConfig
from pipeline.errors import ConfigError
from pipeline.layout import USABLE, Estimate, Layout, estimate, memory
from pipeline.recipe import refuse


def plan(config: RunConfig, ranks: int, micro_batch: int | Auto = "auto") -> list[Estimate]:
    """For every ZeRO stage and every ep that the experts and ranks allow, its best micro-batch and recomputation."""
    sp = config.parallel.sp
    micros = micro_batches(config, ranks, sp) if micro_batch == "auto" else [micro_batch]
    again: tuple[Recompute, ...] = (False, "selective", True)
    return [
        best([estimate(config, Layout(ranks, zero, ep, micro, way, sp)) for way in again for micro in micros])
        for zero in range(4)
        for ep in config.model.degrees(ranks)
    ]


def micro_batches(config: RunConfig, ranks: int, sp: int = 1, most: int = 64) -> list[int]:
    """What divides a reader's share of the batch; none where it has no whole one."""
    rows, rest = divmod(config.rows * sp, ranks)
    return [] if rest else [m for m in range(1, min(rows, most) + 1) if rows % m == 0]


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
    """Refuse, in one line that names the nearest layout that works, what cannot work on so many ranks. `shared`: they
    share one memory, as on a CPU."""
    now = Layout.of(config, ranks)
    refuse(config, ranks)
    if memory_bytes is None:
        return
    have = memory_bytes if shared else int(USABLE * memory_bytes)
    away = config.parallel.offload if config.parallel.offload.nvme else Offload()  # else it stays in a CPU's memory
    where = config.parallel.model_copy(update={"offload": away})
    held = config.model_copy(update={"parallel": where}) if shared else config

    def need(layout: Layout) -> int:
        return memory(held, layout).total * (ranks if shared else 1)

    if need(now) <= have:
        return
    remedy = f"take {_smaller(config, now, have // (ranks if shared else 1))}"
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
        for sp in config.model.shares(now.ranks)
        for zero in stages
        for ep in (config.model.degrees(now.ranks) if config.parallel.engine == "deepspeed" else [now.ep])
        for micro in micro_batches(config, now.ranks, sp)
        for again in {now.recompute, True}
    )

    def distance(option: Layout) -> tuple[float, ...]:
        again, ep, micro = option.recompute != now.recompute, option.ep != now.ep, option.micro_batch != now.micro_batch
        changes = again + ep + micro + (option.zero != now.zero)
        return abs(math.log(option.sp / now.sp)), changes, again, ep, micro, option.zero, -option.micro_batch

    return next((option for option in sorted(options, key=distance) if fits(option)), None)


def _smaller(config: RunConfig, now: Layout, have: int) -> str:
    """The largest size that some layout of these ranks can hold, and that layout."""
    zero = 3 if config.parallel.engine == "deepspeed" else now.zero
    least, fitting = Layout(now.ranks, zero, now.ep, 1, True, now.sp), {}
    for size in names("size") if config.model.arch in names("arch") else ():
        model = load(size=size, arch=config.model.arch).model
        model = model.model_copy(update={"vocab": config.model.vocab, "seq": config.model.seq})
        if memory(config.model_copy(update={"model": model}), least).total <= have:
            fitting[params(model).total] = size
    return f"--size {fitting[max(fitting)]} {least.flags(now)}".strip() if fitting else "a smaller --size"


def enough(config: RunConfig, ranks: int, memory_bytes: int) -> Layout | None:
    """The first doubling of the GPUs that cuts the batch and on which the smallest layout fits."""
    for more in (n for n in (ranks << k for k in range(1, 11)) if config.rows * config.parallel.sp % n == 0):
        for ep in config.model.degrees(more):
            layout = Layout(more, 3, ep, 1, True, config.parallel.sp)
            if memory(config, layout).total <= USABLE * memory_bytes:
                return layout
    return None
