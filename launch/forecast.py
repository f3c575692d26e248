"""`launch forecast`: predict the loss, a task's score and the cost of a larger run."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from launch import options, skill
from launch.law import ForecastsDir, fit_to_forecast, forecasts_beside, read_points
from launch.tables import new_console, print_json, print_warnings, table
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from pipeline.config.schema import Cluster as Site
    from pipeline.scaling.accuracy import TaskForecast
    from pipeline.scaling.decide import Demand
    from pipeline.scaling.ladder import Ladder, Recipe
    from pipeline.scaling.points import Points
    from pipeline.scaling.predict import Forecast
    from pipeline.scaling.study import Study

    Place = Callable[[Study], Points]  # the targets, which may depend on the law

TargetSize = Annotated[str | None, Option(help="Forecast a run of this model size, such as 1b.")]
_TOKENS = "Training tokens (default with --size: as many per parameter as the ladder, or 20)."
Tokens = Annotated[float | None, options.amount_option(_TOKENS)]
_PARAMS = "Forecast a run with this N, counted as in the fitted points; needs --tokens."
Params = Annotated[float | None, options.amount_option(_PARAMS)]
Flops = Annotated[float | None, Option(help="Forecast the best run with these training FLOPs.")]
TargetLoss = Annotated[float | None, Option(help="Find the cheapest run that reaches this loss.")]
_INFERENCE_TOKENS = (
    "Tokens to serve after training; with --target-loss or --flops, finds the best N and "
    "D for training and inference together."
)
InferenceTokens = Annotated[float | None, options.amount_option(_INFERENCE_TOKENS)]
_INFERENCE_MFU = (
    "MFU of inference; a FLOP of inference costs as much as 0.4/MFU training FLOPs (default: 0.4)."
)
InferenceMfu = Annotated[float | None, Option(help=_INFERENCE_MFU, min=0.001, max=1)]
_UNIQUE = "Distinct training tokens; others are repeats."
Unique = Annotated[float | None, options.amount_option(_UNIQUE)]
_TARGETS = "CSV of runs to forecast, with columns N, D (optional: C, run, experts, unique)."
Targets = Annotated[Path | None, options.path_option(text=_TARGETS)]
_GPUS = "Number of GPUs of --cluster, to compute the hours (default: 8)."
Gpus = Annotated[int | None, Option(help=_GPUS, min=1)]
_REGISTER = "Save the forecast for `launch score`; it cannot be changed later."
Register = Annotated[bool, Option("--register", help=_REGISTER)]

app = typer.Typer()


@app.command(
    epilog=options.examples(
        "launch forecast --runs runs/ladder --size 1b --register",
        "launch forecast --points runs.csv --flops 1e24 --json",
        "launch forecast --points runs.csv --target-loss 2.1 --cluster h100 --gpus 256",
        "launch forecast --points runs.csv --target-loss 2.1 --inference-tokens 1e13",
        "launch forecast --points runs.csv --flops 1e22 --unique 25e9",
        "launch forecast --points small.csv --targets large.csv",
        "launch forecast --runs runs/ladder --task questions --size 1b --register",
    )
)
def forecast(
    runs: options.RunsDir = None,
    experiment: options.Experiment = None,
    points: options.PointsFile = None,
    size: TargetSize = None,
    tokens: Tokens = None,
    params: Params = None,
    flops: Flops = None,
    target_loss: TargetLoss = None,
    inference_tokens: InferenceTokens = None,
    inference_mfu: InferenceMfu = None,
    unique: Unique = None,
    targets: Targets = None,
    task: skill.TaskName = None,
    chance: skill.Chance = None,
    arch: options.Arch = None,
    sets: options.Settings = None,
    gpus: Gpus = None,
    cluster: options.Cluster = None,
    law: options.Law = "auto",
    curves: options.Curves = False,
    drop_highest: options.DropHighest = 0,
    register: Register = False,
    forecasts: ForecastsDir = None,
    as_json: options.AsJson = False,
) -> None:
    """Forecast a larger run, or find the run to buy, by the law that `launch fit` prints."""
    from pipeline.scaling import decide, predict, record
    from pipeline.scaling.ladder import recipe_of

    of_the_loss = {"target_loss": target_loss, "inference_tokens": inference_tokens}
    skill.check(task, law, chance, **of_the_loss, unique=unique)
    _check_model(size, arch, sets)
    _check_cluster(gpus, cluster)
    rows, ladder, found = read_points(runs, experiment, points, law, task, curves=curves)
    site = None if cluster is None else decide.priced(cluster)  # refuse before the fit
    buys = target_loss is not None or flops is not None
    demand = _demand(inference_tokens, inference_mfu, unique, buys=buys, targets=targets)
    recipe = None
    if size is not None and params is None and targets is None and not buys:
        _check_size(rows, points, tokens)
        recipe = recipe_of(size, arch, tokens, ladder, sets or ())
        place: Place = partial(predict.at_recipe, recipe=recipe, name=size)
    else:
        place = _place(demand, size, tokens, params, flops, target_loss, targets, task)
    done = fit_to_forecast(rows.drop_highest(drop_highest), law, task)
    places = place(done)
    made = predict.forecast(done, places, unique)
    if targets is None:
        recipe = recipe or predict.recipe_at(made[0], ladder)
    data = _figures(done, places, made, demand, target_loss, ladder, one=targets is None)
    scored = None
    if task is not None:
        scored, data = skill.forecast(task, chance, found, done, made, data["warnings"])
    data |= _recipe_and_cost(made, recipe, ladder, sets or [], site, gpus or 8, size)
    data["warnings"] += decide.unplanned(data.get("cost"), size, site)
    if register:
        folder = forecasts or forecasts_beside(runs, experiment, points)
        _register(folder, scored or made, record.fit_of(done, rows, found), runs, experiment, data)
    print_json(data) if as_json else _print_forecast(data, made, scored)


def _recipe_and_cost(
    made: "list[Forecast]",
    recipe: "Recipe | None",
    ladder: "Ladder",
    sets: list[str],
    site: "Site | None",
    gpus: int,
    size: str | None,
) -> dict[str, Any]:
    from pipeline.config.layers import as_sets
    from pipeline.scaling import decide

    found: dict[str, Any] = {}
    shared = dict(ladder.settings)  # a batch of 1,024 tokens is slow on any GPU
    if recipe is not None:
        found["recipe"] = {key: value for key, value in vars(recipe).items() if key not in "NDC"}
        shared["train.batch_tokens"] = recipe.batch_tokens
    if site is not None:
        exact = (size, ladder.arch, [*as_sets(shared), *sets]) if size else ()
        found["cost"] = decide.cost([(run.C, run.N) for run in made], site, gpus, *exact)
    return found


def _register(
    folder: Path,
    made: "Sequence[Forecast | TaskForecast]",
    fit: dict[str, Any],
    runs: Path | None,
    experiment: str | None,
    data: dict[str, Any],
) -> None:
    """Save the forecasts beside the runs, and also in the experiment's MLflow store."""
    from pipeline.scaling import record
    from pipeline.track.mlflow_runs import keep

    paths = record.register(folder, made, fit, now=time.time())
    data["registered"] = [str(path) for path in paths]
    # By default the directory of a sweep has the name of its experiment. The files are the record,
    # so a store that cannot be reached is only a warning.
    name = experiment or (runs.resolve().name if runs else None)
    failure = keep(name, forecasts=paths) if name else None
    if failure:
        data["warnings"].append(failure)


