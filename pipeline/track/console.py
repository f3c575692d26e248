"""What a person watches: one line per record in fixed columns, and on a terminal a progress bar below them."""

import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

UNKNOWN = "–"
_IMPLIED = {"kind", "time", "step", "event", "tokens", "flops"}


class Console:
    """Prints step, eval and event records to standard output; the bar needs a terminal and rich."""

    def __init__(self, total_steps: int, quiet: bool = False) -> None:
        self.total_steps = total_steps
        self.quiet = quiet
        self._pace: deque[tuple[int, float]] = deque(
            maxlen=32
        )  # (step, time): the ETA's moving average
        self._bar: Any = None if quiet or not sys.stdout.isatty() else _bar(total_steps)

    def record(self, record: Mapping[str, object]) -> None:
        if self.quiet:
            return
        step = record.get("step")
        if record.get("kind") == "step" and isinstance(step, int):
            if self._pace and step <= self._pace[-1][0]:
                self._pace.clear()  # the run went back to a checkpoint
            when = record.get("time")
            self._pace.append((step, float(when) if isinstance(when, int | float) else time.time()))
        line = format_record(record, self.total_steps, self._eta_s())
        if self._bar is None:
            _plain(line)
            return
        self._bar.start()  # idempotent; here, so that a run that dies early leaves no empty bar
        if (
            isinstance(step, int) and record.get("event") != "save"
        ):  # which is told behind later steps
            self._bar.update(self._bar.task_ids[0], completed=step)
        self._bar.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _eta_s(self) -> float | None:
        if len(self._pace) < 2:
            return None
        (first, began), (last, now) = self._pace[0], self._pace[-1]
        return max(0.0, (now - began) / (last - first) * (self.total_steps - last))


def format_record(
    record: Mapping[str, object], total_steps: int, eta_s: float | None = None
) -> str:
    """One record as one line."""
    kind = record.get("kind")
    steps = f"{record.get('step', 0):>{len(str(total_steps))}}/{total_steps}"
    if kind == "step":
        columns = [
            f"step {steps}",
            f"loss {_number(record.get('loss'), 6)}",
            f"gnorm {_number(record.get('grad_norm'), 4)}",
            f"lr {_power(record.get('lr'))}",
            f"{_rate(record.get('tokens_per_s'))} tok/s",
            f"mfu {_percent(record.get('mfu'))}",
            f"eta {span(eta_s)}",
        ]
    elif kind == "eval":
        columns = [
            f"eval {steps}",
            f"loss {_number(record.get('loss'), 6)}",
            f"bpb {_number(record.get('bpb'), 6)}",
        ]
    else:
        # tokens and FLOPs follow from the step; an empty note is no note, and what has a number per layer no line
        rest = {
            k: v
            for k, v in record.items()
            if k not in _IMPLIED and v not in ("", None) and type(v) is not list
        }
        said = (
            f"{key} {f'{value:.3g}' if isinstance(value, float) else value}"
            for key, value in rest.items()
        )
        columns = [f"note {steps}", str(record.get("event", kind)), *said]
    return " │ ".join(columns)


def _bar(total_steps: int) -> Any:
    try:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TaskProgressColumn,
            TimeElapsedColumn,
        )
    except ImportError:  # the lines alone say everything
        return None
    columns = (
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    bar = Progress(
        *columns, refresh_per_second=2, redirect_stdout=False, redirect_stderr=False
    )  # its thread shares the processor with training
    bar.add_task("steps", total=total_steps)
    return bar


def _plain(line: str) -> None:
    try:
        print(line, flush=True)
    except UnicodeEncodeError:  # a terminal that knows no │
        print(
            line.replace("│", "|").replace(UNKNOWN, "-").encode("ascii", "replace").decode(),
            flush=True,
        )
    except BrokenPipeError:  # `launch … | head` closes our output; the run is not about its output
        return


def _number(value: object, width: int) -> str:
    """As many decimals as the column holds: 3.1412, 10.397, 123.46."""
    if not isinstance(value, int | float):
        return f"{UNKNOWN:>{width}}"
    if value != value or abs(value) >= 10**width:
        return f"{value:>{width}.0e}" if value == value else f"{'nan':>{width}}"
    whole = len(f"{value:.0f}")
    return f"{value:>{width}.{max(0, width - whole - 1)}f}"[:width]


def _power(value: object) -> str:
    """2.9e-4, without the exponent's leading zero."""
    if not isinstance(value, int | float):
        return f"{UNKNOWN:>6}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}".rjust(6) if exponent else f"{mantissa:>6}"


def _rate(value: object) -> str:
    if not isinstance(value, int | float) or not 0 <= value < 1e15:
        return f"{UNKNOWN:>4}"
    units = iter("kMGT")
    unit = ""
    while value >= 999.5:
        value, unit = value / 1000, next(units)
    digits = 1 if unit and value < 9.95 else 0
    return f"{value:.{digits}f}{unit}".rjust(4)


def _percent(value: object) -> str:
    return f"{value * 100:4.1f}%".rjust(5) if isinstance(value, int | float) else f"{UNKNOWN:>5}"


def span(seconds: float | None) -> str:
    """3h12, 12m05, 45s, 2d03."""
    if seconds is None:
        return UNKNOWN
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}"
