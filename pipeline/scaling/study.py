"""From points to a law: which law they can determine, its uncertainty, and its doubts.

One law is printed, drawn and used for forecasts: `Study.fit`. With `auto` it is fitted to
forecast: the runs nearest the largest compute count most (backtest.focus), and exponents much
steeper than any known law cost something (laws.steepness). A law asked for by name is fitted as in
its paper, all runs alike. N* and D* always come from a fit of all runs alike, `Study.split`, or
from measured valleys: badly split runs determine them, and those hardly count in a fit made to
forecast.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pipeline.errors import ConfigError, DataError
from pipeline.scaling.backtest import Backtest, backtest, focus, waste
from pipeline.scaling.fitting import Fit, Show, fit, silent, vpnls
from pipeline.scaling.frontier import Minima, Optimum, at, envelope, exponents, isoflop, optimum
from pipeline.scaling.intervals import Profile, Scatter, bootstrap, doubts, profile, scatter
from pipeline.scaling.laws import LAWS, Law
from pipeline.scaling.points import Array, Points, runs_across
from pipeline.units import count, power

NAMES = ("auto", *LAWS, "isoflop", "parabola", "envelope", "vpnls")
SPARE = 2  # points beyond the parameters before a law counts as determined at all
TANGLED = 0.15  # spread of log D about its trend in log N; below, N and D cannot be told apart
EXACT = 1e-5  # backtest error below which the simpler law wins
VALLEYS_DIFFER = 0.1  # log N*: beyond, measured valleys are believed rather than the law

# A fit that makes no sense is reported in words, not in numpy's warnings.
quiet = np.errstate(over="ignore", divide="ignore", invalid="ignore")


@dataclass(frozen=True)
class Study:
    """A fitted law with its uncertainty, and its warnings in plain words."""

    name: str
    fit: Fit  # the law: printed, drawn and used for every forecast
    split: Fit  # the same law with all points alike, for N* and D*
    scatter: Scatter  # about `fit`
    backtest: Backtest | None
    profile: Profile | None
    minima: Minima | None  # where N* and D* come from valleys or curves
    draws: Array | None  # natural parameters of the bootstrap, (R, P)
    warnings: tuple[str, ...]

    @quiet
    def optimum(self, C: Array, experts: Array | None = None) -> Optimum | None:
        """The compute-optimal N and D with the law's loss; None for a law of compute alone."""
        if self.minima is not None:
            N, D = self.minima.path(C)
        else:
            best = optimum(self.split, C, experts)
            if best is None:
                return None
            N = best.N
            D = best.D
        return Optimum(C, N, D, self.fit.predict(at(self.fit.points, C, N, D, experts=experts)))

    @quiet
    def interval(self, places: Points) -> tuple[Array, Array, Array]:
        """The law's loss and its 95% interval: what backtests show, and at least the scatter."""
        loss = self.fit.predict(places)
        half = self.scatter.half_width(places)
        if self.backtest is not None:
            ratio = places.C / self.fit.points.C.max()
            # fmax ignores NaN: where one of the two is unknown, the other is used.
            half = np.fmax(half, self.backtest.half_width(ratio, waste(self.fit, places, loss)))
        return loss, loss * np.exp(-half), loss * np.exp(half)

    def frontier(self, C: Array) -> Points:
        """The compute-optimal runs; N and D are NaN for a law of compute alone."""
        best = self.optimum(C)
        unknown = C * np.nan
        N = unknown if best is None else best.N
        D = unknown if best is None else best.D
        return at(self.fit.points, C, N, D)

    @quiet
    def parameters(self) -> dict[str, dict[str, float]]:
        """Value, standard error, 95% interval: from the bootstrap if it ran, else the scatter."""
        values = self.fit.values
        if self.draws is not None:
            errors = self.draws.std(axis=0, ddof=1)
            low, high = np.percentile(self.draws, [2.5, 97.5], axis=0)
        else:
            errors = self.scatter.standard_errors()
            spans = [
                _span(name, value, self.scatter.t * float(error))
                for (name, value), error in zip(values.items(), errors, strict=True)
            ]
            low, high = np.array(spans).T
        table = {
            name: {"value": value, "se": float(se), "low": float(a), "high": float(b)}
            for (name, value), se, a, b in zip(values.items(), errors, low, high, strict=True)
        }
        # The profile, unlike the scatter, does not assume that the law is linear in E. For a fit
        # made to forecast it is also free of the prior, so it wins over the bootstrap too.
        if self.profile is not None and (self.draws is None or self.fit is not self.split):
            table["E"] |= {"low": self.profile.low, "high": self.profile.high}
        return table

    def to_json(self) -> dict[str, Any]:
        a_b = (self.minima.a, self.minima.b) if self.minima else exponents(self.split)
        source = "valleys" if self.minima else "law"
        if source == "law" and self.fit is not self.split:
            source = "all runs alike"
        test = self.backtest
        of_e = self.profile
        return {
            "law": self.name,
            "formula": self.fit.law.formula,
            "parameters": self.parameters(),
            "errors_from": "scatter" if self.draws is None else "bootstrap",
            "objective": self.fit.objective,
            "exponents": a_b and {"a": a_b[0], "b": a_b[1], "from": source},
            "points": {"used": len(self.fit.points), "dropped": list(self.fit.points.dropped)},
            "convention": self.fit.points.convention,
            "starts_agreeing": self.fit.agreement,
            "backtest": test and {"mean_absolute_error": test.score, "errors": len(test.errors)},
            "profile_E": of_e and {"low": of_e.low, "high": of_e.high},
            "minima": self.minima and _rows(self.minima.points),
            "warnings": list(self.warnings),
        }


