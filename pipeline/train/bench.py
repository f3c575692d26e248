"""The training step through the real engine, loader, loss and metrics, timed beside the device's own ceiling."""

import itertools
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline import account
from pipeline.checkpoint.save import Saver
from pipeline.config.schema import RunConfig
from pipeline.data.loader import prefetch
from pipeline.data.shards import Corpus
from pipeline.errors import RunError
from pipeline.layout import Layout, memory
from pipeline.objective.batch import Batch
from pipeline.optim.schedule import rate
from pipeline.parallel.build import engine
from pipeline.parallel.engine import Engine, Micro
from pipeline.parallel.world import World
from pipeline.track.log import Log
from pipeline.track.tracker import Fan, LocalLog
from pipeline.train.evaluate import cut, loader
from pipeline.train.guard import Guard
from pipeline.train.loop import Loop
from pipeline.train.meter import peak_flops, peak_memory_bytes
from pipeline.train.rundir import RunDir
from pipeline.train.stop import Stop
from pipeline.train.watch import Watch

_ALIKE = 0.05  # of the loss: two models of one shape, freshly drawn, begin no further apart
_READS = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "bincount", "_unique2"}
_CALLS = {"tolist", "cpu", "numpy"}  # which are no operations where the device is the host


class Peer(Protocol):
    """Another trainer of the same shape."""

    name: str

    def step(self, micros: Sequence[Micro], lr: float) -> Tensor: ...


class Twin:
    """Our own engine without fp8, from the same weights."""

    name = "bf16"

    def __init__(self, config: RunConfig, world: World) -> None:
        plain = config.train.model_copy(update={"fp8": False})
        self._engine = engine(config.model_copy(update={"train": plain}), world)

    def step(self, micros: Sequence[Micro], lr: float) -> Tensor:
        return self._engine.update(micros, lr).nll


Figures = Iterator[tuple[str, Any]]


class _Side:
    """A trainer and what was seen of it, alone or in turn with another on the same batches."""

    def __init__(self, step: Callable[[Batch, float], float], batch: Batch, before: int) -> None:
        self._step, self.took = step, list[float]()
        self.losses = [self._step(batch, 0.0)]  # compiles, and leaves the weights where they were drawn
        self._rest, self.peak = _held() - before, peak_memory_bytes()

    def step(self, batch: Batch, lr: float, waited: float = 0.0) -> None:
        others = _held() - self._rest
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        self.losses.append(self._step(batch, lr))
        self.took.append(waited + time.perf_counter() - began)
        if torch.cuda.is_available():
            most = peak_memory_bytes() - others
            self.peak = most if len(self.took) == 1 else max(self.peak, most)


