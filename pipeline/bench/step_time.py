"""The training step through the real engine, loader, loss and metrics, timed beside the device's own ceiling."""

import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline.bench.step_profile import kernels, overheads, reads, traced
from pipeline.config.schema import RunConfig
from pipeline.data.corpus import Corpus
from pipeline.data.loader import prefetch
from pipeline.errors import RunError
from pipeline.objective.batch import Batch
from pipeline.optim.schedule import learning_rate
from pipeline.parallel.build_engine import build_engine
from pipeline.parallel.engine import Engine, Micro
from pipeline.parallel.world import World
from pipeline.planner import count as account
from pipeline.planner.memory import Layout, memory
from pipeline.train.device_clock import device_name, peak_flops, peak_memory_bytes
from pipeline.train.evaluation import cut, loader

_ALIKE = 0.05  # of the loss: two models of one shape, freshly drawn, begin no further apart


class Peer(Protocol):
    """Another trainer of the same shape."""

    name: str
    about: str

    def step(self, micros: Sequence[Micro], lr: float) -> Tensor: ...


class Twin:
    """Our own engine without fp8, from the same weights."""

    about = "our engine without fp8"

    def __init__(self, config: RunConfig, world: World) -> None:
        self.name: str = config.train.dtype  # fp32 on a CPU, unless bf16 is asked for
        plain = config.train.model_copy(update={"fp8": False})
        self._engine = build_engine(config.model_copy(update={"train": plain}), world)

    def step(self, micros: Sequence[Micro], lr: float) -> Tensor:
        return self._engine.update(micros, lr).nll


Figures = Iterator[tuple[str, Any]]


