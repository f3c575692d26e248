"""Forecast the accuracy on a task by two methods, weighted by their errors in backtests.

    two-step   N, D → bits per byte of the right answers (the law of `study`) → accuracy
    direct     compute → accuracy

In both, accuracy is a logistic curve x → accuracy between chance and a ceiling, where x is the bits
per byte (as in arXiv 2412.04403) or log compute. A few runs do not determine its parameters, so
there is a weak prior. Every resample of the bootstrap draws the center of that prior, so that the
interval is as wide as the prior where the runs give no information.

A backtest of a few runs seldom shows which method is better. So the worse one is used too if its
error is at most twice as large: the forecast is the mean of the two, weighted by the inverse
squares of their errors, and its interval contains both intervals.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from pipeline.config.layers import reload
from pipeline.errors import ConfigError, DataError
from pipeline.runs.history import Run
from pipeline.scaling.backtest import Backtest
from pipeline.scaling.fitting import Rows, minimize
from pipeline.scaling.points import Array, Points, runs_across
from pipeline.scaling.predict import Forecast
from pipeline.scaling.study import Study
from pipeline.tasks.questions import read_tasks

# The prior, with x in standard deviations of the runs: middle, log slope, the logit of the ceiling
# between chance and 1, and the logit of chance, which is fitted if it is not given.
CENTERS = np.array([-1.0, 0.0, 2.5, -1.1])
SPREADS = np.array([2.0, 1.0, 1.0, 1.0])
STARTS = np.array([[m, s, 2.5, -1.1] for m in (-3.0, -1.0, 0.0, 1.0) for s in (-0.7, 0.7)])
HUBER = 1.345  # standard deviations: 95% efficient for normal errors
FIRST_SIGMA = 0.03  # first guess of the scatter of accuracies: the sampling noise of 300 questions
SMALLEST_SIGMA = 0.002
RESAMPLES = 500
FEWEST = 3  # runs for a fit
# Systematic error of a forecast next to the largest run, in accuracy. It grows by PER_DECADE times
# itself with each decade of compute: linearly, because accuracy is bounded.
TYPICAL = 0.005
TYPICAL_CUTS = 4  # the typical error counts as much as this many cuts of the backtest
PER_DECADE = 3.0
NORMAL_95 = float(special.ndtri(0.975))
ABOVE_CHANCE = 2.5  # standard deviations by which a run is clearly above chance
CLOSE = 2.0  # the ratio of backtest errors up to which both methods are used


@dataclass(frozen=True)
class TaskForecast:
    """The accuracy of one run on a task."""

    name: str
    N: float
    D: float
    C: float
    task: str
    accuracy: float
    low: float
    high: float
    extrapolation: float  # compute over the largest fitted
    method: str  # the method that was used, or "combined"
    bits_per_byte: dict[str, float]
    methods: dict[str, dict[str, Any]]  # the figures of both methods


class Curves(NamedTuple):
    """Logistic curves of accuracy, one per row of theta, that decrease with x."""

    theta: Array  # (R, 3), or (R, 4) if chance is fitted
    mean: float  # of the runs' x
    spread: float  # standard deviation of the runs' x
    chance: float | None  # None: fitted

    def at(self, x: Array) -> Array:
        """Return the accuracies, (R, n), at x of shape (n) or (R, n)."""
        return _logistic(self.theta, (x - self.mean) / self.spread, self.chance)[0]

    def values(self) -> dict[str, float]:
        """Return the parameters of the first curve, in the units of x."""
        middle, log_slope, top, *floor = map(float, self.theta[0])
        chance = float(special.expit(floor[0])) if self.chance is None else self.chance
        return {
            "chance": chance,
            "ceiling": chance + (1 - chance) * float(special.expit(top)),
            "middle": self.mean + self.spread * middle,
            "slope": float(np.exp(log_slope)) / self.spread,
        }


def _logistic(theta: Array, z: Array, chance: float | None) -> tuple[Array, Array]:
    """Return the accuracy, (R, n), and its gradient by the P parameters, (P, R, n)."""
    middle, log_slope, ceiling = (column[:, None] for column in theta.T[:3])
    floor = np.asarray(special.expit(theta.T[3])[:, None] if chance is None else chance)
    slope = np.exp(log_slope)
    u = slope * (middle - z)
    rise = special.expit(u)
    top = special.expit(ceiling)
    span = (1 - floor) * top
    bend = span * rise * (1 - rise)
    gradient = [bend * slope, bend * u, span * (1 - top) * rise]
    if chance is None:
        gradient.append(floor * (1 - floor) * (1 - top * rise))
    return floor + span * rise, np.stack(gradient)


def fit_curves(
    x: Array,
    accuracy: Array,
    weights: Array,
    sigma: float,
    chance: float | None,
    *,
    starts: Array = STARTS,
    centers: Array = CENTERS,
) -> Curves:
    """Fit the best curve for each row of `weights`, (R, n), by Huber's loss and the prior.

    `starts` are tried for every row; `centers` of the prior may differ between rows.
    """
    size = 4 if chance is None else 3
    rows_of_starts = np.repeat(np.arange(len(weights)), len(starts))
    weight = weights[rows_of_starts]
    center = np.broadcast_to(centers, (len(weights), 4))[rows_of_starts, :size]
    precision = SPREADS[:size] ** -2.0
    mean = float(x.mean())
    spread = float(x.std()) or 1.0
    z = (x - mean) / spread

    def objective(theta: Array, rows: Rows) -> tuple[Array, Array]:
        value, jacobian = _logistic(theta, z, chance)
        residual = (value - accuracy) / sigma
        clipped = np.clip(residual, -HUBER, HUBER)
        weighted = weight[rows] * clipped
        away = theta - center[rows]
        total = (weighted * (residual - 0.5 * clipped)).sum(axis=1)
        gradient = np.einsum("pri,ri->rp", jacobian, weighted) / sigma
        return total + 0.5 * (precision * away**2).sum(axis=1), gradient + precision * away

    def metric(theta: Array, rows: Rows) -> Array:
        jacobian = _logistic(theta, z, chance)[1] / sigma
        normal = np.einsum("pri,qri->rpq", jacobian * weight[rows], jacobian, optimize=True)
        return np.asarray(normal + np.diag(precision))

    every = np.tile(starts[:, :size], (len(weights), 1))
    theta, value = minimize(objective, metric, every, np.arange(len(every)), tolerance=1e-6)
    best = np.nan_to_num(value, nan=np.inf).reshape(len(weights), -1).argmin(axis=1)
    chosen = theta.reshape(len(weights), -1, size)[np.arange(len(best)), best]
    return Curves(chosen, mean, spread, chance)


class Method(NamedTuple):
    """One way to forecast the accuracy, fitted to the runs."""

    x: Array
    accuracy: Array
    curve: Curves
    sigma: float  # scatter of an accuracy around the curve
    freedom: float  # degrees of freedom of sigma
    test: Backtest | None  # errors of accuracies: measured minus predicted

    def half_width(self, ratio: Array) -> Array:
        """Return half of the backtest's 95% interval; `ratio` is compute over the largest run's."""
        total = TYPICAL_CUTS * TYPICAL**2
        edges = np.unique(self.test.cut) if self.test else ()
        for edge in edges:
            assert self.test is not None
            at = self.test.cut == edge
            beyond_scatter = np.maximum(self.test.errors[at] ** 2 - self.sigma**2, 0)
            total += float((beyond_scatter / _growth(self.test.ratio[at]) ** 2).mean())
        # Shrunk toward a typical ladder, as `Backtest.scale` of losses is.
        systematic = np.sqrt(total / (TYPICAL_CUTS + len(edges))) * _growth(ratio)
        return np.asarray(NORMAL_95 * np.sqrt(self.sigma**2 + systematic**2))

    def draws(self, x: Array) -> Array:
        """Draw accuracies of new runs at x, (R, n), from resampled curves and the scatter."""
        rng = np.random.default_rng(0)
        # Rubin's Bayesian bootstrap, in which every resample contains all runs.
        weights = rng.dirichlet(np.ones(len(self.x)), len(x)) * len(self.x)
        centers = rng.normal(CENTERS, SPREADS, (len(x), 4))
        start = np.concatenate([self.curve.theta, CENTERS[None, self.curve.theta.shape[1] :]], 1)
        curves = fit_curves(
            *(self.x, self.accuracy, weights, self.sigma, self.curve.chance),
            starts=start,
            centers=centers,
        )
        return np.asarray(curves.at(x) + self.sigma * rng.standard_t(self.freedom, x.shape))


def fit_method(
    points: Points, x: Array, chance: float | None, held_out: "HeldOut | None"
) -> Method:
    """Fit accuracy against x to all runs, and to the runs below each cut of the backtest."""
    assert points.accuracy is not None
    count = len(points)
    sigma = FIRST_SIGMA
    # The first fit gives the scatter, which sets the weight of the prior in the second fit.
    for _ in range(2):
        curve = fit_curves(x, points.accuracy, np.ones((1, count)), sigma, chance)
        residual = points.accuracy - curve.at(x)[0]
        # The prior adds information, as in `intervals.scatter`, so that the freedom is never zero.
        freedom = max(count - curve.theta.shape[1], count / 3)
        sigma = max(float(np.sqrt((residual**2).sum() / freedom)), SMALLEST_SIGMA)
    test = None
    if held_out is not None:
        edges = np.unique(held_out.test.cut)
        below = (edges[:, None] >= points.C).astype(float)
        curves = fit_curves(x, points.accuracy, below, sigma, chance)
        predicted = curves.at(held_out.x)[
            np.searchsorted(edges, held_out.test.cut), np.arange(len(held_out.x))
        ]
        errors = points.accuracy[held_out.rows] - predicted
        test = replace(held_out.test, errors=errors, beyond=np.zeros(len(errors)))
    return Method(x, points.accuracy, curve, sigma, max(freedom, 3.0), test)


def _growth(ratio: Array) -> Array:
    return np.asarray(1 + PER_DECADE * np.log10(np.maximum(ratio, 1)))


class HeldOut(NamedTuple):
    """The runs above each cut of a backtest."""

    test: Backtest
    rows: Rows  # their indices among the points
    x: Array  # the bits per byte that the law below the cut predicts, or the log compute


def fit_methods(study: Study, chance: float | None) -> dict[str, Method]:
    """Fit both methods to forecast the accuracy."""
    points = study.fit.points
    compute = -np.log(points.C)  # negative, because curves decrease with x
    by_bits = by_compute = None
    if study.backtest is not None:
        test = study.backtest
        edges = dict.fromkeys(test.cut.tolist())
        rows = np.concatenate([np.flatnonzero(edge < points.C) for edge in edges])
        if len(rows) == len(test.errors):  # a backtest of very many points uses only some of them
            by_bits = HeldOut(test, rows, points.loss[rows] * np.exp(-test.errors))
            by_compute = HeldOut(test, rows, compute[rows])
    return {
        "two-step": fit_method(points, points.loss, chance, by_bits),
        "direct": fit_method(points, compute, chance, by_compute),
    }


def forecast(
    study: Study, task: str, made: Sequence[Forecast], chance: float | None
) -> tuple[list[TaskForecast], list[str]]:
    """Return the accuracies of the runs whose bits per byte `made` forecasts, and warnings."""
    if len(study.fit.points) < FEWEST:
        raise DataError(
            f"task={task}: a curve needs {FEWEST} finished runs with a score, and there are "
            f"{len(study.fit.points)}; train {runs_across(study.fit.points)}"
        )
    methods = fit_methods(study, chance)
    weights = _weights(methods)
    # Sample x for each method: the bits per byte are uncertain, the compute is not.
    bits = np.array([one.loss for one in made])
    spread = np.log([one.high / one.loss for one in made]) / NORMAL_95
    noise = np.random.default_rng(1).normal(size=(RESAMPLES, len(made)))
    compute = -np.log([one.C for one in made])
    certain = np.broadcast_to(compute, noise.shape)
    ratio = np.array([one.extrapolation for one in made])
    figures = {
        "two-step": _figures(methods["two-step"], bits, bits * np.exp(spread * noise), ratio),
        "direct": _figures(methods["direct"], compute, certain, ratio),
    }
    found = []
    for i, one in enumerate(made):
        used = {name: figures[name][i] for name in weights}
        found.append(
            TaskForecast(
                *(one.name, one.N, one.D, one.C, task),
                accuracy=sum(weights[name] * used[name]["accuracy"] for name in used),
                low=min(figure["low"] for figure in used.values()),
                high=max(figure["high"] for figure in used.values()),
                extrapolation=one.extrapolation,
                method=next(iter(weights)) if len(weights) == 1 else "combined",
                bits_per_byte={"value": one.loss, "low": one.low, "high": one.high},
                methods={name: rows[i] for name, rows in figures.items()},
            )
        )
    best = methods[max(weights, key=lambda name: weights[name])]
    return found, _warnings(task, best, study.fit.points, fitted=chance is None)


def _weights(methods: dict[str, Method]) -> dict[str, float]:
    """Return the weights of the methods that are used, which add up to 1."""
    # `score` divides errors by their growth and weights later cuts more, as for choosing laws.
    scores = {name: one.test.score for name, one in methods.items() if one.test}
    if not scores:
        return {"two-step": 1.0}
    least = max(min(scores.values()), SMALLEST_SIGMA)
    close = {name: max(score, least) for name, score in scores.items() if score <= CLOSE * least}
    total = sum(score**-2.0 for score in close.values())
    return {name: score**-2.0 / total for name, score in close.items()}


def _figures(method: Method, x: Array, sampled: Array, ratio: Array) -> list[dict[str, Any]]:
    """Return a method's accuracies with both intervals; the final interval contains both."""
    center = method.curve.at(x)[0]
    low, high = np.percentile(method.draws(sampled), [2.5, 97.5], axis=0)
    half = method.half_width(ratio)
    ends = {
        "low": np.minimum(low, center - half),
        "high": np.maximum(high, center + half),
        "bootstrap_low": low,
        "bootstrap_high": high,
        "backtest_low": center - half,
        "backtest_high": center + half,
    }
    test = method.test
    about = {
        "curve": method.curve.values(),
        "scatter": method.sigma,
        "backtest_error": float(np.abs(test.errors).mean()) if test else None,
        "backtest_score": test.score if test else None,
        "backtest_errors": len(test.errors) if test else 0,
    }
    return [
        {"accuracy": float(center[i])}
        | {key: float(np.clip(values[i], 0, 1)) for key, values in ends.items()}
        | about
        for i in range(len(x))
    ]


