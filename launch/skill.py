"""`launch forecast --task`: the accuracy of a larger run on a task that the smaller runs logged."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.tables import table
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from pipeline.runs.history import Run
    from pipeline.scaling.accuracy import TaskForecast
    from pipeline.scaling.predict import Forecast
    from pipeline.scaling.study import Study

_TASK_NAME = (
    "Forecast the accuracy on this task instead of the loss; the runs have to log it "
    "(eval.tasks), or the CSV file to have columns TASK/accuracy and TASK/bpb."
)
TaskName = Annotated[str | None, typer.Option("--task", help=_TASK_NAME)]
_CHANCE = "Accuracy of guessing on the task (default: from its file of questions, or fitted)."
Chance = Annotated[float | None, typer.Option(help=_CHANCE)]
# Laws whose points are minima of valleys or curves. Such points are no runs and have no score.
NO_RUNS = ("isoflop", "parabola", "envelope")


def check(task: str | None, law: str, chance: float | None, **of_the_loss: float | None) -> None:
    """Refuse options that make no sense for a task, before anything is read."""
    if task is None:
        if chance is not None:
            raise ConfigError("--chance is the accuracy of guessing on a task; give --task too")
        return
    if not task:
        raise ConfigError("--task is empty; give the name of a file of questions without .jsonl")
    for name, value in of_the_loss.items():
        if value is not None:
            raise ConfigError(
                f"--task cannot be combined with --{name.replace('_', '-')}, which is about the "
                f"held-out loss; give --size, --params with --tokens, --flops or --targets"
            )
    if law in NO_RUNS:
        text = f"law={law} does not describe single runs, and --task needs their scores"
        raise ConfigError(f"{text}; choose --law auto")
    if chance is not None and not 0 <= chance < 1:
        raise ConfigError(f"chance={chance} must be at least 0 and below 1, such as 0.25")


def forecast(
    task: str,
    chance: float | None,
    runs: "list[Run]",
    done: "Study",
    made: "list[Forecast]",
    warnings: list[str],
) -> "tuple[list[TaskForecast], dict[str, Any]]":
    """Return the forecasts, and their figures as JSON; `made` has the task's bits per byte."""
    from pipeline.scaling import accuracy

    if chance is None and runs:
        chance = accuracy.chance_of(runs, task)
    prefix = f"With the bits per byte of {task} as the loss: "
    warnings = [prefix + text if "loss" in text else text for text in warnings]
    found, more = accuracy.forecast(done, task, made, chance)
    data: dict[str, Any] = {"law": done.name, "task": task, "warnings": [*warnings, *more]}
    if len(found) == 1:
        return found, data | vars(found[0])
    return found, data | {"forecasts": [vars(one) for one in found]}


def print_table(console: "Console", made: "list[TaskForecast]") -> None:
    from pipeline.units import count, power

    columns = ("run", "N", "D", "FLOPs", "beyond", "bits/byte", "accuracy", "95% interval")
    rows = []
    for one in made:
        place = [one.name, count(one.N), count(one.D), power(one.C), f"{one.extrapolation:.3g}×"]
        bits = f"{one.bits_per_byte['value']:.4f}"
        interval = f"{one.low:.1%} … {one.high:.1%}"
        rows.append([*place, bits, f"{one.accuracy:.1%}", interval])
    first = made[0]
    console.print(table(f"{first.task}, {first.method} forecast", columns, rows))
    if len(made) > 1:
        return
    heads = ("method", "accuracy", "by bootstrap", "by backtest", "held-out error", "weighted")
    rows = []
    for name, figures in first.methods.items():
        ends = [
            f"{figures[f'{key}_low']:.1%} … {figures[f'{key}_high']:.1%}"
            for key in ("bootstrap", "backtest")
        ]
        errors = [
            "–" if figures[key] is None else f"{figures[key]:.1%}"
            for key in ("backtest_error", "backtest_score")
        ]
        rows.append([name, f"{figures['accuracy']:.1%}", *ends, *errors])
    console.print(table("both methods", heads, rows))
