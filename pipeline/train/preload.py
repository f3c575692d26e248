"""A process that has imported everything and forks the ranks of a restart.

Imports are most of a restart. One process that has done them costs less memory and CPU time than a
spare process per rank, and it is ready again for the next fault. The launcher holds a `Preloader`;
the process itself is `python -P -m pipeline.train.worker … --preload`, which calls `serve`. It has
no threads, no CUDA context and no process group: each rank creates its own after the fork. Every
failure here ends in `None` or False, and the supervisor then starts its ranks as usual.
"""

import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pipeline.process import end_with_parent, last_line

_IMPORT_S = 60.0  # limit for the imports; 21 s were measured at load 25
_FORK_S = 15.0  # limit for one fork
_TICK_S = 0.05
# torch then counts GPUs without the driver, which must not be initialized before a fork, and its
# compiler starts no processes with a thread that reads from them. Ranks get the user's own values.
_VARIABLES = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TORCH_WARM_POOL": "0"}


class Forked:
    """A rank that the preloader forked: a child of this process, with Popen's interface."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        began_s = time.monotonic()
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() - began_s > timeout:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(_TICK_S)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Preloader:
    """The launcher's side: start the process, ask it for ranks, end it."""

    def __init__(
        self, command: list[str], env: dict[str, str], log: Path, *, wanted: bool = True
    ) -> None:
        self.obstacle = ""  # why the last process was not used
        self._command = [*command, "--preload"]
        self._env = env | _VARIABLES
        self._own = {name: env[name] for name in _VARIABLES if name in env}
        self._log = log
        self._wanted = wanted and sys.platform == "linux"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, unless it is alive or the last one failed: another would fail too."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        if not self._wanted:
            return
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                env=self._env,
                stdin=theirs.fileno(),
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        self.obstacle = "it was killed"

    def ready(self, give_up: Callable[[], object]) -> bool:
        """Start it and wait for the imports; False if it ended or `give_up` returned true."""
        self.start()
        if self._process is None:
            return False
        end_s = time.monotonic() + _IMPORT_S
        while not select.select([self._socket], [], [], _TICK_S)[0]:
            late = time.monotonic() > end_s
            if late or give_up():
                self.obstacle = f"its imports took more than {_IMPORT_S:.0f} s" if late else ""
                return False
        with suppress(OSError):
            if self._socket.recv(1, socket.MSG_PEEK):  # it stays readable: ready for good
                return True
        self._process.wait()  # only its end closes the connection
        return False

    def fork(self, variables: dict[str, str], stdout: int, stderr: int) -> Forked | None:
        """Fork a rank with these variables; return None if that failed, now or before."""
        # An orphaned process becomes a child of this one while this is set.
        if self._process is None or not _adopt_orphans(True):
            return None
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.settimeout(_FORK_S)
            try:
                ends = [theirs.fileno(), stdout, stderr]
                socket.send_fds(self._socket, [json.dumps(self._own | variables).encode()], ends)
                theirs.close()  # the only other copies are the preloader's and the rank's
                pid = ours.recv(20)
                if pid:
                    ours.send(b".")  # a rank that does not receive this ends
                    return Forked(int(pid))
            except OSError:  # also the time limit, for a preloader that is stopped
                pass
            finally:
                _adopt_orphans(False)
        self.obstacle = "it does not answer"
        self.close()
        return None

    def close(self) -> None:
        """End the process; the ranks that it forked continue."""
        if self._process is None:
            return
        self._process.kill()
        if self._process.wait() > 0:  # it had ended by itself
            self._wanted = False
            self.obstacle = last_line(self._log)
        self._process = None
        self._socket.close()


def serve() -> None:
    """Fork a rank for each request, until the launcher ends. Only the ranks return from here."""
    launcher = os.getppid()
    requests = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    gc.collect()
    gc.freeze()  # otherwise each fork would search, and so copy, everything that is imported
    obstacle = _fork_obstacle()
    if obstacle:
        sys.exit(f"ranks cannot be forked: {obstacle}")
    requests.send(b".")
    while True:
        try:
            message, ends, *_ = socket.recv_fds(requests, 1 << 16, 3)
        except ConnectionResetError:  # the launcher was killed
            os._exit(0)
        if not message:
            os._exit(0)
        child = os.fork()
        if child == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)  # so that the launcher becomes the parent of the rank
            requests.close()
            _become_rank(json.loads(message), ends, between, launcher)
            return
        for end in ends:
            os.close(end)
        os.waitpid(child, 0)


def _fork_obstacle() -> str:
    """Return why a fork of this process would not work; empty if it would."""
    # OpenBLAS stops its threads in a fork handler, so fork once before counting threads.
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    threads = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has just ended
            threads.append((task / "comm").read_text().strip())
    if len(threads) > 1:
        return f"{len(threads)} threads are running: {', '.join(threads)[:200]}"
    opened = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    # CUDA's driver opens this device when it is initialized, and does not survive a fork.
    return "CUDA is initialized" if "/dev/nvidia-uvm" in opened else ""


def _become_rank(variables: dict[str, str], ends: list[int], between: int, launcher: int) -> None:
    """Do for a fork what Popen does for a new process, and report to the launcher."""
    import torch

    status = socket.socket(fileno=ends[0])
    os.setsid()
    while os.getppid() == between:
        time.sleep(0.001)
    end_with_parent()
    # The launcher may have died before `end_with_parent`.
    if os.getppid() != launcher:
        os._exit(1)
    if torch.cuda._is_in_bad_fork():
        os.write(2, b"this fork cannot use CUDA, which was initialized before it\n")
        os._exit(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, end in enumerate((nothing, *ends[1:])):
        os.dup2(end, number)
        os.close(end)
    for name in _VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(variables)
    status.send(str(os.getpid()).encode())
    if not status.recv(1):  # the launcher has given up
        os._exit(1)
    status.close()


def _adopt_orphans(on: bool) -> bool:
    """Let orphaned descendants become children of this process; False where that is unknown."""
    try:
        # 36 is PR_SET_CHILD_SUBREAPER
        return bool(ctypes.CDLL(None).prctl(36, int(on), 0, 0, 0) == 0)
    except (OSError, AttributeError):  # prctl exists on Linux only
        return False