def _figures(
    done: "Study",
    places: "Points",
    made: "list[Forecast]",
    demand: "Demand",
    target_loss: float | None,
    ladder: "Ladder",
    *,
    one: bool,
) -> dict[str, Any]:
    """Return the forecasts as JSON; a single one is not wrapped in a list."""
    from pipeline.scaling import decide, predict

    warnings = [*done.warnings, *predict.cautions(done, places, made, demand.unique, ladder)]
    data: dict[str, Any] = {"law": done.name, "warnings": warnings}
    if not one:
        return data | {"forecasts": [vars(run) for run in made]}
    decision = decide.decision(done, places, demand)
    if target_loss is not None:
        total = decision.get("total_cost_flops", made[0].C)
        low, high = decide.cost_range(done, target_loss, total, demand)
        decision |= {"target_loss": target_loss, "flops_low": low, "flops_high": high}
    return data | vars(made[0]) | {"decision": decision}


def _demand(
    inference_tokens: float | None,
    inference_mfu: float | None,
    unique: float | None,
    *,
    buys: bool,
    targets: Path | None,
) -> "Demand":
    """Check the options about inference and repeated data, and return them together."""
    from pipeline.scaling.decide import MFU, Demand

    if inference_tokens is not None and not buys:
        text = "--inference-tokens needs a loss to reach or compute to spend"
        raise ConfigError(f"{text}; give --target-loss L or --flops C")
    if inference_mfu is not None and inference_tokens is None:
        raise ConfigError("--inference-mfu is the price of --inference-tokens; give both")
    if unique is not None and targets is not None:
        raise ConfigError("--unique is for one run; give --targets a column `unique`")
    return Demand(
        0.0 if inference_tokens is None else _checked("inference_tokens", inference_tokens),
        MFU / inference_mfu if inference_mfu else 1.0,
        None if unique is None else _checked("unique", unique),
    )


