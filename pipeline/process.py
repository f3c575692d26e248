"""What a process asks of the kernel: about its parent, and where its words go."""

import contextlib
import ctypes
import os
import signal
from pathlib import Path


def end_with_parent() -> None:
    """Should the parent be killed, the kernel sends this process SIGTERM: workers save and stop, none is orphaned."""
    with contextlib.suppress(OSError, AttributeError):  # elsewhere than on Linux
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def speak_in(log: Path) -> None:
    """What this process and its children print is appended to a file from here on."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
