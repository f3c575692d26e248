"""`launch fit | score`: fit a law to runs, and compare forecasts with measured losses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from launch import options
from launch.tables import new_console, print_json, print_warnings, table
from pipeline.errors import ConfigError, DataError, RunError

if TYPE_CHECKING:
    from pipeline.runs.history import Run
    from pipeline.scaling.ladder import Ladder
    from pipeline.scaling.points import Points
    from pipeline.scaling.record import Score
    from pipeline.scaling.study import Study

FEW_RESAMPLES = 200  # of `launch forecast`, for the intervals of N* and D*
_RESAMPLES = "Bootstrap resamples for standard errors; 0 for none."
Resamples = Annotated[int, Option(help=_RESAMPLES, min=0, max=100_000)]
_FULL_GRID = "Start from all 4,500 points of Hoffmann et al., which is slow."
FullGrid = Annotated[bool, Option("--full-grid", help=_FULL_GRID)]
_FORECASTS_DIR = "Directory of registered forecasts (default: beside the runs)."
ForecastsDir = Annotated[Path | None, options.path_option("--forecasts", text=_FORECASTS_DIR)]
SPLIT = {"N*": "a", "D*": "b"}  # best N and D → their exponent of compute
LEFT_OUT_SHOWN = 12  # points that were left out and whose reason is printed

app = typer.Typer()


def read(runs: Path | None, experiment: str | None) -> "list[Run]":
    from pipeline.runs.history import read_runs
    from pipeline.track.mlflow_runs import read_experiment

    if (runs is None) == (experiment is None):
        raise ConfigError("give one of --runs DIR or --experiment NAME")
    if experiment is not None and experiment.strip(".") == "":
        raise ConfigError(f"experiment={experiment!r} is not a name; give one, or use --runs DIR")
    local = _directory(runs, experiment)
    return read_experiment(str(experiment)) if local is None else read_runs(local)


def _directory(runs: Path | None, experiment: str | None) -> Path | None:
    """Return the directory of the runs; None if only the MLflow store has them."""
    from pipeline.runs.history import find_runs

    local = runs or Path("runs") / str(experiment)
    # A local directory has priority, because the MLflow store may lag behind, but only if it has
    # runs and not just forecasts.
    return local if runs or find_runs(local) else None


def read_points(
    runs: Path | None,
    experiment: str | None,
    points: Path | None,
    law: str,
    task: str | None = None,
    *,
    curves: bool = False,
) -> "tuple[Points, Ladder, list[Run]]":
    """Return the points (of a task, if one is given), the recipe their runs share, and the runs."""
    from pipeline.scaling.annealing import with_curves
    from pipeline.scaling.ladder import ladder_of, ladder_of_table
    from pipeline.scaling.points import points_of, read_csv, scored_runs

    if sum(source is not None for source in (runs, experiment, points)) != 1:
        raise ConfigError("give one of --runs DIR, --experiment NAME or --points FILE.csv")
    if curves and (points is not None or task is not None or law == "envelope"):
        raise ConfigError(
            "--curves corrects losses from the logs of runs; give --runs or --experiment without "
            "--task, and not --law envelope, which uses these losses as they are"
        )
    if points is not None:
        given = read_csv(points, task)
        return given, ladder_of_table(given), []
    found = read(runs, experiment)
    scored = found if task is None else scored_runs(found, task)
    # Only the envelope (Hoffmann's first approach) uses curves as they are.
    rows = points_of(scored, curves=law == "envelope")
    local = _directory(runs, experiment)
    # Beside runs/NAME: a run inside it would hide those in MLflow.
    out = f"runs/{experiment}-" if local is None else f"{local}/"
    ladder = replace(ladder_of(found), out=out, experiment=experiment)
    if ladder.problem:
        rows = replace(rows, warnings=(*rows.warnings, ladder.problem))
    return with_curves(rows, found) if curves else rows, ladder, found


@contextmanager
def progress(*, quiet: bool) -> "Iterator[Callable[[str, float], None]]":
    """Show the progress of a long fit in one line on stderr, on a terminal only."""
    from rich.console import Console

    with Console(stderr=True, quiet=quiet).status("fitting") as line:
        yield lambda what, share: line.update(f"{what}: {share:.0%}")


@app.command(
    epilog=options.examples(
        "launch fit --runs runs/demo",
        "launch fit --points runs.csv --law chinchilla --bootstrap 1000 --json",
    )
)
def fit(
    runs: options.RunsDir = None,
    experiment: options.Experiment = None,
    points: options.PointsFile = None,
    law: options.Law = "auto",
    curves: options.Curves = False,
    bootstrap: Resamples = 1000,
    drop_highest: options.DropHighest = 0,
    full_grid: FullGrid = False,
    as_json: options.AsJson = False,
) -> None:
    """Fit a scaling law to finished runs."""
    from pipeline.scaling.study import study

    rows, _, found = read_points(runs, experiment, points, law, curves=curves)
    rows = rows.drop_highest(drop_highest)
    with progress(quiet=as_json) as show:
        done = study(rows, law, resamples=bootstrap, full_grid=full_grid, show=show)
    # The table is printed from the JSON form, so that both show the same figures.
    data = done.to_json()
    data["targets"] = about_targets(forecasts_beside(runs, experiment, points), found, rows)
    if full_grid and done.fit.law.name != "chinchilla":
        data["warnings"].append(
            f"--full-grid has no effect on law={done.name}: its starts are for --law chinchilla."
        )
    print_json(data) if as_json else _print_fit(data)


def about_targets(folder: Path, found: "list[Run]", rows: "Points") -> list[str]:
    """Describe registered forecasts of finished runs, and whether these runs are in the fit."""
    from pipeline.scaling import record

    try:
        return record.about_targets(record.score(record.registered(folder), found), rows.run)
    except RunError as error:  # a damaged forecast must not prevent the fit
        return [str(error)]


def fit_to_forecast(rows: "Points", law: str, task: str | None) -> "Study":
    """Fit the points. An error names the task, because the losses are its bits per byte."""
    from pipeline.scaling.study import study

    try:
        return study(rows, law, tested=True, resamples=FEW_RESAMPLES)
    except DataError as error:
        if task is None:
            raise
        raise DataError(f"task={task}, with its bits per byte as the loss: {error}") from None


def forecasts_beside(runs: Path | None, experiment: str | None, points: Path | None) -> Path:
    if runs is None and experiment:
        runs = Path("runs") / experiment
    if runs is None:
        runs = points.parent if points else Path()
    return runs / "forecasts"


@app.command(
    epilog=options.examples(
        "launch score --runs runs/ladder", "launch score --experiment ladder --json"
    )
)
def score(
    runs: options.RunsDir = None,
    experiment: options.Experiment = None,
    forecasts: ForecastsDir = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare registered forecasts with the runs that have finished since."""
    from pipeline.scaling import record

    finished = read(runs, experiment)  # first: without runs there are no forecasts either
    folder = forecasts or forecasts_beside(runs, experiment, None)
    # Raises if a file does not match its digest: a forecast is never edited.
    found = record.registered(folder)
    if not found:
        problem = "has no forecast" if folder.is_dir() else "is not a directory"
        raise ConfigError(
            f"forecasts={folder} {problem}; make one with `launch forecast … --register`, or give "
            f"its directory with --forecasts"
        )
    scores = record.score(found, finished)
    so_far = record.calibration(scores)  # about 95% of the intervals should contain their run
    if as_json:
        print_json({"scores": [vars(one) for one in scores], "calibration": so_far})
    else:
        _print_scores(scores, so_far)


