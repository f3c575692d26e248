"""Commands of the tests as forks of one process that has imported torch, DeepSpeed and `launch`.

Imports are most of what a short command costs, and every rank of a run pays them again. Here they
are paid once for each worker of pytest. What runs in a fork is what `python -P -m MODULE` runs, and
so are its own children: ranks, sidecars and the runs of a sweep.
"""

import atexit
import ctypes
import gc
import importlib
import inspect
import json
import logging
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn

ROOT = Path(__file__).parents[1]
PRELOADED = [
    "scipy.optimize",
    "torch._dynamo",
    "tests.worlds",
    "pipeline.parallel.ddp",
    "pipeline.parallel.zero",
    "pipeline.train.supervisor",
    "deepspeed.module_inject.auto_ep_layer",  # building an engine imports it
    "mlflow.store.tracking.sqlalchemy_store",
    *(f"launch.{path.stem}" for path in (ROOT / "launch").glob("[a-z]*.py")),
]
EXECUTE = subprocess.Popen._execute_child  # type: ignore[attr-defined]
# Children of a command; where Ray runs, threads hold locks that a fork would wait for.
FORKED = ("launch", "pipeline.train.worker", "pipeline.track.sidecar")
TITLE_BYTES = 2000  # for the command line that `ps` shows of a fork


class Launched:
    """A command in a fork, with the part of Popen's interface that the tests use."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[object],
        env: dict[str, str],
        cwd: Path | None = None,
        stdout: IO[str] | None = None,
        stderr: IO[str] | None = None,
    ) -> None:
        """Without files, `stdout` and `stderr` are pipes to read from."""
        self.returncode: int | None = None
        ends = []
        for name, file in (("stdout", stdout), ("stderr", stderr)):
            read, write = os.pipe() if file is None else (None, os.dup(file.fileno()))
            setattr(self, name, None if read is None else open(read, errors="replace"))  # noqa: PTH123, SIM115
            ends.append(write)
        asked = {"module": module, "arguments": [*map(str, arguments)], "env": env}
        asked["cwd"] = str(cwd or Path.cwd())
        for _ in range(3):
            self._status, theirs = socket.socketpair()
            SERVER.ask(json.dumps(asked).encode(), [theirs.fileno(), *ends])
            theirs.close()
            received = self._status.recv(20)
            if received:  # a server that ends before it forks sends nothing
                break
        for end in ends:
            os.close(end)
        self.pid = int(received)

    stdout: IO[str]
    stderr: IO[str]

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                self.returncode = int(self._status.recv(20))
            except TimeoutError:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0) from None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    module: str,
    arguments: Sequence[object],
    env: dict[str, str],
    cwd: Path | None = None,
    timeout: float = 800,
) -> "subprocess.CompletedProcess[str]":
    """Run a module to its end, as `subprocess.run` does with `capture_output`."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = Launched(module, arguments, env, cwd, out, err)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        printed = []
        for file in (out, err):
            file.seek(0)
            printed.append(file.read())
    return subprocess.CompletedProcess([module, *map(str, arguments)], code, *printed)


class Server:
    """The process that forks, started at the first use; it ends when this process does."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket = socket.socket()

    def ask(self, message: bytes, descriptors: Sequence[int]) -> None:
        try:
            socket.send_fds(self._connected(), [message], descriptors)
        except OSError:  # it is about to end
            self.close()
            socket.send_fds(self._connected(), [message], descriptors)

    def _connected(self) -> socket.socket:
        # A test may end it, for example by a signal to every process of a name.
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._start()
        return self._socket

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [sys.executable, "-m", "tests.forks", str(theirs.fileno()), " " * TITLE_BYTES]
        self._process = subprocess.Popen(
            words,
            cwd=ROOT,
            env={**os.environ, "DS_ACCELERATOR": "cpu", "NO_COLOR": "1", "COLUMNS": "200"},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()

    def close(self) -> None:
        """End the process; commands that it has forked continue."""
        self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


SERVER = Server()
atexit.register(SERVER.close)


class Fork(subprocess.Popen[str]):
    """A child process that forks instead of starting another interpreter for one of our modules."""

    def _execute_child(self, *given: object) -> None:
        asked = inspect.signature(EXECUTE).bind(self, *given).arguments
        words = list(asked["args"])
        start = words.index("-m", 1, 3) + 1 if "-m" in words[1:3] else 0
        module, *arguments = words[start:]
        if words[0] != sys.executable or module not in FORKED:
            EXECUTE(self, *given)
            return
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            if asked["start_new_session"]:
                os.setsid()
            if asked["preexec_fn"]:
                asked["preexec_fn"]()
            ends = (asked["p2cread"], asked["c2pwrite"], asked["errwrite"])
            become(module, arguments, asked["env"] or dict(os.environ), asked["cwd"], ends)
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in pipes))  # type: ignore[attr-defined]


def become(
    module: str, arguments: Sequence[str], env: dict[str, str], cwd: str | None, ends: Sequence[int]
) -> NoReturn:
    """Turn this fork into `python -P -m MODULE ARGUMENT…`."""
    code: object = 1
    atexit._clear()  # handlers of the parent
    logging.root.handlers.clear()  # those of pytest
    try:
        for number, end in enumerate(ends):  # of standard input, output and error; -1 is inherited
            if end not in (-1, number):
                os.dup2(end, number)
        os.closerange(3, 1024)
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd or ".")
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.argv = [module, *arguments]
        set_title(f"{sys.executable} -P -m {' '.join(sys.argv)} RANK={env.get('RANK')}")
        sys.modules.pop(module, None)  # runpy would warn about one that is imported already
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(str(code)))


def set_title(text: str) -> None:
    """Overwrite the command line of this process in memory, where `ps` reads it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    ctypes.memmove(start, text.encode()[: end - start - 1].ljust(end - start, b"\0"), end - start)


def serve(requests: socket.socket) -> None:
    """Fork for each request; report its process id and, later, its exit code."""
    with selectors.DefaultSelector() as events:
        events.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in events.select():
                if key.fileobj is not requests:
                    pid, status = key.data
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with suppress(OSError):  # a test that does not wait has closed its end
                        status.sendall(str(code).encode())
                    status.close()
                    events.unregister(key.fileobj)
                    os.close(key.fd)
                    continue
                message, descriptors, *_ = socket.recv_fds(requests, 1 << 20, 3)
                if not message:
                    return
                status = socket.socket(fileno=descriptors[0])
                pid = os.fork()
                if pid == 0:
                    os.setsid()
                    subprocess.Popen = Fork  # type: ignore[misc, assignment]
                    asked = json.loads(message)
                    become(**asked, ends=(-1, *descriptors[1:]))
                for end in descriptors[1:]:
                    os.close(end)
                with suppress(OSError):
                    status.sendall(str(pid).encode())
                events.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, status))


if __name__ == "__main__":
    gc.disable()
    import torch

    torch.set_num_threads(1)  # threads do not survive a fork
    for name in PRELOADED:
        importlib.import_module(name)
    gc.enable()
    gc.collect()
    gc.freeze()  # otherwise every fork searches what is imported here for garbage, and copies it
    serve(socket.socket(fileno=int(sys.argv[1])))
