"""Which layout to take: those that can work, the fastest of them, and the nearest to one that cannot."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from pipeline.config.dump import Change, changed, flags
from pipeline.config.layers import names
from pipeline.config.parts import Auto, Recompute
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError, UserError
from pipeline.planner.count import params
from pipeline.planner.memory import (
    MEMORY_ERROR,
    USABLE,
    Layout,
    checkpoint_bytes,
    memory,
    offloaded,
)
from pipeline.planner.recipe import mend, resolve
from pipeline.planner.speed import Estimate, estimate

PROCESS_BYTES = (
    2**28
)  # of a rank on a CPU, the model apart: what torch and DeepSpeed take for themselves, measured
Resized = Callable[[str], RunConfig]  # the same run in another size


def plan(config: RunConfig, ranks: int, micro_batch: int | Auto = "auto") -> list[Estimate]:
    """For every ZeRO stage and every ep that the experts and ranks allow, its best micro-batch and recomputation."""
    sp = config.parallel.sp
    micros = micro_batches(config, ranks, sp) if micro_batch == "auto" else [micro_batch]
    again: tuple[Recompute, ...] = (False, "selective", True)
    return [
        best(
            [
                estimate(config, Layout(ranks, zero, ep, micro, way, sp))
                for way in again
                for micro in micros
            ]
        )
        for zero in range(4)
        for ep in config.model.degrees(ranks)
    ]


def micro_batches(config: RunConfig, ranks: int, sp: int = 1, most: int = 64) -> list[int]:
    """What divides a reader's share of the batch; none where it has no whole one."""
    rows, rest = divmod(config.rows * sp, ranks)
    return [] if rest else [m for m in range(1, min(rows, most) + 1) if rows % m == 0]


