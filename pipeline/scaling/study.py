"""From points to a law: choose and fit it, estimate its uncertainty, and collect warnings.

One law is printed, drawn and used for every loss and for N* and D*: `Study.fit`. With `auto` it is
fitted for forecasting: runs near the largest compute have the largest weights (backtest.focus),
and a weak prior from published laws (laws.prior) helps where a few runs do not determine a
parameter. A law that the user names is fitted as in its paper, with equal weights.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from pipeline.errors import ConfigError, DataError
from pipeline.scaling import frontier, intervals, quality, two_groups
from pipeline.scaling.backtest import (
    TYPICAL,
    WIDE_VALLEY,
    Backtest,
    backtest,
    focus,
    half_width,
    near_valley,
    ratio_beyond,
    scatter_shares,
)
from pipeline.scaling.choice import SPARE, check, check_law, choose, exact
from pipeline.scaling.fitting import Fit, Show, fit, silent, vpnls
from pipeline.scaling.laws import LAWS, Law
from pipeline.scaling.points import Array, Points

NAMES = ("auto", *LAWS, "isoflop", "parabola", "envelope", "vpnls")
# Above this many points, the scatter replaces the bootstrap and E's profile: they agree there, and
# a single refit takes seconds.
MOST_RESAMPLED = 20_000
RESAMPLES = 1000  # of `launch fit`, of the page and of a sweep, so that their intervals are equal
LESS_CERTAIN = 2.0  # times the error of N* that larger weights for larger runs may cause
# Least share of draws with an optimum, which needs positive exponents; below it, intervals of N*,
# D*, a and b are unknown.
LEAST_WITH_OPTIMUM = 0.5
VALLEYS_DIFFER = 0.1  # difference in log N* above which a warning compares law and valleys

# We report a bad fit ourselves, so numpy's warnings are off.
quiet = np.errstate(over="ignore", divide="ignore", invalid="ignore")


@dataclass(frozen=True)
class Study:
    """A fitted law with its uncertainty, and its warnings in plain words."""

    name: str
    fit: Fit  # the law: printed, drawn, and used for every loss, N* and D*
    scatter: intervals.Scatter  # of the runs around the law
    backtest: Backtest | None  # None if it has too few errors for an average
    scale: float  # of errors beyond the fit (Backtest.scale); NaN without a backtest
    profile: intervals.Profile | None
    minima: frontier.Minima | None  # valleys or curves that give N* and D*, if a user wants them
    valleys: frontier.Minima | None  # measured valleys, for comparison with the law
    draws: Array | None  # natural parameters of the bootstrap, (R, P)
    warnings: tuple[str, ...]
    goodness: quality.Goodness | None  # with equal weights; None without spare points

    @quiet
    def optimum(self, C: Array, experts: Array | None = None) -> Points | None:
        """The compute-optimal N and D with the law's loss; None for a law of compute alone."""
        if self.minima is None:
            best = frontier.optimum(self.fit, C, experts)
        else:
            N, D = self.minima.path(C)
            best = frontier.at(self.fit.points, C, N, D, experts=experts)
        return None if best is None else replace(best, loss=self.fit.predict(best))

    @cached_property
    def sampled(self) -> Array | None:
        """Natural parameters of the law, from the bootstrap or else from the scatter."""
        if self.draws is not None or not np.isfinite(self.scatter.covariance).all():
            return self.draws
        if self.scatter.condition > intervals.SINGULAR:
            return (
                None  # the points do not determine some direction, so draws along it mean nothing
            )
        rng = np.random.default_rng(0)
        # Where the points are mostly noise, rounding gives the covariance a negative eigenvalue.
        spread = self.scatter.covariance
        thetas = rng.multivariate_normal(self.fit.theta, spread, 500, check_valid="ignore")
        return self.fit.law.natural(thetas, self.fit.inputs)

    @quiet
    def optimum_range(self, C: Array) -> dict[str, tuple[Array, Array]] | None:
        """Return 95% intervals of N* and D* at each compute, and of a and b; None if unknown."""
        drawn = None if self.minima is not None else self.sampled
        terms = None if drawn is None else frontier.terms_of(self.fit.law, drawn, np.ones(1))
        if drawn is None or terms is None:
            return None
        has_optimum = terms[:, [1, 3]].min(axis=1) > 0
        if has_optimum.mean() < LEAST_WITH_OPTIMUM:
            return None
        a_b = frontier.exponents(self.fit.law, drawn)
        assert a_b is not None
        a_b[~has_optimum] = np.nan
        unit_flops = frontier.UnitFlops.of(self.fit.points)
        log_c = np.log(C)
        splits = [frontier.best_split(terms, np.full(len(terms), one), unit_flops) for one in log_c]
        n = np.array(splits).T
        d = log_c - n - np.log(unit_flops.each(np.exp(n)))
        columns = {"N": n, "D": d, "a": a_b[:, :1], "b": a_b[:, 1:]}
        found = {}
        for key, values in columns.items():
            low, high = np.nanpercentile(values, [2.5, 97.5], axis=0)
            found[key] = (np.exp(low), np.exp(high)) if key in "ND" else (low, high)
        return found

    @quiet
    def interval(self, places: Points) -> tuple[Array, Array, Array]:
        """Return the law's loss and its 95% interval, from backtests and at least the scatter."""
        loss = self.fit.predict(places)
        ratio = places.C / self.fit.points.C.max()
        runs = len(set(self.fit.points.run))  # several points of one run are not independent
        beyond = ratio_beyond(self.fit.law, self.fit.points, self.fit.weights, places)
        tested = half_width(self.scale, runs, ratio, beyond)
        shares = (1.0, 1.0) if self.backtest is None else scatter_shares(runs)
        # fmax ignores NaN: where one of the two is unknown, the other is used.
        half = np.fmax(self.scatter.half_width(places, *shares), tested)
        return loss, loss * np.exp(-half), loss * np.exp(half)

    def frontier(self, C: Array) -> Points:
        """Return the compute-optimal runs; N and D are NaN for a law of compute alone."""
        best = self.optimum(C)
        unknown = C * np.nan
        return frontier.at(self.fit.points, C, unknown, unknown) if best is None else best

    @quiet
    def parameters(self) -> dict[str, dict[str, float]]:
        """Return value, standard error and 95% interval, from the bootstrap or else the scatter."""
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
        if self.profile is not None and (self.draws is None or self.fit.weights is not None):
            table["E"] |= {"low": self.profile.low, "high": self.profile.high}
        return table

    def to_json(self) -> dict[str, Any]:
        test = self.backtest
        of_e = self.profile
        beside = self.minima or self.valleys
        return {
            "law": self.name,
            "formula": self.fit.law.formula,
            "parameters": self.parameters(),
            "errors_from": "scatter" if self.draws is None else "bootstrap",
            "objective": self.fit.objective,
            "exponents": self._exponents(),
            "points": {"used": len(self.fit.points), "dropped": list(self.fit.points.dropped)},
            "convention": self.fit.points.convention,
            "starts_agreeing": self.fit.agreement,
            "goodness": self.goodness and asdict(self.goodness),
            "backtest": test
            and {"mean_absolute_error": test.mean_error, "errors": len(test.errors)},
            "profile_E": of_e and {"low": of_e.low, "high": of_e.high},
            "minima": beside and _rows(beside.points),
            "valleys": self.valleys and {"a": self.valleys.a, "b": self.valleys.b},
            "warnings": list(self.warnings),
        }

    def _exponents(self) -> dict[str, Any] | None:
        if self.minima is not None:
            return {"a": self.minima.a, "b": self.minima.b, "from": "valleys"}
        natural = self.fit.law.natural(self.fit.theta[None], self.fit.inputs)
        a_b = frontier.exponents(self.fit.law, natural)
        if a_b is None:
            return None
        found = {"a": float(a_b[0, 0]), "b": float(a_b[0, 1]), "from": "law"}
        span = self.optimum_range(np.ones(1)) or {}
        for key in ("a", "b") if span else ():
            found |= {f"{key}_low": float(span[key][0][0]), f"{key}_high": float(span[key][1][0])}
        return found