def _rows(points: Points) -> list[dict[str, float]]:
    keys = ("C", "N", "D", "loss")
    return [{key: float(getattr(points, key)[i]) for key in keys} for i in range(len(points))]


def _span(name: str, value: float, half: float) -> tuple[float, float]:
    """A 95% interval; that of a coefficient, which is positive, is even in its logarithm."""
    # Exponents have lowercase names and may be negative.
    if not name[0].isupper():
        return value - half, value + half
    ratio = np.exp(min(half / value, 700.0)) if value > 0 else float("inf")
    return float(value / ratio), float(value * ratio)


@quiet
def study(
    points: Points,
    law: str = "auto",
    *,
    resamples: int = 0,
    full_grid: bool = False,
    tested: bool = False,
    show: Show = silent,
) -> Study:
    """Fit the named law, or with `auto` the one that forecasts best of those determined.

    `tested` backtests a named law too, for the intervals of its forecasts; `auto` always does.
    """
    check(points)
    if law not in NAMES:
        raise ConfigError(f"law={law!r} is unknown; choose one of {', '.join(NAMES)}")
    notes = list(points.warnings)
    minima = None
    test = None
    # Choose the law. Valleys and envelopes replace the points by their minima.
    match law:
        case "auto":
            chosen, test, reasons = choose(points)
            notes += reasons
        case "isoflop" | "parabola" | "envelope":
            minima = _minima(points, law)
            notes += minima.notes
            points = minima.points
            chosen = LAWS["compute" if len(points) >= 4 else "power"]
        case _:
            chosen = LAWS["chinchilla" if law == "vpnls" else law]
    check_law(points, chosen)
    # `split` weighs all points alike, as the papers do. `result` is what is printed and used.
    even = vpnls if law == "vpnls" else partial(fit, law=chosen, full_grid=full_grid, show=show)
    split = even(points)
    result = split
    if law != "auto" and tested:
        test = backtest(points, chosen, focused=False)
    # With fewer points, weighting some of them down would leave too few for the parameters.
    if law == "auto" and len(points) > len(chosen.parameters) + 2:
        result = fit(points, chosen, weights=focus(points, chosen), full_grid=full_grid)
        minima, reasons = _valleys_instead(split)
        notes += reasons
    # How far to trust the result: the range of E, the bootstrap and the scatter.
    of_e = None if law == "vpnls" else _profile(split, result, free=law == "auto")
    draws = None
    # Most resamples of a handful of runs hold one twice and lack another; the scatter is better.
    if resamples and len(set(points.run)) >= 4 * len(chosen.parameters):
        draws = result.law.natural(bootstrap(result, resamples, show=show), result.inputs)
    spread = scatter(result)
    notes += doubts(result, spread, of_e)
    name = chosen.name if law == "auto" else law
    return Study(name, result, split, spread, test, of_e, minima, draws, tuple(notes))