def _print_fit(data: dict[str, Any]) -> None:
    console = new_console()
    columns = ("parameter", "value", "standard error", "95% interval")
    rows = [
        (name, f"{p['value']:.5g}", f"{p['se']:.3g}", f"{p['low']:.4g} … {p['high']:.4g}")
        for name, p in data["parameters"].items()
    ]
    console.print(table(f"{data['law']}: {data['formula']}", columns, rows))
    split = data["exponents"]
    if split:
        # With --law isoflop, N* and D* come from the measured valleys.
        source = "" if split["from"] == "law" else f"   (from {split['from']})"
        texts = [f"{name} ∝ C^{split[key]:.4f}{_span(split, key)}" for name, key in SPLIT.items()]
        console.print("   ".join(texts) + source)
    used = data["points"]["used"]
    # The bootstrap, or the scatter of the points around the law if --bootstrap is 0.
    errors = data["errors_from"]
    for text in data["targets"]:
        console.print(text, markup=False)
    console.print(f"{used} points, objective {data['objective']:.6g}, errors by the {errors}")
    fitted = data["goodness"]
    if fitted:
        outliers = len(fitted["outliers"])
        without = f", outliers left out: {outliers}" if outliers else ""
        console.print(
            f"Runs scatter {fitted['noise']:.2%} around the law with equal weights, which explains "
            f"{max(fitted['r2'], 0):.1%} of the variance of log loss (R²{without})"
        )
    test = data["backtest"]
    if test:
        console.print(
            f"Backtest, larger runs predicted from smaller ones: "
            f"{test['mean_absolute_error']:.2%} off on average ({test['errors']} held-out errors)"
        )
    # Text from files may have square brackets, which rich would read as markup.
    console.print(f"Counting convention: {data['convention']}", markup=False)
    dropped = data["points"]["dropped"]
    for reason in dropped[:LEFT_OUT_SHOWN]:
        console.print(f"  left out: {reason}", markup=False, style="dim")
    if len(dropped) > LEFT_OUT_SHOWN:
        console.print(f"  … and {len(dropped) - LEFT_OUT_SHOWN} more", style="dim")
    print_warnings(console, data["warnings"])


