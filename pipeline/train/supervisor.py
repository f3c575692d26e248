"""Start the ranks of a run on this node, restart them after a fault, and report how it ended.

The ranks are direct children of this process: it sees the exit code of each one. It imports no
torch, so that the command line answers at once. A worker exits with one of these codes:
0 finished; 75 saved because a signal asked for it; 2 a fault that only the user can fix; 1 any
other fault.
"""

import contextlib
import fcntl
import math
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import psutil

from pipeline.config.layers import reload
from pipeline.errors import RunError
from pipeline.process import (
    NOT_FORKED,
    STOPPED,
    StopRequest,
    end_with_parent,
    last_line,
    loopback,
    one_node,
    python_module,
    share,
)
from pipeline.runs.directory import HangError, RunDir, no_restart
from pipeline.runs.log import Record
from pipeline.track.sidecar import Sidecar
from pipeline.train.preload import Forked, Preloader

WORKER = "pipeline.train.worker"

_TICK_S = 0.2  # how soon a signal is passed on
_LOOK_EVERY = 5  # ticks between two looks at the state of all ranks
_STOPPING = b"stopping: a checkpoint is written first; a second signal ends it at once\n"
_GRACE_S = 5.0  # time for the other ranks to report their own errors after one has failed
_PRELOAD_AFTER_S = 15.0  # training time before the preloader starts; short runs do not need one
_PRIVATE = "isoflop-ranks-"  # start of the name of a group's directory
_YOUNG_S = 60.0  # the launcher of a younger directory may not hold its lock yet


def start(
    run: RunDir, *, nproc: int, gpu: bool, max_restarts: int, quiet: bool, track: bool
) -> tuple[str, int | None]:
    """Train until the run is finished or stopped on request; otherwise raise a one-line RunError.

    Return a line about tracking, which may be empty, and the signal that stopped the run. After a
    fault the whole group of ranks is restarted from the last checkpoint.
    """
    run.forget_fault()
    run.note_host(here=True)
    old = len(run.past_faults())  # faults of earlier launches do not count as restarts
    sidecar = Sidecar(run.path) if track else None
    note = ""
    try:
        groups = _Groups(run, nproc, gpu=gpu, quiet=quiet, preload=max_restarts > 0)
        with closing(StopRequest()) as stop, closing(groups):
            while not _attempt(run, groups, stop, nproc):
                _give_up(run, run.past_faults()[old:], 0 if stop.signal else max_restarts)
    finally:
        if sidecar is not None:
            note = sidecar.finish()
    return note, stop.signal


def _attempt(run: RunDir, groups: "_Groups", stop: StopRequest, nproc: int) -> bool:
    """Train with one group; return False after a fault, which is recorded in the run."""
    group = groups.new(stop)
    with closing(group):  # ends all ranks, even after an exception
        codes = group.wait(stop, groups.prepare)
    failed = {rank: code for rank, code in codes.items() if code not in (0, STOPPED)}
    death = group.death(codes)
    if death and death.signal == stop.signal:
        # A rank that was still importing died of the stop request. Other ranks recorded that they
        # lost it, unless they found something that the user has to fix.
        if not (run.fault() or {"user": False})["user"]:
            run.forget_fault()
    elif death:
        record_death(run, death)
    if run.fault() is None and (stop.signal or not failed):
        return True
    if run.fault() is None and shutil.disk_usage(run.path).free < 1 << 20:
        text = f"disk full at {run.path}: not even the error could be written"
        raise RunError(f"{text}; the last checkpoint is intact; free some space and --resume")
    rank = group.first_failed(failed)
    run.note_fault(failed.get(rank, 0), group.last_line(rank), nproc)
    return False


def _give_up(run: RunDir, history: list[Record], max_restarts: int) -> None:
    """Raise the reason of the last fault if the run must not be restarted."""
    reason = no_restart(history, max_restarts)
    if reason is None:
        return
    if history[-1]["user"]:
        raise RunError(reason)
    raise RunError(f"run {run.path} {reason}; see {run.path}/logs; --resume continues it")


def record_death(run: RunDir, death: "Death") -> None:
    """Replace the reports of other ranks: they only lost their connection to the dead rank."""
    known = run.fault() or {"kind": None, "user": False}
    if not known["user"] and known["kind"] != HangError.__name__:
        run.forget_fault()
        run.fail(ChildProcessError(f"rank {death.rank} was killed by {death.name}"))