class _Side:
    """A trainer and what was seen of it, alone or in turn with another on the same batches."""

    def __init__(
        self, name: str, step: Callable[[Batch, float], float], batch: Batch, before: int
    ) -> None:
        self.name, self._step, self.took = name, step, list[float]()
        self.losses = [
            self._step(batch, 0.0)
        ]  # compiles, and leaves the weights where they were drawn
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
    profile: bool = False,
    peer: Callable[[RunConfig, World], Peer] | None = None,
    beside: bool = False,
    say: Callable[[str], object] = lambda doing: None,
) -> Figures:
    """Figures as they are known. Without a corpus the tokens are drawn at random, and nothing waits for data."""
    train = config.train
    assert isinstance(train.batch_tokens, int) and isinstance(config.optim.lr, float)
    flops, peak = account.flops_per_token(config.model), peak_flops(config.cluster, world.device)
    ceiling = _matmul_flops(world.device)
    yield "device", (name := device_name(world.device))
    yield "torch", torch.__version__
    count = account.params(config.model)
    yield (
        "model",
        f"{config.model.size} {config.model.arch}: {count.total:,} parameters, {count.active:,} active",
    )
    yield (
        "batch",
        f"{train.batch_tokens:,} tokens in micro-batches of {train.micro_batch} × {config.model.seq}",
    )
    say("engine and first step")
    batches = _batches(config, corpus, world)
    first, before = next(batches), _held()
    worker = build_engine(config, world)
    ours = _Side("ours", partial(_step, worker, config, world), first, before)
    theirs = None
    if peer is not None:
        before = _held()
        other = peer(config, world)
        theirs = _Side(
            other.name,
            lambda batch, lr: other.step(cut(batch, config, world), lr).item(),
            first,
            before,
        )
        yield "compared with", other.about
        yield f"first loss, ours and {other.name}'s", f"{ours.losses[0]:.3f} {theirs.losses[0]:.3f}"
        if abs(ours.losses[0] - theirs.losses[0]) > _ALIKE * ours.losses[0]:
            raise RunError(
                f"the first losses {ours.losses[0]:.3f} and {theirs.losses[0]:.3f} are of different models"
            )
    waited = []
    tenth = -(-steps // 10)
    for step in range(steps):
        say(f"step {step + 1} of {steps}")
        began = time.perf_counter()
        batch, lr = (
            next(batches),
            learning_rate(config.optim.schedule, config.optim.lr, step, steps),
        )
        waited.append(time.perf_counter() - began)
        ours.step(batch, lr, waited[-1])
        if theirs is not None:
            theirs.step(batch, lr)
        if ((step + 1) % tenth == 0 or step + 1 == steps) and (theirs is not None or tenth > 1):
            last = step % tenth + 1
            yield _losses(f"loss of steps {step + 2 - last} to {step + 1}", ours, theirs, last)
    if tenth > 1 or theirs is not None:
        yield _losses(f"loss of all {steps} steps", ours, theirs, steps)
    step_s = statistics.median(ours.took)
    speed = train.batch_tokens / step_s / world.size
    yield "step ms", round(step_s * 1e3, 2)
    yield "data wait ms", round(statistics.median(waited) * 1e3, 3)
    yield "tokens/s per device", round(speed)
    if peak is not None:
        yield "MFU %", round(100 * speed * flops.model / peak, 2)
        yield "peak TFLOP/s", peak / 1e12
    elif config.cluster.has(name):
        yield (
            "MFU %",
            f"unknown: no peak is known for {name}; give --cluster, a file with its peak_flops",
        )
    else:
        yield "MFU %", f"unknown: this is {name}, not the cluster's {config.cluster.device}"
    yield "of measured matmul ceiling %", round(100 * speed * flops.model / ceiling, 2)
    yield "matmul ceiling TFLOP/s", float(f"{ceiling / 1e12:.4g}")
    yield "convention", account.CONVENTION
    yield "peak memory GiB", round(ours.peak / 2**30, 2)
    yield (
        "predicted memory GiB",
        round(memory(config, Layout.of(config, world.size)).total / 2**30, 2),
    )
    if theirs is not None:
        yield from _compared(ours, theirs, train.batch_tokens)
    say("further steps")
    if parts:
        yield from _parts(worker, batches, config, world, steps)
    micros, lr = cut(next(batches), config, world), config.optim.lr
    yield "host reads in an update", reads(lambda: worker.update(micros, lr), world.device)
    if profile:
        yield "kernels", kernels(lambda: _step(worker, config, world, next(batches)), world.device)
    if beside:
        with tempfile.TemporaryDirectory() as aside:
            yield from overheads(worker, batches, config, world, steps, Path(aside))


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
        tokens = torch.randint(
            config.model.vocab, (config.rows // readers, config.model.seq + 1), generator=generator
        )
        yield Batch(tokens[:, :-1], tokens[:, 1:], 0)


def _parts(
    worker: Engine, batches: Iterator[Batch], config: RunConfig, world: World, steps: int
) -> Figures:
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
    sent = 0.0
    if world.size > 1:
        events: Any = traced(
            lambda: _step(worker, config, world, next(batches)), world.device
        ).events()
        sent = sum(
            e.device_time_total or e.cpu_time_total
            for e in events
            if e.name.lower().startswith(("gloo", "nccl"))
        )
    yield "communication ms", round(sent / 1e3, 2)  # inside and beside those above


def _losses(what: str, ours: _Side, theirs: _Side | None, last: int) -> tuple[str, str]:
    us = statistics.fmean(ours.losses[-last:])
    if theirs is None:
        return what, f"{us:.4f}"
    them = statistics.fmean(theirs.losses[-last:])
    return f"{what}, ours and {theirs.name}'s", f"{us:.4f} {them:.4f} {100 * (us / them - 1):+.2f}%"


def _compared(ours: _Side, theirs: _Side, tokens: int) -> Figures:
    if torch.cuda.is_available():
        yield f"{theirs.name} peak memory GiB", round(theirs.peak / 2**30, 2)
    us, them = (tokens / statistics.median(side.took) for side in (ours, theirs))
    yield f"tokens/s, ours and {theirs.name}'s in turn", f"{us:,.0f} {them:,.0f}"
    yield f"ours over {theirs.name}", round(us / them, 3)


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
