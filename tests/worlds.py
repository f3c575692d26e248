"""Run jobs in groups of several sizes after a single import: the ranks are forks of a process that has torch and
DeepSpeed loaded. `python -m tests.worlds JOBS.json` does a list of jobs, one after the other.
"""

import json
import math
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import pipeline.train.worker
from pipeline.bench.plain_run import draw_batch
from pipeline.checkpoint.restore import find, load
from pipeline.checkpoint.save import Saver
from pipeline.config.layers import reload
from pipeline.parallel.build_engine import build_engine
from pipeline.parallel.fragments import Fragment
from pipeline.parallel.world import World
from pipeline.process import StopRequest, one_node
from pipeline.runs.directory import RunDir
from pipeline.train.measure import cut as cut_batch
from pipeline.train.request import Devices, Request, plan_run
from pipeline.train.worker import run


def fork(ranks: int, work: Callable[[World], object]) -> None:
    """Call `work` in `ranks` processes that are connected like those of a run; raise if one fails."""
    children = []
    store = Path(tempfile.mkdtemp(prefix="isoflop-")) / "store"
    for rank in range(ranks):
        if (child := os.fork()) == 0:
            os.environ |= one_node(rank, ranks, store)
            try:
                work(World.from_environment(os.environ))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    failed = [child for child in children if os.waitpid(child, 0)[1]]
    shutil.rmtree(store.parent)
    assert not failed, f"{len(failed)} of {ranks} ranks failed"


def launch(arguments: list[object]) -> None:
    """Run a command; its ranks are forked here instead of started."""
    from launch import __main__ as command_line
    from pipeline.train import supervisor as start

    def started(directory: RunDir, *, nproc: int, **_: object) -> tuple[str, None]:
        fork(nproc, lambda world: run(directory.path, world, StopRequest(), quiet=True))
        return "", None

    def call(_world: World) -> None:
        start.start = started
        sys.argv = ["launch", *map(str, arguments)]
        try:
            command_line.main()
        except SystemExit as end:
            assert not end.code, sys.argv

    fork(1, call)  # it holds the directory while it lives


def train(out: str, nproc: int, over: dict[str, Any], **rest: Any) -> None:
    """Train a run from its last checkpoint to its end."""
    path = Path(out)
    resume = path.exists()
    size, arch = (None, None) if resume else ("27k", rest.get("arch", "dense"))
    given = {"sets": rest.get("sets", ()), "over": over, "resume": resume}
    request = Request(size, arch, Path(rest["data"]), path, nproc, **given)
    plan = lambda _: plan_run(request, Devices(0, 2**36, "CPU")).commit()  # noqa: E731
    fork(1, plan)  # it holds the directory while it lives
    fork(nproc, lambda world: run(path, world, StopRequest(), quiet=True))


def cut(out: str, step: int) -> None:
    """Remove everything after a step from a run."""
    path = Path(out)
    for checkpoint in (path / "checkpoints").glob("step-*"):
        if int(checkpoint.name[5:]) > step:
            shutil.rmtree(checkpoint)
    log = path / "log.jsonl"
    log.write_text(
        "".join(line for line in log.read_text().splitlines(True) if '"finish"' not in line)
    )


def convert(out: str, to: str, nproc: int, over: dict[str, Any], reject: bool = False) -> None:
    """Load a run's newest checkpoint into another layout and save it from there at once.

    With `reject`, a step in between has gradients of NaN and is skipped."""
    config = reload(Path(out) / "config.toml", over=over)
    Path(to).mkdir(parents=True)

    def work(world: World) -> None:
        worker = build_engine(config, world)
        found, _ = find(Path(out) / "checkpoints", world)
        assert found is not None
        load(worker, found, world)
        if reject:
            for parameter in worker.module.parameters():
                parameter.register_hook(lambda gradient: gradient * math.nan)
            micros = cut_batch(draw_batch(config, 0, world), config, world)
            update = worker.update(micros, config.optim.lr, lambda nll, _: nll != nll)
            # The NaN arrived; DeepSpeed may write -1 or infinity instead.
            assert not 0 < float(update.grad_norm) < math.inf
        saver = Saver(worker, config, Path(to), world)
        saver.save(found.step)
        saver.wait()
        if world.first:
            shutil.copy("/proc/self/maps", Path(to) / "maps")

    fork(nproc, work)


class Late(Saver):
    """A saver that copies only after the next step has begun; the saved state must still be the old one."""

    def _copy(self, live: list[Fragment]) -> tuple[int, list[Fragment]]:
        time.sleep(0.1)
        return super()._copy(live)


if __name__ == "__main__":
    torch.set_num_threads(1)  # threads do not survive a fork
    pipeline.train.worker.Saver = Late
    import pipeline.parallel.ddp
    import pipeline.parallel.zero

    for job in json.loads(Path(sys.argv[1]).read_text()):
        {"launch": launch, "train": train, "cut": cut, "convert": convert, "copy": shutil.copytree}[
            job.pop("do")
        ](**job)
        print("done", job, flush=True)
