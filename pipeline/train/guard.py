"""A step that would hurt the run is not taken: before the weights change, all devices judge the same two numbers.

A loss or gradient norm that is not finite, or beyond 6σ of the last 128 recorded ones (OLMo 3; Marin's 32B report), is
skipped. Logarithms are judged, and σ has a floor: with small batches odd ones reach seven times the usual norm in a
clean run, 52 of its plain σ (docs/LOG.md), and clipping tames them. Several skips close together are no single bad
batch: the run goes back to its last checkpoint and leaves those batches out. If that does not help, it stops. All that
the guard knows is in the run's log, so that a resumed run judges as the one that was never interrupted. The host is
a step behind: what a step is held against ends with the one before the last.
"""

import math
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pipeline.errors import RunError

_WINDOW, _SIGMAS = 128, 6.0
# the least σ: a loss that hardly moves is not held against its own noise, and 6σ of norms are twenty times the usual
_FLOOR = {"loss": 1e-3, "gradient norm": 0.5}
_REPEATED, _NEAR = 3, 16  # so many skips within so many steps
_HEARD = ("skip", "rollback")


class RollbackError(Exception):
    """Back to the last checkpoint, and then past the batches of steps first…last."""

    def __init__(self, first: int, last: int, reason: str) -> None:
        super().__init__(f"steps {first} to {last}: {reason}")
        self.first, self.last, self.reason = first, last, reason


class Guard:
    def __init__(self, records: Iterable[Mapping[str, Any]]) -> None:
        # of each step logarithms of loss and gradient norm; one more, since the last may be too late to count
        self._window: deque[tuple[int, tuple[float, float]]] = deque(maxlen=_WINDOW + 1)
        self._skips: list[int] = []
        self._rolled = -math.inf  # the last step of the trouble before
        self._left_out: list[range] = []
        for record in records:
            self.hear(record)

    def hear(self, record: Mapping[str, Any]) -> None:
        """What the log is told, or was."""
        if record["kind"] == "step":
            self._window.append((record["step"], (_log(record["loss"]), _log(record["grad_norm"]))))
        elif record.get("event") == "skip":
            self._skips.append(record["step"])
        elif record.get("event") == "rollback":
            self._rolled = record["last"]
            self._left_out.append(range(record["first"], record["last"] + 1))

    def leaves_out(self, step: int) -> bool:
        """Whether the run went back past this step, counted from 1, for its batch's sake."""
        return any(step in steps for steps in self._left_out)

    def limits(self, step: int) -> list[float]:
        """What a step's loss and gradient norm may be at most; what is not finite is below none."""
        return [math.exp(mean + _SIGMAS * sigma) for _, mean, sigma in self._usual(step)] or [
            sys.float_info.max
        ] * 2

    def reason(self, step: int, loss: float, grad_norm: float) -> str:
        """What spoke against a step that was not taken."""
        said = dict(zip(_FLOOR, (loss, grad_norm), strict=True))
        for name, value in said.items():
            if not math.isfinite(value):
                return f"{name} is {value}"
        usual = self._usual(step)
        off, name, mean = max(
            ((_log(said[name]) - mean) / sigma, name, mean) for name, mean, sigma in usual
        )
        return f"{name} {said[name]:.4g} is {off:.1f}σ above the usual {math.exp(mean):.4g}"

    def _usual(self, step: int) -> Iterator[tuple[str, float, float]]:
        """Mean and σ of the logarithms, of what was known when the step was launched; nothing if that is too little."""
        window = [values for at, values in self._window if at < step - 1][-_WINDOW:]
        if len(window) >= _WINDOW // 2:
            for (name, floor), before in zip(
                _FLOOR.items(), zip(*window, strict=True), strict=True
            ):
                mean = sum(before) / len(before)  # not statistics.stdev: 13 times slower
                sigma = math.sqrt(sum((x - mean) ** 2 for x in before) / (len(before) - 1))
                yield name, mean, max(sigma, floor)

    def escalate(self, step: int, reason: str) -> None:
        """After a skip was heard: enough of them close together call for more."""
        near = [skip for skip in self._skips if skip > step - _NEAR]
        if len(near) < _REPEATED:
            return
        if step - self._rolled < _WINDOW:
            raise RunError(
                f"step {step}: {reason}, the third time within {_NEAR} steps, and going back from step "
                f"{self._rolled} did not help; look at those batches or lower optim.lr, then --resume"
            )
        raise RollbackError(near[0], step, reason)


def _log(value: float) -> float:
    return math.log(max(value, 1e-30))


def relevant(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """What of a log a guard is made from."""
    records = list(records)
    steps = [
        {k: r[k] for k in ("kind", "step", "loss", "grad_norm")}
        for r in records
        if r["kind"] == "step"
    ]
    return [*steps[-_WINDOW - 1 :], *(r for r in records if r.get("event") in _HEARD)]