def _profile(split: Fit, result: Fit, *, free: bool) -> Profile | None:
    """E's profile without weights or prior: what the points alone allow.

    Chinchilla's law is the γ-law with γ = 1. Where it was not requested by name (`free`), the
    interval does not rest on that assumption. It always includes the E of the law itself.
    """
    of_e = profile(split, scatter(split))
    if of_e is None:
        return None
    gamma = LAWS["gamma"]
    enough = len(split.points) >= len(gamma.parameters) + SPARE
    if free and enough and split.law.name == "chinchilla":
        wider = fit(split.points, gamma)
        other = profile(wider, scatter(wider))
        if other is not None:
            of_e = of_e.including(other.low, other.high)
    return of_e.including(result.values["E"], result.values["E"])


def _minima(points: Points, law: str) -> Minima:
    if law == "envelope":
        return envelope(points)
    return isoflop(points, "akima" if law == "isoflop" else "parabola")


def _valleys_instead(split: Fit) -> tuple[Minima | None, list[str]]:
    """Measured isoFLOP valleys, where there are enough and the law's N* lies elsewhere."""
    if split.points.experts is not None or split.points.unique is not None:
        return None, []  # a valley would mix architectures, or new data with repeated
    try:
        found = isoflop(split.points)
    except DataError:
        return None, []
    # Two independent readings of N*: one from the law, one from each budget by itself.
    law = optimum(split, found.points.C)
    if law is None or len(found.points) < 4:
        return None, []
    off = float(np.median(np.abs(np.log(law.N / found.points.N))))
    if off < VALLEYS_DIFFER:
        return None, []
    return found, [
        f"The law's N* lies {np.expm1(off):.0%} off the measured valleys, so N* and D* are read "
        f"from the valleys: the law describes the losses, not their minima."
    ]


# --- which law ---------------------------------------------------------------------------------


