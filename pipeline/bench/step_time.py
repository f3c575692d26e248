"""Time the training step with the real engine, loader and loss; compare with the device's peak."""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline.bench.step_profile import Figures, count_host_reads, kernels, measure_overheads, trace
from pipeline.config.schema import RunConfig
from pipeline.data.corpus import Corpus
from pipeline.data.loader import prefetch
from pipeline.errors import RunError
from pipeline.objective.batch import Batch, random_batch
from pipeline.optim.schedule import learning_rate
from pipeline.parallel.build_engine import build_engine
from pipeline.parallel.engine import Engine
from pipeline.parallel.world import World
from pipeline.planner import count as account
from pipeline.planner.memory import Layout, memory
from pipeline.planner.work import convention, training_flops
from pipeline.train.measure import (
    DeviceTime,
    cut,
    device_name,
    loader,
    peak_flops,
    peak_memory_bytes,
)

if TYPE_CHECKING:
    from pipeline.bench.peers.trainers import Peer  # imports transformers

# The largest relative difference of the first losses of two models of one shape, random weights.
_MAX_FIRST_DIFFERENCE = 0.05


class _Side:
    """A trainer and its measurements, alone or in turn with another on the same batches."""

    def __init__(
        self,
        name: str,
        step: Callable[[Batch, float], Tensor],
        world: World,
        batch: Batch,
        before: int,
    ) -> None:
        self.name = name
        self.seconds: list[float] = []
        self._step = step  # returns the loss without waiting for the device
        self.device = world.device
        self._pending: tuple[Tensor, DeviceTime] | None = None
        self._ended = DeviceTime(world.device)
        # At the learning rate 0, a step compiles and does not change the weights.
        self.losses = [step(batch, 0.0).item()]
        self._own_bytes = _allocated_bytes() - before
        self.peak_bytes = 0.0

    def launch(self, batch: Batch, lr: float, began: DeviceTime) -> None:
        """Launch a step, and then wait for the previous step if it is pending. If none is, the time
        of this step begins at `began`."""
        if self._pending is None:
            self._ended = began
        # Both sides share the memory of one GPU, so subtract the memory of the other one.
        others_bytes = _allocated_bytes() - self._own_bytes
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        # torch copies into pinned memory, so that nothing waits here.
        loss = self._step(batch, lr).to("cpu", non_blocking=True)
        ended = DeviceTime(self.device)
        peak = peak_memory_bytes() - (others_bytes if torch.cuda.is_available() else 0)
        self.peak_bytes = max(self.peak_bytes, peak)
        self.settle()
        self._pending = (loss, ended)

    def settle(self) -> None:
        """Wait for the pending step; record its loss and its time since the previous step ended."""
        if self._pending is not None:
            loss, ended = self._pending
            ended.wait()
            self.losses.append(loss.item())
            self.seconds.append(ended.since(self._ended))
            self._ended = ended
            self._pending = None


def measure_step(
    config: RunConfig,
    world: World,
    corpus: Corpus | None,
    *,
    steps: int,
    parts: bool = True,
    profile: bool = False,
    peer: "Callable[[RunConfig, World], Peer] | None" = None,
    overheads: bool = False,
    progress: Callable[[str], object] = lambda doing: None,
) -> Figures:
    """Yield figures as they are measured. Without a corpus, tokens are random."""
    # Measured on the same card, because cards of one kind differ by up to 3% (docs/BENCHMARKS.md).
    ceiling = _matmul_flops(world.device)
    yield from _description(config, world)
    progress("engine and first step")
    batches = _batches(config, corpus, world)
    first = next(batches)
    before = _allocated_bytes()
    engine = build_engine(config, world)
    ours = _Side("ours", partial(_step, engine, config, world), world, first, before)
    theirs = None
    # The peer is built after our first step, so that the memory of each is known.
    if peer is not None:
        before = _allocated_bytes()
        other = peer(config, world)
        step = partial(_peer_step, other, config, world)
        theirs = _Side(other.name, step, world, first, before)
        yield "compared with", other.about
        own_loss = ours.losses[0]
        loss = theirs.losses[0]
        yield f"first loss, ours and {theirs.name}'s", f"{own_loss:.3f} {loss:.3f}"
        if abs(own_loss - loss) > _MAX_FIRST_DIFFERENCE * own_loss:
            raise RunError(f"first losses {own_loss:.3f} and {loss:.3f}: the models differ")
    waited_s = yield from _timed_steps(config, batches, ours, theirs, steps, progress)
    yield from _speed(config, world, ours, waited_s, ceiling)
    if theirs is not None:
        yield from _ratios(ours, theirs, config.train.batch_tokens)
    progress("further steps")
    if parts:
        yield from _parts(engine, batches, config, world, steps)
    micros = cut(next(batches), config, world)
    reads = count_host_reads(lambda: engine.update(micros, 0.0), world.device)
    yield "host reads in an update", reads
    if profile:
        yield (
            "kernels",
            kernels(lambda: _step(engine, config, world, next(batches)).item(), world.device),
        )
    if overheads:
        with tempfile.TemporaryDirectory() as directory:
            yield from measure_overheads(engine, batches, config, world, steps, Path(directory))


