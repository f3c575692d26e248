"""Ray, and nothing of the pipeline: start or join a cluster, run tasks in order with bounded memory."""

import os
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from pipeline.errors import DataError

Result = TypeVar("Result")

OBJECT_STORE_BYTES = 128 * 2**20  # tasks pass file names and counts, never text


@contextmanager
def cluster(workers: int | None) -> Iterator[None]:
    """Join RAY_ADDRESS (`auto`: what `ray start` started here) or run a private instance while the block lasts."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # leave CUDA_VISIBLE_DEVICES alone, and be quiet
    if (
        not os.environ.get("RAY_ADDRESS") and "ray" not in sys.modules
    ):  # read once, when ray is imported
        # Ray listens on every interface whatever address it is given; without a token anyone who reaches it runs code.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    if address := os.environ.get("RAY_ADDRESS"):
        _answers(address)
        os.environ.setdefault(
            "RAY_BACKEND_LOG_LEVEL", "fatal"
        )  # a wrong token fills the screen otherwise
    import ray

    if ray.is_initialized():  # a caller that holds a cluster keeps it
        yield
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address:
            ray.init(**quiet)
        else:
            private = ray.init(
                address="local",  # never by accident a cluster that something else has left running
                num_cpus=workers or os.cpu_count(),
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                **quiet,
            )
    except (ConnectionError, RuntimeError, OSError) as error:
        first, remedy = str(error).strip().splitlines()[0], "check `ray status`"
        if address:
            remedy += " and that RAY_AUTH_MODE and RAY_AUTH_TOKEN are the cluster's"
        raise DataError(
            f"RAY_ADDRESS={address or 'local'}: Ray does not start or answer ({first}); {remedy}"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()
    if not address:
        _forget(Path(private.address_info["session_dir"]))  # of one that failed the logs are kept


def _forget(session: Path) -> None:
    """Ray leaves a directory per session, and never mends a link to one that is gone."""
    latest = session.with_name("session_latest")
    with suppress(OSError):
        if latest.readlink() == session:
            latest.unlink()
    shutil.rmtree(session, ignore_errors=True)


def _answers(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise DataError(
            f"RAY_ADDRESS={address}: nothing answers there ({error.strerror or error}); check `ray status`, "
            "or unset it to run on this machine"
        ) from error


def run(
    function: Callable[..., Result],
    calls: Sequence[tuple[Any, ...]],
    on_done: Callable[[int, Result], None] = lambda index, result: None,
    workers: int | None = None,
) -> list[Result]:
    """Call the function once per tuple of arguments, in parallel; results in order, the first error raised as it was.

    As many calls as there are CPUs are in flight: the driver's memory does not grow with the work, and none waits to be
    sent, which is when cancelling it would be the driver's end (Ray 2.60 aborts when it comes back all the same).
    """
    import ray

    here = Path.cwd()

    @wraps(function)
    def at_home(*call: Any) -> Result:
        with suppress(OSError):  # a node without this folder reads absolute paths all the same
            os.chdir(here)  # relative ones are the caller's, wherever the cluster was started
        return function(*call)

    remote = ray.remote(max_retries=3)(at_home)
    results: dict[int, Result] = {}
    flying: dict[Any, int] = {}
    waiting = iter(enumerate(calls))
    try:
        with _interrupts() as interrupted:
            while True:
                slots = max(
                    1, int(ray.cluster_resources().get("CPU", 1))
                )  # asked anew: nodes come and go
                ahead = min(workers or slots, slots)
                if interrupted():
                    raise KeyboardInterrupt
                while len(flying) < ahead and (call := next(waiting, None)) is not None:
                    flying[remote.remote(*call[1])] = call[0]
                if not flying:
                    return [results[i] for i in range(len(calls))]
                ready, _ = ray.wait(list(flying), num_returns=1, timeout=1.0)
                for reference in ready:
                    index = flying.pop(reference)
                    results[index] = ray.get(reference)
                    on_done(index, results[index])
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error  # with the worker's traceback
    except ray.exceptions.RayError as error:
        first = str(error).strip().splitlines()[0]
        raise DataError(
            f"Ray gave up on a task: {first}; the same command again does what is missing"
        ) from error
    finally:
        if flying:
            time.sleep(0.1)  # until the last of them is with its worker
        for reference in flying:
            ray.cancel(reference, force=True)


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: raised where Ray frees an object, the interrupt is swallowed there."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    heard: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield lambda: bool(heard)
    finally:
        signal.signal(signal.SIGINT, before)
