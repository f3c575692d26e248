"""Choose the law: which laws the points can determine, and which of them forecasts best."""

from typing import NamedTuple

import numpy as np

from pipeline.errors import DataError
from pipeline.scaling.backtest import Backtest, backtest
from pipeline.scaling.fitting import Fit, fit
from pipeline.scaling.laws import LAWS, Law
from pipeline.scaling.points import Points, runs_across
from pipeline.scaling.quality import repeats, unit_warnings
from pipeline.units import count, power

SPARE = 2  # a law is determined only by this many more points than it has parameters
TANGLED = 0.15  # spread of log D around its trend in log N; below, N and D cannot be separated
EXACT = 1e-4  # relative; measured losses never lie this close to a law
MANY = 30  # from this number of runs on, the γ-law is the default
CLEARLY = 0.8  # a law with this share of the other's backtest error is clearly better


def check(points: Points) -> None:
    """Refuse points to which no law can be fitted."""
    if len(points) < 2:
        gone = f" ({len(points.dropped)} left out: {points.dropped[0]} …)" if points.dropped else ""
        remedy = "correct these rows, or " if gone else ""
        raise DataError(
            f"points={len(points)}{gone}: a law needs at least two finished runs of different "
            f"compute; {remedy}train {runs_across(points)}"
        )
    if points.C.max() < 1.5 * points.C.min():
        raise DataError(
            f"compute spans only {points.C.max() / points.C.min():.2f}×; add runs with at least 4× "
            f"more FLOPs (such as {power(4 * points.C.max())})"
        )
    # Compare the best of the largest third with the best of the smallest: noise may swap two runs.
    order = np.argsort(points.C)
    third = max(1, len(order) // 3)
    early = points.loss[order[:third]].min()
    late = points.loss[order[-third:]].min()
    if late >= early:
        wrong_units = unit_warnings(points)
        raise DataError(
            f"loss does not fall with compute (best {early:.4g} at the smallest budgets, "
            f"{late:.4g} at the largest): look for runs that diverged or stopped early and for "
            f"losses in another unit, or train {points.run[order[-1]]} again at a lower learning "
            f"rate{''.join(f'. {warning}' for warning in wrong_units[:1])}"
        )


def check_law(points: Points, law: Law) -> None:
    """Refuse a law that the user named if the points are not enough for it."""
    missing = len(law.parameters) - len(points)
    if missing > 0:
        raise DataError(
            f"law={law.name} has {len(law.parameters)} parameters and there are {len(points)} "
            f"points; train {missing} more, such as {runs_across(points)}, or choose --law auto"
        )
    for key in ("N", "D") if law.name not in ("compute", "power") else ():
        values = np.unique(getattr(points, key))
        if len(values) < 2:
            text = f"law={law.name}: all runs have {key} = {count(values[0])}"
            raise DataError(f"{text}; train {runs_across(points)}")
    if law.name == "moe" and (points.experts is None or len(np.unique(points.experts)) < 2):
        raise DataError("law=moe needs a column `experts` with two or more values (1 for dense)")
    if law.name == "data-constrained" and not repeats(points):
        raise DataError(
            "law=data-constrained needs a column `unique` (distinct tokens) and runs that repeat "
            "data"
        )


class Choice(NamedTuple):
    """A law, its backtest, and the reasons in plain words."""

    law: Law
    backtest: Backtest | None
    reasons: list[str]


def choose(points: Points) -> Choice:
    """Choose a law for these points: one that they determine, and the best at forecasting."""
    runs = len(points)
    sizes = len(np.unique(points.N))
    if runs < 5 + SPARE:
        why = f"{runs} runs cannot determine the five parameters of L = E + A·N^−α + B·D^−β"
    elif not _tangled(points):
        return _by_backtest(points)
    elif len(np.unique(points.D)) < 2:
        why = "One length does not show the effect of D"
    elif sizes < 3:
        plural = "s do" if sizes > 1 else " does"
        why = f"{sizes} size{plural} not show the effect of N, for which at least 3 are needed"
    else:
        why = "N and D grow together in these runs, so their effects cannot be separated"
    needed = max(2, 5 + SPARE - runs)
    more = f"{needed} more runs would help, with other D/N: {runs_across(points)}."
    notes = []
    if sizes > 1 and points.D.max() < 1.1 * points.D.min():
        tokens = count(points.D[0])
        notes = [f"All runs saw the same {tokens} tokens: this law shows the effect of size only."]
    if runs >= 3 + SPARE:
        law = LAWS["compute"]
        note = f"{why}; fitted L = E + K·C^−g along this ladder instead. {more}"
        return Choice(law, backtest(points, law, focused=True), [note, *notes])
    note = (
        f"{why}; fitted the straight line L = K·C^−g instead. It has no floor E, so it is too "
        f"optimistic far beyond the last run: use it within the measured range. {more}"
    )
    return Choice(LAWS["power"], None, [note, *notes])


def _tangled(points: Points) -> bool:
    """Whether N and D grow together, so that their effects cannot be separated."""
    if len(np.unique(points.N)) < 3 or len(points) < 4:
        return True
    n = np.log(points.N)
    d = np.log(points.D)
    # Only the part of log D that does not follow log N separates their effects.
    slope, level = np.polyfit(n, d, 1)
    return bool(np.std(d - slope * n - level) < TANGLED)


def _by_backtest(points: Points) -> Choice:
    """Choose between Chinchilla's law and the γ-law, or the law that the columns need.

    Kaplan's law is not a candidate: it has no floor, so its forecasts far beyond the runs are too
    low, and on public ladders it was the worst of the three.
    """
    names = ["chinchilla", "gamma"]
    if points.experts is not None and len(np.unique(points.experts)) > 1:
        names = ["moe"]
    elif repeats(points):
        names = ["chinchilla", "data-constrained"]
    simple = LAWS[names[0]]
    # Fitted as the final law will be, with weights and prior.
    plain, *others = [backtest(points, LAWS[name], focused=True) for name in names]
    if plain is None:
        note = f"Too few runs to test {simple.name} on held-out larger ones: its interval is that "
        return Choice(simple, None, [note + "of a typical public ladder."])
    richer = others[0] if others else None
    if richer is not None:
        # If the backtests do not decide clearly, use the simpler law for few runs and for computed
        # points, and the richer law for many runs.
        limit = plain.score if len(points) < MANY else plain.score / CLEARLY
        if richer.score < limit and not exact(fit(points, simple)):
            return Choice(richer.law, richer, [])
    return Choice(simple, plain, [])


def exact(fit: Fit) -> bool:
    """Whether the points lie exactly on the law, so that they were computed, not measured."""
    return len(fit.points) > len(fit.theta) and bool(np.abs(fit.residuals).max() < EXACT)
