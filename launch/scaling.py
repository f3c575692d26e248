"""`launch fit | report`: from runs to a law, in a terminal and on a page."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.scaling.points import Points

RUNS = typer.Option(help="Directory of runs, such as runs/demo.")
EXPERIMENT = typer.Option(help="Name of an experiment: the runs in runs/NAME.")
POINTS = typer.Option(help="CSV with columns N, D, loss (optional C, run, experts, unique, convention).")
LAW = typer.Option(help="auto (what the points can determine) or chinchilla, compute, power.")
JSON = typer.Option("--json", help="Print JSON instead of a table.")
DROP = typer.Option(help="Leave out this many of the largest losses.")


def read_points(runs: Path | None, experiment: str | None, points: Path | None) -> "Points":
    from pipeline.scaling.points import read_csv
    from pipeline.scaling.runs import points_of, read_runs

    match runs, experiment, points:
        case Path(), None, None:
            return points_of(read_runs(runs))
        case None, str(), None:
            return points_of(read_runs(Path("runs") / experiment))
        case None, None, Path():
            return read_csv(points)
        case _:
            raise ConfigError("give one of --runs DIR, --experiment NAME or --points FILE.csv")


def fit(
    runs: Annotated[Path | None, RUNS] = None,
    experiment: Annotated[str | None, EXPERIMENT] = None,
    points: Annotated[Path | None, POINTS] = None,
    law: Annotated[str, LAW] = "auto",
    drop_highest: Annotated[int, DROP] = 0,
    full_grid: Annotated[bool, typer.Option("--full-grid", help="Hoffmann's 4500 starts.")] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Fit a scaling law to finished runs."""
    from pipeline.scaling.study import study

    done = study(read_points(runs, experiment, points).drop_highest(drop_highest), law, full_grid=full_grid)
    if as_json:
        print_json(done.to_json())
    else:
        print_fit(done.to_json())


def report(
    runs: Annotated[Path | None, RUNS] = None,
    experiment: Annotated[str | None, EXPERIMENT] = None,
    out: Annotated[Path | None, typer.Option(help="The HTML file; by default report.html beside the runs.")] = None,
    law: Annotated[str, LAW] = "auto",
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Write the page: loss against compute, the law, the runs. One file, opens offline."""
    from pipeline.scaling.report import finite, page_data, render
    from pipeline.scaling.runs import read_runs

    if (runs is None) == (experiment is None):
        raise ConfigError("give one of --runs DIR or --experiment NAME")
    root = runs or Path("runs") / str(experiment)
    data = page_data(read_runs(root), title=root.resolve().name, now=time.time(), law=law)
    target = out or root / "report.html"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(render(data), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"out={target} cannot be written ({error.strerror}); choose another place") from None
    if as_json:
        print_json({"path": str(target), "fit": finite(data["fit"])})
    else:
        typer.echo(f"Wrote {target} ({len(data['runs'])} runs). Open it in any browser; it needs no network.")


def print_json(data: dict[str, Any]) -> None:
    from pipeline.scaling.report import finite

    typer.echo(json.dumps(finite(data), indent=2, ensure_ascii=False))


def print_fit(data: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"{data['law']}: {data['formula']}", title_justify="left", title_style="bold")
    for name in ("parameter", "value", "standard error", "95% interval"):
        table.add_column(name, justify="left" if name == "parameter" else "right")
    for name, p in data["parameters"].items():
        table.add_row(name, f"{p['value']:.5g}", f"{p['se']:.3g}", f"{p['low']:.4g} … {p['high']:.4g}")
    console.print(table)
    if data["exponents"]:
        console.print(f"N* ∝ C^{data['exponents']['a']:.4f}   D* ∝ C^{data['exponents']['b']:.4f}", highlight=False)
    used, dropped = data["points"]["used"], data["points"]["dropped"]
    console.print(f"{used} points, objective {data['objective']:.6g} (Σ Huber of log loss, δ = 0.001)", highlight=False)
    console.print(f"Counted as: {data['convention']}", highlight=False, markup=False)
    for reason in dropped[:12]:
        console.print(f"  left out: {reason}", highlight=False, markup=False, style="dim")
    if len(dropped) > 12:
        console.print(f"  … and {len(dropped) - 12} more", style="dim")
    for warning in data["warnings"]:
        console.print(f"! {warning}", highlight=False, markup=False, style="bold yellow")


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.command(epilog="Examples: launch fit --runs runs/demo · launch fit --points runs.csv --law chinchilla --json")(
        fit
    )
    app.command(epilog="Examples: launch report --runs runs/demo · launch report --runs runs/demo --out report.html")(
        report
    )
