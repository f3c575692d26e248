"""Processes: how they start, find each other, are asked to stop, and print."""

import contextlib
import ctypes
import fcntl
import io
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TextIO

STOPPED = os.EX_TEMPFAIL  # 75: exit code of a run that saved and stopped because of a signal
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # each asks to save and stop
STORE = "ISOFLOP_STORE"  # the file through which the ranks of one node find each other
NOT_FORKED = "ISOFLOP_NOT_FORKED"  # why the preloader did not fork this rank
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def python_module(module: str, *arguments: object) -> list[str]:
    """Return the command `python -P -m MODULE`; -P ignores files in the working directory."""
    return [sys.executable, "-P", "-m", module, *map(str, arguments)]


def loopback() -> dict[str, str]:
    """Return the environment that keeps the ports of gloo and NCCL closed to other machines."""
    return {"GLOO_SOCKET_IFNAME": _LOOPBACK, "NCCL_SOCKET_IFNAME": _LOOPBACK}


def one_node(rank: int, size: int, store: Path | None = None) -> dict[str, str]:
    """Return the environment of one rank of a group on this node.

    The ranks meet in the file `store`, in a directory that only this user can enter: torch's
    TCPStore would listen on every interface. A single rank needs no store.
    """
    env = loopback() | rank_variables(rank, rank, size, size)
    return env if store is None else {**env, STORE: str(store)}


def share(directory: Path) -> int:
    """Return a descriptor of a directory, which is in use as long as some process has one.

    The kernel closes it when the process dies, however it dies. Programs that the process starts
    do not inherit it; forked children do.
    """
    handle = os.open(directory, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(handle, fcntl.LOCK_SH)
    return handle


def rank_variables(rank: int, local: int, size: int, local_size: int) -> dict[str, str]:
    """Return torch's variables for the position of a process in its group and on its node."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return dict(zip(names, map(str, (rank, local, size, local_size)), strict=True))


def end_with_parent() -> None:
    """Ask for SIGTERM when the parent dies, so that workers save and stop."""
    with contextlib.suppress(OSError, AttributeError):  # prctl exists on Linux only
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG


def redirect_output(log: Path) -> None:
    """Append everything that this process and its children print to a file from now on."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)


def last_line(log: Path) -> str:
    """Return the last line that a process has printed; empty if there is none."""
    text = ""
    with contextlib.suppress(FileNotFoundError), log.open("rb") as file:
        file.seek(-min(4096, file.seek(0, os.SEEK_END)), os.SEEK_END)
        text = file.read().decode(errors="replace").strip()
    return text.splitlines()[-1] if text else ""


class StopRequest:
    """The signal that asked this process to stop, if one did.

    A second signal, a second or more after the first, asks to end at once: terminals and
    schedulers often send the same signal twice within milliseconds.
    """

    def __init__(self, *, first_only: bool = False) -> None:
        self._first_only = first_only
        self.signal: signal.Signals | None = None
        self.at_once = False
        self._first_s = 0.0
        self._old = {number: signal.signal(number, self._note) for number in SIGNALS}

    @property
    def reason(self) -> str | None:
        return None if self.signal is None else self.signal.name

    def close(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.signal is None:
            self.signal = signal.Signals(number)
            self._first_s = now_s
        elif now_s - self._first_s > 1 and not self._first_only:
            self.at_once = True


class PatientOutput(io.TextIOBase):
    """A text stream whose writer never waits.

    A thread writes to the terminal or pipe, which may block for as long as nobody reads it (Ctrl-S,
    `| less`). Meanwhile text is queued, and dropped when the queue is full.
    """

    def __init__(self, stream: TextIO, longest: int = 1000) -> None:
        self._stream = stream
        self._descriptor = os.dup(stream.fileno())
        self._queue: queue.Queue[bytes] = queue.Queue(longest)
        threading.Thread(target=self._work, name="output", daemon=True).start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        data = text.encode(self.encoding, self._stream.errors or "strict")
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(data)
        return len(text)

    def drain(self, timeout_s: float) -> None:
        """Wait until everything is written, but not longer than `timeout_s`."""
        done = self._queue.all_tasks_done
        with done:
            done.wait_for(lambda: not self._queue.unfinished_tasks, timeout_s)

    def _work(self) -> None:
        while True:
            data = self._queue.get()
            with contextlib.suppress(OSError):  # `launch … | head` has closed our output
                while data:
                    data = data[os.write(self._descriptor, data) :]
            self._queue.task_done()
