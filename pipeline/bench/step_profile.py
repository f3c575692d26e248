"""Profile a step: its kernels, the host's waits for the device, the cost of log and guard."""

import itertools
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.checkpoint.save import Saver
from pipeline.config.dump import changed
from pipeline.config.schema import RunConfig
from pipeline.objective.batch import Batch
from pipeline.parallel.engine import Engine
from pipeline.parallel.world import World
from pipeline.process import StopRequest
from pipeline.runs.directory import RunDir
from pipeline.runs.log import Log
from pipeline.track.console import Tracker
from pipeline.train.guard import Guard
from pipeline.train.loop import Loop
from pipeline.train.watchdog import Watchdog

Figures = Iterator[tuple[str, Any]]

# --- kernels


def trace(step: Callable[[], object], device: torch.device) -> Any:
    """Run a step under torch's profiler and return the profile."""
    activity = torch.profiler.ProfilerActivity
    # Recording the host's operations too would slow the host down and lengthen the pauses.
    recorded = activity.CUDA if device.type == "cuda" else activity.CPU
    with torch.profiler.profile(activities=[recorded]) as profile:
        step()
    return profile


def kernels(step: Callable[[], object], device: torch.device) -> str:
    """Return a table of a step's kernels by their own time, and the pauses of the device."""
    profile = trace(step, device)
    column = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    table = profile.key_averages().table(sort_by=column, row_limit=40, max_name_column_width=100)
    return f"\n{table}{_pauses(profile)}"


def _pauses(profile: Any) -> str:
    """List pauses between kernels, longest first; on a CPU there are none."""
    cuda = torch.profiler.DeviceType.CUDA
    events = [e for e in profile.events() if e.device_type == cuda]
    if not events:
        return ""
    events.sort(key=lambda e: e.time_range.start)
    pauses: list[tuple[float, str]] = []  # microseconds, between which kernels
    latest = events[0]
    for event in events[1:]:
        pause = event.time_range.start - latest.time_range.end
        if pause > 0:
            pauses.append((pause, f"{latest.name[:60]} → {event.name[:60]}"))
        # Kernels of several streams overlap, so the last to start need not be the last to end.
        if event.time_range.end > latest.time_range.end:
            latest = event
    total_ms = sum(pause for pause, _ in pauses) / 1e3
    lines = [f"idle between {len(events)} kernels: {total_ms:.2f} ms"]
    for pause, between in sorted(pauses, reverse=True)[:20]:
        lines.append(f"{pause / 1e3:10.3f} ms  {between}")
    return "\n".join([*lines, ""])


# --- host reads

# Operations that make the host wait for the device.
_READS = {
    "_local_scalar_dense",
    "item",
    "nonzero",
    "is_nonzero",
    "equal",
    "masked_select",
    "bincount",
    "_unique2",
}
# Methods that wait on a GPU, but run no operation if the device is the host.
_CALLS = {"tolist", "cpu", "numpy"}
# PendingStep.read: the loop reads a step after it has launched the next one.
_EXPECTED = "exchange.py:read"


def count_host_reads(action: Callable[[], object], device: torch.device) -> str:
    """Return how often and where the host waits for the device, except to read the step before.

    On a GPU torch warns of each wait. On a CPU, count the calls that would wait on a GPU."""
    places: list[str] = []
    with _deepspeed_waits(places):
        if device.type == "cuda":
            places += _warned_places(action)
        else:
            with Operations(places), Calls(places):
                action()
    counts = Counter(place for place in places if place != _EXPECTED)
    where = ", ".join(f"{place} ×{count}" for place, count in counts.items())
    return f"{counts.total()}: {where}" if counts else "0"