def _rows(points: Points) -> list[dict[str, float]]:
    keys = ("C", "N", "D", "loss")
    return [{key: float(getattr(points, key)[i]) for key in keys} for i in range(len(points))]


def _span(name: str, value: float, half: float) -> tuple[float, float]:
    """Return a 95% interval; a coefficient's is symmetric in its logarithm, as it is positive."""
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
    profiled: bool = True,
    show: Show = silent,
) -> Study:
    """Fit the named law, or with `auto` the one of the determined laws that forecasts best.

    `tested` also backtests a named law, for the intervals of its forecasts; `auto` always does.
    Without `profiled`, the range of E is not computed, which takes half of the time.
    """
    check(points)
    if law not in NAMES:
        raise ConfigError(f"law={law!r} is unknown; choose one of {', '.join(NAMES)}")
    notes = list(points.warnings)
    if law != "envelope":  # the rows of a curve are not comparable: their rate had not decayed
        notes += quality.point_warnings(points)
    chosen, test, minima, reasons = _choose(points, law)
    notes += reasons
    if minima is not None:
        points = minima.points
    check_law(points, chosen)
    notes += quality.column_warnings(points, chosen.name)
    # `even` has equal weights, as in the papers. `result` is printed and used.
    estimate = vpnls if law == "vpnls" else partial(fit, law=chosen, full_grid=full_grid, show=show)
    result = even = estimate(points)
    valleys = None
    scale = float("nan")
    if law != "auto" and tested:
        test = backtest(points, chosen, focused=False)
        if law == "vpnls":
            notes.append("The interval is that of --law chinchilla, which the backtests used.")
    if law == "auto":
        scale = TYPICAL if test is None else test.scale
        # If the points lie exactly on a law, a prior would only distort the fit.
        if not exact(even) and chosen.name != "power":
            result = _for_forecasts(points, chosen, full_grid=full_grid)
        valleys, reasons = _valleys_beside(result)
        notes += reasons
    elif test is not None:
        scale = test.scale
    # The uncertainty of the result: the range of E, the bootstrap and the scatter.
    wanted = profiled and law != "vpnls" and len(points) <= MOST_RESAMPLED
    of_e = _profile(even, result, free=law == "auto") if wanted else None
    draws = _draws(result, resamples, show)
    spread = intervals.scatter(result)
    notes += intervals.interval_warnings(result, spread, of_e, notes)
    fitted = quality.goodness(even)
    notes += quality.fit_warnings(fitted)
    if profiled and minima is None:
        notes += two_groups.group_warnings(even)
    if wanted and minima is None:
        notes += quality.edge_warnings(even, [one.run for one in fitted.outliers] if fitted else [])
    found = (result, spread, test, scale, of_e, minima, valleys, draws)
    done = Study(chosen.name if law == "auto" else law, *found, tuple(notes), fitted)
    return replace(done, warnings=(*notes, *intervals.exponent_warnings(done.parameters(), notes)))