def _description(config: RunConfig, world: World) -> Figures:
    count = account.params(config.model)
    name = f"{config.model.size} {config.model.arch}"
    yield "device", device_name(world.device)
    yield "torch", torch.__version__
    yield "model", f"{name}: {count.total:,} parameters, {count.active:,} active"
    micro = f"micro-batches of {config.train.micro_batch} × {config.model.seq}"
    yield "batch", f"{config.train.batch_tokens:,} tokens in {micro}"


def _timed_steps(
    config: RunConfig,
    batches: Iterator[Batch],
    ours: _Side,
    theirs: _Side | None,
    steps: int,
    progress: Callable[[str], object],
) -> Generator[tuple[str, Any], None, float]:
    """Time steps; yield the mean loss of each tenth of them, return the median wait for a batch.

    Alone, our steps overlap on the host as in training. Two trainers take turns, and each step is
    waited for. The loss of a single batch would be too noisy to compare them.
    """
    waited_s = []
    for step in range(steps):
        progress(f"step {step + 1} of {steps}")
        began = DeviceTime(ours.device)
        began_s = time.perf_counter()
        batch = next(batches)
        waited_s.append(time.perf_counter() - began_s)
        lr = learning_rate(config.optim.schedule, config.optim.lr, step, steps)
        ours.launch(batch, lr, began)
        if theirs is not None:
            ours.settle()
            # The peer gets the same batch from memory, so it does not wait for it.
            theirs.launch(batch, lr, DeviceTime(theirs.device))
            theirs.settle()
    ours.settle()
    tenth = -(-steps // 10)  # rounded up
    if theirs is not None or tenth > 1:
        for start in range(0, steps, tenth):
            stop = min(start + tenth, steps)
            yield _losses(f"loss of steps {start + 1} to {stop}", ours, theirs, start, stop)
        yield _losses(f"loss of all {steps} steps", ours, theirs, 0, steps)
    return statistics.median(waited_s)


def _losses(what: str, ours: _Side, theirs: _Side | None, start: int, stop: int) -> tuple[str, str]:
    timed = slice(start + 1, stop + 1)  # the first loss is that of the step that compiled
    own = statistics.fmean(ours.losses[timed])
    if theirs is None:
        return what, f"{own:.4f}"
    other = statistics.fmean(theirs.losses[timed])
    difference = f"{100 * (own / other - 1):+.2f}%"
    return f"{what}, ours and {theirs.name}'s", f"{own:.4f} {other:.4f} {difference}"


def _speed(
    config: RunConfig, world: World, ours: _Side, waited_s: float, ceiling: float
) -> Figures:
    # MFU counts the FLOPs of the model, without those that recomputation adds.
    flops = training_flops(config).model
    step_s = statistics.median(ours.seconds)
    speed = config.train.batch_tokens / step_s / world.size
    yield "step ms", round(step_s * 1e3, 2)
    yield "data wait ms", round(waited_s * 1e3, 3)
    yield "tokens/s per device", round(speed)
    name = device_name(world.device)
    peak = peak_flops(config.cluster, world.device)
    if peak is not None:
        yield "MFU %", round(100 * speed * flops / peak, 2)
        yield "peak TFLOP/s", peak / 1e12
    elif config.cluster.has(name):
        yield "MFU %", f"unknown: no peak for {name}; give --cluster, a file with its peak_flops"
    else:
        yield "MFU %", f"unknown: this is {name}, not the cluster's {config.cluster.device}"
    yield "of measured matmul ceiling %", round(100 * speed * flops / ceiling, 2)
    yield "matmul ceiling TFLOP/s", float(f"{ceiling / 1e12:.4g}")
    yield "convention", convention(config)
    predicted = memory(config, Layout.of(config, world.size)).total
    yield "peak memory GiB", round(ours.peak_bytes / 2**30, 2)
    yield "predicted memory GiB", round(predicted / 2**30, 2)


def _ratios(ours: _Side, theirs: _Side, batch_tokens: int) -> Figures:
    if torch.cuda.is_available():
        yield f"{theirs.name} peak memory GiB", round(theirs.peak_bytes / 2**30, 2)
    own, other = (batch_tokens / statistics.median(side.seconds) for side in (ours, theirs))
    yield f"tokens/s, ours and {theirs.name}'s in turn", f"{own:,.0f} {other:,.0f}"
    yield f"ours over {theirs.name}", round(own / other, 3)


def _step(engine: Engine, config: RunConfig, world: World, batch: Batch, lr: float = 0.0) -> Tensor:
    """Launch the minimum of a step of the training loop: an update and a sum over ranks."""
    update = engine.update(cut(batch, config, world), lr)
    # The loop sums parts of the token hash along with the loss, so this does too.
    return world.sum(update.nll, [float(batch.hash & 0xFFFF)])[0] / world.size


def _peer_step(peer: "Peer", config: RunConfig, world: World, batch: Batch, lr: float) -> Tensor:
    return peer.step(cut(batch, config, world), lr)


def _batches(config: RunConfig, corpus: Corpus | None, world: World) -> Iterator[Batch]:
    reader, readers = world.reader(config.parallel.sp)
    rows = _RandomRows(config) if corpus is None else loader(config, corpus, "train")
    pin = world.device.type == "cuda"
    for _, batch in prefetch(rows, 0, sys.maxsize, reader, readers, pin=pin):
        yield batch


class _RandomRows:
    """Random text in place of a corpus."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        # A seed for each step and reader: every rank draws different rows.
        rows = range(self._config.rows // world)
        return random_batch(self._config, step * world + rank, rows)


def _parts(
    engine: Engine, batches: Iterator[Batch], config: RunConfig, world: World, steps: int
) -> Figures:
    """Time each part of a step. Waiting for the device after each makes the sum a little longer."""
    spent: dict[str, float] = {}

    @contextmanager
    def clock(part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        _wait_for(world.device)
        spent[part] = spent.get(part, 0.0) + time.perf_counter() - began

    before = engine.clock
    engine.clock = clock
    for _ in range(steps):
        _step(engine, config, world, next(batches)).item()
    engine.clock = before
    for part, seconds in spent.items():
        yield f"{part} ms", round(seconds / steps * 1e3, 2)
    sent_us = 0.0
    if world.size > 1:
        traced = trace(lambda: _step(engine, config, world, next(batches)).item(), world.device)
        events = [e for e in traced.events() if e.name.lower().startswith(("gloo", "nccl"))]
        # NCCL's kernels have device time. gloo runs on the host and has CPU time only.
        sent_us = sum(e.device_time_total or e.cpu_time_total for e in events)
    # Communication happens during the parts above; it is not added to them.
    yield "communication ms", round(sent_us / 1e3, 2)


def _matmul_flops(device: torch.device) -> float:
    """Return the best FLOP/s of a few large matmuls: the ceiling for any model on this device."""
    on_gpu = device.type == "cuda"
    # Large enough to fill an H200; on a CPU core 1024 takes some milliseconds.
    n = 8192 if on_gpu else 1024
    dtype = torch.bfloat16 if on_gpu else torch.float32
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    best_s = float("inf")
    # The first products select a kernel and wake the device; the best of ten excludes them.
    for _ in range(10):
        _wait_for(device)
        began = time.perf_counter()
        a @ b
        _wait_for(device)
        best_s = min(best_s, time.perf_counter() - began)
    return 2 * n**3 / best_s  # a multiplication and an addition per term


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _allocated_bytes() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
