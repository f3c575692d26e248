"""What the scaling commands print: tables for people, JSON for programs."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from pipeline.sweep.run import Member, Progress


def print_json(data: dict[str, Any]) -> None:
    from pipeline.scaling.figures import finite

    typer.echo(json.dumps(finite(data), indent=2, ensure_ascii=False))


def print_fit(data: dict[str, Any]) -> None:
    console, table = _table(
        f"{data['law']}: {data['formula']}", "parameter", "value", "standard error", "95% interval"
    )
    for name, p in data["parameters"].items():
        table.add_row(
            name, f"{p['value']:.5g}", f"{p['se']:.3g}", f"{p['low']:.4g} … {p['high']:.4g}"
        )
    console.print(table)
    if data["exponents"]:
        console.print(f"N* ∝ C^{data['exponents']['a']:.4f}   D* ∝ C^{data['exponents']['b']:.4f}")
    used, dropped = data["points"]["used"], data["points"]["dropped"]
    console.print(
        f"{used} points, objective {data['objective']:.6g}, errors from the {data['errors_from']}"
    )
    if data["backtest"]:
        error = data["backtest"]["mean_absolute_error"]
        console.print(
            f"Forecasting held-out larger runs from smaller ones: {error:.2%} off on average"
        )
    console.print(f"Counted as: {data['convention']}", markup=False)
    for reason in dropped[:12]:
        console.print(f"  left out: {reason}", markup=False, style="dim")
    if len(dropped) > 12:
        console.print(f"  … and {len(dropped) - 12} more", style="dim")
    _warn(console, data["warnings"])


def print_forecast(data: dict[str, Any], made: list[dict[str, Any]]) -> None:
    from pipeline.scaling.figures import count, power

    title = f"forecast by {data['law']}"
    console, table = _table(
        title, "run", "N", "D", "FLOPs", "beyond", "loss", "95% interval", "best N*", "best D*"
    )
    for one in made:
        best = one["optimum"]
        table.add_row(
            one["name"], count(one["N"]), count(one["D"]), power(one["C"]), f"{one['extrapolation']:.3g}×",
            f"{one['loss']:.4f}", f"{one['low']:.4f} … {one['high']:.4f}",
            count(best["N"]) if best else "–", count(best["D"]) if best else "–",
        )  # fmt: skip
    console.print(table)
    for key in ("recipe", "cost"):
        if key in data:
            told = ", ".join(f"{name} {value:g}" if isinstance(value, float | int) else f"{name} {value}"
                             for name, value in data[key].items())  # fmt: skip
            console.print(f"{key}: {told}")
    for path in data.get("registered", []):
        console.print(f"registered: {path}", markup=False)
    _warn(console, data["warnings"])


def print_scores(data: dict[str, Any]) -> None:
    from pipeline.scaling.figures import count

    console, table = _table(
        "forecasts", "run", "N", "D", "forecast", "measured", "error", "inside", "counts"
    )
    yes = {True: "yes", False: "no", None: "–"}
    for one in data["scores"]:
        landed = one["measured"] is not None
        table.add_row(
            one["run"] or "not yet", count(one["N"]), count(one["D"]), f"{one['forecast']:.4f}",
            f"{one['measured']:.4f}" if landed else "–", f"{one['error']:+.2%}" if landed else "–",
            yes[one["inside"]], yes[one["counts"]] if one["counts"] is not False else "no: registered after it began",
        )  # fmt: skip
    console.print(table)
    so_far = data["calibration"]
    if so_far["counted"]:
        console.print(
            f"{so_far['inside']} of {so_far['counted']} inside their 95% interval; "
            f"{so_far['mean_absolute_error']:.2%} off on average")  # fmt: skip


def print_plan(data: dict[str, Any]) -> None:
    from pipeline.scaling.figures import count, power

    title = f"{data['kind']} sweep {data['experiment']}"
    console, table = _table(
        title,
        "run",
        "N",
        "D",
        "D/N",
        "FLOPs",
        "lr",
        "batch",
        "steps",
        "from",
        "GiB per rank",
        "hours",
    )
    for run in data["runs"]:
        table.add_row(
            run["name"], count(run["N"]), count(run["D"]), f"{run['D'] / run['N']:.3g}", power(run["C"]),
            f"{run['lr']:.2e}", count(run["batch_tokens"]), f"{run['steps']:,}",
            f"{run['begins']:,}" if run["trunk"] else "–", f"{run['memory_bytes'] / 2**30:.2g}",
            "–" if run["hours"] is None else f"{run['hours']:.3g}",
        )  # fmt: skip
    console.print(table)
    total = data["total"]
    time = (
        ""
        if total["hours"] is None
        else f", {total['hours']:.3g} hours one after another ({total['timing']})"
    )
    console.print(f"{total['runs']} runs, {power(total['flops'])} FLOPs{time}")
    if total["saved"]:
        share = total["saved"] / (total["flops"] + total["saved"])
        console.print(
            f"Branches begin in the plateau of their size's longest run, at the step under `from`: {share:.0%} less "
            f"than {power(total['flops'] + total['saved'])} FLOPs for whole runs")  # fmt: skip


@contextmanager
def sweep_display(
    members: "Sequence[Member]", missing: int, *, quiet: bool
) -> "Iterator[Callable[[Progress], None]]":
    """On a terminal a bar for the sweep and one for each running member; elsewhere a line when one begins or ends."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=quiet, quiet=quiet)
    steps = {member.name: member.steps for member in members}
    told: set[tuple[str, str]] = set()
    console.print(
        f"{len(members) - missing} of {len(members)} runs are there, {missing} to go",
        highlight=False,
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        overall = bars.add_task("runs", total=len(members), completed=len(members) - missing)
        tasks = {}

        def say(name: str, what: str, style: str = "") -> None:
            if (name, what) not in told:
                told.add((name, what))
                bars.console.print(
                    f"{name}: {what}", highlight=False, markup=False, style=style, soft_wrap=True
                )

        def show(at: "Progress") -> None:
            for name, member in at.running.items():
                say(name, "running")
                if name not in tasks:
                    tasks[name] = bars.add_task(name, total=steps[name])
                bars.update(tasks[name], completed=member.step)
            for name in at.finished:
                say(name, "finished")
            for name, reason in at.failed.items():
                say(name, f"failed: {reason}", "bold red")
            if at.stopping:
                say(
                    "sweep",
                    "stopping; running ones save first (again to end them at once)",
                    "bold yellow",
                )
            for name in [name for name in tasks if name not in at.running]:
                bars.remove_task(tasks.pop(name))
            bars.update(overall, completed=len(members) - missing + len(at.finished))

        yield show


def _table(title: str, *columns: str) -> tuple[Any, Any]:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left")
    width = None if Console().is_terminal else 120
    return Console(width=width, highlight=False), table


def _warn(console: Any, warnings: list[str]) -> None:
    for warning in warnings:
        console.print(f"! {warning}", markup=False, style="bold yellow")