def check(points: Points) -> None:
    """Refuse points that no law can be drawn through."""
    if len(points) < 2:
        gone = f" ({len(points.dropped)} left out: {points.dropped[0]} …)" if points.dropped else ""
        raise DataError(
            f"points={len(points)}{gone}: a law needs at least two finished runs of different "
            f"compute; train {runs_across(points)}"
        )
    if points.C.max() < 1.5 * points.C.min():
        raise DataError(
            f"compute spans only {points.C.max() / points.C.min():.2f}×; add runs with at least 4× "
            f"more FLOPs (such as {power(4 * points.C.max())})"
        )
    # The best of the largest third must beat the best of the smallest: noise alone may swap two.
    order = np.argsort(points.C)
    third = max(1, len(order) // 3)
    early = points.loss[order[:third]].min()
    late = points.loss[order[-third:]].min()
    if late >= early:
        raise DataError(
            f"loss rises with compute (best {early:.4g} at the smallest budgets, {late:.4g} at the "
            f"largest): no law describes that; look for runs that diverged or stopped early, and "
            f"train {points.run[order[-1]]} again at a lower learning rate"
        )


def check_law(points: Points, law: Law) -> None:
    """Refuse a law that was asked for by name and lacks what it needs."""
    missing = len(law.parameters) - len(points)
    if missing > 0:
        raise DataError(
            f"law={law.name} has {len(law.parameters)} parameters and there are {len(points)} "
            f"points; train {missing} more, such as {runs_across(points)}, or choose --law auto"
        )
    for key in ("N", "D") if law.name not in ("compute", "power") else ():
        values = np.unique(getattr(points, key))
        if len(values) < 2:
            raise DataError(
                f"law={law.name}: all runs have {key} = {count(values[0])}; train "
                f"{runs_across(points)}"
            )
    if law.name == "moe" and (points.experts is None or len(np.unique(points.experts)) < 2):
        raise DataError("law=moe needs a column `experts` with two or more values (1 for dense)")
    if law.name == "data-constrained" and not _repeats(points):
        raise DataError(
            "law=data-constrained needs a column `unique` (distinct tokens) and runs that repeat "
            "data"
        )


def _repeats(points: Points) -> bool:
    # Fewer repeats count nearly like new tokens (arXiv 2305.16264) and do not show R*.
    return points.unique is not None and bool((1.5 * points.unique < points.D).any())


class Choice(NamedTuple):
    """A law, its backtest, and the reasons in plain words."""

    law: Law
    backtest: Backtest | None
    reasons: list[str]


def choose(points: Points) -> Choice:
    """The law for these points: what they can determine, and of several what forecasts best."""
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
        why = (
            f"{sizes} size{plural} not show the effect of N; add runs of {3 - sizes} or more others"
        )
    else:
        why = "N and D grow together in these runs, so their effects cannot be told apart"
    needed = max(2, 5 + SPARE - runs)
    more = f"{needed} more runs would, off this line and at equal compute: {runs_across(points)}."
    notes = []
    if sizes > 1 and points.D.max() < 1.1 * points.D.min():
        tokens = count(points.D[0])
        notes = [f"All runs saw the same {tokens} tokens: this law is about size alone."]
    if runs >= 3 + SPARE:
        law = LAWS["compute"]
        note = f"{why}; fitted L = E + K·C^−g along this ladder instead. {more}"
        return Choice(law, backtest(points, law, focused=True), [note, *notes])
    note = (
        f"{why}, nor a floor E; fitted the straight line L = K·C^−g instead. It has no floor, so "
        f"it is too optimistic far beyond the last run: use it within the measured range. {more}"
    )
    return Choice(LAWS["power"], None, [note, *notes])


def _tangled(points: Points) -> bool:
    """Whether N and D grow together, so that their effects cannot be told apart."""
    if len(np.unique(points.N)) < 3 or len(points) < 4:
        return True
    n = np.log(points.N)
    d = np.log(points.D)
    # Only the part of log D that does not follow log N separates their effects.
    slope, level = np.polyfit(n, d, 1)
    return bool(np.std(d - slope * n - level) < TANGLED)


def _by_backtest(points: Points) -> Choice:
    """The law with the smallest backtest error; the simpler one where both are exact."""
    names = ["chinchilla", "kaplan", "gamma"]
    if points.experts is not None and len(np.unique(points.experts)) > 1:
        names = ["moe"]
    elif _repeats(points):
        names = ["chinchilla", "data-constrained"]
    # Fitted as the final law will be, with weights and prior.
    tests = [backtest(points, LAWS[name], focused=True) for name in names]
    # EXACT makes laws equal that are both right to the last digits: then the first, simplest wins.
    best = min(
        (test for test in tests if test is not None),
        key=lambda test: max(test.score, EXACT),
        default=None,
    )
    if best is not None:
        return Choice(best.law, best, [])
    law = LAWS[names[0]]
    if len(points) < len(law.parameters) + SPARE:
        law = LAWS["chinchilla"]
    note = f"Too few runs to test {law.name} on held-out larger ones: its interval is a guess."
    return Choice(law, None, [note])
