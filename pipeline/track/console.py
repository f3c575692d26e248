"""Send a run's records to its log, and to the lines and the progress bar that a person watches."""

import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from pipeline.config.objective import Replaced
from pipeline.config.schema import RunConfig
from pipeline.planner.count import params
from pipeline.runs.history import remaining_s
from pipeline.runs.log import Log, Record
from pipeline.units import count, span

UNKNOWN = "–"
# A note omits these keys: its line begins with them, or they follow from the step.
_IMPLIED = {"kind", "time", "step", "event", "tokens", "flops", "hash"}
# A note's words for keys of the log.
_WORDS = {
    "world": "ranks", "grad_norm": "gnorm", "seconds": "took", "blocked_s": "training waited",
    "start_s": "startup", "replay_s": "lost work", "wall_s": "total", "checkpoint_s": "saves",
    "wait_s": "waiting for data", "skipped_s": "skipped steps",
}  # fmt: skip
MAX_EPOCHS = 4  # repeated data is nearly as good as new up to here (arXiv 2305.16264)
MIN_HELD_OUT_TOKENS = 100_000


class Console:
    """Print records to standard output; on a terminal, with a progress bar below them."""

    def __init__(self, total_steps: int, quiet: bool = False) -> None:
        self.total_steps = total_steps
        self.quiet = quiet
        self._steps: deque[Record] = deque(maxlen=32)  # the latest steps, for the ETA
        self._imbalance: object = None  # from the last "moe" record, shown with the next step
        self._bar: Any = None if quiet or not sys.stdout.isatty() else _bar(total_steps)

    def record(self, record: Record) -> None:
        kind = record["kind"]
        if kind == "moe":
            self._imbalance = record.get("worst_imbalance")
        if self.quiet or kind == "moe":
            return  # a mixture logs "moe" at every step: too much for separate lines
        step = record["step"]
        if kind == "step":
            if self._steps and step <= self._steps[-1]["step"]:
                self._steps.clear()  # the run went back to a checkpoint
            self._steps.append(record)
            if self._imbalance is not None:
                record = {**record, "worst_imbalance": self._imbalance}
        line = format_record(record, self.total_steps, remaining_s(self._steps, self.total_steps))
        if self._bar is None:
            _print(line)
            return
        self._bar.start()  # not before, because a run that dies early would leave an empty bar
        # A save is logged after later steps, so it must not move the bar.
        if record.get("event") != "save":
            self._bar.update(self._bar.task_ids[0], completed=step)
        self._bar.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class Tracker:
    """Send each record to the run's log and then to the console. Ranks other than 0 have neither.

    Everything else reads the log: MLflow's sidecar, fits, the dashboard."""

    def __init__(self, log: Log | None = None, console: Console | None = None) -> None:
        self._log = log
        self._console = console

    def record(self, record: Record) -> None:
        timed = {"time": time.time(), **record}
        if self._log is not None:
            self._log.append(timed)
        if self._console is not None:
            self._console.record(timed)

    def close(self) -> None:
        for part in (self._log, self._console):
            if part is not None:
                part.close()


def header(
    config: RunConfig, ranks: int, *, train_tokens: int, device: str, tracked: str
) -> Iterator[str]:
    """Yield a description of a run, one line per topic, to print before its first step."""
    from pipeline.planner.memory import Layout  # the ranks print no header
    from pipeline.planner.speed import estimate

    model = config.model
    train = config.train
    optim = config.optim
    sizes = params(model)
    tokens = train.steps * train.batch_tokens
    active = f", {count(sizes.active)} active" if sizes.active != sizes.total else ""
    name = f"{model.size or config.name} {model.arch}"
    yield f"model   {name} │ {count(sizes.total)} parameters{active}"
    yield (
        f"data    {count(tokens)} tokens │ {tokens / train_tokens:.3g} epochs over "
        f"{count(train_tokens)} │ {config.data.dir}"
    )
    yield (
        f"recipe  lr {optim.lr:.3g} {optim.schedule.kind} │ {train.steps:,} steps of "
        f"{count(train.batch_tokens)} tokens │ {optim.optimizer.kind}"
    )
    parallel = config.parallel
    yield (
        f"layout  {ranks} × {device} │ {parallel.engine} ZeRO-{parallel.zero} ep {parallel.ep} "
        f"sp {parallel.sp} │ micro-batch {train.micro_batch} │ {train.dtype}"
    )
    # The planner predicts only devices whose rates were measured.
    if config.cluster.device is not None and config.cluster.has(device):
        expected = estimate(config, Layout.of(config, ranks))
        about = f"about {span(train.steps * expected.step_s)}, ± {expected.error:.0%}"
        yield f"time    {about} │ {count(expected.tokens_s)} tokens/s"
    else:
        yield f"time    the speed of {device} is not known; see eta below"
    if config.in_context_tokens is not None:
        early, late = config.in_context_tokens
        yield f"score   in-context: loss at token {late} minus loss at token {early} of {model.seq}"
    yield f"tracked {tracked}"


