"""`launch fit | forecast | score`: from runs to a law, and from the law to larger runs."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.options import (
    Arch,
    AsJson,
    Cluster,
    DropHighest,
    Experiment,
    Law,
    PointsFile,
    RunsDir,
    Settings,
    examples,
)
from launch.tables import new_console, print_json, print_warnings, table
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.runs.history import Run
    from pipeline.scaling.points import Points
    from pipeline.scaling.predict import Forecast, Ladder
    from pipeline.scaling.record import Score
    from pipeline.scaling.study import Study

Resamples = Annotated[
    int, typer.Option(help="Resamples for the standard errors; 0 for none.", min=0)
]
FullGrid = Annotated[
    bool, typer.Option("--full-grid", help="Start from all of Hoffmann's 4500 points.")
]
TargetSize = Annotated[str | None, typer.Option(help="Model size, such as 1b.")]
Tokens = Annotated[
    float | None,
    typer.Option(help="Tokens; default with --size: the ladder's own number per parameter, or 20."),
]
Params = Annotated[
    float | None, typer.Option(help="N, counted as in the fitted points; needs --tokens.")
]
Flops = Annotated[float | None, typer.Option(help="Compute; forecasts the best run it can buy.")]
Targets = Annotated[
    Path | None, typer.Option(help="CSV with columns N, D (optional: C, run, experts, unique).")
]
Gpus = Annotated[int, typer.Option(help="GPUs, for the time it takes.", min=1)]
Register = Annotated[
    bool,
    typer.Option(
        "--register", help="Save the forecast for `launch score`; it cannot be changed later."
    ),
]
ForecastsDir = Annotated[
    Path | None,
    typer.Option(
        "--forecasts", help="Directory of registered forecasts.  [default: beside the runs]"
    ),
]
LEFT_OUT_SHOWN = 12  # reasons printed for points that were left out


def read(runs: Path | None, experiment: str | None) -> "list[Run]":
    from pipeline.runs.history import read_runs
    from pipeline.track.mlflow_runs import read_experiment

    if (runs is None) == (experiment is None):
        raise ConfigError("give one of --runs DIR or --experiment NAME")
    # A local directory wins over the MLflow store: it is never behind.
    local = runs or Path("runs") / str(experiment)
    if experiment is not None and not local.is_dir():
        return read_experiment(experiment)
    return read_runs(local)


def read_points(
    runs: Path | None, experiment: str | None, points: Path | None, law: str
) -> "tuple[Points, Ladder]":
    """Return the points, and the recipe that their runs share."""
    from pipeline.scaling.points import points_of, read_csv
    from pipeline.scaling.predict import Ladder, ladder_of

    if sum(source is not None for source in (runs, experiment, points)) != 1:
        raise ConfigError("give one of --runs DIR, --experiment NAME or --points FILE.csv")
    if points is not None:
        return read_csv(points), Ladder()  # a CSV says nothing about the recipe
    found = read(runs, experiment)
    # Only the envelope (Hoffmann's first approach) uses curves; other laws use final losses.
    return points_of(found, curves=law == "envelope"), ladder_of(found)


@contextmanager
def progress(*, quiet: bool) -> "Iterator[Callable[[str, float], None]]":
    """Show the progress of a long fit in one line on stderr, on a terminal only."""
    from rich.console import Console

    with Console(stderr=True, quiet=quiet).status("fitting") as line:
        yield lambda what, share: line.update(f"{what}: {share:.0%}")


def fit(
    runs: RunsDir = None,
    experiment: Experiment = None,
    points: PointsFile = None,
    law: Law = "auto",
    bootstrap: Resamples = 1000,
    drop_highest: DropHighest = 0,
    full_grid: FullGrid = False,
    as_json: AsJson = False,
) -> None:
    """Fit a scaling law to finished runs."""
    from pipeline.scaling.study import study

    rows, _ = read_points(runs, experiment, points, law)
    rows = rows.drop_highest(drop_highest)
    with progress(quiet=as_json) as show:
        done = study(rows, law, resamples=bootstrap, full_grid=full_grid, show=show)
    # The table is printed from the JSON form, so that both show the same figures.
    data = done.to_json()
    print_json(data) if as_json else _print_fit(data)


def forecast(
    runs: RunsDir = None,
    experiment: Experiment = None,
    points: PointsFile = None,
    size: TargetSize = None,
    tokens: Tokens = None,
    params: Params = None,
    flops: Flops = None,
    targets: Targets = None,
    arch: Arch = None,
    sets: Settings = None,
    gpus: Gpus = 8,
    cluster: Cluster = None,
    law: Law = "auto",
    drop_highest: DropHighest = 0,
    register: Register = False,
    forecasts: ForecastsDir = None,
    as_json: AsJson = False,
) -> None:
    """Forecast the loss of a larger run, with an interval, by the law that `launch fit` prints."""
    from pipeline.scaling import predict, record
    from pipeline.scaling.study import study
    from pipeline.units import finite

    rows, ladder = read_points(runs, experiment, points, law)
    site = predict.priced(cluster) if cluster else None  # refuse before the fit
    recipe = None
    if size is not None and params is None and flops is None and targets is None:
        recipe = predict.recipe_of(size, arch, tokens, ladder, sets or ())
        place: Callable[[Study], Points] = partial(predict.at_recipe, recipe=recipe, name=size)
    else:
        place = _place(size, tokens, params, flops, targets)
    # Everything the user gave is valid by now; only the fit itself takes long.
    done = study(rows.drop_highest(drop_highest), law, tested=True)
    places = place(done)
    made = predict.forecast(done, places)
    data: dict[str, Any] = {
        "law": done.name,
        "warnings": [*done.warnings, *predict.cautions(done, places, made)],
    }
    if targets is None:
        data |= vars(made[0])  # a single forecast is not wrapped in a list
        recipe = recipe or predict.recipe_at(made[0], ladder)
    else:
        data["forecasts"] = [vars(one) for one in made]
    if recipe is not None:
        keys = ("lr", "batch_tokens", "steps", "command")
        data["recipe"] = {key: getattr(recipe, key) for key in keys}
    if site is not None:
        data["cost"] = predict.cost(sum(one.C for one in made), site, gpus)
    if register:
        folder = forecasts or _forecasts_beside(runs, experiment, points)
        paths = record.register(folder, made, finite(done.to_json()), now=time.time())
        data["registered"] = [str(path) for path in paths]
        failure = _copy_to_mlflow(paths, runs, experiment)  # the files are the record
        if failure:
            data["warnings"].append(failure)
    print_json(data) if as_json else _print_forecast(data, made)


def _place(
    size: str | None,
    tokens: float | None,
    params: float | None,
    flops: float | None,
    targets: Path | None,
) -> "Callable[[Study], Points]":
    """Return a function from the law to the targets. Options are checked before the fit."""
    import numpy as np

    from pipeline.scaling import predict

    # Exactly one way to name the target. No pattern matches two of them together.
    match size, params, flops, targets:
        case None, float(), None, None if tokens:
            N = _above_zero("params", params)
            return partial(predict.at_sizes, N=N, D=_above_zero("tokens", tokens))
        case None, None, float(), None if tokens is None:
            C = np.array([_above_zero("flops", flops)])
            return lambda study: study.frontier(C)  # the best N and D depend on the law
        case None, None, None, Path() if tokens is None:
            return partial(predict.at_targets, targets=predict.read_targets(targets))
    raise ConfigError(
        "give one of --size S, --params N with --tokens D, --flops C or --targets FILE.csv"
    )


def _above_zero(key: str, value: float) -> float:
    # NaN is refused too, because every comparison with it is false.
    if not 0 < value < float("inf"):
        raise ConfigError(f"{key}={value} must be a number above zero, such as 1e9")
    return value


def _copy_to_mlflow(paths: list[Path], runs: Path | None, experiment: str | None) -> str | None:
    """Also keep forecasts in the experiment's MLflow store; return a line if that failed."""
    from pipeline.track.mlflow_runs import keep

    # By default the directory of a sweep has the name of its experiment.
    name = experiment or (runs.resolve().name if runs else None)
    return keep(name, forecasts=paths) if name else None


