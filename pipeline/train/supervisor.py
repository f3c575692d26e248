"""Start a run's processes on this node, stand between them and the terminal, and say how it ended."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import FrameType

import psutil

from pipeline.config.layers import reload
from pipeline.errors import RunError
from pipeline.process import end_with_parent
from pipeline.runs import faults
from pipeline.runs.directory import RunDir
from pipeline.runs.faults import HangError
from pipeline.track import mlflow_sync
from pipeline.train.stop import SIGNALS

WORKER = "pipeline.train.worker"
_FEED_WAIT_S = 30.0
_STRAY_WAIT_S = 60.0
_TICK_S, _LOOK = (
    0.2,
    5,
)  # how soon a signal is passed on; every so many ticks all workers are looked at
_SPARE_AFTER_S = 15.0  # of training: a short run is not to pay for what it does not need
_SAID = re.compile(
    rb"^[\w.: ]*[Ee]rror: \S.*$", re.MULTILINE
)  # torchrun, of what it itself could not do
_KILLED = re.compile(
    rb"rank +: (\d+) \(local_rank: \d+\)\s+exitcode +: -(\d+)"
)  # torchrun, of all that had failed
Wish = tuple[float, int]  # when, and which signal
_Group = tuple["subprocess.Popen[bytes]", Path]  # torchrun, and the file it complains to


def start(
    run: RunDir,
    *,
    nproc: int,
    gpu: bool,
    max_restarts: int = 0,
    quiet: bool = False,
    track: bool = True,
) -> tuple[str, int | None]:
    """Returns when the run has finished or was stopped as asked, with a line about tracking if there is one to show,
    and the signal that asked; raises RunError with one line otherwise. After a fault the whole group is started anew,
    with a torchrun of its own: torchrun's own restarts would repeat also what only a person can mend, and do not
    survive its death."""
    run.forget_fault()
    old = len(faults.history(run))
    feeder, note = mlflow_sync.start(run.path) if track else None, ""
    try:
        with (
            listening() as wishes,
            closing(_Groups(run, nproc, gpu, quiet, spare=max_restarts > 0)) as groups,
        ):
            while code := _attempt(run, groups, wishes):
                _note_failure(run, code, groups.said, nproc, old, 0 if wishes else max_restarts)
    finally:
        if feeder is not None:
            note = mlflow_sync.finish(feeder, _FEED_WAIT_S)
    return note, wishes[0][1] if wishes else None


class _Groups:
    """The group that trains and, when it has done so for a while, one that stands ready to take its place: its workers
    have imported everything, which is most of a start, and wait for a word."""

    def __init__(self, run: RunDir, nproc: int, gpu: bool, quiet: bool, *, spare: bool) -> None:
        self._log, self._logs, self._nproc, self._wanted = run.log, run.path / "logs", nproc, spare
        self._logs.mkdir(exist_ok=True)
        self._command, self._env = (
            _command(run, nproc, self._logs, quiet=quiet),
            _environment(nproc, gpu=gpu),
        )
        self._spare: _Group | None = None

    @property
    def spare_pid(self) -> int:
        return self._spare[0].pid if self._spare else -1

    @property
    def said(self) -> str:
        """Torchrun's own last word in the group that was taken last; empty if there is none."""
        said: list[bytes] = _SAID.findall(self._noise.read_bytes())
        return said[-1].decode(errors="replace") if said else ""

    def take(self) -> _Group:
        """The spare if it lives, else a new one; its workers begin."""
        group, self._spare = self._spare, None
        if group is None or group[0].poll() is not None:
            group = self._new()
        assert group[0].stdin is not None
        with contextlib.suppress(BrokenPipeError), group[0].stdin as word:
            word.write(b"." * self._nproc)  # each takes one
        self._noise, self._taken, self._trains = group[1], time.time(), 0.0
        return group

    def prepare(self) -> None:
        """Called while the group trains."""
        now = time.time()
        if not self._trains and self._log.exists() and self._log.stat().st_mtime > self._taken:
            self._trains = now
        if (
            self._wanted
            and self._spare is None
            and self._trains
            and now > self._trains + _SPARE_AFTER_S
        ):
            self._spare = self._new()

    def close(self) -> None:
        if self._spare is not None:
            self._spare[0].terminate()
            self._spare[0].wait()

    def _new(self) -> _Group:
        noise = self._logs / f"torchrun-{time.time_ns()}.log"
        with noise.open("wb") as file:
            # a session of its own: Ctrl-C reaches us alone, and we hand it on to the workers as a wish to stop
            agent = subprocess.Popen(
                self._command, env=self._env, stdin=subprocess.PIPE, stderr=file, start_new_session=True,
                preexec_fn=end_with_parent,
            )  # fmt: skip
        return agent, noise


