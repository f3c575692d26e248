"""What stands beside the compute of a step: guard, comparison of replicas, log, hashes and saves, each priced."""

import itertools
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.checkpoint.save import Saver
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


class _Blind(Guard):
    def limits(self, step: int) -> list[float]:
        return [sys.float_info.max] * 2


def overheads(
    worker: Engine,
    batches: Iterator[Batch],
    config: RunConfig,
    world: World,
    steps: int,
    aside: Path,
) -> Iterator[tuple[str, Any]]:
    """What stands beside the compute in the real loop, each switched off in turn with all else on."""
    save_every = config.train.save_every
    assert isinstance(save_every, int) and config.train.steps is not None
    run = RunDir(aside)
    for part in ("logs", "checkpoints"):
        (aside / part).mkdir()
    with (
        closing(Watchdog(run, world, 60.0, 600.0)) as watch,
        closing(Tracker(Log(run.log))) as tracker,
    ):
        saver = Saver(worker, config, run.checkpoints, world)
        loop = Loop(config, run, worker, world, tracker, StopRequest(), watch, Guard([]), saver)
        count = itertools.count()

        def timed(**off: Any) -> float:
            was = {name: getattr(loop, name) for name in off}
            for name, value in off.items():
                setattr(loop, name, value)
            batch, began = next(batches), time.perf_counter()
            loop.step(next(count), batch, 0.0)
            loop.settle()  # so that its time is its own
            if loop.stopping:
                raise KeyboardInterrupt
            took = time.perf_counter() - began
            for name, value in was.items():
                setattr(loop, name, value)
            return took

        unchecked = config.model_copy(
            update={"train": config.train.model_copy(update={"check_every": 2**40})}
        )
        switches: dict[str, dict[str, Any]] = {
            "guard": {"guard": _Blind([])},
            "comparing replicas": {"config": unchecked},
            "log": {"tracker": Tracker()},
        }
        timed()
        loop.step(next(count), next(batches), 0.0)
        yield (
            "host reads in a step",
            reads(partial(loop.step, next(count), next(batches), 0.0), world.device),
        )
        loop.settle()
        whole, costs = [], {name: list[float]() for name in switches}
        for _ in range(steps):
            for name, off in switches.items():
                on = timed()
                whole.append(on)
                costs[name].append(on - timed(**off))
        step_s = statistics.median(whole)
        for name, differences in costs.items():
            yield (
                f"cost of {name}, % of the step",
                round(100 * statistics.median(differences) / step_s, 3),
            )
        yield (
            "cost of token hashes, in the loader's thread, % of the step",
            round(100 * _hash_s(next(batches)) / step_s, 3),
        )
        began, during = time.perf_counter(), 0
        loop.save(next(count))
        saved = saver.finished()
        while world.sum(
            [float(saved is None)]
        ).item():  # a rank that has ended goes on with those that have not
            timed()
            during += 1
            saved = saved or saver.finished()
        assert saved is not None
        extra = time.perf_counter() - began - during * step_s
        yield "training blocked by one save, % of a step", round(100 * saved.blocked_s / step_s, 3)
        yield (
            f"cost of one save in {save_every} steps, % of them",
            round(100 * extra / (save_every * step_s), 3),
        )


def _hash_s(batch: Batch) -> float:
    rows, began = batch.tokens_BS.contiguous().numpy(), time.perf_counter()
    for seed, row in enumerate(rows):
        xxhash.xxh3_64_intdigest(row.data, seed)
    return time.perf_counter() - began


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
_CALLS = {"tolist", "cpu", "numpy"}  # which are no operations where the device is the host


def reads(update: Callable[[], object], device: torch.device) -> str:
    """How often and where the host waits for a number of its device, beside the loop's reading of the step before."""
    places: list[str] = []
    with _waits(places):
        if device.type == "cuda":
            with warnings.catch_warnings(record=True) as caught:
                torch.cuda.set_sync_debug_mode("warn")
                caught.clear()  # that this is a prototype
                warnings.simplefilter("always")
                try:
                    update()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            places += [
                f"{Path(w.filename).name}:{w.lineno}"
                for w in caught
                if "synchroniz" in str(w.message)
            ]
        else:
            with Operations(places), Calls(places):
                update()
    places = [place for place in places if not place.startswith("reading.py:")]
    where = ", ".join(f"{place} ×{n}" for place, n in Counter(places).items())
    return f"{len(places)}: {where}" if places else "0"


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes where a host would wait for its device, also where both are one."""

    def __init__(self, places: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places = places

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in _READS:
            self.places.append(_place())
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    def __init__(self, places: list[str]) -> None:
        super().__init__()
        self.places = places

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _CALLS:
            self.places.append(_place())
        return func(*args, **(kwargs or {}))


@contextmanager
def _waits(places: list[str]) -> Iterator[None]:
    """Where DeepSpeed waits for the whole device, of which torch does not warn."""
    if (loaded := sys.modules.get("deepspeed.accelerator")) is None:
        yield
        return
    accelerator: Any = loaded.get_accelerator()
    accelerator.synchronize = lambda *_: places.append(_place())
    try:
        yield
    finally:
        del accelerator.synchronize


def _place() -> str:
    frames = [
        f
        for f in traceback.extract_stack()
        if "/torch/" not in f.filename and f.filename != __file__
    ]
    return f"{Path(frames[-1].filename).name}:{frames[-1].name}"


def traced(step: Callable[[], object], device: torch.device) -> Any:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        step()
    return trace


def kernels(step: Callable[[], object], device: torch.device) -> str:
    """A step's kernels by their own time, and where the device had nothing to do."""
    trace, by = (
        traced(step, device),
        "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total",
    )
    table = trace.key_averages().table(sort_by=by, row_limit=40, max_name_column_width=100)
    return f"\n{table}{_gaps(trace)}"


def _gaps(trace: Any) -> str:
    """Pauses between kernels, the longest first; nothing of a CPU, whose operations lie inside each other."""
    ran = [e for e in trace.events() if e.device_type == torch.profiler.DeviceType.CUDA]
    ended, last, gaps = 0.0, "", list[tuple[float, str]]()
    for kernel in sorted(ran, key=lambda e: e.time_range.start):
        if last and kernel.time_range.start > ended:
            gaps.append((kernel.time_range.start - ended, f"{last[:60]} → {kernel.name[:60]}"))
        if kernel.time_range.end > ended:
            ended, last = kernel.time_range.end, kernel.name
    lines = [
        f"{pause / 1e3:10.3f} ms  {between}" for pause, between in sorted(gaps, reverse=True)[:20]
    ]
    total = f"idle between {len(ran)} kernels: {sum(pause for pause, _ in gaps) / 1e3:.2f} ms"
    return "\n".join([total, *lines, ""]) if ran else ""
