"""A wish to stop, from Ctrl-C, a scheduler or a preemption; the loop asks for it between steps."""

import contextlib
import ctypes
import os
import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
STOPPED = os.EX_TEMPFAIL  # 75: what a worker exits with that has saved as asked and has more to do


class Stop:
    """Turns the first signal into a flag; the ranks agree on it before any of them acts."""

    def __init__(self) -> None:
        self.reason: str | None = None
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name


def end_with_parent() -> None:
    """Should the parent be killed, the kernel sends this process SIGTERM: workers save and stop, none is orphaned."""
    with contextlib.suppress(OSError, AttributeError):  # elsewhere than on Linux
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
