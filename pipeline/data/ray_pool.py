"""Ray: start or join a cluster, and run tasks on it in order, with bounded memory.

`python -m pipeline.data.ray_pool SESSION_DIR` is the guard of a private session: a process that
outlives the driver. Ray's servers die with the driver, but its agents first try to reach them for
a minute.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from pipeline.errors import DataError, first_line
from pipeline.process import python_module

Result = TypeVar("Result")

WORKERS_PER_CPU = 16  # each needs about 150 MB; more than one only helps while files load slowly
OBJECT_STORE_BYTES = 128 * 2**20  # tasks pass file names and counts, never text


def check_workers(workers: int | None) -> None:
    """Refuse more workers than this machine can run; a cluster at RAY_ADDRESS uses its CPUs."""
    most = WORKERS_PER_CPU * (os.cpu_count() or 1)
    if workers and workers > most and not os.environ.get("RAY_ADDRESS"):
        raise DataError(f"--workers {workers} is too many for this machine; use at most {most}")


@contextmanager
def cluster(workers: int | None) -> Iterator[None]:
    """Join RAY_ADDRESS (`auto`: the local `ray start`), or run a private instance in the block."""
    address = os.environ.get("RAY_ADDRESS")
    _set_environment(address)
    if address:
        _check_answers(address)
    import ray

    if ray.is_initialized():  # the caller owns a cluster
        yield
        return
    session = _connect(address, workers)
    with nullcontext() if address else _killed_with_driver(session):
        try:
            yield
        finally:
            ray.shutdown()


def _set_environment(address: str | None) -> None:
    # Ray reads these variables when it is imported.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Leave CUDA_VISIBLE_DEVICES alone, without a warning.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address:
        # A wrong token fills the screen otherwise.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    elif "ray" not in sys.modules:
        # Ray listens on every interface; without a token, anyone who reaches it can run code.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def _check_answers(address: str) -> None:
    # Ray itself would try for minutes.
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise DataError(
            f"RAY_ADDRESS={address}: nothing answers there ({error.strerror or error}); "
            "check `ray status`, or unset it to run on this machine"
        ) from error


def _connect(address: str | None, workers: int | None) -> Path:
    """Start or join Ray and return its session directory."""
    import ray

    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if not address:
        options |= {
            "address": "local",  # never a cluster that something else left running
            "num_cpus": workers or os.cpu_count(),
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_node_ip_address": "127.0.0.1",
        }
    try:
        context = ray.init(**options)
    except Exception as error:  # Ray raises a plain Exception if it starts too slowly
        if not address:  # a busy machine, on which it would need more than its 30 s
            text = f"Ray does not start on this machine: {first_line(error)}"
            raise DataError(f"{text}; run the command again") from error
        raise DataError(
            f"RAY_ADDRESS={address}: Ray does not answer ({first_line(error)}); check `ray status` "
            "and that RAY_AUTH_MODE and RAY_AUTH_TOKEN are the cluster's"
        ) from error
    return Path(context.address_info["session_dir"])


@contextmanager
def _killed_with_driver(session: Path) -> Iterator[None]:
    """Kill the processes of a private Ray session when this process ends, even by SIGKILL."""
    guard = subprocess.Popen(
        python_module("pipeline.data.ray_pool", session),  # this module, which imports no Ray
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal must not reach it
    )
    assert guard.stdin is not None
    failed = False
    try:
        yield
    except Exception:  # but not Ctrl-C
        failed = True
        raise
    finally:
        guard.stdin.close()
        guard.wait()  # it also kills what ray.shutdown() left
        if not failed:  # otherwise the logs stay
            _remove_session(session)


def _remove_session(session: Path) -> None:
    # Ray leaves a directory per session, and a link to the latest one that it never repairs.
    latest = session.with_name("session_latest")
    with suppress(OSError):
        if latest.readlink() == session:
            latest.unlink()
    shutil.rmtree(session, ignore_errors=True)


def run(
    function: Callable[..., Result],
    calls: Sequence[tuple[Any, ...]],
    on_done: Callable[[int, Result], None] = lambda index, result: None,
    workers: int | None = None,
) -> list[Result]:
    """Call the function once per tuple of arguments, in parallel, and return results in order.

    The first error in a worker is raised here. At most one call per CPU is submitted at a time, so
    that memory does not grow with the work and no call waits in Ray's queue, where canceling it can
    abort the driver (seen with Ray 2.60).
    """
    import ray

    folder = Path.cwd()

    @wraps(function)
    def in_folder(*call: Any) -> Result:
        # Relative paths are the caller's, wherever the cluster was started. A node without this
        # folder can still read absolute paths.
        with suppress(OSError):
            os.chdir(folder)
        return function(*call)

    remote = ray.remote(max_retries=3)(in_folder)
    results: dict[int, Result] = {}
    running: dict[Any, int] = {}  # reference → index of the call
    waiting = deque(enumerate(calls))
    try:
        with _interrupts() as interrupted:
            while True:
                # Ask again: nodes come and go.
                slots = max(1, int(ray.cluster_resources().get("CPU", 1)))
                if interrupted():
                    raise KeyboardInterrupt
                while waiting and len(running) < min(workers or slots, slots):
                    index, call = waiting.popleft()
                    running[remote.remote(*call)] = index
                if not running:
                    return [results[i] for i in range(len(calls))]
                ready, _ = ray.wait(list(running), num_returns=1, timeout=1.0)
                for reference in ready:
                    index = running.pop(reference)
                    results[index] = ray.get(reference)
                    on_done(index, results[index])
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error  # with the worker's traceback
    except ray.exceptions.RayError as error:
        reason = first_line(error)
        raise DataError(f"Ray gave up on a task: {reason}; run the command again") from error
    finally:
        if running:
            time.sleep(0.1)  # until the last call has reached its worker
        for reference in running:
            ray.cancel(reference, force=True)  # kills the worker


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed."""
    # Ray swallows an interrupt that is raised while it frees an object, so remember it.
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # only the main thread can handle signals
        return
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGINT, before)


def _belongs(process: Path, session: str) -> bool:
    """Whether Ray renamed the process to ray::… and it has a file of the session open."""
    # Others may read these files too, for example a person who looks at the logs.
    if not (process / "cmdline").read_bytes().startswith(b"ray::"):
        return False
    return any(str(handle.readlink()).startswith(session) for handle in (process / "fd").iterdir())


def _guard(session: str) -> None:
    sys.stdin.read()  # blocks until the driver, which has the only other end, is gone
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or is another user's
            if _belongs(process, session):
                os.kill(int(process.name), signal.SIGKILL)


if __name__ == "__main__":
    _guard(sys.argv[1])