def _warned_places(action: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        torch.cuda.set_sync_debug_mode("warn")
        caught.clear()  # the warning that this mode is a prototype
        warnings.simplefilter("always")
        try:
            action()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # torch's text is "called a synchronizing CUDA operation".
    waits = [warning for warning in caught if "synchroniz" in str(warning.message)]
    return [f"{Path(each.filename).name}:{each.lineno}" for each in waits]


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records where operations would make the host wait."""

    def __init__(self, places: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = places

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in _READS:
            self._places.append(_caller())
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """Records where methods would make the host wait."""

    def __init__(self, places: list[str]) -> None:
        super().__init__()
        self._places = places

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _CALLS:
            self._places.append(_caller())
        return func(*args, **(kwargs or {}))


@contextmanager
def _deepspeed_waits(places: list[str]) -> Iterator[None]:
    """Record where DeepSpeed waits for the whole device. torch does not warn of these waits."""
    loaded = sys.modules.get("deepspeed.accelerator")
    if loaded is None:
        yield
        return
    accelerator: Any = loaded.get_accelerator()
    # An attribute of the instance hides the method; deleting it restores the method.
    accelerator.synchronize = lambda *_: places.append(_caller())
    try:
        yield
    finally:
        del accelerator.synchronize


def _caller() -> str:
    """Return the file and the function of the innermost frame outside of torch and this file."""
    outside = [
        frame
        for frame in traceback.extract_stack()
        if "/torch/" not in frame.filename and frame.filename != __file__
    ]
    return f"{Path(outside[-1].filename).name}:{outside[-1].name}"


# --- overheads


class _NoGuard(Guard):
    def limits(self, step: int) -> list[float]:
        # This costs nothing, and no finite loss or norm is above these limits.
        return [sys.float_info.max] * 2


def measure_overheads(
    engine: Engine,
    batches: Iterator[Batch],
    config: RunConfig,
    world: World,
    steps: int,
    directory: Path,
) -> Figures:
    """Yield the cost of each part of the real loop besides compute, by switching it off."""
    run = RunDir(directory)
    for part in ("logs", "checkpoints"):
        (directory / part).mkdir()
    with (
        # 60 s per step, and 600 s for the first one, which compiles.
        closing(Watchdog(run, world, 60.0, 600.0)) as watchdog,
        closing(Tracker(Log(run.log))) as tracker,
    ):
        # Each rank has its own log, but all of them write one checkpoint.
        checkpoints = Path(world.broadcast(str(run.checkpoints)))
        saver = Saver(engine, config, checkpoints, world)
        stop = StopRequest()
        loop = Loop(config, run, engine, world, tracker, stop, watchdog, Guard([]), saver)
        timer = _LoopTimer(loop, batches)
        timer.step()
        launch = timer.launcher()
        launch()  # the next step reads this one
        yield "host reads in a step", count_host_reads(timer.launcher(), world.device)
        loop.settle()
        step_s = yield from _part_costs(timer, config, steps)
        # The loader hashes in its own thread, so this time does not delay the step.
        hash_s = _hash_s(next(batches))
        share = round(100 * hash_s / step_s, 3)
        yield "cost of token hashes, in the loader's thread, % of the step", share
        yield from _save_costs(timer, saver, step_s)


class _LoopTimer:
    """Runs single steps of a loop."""

    def __init__(self, loop: Loop, batches: Iterator[Batch]) -> None:
        self.loop = loop
        self._batches = batches
        self._count = itertools.count()

    def launcher(self) -> Callable[[], None]:
        """Make the batch of the next step, and return a function that launches the step."""
        batch = next(self._batches)
        return lambda: self.loop.step(next(self._count), batch, 0.0)

    def step(self, **changes: Any) -> float:
        """Return the seconds of one step, with some attributes of the loop changed for it."""
        before = {name: getattr(self.loop, name) for name in changes}
        for name, value in changes.items():
            setattr(self.loop, name, value)
        batch = next(self._batches)
        began = time.perf_counter()
        self.loop.step(next(self._count), batch, 0.0)
        self.loop.settle()  # otherwise the next step would pay for reading this one
        seconds = time.perf_counter() - began
        # The loop turns Ctrl-C into a stop request, which has to end the benchmark here.
        if self.loop.stopping:
            raise KeyboardInterrupt
        for name, value in before.items():
            setattr(self.loop, name, value)
        return seconds

    def save(self) -> None:
        self.loop.save(next(self._count))


def _part_costs(
    timer: _LoopTimer, config: RunConfig, steps: int
) -> Generator[tuple[str, Any], None, float]:
    """Yield the cost of guard, comparison and log; return the median seconds of a whole step."""
    switches: dict[str, dict[str, Any]] = {
        "guard": {"guard": _NoGuard([])},
        "comparing replicas": {"config": changed(config, {"train.check_every": 2**40})},
        "log": {"tracker": Tracker()},
    }
    # Each pair of steps is measured together, so that slow drifts cancel.
    whole_s: list[float] = []
    costs_s: dict[str, list[float]] = {name: [] for name in switches}
    for _ in range(steps):
        for name, changes in switches.items():
            seconds = timer.step()
            whole_s.append(seconds)
            costs_s[name].append(seconds - timer.step(**changes))
    step_s = statistics.median(whole_s)
    for name, differences in costs_s.items():
        cost = round(100 * statistics.median(differences) / step_s, 3)
        yield f"cost of {name}, % of the step", cost
    return step_s


def _save_costs(timer: _LoopTimer, saver: Saver, step_s: float) -> Figures:
    save_every = timer.loop.config.train.save_every
    began = time.perf_counter()
    steps = 0
    timer.save()
    saved = saver.finished()
    # All ranks step until the saves of all ranks have ended.
    while any(timer.loop.world.gather(saved is None)):
        timer.step()
        steps += 1
        saved = saved or saver.finished()
    assert saved is not None
    # Files are written during the steps, so the cost is the time that these took longer than usual.
    extra_s = time.perf_counter() - began - steps * step_s
    blocked = round(100 * saved.blocked_s / step_s, 3)
    yield "training blocked by one save, % of a step", blocked
    cost = round(100 * extra_s / (save_every * step_s), 3)
    yield f"cost of one save in {save_every} steps, % of them", cost


def _hash_s(batch: Batch) -> float:
    rows = batch.tokens_BS.contiguous().numpy()
    began = time.perf_counter()
    for seed, row in enumerate(rows):
        # The loader's own hash: the seed is the row, so that exchanged rows are noticed.
        xxhash.xxh3_64_intdigest(row.data, seed)
    return time.perf_counter() - began
