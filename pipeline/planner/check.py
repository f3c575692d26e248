"""Refuse a run that cannot work, and name the nearest settings that do.

`faults` finds settings that do not divide or combine. `fit_to_devices` also checks the memory of
the devices. A refusal is one line, and the settings that it suggests always work.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from pipeline.config.dump import Change, changed, flags
from pipeline.config.layers import names
from pipeline.config.optimizer import MuonSpec
from pipeline.config.parts import MoE, Recompute
from pipeline.config.schema import RunConfig, RunSpec
from pipeline.config.shape import divisors
from pipeline.errors import ConfigError, UserError
from pipeline.planner.count import BYTES, params
from pipeline.planner.memory import MEMORY_ERROR, PROCESS_BYTES, USABLE, DeviceMemory, Layout
from pipeline.planner.recipe import batch_tokens, choose_dtype, compiles, fill
from pipeline.planner.speed import Estimate, micro_batches, plan, recommend

Resized = Callable[[str], RunSpec]  # the same run in another size
_GIB = 2**30
RANK_BATCH_TOKENS = 2**27  # per step; the loader holds three batches of 8 bytes per token


def resolve(spec: RunSpec, *, ranks: int, gpu: bool) -> RunConfig:
    """Resolve every setting for this number of ranks, without checking their memory."""
    found, change = faults(spec, ranks, gpu=gpu)
    if found:
        more = _more_ranks(spec, ranks, change, gpu=gpu)
        also = f", or {more} ranks" if more else ""
        raise ConfigError(f"{'; '.join(found)}; try {flags(change, short=False)}{also}")
    return fill(spec, ranks, gpu=gpu)


# ── Settings that do not divide or combine ────────────────────────────────────────────────────────


def faults(spec: RunSpec, ranks: int, *, gpu: bool) -> tuple[list[str], Change]:
    """Return the faults of a layout, and the nearest settings that fix them."""
    found: list[str] = []
    change: Change = {}
    parallel = spec.parallel
    zero = parallel.zero
    least = parallel.offload.least_zero
    dtype = choose_dtype(spec, gpu=gpu)
    ddp = parallel.engine == "accelerate"
    if ddp and least:
        found.append("parallel.engine=accelerate has no shards that parallel.offload could move")
        ddp = False  # the checks below assume the remedy
        change["engine"] = "deepspeed"
    if zero != "auto" and zero < least:
        found.append(f"parallel.offload needs the shards of ZeRO-{least}, not zero={zero}")
        change["zero"] = least
    if ddp and (zero not in (0, "auto") or dtype == "bf16"):
        found.append(f"parallel.engine=accelerate is plain fp32 DDP, not zero={zero} in {dtype}")
        change["zero"] = 0
        change["dtype"] = dtype = "fp32"
    if spec.train.compile is True and not compiles(spec, dtype):
        found.append("train.compile=true with routed experts needs train.dtype=bf16")
        change["train.compile"] = False
    model = spec.model
    if isinstance(model.ffn, MoE):
        unit = 16 // BYTES[dtype]  # torch's grouped matmuls need rows of a multiple of 16 bytes
        for key, width in (("model.width", model.width), ("model.ffn.hidden", model.ffn.hidden)):
            if width % unit:
                found.append(f"{key}={width}: routed experts in {dtype} need a multiple of {unit}")
                change[key] = max(1, round(width / unit)) * unit
    if isinstance(spec.optim.optimizer, MuonSpec):
        _check_muon(spec)
    _check_degrees(spec, ranks, ddp, found, change)
    # Ranks that share a sequence read the same rows, so together they are one reader.
    _check_batch(spec, ranks // int(change.get("sp", parallel.sp)), found, change)
    return found, change


def _check_muon(spec: RunSpec) -> None:
    """Refuse settings that Muon does not support, for which no nearest setting exists."""
    place = spec.parallel.offload.optimizer
    if place:
        # Orthogonalization consists of matmuls, which are a hundred times slower on a CPU.
        raise ConfigError(
            f'parallel.offload.optimizer="{place}" updates on the CPU, where Muon would take longer'
            " than the rest of the step; remove it and raise --zero, or use --recipe adamw"
        )
    if spec.model.mup is not None:
        # An orthogonalized update has the same effect at every width already.
        raise ConfigError(
            'model.parametrization="mup" is for AdamW: Muon\'s rates hold at all widths without '
            "it; use --set model.parametrization=standard, or --recipe adamw"
        )


def _check_degrees(spec: RunSpec, ranks: int, ddp: bool, found: list[str], change: Change) -> None:
    model = spec.model
    ep = 1 if spec.parallel.ep == "auto" else spec.parallel.ep
    degrees = [1] if ddp else model.expert_degrees(ranks)
    if ep not in degrees:
        text = f"parallel.ep={ep} needs a routed model, such as --arch moe"
        if ddp:
            text = f"parallel.engine=accelerate puts every expert on every rank, not ep={ep}"
        elif isinstance(model.ffn, MoE):
            whole = f"the {ranks} ranks" if ranks % ep else f"experts={model.ffn.experts}"
            text = f"parallel.ep={ep} does not divide {whole}"
        found.append(text)
        change["ep"] = _nearest_of(degrees, ep)
    sp = spec.parallel.sp
    degrees = model.sequence_degrees(ranks)
    if sp not in degrees:
        whole = f"heads={model.attention.heads} and seq={model.seq}"
        whole = f"the {ranks} ranks" if ranks % sp else whole
        found.append(f"parallel.sp={sp} does not divide {whole}")
        change["sp"] = _nearest_of(degrees, sp)


def _nearest_of(numbers: list[int], wanted: int) -> int:
    """Return the nearest number by ratio: 8 is nearer to 6 than 4 is."""
    return min(numbers, key=lambda n: abs(math.log(n / wanted)))


def _check_batch(spec: RunSpec, readers: int, found: list[str], change: Change) -> None:
    seq = spec.model.seq
    unit = seq * readers
    batch = batch_tokens(spec, readers)
    most = max(1, RANK_BATCH_TOKENS // seq) * unit
    if batch > most:
        found.append(f"train.batch_tokens={batch:,} exceeds the memory of {readers} ranks")
        change["train.batch_tokens"] = most
        batch = most
    if batch % unit:
        whole = f"a multiple of {unit:,} (ranks {readers} × seq {seq})"
        found.append(f"train.batch_tokens={batch:,} is not {whole}")
        batch = max(1, round(batch / unit)) * unit
        change["train.batch_tokens"] = batch
    micro = spec.train.micro_batch
    rows = batch // unit
    if micro != "auto" and rows % micro:
        found.append(f"train.micro_batch={micro} does not divide the {rows} sequences of a rank")
        change["train.micro_batch"] = max(m for m in divisors(rows) if m <= micro)


def _more_ranks(spec: RunSpec, ranks: int, change: Change, *, gpu: bool) -> int | None:
    """Return the next larger number of ranks that works, if only ep or sp did not divide them."""
    if list(change) not in (["ep"], ["sp"]):
        return None
    degree = spec.parallel.sp if "sp" in change else spec.parallel.ep
    assert degree != "auto"  # "auto" is never at fault
    more = -(-ranks // degree) * degree  # rounded up to a multiple
    return more if more > ranks and not faults(spec, more, gpu=gpu)[0] else None


# ── The largest micro-batch ───────────────────────────────────────────────────────────────────────


def check_one_micro_batch(spec: RunSpec, chosen: int | None = None) -> None:
    """Refuse a micro-batch together with auto_batch, unless an earlier search has `chosen` it."""
    micro = spec.train.micro_batch
    if spec.train.auto_batch and micro not in ("auto", chosen):
        raise ConfigError(
            f"train.micro_batch={micro} is given, and --auto-batch (train.auto_batch) searches for "
            "one; remove one of the two"
        )


def widen_micro_batch(
    config: RunConfig, ranks: int, device: DeviceMemory, below: int | None = None
) -> tuple[RunConfig, str]:
    """Choose the largest micro-batch worth a trial, `below` one that failed; explain the choice."""
    # Ranks that share memory get equal parts, and no trial may exceed the memory.
    shares = ranks if device.shared else 1
    margin = 1.0 if device.shared else 1 - MEMORY_ERROR
    device_bytes = (device.memory_bytes or math.inf) / shares
    cluster_bytes = (config.cluster.memory_bytes or math.inf) * (USABLE if device.shared else 1.0)
    have_bytes = min(device_bytes, cluster_bytes)
    if have_bytes == math.inf:
        raise ConfigError("train.auto_batch: the memory of a device is unknown; give --cluster")
    layout = Layout.of(config, ranks)
    micros = micro_batches(config, ranks, layout.sp, most=config.rows * layout.sp)
    needs = {m: device.need(config, replace(layout, micro_batch=m)) / shares for m in micros}
    fitting = [m for m in micros if margin * needs[m] <= have_bytes and m < (below or math.inf)]
    micro = max(fitting, default=1)
    error = "" if device.shared else f" ± {MEMORY_ERROR:.0%}"
    source = f"this {device.device}" if device_bytes <= cluster_bytes else "cluster.memory_bytes"
    note = f"micro-batch {micro} of {micros[-1]}: needs about {needs[micro] / _GIB:,.2f} GiB{error}"
    note += f" per rank, {source} has {have_bytes / _GIB:,.2f} GiB"
    note += f"; {below} ran out of memory" if below else ""
    return changed(config, {"train.micro_batch": micro}), note


def smaller_micro_batch(config: RunConfig, ranks: int) -> RunConfig | None:
    """Return the next micro-batch to try after one ran out of memory, if auto_batch chose it."""
    micro = config.train.micro_batch
    smaller = micro_batches(config, ranks, config.parallel.sp, most=micro - 1)
    if not smaller or not config.train.auto_batch:
        return None
    return changed(config, {"train.micro_batch": smaller[-1]})


# ── The nearest layout that fits ──────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A request with the nearest settings that fix its faults."""

    faults: list[str]
    change: Change  # the nearest settings
    config: RunConfig  # with the change
    layout: Layout
    note: str  # how auto_batch chose the micro-batch


