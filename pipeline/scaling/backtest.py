"""Backtests: fit below a cut in compute, predict above it, and size the interval by the errors.

An interval from the bootstrap of the parameters alone covered 47% of held-out larger runs.
"""

from dataclasses import dataclass

import numpy as np

from pipeline.scaling.fitting import Fit, descend, screened
from pipeline.scaling.laws import Inputs, Law
from pipeline.scaling.points import Array, Points

CUTS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # share of the points, by compute, that is fitted
STARTS = 6
TOLERANCE = 1e-6  # relative, of the objective: two digits of an error are enough
FEWEST = 6  # runs below a cut; with fewer, the prior would decide
ENOUGH = 8  # errors needed for an average
MOST_POINTS = 1000  # evenly spaced by compute; more points do not change the errors
VALLEY = 0.025  # relative loss above the best for its compute at which a point has weight ½
WIDE_VALLEY = 0.05  # the same, for weights that only locate the valley
RECENT = 1.0  # power of compute: a run with a tenth of the largest compute has weight 0.1
TOP = 2  # runs per parameter with full weight, so that one distant run does not dominate
EFFECTIVE = 2  # smallest effective number of points (Kish) per parameter
EFFECTIVE_SHARE = 0.2  # smallest effective number of points, as a share of all
NEIGHBOR = 1.2  # budgets within 20% are one
# Public ladders, pooled: errors grow with the cube of the decades of compute beyond the fit, and
# with the square of the distance of log(D/N) from the range of the runs. All constants were chosen
# by hand with every public set in view (docs/LOG.md, 2026-11-17).
TAIL = 0.05  # of the runs' weight, on each side of the range of log(D/N)
LEAST_SPREAD = 0.15  # of log(D/N); runs on one line would make every other ratio infinitely far
TYPICAL = 0.009  # the scale of a typical public ladder
TYPICAL_CUTS = 8  # the typical scale counts as much as this many cuts
COVERAGE = 1.05  # half of a 95% interval in units of the scale, for very many runs
FEW = 30  # with this many runs, the interval is wider by a factor of √2
# Least width, from the scatter of the runs: factors of their noise and of the law's uncertainty.
# With many runs, the backtests measure the latter, and the scatter is mostly misfit of small runs.
NOISE_SHARE = 0.8
SPREAD_SHARE = 0.6
MANY = 30  # runs; beyond, the second factor falls as 1/runs


@dataclass(frozen=True)
class Backtest:
    """One law's errors, log(measured / predicted), each with its distance from the fit."""

    law: Law
    errors: Array
    ratio: Array  # compute over the largest fitted
    beyond: Array  # how far D/N is outside of the fitted runs (ratio_beyond)
    cut: Array  # the largest compute that the fit has seen

    @property
    def mean_error(self) -> float:
        """Mean absolute relative error of everything that was held out."""
        return float(np.abs(np.expm1(self.errors)).mean())

    @property
    def score(self) -> float:
        """For comparing laws: the mean error divided by `growth`; later cuts count more."""
        means, cuts = self._by_cut(1)
        return float(np.average(means, weights=np.sqrt(cuts)))

    @property
    def scale(self) -> float:
        """The root mean square of errors divided by `growth`, shrunk toward a typical ladder's."""
        squares, cuts = self._by_cut(2)
        # Errors of one cut come from one fit and are not independent, so a cut counts once.
        total = TYPICAL_CUTS * TYPICAL**2 + float(squares.sum())
        return float(np.sqrt(total / (TYPICAL_CUTS + len(cuts))))

    def _by_cut(self, power: int) -> tuple[Array, Array]:
        scaled = (np.abs(self.errors) / growth(self.ratio, self.beyond)) ** power
        cuts = np.unique(self.cut)
        return np.array([scaled[self.cut == cut].mean() for cut in cuts]), cuts


def growth(ratio: Array, beyond: Array) -> Array:
    """The factor by which errors grow with the distance of compute and of D/N from the runs."""
    decades = np.log10(np.maximum(ratio, 1))
    return np.asarray(1 + decades**3 + beyond**2)


def ratio_beyond(law: Law, runs: Points, weights: Array | None, places: Points) -> Array:
    """How far log(D/N) lies outside of the range of the runs, in their standard deviations.

    Both by the weights of the fit: a badly split run with little weight determines nothing there.
    """
    if law.name in ("compute", "power"):  # laws of compute alone
        return np.zeros(len(places))
    known = np.log(runs.D / runs.N)
    wanted = np.log(places.D / places.N)
    share = np.ones(len(runs)) if weights is None else weights
    order = np.argsort(known)
    below = np.cumsum(share[order]) / share.sum()
    low, high = np.interp([TAIL, 1 - TAIL], below, known[order])
    spread = np.sqrt(np.average((known - np.average(known, weights=share)) ** 2, weights=share))
    outside = np.maximum(low - wanted, wanted - high)
    return np.asarray(np.maximum(outside, 0) / max(spread, LEAST_SPREAD))


