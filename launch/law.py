"""`launch fit | forecast | score | sweep`: from runs to a law, from the law to a run foretold."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.options import Arch, examples
from launch.tables import new_console, new_table, print_json, print_warnings
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.runs.history import Run
    from pipeline.scaling.points import Points
    from pipeline.scaling.study import Study

RUNS = typer.Option(help="Directory of runs, such as runs/demo.")
EXPERIMENT = typer.Option(
    help="Name of an experiment: runs/NAME if it is here, else the MLflow store."
)
POINTS = typer.Option(
    help="CSV with columns N, D, loss (optional C, run, experts, unique, convention)."
)
LAW = typer.Option(
    help="auto, chinchilla, gamma, kaplan, isoflop, parabola, envelope, vpnls, moe, data-constrained, compute or power."
)
JSON = typer.Option("--json", help="Print JSON instead of a table.")
DROP = typer.Option(help="Leave out this many of the largest losses.", min=0)


def read(runs: Path | None, experiment: str | None) -> "list[Run]":
    from pipeline.runs.history import read_runs
    from pipeline.track.mlflow_runs import read_experiment

    match runs, experiment:
        case Path(), None:
            return read_runs(runs)
        case None, str():
            here = Path("runs") / experiment
            return read_runs(here) if here.is_dir() else read_experiment(experiment)
        case _:
            raise ConfigError("give one of --runs DIR or --experiment NAME")


def read_points(
    runs: Path | None, experiment: str | None, points: Path | None, law: str
) -> "tuple[Points, list[str]]":
    """The points, and vocabulary and sequence of their runs as settings: what is forecast is one of them, larger."""
    from pipeline.scaling.points import points_of, read_csv

    if sum(source is not None for source in (runs, experiment, points)) != 1:
        raise ConfigError("give one of --runs DIR, --experiment NAME or --points FILE.csv")
    if points is not None:
        return read_csv(points), []
    found = read(runs, experiment)
    shape = [
        f"model.{key}={found[0].record[key]}"
        for key in ("vocab", "seq")
        if found[0].record.get(key)
    ]
    return points_of(found, curves=law == "envelope"), shape


@contextmanager
def bar(*, quiet: bool) -> "Iterator[Callable[[str, float], None]]":
    """On a terminal, how far a long descent has got."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(
        console=console, transient=True, disable=quiet or not console.is_terminal
    ) as bars:
        tasks: dict[str, Any] = {}

        def show(what: str, share: float) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=1)
            bars.update(tasks[what], completed=share)

        yield show