@dataclass(frozen=True, slots=True)
class Search:
    """The search for the nearest settings that work on a device."""

    device: DeviceMemory
    keep: bool  # keep the batch, because the run continues
    resized: Resized | None

    def nearest(self, spec: RunSpec, ranks: int) -> Change:
        """Return the nearest settings with which the run fits, or {} if nothing smaller fits."""
        for change in self.candidates(spec, ranks):
            if spec.train.auto_batch:  # the search finds the micro-batch itself
                change.pop("train.micro_batch", None)
            if self.accepts(spec, ranks, change):
                return change
        return {}

    def attempt(self, spec: RunSpec, ranks: int) -> _Attempt:
        gpu = not self.device.shared
        found, change = faults(spec, ranks, gpu=gpu)
        # A run that continues cannot change its batch, so fewer ranks have to divide it.
        fewer = ranks
        while self.keep and fewer > 1 and "train.batch_tokens" in change:
            fewer -= 1
            change = {"nproc": fewer, **faults(spec, fewer, gpu=gpu)[1]}
        ranks = int(change.get("nproc", ranks))
        fixed = changed(spec, change)
        config = fill(fixed, ranks, gpu=gpu)
        note = ""
        if fixed.train.auto_batch and fixed.train.micro_batch == "auto":
            config, note = widen_micro_batch(config, ranks, self.device)
        return _Attempt(found, change, config, Layout.of(config, ranks), note)

    def accepts(self, spec: RunSpec, ranks: int, change: Change) -> bool:
        """Return whether a run with this change needs no further change and fits."""
        if self.resized and "size" in change:
            spec = self.resized(str(change["size"]))
        # Plan the whole run again, because "auto" may now choose other numbers.
        tried = self.attempt(changed(spec, change), int(change.get("nproc", ranks)))
        return not tried.faults and self.device.fits(tried.config, tried.layout)

    def candidates(self, spec: RunSpec, ranks: int) -> Iterator[Change]:
        """Yield changes to try in this order: other layouts of the same ranks, fewer ranks if they
        share memory, more GPUs, and smaller sizes of the same architecture, the largest first."""
        yield from self.within(spec, ranks)
        if not self.device.shared:
            tried = self.attempt(spec, ranks)
            for layout in _enough_gpus(tried.config, tried.layout.ranks, self.device):
                # No layout has a micro-batch of -1, so the change always names it.
                change = layout.change(replace(tried.layout, micro_batch=-1))
                yield {**tried.change, **change, "nproc": layout.ranks}
        if self.resized is None:
            return
        smaller: list[tuple[int, str]] = []
        for size in names("size"):
            with suppress(UserError):  # some settings do not work with every size
                model = self.resized(size).model
                total = params(model).total
                if model.arch == spec.model.arch and total < params(spec.model).total:
                    smaller.append((total, size))
        for _, size in sorted(smaller, reverse=True):
            for change in self.within(self.resized(size), ranks):
                yield {"size": size, **change}

    def within(self, spec: RunSpec, ranks: int) -> Iterator[Change]:
        """Yield layouts on these ranks and, if they share memory, on fewer ranks."""
        yield from self.nearest_layouts(spec, ranks)
        # Smaller powers of two, which divide most batches.
        fewer = 1 << max(0, (ranks - 1).bit_length() - 1)
        while self.device.shared and 0 < fewer < ranks:
            if fewer * PROCESS_BYTES < self.device.usable:
                for change in self.nearest_layouts(spec, fewer):
                    yield {"nproc": fewer, **change}
            fewer //= 2

    def nearest_layouts(self, spec: RunSpec, ranks: int) -> Iterator[Change]:
        """Yield layouts that fit, those with the fewest changes first. The ZeRO stage changes
        before micro-batch, ep and recomputation; sp changes only if nothing else helps."""
        tried = self.attempt(spec, ranks)
        config = tried.config
        now = tried.layout
        options = list(_options(config, now, self.device))
        # Sorting every option takes seconds; stop here if not even the smallest fits.
        smallest = [o for o in options if o.micro_batch == 1 and o.recompute is True]
        if not any(self.device.fits(config, option) for option in smallest):
            return

        def distance(option: Layout) -> tuple[float, ...]:
            recompute = option.recompute != now.recompute
            ep = option.ep != now.ep
            micro = option.micro_batch != now.micro_batch
            changes = recompute + ep + micro + (option.zero != now.zero)
            sp = abs(math.log(option.sp / now.sp))
            return sp, changes, recompute, ep, micro, option.zero, -option.micro_batch

        for option in sorted(options, key=distance):
            if self.device.fits(config, option):
                # With another sp, "auto" chooses another micro-batch, so it is always named.
                before = now if option.sp == now.sp else replace(now, micro_batch=-1)
                yield {**tried.change, **option.change(before)}