def half_width(scale: float, runs: int, ratio: Array, beyond: Array) -> Array:
    """Half of the 95% interval of log loss, for a law fitted to this many runs."""
    few = np.sqrt(1 + FEW / runs)
    return np.asarray(COVERAGE * scale * few * growth(ratio, beyond))


def scatter_shares(runs: int) -> tuple[float, float]:
    """The factors of the runs' noise and of the law's uncertainty in the least width."""
    return NOISE_SHARE, SPREAD_SHARE * min(1.0, MANY / runs)


def focus(points: Points, law: Law, width: float = VALLEY) -> Array:
    """Weights for forecasting, at most 1: high near the largest compute and the best loss for it.

    No law here fits four decades of compute and badly split runs as well, and forecasts need
    neither (docs/SCALING.md).
    """
    top = np.sort(points.C)[-min(TOP * len(law.parameters), len(points))]
    recent = np.minimum(points.C / top, 1) ** RECENT
    return _softened(points, law, recent * _near_valley(points, width))


def near_valley(points: Points, law: Law) -> Array:
    """Weights if a few large runs would decide N*: equal for every compute, lower for badly split
    runs."""
    return _softened(points, law, _near_valley(points, WIDE_VALLEY))


def _near_valley(points: Points, width: float) -> Array:
    order = np.argsort(points.C)
    lowest = np.minimum.accumulate(points.loss[order])
    # The best loss up to each run's own budget, which ends at the last run within NEIGHBOR of it.
    last = np.searchsorted(points.C[order], NEIGHBOR * points.C, side="right") - 1
    best = lowest[last]
    return np.asarray(1 / (1 + ((points.loss / best - 1) / width) ** 2))


def _softened(points: Points, law: Law, sharp: Array) -> Array:
    """Raise the weights to a power that leaves enough effective points (Kish's number)."""
    enough = max(EFFECTIVE * len(law.parameters), EFFECTIVE_SHARE * len(points))
    for exponent in np.linspace(1, 0, 21):
        weights: Array = sharp**exponent
        if weights.sum() ** 2 / (weights**2).sum() >= enough:
            break
    return np.asarray(weights / weights.max())


def backtest(points: Points, law: Law, *, focused: bool) -> Backtest | None:
    """Test the law as `study` fits it; None if there are too few errors for an average.

    All cuts are fitted at once; points above a cut have weight zero.
    """
    if len(points) > MOST_POINTS:
        points = points.take(np.argsort(points.C)[:: -(-len(points) // MOST_POINTS)])
    x = Inputs.of(points)
    edges: list[float] = []
    starts: list[Array] = []
    weights: list[Array] = []
    for cut in CUTS:
        edge = float(points.C[np.quantile(points.C, cut) >= points.C].max())
        below = edge >= points.C
        enough = FEWEST if focused else len(law.parameters) + 2
        if below.sum() < enough or below.all() or edge in edges:
            continue
        weight = below.astype(float)
        if focused:
            weight[below] = focus(points.take(below), law)
        edges.append(edge)
        starts.append(screened(points, law, x, STARTS, weight))
        weights.append(np.repeat(weight[None], len(starts[-1]), axis=0))
    if not edges:
        return None
    every = np.concatenate(starts)
    theta, value = descend(
        points, law, x, every, np.concatenate(weights), forecasting=focused, tolerance=TOLERANCE
    )
    bounds = np.cumsum([len(tried) for tried in starts])[:-1]
    tests = []
    for edge, thetas, values, weight in zip(
        edges, np.split(theta, bounds), np.split(value, bounds), weights, strict=True
    ):
        fit = Fit(law, thetas[np.argmin(values)], x, points, 0.0, 0.0, weight[0])
        tests.append(_errors_above(fit, edge))
    found = Backtest(law, *map(np.concatenate, zip(*tests, strict=True)))
    return found if len(found.errors) >= ENOUGH else None


def _errors_above(fit: Fit, edge: float) -> tuple[Array, Array, Array, Array]:
    above = fit.points.take(edge < fit.points.C)
    errors = np.log(above.loss / fit.predict(above))
    below = edge >= fit.points.C
    weights = None if fit.weights is None else fit.weights[below]
    beyond = ratio_beyond(fit.law, fit.points.take(below), weights, above)
    return errors, above.C / edge, beyond, np.full(len(above), edge)