def _check_model(size: str | None, arch: str | None, sets: list[str] | None) -> None:
    given = f"--arch {arch}" if arch else f"--set {sets[0]}" if sets else None
    if size is None and given:
        raise ConfigError(f"{given} describes the model of --size; give --size, or remove it")


def _check_cluster(gpus: int | None, cluster: str | None) -> None:
    if gpus is not None and cluster is None:
        raise ConfigError(f"--gpus {gpus} computes the hours on a cluster; give --cluster too")


def _check_size(rows: "Points", points: Path | None, tokens: float | None) -> None:
    """Refuse to combine a size, whose parameters we count, with points in other units."""
    from pipeline.scaling.quality import unit_warnings

    wrong_units = unit_warnings(rows) if points is not None else []
    if wrong_units:
        raise ConfigError(f"points={points} cannot be combined with --size: {wrong_units[0]}")
    if tokens is not None:
        _checked("tokens", tokens)


def _place(
    demand: "Demand",
    size: str | None,
    tokens: float | None,
    params: float | None,
    flops: float | None,
    target_loss: float | None,
    targets: Path | None,
    task: str | None,
) -> "Place":
    """Return a function from the law to the targets. Options are checked before the fit."""
    import numpy as np

    from pipeline.scaling import decide, predict

    # Exactly one way to name the target. No pattern matches two of them together.
    match size, params, flops, target_loss, targets:
        case None, float(), None, None, None if tokens is not None:
            N = _checked("params", params)
            return partial(predict.at_sizes, N=N, D=_checked("tokens", tokens))
        case None, None, float(), None, None if tokens is None:
            C = np.array([_checked("flops", flops)])
            return lambda study: decide.best(study, C, demand)  # N and D depend on the law
        case None, None, None, float(), None if tokens is None:
            loss = _checked("target_loss", target_loss, "2.5")
            return lambda study: decide.best(
                study, np.array([decide.least_cost(study, loss, demand)]), demand
            )
        case None, None, None, None, Path() if tokens is None:
            return partial(predict.at_targets, targets=predict.read_targets(targets))
    values = (size, params, flops, target_loss, targets)
    names = ("--size", "--params", "--flops", "--target-loss", "--targets")
    named = [name for name, value in zip(names, values, strict=True) if value is not None]
    problem = f"{' and '.join(named)} name {len(named)} targets; " if len(named) > 1 else ""
    if tokens is not None and len(named) == 1:
        problem = f"--tokens {tokens:g} has no effect with {named[0]}, which sets the length; "
    others = "--flops C" if task else "--flops C, --target-loss L"
    raise ConfigError(
        f"{problem}give one of --size S, --params N with --tokens D, {others} or --targets FILE.csv"
    )


def _checked(key: str, value: float, example: str = "1e9") -> float:
    from pipeline.scaling.predict import MOST

    # NaN is refused too, because every comparison with it is false.
    if not 0 < value < MOST:
        limits = f"above zero and below {MOST:g}"
        raise ConfigError(f"{key}={value:g} must be a number {limits}, such as {example}")
    return value


