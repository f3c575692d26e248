"""What a process asks of the kernel about its parent."""

import contextlib
import ctypes
import signal


def end_with_parent() -> None:
    """Should the parent be killed, the kernel sends this process SIGTERM: workers save and stop, none is orphaned."""
    with contextlib.suppress(OSError, AttributeError):  # elsewhere than on Linux
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
