"""One training process, and the file to read first: it assembles a run from its config.

`python -P -m pipeline.train.worker RUN_DIR [--quiet] [--data COPY]`, started by the supervisor
or by a SLURM task. They set RANK, WORLD_SIZE and the address at which the ranks meet. With
`--preload`, the process imports everything and then forks the ranks (preload.py).
"""

import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import closing
from pathlib import Path
from typing import cast

if __name__ == "__main__":
    # Until it can save, a rank ends at Ctrl-C: some imports ignore any exception.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch

from pipeline.checkpoint.restore import find, load, load_initial_weights, load_teacher
from pipeline.checkpoint.save import Saver
from pipeline.config.layers import reload
from pipeline.config.schema import RunConfig
from pipeline.data.corpus import Corpus
from pipeline.errors import RunError, UserError
from pipeline.model.stack import Decoder
from pipeline.parallel.build_engine import build_engine
from pipeline.parallel.engine import Engine
from pipeline.parallel.world import World, leave
from pipeline.process import NOT_FORKED, STOPPED, PatientOutput, StopRequest, end_with_parent
from pipeline.runs.directory import RunDir, fault_line
from pipeline.runs.history import goodput, startup_cost
from pipeline.runs.log import Log, read
from pipeline.tasks.in_context import InContext
from pipeline.tasks.monitor import Monitor
from pipeline.track.console import Console, Tracker
from pipeline.train.guard import Guard, RollbackError, relevant
from pipeline.train.loop import Loop
from pipeline.train.measure import Evaluator, loader
from pipeline.train.preload import serve
from pipeline.train.watchdog import Watchdog

_LEAVE_S = 60.0  # limit for the destruction of the process group


def run(
    path: Path, world: World, stop: StopRequest, *, quiet: bool = False, data: Path | None = None
) -> bool:
    """Train a run from its last checkpoint; return whether it reached its last step.

    `data` is a copy of the corpus on a nearer disk.
    """
    gc.freeze()  # imported modules are never garbage: searching them takes 0.1 s each time
    directory = RunDir(path)
    if world.first:
        directory.lock()  # the kernel releases it when this process dies, however it dies
    config = reload(directory.config, [{"data": {"dir": str(data)}}] if data else [])
    # Weights and batches have separate generators; this one is for all other draws.
    torch.manual_seed(config.seed + world.rank)
    if config.data.dir is None:
        raise RunError("data.dir is missing; give --data DIR, made by `launch data prepare`")
    corpus = Corpus.open(Path(config.data.dir))
    corpus.check_same(config.data)
    batches = loader(config, corpus, "train")
    with closing(Watchdog(directory, world, config.train.hang_s, config.train.first_s)) as watch:
        engine = build_engine(config, world)
        cast(Decoder, engine.module).teacher = load_teacher(config, world.device)
        evaluator = Evaluator(config, corpus, world)
        tasks = Monitor(config, corpus, world)
        in_context = InContext(config, corpus, world, evaluator.micros)
        saver = Saver(engine, config, directory.checkpoints, world)
        rollback: RollbackError | None = None
        while True:  # once, and again after each rollback
            start, notes = _resume(engine, directory, world, config.init, rollback)
            tracker = _start_log(directory, config, world, start, notes, rollback, quiet=quiet)
            # The guard decides from the log, which rank 0 alone reads.
            guard = Guard(world.broadcast(relevant(read(directory.log)) if world.first else []))
            loop = Loop(config, directory, engine, world, tracker, stop, watch, guard, saver)
            try:
                return loop.train(batches, evaluator, tasks, in_context, start)
            except RollbackError as error:
                watch.enter("rollback", error.last)
                loop.log_save(saver.wait())
                rollback = error
            finally:
                tracker.close()


def _resume(
    engine: Engine,
    directory: RunDir,
    world: World,
    init: str | None,
    rollback: RollbackError | None,
) -> tuple[int, list[str]]:
    """Load the newest intact checkpoint; return its step and notes about damaged newer ones."""
    found, notes = find(directory.checkpoints, world)
    if found is not None:
        load(engine, found, world)
        return found.step, notes
    if rollback is not None:
        text = f"{rollback}, and there is no checkpoint to go back to"
        raise RunError(f"{text}; lower optim.lr or train.save_every")
    saved = [r["saved"] for r in read(directory.log) if r.get("event") == "save"]
    if saved:
        text = f"{directory.checkpoints} is empty but step {saved[-1]} was saved there"
        raise RunError(f"{text}; restore it, or start again with another --out")
    if init is not None:
        load_initial_weights(engine, Path(init))
    return 0, notes


