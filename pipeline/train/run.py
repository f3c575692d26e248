"""One process's part of a run, assembled from its config: the file to read first."""

import time
from contextlib import closing
from pathlib import Path

import torch

from pipeline.checkpoint.load import begin, find, load
from pipeline.checkpoint.save import Saver
from pipeline.config.layers import reload
from pipeline.config.schema import RunConfig
from pipeline.data.shards import Corpus
from pipeline.errors import RunError
from pipeline.parallel.build import engine
from pipeline.parallel.engine import Engine
from pipeline.parallel.world import World
from pipeline.runs import faults
from pipeline.runs.directory import RunDir
from pipeline.runs.history import goodput, startup_cost
from pipeline.runs.log import Log, read
from pipeline.track.console import Console
from pipeline.track.tracker import Fan, LocalLog, Tracker
from pipeline.train.evaluation import Evaluator, loader
from pipeline.train.guard import Guard, RollbackError, relevant
from pipeline.train.loop import Loop
from pipeline.train.request import same_data
from pipeline.train.stop import Stop
from pipeline.train.watchdog import Watch


def run(
    path: Path, world: World, stop: Stop, *, quiet: bool = False, data: Path | None = None
) -> bool:
    """Train the run in a directory from where it stands; whether it reached its end. `data`: a nearer copy of it."""
    directory = RunDir(path)
    if world.first:
        directory.lock()
    config = reload(directory.config, [{"data": {"dir": str(data)}}] if data else [])
    torch.manual_seed(config.seed + world.rank)
    corpus = _corpus(config)
    batches = loader(config, corpus, "train")
    with closing(Watch(directory, world, config.train.hang_s, config.train.first_s)) as watch:
        worker, back = engine(config, world), None
        evaluator, saver = (
            Evaluator(config, corpus, world),
            Saver(worker, config, directory.checkpoints, world),
        )
        while True:
            start, notes = _resume(worker, directory, world, config.init, back)
            tracker = _tracker(directory, config, world, start, notes, back, quiet=quiet)
            guard = Guard(world.first_says(relevant(read(directory.log)) if world.first else []))
            loop = Loop(config, directory, worker, world, tracker, stop, watch, guard, saver)
            try:
                return loop.train(batches, evaluator, start)
            except RollbackError as trouble:
                watch.enter("rollback", trouble.last)
                loop.saved(saver.wait())
                back = trouble
            finally:
                tracker.close()


def _corpus(config: RunConfig) -> Corpus:
    if config.data.dir is None:
        raise RunError("data.dir is missing; give --data DIR, made by `launch data prepare`")
    corpus = Corpus.open(Path(config.data.dir))
    same_data(config, corpus)
    return corpus


def _resume(
    worker: Engine,
    directory: RunDir,
    world: World,
    init: str | None,
    back: RollbackError | None = None,
) -> tuple[int, list[str]]:
    found, notes = find(directory.checkpoints, world)
    if found is None and back is not None:
        raise RunError(
            f"{back}, and there is no checkpoint to go back to; lower optim.lr or train.save_every"
        )
    if found is None:
        saved = [r["saved"] for r in read(directory.log) if r.get("event") == "save"]
        if saved:
            raise RunError(
                f"{directory.checkpoints} is empty but step {saved[-1]} was saved there; restore it, or start "
                "anew with another --out"
            )
        if init is not None:
            begin(worker, Path(init))
        return 0, notes
    load(worker, found, world)
    return found.step, notes


def _tracker(
    directory: RunDir,
    config: RunConfig,
    world: World,
    start: int,
    notes: list[str],
    back: RollbackError | None,
    *,
    quiet: bool,
) -> Tracker:
    """The log cut back to where the run stands, and told how it came to start there."""
    if not world.first:
        return Fan([])
    assert config.train.steps is not None
    before = list(read(directory.log))
    fault = faults.unlogged(directory, before)
    log = Log(directory.log)
    log.truncate_after(start)
    tracker = Fan([LocalLog(log), Console(config.train.steps, quiet=quiet)])
    event = {
        "kind": "event",
        "time": time.time(),
        "step": start,
        "event": "rollback" if back else "restart" if fault else "resume" if start else "start",
        "world": world.size,
        "reason": back.reason if back else faults.line(fault) if fault else "",
        "notes": "; ".join(notes),
        **({"first": back.first, "last": back.last} if back else {}),
        **startup_cost(before, start, failed=bool(back or fault)),
    }
    kept = [record for record in before if record["step"] <= start]
    tracker.record({**event, "goodput": goodput([*kept, event])["goodput"] if kept else None})
    return tracker