class Death(NamedTuple):
    rank: int
    signal: int

    @property
    def name(self) -> str:  # real-time signals have none
        known = self.signal in set(signal.Signals)
        return signal.Signals(self.signal).name if known else f"signal {self.signal}"


class Group:
    """Worker processes on this node that train together, and their exit codes."""

    def __init__(
        self,
        run: RunDir,
        environments: list[dict[str, str]],
        *options: str,
        terminal: bool = False,
        preloader: Preloader | None = None,
    ) -> None:
        self._run = run
        self._hang_s = reload(run.config).train.hang_s
        self._command = python_module(WORKER, run.path, *options)
        self._preloader = preloader
        self._ranks: dict[int, subprocess.Popen[bytes] | Forked] = {}
        self._ended_by_us: set[int] = set()
        # Rank 0 last, because it logs whether a rank is not a fork.
        for env in reversed(environments):
            rank = int(env["RANK"])
            self._ranks[rank] = self._start(env, terminal=terminal and rank == 0)

    def _start(self, env: dict[str, str], *, terminal: bool) -> "subprocess.Popen[bytes] | Forked":
        with self._log(int(env["RANK"])).open("ab") as log:
            if self._preloader is not None:
                forked = self._preloader.fork(env, 1 if terminal else log.fileno(), log.fileno())
                if forked is not None:
                    return forked
                env = env | {NOT_FORKED: self._preloader.obstacle}
            return subprocess.Popen(
                self._command,
                env={**os.environ, **env, "PYTHONSAFEPATH": "1"},  # also for its own children
                stdin=subprocess.DEVNULL,
                stdout=None if terminal else log,
                stderr=log,
                # Ctrl-C reaches the supervisor only, which passes it on as a stop request.
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def wait(self, stop: StopRequest, between: Callable[[], None] = lambda: None) -> dict[int, int]:
        """Return the exit code of every rank, once all have ended.

        The first signal asks every rank to save and stop; a second one ends them. `between` is
        called at every tick.
        """
        asked = False
        failed_s: float | None = None
        looks = Counter[int]()  # consecutive looks at which a rank was stopped
        ticks = 0
        while living := [rank for rank, p in self._ranks.items() if p.poll() is None]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._ranks[living[0]].wait(timeout=_TICK_S)
                continue  # it ended; check the others
            between()
            ticks += 1
            if stop.signal and not asked:
                asked = True
                for rank in living:
                    self._ranks[rank].send_signal(stop.signal)
                # From a thread, because a terminal that is not read would block.
                threading.Thread(target=os.write, args=(2, _STOPPING), daemon=True).start()
            if stop.at_once:
                self._end(living, signal.SIGKILL)
            if ticks % _LOOK_EVERY == 0:
                self._end_stopped(living, looks)
            codes = [process.returncode for process in self._ranks.values()]
            if failed_s is None and any(code not in (None, 0, STOPPED) for code in codes):
                failed_s = time.monotonic()
                # At SIGTERM a hanging rank writes its stack, even if it holds Python's lock.
                self._end(living, signal.SIGTERM)
            elif failed_s is not None and time.monotonic() - failed_s > _GRACE_S:
                self._end(living, signal.SIGKILL)
        return {rank: process.wait() for rank, process in self._ranks.items()}

    def death(self, codes: Mapping[int, int]) -> Death | None:
        """Return the rank that was killed by a signal that we did not send."""
        deaths = [
            Death(rank, -code)
            for rank, code in codes.items()
            if code < 0 and rank not in self._ended_by_us
        ]
        # Prefer SIGKILL, which the kernel sends when memory runs out: no other death causes it.
        return max(deaths, key=lambda death: death.signal == signal.SIGKILL, default=None)

    def first_failed(self, failed: Mapping[int, int]) -> int:
        """Return a rank that failed by itself if there is one: we end the others after it."""
        return min(failed, key=lambda rank: (rank in self._ended_by_us, rank), default=0)

    def last_line(self, rank: int) -> str:
        return last_line(self._log(rank))

    def close(self) -> None:
        """End the ranks that still live."""
        self._end(list(self._ranks), signal.SIGKILL)
        for process in self._ranks.values():
            process.wait()

    def _end_stopped(self, living: list[int], looks: "Counter[int]") -> None:
        """End a rank that a signal has stopped (SIGSTOP), in any phase.

        Time is counted in looks, so that time during which this process is suspended is ignored.
        """
        for rank in living:
            process = self._ranks[rank]
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended just now
                if psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
                    looks[rank] = 0
                    continue
                looks[rank] += 1
                if looks[rank] * _LOOK_EVERY * _TICK_S > self._hang_s / 2:
                    self._run.fail(HangError(f"rank {rank} was stopped by a signal (SIGSTOP)"))
                    self._end([rank], signal.SIGKILL)

    def _end(self, ranks: list[int], how: signal.Signals) -> None:
        for rank in ranks:
            if self._ranks[rank].poll() is None:
                self._ended_by_us.add(rank)
                self._ranks[rank].send_signal(how)

    def _log(self, rank: int) -> Path:
        return self._run.path / "logs" / f"rank-{rank}.log"


def remove_unused() -> None:
    """Remove directories whose launcher was killed and whose ranks have ended too."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PRIVATE}*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            opened.callback(os.close, handle)
            found = os.fstat(handle)
            if found.st_uid == os.getuid() and abs(time.time() - found.st_mtime) > _YOUNG_S:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if it is in use
                shutil.rmtree(path, ignore_errors=True)


class _Groups:
    """Start a group for each attempt: the first one as usual, later ones by the preloader."""

    def __init__(self, run: RunDir, nproc: int, *, gpu: bool, quiet: bool, preload: bool) -> None:
        self._run = run
        self._nproc = nproc
        self._options = ["--quiet"] if quiet else []
        self._shared: dict[str, str] = {} if gpu else {"DS_ACCELERATOR": "cpu"}
        if "OMP_NUM_THREADS" not in os.environ:
            self._shared["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // nproc))
        logs = run.path / "logs"
        logs.mkdir(exist_ok=True)
        # It reads no variable of a rank before it forks.
        env = {**os.environ, **self._shared, **loopback(), "PYTHONSAFEPATH": "1"}
        command = python_module(WORKER, run.path, *self._options)
        self._preloader = Preloader(command, env, logs / "preload.log", wanted=preload)
        self._preload_at_s: float | None = None  # None until the group trains
        self._made = 0
        self._forked = False  # whether the last group was forked
        self._log_changed_ns = 0  # last change of the log before the group was made
        remove_unused()
        # mkdtemp uses mode 0700: no other user can join the group or write to its store.
        self._private = Path(tempfile.mkdtemp(prefix=_PRIVATE))
        self._in_use = share(self._private)

    def new(self, stop: StopRequest) -> Group:
        """Start a group of ranks, by forks if there was one before."""
        idle = self._forked and self._preload_at_s is None  # perhaps because they were forks
        self._forked = bool(self._made and not idle and self._preloader.ready(lambda: stop.signal))
        shared = self._shared
        if not self._forked:
            self._preloader.close()
            reason = "its last forks did not train" if idle else self._preloader.obstacle
            shared = shared | ({NOT_FORKED: reason} if reason else {})  # for rank 0 to log
        self._made += 1
        self._preload_at_s = None
        self._log_changed_ns = self._log_time_ns()
        store = self._private / f"store-{self._made}"
        ranks = [shared | one_node(rank, self._nproc, store) for rank in range(self._nproc)]
        forks = self._preloader if self._forked else None
        return Group(self._run, ranks, *self._options, terminal=True, preloader=forks)

    def prepare(self) -> None:
        """Start the preloader once the group has trained for a while; called at every tick."""
        now_s = time.monotonic()
        if self._preload_at_s is None:
            if self._log_time_ns() != self._log_changed_ns:
                # The imports compete for the CPU, so they wait until the first steps are done.
                self._preload_at_s = now_s + _PRELOAD_AFTER_S
        elif now_s > self._preload_at_s:
            self._preloader.start()
            self._preload_at_s = math.inf  # once for each group

    def close(self) -> None:
        self._preloader.close()
        os.close(self._in_use)
        shutil.rmtree(self._private, ignore_errors=True)

    def _log_time_ns(self) -> int:
        try:
            return self._run.log.stat().st_mtime_ns
        except OSError:  # there is none yet
            return 0