def _forecasts_beside(runs: Path | None, experiment: str | None, points: Path | None) -> Path:
    if runs is None and experiment:
        runs = Path("runs") / experiment
    if runs is None:
        runs = points.parent if points else Path()
    return runs / "forecasts"


def score(
    runs: RunsDir = None,
    experiment: Experiment = None,
    forecasts: ForecastsDir = None,
    as_json: AsJson = False,
) -> None:
    """Compare registered forecasts with the runs that have finished since."""
    from pipeline.scaling import record

    folder = forecasts or _forecasts_beside(runs, experiment, None)
    # Raises if a file does not match its digest: a forecast is never edited.
    found = record.registered(folder)
    if not found:
        raise ConfigError(
            f"forecasts={folder} is empty; make one with `launch forecast … --register`"
        )
    scores = record.score(found, read(runs, experiment))
    # Of 95% intervals about 95 in 100 should contain their run.
    so_far = record.calibration(scores)
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
        # N* and D* of a law fitted to forecast come from elsewhere: say from where.
        source = "" if split["from"] == "law" else f"   (from {split['from']})"
        console.print(f"N* ∝ C^{split['a']:.4f}   D* ∝ C^{split['b']:.4f}{source}")
    used = data["points"]["used"]
    # The bootstrap, or the scatter of the points around the law if --bootstrap is 0.
    errors = data["errors_from"]
    console.print(f"{used} points, objective {data['objective']:.6g}, errors from the {errors}")
    # Fitted to the smaller runs only, and compared with the larger ones.
    test = data["backtest"]
    if test:
        console.print(
            f"Larger runs forecast from smaller ones: {test['mean_absolute_error']:.2%} off on "
            f"average ({test['errors']} held-out errors)"
        )
    # Text from files may have square brackets, which rich would read as markup.
    console.print(f"Counted as: {data['convention']}", markup=False)
    dropped = data["points"]["dropped"]
    for reason in dropped[:LEFT_OUT_SHOWN]:
        console.print(f"  left out: {reason}", markup=False, style="dim")
    if len(dropped) > LEFT_OUT_SHOWN:
        console.print(f"  … and {len(dropped) - LEFT_OUT_SHOWN} more", style="dim")
    print_warnings(console, data["warnings"])