def _span(found: dict[str, Any], key: str) -> str:
    """Return the 95% interval of an exponent as text; empty if it is unknown."""
    if f"{key}_low" not in found:
        return ""
    return f" ({found[f'{key}_low']:.3f} … {found[f'{key}_high']:.3f})"


def _print_scores(scores: "list[Score]", so_far: dict[str, Any]) -> None:
    from pipeline.units import count

    console = new_console()
    # None: the run has not finished.
    yes = {True: "yes", False: "no", None: "–"}
    # Losses and accuracies in one table; an accuracy's error is in points.
    columns = ("run", "N", "D", "of", "forecast", "95% interval", "measured", "error", "inside")
    rows = []
    for one in scores:
        form = "{:.4f}" if one.task is None else "{:.1%}"
        if one.measured is not None:
            measured = form.format(one.measured)
        elif one.run is None:
            measured = "–"
        else:
            measured = "failed or diverged" if one.task is None else "no score"
        error = "–"
        if one.error is not None:
            error = f"{one.error:+.2%}" if one.task is None else f"{100 * one.error:+.1f} points"
        late = one.counts is False
        counts = "no: registered after the run began" if late else yes[one.counts]
        place = [one.run or "not yet", count(one.N), count(one.D), one.task or "loss"]
        interval = f"{form.format(one.low)} … {form.format(one.high)}"
        figures = [form.format(one.forecast), interval, measured, error]
        rows.append([*place, *figures, yes[one.inside], counts])
    console.print(table("forecasts", (*columns, "counts"), rows, ["of", "inside", "counts"]))
    # Late forecasts are listed but do not count.
    if so_far["counted"]:
        off = []
        if so_far["mean_absolute_error"] is not None:
            off.append(f"losses {so_far['mean_absolute_error']:.2%} off on average")
        if so_far["mean_accuracy_error"] is not None:
            off.append(f"accuracies {100 * so_far['mean_accuracy_error']:.1f} points")
        console.print(
            f"{so_far['inside']} of {so_far['counted']} inside their 95% interval; {', '.join(off)}"
        )
