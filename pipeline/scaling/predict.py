"""Forecast a run that has not been trained: its loss with an interval."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.errors import ConfigError
from pipeline.planner.recipe import rate_and_batch
from pipeline.scaling import decide
from pipeline.scaling.csv_table import (
    LINE,
    OPTIONAL,
    read_columns,
    read_table,
    unread_columns,
)
from pipeline.scaling.frontier import UnitFlops, at
from pipeline.scaling.ladder import Ladder, Recipe
from pipeline.scaling.points import ONE_KIND, Array, Points, check_vocab, kinds_of
from pipeline.scaling.quality import MIXED_COUNTS
from pipeline.scaling.study import Study
from pipeline.units import count, power

PROVEN_REACH = 100  # compute over the largest run, beyond which a forecast gets a warning
MOST = 1e40  # parameters, tokens and FLOPs; products of larger numbers would overflow
NO_FLOOR = ("kaplan", "power")
REPEATED = 1.05  # passes over the data; fewer repeats do not matter
SAME_LOSS = 1.0005  # ratio of losses that make no difference
FAR = 10.0  # times the largest N, D or D / N of the runs, or below the smallest
NEAR = 0.02  # a run within 2% of a forecast's N and D is the run that was forecast
OFF_FRONTIER = 1.5  # largest ratio of N to the best N; the loss changes by less than 0.3% there


@dataclass(frozen=True)
class Forecast:
    """The forecast of one run."""

    name: str
    N: float
    D: float
    C: float
    loss: float
    low: float
    high: float
    extrapolation: float  # compute over the largest fitted
    optimum: dict[str, float] | None  # the best split of the same compute, with 95% intervals


def at_sizes(study: Study, N: float, D: float) -> Points:
    """Return the target of N parameters on D tokens, with FLOPs counted as in the fitted points."""
    return at_targets(study, {"N": np.array([N]), "D": np.array([D])})


def read_targets(path: Path) -> dict[str, Any]:
    """Read columns N, D and, if present, C, run, experts, unique and those of ONE_KIND."""
    rows = read_table(path, ("N", "D"), "targets")
    found: dict[str, Any] = {**read_columns(path, rows, ("N", "D"))}
    for key, values in found.items():
        wrong = [row for row, value in zip(rows, values, strict=True) if not 0 < value < MOST]
        if wrong:
            cell = wrong[0].get(key)
            named = f"{key}={cell}" if cell else f"{key} is empty; it"
            raise ConfigError(
                f"targets={path}:{wrong[0][LINE]}: {named} must be a number above zero and below "
                f"{MOST:g}, such as 1e9"
            )
    for row in rows:
        check_vocab(f"targets={path}:{row[LINE]}", row.get("vocab") or "")
    found["kinds"] = kinds_of(rows)
    found["run"] = tuple(row.get("run") or "" for row in rows)
    found["warnings"] = tuple(unread_columns(rows, ("N", "D", *OPTIONAL, *ONE_KIND)))
    return found


def at_targets(study: Study, targets: dict[str, Any]) -> Points:
    C = UnitFlops.of(study.fit.points).each(targets["N"]) * targets["N"] * targets["D"]
    # A column C of the file has priority over this product.
    return at(study.fit.points, **{"C": C, **targets})


def forecast(study: Study, targets: Points, unique: float | None = None) -> list[Forecast]:
    """Return each target's loss by the printed law, with its 95% interval.

    `unique` is the number of distinct tokens; all others are repeats.
    """
    if study.name == "moe" and targets.experts is None:
        raise ConfigError(
            "law=moe forecasts need the number of experts; give --targets with a column `experts`"
        )
    # The exact FLOPs of a size differ a little from those of the points. Its best split is for
    # the FLOPs by the points' rule, so that both are compared; N is NaN for a law of compute alone.
    spent = UnitFlops.of(study.fit.points).each(targets.N) * targets.N * targets.D
    C = np.where(np.isfinite(spent), spent, targets.C)
    if unique is None:
        best = study.optimum(C, targets.experts)
    else:
        best = decide.best(study, C, decide.Demand(unique=unique))
        best = replace(best, loss=decide.loss_of(study.fit, best, unique))
    # The draws are for dense runs on new data: others get no interval of N* and D*.
    known = targets.experts is None and unique is None
    span = (study.optimum_range(C) or {}) if known else {}
    _refuse_off_frontier(study, targets)
    loss, low, high = study.interval(decide.worth(study.fit, targets, unique))
    largest = float(study.fit.points.C.max())
    made = []
    for i, name in enumerate(targets.run):
        split = None
        if best is not None:
            split = {key: float(getattr(best, key)[i]) for key in ("C", "N", "D", "loss")}
            for key in "ND" if span else "":
                split |= {f"{key}_low": float(span[key][0][i])}
                split |= {f"{key}_high": float(span[key][1][i])}
        place = (float(targets.N[i]), float(targets.D[i]), float(targets.C[i]))
        interval = (float(loss[i]), float(low[i]), float(high[i]))
        made.append(Forecast(name, *place, *interval, float(targets.C[i]) / largest, split))
    return made


def _refuse_off_frontier(study: Study, targets: Points) -> None:
    """Refuse other splits than the best for valleys and envelopes, which give no loss for them."""
    if study.minima is None or study.fit.law.name not in ("compute", "power"):
        return
    best = study.minima.path(targets.C)[0]
    off = np.abs(np.log(targets.N / best))
    far = int(np.argmax(off))
    if off[far] > math.log(OFF_FRONTIER):
        raise ConfigError(
            f"law={study.name} forecasts only the best N for a compute, which is "
            f"{count(best[far])} for {power(float(targets.C[far]))} FLOPs, not "
            f"{count(targets.N[far])}; give --flops, or choose --law chinchilla"
        )


def cautions(
    study: Study,
    targets: Points,
    made: Sequence[Forecast],
    unique: float | None = None,
    ladder: Ladder | None = None,
) -> list[str]:
    """Return warnings about these forecasts; `ladder` may know the data of the fitted runs."""
    found = []
    far = max(f.extrapolation for f in made)
    if far > PROVEN_REACH:
        found.append(
            f"{far:.3g}× the compute of the largest run: laws have held over 300× at most, "
            f"for a ladder that was designed for it."
        )
    if study.fit.law.name in NO_FLOOR and far > 1:
        cause = "" if study.minima is None else " from three valleys"
        found.append(
            f"law={study.name}{cause} has no floor E: beyond the runs it is too optimistic."
        )
    if study.minima is None and study.fit.points.unique is None:
        # Minima are no runs, and a run on repeated data can have the N and D of another.
        found += _trained(study.fit.points, made)
    found += _below_sizes(study.fit.points, made)
    found += _misfits(study, targets)
    found += _outside(study.fit.points, made)
    if unique is not None:
        found += _repeated(study, made[0], unique)
    elif targets.unique is None:
        passes = _passes(ladder, made) if ladder is not None else []
        if not passes and study.name == "data-constrained":
            text = "Every token counts as new; if some repeat, give --unique, or --targets with a"
            passes = [f"{text} column `unique`."]
        found += passes
    # A law of compute alone does not predict other splits of the same compute.
    if study.optimum(np.array([1.0])) is None and any(np.isfinite(f.N) for f in made):
        ratio = study.fit.points.D / study.fit.points.N
        low = float(ratio.min())
        high = float(ratio.max())
        if any(not 0.5 * low <= f.D / f.N <= 2 * high for f in made):
            found.append(
                f"This law depends on compute alone, along runs of {low:.3g} to {high:.3g} tokens "
                f"per parameter; a target of {made[0].D / made[0].N:.3g} (N = {count(made[0].N)}) "
                f"is off that line."
            )
    return found


def _trained(points: Points, made: Sequence[Forecast]) -> list[str]:
    """Return a warning about a run that is among the fitted ones."""
    last: dict[str, int] = {}  # with --curves, only the last row of a run is its end
    for i in np.argsort(points.D):
        last[points.run[i]] = int(i)
    ends = points.take(np.array(list(last.values())))
    for one in made:
        same = (np.abs(ends.N / one.N - 1) < NEAR) & (np.abs(ends.D / one.D - 1) < NEAR)
        if same.any():
            i = int(np.argmax(same))
            place = f"N = {count(one.N)} and D = {count(one.D)}"
            return [f"A fitted run has {place} already: {ends.run[i]}, loss {ends.loss[i]:.4f}."]
    return []


def _below_sizes(points: Points, made: Sequence[Forecast]) -> list[str]:
    """Return a warning about a run that is smaller than every shipped size."""
    if not points.vocab:
        return []
    name, least = min(decide.known_sizes(points.vocab).items(), key=lambda size: size[1])
    smallest = min(one.N for one in made)
    if not least * (1 - NEAR) > smallest:
        return []
    text = f"N = {count(smallest)} is below the smallest shipped size, `{name}`"
    return [f"{text} (N = {count(least)} as `dense` with this vocabulary): no --size trains it."]


def _passes(ladder: Ladder, made: Sequence[Forecast]) -> list[str]:
    """Return a warning about runs that have to repeat the data of the fitted runs."""
    most = max(one.D for one in made)
    if ladder.tokens is None or not most > REPEATED * ladder.tokens:
        return []
    return [
        f"D = {count(most)} is {most / ladder.tokens:.3g} passes over the {count(ladder.tokens)} "
        f"tokens of {ladder.data}, and this forecast counts all of them as new; --unique "
        f"{ladder.tokens} counts them as repeats."
    ]


def _columns(N: Array | float, D: Array | float) -> dict[str, Any]:
    return {"N": N, "D": D, "D / N": D / N}


def is_far(points: Points, N: Array | float, D: Array | float) -> npt.NDArray[np.bool_]:
    """Whether each place is far outside of the fitted runs; False where N or D is NaN."""
    fitted = _columns(points.N, points.D)
    places = _columns(N, D)
    outside = [
        (FAR * places[key] < fitted[key].min()) | (places[key] > FAR * fitted[key].max())
        for key in fitted
    ]
    return np.asarray(np.any(outside, axis=0))


def _outside(points: Points, made: Sequence[Forecast]) -> list[str]:
    """Return warnings about runs and best splits far outside of the fitted runs."""
    runs = ", ".join(
        f"{key} from {count(values.min())} to {count(values.max())}"
        for key, values in _columns(points.N, points.D).items()
    )
    targets = [vars(one) for one in made if is_far(points, one.N, one.D)]
    # The run of --flops is its own best split.
    others = [f.optimum for f in made if f.optimum and not math.isclose(f.optimum["N"], f.N)]
    splits = [split for split in others if is_far(points, split["N"], split["D"])]
    found = []
    for what, places in (("run", targets), ("best split of its compute", splits)):
        if places:
            first = places[0]
            more = f", like {len(places) - 1} more," if len(places) > 1 else ""
            found.append(
                f"The {what} (N = {count(first['N'])}, D = {count(first['D'])}){more} is far "
                f"outside of the fitted runs ({runs}): train runs near it before you rely on the "
                f"law there."
            )
    return found


def _repeated(study: Study, run: Forecast, unique: float) -> list[str]:
    """Return warnings about data that is repeated too often for the law."""
    found: list[str] = []
    least = float(study.fit.points.D.min())
    if FAR * unique < least:
        found.append(
            f"unique={count(unique)} is far below the tokens of the fitted runs ({count(least)} at "
            f"least): the law says nothing about so little data."
        )
    with suppress(ConfigError):  # a loss above all that the law describes
        enough = decide.least_cost(study, SAME_LOSS * run.loss, decide.Demand(unique=unique))
        if enough < run.C / 2:
            found.append(
                f"The best split of {power(enough)} FLOPs comes within {SAME_LOSS - 1:.2%} of this "
                f"loss on {count(unique)} distinct tokens."
            )
    return found


def _misfits(study: Study, targets: Points) -> list[str]:
    """Return warnings about targets in other units than the points, or columns without effect."""
    points = study.fit.points
    found = list(targets.warnings)
    below = float(points.C.min() / targets.C.min())
    if below > PROVEN_REACH:
        found.append(
            f"{below:.3g}× below the smallest run: no law of these runs holds for so few FLOPs. Is "
            f"N in parameters, D in tokens and C in FLOPs?"
        )
    # A law of compute alone has targets without N and D, for which no comparison is true.
    each = targets.C / (targets.N * targets.D) / UnitFlops.of(points).each(targets.N)
    if ((each > MIXED_COUNTS) | (each < 1 / MIXED_COUNTS)).any():
        found.append("C / (N·D) of the targets differs from that of the points: check their C.")
    for key in ONE_KIND:
        fitted = points.kinds.get(key)
        asked = targets.kinds.get(key)
        if None not in (fitted, asked) and asked != fitted:
            text = f"The targets have {key}={asked}, but the fitted runs have {key}={fitted}"
            found.append(f"{text}: their law does not describe the targets.")
    for key, law in (("experts", "moe"), ("unique", "data-constrained")):
        if getattr(targets, key) is not None and study.name != law:
            found.append(
                f"law={study.name} ignores the column `{key}` of the targets; --law {law} uses it."
            )
    return found


def recipe_at(made: Forecast, ladder: Ladder) -> Recipe | None:
    """Return the recipe for a run that has none of our sizes; None for a law of compute alone."""
    if not (math.isfinite(made.N) and math.isfinite(made.D)):
        return None
    lr, batch_tokens = rate_and_batch(made.N, made.D, ladder.recipe, ladder.named_arch)
    # A rate or batch that all runs of the ladder share is part of its recipe.
    lr = float(ladder.settings.get("optim.lr", lr))
    batch_tokens = int(ladder.settings.get("train.batch_tokens", batch_tokens))
    steps = max(1, round(made.D / batch_tokens))
    return Recipe(ladder.recipe, made.N, made.D, made.C, lr, batch_tokens, steps)


def at_recipe(study: Study, recipe: Recipe, name: str) -> Points:
    C, N, D = (np.array([value]) for value in (recipe.C, recipe.N, recipe.D))
    return at(study.fit.points, C, N, D, run=(name,))
