"""A wish to stop, from Ctrl-C, a scheduler or a preemption; the loop asks for it between steps."""

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
        self.reason = (
            self.reason or signal.Signals(number).name
        )  # torchrun's SIGTERM may follow, when a rank is done