def _print_table(console: "Console", data: dict[str, Any], made: "list[Forecast]") -> None:
    from pipeline.units import count, power

    columns = ("run", "N", "D", "FLOPs", "beyond", "loss", "95% interval", "best N*", "best D*")
    rows = []
    for one in made:
        # A law of compute alone has no best split into N and D, and may have neither.
        best = [count(one.optimum[key]) if one.optimum else "–" for key in ("N", "D")]
        split = ["–" if isnan(value) else count(value) for value in (one.N, one.D)]
        # The fifth column is the compute over that of the largest fitted run.
        place = [one.name, *split, power(one.C), f"{one.extrapolation:.3g}×"]
        rows.append([*place, f"{one.loss:.4f}", f"{one.low:.4f} … {one.high:.4f}", *best])
    console.print(table(f"forecast by {data['law']}", columns, rows))
    optimum = made[0].optimum or {}
    if len(made) == 1 and "N_low" in optimum:
        texts = [
            f"{key}* {count(optimum[key])} ({count(optimum[f'{key}_low'])} … "
            f"{count(optimum[f'{key}_high'])})"
            for key in "ND"
        ]
        console.print(f"Best split of this training compute, 95% intervals: {', '.join(texts)}")
    _print_decision(console, data.get("decision", {}), made[0])


def _print_forecast(
    data: dict[str, Any], made: "list[Forecast]", scored: "list[TaskForecast] | None"
) -> None:
    console = new_console()
    if scored:
        skill.print_table(console, scored)
    else:
        _print_table(console, data, made)
    recipe = data.get("recipe", {})
    if recipe:
        batch = f"{recipe['steps']:,} steps of {recipe['batch_tokens']:,} tokens"
        console.print(f"recipe {recipe['name']}: learning rate {recipe['lr']:.3g}, {batch}")
    if "cost" in data:
        console.print(f"cost of training: {_cost_text(data['cost'])}")
    if recipe.get("command"):  # on one line, so that it can be copied
        console.print(f"train it with: {recipe['command']}", markup=False, soft_wrap=True)
    for path in data.get("registered", []):
        console.print(f"registered: {path}", markup=False)
    print_warnings(console, data["warnings"])


def _cost_text(cost: dict[str, Any]) -> str:
    from pipeline.units import span

    seconds = 3600 * cost["hours"]
    hours = cost["gpu_hours"]
    mfu = f"{'planned' if cost['mfu_from'] == 'planner' else 'assumed'} MFU {cost['mfu']:.2g}"
    time = "less than a second" if seconds < 1 else span(seconds)
    work = "less than 0.01" if hours < 0.01 else f"{hours:,.2f}"
    text = f"{time} on {cost['gpus']} × {cost['cluster']}, {work} GPU-hours, {mfu}"
    if "usd" in cost:
        text += ", less than $0.01" if cost["usd"] < 0.01 else f", ${cost['usd']:,.2f}"
    return text


def _print_decision(console: "Console", found: dict[str, Any], run: "Forecast") -> None:
    """Print the answers to further options, each in one line."""
    from pipeline.units import count, power

    if "target_loss" in found:
        low, high = (
            f"no known {end} limit" if found[key] is None else power(found[key])
            for key, end in (("flops_low", "lower"), ("flops_high", "upper"))
        )
        # The interval is that of the total cost, which includes inference.
        total = found.get("total_cost_flops", run.C)
        what = "training and inference" if "total_cost_flops" in found else "training"
        if found.get("inference_price", 1) != 1:
            what += ", in units of training FLOPs,"
        # A law of compute alone has no N and D.
        how = "along the fitted runs" if isnan(run.N) else "with the best N and D"
        console.print(
            f"Loss {found['target_loss']:g} takes {power(total)} FLOPs of {what} {how}; "
            f"95% interval: {low} to {high}."
        )
    if "saved" in found:
        usual = found["training_optimum"]
        price = found["inference_price"]
        each = "" if price == 1 else f", and each costs as much as {price:.3g} FLOPs of training"
        console.print(
            f"Inference adds {power(found['inference_flops'])} FLOPs{each}. Training and inference "
            f"cost {found['saved']:.1%} less than with N = {count(usual['N'])} on "
            f"{count(usual['D'])} tokens, the cheapest run to train to this loss."
        )
    if "epochs" in found:
        if found["epochs"] <= 1:
            console.print("No token repeats.")
            return
        worth = found.get("worth_tokens")  # None if the law itself models repeats
        value = "" if worth is None else f", worth {count(worth)} new tokens"
        console.print(
            f"{count(found['epochs'])} epochs{value} (constants from {found['repeats_from']}); "
            f"with new data only, the loss would be {found['loss_with_new_data']:.4f}."
        )