def _print_forecast(data: dict[str, Any], made: "list[Forecast]") -> None:
    from pipeline.units import count, power

    console = new_console()
    columns = ("run", "N", "D", "FLOPs", "beyond", "loss", "95% interval", "best N*", "best D*")
    rows = []
    for one in made:
        # A law of compute alone has no best split into N and D.
        best = [count(one.optimum[key]) if one.optimum else "–" for key in ("N", "D")]
        # The fifth column is the compute over that of the largest fitted run.
        place = [one.name, count(one.N), count(one.D), power(one.C), f"{one.extrapolation:.3g}×"]
        rows.append([*place, f"{one.loss:.4f}", f"{one.low:.4f} … {one.high:.4f}", *best])
    console.print(table(f"forecast by {data['law']}", columns, rows))
    for key in ("recipe", "cost"):
        figures = {name: value for name, value in data.get(key, {}).items() if name != "command"}
        texts = [
            f"{name} {value}" if isinstance(value, str) else f"{name} {value:g}"
            for name, value in figures.items()
        ]
        if texts:
            console.print(f"{key}: {', '.join(texts)}")
    command = data.get("recipe", {}).get("command")
    if command:  # on one line, so that it can be copied
        console.print(f"train it with: {command}", markup=False, soft_wrap=True)
    for path in data.get("registered", []):
        console.print(f"registered: {path}", markup=False)
    print_warnings(console, data["warnings"])


def _print_scores(scores: "list[Score]", so_far: dict[str, Any]) -> None:
    from pipeline.units import count

    console = new_console()
    columns = ("run", "N", "D", "forecast", "measured", "error", "inside", "counts")
    # None: the run has not finished.
    yes = {True: "yes", False: "no", None: "–"}
    rows = []
    for one in scores:
        measured = "–" if one.measured is None else f"{one.measured:.4f}"
        error = "–" if one.error is None else f"{one.error:+.2%}"
        late = one.counts is False  # it was no forecast any more
        counts = "no: registered after it began" if late else yes[one.counts]
        place = [one.run or "not yet", count(one.N), count(one.D), f"{one.forecast:.4f}"]
        rows.append([*place, measured, error, yes[one.inside], counts])
    console.print(table("forecasts", columns, rows))
    # Late forecasts are listed but do not count.
    if so_far["counted"]:
        console.print(
            f"{so_far['inside']} of {so_far['counted']} inside their 95% interval; "
            f"{so_far['mean_absolute_error']:.2%} off on average"
        )


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    # A sweep makes the runs that these commands fit, so --help lists them side by side.
    from launch import sweep

    app.add_typer(sweep.app, name="sweep")
    app.command(
        epilog=examples(
            "launch fit --runs runs/demo",
            "launch fit --points runs.csv --law chinchilla --bootstrap 1000 --json",
        )
    )(fit)
    app.command(
        epilog=examples(
            "launch forecast --runs runs/ladder --size 1b --register",
            "launch forecast --points runs.csv --flops 1e24 --json",
            "launch forecast --points small.csv --targets large.csv",
        )
    )(forecast)
    app.command(
        epilog=examples(
            "launch score --runs runs/ladder", "launch score --experiment ladder --json"
        )
    )(score)
