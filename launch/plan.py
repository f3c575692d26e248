"""`launch sweep plan`: the runs of a sweep, their cost, and how well they will forecast."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from launch.law import progress
from launch.options import AsJson, amount_option
from launch.tables import new_console, print_json, table
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from pipeline.sweep.design import Target, Width
    from pipeline.sweep.grid import Planned, Sweep

SHIPPED = "Sweep file, or a shipped sweep: cpu, gpu, ladder, isoflop or synthetic."
File = Annotated[str, Argument(help=SHIPPED)]
PlanFile = Annotated[str | None, Argument(help=f"{SHIPPED} (default with --target-size: ladder)")]
Budget = Annotated[float | None, Option(help="FLOPs for all runs, instead of the file's budgets.")]
Hours = Annotated[float | None, Option(help="GPU time for all runs in hours, instead of --budget.")]
_EARLIER = "CSV of earlier runs, whose law gives the best size for each budget."
Earlier = Annotated[Path | None, Option("--points", help=_EARLIER)]
_DATA = "Prepared data, instead of the sweep's `data`; it sets the vocabulary."
Data = Annotated[Path | None, Option(help=_DATA)]
_MFU = "MFU from which to compute times (default: as the planner predicts)."
Mfu = Annotated[float | None, Option(help=_MFU, min=0.001, max=1)]
_TARGET_SIZE = "Size to forecast, to simulate how wide the interval of its forecast will be."
TargetSize = Annotated[str | None, Option(help=_TARGET_SIZE)]
_TARGET_TOKENS = "Training tokens of --target-size (default: 20 per parameter)."
TargetTokens = Annotated[float | None, amount_option(_TARGET_TOKENS)]
_WANTED_WIDTH = "Propose the cheapest ladder whose interval has this half width, such as 3%."
WantedWidth = Annotated[str | None, Option("--width", help=_WANTED_WIDTH)]
_MEASURED_NOISE = "Ladders measured so far scatter 0.8% to 1.5%"
_NOISE = f"Scatter of the simulated runs (default: 0.3%). {_MEASURED_NOISE}."
Noise = Annotated[str | None, Option(help=_NOISE)]
Save = Annotated[Path | None, Option(help="Write the proposed ladder to this sweep file.")]


def plan(
    file: PlanFile = None,
    budget: Budget = None,
    hours: Hours = None,
    points: Earlier = None,
    data: Data = None,
    mfu: Mfu = None,
    target_size: TargetSize = None,
    target_tokens: TargetTokens = None,
    width: WantedWidth = None,
    noise: Noise = None,
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Print every run with its cost; with --target-size, also how wide a forecast would be.

    The simulation draws laws that resemble published ones, adds the noise of runs, and fits each
    simulated sweep as `launch fit` would.
    """
    from pipeline.atomic import replace
    from pipeline.sweep import design

    if file is None and target_size is None:
        raise ConfigError("give a sweep FILE, such as ladder, or --target-size to plan one for it")
    if target_size is None and target_tokens is not None:
        raise ConfigError(
            f"target_tokens={target_tokens:g} is the length of the run to forecast; "
            f"give --target-size too"
        )
    if target_size is None and any(given is not None for given in (width, noise, save)):
        raise ConfigError("--width, --noise and --save need a run to forecast; give --target-size")
    _check_save(save, width)
    wanted = None if width is None else _share("width", width)
    scatter = design.NOISE if noise is None else _share("noise", noise)
    sweep, runs = read_plan("ladder" if file is None else file, budget, hours, points, data, mfu)
    if target_size is None:
        figures = _figures(sweep, runs, mfu)
        print_json(figures) if as_json else _print_plan(new_console(), figures)
        return
    target = design.target_of(sweep, target_size, target_tokens)
    with progress(quiet=as_json) as show:
        if wanted is None:
            found = design.width(runs, target, scatter, show=show)
        else:
            sweep, runs, found = design.cheapest(sweep, target, wanted, scatter, show)
    if save is not None:
        replace(save, design.as_toml(sweep, found, target).encode())
    figures = _figures(sweep, runs, mfu) | {"target": vars(target), "width": vars(found)}
    if as_json:
        print_json(figures)
        return
    console = new_console()
    _print_plan(console, figures)
    _print_width(console, target, found, scatter)


def _check_save(save: Path | None, width: str | None) -> None:
    """Refuse a file that cannot be written, before the search for a ladder takes a minute."""
    if save is not None and width is None:
        raise ConfigError("--save writes the proposed ladder; give --width")
    if save is None:
        return
    writable = save.parent.is_dir() and os.access(save.parent, os.W_OK | os.X_OK)
    if save.is_dir() or not writable:
        raise ConfigError(f"save={save} is not a file name in a writable directory; give one")