def best(estimates: Sequence[Estimate]) -> Estimate:
    """The fastest that fits: of those within 1% of it, the smallest; and where none fits, the smallest of all."""
    fitting = [e for e in estimates if e.fits] or estimates
    fastest = min(e.step_s for e in fitting)
    near = [e for e in fitting if e.step_s <= 1.01 * fastest] if fitting[0].fits else fitting
    return min(near, key=lambda e: e.memory.total)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What a device has for the ranks: each on its own GPU, or all in the one memory of a CPU."""

    memory_bytes: int | None  # None: unknown from here
    device: str = "GPU"
    shared: bool = False

    @property
    def have(self) -> float:
        return (
            math.inf
            if self.memory_bytes is None
            else self.memory_bytes * (1 if self.shared else USABLE)
        )

    def need(self, config: RunConfig, layout: Layout) -> int:
        """Of one rank, or of all that share it. What is offloaded to a CPU, or copied there to be saved, is still in
        its memory; with a disk to offload to, the copy is there."""
        each = memory(config, layout).total
        if not self.shared:
            return each
        copy = 0 if config.parallel.offload.nvme else checkpoint_bytes(config.model)
        return layout.ranks * (each + PROCESS_BYTES) + offloaded(config, layout, "cpu") + copy

    def fits(self, config: RunConfig, layout: Layout) -> bool:
        """Where micro-batches are tried, that it may: a trial decides. In a memory that all share none is dared, since
        whoever asks for too much of it may be the end of another."""
        need = self.need(config, layout)
        if not config.train.auto_batch or self.shared:
            return need <= self.have
        return need * (1 - MEMORY_ERROR) <= (
            math.inf if self.memory_bytes is None else self.memory_bytes
        )

    def widen(
        self, config: RunConfig, ranks: int, below: int | None = None
    ) -> tuple[RunConfig, str]:
        """With the largest micro-batch that is worth a trial, of those `below` one that failed, and why this one."""
        share, least, most = (ranks, 1.0, USABLE) if self.shared else (1, 1 - MEMORY_ERROR, 1.0)
        here, cluster = self.memory_bytes or math.inf, config.cluster.memory_bytes or math.inf
        have, whose = min(
            (here / share, f"this {self.device}"), (most * cluster, "cluster.memory_bytes")
        )
        if have == math.inf:
            raise ConfigError(
                "train.auto_batch: how much memory a device has is unknown from here; give --cluster"
            )
        now = Layout.of(config, ranks)
        micros = micro_batches(config, ranks, now.sp, most=sys.maxsize)
        needs = {
            micro: self.need(config, replace(now, micro_batch=micro)) / share for micro in micros
        }
        small = (
            micro
            for micro, need in needs.items()
            if least * need <= have and micro < (below or math.inf)
        )
        micro = max(small, default=1)
        return changed(config, {"train.micro_batch": micro}), (
            f"micro-batch {micro} of {micros[-1]}: account expects {needs[micro] / 2**30:,.2f} GiB "
            f"{'' if self.shared else f'± {MEMORY_ERROR:.0%} '}per rank, {whose} gives {have / 2**30:,.2f} GiB"
            f"{f'; {below} ran out of memory' if below else ''}"
        )


def smaller_micro_batch(config: RunConfig, ranks: int) -> RunConfig | None:
    """With the next micro-batch to try, if the choice is ours."""
    micro = config.train.micro_batch
    assert micro != "auto", "resolve the recipe first"
    left = [m for m in micro_batches(config, ranks, config.parallel.sp, most=micro) if m < micro]
    return (
        changed(config, {"train.micro_batch": left[-1]})
        if left and config.train.auto_batch
        else None
    )


def check_one_micro_batch(config: RunConfig, chosen: int | None = None) -> None:
    """A micro-batch that is given is not looked for, unless it is what an earlier search has `chosen`."""
    if config.train.auto_batch and config.train.micro_batch not in ("auto", chosen):
        raise ConfigError(
            f"train.micro_batch={config.train.micro_batch} is given, and --auto-batch (train.auto_batch) would look "
            "for one; take one of the two away"
        )


def _mended(
    config: RunConfig, ranks: int, room: DeviceMemory, keep: bool
) -> tuple[list[str], Change, int | None, RunConfig, str, Layout]:
    """As `mend` has it, with the run that this makes: settled, memory apart, and how train.auto_batch chose."""
    faults, take, more = mend(config, ranks, gpu=not room.shared, keep=keep)
    ranks, asked, note = int(take.get("nproc", ranks)), changed(config, take), ""
    settled = resolve(asked, ranks=ranks, gpu=not room.shared)
    if asked.train.auto_batch and asked.train.micro_batch == "auto":
        settled, note = room.widen(settled, ranks)
    return faults, take, more, settled, note, Layout.of(settled, ranks)


def fit_to_devices(
    config: RunConfig,
    ranks: int,
    room: DeviceMemory,
    *,
    keep: bool = False,
    resized: Resized | None = None,
) -> tuple[RunConfig, str]:
    """Every number settled for so many ranks, and how train.auto_batch chose; or a refusal, in one line that names the
    nearest settings that are not refused."""

    def accepts(take: Change) -> bool:
        asked = resized(str(take["size"])) if resized and "size" in take else config
        faults, *_, settled, _, now = _mended(
            changed(asked, take), int(take.get("nproc", ranks)), room, keep
        )
        return not faults and room.fits(settled, now)

    faults, take, more, settled, note, now = _mended(config, ranks, room, keep)
    if not room.fits(settled, now):
        faults.append(
            f"size={config.model.size} needs about {room.need(settled, now) / 2**30:,.1f} GiB with "
            f"{flags(now.change())} on {now.ranks} ranks and this {room.device} gives {room.have / 2**30:,.1f} GiB "
            f"{'to all of them' if room.shared else 'to each'}"
        )
        options = _options(config, ranks, room, keep, resized)
        if config.train.auto_batch:  # which finds the micro-batch that goes with the rest
            options = (
                {k: v for k, v in each.items() if k != "train.micro_batch"} for each in options
            )
        if not (take := next(filter(accepts, options), {})):
            raise ConfigError(
                f"{'; '.join(faults)}; nothing smaller fits either: take a machine with more memory"
            )
    if not faults:
        return settled, note
    verb = "take" if "size" in take else "try"
    if int(take.get("nproc", 0)) > ranks:
        verb = f"take {take.pop('nproc')} of them with"
    also = f", or {more} ranks" if more and accepts({"nproc": more}) else ""
    raise ConfigError(f"{'; '.join(faults)}; {verb} {flags(take)}{also}")


def _options(
    config: RunConfig, ranks: int, room: DeviceMemory, keep: bool, resized: Resized | None
) -> Iterator[Change]:
    """In this size, on more GPUs or, where they share a memory, in fewer processes; then the largest size below it that
    fits."""
    halves = (1 << k for k in reversed(range((ranks - 1).bit_length())))
    fewer = [count for count in halves if room.shared and count * PROCESS_BYTES < room.have]

    def within(config: RunConfig) -> Iterator[Change]:
        yield from _nearest(config, ranks, room, keep)
        for count in fewer:
            yield from (
                {"nproc": count, **change} for change in _nearest(config, count, room, keep)
            )

    yield from within(config)
    _, take, _, settled, _, now = _mended(config, ranks, room, keep)
    for more in () if room.shared else enough(settled, now.ranks, room):
        yield {**take, **more.change(replace(now, micro_batch=-1)), "nproc": more.ranks}
    if resized is None:
        return
    others = list[tuple[int, str]]()
    for size in names("size"):
        with suppress(UserError):  # what else is set need not go with every size
            others.append((params(resized(size).model).total, size))
    for _, size in sorted((o for o in others if o[0] < params(config.model).total), reverse=True):
        yield from ({"size": size, **change} for change in within(resized(size)))


def _nearest(config: RunConfig, ranks: int, room: DeviceMemory, keep: bool) -> Iterator[Change]:
    """What fits, with the fewest changes first; the stage is changed before the micro-batch, ep, and what is
    recomputed, and sequences are shared where nothing else helps."""
    _, take, _, config, _, now = _mended(config, ranks, room, keep)
    whole = config.parallel.engine == "accelerate"
    options = [
        Layout(now.ranks, zero, ep, micro, again, sp)
        for sp in (
            [now.sp] if room.shared else config.model.shares(now.ranks)
        )  # there fewer ranks save as much
        for zero in ([now.zero] if whole else range(now.zero, 4))
        for ep in ([now.ep] if whole else config.model.degrees(now.ranks))
        for micro in micro_batches(config, now.ranks, sp)
        for again in {now.recompute, True}
    ]

    def distance(option: Layout) -> tuple[float, ...]:
        again, ep, micro = (
            option.recompute != now.recompute,
            option.ep != now.ep,
            option.micro_batch != now.micro_batch,
        )
        changes = again + ep + micro + (option.zero != now.zero)
        return (
            abs(math.log(option.sp / now.sp)),
            changes,
            again,
            ep,
            micro,
            option.zero,
            -option.micro_batch,
        )

    if any(
        room.fits(config, o) for o in options if o.micro_batch == 1 and o.recompute is True
    ):  # the least of them
        for option in sorted(options, key=distance):
            if room.fits(config, option):
                told = (
                    now if option.sp == now.sp else replace(now, micro_batch=-1)
                )  # "auto" goes with sp
                yield {**take, **option.change(told)}


def enough(config: RunConfig, ranks: int, room: DeviceMemory) -> Iterator[Layout]:
    """Doublings of the GPUs that cut the batch and on which the smallest layout fits."""
    at = config.parallel
    for more in (n for n in (ranks << k for k in range(1, 11)) if config.rows * at.sp % n == 0):
        stages = (
            [(at.zero, at.ep)]
            if at.engine == "accelerate"
            else [(3, ep) for ep in config.model.degrees(more)]
        )
        layouts = (Layout(more, zero, ep, 1, True, at.sp) for zero, ep in stages)
        yield from (layout for layout in layouts if room.fits(config, layout))
