"""Start the ranks of a run on this node, restart them after a fault, and report how it ended.

The ranks are direct children of this process: it sees the exit code of each one. It imports no
torch, so that the command line answers at once. A worker exits with one of these codes:
0 finished; 75 saved because a signal asked for it; 2 a fault that only the user can fix; 1 any
other fault.
"""

import contextlib
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
from pipeline.process import STOPPED, StopRequest, end_with_parent, one_node, python_module
from pipeline.runs.directory import HangError, RunDir, no_restart
from pipeline.runs.log import Record
from pipeline.track.sidecar import Sidecar

WORKER = "pipeline.train.worker"

_TICK_S = 0.2  # how soon a signal is passed on
_LOOK_EVERY = 5  # ticks between two looks at the state of all ranks
_GRACE_S = 5.0  # time for the other ranks to report their own errors after one has failed
_SPARE_AFTER_S = 15.0  # training time before a spare is started; short runs do not need one
_SIDECAR_WAIT_S = 30.0  # time to wait for MLflow after the end


class Ended(NamedTuple):
    note: str  # a line about tracking to show; may be empty
    signal: int | None  # the signal that stopped the run


def start(
    run: RunDir, *, nproc: int, gpu: bool, max_restarts: int, quiet: bool, track: bool
) -> Ended:
    """Train until the run is finished or stopped on request; otherwise raise a one-line RunError.

    After a fault the whole group of ranks is restarted from the last checkpoint.
    """
    run.forget_fault()
    old = len(run.past_faults())  # faults of earlier launches do not count as restarts
    sidecar = Sidecar(run.path) if track else None
    note = ""
    try:
        groups = _Groups(run, nproc, gpu=gpu, quiet=quiet, spare=max_restarts > 0)
        with closing(StopRequest()) as stop, closing(groups):
            while not _attempt(run, groups, stop, nproc):
                _give_up(run, run.past_faults()[old:], 0 if stop.signal else max_restarts)
    finally:
        if sidecar is not None:
            note = sidecar.finish(_SIDECAR_WAIT_S)
    return Ended(note, stop.signal)


def _attempt(run: RunDir, groups: "_Groups", stop: StopRequest, nproc: int) -> bool:
    """Train with one group; return False after a fault, which is recorded in the run."""
    group = groups.take()
    with closing(group):  # ends all ranks, even after an exception
        codes = group.wait(stop, groups.prepare)
    failed = {rank: code for rank, code in codes.items() if code not in (0, STOPPED)}
    if run.fault() is None and (stop.signal or not failed):
        return True
    death = group.death(codes)
    if death and not stop.signal:
        record_death(run, death)
    if run.fault() is None and shutil.disk_usage(run.path).free < 1 << 20:
        raise RunError(
            f"disk full at {run.path}: not even the error could be written; the last checkpoint is "
            "intact; free some space and --resume"
        )
    rank, code = next(iter(failed.items()), (0, 0))
    run.note_fault(code, group.last_line(rank), nproc)
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
        run.fail(ChildProcessError(f"rank {death.rank} was killed by {death.signal.name}"))


class Death(NamedTuple):
    rank: int
    signal: signal.Signals


class Group:
    """Worker processes on this node that train together, and their exit codes."""

    def __init__(
        self, run: RunDir, environments: list[dict[str, str]], *options: str, terminal: bool = False
    ) -> None:
        self._run = run
        self._hang_s = reload(run.config).train.hang_s
        self._command = python_module(WORKER, run.path, *options)
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        self._ended_by_us: set[int] = set()
        for env in environments:
            rank = int(env["RANK"])
            self._ranks[rank] = self._start(env, terminal=terminal and rank == 0)

    def _start(self, env: dict[str, str], *, terminal: bool) -> "subprocess.Popen[bytes]":
        with self._log(int(env["RANK"])).open("ab") as log:
            return subprocess.Popen(
                self._command,
                env={**env, "PYTHONSAFEPATH": "1"},  # also for the processes that it starts
                stdin=subprocess.PIPE,
                stdout=None if terminal else log,
                stderr=log,
                # Ctrl-C reaches the supervisor only, which passes it on as a stop request.
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    @property
    def alive(self) -> bool:
        """Whether all ranks are running."""
        return all(process.poll() is None for process in self._ranks.values())

    def begin(self) -> None:
        """Let the workers start. They import everything first and then wait for this."""
        for process in self._ranks.values():
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
                pipe.write(b".")

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
                _warn("stopping: a checkpoint is written first; a second signal ends it at once\n")
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
        return {rank: process.returncode for rank, process in self._ranks.items()}

    def death(self, codes: Mapping[int, int]) -> Death | None:
        """Return the rank that was killed by a signal that we did not send."""
        deaths = [
            Death(rank, signal.Signals(-code))
            for rank, code in codes.items()
            if code < 0 and rank not in self._ended_by_us
        ]
        # Prefer SIGKILL, which the kernel sends when memory runs out: no other death causes it.
        return max(deaths, key=lambda death: death.signal == signal.SIGKILL, default=None)

    def last_line(self, rank: int) -> str:
        text = self._log(rank).read_bytes()[-4096:].decode(errors="replace").strip()
        return text.splitlines()[-1] if text else ""

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


class _Groups:
    """The group that trains and, after a while, a spare one that is ready to replace it.

    The workers of the spare have imported everything, which is most of a start.
    """

    def __init__(self, run: RunDir, nproc: int, *, gpu: bool, quiet: bool, spare: bool) -> None:
        self._run = run
        self._nproc = nproc
        self._gpu = gpu
        self._options = ["--wait", *(["--quiet"] if quiet else [])]
        self._wanted = spare
        self._spare: Group | None = None
        self._taken_s = 0.0
        self._training_since_s: float | None = None
        # mkdtemp uses mode 0700: no other user can join the group or write to its store.
        self._private = Path(tempfile.mkdtemp(prefix="isoflop-"))
        self._made = 0
        (run.path / "logs").mkdir(exist_ok=True)

    def take(self) -> Group:
        """Start the spare group if it is alive, otherwise a new one."""
        group = self._spare
        self._spare = None
        if group is not None and not group.alive:
            group.close()
            group = None
        if group is None:
            group = self._new()
        group.begin()
        self._taken_s = time.time()
        self._training_since_s = None
        return group

    def prepare(self) -> None:
        """Start a spare once the group has trained for a while; called at every tick."""
        now_s = time.time()
        log = self._run.log
        if self._training_since_s is None:
            if log.exists() and log.stat().st_mtime > self._taken_s:
                self._training_since_s = now_s
            return
        # The spare competes for CPU and memory, so it waits until the first steps are done.
        due = now_s > self._training_since_s + _SPARE_AFTER_S
        if self._wanted and self._spare is None and due:
            self._spare = self._new()

    def close(self) -> None:
        if self._spare is not None:
            self._spare.close()
        shutil.rmtree(self._private, ignore_errors=True)

    def _new(self) -> Group:
        self._made += 1
        store = self._private / f"store-{self._made}"
        shared = dict(os.environ)
        shared.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self._nproc)))
        if not self._gpu:
            shared["DS_ACCELERATOR"] = "cpu"
        ranks = [shared | one_node(rank, self._nproc, store) for rank in range(self._nproc)]
        return Group(self._run, ranks, *self._options, terminal=True)


def _warn(line: str) -> None:
    """Write to standard error from a thread, because a terminal that is not read would block."""
    threading.Thread(target=os.write, args=(2, line.encode()), daemon=True).start()
