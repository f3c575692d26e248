"""Start a run's processes on this node, stand between them and the terminal, and say how it ended."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import psutil

from pipeline.errors import RunError
from pipeline.process import end_with_parent
from pipeline.track import feed
from pipeline.train import faults
from pipeline.train.rundir import RunDir
from pipeline.train.stop import SIGNALS

_WORKER = "pipeline.train.worker"
_FEED_WAIT_S = 30.0
_STRAY_WAIT_S = 60.0
_KILLED = re.compile(rb"failed \(exitcode: -(\d+)\) local_rank: (\d+)")  # torchrun, of the first process to fail
Wish = tuple[float, int]  # when, and which signal


def start(run: RunDir, *, nproc: int, gpu: bool, max_restarts: int = 0, quiet: bool = False, track: bool = True) -> str:
    """Returns when the run has finished or was stopped as asked, with a line about tracking if there is one to show;
    raises RunError with one line otherwise. After a fault the whole group is started anew, with a torchrun of its own:
    torchrun's own restarts would repeat also what only a person can mend, and do not survive its death."""
    run.forget_fault()
    logs = run.path / "logs"
    logs.mkdir(exist_ok=True)
    command, env = _command(run, nproc, logs, quiet=quiet), _environment(nproc, gpu=gpu)
    old = len(faults.history(run))
    feeder, note = feed.start(run.path) if track else None, ""
    try:
        with listening() as wishes:
            while code := _attempt(run, command, env, wishes):
                _note_failure(run, code, old, 0 if wishes else max_restarts)
    finally:
        if feeder is not None:
            note = feed.finish(feeder, _FEED_WAIT_S)
    return note


def _attempt(run: RunDir, command: list[str], env: dict[str, str], wishes: list[Wish]) -> int:
    """0 when the run finished or was stopped as asked, otherwise torchrun's code."""
    before = run.last_event
    noise_path = run.path / "logs" / "torchrun.log"
    with noise_path.open("ab") as noise:
        quiet_bytes = noise.tell()
        # a session of its own: Ctrl-C reaches us alone, and we hand it on to the workers as a wish to stop
        agent = subprocess.Popen(command, env=env, stderr=noise, start_new_session=True, preexec_fn=end_with_parent)
        code = attend(run, agent, wishes)
    if code < 0:
        _end_strays(run)
    killed = _KILLED.search(noise_path.read_bytes(), quiet_bytes)
    if killed and not wishes and not (run.fault() or {}).get("user"):  # the others only complain that it is gone
        run.forget_fault()
        run.fail(ChildProcessError(f"rank {int(killed[2])} was killed by {signal.Signals(int(killed[1])).name}"))
    # torchrun makes one code of its workers' codes; their log says whether they were told to stop
    told = code > 0 and run.last_event != before and run.last_event.get("event") == "interrupt"
    return 0 if run.fault() is None and (wishes or told) else code


def _note_failure(run: RunDir, code: int, old: int, max_restarts: int) -> None:
    """Keep the reason of a failed attempt; raises it if there is not to be another one."""
    if run.fault() is None and shutil.disk_usage(run.path).free < 1 << 20:  # too full even for the reason
        raise RunError(f"disk full at {run.path}; the last checkpoint is intact; make room and --resume")
    fault = faults.note(run, code)
    if reason := faults.verdict(faults.history(run)[old:], max_restarts):
        mine = f"run {run.path} {reason}; see {run.path}/logs; --resume continues it"
        raise RunError(reason if fault["user"] else mine)


def _end_strays(run: RunDir) -> None:
    """Workers whose torchrun was killed save and stop; they must be gone before others take their place."""
    strays = [p for p in psutil.process_iter(["cmdline"]) if {_WORKER, str(run.path)} <= set(p.info["cmdline"] or ())]
    _, alive = psutil.wait_procs(strays, timeout=_STRAY_WAIT_S)
    for stray in alive:
        stray.kill()


@contextlib.contextmanager
def listening() -> Iterator[list[Wish]]:
    """Signals become wishes, from the first attempt to the last."""
    wishes: list[Wish] = []

    def note(number: int, _frame: FrameType | None) -> None:
        wishes.append((time.monotonic(), number))

    old = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield wishes
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


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


def attend(run: RunDir, agent: subprocess.Popen[bytes], wishes: list[Wish]) -> int:
    """The agent's exit code. The first signal asks every worker to save and stop, also those that are still starting;
    another one, a second or more later, ends them. After a fault a stopped worker is woken: else it would not hear
    torchrun's SIGTERM, which waits half a minute for it."""
    told: set[int] = set()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return agent.wait(timeout=0.2)
        failed = run.fault() is not None
        for worker in _workers(agent.pid) if wishes or failed else ():
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended just now
                if failed and worker.status() == psutil.STATUS_STOPPED:
                    worker.resume()
                if wishes and wishes[-1][0] - wishes[0][0] > 1:
                    worker.kill()
                elif wishes and worker.pid not in told:
                    worker.send_signal(wishes[0][1])
                    told.add(worker.pid)


def _workers(agent: int) -> list[psutil.Process]:
    try:
        children = psutil.Process(agent).children(recursive=True)
        return [child for child in children if _WORKER in child.cmdline()]
    except psutil.NoSuchProcess:
        return []
