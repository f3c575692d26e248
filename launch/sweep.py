"""`launch sweep plan`: a grid of runs and its cost, before any of them is started."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from launch.examples import examples
from launch.scaling_tables import print_json, print_plan
from pipeline.errors import ConfigError

app = typer.Typer(help="Plan a ladder or an isoFLOP grid of runs.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Plan a ladder or an isoFLOP grid of runs."""


@app.command(
    epilog=examples(
        "launch sweep plan configs/scaling/isoflop.toml",
        "launch sweep plan configs/scaling/ladder.toml --json",
        "launch sweep plan configs/scaling/isoflop.toml --budget 1e19 --points runs.csv",
    )
)
def plan(
    file: Annotated[Path, typer.Argument(help="A sweep (configs/scaling).")],
    budget: Annotated[float | None, typer.Option(help="FLOPs for all runs together, instead of budgets.")] = None,
    hours: Annotated[float | None, typer.Option(help="Hours on the sweep's GPUs, instead of budgets.")] = None,
    points: Annotated[Path | None, typer.Option(help="Earlier runs (CSV): their law centres the grid.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Lay out a sweep: every run's N, D, FLOPs, rate, batch, steps, time and memory, and the total."""
    from pipeline.config.load import load
    from pipeline.scaling import plan as planning
    from pipeline.scaling.forecast import MFU

    sweep = planning.read(file)
    best = known_best(points) if points else None
    limits = [] if budget is None else [budget]
    if hours is not None:
        peak = load(size="tiny", cluster=sweep.cluster).cluster.peak_flops if sweep.cluster else None
        if peak is None:
            raise ConfigError("hours needs to know the GPUs; set cluster = 'h100' (configs/cluster) in the sweep")
        limits.append(hours * 3600 * sweep.gpus * peak * MFU)
    if limits:
        sweep = planning.within(sweep, min(limits), best)
    runs = planning.plan(sweep, best)
    total = {
        "runs": len(runs),
        "flops": sum(run.C for run in runs),
        "hours": sum(run.hours for run in runs if run.hours is not None) if sweep.cluster else None,
    }
    data = {"experiment": sweep.experiment, "kind": sweep.kind, "runs": [r.to_json() for r in runs], "total": total}
    print_json(data) if as_json else print_plan(data)


def known_best(points: Path) -> Callable[[float], float]:
    """N*(C) as the law of earlier runs has it."""
    import numpy as np

    from pipeline.scaling.points import read_csv
    from pipeline.scaling.study import study

    done = study(read_csv(points))
    if done.optimum(np.array([1.0])) is None:
        raise ConfigError(f"points={points} do not determine N*(C); plan without them, about 20 tokens per parameter")

    def best(C: float) -> float:
        found = done.optimum(np.array([C]))
        assert found is not None
        return float(found.N[0])

    return best