def _attempt(run: RunDir, groups: _Groups, wishes: list[Wish]) -> int:
    """0 when the run finished or was stopped as asked, otherwise torchrun's code."""
    before = run.last_event
    agent, noise = groups.take()
    code = attend(run, agent, wishes, groups.prepare)
    if code < 0:
        _end_strays(run, groups.spare_pid)
    killed = max(
        _KILLED.findall(noise.read_bytes()), key=lambda each: each[1] == b"9", default=None
    )
    known = run.fault() or {"kind": None, "user": False}
    if killed and not (
        wishes or known["user"] or known["kind"] == HangError.__name__
    ):  # others miss it, no more
        run.forget_fault()
        run.fail(
            ChildProcessError(
                f"rank {int(killed[0])} was killed by {signal.Signals(int(killed[1])).name}"
            )
        )
    # torchrun makes one code of its workers' codes; their log says whether they were told to stop
    told = code > 0 and run.last_event != before and run.last_event.get("event") == "interrupt"
    return 0 if run.fault() is None and (wishes or told) else code


def _note_failure(
    run: RunDir, code: int, said: str, nproc: int, old: int, max_restarts: int
) -> None:
    """Keep the reason of a failed attempt; raises it if there is not to be another one."""
    if (
        run.fault() is None and shutil.disk_usage(run.path).free < 1 << 20
    ):  # too full even for the reason
        raise RunError(
            f"disk full at {run.path}; the last checkpoint is intact; make room and --resume"
        )
    fault = faults.note(run, code, said, nproc)
    if reason := faults.verdict(faults.history(run)[old:], max_restarts):
        mine = f"run {run.path} {reason}; see {run.path}/logs; --resume continues it"
        raise RunError(reason if fault["user"] else mine)


def _end_strays(run: RunDir, spare: int) -> None:
    """Workers whose torchrun was killed save and stop, also one that a signal had stopped once it goes on; they must be
    gone before others take their place."""
    ours = {WORKER, str(run.path)}
    there = [
        p for p in psutil.process_iter(["cmdline", "ppid"]) if ours <= set(p.info["cmdline"] or ())
    ]
    strays = [p for p in there if spare not in (p.pid, p.info["ppid"])]
    for stray in strays:
        with contextlib.suppress(psutil.Error):
            stray.resume()
    _, alive = psutil.wait_procs(strays, timeout=_STRAY_WAIT_S)
    for stray in alive:
        stray.kill()


@contextlib.contextmanager
def listening(*, once: bool = False) -> Iterator[list[Wish]]:
    """Signals become wishes, from the first attempt to the last, or the first of them alone."""
    wishes: list[Wish] = []

    def note(number: int, _frame: FrameType | None) -> None:
        if not (once and wishes):
            wishes.append((time.monotonic(), number))

    old = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield wishes
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _command(run: RunDir, nproc: int, logs: Path, *, quiet: bool) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(nproc)]
    rendezvous = [
        "--rdzv_backend",
        "c10d",
        "--rdzv_endpoint",
        "localhost:0",
    ]  # a free port: two runs never collide
    where = [
        "--log_dir",
        str(logs),
        "--redirects",
        "2",
    ]  # stderr to files: of ranks above 9 torchrun takes no list
    return [
        *torchrun,
        *rendezvous,
        *where,
        "-m",
        WORKER,
        str(run.path),
        "--wait",
        *(["--quiet"] if quiet else []),
    ]


def _environment(nproc: int, *, gpu: bool) -> dict[str, str]:
    env = {
        **os.environ,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }  # a restarted group must not find dead addresses
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    if not gpu:
        env["DS_ACCELERATOR"] = "cpu"
    return env


def attend(
    run: RunDir,
    agent: subprocess.Popen[bytes],
    wishes: list[Wish],
    beside: Callable[[], None] = lambda: None,
) -> int:
    """The agent's exit code. The first signal asks every worker to save and stop, also those that are still starting;
    another one, a second or more later, ends them. A worker that a signal has stopped is ended too, in whatever phase
    it is: before the others, who wait for it, wonder. What the kernel says of it needs no heartbeat. Where this process
    was stopped as well, by a scheduler that suspends the job, no time passes."""
    told, still, most = set[int](), Counter[int](), reload(run.config).train.hang_s / 2 / _TICK_S
    ticks, heard = 0, False
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return agent.wait(timeout=_TICK_S)
        beside()
        if wishes and not heard:
            heard = True
            sys.stderr.write("stopping: a checkpoint is written first; once more ends it at once\n")
        ticks, passed = ticks + 1, 1 if wishes else _LOOK
        if ticks % passed:
            continue
        for worker in _workers(agent.pid):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended just now
                still[worker.pid] = (
                    still[worker.pid] + passed if worker.status() == psutil.STATUS_STOPPED else 0
                )
                if still[worker.pid] > most:
                    run.fail(
                        HangError(
                            f"rank {worker.environ()['RANK']} stands still: a signal has stopped it"
                        )
                    )
                    worker.kill()
                if wishes and wishes[-1][0] - wishes[0][0] > 1:
                    worker.kill()
                elif wishes and worker.pid not in told:
                    worker.send_signal(wishes[0][1])
                    told.add(worker.pid)


def _workers(agent: int) -> list[psutil.Process]:
    """Below torchrun, or the one that srun started."""
    try:
        process = psutil.Process(agent)
        return [
            each
            for each in (process, *process.children(recursive=True))
            if WORKER in each.cmdline()[:4]
        ]
    except psutil.NoSuchProcess:
        return []