def _options(config: RunConfig, now: Layout, device: DeviceMemory) -> Iterator[Layout]:
    """Yield the layouts of the same ranks that may need less memory."""
    ddp = config.parallel.engine == "accelerate"
    ways: set[Recompute] = {now.recompute, True}
    # If ranks share memory, fewer ranks save as much of it as sharing sequences does.
    for sp in [now.sp] if device.shared else config.model.sequence_degrees(now.ranks):
        for zero in [now.zero] if ddp else range(now.zero, 4):
            for ep in [now.ep] if ddp else config.model.expert_degrees(now.ranks):
                for micro in micro_batches(config, now.ranks, sp):
                    for way in ways:
                        yield Layout(now.ranks, zero, ep, micro, way, sp)


def _enough_gpus(config: RunConfig, ranks: int, device: DeviceMemory) -> Iterator[Layout]:
    """Yield doublings of the GPUs that divide the batch and on which the smallest layout fits."""
    parallel = config.parallel
    ddp = parallel.engine == "accelerate"
    zero = parallel.zero if ddp else 3  # ZeRO-3 needs the least memory; DDP has no stages
    for more in (ranks << k for k in range(1, 11)):
        if config.rows * parallel.sp % more:
            continue
        for ep in [parallel.ep] if ddp else config.model.expert_degrees(more):
            layout = Layout(more, zero, ep, 1, True, parallel.sp)
            if device.fits(config, layout):
                yield layout