def _share(key: str, text: str) -> float:
    """Parse a share, written as 3% or 0.03."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = float("nan")
    if not 0 < value < 1:
        raise ConfigError(f"{key}={text} must be a share between 0 and 1, such as 3% or 0.03")
    return value


def _figures(sweep: "Sweep", runs: "list[Planned]", mfu: float | None) -> dict[str, Any]:
    from pipeline.sweep.grid import TIMING, configs_of

    times = [run.hours for run in runs if run.hours is not None]
    total = {
        "runs": len(runs),
        "flops": sum(run.cost for run in runs),
        "saved": sum(run.C - run.cost for run in runs),  # by branching off longer runs
        "hours": sum(times) if times else None,  # CPUs and some clusters have no known rate
        "timing": TIMING if mfu is None else f"MFU {mfu:g}",
        "on": f"{sweep.nproc} × {sweep.cluster}" if sweep.cluster else "CPUs",
    }
    model = next(iter(configs_of(sweep).values())).model
    about = {"experiment": sweep.experiment, "kind": sweep.kind, "vocab": model.vocab}
    return {**about, "data": sweep.data, "runs": [vars(run) for run in runs], "total": total}


def _print_width(console: "Console", target: "Target", found: "Width", noise: float) -> None:
    from pipeline.units import count

    console.print(
        f"Forecast of {target.name} (N = {count(target.N)} on {count(target.D)} tokens, "
        f"{found.beyond:.3g}× the largest run): interval ± {found.median:.1%}, at worst "
        f"± {found.worst:.1%}, in {found.draws} simulated sweeps with {noise:.1%} noise; "
        f"{found.inside} of them contain the truth, {found.error:.1%} off on average. "
        f"{_MEASURED_NOISE}: give the scatter that `launch fit` prints for your runs as --noise."
    )


def read_plan(
    file: str,
    budget: float | None,
    hours: float | None,
    points: Path | None,
    data: Path | None,
    mfu: float | None = None,
) -> "tuple[Sweep, list[Planned]]":
    """Return the sweep of a file, within these limits, and its runs."""
    from pipeline.sweep import grid

    sweep = grid.read(file)
    if points is not None and sweep.kind == "ladder":
        raise ConfigError(
            f"points={points} centers an isoFLOP grid, but {file} is a ladder, whose sizes are "
            f"given; leave it out, or plan a sweep with kind = 'isoflop'"
        )
    if data is not None:
        sweep = sweep.model_copy(update={"data": str(data)})
    # Without earlier points the grid is centered on the sweep's tokens_per_param.
    best = _known_best(points) if points else None
    if budget is not None or hours is not None:
        sweep = grid.within(sweep, budget, hours, best, mfu)
    return sweep, grid.plan(sweep, best, mfu)


def _known_best(points: Path) -> Callable[[float], float]:
    """Return N*(C) by the law of earlier runs."""
    import numpy as np

    from pipeline.scaling.points import read_csv
    from pipeline.scaling.quality import unit_warnings
    from pipeline.scaling.study import study

    rows = read_csv(points)
    # The grid has sizes whose parameters we count, so N of the points has to be counted alike.
    wrong_units = unit_warnings(rows)
    if wrong_units:
        raise ConfigError(f"points={points} cannot center a sweep: {wrong_units[0]}")
    done = study(rows)

    def best(C: float) -> float:
        # A law of compute alone fits the losses and has no N*.
        found = done.optimum(np.array([C]))
        if found is None:
            text = f"points={points} do not determine N*(C)"
            raise ConfigError(f"{text}; plan without them, around 20 tokens per parameter")
        return float(found.N[0])

    best(1.0)  # refuse before planning
    for warning in done.warnings:
        typer.echo(f"points={points}: {warning}", err=True)
    return best


def _print_plan(console: "Console", data: dict[str, Any]) -> None:
    from pipeline.units import count, power

    columns = ("run", "N", "D", "D/N", "FLOPs", "lr", "batch", "steps", "from", "GiB per rank")
    rows = []
    for run in data["runs"]:
        place = [run["name"], count(run["N"]), count(run["D"]), f"{run['D'] / run['N']:.3g}"]
        recipe = [f"{run['lr']:.2e}", count(run["batch_tokens"]), f"{run['steps']:,}"]
        branch = f"{run['begins']:,}" if run["trunk"] else "–"
        memory = f"{run['memory_bytes'] / 2**30:.2g}"
        hours = "–" if run["hours"] is None else f"{run['hours']:.3g}"
        rows.append([*place, power(run["C"]), *recipe, branch, memory, hours])
    title = f"{data['kind']} sweep {data['experiment']}"
    console.print(table(title, (*columns, "hours"), rows))
    total = data["total"]
    time = f" on {total['on']}, whose speed is not known"
    if total["hours"] is not None:
        time = f", {total['hours']:.3g} hours on {total['on']}, one by one ({total['timing']})"
    console.print(f"{total['runs']} runs, {power(total['flops'])} FLOPs{time}")
    source = "" if data["data"] else "; --data DIR uses that of the data"
    console.print(f"Vocabulary: {data['vocab']:,}{source}")
    # FLOPs that branches share with their trunks (WSD) are computed once.
    if total["saved"]:
        whole = total["flops"] + total["saved"]
        console.print(
            f"Shorter runs branch off the longest run of their size at the step under `from`, "
            f"which saves {total['saved'] / whole:.0%} of the {power(whole)} FLOPs of separate runs"
        )