def fit(
    runs: Annotated[Path | None, RUNS] = None,
    experiment: Annotated[str | None, EXPERIMENT] = None,
    points: Annotated[Path | None, POINTS] = None,
    law: Annotated[str, LAW] = "auto",
    bootstrap: Annotated[
        int, typer.Option(help="Resamples for the standard errors; 0 for none.", min=0)
    ] = 1000,
    drop_highest: Annotated[int, DROP] = 0,
    full_grid: Annotated[
        bool, typer.Option("--full-grid", help="Start from all of Hoffmann's 4500 places.")
    ] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Fit a scaling law to finished runs."""
    from pipeline.scaling.study import study

    rows, _ = read_points(runs, experiment, points, law)
    with bar(quiet=as_json) as show:
        done = study(
            rows.drop_highest(drop_highest),
            law,
            resamples=bootstrap,
            full_grid=full_grid,
            show=show,
        )
    print_json(done.to_json()) if as_json else print_fit(done.to_json())


def forecast(
    runs: Annotated[Path | None, RUNS] = None,
    experiment: Annotated[str | None, EXPERIMENT] = None,
    points: Annotated[Path | None, POINTS] = None,
    size: Annotated[str | None, typer.Option(help="A rung of the ladder, such as 1b.")] = None,
    tokens: Annotated[
        float | None, typer.Option(help="Tokens; with --size 20 per parameter otherwise.")
    ] = None,
    params: Annotated[
        float | None, typer.Option(help="N, counted as in the fitted points; with --tokens.")
    ] = None,
    flops: Annotated[float | None, typer.Option(help="Compute: the best run it can buy.")] = None,
    targets: Annotated[
        Path | None, typer.Option(help="CSV with columns N, D (optional C, run, experts).")
    ] = None,
    arch: Arch = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="key=value over the config of --size.")
    ] = None,
    gpus: Annotated[int, typer.Option(help="For the time it takes.", min=1)] = 8,
    cluster: Annotated[
        str | None, typer.Option(help="A cluster (configs/cluster), for the time.")
    ] = None,
    law: Annotated[str, LAW] = "auto",
    drop_highest: Annotated[int, DROP] = 0,
    register: Annotated[
        bool, typer.Option("--register", help="Put it on record, for ever.")
    ] = False,
    forecasts: Annotated[
        Path | None, typer.Option(help="Where forecasts are kept; beside the runs.")
    ] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Foretell the loss of a larger run, with an interval."""
    from pipeline.scaling import predict
    from pipeline.scaling import record as records
    from pipeline.scaling.study import study
    from pipeline.units import finite

    rows, shape = read_points(runs, experiment, points, law)
    recipe, site = None, predict.priced(cluster) if cluster else None
    place: Callable[[Study], Points]
    match size, params, flops, targets:
        case str(), None, None, None:
            recipe = predict.recipe_of(size, arch, tokens, [*shape, *(sets or ())], gpus)
            place = partial(predict.at_recipe, recipe=recipe, name=size)
        case None, float(), None, None if tokens:
            place = partial(
                predict.at_sizes, N=above_zero("params", params), D=above_zero("tokens", tokens)
            )
        case None, None, float(), None if tokens is None:
            place = partial(predict.at_flops, C=above_zero("flops", flops))
        case None, None, None, Path() if tokens is None:
            place = partial(predict.at_targets, targets=predict.read_targets(targets))
        case _:
            raise ConfigError(
                "give one of --size S, --params N with --tokens D, --flops C or --targets FILE.csv"
            )
    done = study(rows.drop_highest(drop_highest), law, focused=True)
    places = place(done)
    made = predict.forecast(done, places)
    data: dict[str, Any] = {
        "law": done.name,
        "warnings": [*done.warnings, *predict.cautions(done, places, made)],
        **(vars(made[0]) if targets is None else {"forecasts": list(map(vars, made))}),
    }
    if recipe is None and targets is None:
        recipe = predict.recipe_at(made[0].N, made[0].D, made[0].C)
    if recipe is not None:
        data["recipe"] = {
            "lr": recipe.lr,
            "batch_tokens": recipe.batch_tokens,
            "steps": recipe.steps,
        }
    if site is not None:
        data["cost"] = predict.cost(sum(one.C for one in made), site, gpus)
    if register:
        where = forecasts or record_of(runs, experiment, points)
        paths = records.register(where, made, finite(done.to_json()), now=time.time())
        data["registered"] = [str(path) for path in paths]
        data["warnings"] += [said] if (said := copied(paths, runs, experiment)) else []
    print_json(data) if as_json else print_forecast(data, list(map(vars, made)))


def copied(paths: list[Path], runs: Path | None, experiment: str | None) -> str | None:
    """To MLflow as well, where there is an experiment to put it in."""
    from pipeline.track.mlflow_runs import keep

    name = experiment or (runs.resolve().name if runs else None)
    return keep(name, forecasts=paths) if name else None


def record_of(runs: Path | None, experiment: str | None, points: Path | None) -> Path:
    beside = (
        runs
        or (Path("runs") / experiment if experiment else None)
        or (points.parent if points else Path())
    )
    return beside / "forecasts"


def score(
    runs: Annotated[Path | None, RUNS] = None,
    experiment: Annotated[str | None, EXPERIMENT] = None,
    forecasts: Annotated[
        Path | None, typer.Option(help="Where forecasts are kept; beside the runs.")
    ] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Hold registered forecasts against the runs that have landed."""
    from pipeline.scaling.record import calibration, registered
    from pipeline.scaling.record import score as hold

    folder = forecasts or record_of(runs, experiment, None)
    found = registered(folder)
    if not found:
        raise ConfigError(
            f"forecasts={folder} holds none; make one with `launch forecast … --register`"
        )
    scores = hold(found, read(runs, experiment))
    data = {"scores": list(map(vars, scores)), "calibration": calibration(scores)}
    print_json(data) if as_json else print_scores(data)


def above_zero(key: str, value: float | None) -> float:
    if value is None or not 0 < value < float("inf"):
        raise ConfigError(f"{key}={value} must be a number above zero, such as 1e9")
    return value


def print_fit(data: dict[str, Any]) -> None:
    console = new_console()
    table = new_table(
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
    print_warnings(console, data["warnings"])


def print_forecast(data: dict[str, Any], made: list[dict[str, Any]]) -> None:
    from pipeline.units import count, power

    title = f"forecast by {data['law']}"
    console = new_console()
    table = new_table(
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
    print_warnings(console, data["warnings"])


def print_scores(data: dict[str, Any]) -> None:
    from pipeline.units import count

    console = new_console()
    table = new_table(
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


EXAMPLES: dict[Callable[..., None], str] = {
    fit: examples(
        "launch fit --runs runs/demo",
        "launch fit --points runs.csv --law chinchilla --bootstrap 1000 --json",
    ),
    forecast: examples(
        "launch forecast --runs runs/ladder --size 1b --register",
        "launch forecast --points runs.csv --flops 1e24 --json",
        "launch forecast --points small.csv --targets large.csv",
    ),
    score: examples("launch score --runs runs/ladder", "launch score --experiment ladder --json"),
}


def register(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    from launch import sweep

    app.add_typer(sweep.app, name="sweep")
    for command, epilog in EXAMPLES.items():
        app.command(epilog=epilog)(command)