def _warnings(task: str, used: Method, points: Points, *, fitted: bool) -> list[str]:
    """Return warnings about a forecast of this task."""
    found = []
    if used.test is None:
        found.append(
            f"{len(points)} runs are too few to test forecasts of {task} on held-out larger ones: "
            f"the two-step forecast is used untested."
        )
    chance = used.curve.values()["chance"]
    if fitted:
        found.append(f"Chance was fitted ({chance:.1%}); give it, as --chance 0.25.")
    best = float(used.accuracy.max())
    if best < chance - ABOVE_CHANCE * FIRST_SIGMA:
        below = f"Every run is below chance ({chance:.1%}; the best has {best:.1%})"
        found.append(f"{below}: check --chance and the answers of the questions.")
    elif best < chance + ABOVE_CHANCE * used.sigma:
        found.append(
            f"No run is clearly above chance ({chance:.1%}; the best has {best:.1%}): the interval "
            f"comes from the prior. Train larger runs, or use easier questions."
        )
    order = np.argsort(points.C)
    third = max(1, len(order) // 3)
    early = float(used.accuracy[order[:third]].mean())
    late = float(used.accuracy[order[-third:]].mean())
    if late < early - used.sigma:
        found.append(
            f"Accuracy falls with compute ({early:.1%} to {late:.1%}), which no curve here does: "
            f"check the questions."
        )
    return found


def chance_of(runs: Sequence[Run], task: str) -> float | None:
    """Return the accuracy of guessing, from the file of questions that the last run names."""
    last = runs[-1]
    try:
        # MLflow has the list as text, and no config.toml to read.
        listed = last.record.get("tasks")
        files = json.loads(listed) if listed else reload(last.path / "config.toml").eval.tasks
        return {one.name: one.chance for one in read_tasks(files)}.get(task)
    except (ConfigError, DataError, ValueError, TypeError):  # the file was moved, the list was cut
        return None