def _draws(fitted: Fit, resamples: int, show: Show) -> Array | None:
    """Natural parameters of the bootstrap, (R, P)."""
    # Resamples of a few runs repeat some and lack others, so the scatter is better.
    few = len(set(fitted.points.run)) < 4 * len(fitted.law.parameters)
    if resamples < 2 or few or len(fitted.points) > MOST_RESAMPLED:
        return None
    return fitted.law.natural(intervals.bootstrap(fitted, resamples, show=show), fitted.inputs)


def _for_forecasts(points: Points, law: Law, *, full_grid: bool) -> Fit:
    """Fit the law for forecasting, with larger weights for larger runs.

    If a few of these would decide N*, every compute has the same weight (docs/LOG.md).
    """
    weights = focus(points, law)
    if law.name in ("chinchilla", "gamma"):
        # Judged by Chinchilla's law: the errors of N* of the γ-law do not show it.
        simple = LAWS["chinchilla"]
        even = fit(points, simple, weights=near_valley(points, simple))
        recent = fit(points, simple, weights=focus(points, simple, WIDE_VALLEY))
        if _split_error(recent) > LESS_CERTAIN * _split_error(even):
            weights = near_valley(points, law)
    return fit(points, law, weights=weights, full_grid=full_grid)


def _split_error(fitted: Fit) -> float:
    """Return the standard error of log N* at ten times the largest compute, by the delta method."""
    step = 1e-5  # in logarithms, as in Scatter.standard_errors
    unit = np.eye(len(fitted.theta))
    nudged = fitted.theta + step * np.concatenate([unit, -unit])
    terms = frontier.terms_of(fitted.law, fitted.law.natural(nudged, fitted.inputs), np.ones(1))
    assert terms is not None
    log_c = np.full(len(terms), np.log(10 * fitted.points.C.max()))
    up, down = np.split(frontier.best_split(terms, log_c, frontier.UnitFlops.of(fitted.points)), 2)
    slope = (up - down) / (2 * step)
    return float(np.sqrt(slope @ intervals.scatter(fitted).covariance @ slope))


