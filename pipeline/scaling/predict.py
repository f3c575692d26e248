"""What a run that has not been made will reach: its loss with an interval, and the best split of its compute."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config.layers import load, load_cluster
from pipeline.config.schema import Cluster
from pipeline.errors import ConfigError
from pipeline.planner.check import resolve
from pipeline.planner.count import flops_per_token, params
from pipeline.planner.recipe import rule
from pipeline.scaling.frontier import at, flops_per_parameter_token
from pipeline.scaling.points import FIGURES, Points, column, read_table
from pipeline.scaling.study import Study
from pipeline.units import count

MFU = 0.4  # of peak; what dense runs of 1–7B reach on H100s (llm-foundry, Megatron-LM: 41–47%)


@dataclass(frozen=True)
class Forecast:
    """One run foretold."""

    name: str
    N: float
    D: float
    C: float
    loss: float
    low: float
    high: float
    extrapolation: float  # compute over the largest fitted
    optimum: dict[str, float] | None  # the best split of the same compute


def at_flops(study: Study, C: float) -> Points:
    """The compute-optimal run of that compute."""
    return study.frontier(np.array([C]))


def at_sizes(study: Study, N: float, D: float) -> Points:
    """N parameters on D tokens, FLOPs counted as in the fitted points."""
    each = flops_per_parameter_token(study.fit.points)
    return at(study.fit.points, np.array([each * N * D]), np.array([N]), np.array([D]))


def read_targets(path: Path) -> dict[str, Any]:
    """Columns N, D and, if there, C, run, experts, unique."""
    rows = read_table(path, ("N", "D"))
    found = {
        key: column(path, rows, key)
        for key in FIGURES
        if key != "loss" and any(row.get(key) for row in rows)
    }
    for key, values in found.items():
        if not ((values > 0) & np.isfinite(values)).all():
            raise ConfigError(f"targets={path}: every {key} must be a number above zero")
    return {**found, "run": tuple(row.get("run") or "" for row in rows)}


def at_targets(study: Study, targets: dict[str, Any]) -> Points:
    C = flops_per_parameter_token(study.fit.points) * targets["N"] * targets["D"]
    return at(study.fit.points, **{"C": C, **targets})


@dataclass(frozen=True)
class Recipe:
    """A rung of the ladder as `launch pretrain` would run it."""

    N: float
    D: float
    C: float
    lr: float
    batch_tokens: int
    steps: int


def recipe_of(
    size: str, arch: str | None, tokens: float | None, sets: Sequence[str], gpus: int
) -> Recipe:
    """Exact N and FLOPs from the accounts, rate and batch from the recipe."""
    over = {} if tokens is None else {"train": {"tokens": int(tokens)}}
    config = resolve(load(size=size, arch=arch, sets=sets, over=over), ranks=gpus, gpu=True)
    train, lr = config.train, config.optim.lr
    D = float(train.steps * train.batch_tokens)
    C = D * flops_per_token(config.model).model
    return Recipe(params(config.model).scaling, D, C, lr, train.batch_tokens, train.steps)


def recipe_at(N: float, D: float, C: float) -> Recipe | None:
    """The recipe's rule for a run that is on no rung, taking N for its parameters; None where the law knows no N."""
    if not (math.isfinite(N) and math.isfinite(D)):
        return None
    lr, batch_tokens = rule(N, D)
    return Recipe(N, D, C, lr, batch_tokens, max(1, round(D / batch_tokens)))


def at_recipe(study: Study, recipe: Recipe, name: str) -> Points:
    C, N, D = (np.array([value]) for value in (recipe.C, recipe.N, recipe.D))
    return at(study.fit.points, C, N, D, run=(name,))


def forecast(study: Study, targets: Points) -> list[Forecast]:
    """Each target's loss and 95% interval."""
    if study.name == "moe" and targets.experts is None:
        raise ConfigError(
            "law=moe forecasts need the number of experts; give --targets with a column `experts`"
        )
    loss, low, high = study.interval(targets)
    best = study.optimum(targets.C, targets.experts)
    largest = float(study.fit.points.C.max())
    return [
        Forecast(
            targets.run[i], float(targets.N[i]), float(targets.D[i]), float(targets.C[i]),
            float(loss[i]), float(low[i]), float(high[i]), float(targets.C[i]) / largest,
            None if best is None else {
                "C": float(best.C[i]), "N": float(best.N[i]), "D": float(best.D[i]), "loss": float(best.loss[i])},
        )
        for i in range(len(targets))
    ]  # fmt: skip


def cautions(study: Study, targets: Points, made: Sequence[Forecast]) -> list[str]:
    """What a reader of these forecasts should know."""
    said = []
    far = max(f.extrapolation for f in made)
    if far > 100:
        said.append(
            f"{far:.3g}× beyond the largest run: laws have been seen to hold over 300×, with a ladder made for it."
        )
    least = min(f.loss for f in made)
    if study.profile is not None and least < study.profile.low:
        said.append(
            f"{least:.4g} lies below the floor that these runs point to (E from {study.profile.low:.4g}): forecasts "
            f"lean towards exponents known from larger ladders. Believe the interval, and runs nearer to the target."
        )
    if study.name == "data-constrained" and targets.unique is None:
        said.append(
            "Every token is taken to be new; where some repeat, give --targets with a column `unique`."
        )
    if study.optimum(np.array([1.0])) is None and any(np.isfinite(f.N) for f in made):
        points = study.fit.points
        low, high = (float(np.quantile(points.D / points.N, q)) for q in (0, 1))
        if any(not 0.5 * low <= f.D / f.N <= 2 * high for f in made):
            said.append(
                f"This law knows only compute, along runs of {low:.3g} to {high:.3g} tokens per parameter; "
                f"a target of {made[0].D / made[0].N:.3g} (N = {count(made[0].N)}) is off that line."
            )
    return said


def priced(cluster: str) -> Cluster:
    """A cluster whose speed is known."""
    found = load_cluster(cluster)
    if found.peak_flops is None:
        raise ConfigError(
            f"cluster={cluster} has no peak_flops; add it to configs/cluster/{cluster}.toml"
        )
    return found


def cost(C: float, site: Cluster, gpus: int) -> dict[str, Any]:
    """Time on a cluster at an MFU that is said aloud, and its price where the cluster has one."""
    assert site.peak_flops is not None
    hours = C / (site.peak_flops * MFU) / 3600
    usd = {} if site.usd_per_gpu_hour is None else {"usd": hours * site.usd_per_gpu_hour}
    return {
        "cluster": site.name,
        "gpus": gpus,
        "mfu": MFU,
        "gpu_hours": hours,
        "hours": hours / gpus,
        **usd,
    }