def fit_to_devices(
    spec: RunSpec,
    ranks: int,
    device: DeviceMemory,
    *,
    keep: bool = False,
    resized: Resized | None = None,
    fewest: int | None = None,
) -> tuple[RunConfig, str]:
    """Resolve every setting and explain the layout, or raise an error with the nearest settings
    that work. A run that continues has to `keep` its batch. A job may start on `fewest` ranks."""
    search = Search(device, keep, resized)
    planned = None if keep else _plan_layout(spec, ranks, device, fewest)
    if planned is not None:
        # Compared with an impossible layout, so that zero, ep and the micro-batch are all set.
        spec = changed(spec, planned.layout.change(Layout(ranks, zero=-1, ep=-1, micro_batch=-1)))
    tried = search.attempt(spec, ranks)
    found = tried.faults
    change = tried.change
    if not device.fits(tried.config, tried.layout):
        need = device.need(tried.config, tried.layout) / _GIB
        layout = f"{flags(tried.layout.change())} on {tried.layout.ranks} ranks"
        each = "for all of them" if device.shared else "for each"
        found.append(
            f"size={spec.model.size} needs about {need:,.1f} GiB with {layout} and this "
            f"{device.device} has {device.usable / _GIB:,.1f} GiB {each}"
        )
        change = search.nearest(spec, ranks)
        if not change:
            raise ConfigError(f"{'; '.join(found)}; nothing smaller fits either: use more memory")
    if not found:
        if planned is None:
            return tried.config, tried.note
        chosen = f"layout {flags(planned.layout.change())}: the fastest that fits {ranks} × "
        return tried.config, f"{chosen}{spec.cluster.name}, about {planned.step_s:.3g} s per step"
    more = _more_ranks(spec, ranks, tried.change, gpu=not device.shared)
    also = f", or {more} ranks" if more and search.accepts(spec, ranks, {"nproc": more}) else ""
    if int(change.get("nproc", 0)) > ranks:
        count = change.pop("nproc")
        raise ConfigError(f"{'; '.join(found)}; use {count} of them with {flags(change)}{also}")
    raise ConfigError(f"{'; '.join(found)}; try {flags(change)}{also}")


def _plan_layout(
    spec: RunSpec, ranks: int, device: DeviceMemory, fewest: int | None
) -> Estimate | None:
    """Return the fastest layout, if the cluster's rates are known and there is no other fault."""
    known = spec.cluster.rates is not None and not device.shared and not spec.train.auto_batch
    if not known or faults(spec, ranks, gpu=True)[0]:
        return None
    config = fill(spec, ranks, gpu=True)
    # The local device may have less memory than the cluster file states.
    have_bytes = min(spec.cluster.memory_bytes or math.inf, device.memory_bytes or math.inf)
    if have_bytes < math.inf:
        config = changed(config, {"cluster.memory_bytes": have_bytes})
    return recommend(spec, plan(config, fewest or ranks, spec, ranks))