def _choose(
    points: Points, law: str
) -> tuple[Law, Backtest | None, frontier.Minima | None, Sequence[str]]:
    """Return the law to fit, its backtest, minima and reasons. Valleys and envelopes replace the
    points by their minima."""
    match law:
        case "auto":
            chosen, test, reasons = choose(points)
            return chosen, test, None, reasons
        case "isoflop" | "parabola" | "envelope":
            if law == "envelope":
                minima = frontier.envelope(points)
            else:
                minima = frontier.isoflop(points, "akima" if law == "isoflop" else "parabola")
            few = len(minima.points) < 4
            return LAWS["power" if few else "compute"], None, minima, minima.notes
        case _:
            return LAWS["chinchilla" if law == "vpnls" else law], None, None, ()


def _profile(even: Fit, result: Fit, *, free: bool) -> intervals.Profile | None:
    """Return E's profile without weights or prior: the values that the points alone allow.

    Chinchilla's law is the γ-law with γ = 1. If the user did not name it (`free`), the interval
    does not assume γ = 1. It always includes the E of the law itself.
    """
    of_e = intervals.profile(even, intervals.scatter(even))
    if of_e is None:
        return None
    gamma = LAWS["gamma"]
    enough = len(even.points) >= len(gamma.parameters) + SPARE
    if free and enough and even.law.name == "chinchilla":
        wider = fit(even.points, gamma)
        other = intervals.profile(wider, intervals.scatter(wider))
        if other is not None:
            of_e = of_e.including(other.low, other.high)
    return of_e.including(result.values["E"], result.values["E"])


def _valleys_beside(result: Fit) -> tuple[frontier.Minima | None, list[str]]:
    """Return the measured isoFLOP valleys, and a note if the law's N* differs from them."""
    if result.points.experts is not None or result.points.unique is not None:
        return None, []  # a valley would mix architectures, or new data with repeated
    try:
        found = frontier.isoflop(result.points)
    except DataError:
        return None, []
    # Two independent estimates of N*: from the law, and from each budget alone.
    law = frontier.optimum(result, found.points.C)
    if law is None or len(found.points) < 4:
        return None, []
    off = float(np.median(np.abs(np.log(law.N / found.points.N))))
    if off < VALLEYS_DIFFER:
        return found, []
    return found, [
        f"The minima of the measured valleys differ by {np.expm1(off):.0%} from the law's N* and "
        f"grow as C^{found.a:.2f}. N* and D* follow the law; compare both at the measured budgets."
    ]
