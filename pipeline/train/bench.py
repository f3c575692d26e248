"""The training step through the real engine, loader, loss and metrics, timed beside the device's own ceiling."""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pipeline import account
from pipeline.config.schema import RunConfig
from pipeline.data.loader import Loader, prefetch
from pipeline.data.shards import Corpus
from pipeline.layout import Layout, memory
from pipeline.objective.batch import Batch
from pipeline.parallel.build import engine
from pipeline.parallel.engine import Engine
from pipeline.parallel.world import World
from pipeline.train.evaluate import cut
from pipeline.train.meter import peak_flops, peak_memory_bytes

_WARMUP = 1  # compiles


def train(
    config: RunConfig,
    world: World,
    corpus: Corpus | None,
    *,
    steps: int,
    parts: bool = True,
    profile: Path | None = None,
) -> Iterator[tuple[str, Any]]:
    """Figures as they are known. Without a corpus the tokens are drawn at random, and nothing waits for data."""
    train = config.train
    assert isinstance(train.batch_tokens, int)
    flops, peak = account.flops_per_token(config.model), peak_flops(config.cluster, world.device)
    ceiling = _matmul_flops(world.device)
    yield "device", torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    yield "torch", torch.__version__
    count = account.params(config.model)
    yield "model", f"{config.model.size} {config.model.arch}: {count.total:,} parameters, {count.active:,} active"
    yield "batch", f"{train.batch_tokens:,} tokens in micro-batches of {train.micro_batch} × {config.model.seq}"
    worker = engine(config, world)
    batches = _batches(config, corpus, _WARMUP + 2 * steps + 2, world)
    for _ in range(_WARMUP):
        _step(worker, next(batches), config, world)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    took, waited = [], []
    for _ in range(steps):
        began = time.perf_counter()
        batch = next(batches)
        waited.append(time.perf_counter() - began)
        _step(worker, batch, config, world)
        took.append(time.perf_counter() - began)
    step_s = statistics.median(took)
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
    predicted = memory(config, Layout.of(config, world.size))
    yield "peak memory GiB", round(peak_memory_bytes() / 2**30, 2)
    yield "predicted memory GiB", round(predicted.total / 2**30, 2)
    if parts:
        yield from _parts(worker, batches, config, world, steps)
    if profile is not None:
        yield "kernels", _kernels(worker, next(batches), config, world, profile)
    yield "convention", account.CONVENTION


def _step(worker: Engine, batch: Batch, config: RunConfig, world: World) -> None:
    """As the loop does it: update, one sum over ranks, one read."""
    assert isinstance(config.train.micro_batch, int) and isinstance(config.optim.lr, float)
    update = worker.update(cut(batch, config.train.micro_batch, world), config.optim.lr)
    world.sum([float(batch.hash & 0xFFFF)], first=update.nll).tolist()


def _batches(config: RunConfig, corpus: Corpus | None, count: int, world: World) -> Iterator[Batch]:
    assert isinstance(config.train.batch_tokens, int)
    seq, rows = config.model.seq, config.train.batch_tokens // config.model.seq
    reader, readers = world.reader(config.parallel.sp)
    if corpus is not None:
        loader = Loader(corpus, "train", seq=seq, rows=rows, seed=config.seed)
        yield from (batch for _, batch in prefetch(loader, 0, count, reader, readers))
        return
    for step in range(count):
        generator = torch.Generator().manual_seed(step * readers + reader)
        tokens = torch.randint(config.model.vocab, (rows // readers, seq + 1), generator=generator)
        yield Batch(tokens[:, :-1], tokens[:, 1:], 0)


def _parts(
    worker: Engine, batches: Iterator[Batch], config: RunConfig, world: World, steps: int
) -> Iterator[tuple[str, float]]:
    """Where a step's time goes, waiting for the device after every part, which makes the sum a little longer."""
    spent: dict[str, float] = {}

    @contextmanager
    def clock(part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        spent[part] = spent.get(part, 0.0) + time.perf_counter() - began

    worker.clock = clock
    for _ in range(steps):
        _step(worker, next(batches), config, world)
    for part, seconds in spent.items():
        yield f"{part} ms", round(seconds / steps * 1e3, 2)


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


def _kernels(worker: Engine, batch: Batch, config: RunConfig, world: World, path: Path) -> str:
    """The kernels of one step by their own time, as a table in a file."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if world.device.type == "cuda":
        activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        _step(worker, batch, config, world)
    by = "self_device_time_total" if world.device.type == "cuda" else "self_cpu_time_total"
    path.write_text(trace.key_averages().table(sort_by=by, row_limit=40, max_name_column_width=100))
    return str(path)
