"""Run commands in this process, fast enough for hundreds of attacks, and judge how they end."""

import contextlib
import importlib
import io
import os
import resource
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from unittest import mock

import psutil

from launch import __main__ as command_line

LIMIT_S = 120  # on a busy machine; an attack usually takes far less than a second
MEMORY_BYTES = 6 << 30
GOOD_CODES = (0, 1, 2, 130)


LEGACY = Path(__file__).parents[1] / "fixtures" / "legacy"
DEEP = "[" * 100_000

# What may be in the place of a file.
NODES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "fifo": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "directory": Path.mkdir,
    "loop": lambda path: path.symlink_to(path),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "empty": Path.touch,
    "deep": lambda path: path.write_text(DEEP),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 64),
    "sparse": lambda path: (path.touch(), os.truncate(path, 1 << 30)),
    "not an object": lambda path: path.write_text("[1, 2]\n"),
}


class HangError(BaseException):
    """Not an Exception, so that no command can catch it."""


def _hang(*_: object) -> None:
    raise HangError


@contextlib.contextmanager
def time_limit() -> Iterator[None]:
    # Endless files must end in a MemoryError here, not in a machine without memory.
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, _hang)
    others = set(psutil.Process().children(recursive=True))  # Ray of other tests, for example
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)
        for child in set(psutil.Process().children(recursive=True)) - others:
            with contextlib.suppress(psutil.Error):
                child.kill()


def run(*arguments: object) -> tuple[int | str, str]:
    """Return the exit code and everything that was printed."""
    # Before the time limit begins, because imports must not count.
    store = "mlflow.store.tracking.sqlalchemy_store"
    for module in ("scipy.optimize", "torch", "transformers.models.auto", store):
        importlib.import_module(module)
    if not command_line.app.registered_groups:
        command_line.mount()
    printed = io.StringIO()
    argv = ["launch", *map(str, arguments)]
    with (
        mock.patch.object(command_line, "mount", lambda _: None),
        mock.patch.object(sys, "argv", argv),
        mock.patch.dict(os.environ),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        try:
            with time_limit():
                command_line.main()
        except SystemExit as ended:
            return ended.code if ended.code is not None else 0, printed.getvalue()
        except BaseException as error:
            return f"{type(error).__name__} {error}"[:200], printed.getvalue()
    return 0, printed.getvalue()


def fault(arguments: Iterable[object], *, refuse: bool = False, out: Path | None = None) -> str:
    """Run a command; describe what is wrong with how it ended, or return "".

    `refuse`: the command must fail with code 2. `out`: a path that a failure must not leave.
    """
    words = list(map(str, arguments))
    before = _here()
    code, printed = run(*words)
    lines = [line for line in printed.splitlines() if line.startswith("error: ")]
    left = [path for path in (out, *(_here() - before)) if path is not None and path.exists()]
    wrong = ""
    if code not in GOOD_CODES:
        wrong = f"ended with {code}"
    elif "Traceback" in printed or "error: unexpected" in printed:
        wrong = "was not expected"
    elif refuse and code != 2:
        wrong = f"was accepted (exit {code})"
    elif code == 2 and len(lines) != 1 and words not in ([], ["data"]):  # both print the help
        wrong = "is not one line"
    elif code and left:
        wrong = f"left {left[0]}"
    for path in left:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    line = " ".join(_short(shlex.quote(word)) for word in words)
    return f"launch {line}\n    {wrong}: {_short(printed.strip()[-1000:])}" if wrong else ""


def _short(word: str) -> str:
    return word if len(word) < 200 else f"{word[:100]}…{word[-100:]}"


def _here() -> set[Path]:
    return set(Path.cwd().iterdir())


def expect_none(faults: Iterable[str]) -> None:
    """Fail with every fault, so that one run shows all of them."""
    found = [wrong for wrong in faults if wrong]
    assert not found, f"{len(found)} faults\n" + "\n".join(found)