def run_warnings(config: RunConfig, train_tokens: int, held_out_tokens: int) -> Iterator[str]:
    """Yield a line for each reason why the run may learn little, or measure its loss badly."""
    train = config.train
    objective = config.objective
    if isinstance(objective, Replaced) and not objective.trained:
        yield (
            "warning: a small model needs thousands of steps before it finds replacements from "
            "other texts; --set model.generator=0.25 trains a generator that makes better ones"
        )
    epochs = train.steps * train.batch_tokens / train_tokens
    if epochs > MAX_EPOCHS:
        yield (
            f"warning: the run repeats its {count(train_tokens)} tokens {epochs:,.0f} times; above "
            f"{MAX_EPOCHS} epochs it learns little more: prepare more data, or train a larger "
            "model for fewer steps"
        )
    if held_out_tokens < MIN_HELD_OUT_TOKENS:
        yield (
            f"warning: the held-out split has {held_out_tokens:,} tokens, so its loss is noisy; "
            f"prepare data with a larger --valid-share, to hold out {MIN_HELD_OUT_TOKENS:,} or more"
        )


def format_record(record: Record, total_steps: int, eta_s: float | None = None) -> str:
    """Return one record as one line with fixed columns."""
    kind = record.get("kind")
    steps = f"{record.get('step', 0):>{len(str(total_steps))}}/{total_steps}"
    if kind == "step":
        columns = [
            f"step {steps}",
            f"loss {_number(record.get('loss'), 6)}",
            f"gnorm {_number(record.get('grad_norm'), 4)}",
            f"lr {_power(record.get('lr'))}",
            f"{_count(record.get('tokens_per_s'))} tok/s",
            f"mfu {_percent(record.get('mfu'))}",
        ]
        if "worst_imbalance" in record:
            columns.append(f"imbalance {_number(record['worst_imbalance'], 4)}")
        columns.append(f"eta {span(eta_s)}")
    elif kind == "eval":
        columns = [
            f"eval {steps}",
            f"loss {_number(record.get('loss'), 6)}",
            *([f"bpb {_number(record['bpb'], 6)}"] if "bpb" in record else []),
            # Scores of tasks: blimp/accuracy
            *(f"{key} {_number(value, 6)}" for key, value in record.items() if "/" in key),
        ]
    else:
        columns = [f"note {steps}", str(record.get("event", kind))]
        for key, value in record.items():
            duration = key == "seconds" or key.endswith("_s")
            hidden = value in ("", None) or isinstance(value, list) or (duration and not value)
            if key not in _IMPLIED and not hidden:
                text = f"{value:.3g}" if isinstance(value, float) else str(value)
                columns.append(f"{_WORDS.get(key, key)} {text}{' s' * duration}")
    return " │ ".join(columns)


def _bar(total_steps: int) -> Any:
    try:
        from rich import progress
    except ImportError:  # the lines are enough
        return None
    bar = progress.Progress(
        progress.BarColumn(bar_width=None),
        progress.TaskProgressColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        refresh_per_second=2,  # its thread shares the processor with training
        redirect_stdout=False,
        redirect_stderr=False,
    )
    bar.add_task("steps", total=total_steps)
    return bar


def _print(line: str) -> None:
    try:
        print(line, flush=True)
    except UnicodeEncodeError:  # a terminal that has no │
        plain = line.replace("│", "|").replace(UNKNOWN, "-").encode("ascii", "replace")
        print(plain.decode(), flush=True)
    except BrokenPipeError:  # `launch … | head` closed our output; training continues
        return


def _number(value: object, width: int) -> str:
    """Format a number with as many decimals as the column holds: 3.1412, 10.397, 123.46."""
    if not isinstance(value, int | float):
        return f"{UNKNOWN:>{width}}"
    if value != value:
        return f"{'nan':>{width}}"
    if abs(value) >= 10**width:
        return f"{value:>{width}.0e}"
    whole = len(f"{value:.0f}")  # digits before the point, with a sign
    return f"{value:>{width}.{max(0, width - whole - 1)}f}"[:width]


def _power(value: object) -> str:
    """Format a number as 2.9e-4, without the exponent's leading zero."""
    if not isinstance(value, int | float):
        return f"{UNKNOWN:>6}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}".rjust(6) if exponent else f"{mantissa:>6}"


def _count(value: object) -> str:
    """Format a number in five characters: 412k, or 4.12k."""
    return f"{count(value) if isinstance(value, int | float) else UNKNOWN:>5}"


def _percent(value: object) -> str:
    return f"{value * 100:4.1f}%".rjust(5) if isinstance(value, int | float) else f"{UNKNOWN:>5}"
