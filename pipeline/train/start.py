"""Start a run's processes on this node, stand between them and the terminal, and say how it ended."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import psutil

from pipeline.errors import RunError
from pipeline.process import end_with_parent
from pipeline.track import feed
from pipeline.track.log import Record
from pipeline.train.rundir import RunDir
from pipeline.train.stop import SIGNALS

_WORKER = "pipeline.train.worker"
_FEED_WAIT_S = 30.0


def start(run: RunDir, *, nproc: int, gpu: bool, quiet: bool = False, track: bool = True) -> str:
    """Returns when the run has finished or was stopped as asked, with a line about tracking if there is one to show;
    raises RunError with one line otherwise."""
    (run.path / "error.json").unlink(missing_ok=True)
    logs = run.path / "logs"
    logs.mkdir(exist_ok=True)
    before = run.last_event
    feeder, note = feed.start(run.path) if track else None, ""
    try:
        with (logs / "torchrun.log").open("ab") as noise:
            # a session of its own: Ctrl-C reaches us alone, and we hand it on to the workers as a wish to stop
            agent = subprocess.Popen(
                _command(run, nproc, logs, quiet=quiet),
                env=_environment(nproc, gpu=gpu),
                stderr=noise,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
            code, asked = _wait(run, agent)
    finally:
        if feeder is not None:
            note = feed.finish(feeder, _FEED_WAIT_S)
    if code != 0 and not (run.fault() is None and (asked or _saved_as_asked(run, before))):
        raise _failure(run, code)
    return note


def _saved_as_asked(run: RunDir, before: Record) -> bool:
    """torchrun makes one code of its workers' codes; their log says whether they were told to stop."""
    return run.last_event != before and run.last_event.get("event") == "interrupt"


def _command(run: RunDir, nproc: int, logs: Path, *, quiet: bool) -> list[str]:
    # rank 0 keeps the terminal; what the others print, and all of stderr, goes to files
    redirects = ",".join(["0:2", *(f"{rank}:3" for rank in range(1, nproc))])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(nproc)]
    rendezvous = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]  # a free port: two runs never collide
    where = ["--log_dir", str(logs), "--redirects", redirects]
    return [*torchrun, *rendezvous, *where, "-m", _WORKER, str(run.path), *(["--quiet"] if quiet else [])]


def _environment(nproc: int, *, gpu: bool) -> dict[str, str]:
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # a restarted group must not find dead addresses
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    if not gpu:
        env["DS_ACCELERATOR"] = "cpu"
    return env


def _wait(run: RunDir, agent: subprocess.Popen[bytes]) -> tuple[int, bool]:
    """The agent's exit code, and whether it was asked to stop. The first signal asks every worker to save and stop,
    also those that are still starting; another one, a second or more later, ends them. After a fault a stopped worker
    is killed at once: it cannot hear torchrun's SIGTERM, which would wait half a minute for it."""
    wishes: list[tuple[float, int]] = []
    told: set[int] = set()

    def note(number: int, _frame: FrameType | None) -> None:
        wishes.append((time.monotonic(), number))

    old = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        while True:
            try:
                return agent.wait(timeout=0.2), bool(wishes)
            except subprocess.TimeoutExpired:
                pass
            for worker in _workers(agent.pid) if run.fault() is not None else ():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if worker.status() == psutil.STATUS_STOPPED:
                        worker.kill()
            for worker in _workers(agent.pid) if wishes else ():
                with contextlib.suppress(psutil.NoSuchProcess):  # it ended just now
                    if wishes[-1][0] - wishes[0][0] > 1:
                        worker.kill()
                    elif worker.pid not in told:
                        worker.send_signal(wishes[0][1])
                        told.add(worker.pid)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _workers(agent: int) -> list[psutil.Process]:
    try:
        children = psutil.Process(agent).children(recursive=True)
        return [child for child in children if _WORKER in child.cmdline()]
    except psutil.NoSuchProcess:
        return []


def _failure(run: RunDir, code: int) -> RunError:
    fault = run.fault()
    if fault is None and shutil.disk_usage(run.path).free < 1 << 20:  # too full even for the reason
        return RunError(f"disk full at {run.path}; the last checkpoint is intact; make room and --resume")
    if fault is None:
        return RunError(
            f"run {run.path} ended with code {code} and no reason; see {run.path}/logs; --resume continues it"
        )
    if fault["user"]:
        return RunError(fault["message"])
    line = str(fault["message"]).splitlines()[0][:300]
    return RunError(f"run {run.path} failed: {fault['kind']}: {line}; see {run.path}/logs; --resume continues it")
