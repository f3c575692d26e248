"""Requests of a process to the kernel: follow its parent's death, write its output to a file."""

import contextlib
import ctypes
import os
import signal
from pathlib import Path


def end_with_parent() -> None:
    """Ask for SIGTERM when the parent dies, so that workers save and stop instead of living on."""
    with contextlib.suppress(OSError, AttributeError):  # prctl exists on Linux only
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG


def redirect_output(log: Path) -> None:
    """Append everything that this process and its children print to a file from now on."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