def _start_log(
    directory: RunDir,
    config: RunConfig,
    world: World,
    start: int,
    notes: list[str],
    rollback: RollbackError | None,
    *,
    quiet: bool,
) -> Tracker:
    """Truncate the log after the step of the checkpoint, and log how the run starts there."""
    if not world.first:
        return Tracker()
    before = list(read(directory.log))
    # This start recovers from the last fault, if nothing was logged after it.
    faults = [f for f in directory.past_faults() if not before or f["time"] > before[-1]["time"]]
    log = Log(directory.log)
    log.truncate_after(start)  # later steps are trained and logged again
    if NOT_FORKED in os.environ:  # removed, so that a rollback does not log it again
        notes = [*notes, f"the preloader was not used: {os.environ.pop(NOT_FORKED)}"]
    # A branch begins with the log of its trunk, and its own first step is not a resume.
    branch = directory.fact("branch") or {"step": 0}
    kind = "resume" if start > branch["step"] else "start"
    reason = ""
    if rollback:
        kind = "rollback"
        reason = rollback.reason
    elif faults:
        kind = "restart"
        reason = fault_line(faults[-1])
    event = {
        "kind": "event",
        "time": time.time(),
        "step": start,
        "event": kind,
        "world": world.size,
        "reason": reason,
        "notes": "; ".join(notes),
        **({"first": rollback.first, "last": rollback.last} if rollback else {}),
        **startup_cost(before, start, failed=bool(rollback or faults)),
    }
    kept = [record for record in before if record["step"] <= start]
    tracker = Tracker(log, Console(config.train.steps, quiet=quiet))
    tracker.record({**event, "goodput": goodput([*kept, event])["goodput"] if kept else None})
    return tracker


def main(arguments: list[str]) -> int:
    """Run one rank; the exit codes are those of supervisor.py."""
    path = Path(arguments[0])
    stop = StopRequest()
    end_with_parent()  # under SLURM, the task; otherwise the supervisor
    copy = Path(arguments[arguments.index("--data") + 1]) if "--data" in arguments else None
    try:
        world = World.from_environment(os.environ)
        finished = run(path, world, stop, quiet="--quiet" in arguments, data=copy)
    except UserError as error:
        RunDir(path).fail(error)
        return 2
    except BaseException as error:  # also KeyboardInterrupt: the supervisor needs a reason
        traceback.print_exc()
        RunDir(path).fail(error)
        return 1
    code = 0 if finished else STOPPED
    # All is saved, so a hang in the destruction of the process group must not keep the run open.
    limit = threading.Timer(_LEAVE_S, _end, [code])
    limit.daemon = True
    limit.start()
    leave()
    return code


def _end(code: int) -> None:
    faulthandler.dump_traceback()
    os._exit(code)


def _import_all(path: Path) -> None:
    """Import the modules that a rank otherwise imports only when it needs them."""
    import pipeline.parallel.zero  # noqa: F401

    if reload(RunDir(path).config).train.compile:
        import torch._dynamo  # noqa: F401


if __name__ == "__main__":
    if "--preload" in sys.argv:
        _import_all(Path(sys.argv[1]))
        serve()  # returns in each rank that it forks
    output = PatientOutput(sys.stdout)
    sys.stdout = output
    if output.isatty():  # rich asks descriptor 1 for the width
        os.environ.setdefault("COLUMNS", str(os.get_terminal_size(1).columns))
    # Libraries such as NCCL write to descriptor 1 directly; that output goes to this rank's log.
    os.dup2(2, 1)
    code = main(sys.argv[1:])
    output.drain(timeout_s=2.0)
    sys.stderr.flush()
    # Threads of gloo or NCCL that wait for a dead rank would keep a failed process from ending.
    os._exit(code)