def _held() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def train(
    config: RunConfig,
    world: World,
    corpus: Corpus | None,
    *,
    steps: int,
    parts: bool = True,
    profile: Path | None = None,
    peer: Callable[[RunConfig, World], Peer] | None = None,
    overheads: bool = False,
) -> Figures:
    """Figures as they are known. Without a corpus the tokens are drawn at random, and nothing waits for data."""
    train = config.train
    assert isinstance(train.batch_tokens, int) and isinstance(config.optim.lr, float)
    flops, peak = account.flops_per_token(config.model), peak_flops(config.cluster, world.device)
    ceiling = _matmul_flops(world.device)
    yield "device", torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    yield "torch", torch.__version__
    count = account.params(config.model)
    yield "model", f"{config.model.size} {config.model.arch}: {count.total:,} parameters, {count.active:,} active"
    yield "batch", f"{train.batch_tokens:,} tokens in micro-batches of {train.micro_batch} × {config.model.seq}"
    batches = _batches(config, corpus, world)
    first, before = next(batches), _held()
    worker = engine(config, world)
    ours = _Side(partial(_step, worker, config, world), first, before)
    theirs = None
    if peer is not None:
        before = _held()
        other = peer(config, world)
        theirs = _Side(lambda batch, lr: other.step(cut(batch, config, world), lr).item(), first, before)
        yield f"first loss, ours and {other.name}'s", f"{ours.losses[0]:.3f} {theirs.losses[0]:.3f}"
        if abs(ours.losses[0] - theirs.losses[0]) > _ALIKE * ours.losses[0]:
            raise RunError(f"the first losses {ours.losses[0]:.3f} and {theirs.losses[0]:.3f} are of different models")
    waited = []
    tenth = -(-steps // 10)
    for step in range(steps):
        began = time.perf_counter()
        batch, lr = next(batches), rate(config.optim.schedule, config.optim.lr, step, steps)
        waited.append(time.perf_counter() - began)
        ours.step(batch, lr, waited[-1])
        if theirs is not None:
            theirs.step(batch, lr)
            if (step + 1) % tenth == 0:
                us, them = (statistics.fmean(side.losses[-tenth:]) for side in (ours, theirs))
                what = f"loss of steps {step + 2 - tenth} to {step + 1}, ours and {other.name}'s"
                yield what, f"{us:.4f} {them:.4f} {100 * (us / them - 1):+.2f}%"
    step_s = statistics.median(ours.took)
    speed = train.batch_tokens / step_s / world.size
    yield "step ms", round(step_s * 1e3, 2)
    yield "data wait ms", round(statistics.median(waited) * 1e3, 3)
    yield "tokens/s per device", round(speed)
    if peak is not None:
        yield "MFU %", round(100 * speed * flops.model / peak, 2)
        yield "peak TFLOP/s", peak / 1e12
    else:
        yield "MFU %", "unknown: no peak is known for this device; give --cluster"
    yield "of measured matmul ceiling %", round(100 * speed * flops.model / ceiling, 2)
    yield "matmul ceiling TFLOP/s", round(ceiling / 1e12, 2)
    yield "convention", account.CONVENTION
    yield "peak memory GiB", round(ours.peak / 2**30, 2)
    yield "predicted memory GiB", round(memory(config, Layout.of(config, world.size)).total / 2**30, 2)
    if theirs is not None:
        yield from _compared(ours, theirs, other.name, train.batch_tokens)
    if parts:
        yield from _parts(worker, batches, config, world, steps)
    yield "host reads in an update", _reads(worker, next(batches), config, world)
    if profile is not None:
        yield "kernels", _kernels(worker, next(batches), config, world, profile)
    if overheads:
        with tempfile.TemporaryDirectory() as aside:
            yield from _overheads(worker, batches, config, world, steps, Path(aside))


def _step(worker: Engine, config: RunConfig, world: World, batch: Batch, lr: float = 0.0) -> float:
    """As the loop does it at its barest: update, one sum over ranks, one read of the loss."""
    update = worker.update(cut(batch, config, world), lr)
    loss, _ = world.sum([float(batch.hash & 0xFFFF)], first=update.nll).tolist()
    return float(loss) / world.size


def _batches(config: RunConfig, corpus: Corpus | None, world: World) -> Iterator[Batch]:
    reader, readers = world.reader(config.parallel.sp)
    if corpus is not None:
        of, pin = loader(config, corpus, "train"), world.device.type == "cuda"
        yield from (batch for _, batch in prefetch(of, 0, sys.maxsize, reader, readers, pin=pin))
    for step in itertools.count():
        generator = torch.Generator().manual_seed(step * readers + reader)
        tokens = torch.randint(config.model.vocab, (config.rows // readers, config.model.seq + 1), generator=generator)
        yield Batch(tokens[:, :-1], tokens[:, 1:], 0)


def _parts(worker: Engine, batches: Iterator[Batch], config: RunConfig, world: World, steps: int) -> Figures:
    """Where a step's time goes, waiting for the device after every part, which makes the sum a little longer."""
    spent: dict[str, float] = {}

    @contextmanager
    def clock(part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        spent[part] = spent.get(part, 0.0) + time.perf_counter() - began

    before, worker.clock = worker.clock, clock
    for _ in range(steps):
        _step(worker, config, world, next(batches))
    worker.clock = before
    for part, seconds in spent.items():
        yield f"{part} ms", round(seconds / steps * 1e3, 2)
    if world.size > 1:  # inside and beside those above
        events: Any = _trace(worker, next(batches), config, world).events()
        sent = sum(
            e.device_time_total or e.cpu_time_total for e in events if e.name.lower().startswith(("gloo", "nccl"))
        )
        yield "communication ms", round(sent / 1e3, 2)


def _compared(ours: _Side, theirs: _Side, name: str, tokens: int) -> Figures:
    if torch.cuda.is_available():
        yield f"{name} peak memory GiB", round(theirs.peak / 2**30, 2)
    us, them = (tokens / statistics.median(side.took) for side in (ours, theirs))
    yield f"tokens/s, ours and {name}'s in turn", f"{us:,.0f} {them:,.0f}"
    yield f"ours over {name}", round(us / them, 3)


class _Blind(Guard):
    def judge(self, loss: float, grad_norm: float) -> str:
        return ""


def _overheads(
    worker: Engine, batches: Iterator[Batch], config: RunConfig, world: World, steps: int, aside: Path
) -> Figures:
    """What stands beside the compute in the real loop, each switched off in turn with all else on."""
    save_every = config.train.save_every
    assert isinstance(save_every, int) and config.train.steps is not None
    run = RunDir(aside)
    for part in ("logs", "checkpoints"):
        (aside / part).mkdir()
    with closing(Watch(run, world, 60.0)) as watch, closing(Fan([LocalLog(Log(run.log))])) as tracker:
        saver = Saver(worker, config, run.checkpoints, world)
        loop = Loop(config, run, worker, world, tracker, Stop(), watch, Guard([]), saver)
        count = itertools.count()

        def timed(**off: Any) -> float:
            was = {name: getattr(loop, name) for name in off}
            for name, value in off.items():
                setattr(loop, name, value)
            batch, began = next(batches), time.perf_counter()
            if loop.step(next(count), batch, 0.0):
                raise KeyboardInterrupt
            took = time.perf_counter() - began
            for name, value in was.items():
                setattr(loop, name, value)
            return took

        unchecked = config.model_copy(update={"train": config.train.model_copy(update={"check_every": 2**40})})
        switches: dict[str, dict[str, Any]] = {
            "guard": {"guard": _Blind([])},
            "comparing replicas": {"config": unchecked},
            "log": {"tracker": Fan([])},
        }
        timed()
        whole, costs = [], {name: list[float]() for name in switches}
        for _ in range(steps):
            for name, off in switches.items():
                on = timed()
                whole.append(on)
                costs[name].append(on - timed(**off))
        step_s = statistics.median(whole)
        for name, differences in costs.items():
            yield f"cost of {name}, % of the step", round(100 * statistics.median(differences) / step_s, 3)
        yield (
            "cost of token hashes, in the loader's thread, % of the step",
            round(100 * _hash_s(next(batches)) / step_s, 3),
        )
        began, during = time.perf_counter(), 0
        loop.save(next(count))
        while saver.finished() is None:
            timed()
            during += 1
        extra = time.perf_counter() - began - during * step_s
        yield f"cost of one save in {save_every} steps, % of them", round(100 * extra / (save_every * step_s), 3)


def _hash_s(batch: Batch) -> float:
    rows, began = batch.tokens_BS.contiguous().numpy(), time.perf_counter()
    for seed, row in enumerate(rows):
        xxhash.xxh3_64_intdigest(row.data, seed)
    return time.perf_counter() - began


def _reads(worker: Engine, batch: Batch, config: RunConfig, world: World) -> str:
    """How often and where the host waits for a number of its device, beside the one reading of the loop."""
    assert isinstance(config.optim.lr, float)
    micros = cut(batch, config, world)
    places: list[str] = []
    with _waits(places):
        if world.device.type == "cuda":
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                worker.update(micros, config.optim.lr)
                torch.cuda.set_sync_debug_mode("default")
            places += [f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
        else:
            with _Operations(places), _Calls(places):
                worker.update(micros, config.optim.lr)
    return f"{len(places)}: " + ", ".join(f"{place} ×{n}" for place, n in Counter(places).items())


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes where a host would wait for its device, also where both are one."""

    def __init__(self, places: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places = places

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in _READS:
            self.places.append(_place())
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
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
    yield
    del accelerator.synchronize


def _place() -> str:
    frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename != __file__]
    return f"{Path(frames[-1].filename).name}:{frames[-1].name}"


def _matmul_flops(device: torch.device) -> float:
    """The best of a few large products: what a model made of nothing but matmuls could reach here."""
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2 * n**3 / best


def _trace(worker: Engine, batch: Batch, config: RunConfig, world: World) -> Any:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if world.device.type == "cuda":
        activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        _step(worker, config, world, batch)
    return trace


def _kernels(worker: Engine, batch: Batch, config: RunConfig, world: World, path: Path) -> str:
    """The kernels of one step by their own time, and where the device had nothing to do, as tables in a file."""
    trace, cuda = _trace(worker, batch, config, world), world.device.type == "cuda"
    by = "self_device_time_total" if cuda else "self_cpu_time_total"
    path.write_text(trace.key_averages().table(sort_by=by, row_limit=40, max_name_column_width=100) + _gaps(trace))
    return str(path)


def _gaps(trace: Any) -> str:
    """Pauses between kernels, the longest first; nothing of a CPU, whose operations lie inside each other."""
    kernels = [e for e in trace.events() if e.device_type == torch.profiler.DeviceType.CUDA]
    ended, last, gaps = 0.0, "", list[tuple[float, str]]()
    for kernel in sorted(kernels, key=lambda e: e.time_range.start):
        if last and kernel.time_range.start > ended:
            gaps.append((kernel.time_range.start - ended, f"{last[:60]} → {kernel.name[:60]}"))
        if kernel.time_range.end > ended:
            ended, last = kernel.time_range.end, kernel.name
    lines = [f"{pause / 1e3:10.3f} ms  {between}" for pause, between in sorted(gaps, reverse=True)[:20]]
    total = f"idle between {len(kernels)} kernels: {sum(pause for pause, _ in gaps) / 1e3:.2f} ms"
    return "\n".join([total, *lines, ""]) if kernels else ""
