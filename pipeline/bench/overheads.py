"""What stands beside the compute of a step: guard, comparison of replicas, log, hashes and saves, each priced."""

import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from pipeline.bench.host_waits import reads
from pipeline.checkpoint.save import Saver
from pipeline.config.schema import RunConfig
from pipeline.objective.batch import Batch
from pipeline.parallel.engine import Engine
from pipeline.parallel.world import World
from pipeline.runs.directory import RunDir
from pipeline.runs.log import Log
from pipeline.track.tracker import Fan, LocalLog
from pipeline.train.guard import Guard
from pipeline.train.loop import Loop
from pipeline.train.supervisor import StopRequest
from pipeline.train.watchdog import Watch


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
        closing(Watch(run, world, 60.0, 600.0)) as watch,
        closing(Fan([LocalLog(Log(run.log))])) as tracker,
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
            "log": {"tracker": Fan([])},
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
