"""The uncertainty of a fit: the bootstrap, standard errors, the profile of E, and warnings."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special  # importing scipy.stats would be a third of the start of `launch fit`

from pipeline.scaling.fitting import DELTA, Fit, Projected, Rows, Show, descend, minimize, silent
from pipeline.scaling.laws import REPEAT_BOUNDS, Inputs, prior
from pipeline.scaling.points import Array, Points, runs_across
from pipeline.units import count

# The exponents of all laws, each with the variable that it belongs to.
EXPONENT_OF = {"alpha": "N", "beta": "D", "g": "C", "alpha_N": "N", "alpha_D": "D"}
STEEPEST = 2.0  # published exponents are below 1
SINGULAR = 1e10  # condition number above which parameters compensate for each other


def bootstrap(fit: Fit, resamples: int, seed: int = 0, show: Show = silent) -> Array:
    """Return the theta of refits to resampled runs, drawn with replacement.

    All rows of a run are drawn together: they share its seed and data order, so they are not
    independent.
    """
    names, cluster = np.unique(np.array(fit.points.run), return_inverse=True)
    even = np.full(len(names), 1 / len(names))
    draws = np.random.default_rng(seed).multinomial(len(names), even, resamples)
    # How often a run was drawn is its weight, so that all refits descend as one array.
    weights = draws.astype(float)[:, cluster] * (1.0 if fit.weights is None else fit.weights)
    if isinstance(fit.law, Projected):
        return refit_vpnls(fit, weights)
    # Every refit starts from the optimum of all runs: a resample's own optimum is near it.
    starts = np.repeat(fit.theta[None], resamples, axis=0)
    problem = (fit.points, fit.law, fit.inputs, starts, weights)
    forecasting = fit.weights is not None
    return descend(*problem, forecasting=forecasting, tolerance=1e-8, show=show)[0]


def refit_vpnls(fit: Fit, weights: Array) -> Array:
    """Theta of the same least squares for each row of `weights`, descended from this optimum."""
    loss = fit.points.loss

    def objective(theta: Array, rows: Rows) -> tuple[Array, Array]:
        value, jacobian = fit.law.log_loss(theta, fit.inputs)
        gap = np.exp(value) - loss
        gradient = np.einsum("pri,ri->rp", jacobian, weights[rows] * gap * np.exp(value))
        return 0.5 * np.einsum("ri,ri->r", weights[rows] * gap, gap), gradient

    def metric(theta: Array, rows: Rows) -> Array:
        value, jacobian = fit.law.log_loss(theta, fit.inputs)
        slope = jacobian * np.exp(value)
        return np.asarray(np.einsum("pri,qri->rpq", slope * weights[rows], slope, optimize=True))

    starts = np.repeat(fit.theta[None], len(weights), axis=0)
    return minimize(objective, metric, starts, np.arange(len(starts)), tolerance=1e-10)[0]


@dataclass(frozen=True)
class Scatter:
    """The scatter of the points around a fit, linearized at the optimum.

    Student's t makes the interval wide if there are few spare points.
    """

    fit: Fit
    covariance: Array  # (P, P) of theta
    sigma: float  # relative scatter of the losses
    freedom: float
    condition: float  # of the scaled normal matrix; above ~1e4 some direction is not determined

    @property
    def t(self) -> float:
        return float(special.stdtrit(self.freedom, 0.975)) if self.freedom > 0 else float("inf")

    @property
    def rise(self) -> float:
        """The increase of the objective at the edge of one parameter's 95% interval."""
        # The edge of a likelihood-ratio interval: ½t²·σ²·Eψ²/Eψ′ above the minimum.
        square, inside = _huber_moments(DELTA / max(self.sigma, 1e-12))
        return 0.5 * (self.t * self.sigma) ** 2 * square / inside

    def standard_errors(self) -> Array:
        """Standard errors of the natural parameters, by the delta method."""
        step = 1e-5  # in logarithms; central differences are then exact to about 1e-10
        unit = np.eye(len(self.fit.theta))
        nudged = self.fit.theta + step * np.concatenate([unit, -unit])
        up, down = np.split(self.fit.law.natural(nudged, self.fit.inputs), 2)
        jacobian = (up - down).T / (2 * step)
        return np.sqrt(np.maximum(np.diag(jacobian @ self.covariance @ jacobian.T), 0))

    def half_width(self, points: Points, noise: float = 1.0, law: float = 1.0) -> Array:
        """Half the 95% interval of log loss for a new run at each point.

        `noise` and `law` are factors of the scatter of runs and of the uncertainty of the law.
        """
        x = Inputs.of(points, self.fit.inputs.center)
        jacobian = self.fit.law.log_loss(self.fit.theta[None], x)[1][:, 0]
        spread = np.einsum("pi,pq,qi->i", jacobian, self.covariance, jacobian)
        variance = (noise * self.sigma) ** 2 + law**2 * np.maximum(spread, 0)
        return np.asarray(self.t * np.sqrt(variance))


def scatter(fit: Fit) -> Scatter:
    jacobian = fit.law.log_loss(fit.theta[None], fit.inputs)[1][:, 0]
    weights = np.ones(len(fit.points)) if fit.weights is None else fit.weights
    # Kish's effective number of points, which weights reduce.
    effective = float(weights.sum() ** 2 / (weights**2).sum())
    freedom = effective - len(fit.theta)
    known = np.zeros(len(fit.theta))  # the precision of theta before any point is seen
    if fit.weights is not None:
        before = prior(fit.law, fit.theta[None], fit.points.loss.min(keepdims=True))
        known = before.curvature[0]
        # Each term of the prior counts as a point. At least one, so that the interval is finite.
        freedom = max(freedom + before.terms, 1.0)
    mean_square = float(np.average(fit.residuals**2, weights=weights))
    sigma = float(np.sqrt(mean_square * effective / freedom)) if freedom > 0 else float("nan")
    # Huber's variance for this scatter, as a factor of that of least squares.
    square, inside = _huber_moments(DELTA / max(sigma, 1e-12))
    variance = square / inside**2 * max(sigma, 1e-12) ** 2
    # With too few points and no prior the covariance is NaN, but the condition is known.
    before_points = np.diag(known) if fit.weights is None else variance * np.diag(known)
    normal = (jacobian * weights) @ jacobian.T + before_points
    # Scaled to a unit diagonal, so that the condition does not depend on the units.
    scale = np.sqrt(np.maximum(np.diag(normal), 1e-300))
    outer = np.outer(scale, scale)
    inverse = np.linalg.pinv(normal / outer, rcond=1e-14, hermitian=True) / outer
    # The sandwich of weighted least squares.
    meat = (jacobian * weights**2) @ jacobian.T + before_points
    covariance = variance * inverse @ meat @ inverse
    return Scatter(fit, covariance, sigma, freedom, float(np.linalg.cond(normal / outer)))


def _huber_moments(k: float) -> tuple[float, float]:
    """E ψ² and E ψ′ of Huber's estimator with threshold k, for unit normal scatter (Huber 1964).

    Its variance is E ψ² / (E ψ′)², which goes to π/2 as k → 0. δ = 1e-3 lies below most scatter, so
    this is nearly a fit of absolute deviations.
    """
    # For smaller k the first moment is a difference of nearly equal numbers.
    k = max(k, 0.01)
    inside = float(2 * special.ndtr(k) - 1)
    density = math.exp(-(k**2) / 2) / math.sqrt(2 * math.pi)
    return inside - 2 * k * density + k**2 * (1 - inside), inside


@dataclass(frozen=True)
class Profile:
    """The objective at fixed values of E, all else refitted, and the 95% interval it implies."""

    E: Array
    objective: Array
    low: float  # zero if the points do not exclude it
    high: float

    def including(self, low: float, high: float) -> "Profile":
        """The same profile with an interval that also covers `low` and `high`."""
        return replace(self, low=min(self.low, low), high=max(self.high, high))


def profile(fit: Fit, spread: Scatter, values: int = 41) -> Profile | None:
    """Refit at many fixed values of E, most of them near the edges of the interval.

    None for a law without E, or without spare points.
    """
    if "E" not in fit.law.parameters or spread.freedom <= 0 or fit.objective < 1e-12:
        return None
    # E cannot exceed the lowest loss; near it, the other terms have nothing left to explain.
    best = float(np.exp(fit.theta[0]))
    level = fit.objective + spread.rise
    grid = np.linspace(0.02, 0.9995, values) * float(fit.points.loss.min())
    E = np.unique(np.append(grid, best))
    objective = _objective_at(fit, E)
    for _ in range(2):  # the interval may be far narrower than the first grid
        inside = np.flatnonzero((objective <= level) | (best == E))
        edges = E[[max(inside[0] - 1, 0), min(inside[-1] + 1, len(E) - 1)]]
        finer = np.setdiff1d(np.linspace(edges[0], edges[1], values), E)
        if not len(finer):  # the whole grid is inside
            break
        together = np.append(E, finer)
        order = np.argsort(together)
        objective = np.append(objective, _objective_at(fit, finer))[order]
        E = together[order]
    accepted = E[(objective <= level) | (best == E)]
    # If the lowest E of the grid still fits, zero is not excluded.
    low = 0.0 if accepted.min() <= E[0] else float(accepted.min())
    return Profile(E, objective, low, float(accepted.max()))


def _objective_at(fit: Fit, E: Array) -> Array:
    """The objective with E fixed at each value and everything else refitted."""
    starts = np.repeat(fit.theta[None], len(E), axis=0)
    starts[:, 0] = np.log(E)
    _, value = descend(
        fit.points, fit.law, fit.inputs, starts, fit.weights, frozen=0, tolerance=1e-8
    )
    return value * DELTA


def names_runs(warnings: Sequence[str]) -> bool:
    """Whether one of these warnings proposes runs, such as "Runs that would separate them". Others
    then propose none, because their runs would be different ones."""
    return any(" would" in text for text in warnings)


def interval_warnings(
    fit: Fit, spread: Scatter, of_e: Profile | None, earlier: Sequence[str] = ()
) -> list[str]:
    """Warn about figures of this fit that should not be quoted, and name runs that would help,
    unless `earlier` warnings do."""
    found: list[str] = []
    if spread.freedom <= 0:
        found.append("The law has as many parameters as there are points, so its error is unknown.")
    elif spread.freedom <= 2:
        # With two degrees of freedom t is 4.3, and with one 12.7, instead of about 2.
        spare = f"{spread.freedom:.0f} point{'s' * (spread.freedom > 1)}"
        found.append(f"With only {spare} more than parameters, the interval is wide.")
    found += _value_warnings(fit, of_e, named=names_runs(earlier))
    if spread.condition > SINGULAR:
        text = "Some parameters can compensate for each other: quote predictions, not parameters."
        if not names_runs([*earlier, *found]):
            text += f" Runs that would separate them: {runs_across(fit.points)}."
        found.append(text)
    if fit.agreement < 0.2:
        # The 4500 starts are Hoffmann's, for his law alone.
        remedy = " (--full-grid)" if fit.law.name == "chinchilla" else ""
        found.append(
            f"Only {fit.agreement:.0%} of the starts reached this optimum: there may be a better "
            f"one{remedy}."
        )
    return found


def exponent_warnings(table: dict[str, dict[str, float]], earlier: Sequence[str]) -> list[str]:
    """Warn about exponents that may be zero; `table` is that of `Study.parameters`."""
    # Another warning is about exponents below zero.
    known = {name: p for name, p in table.items() if name in EXPONENT_OF}
    zero = [name for name, p in known.items() if p["low"] <= 0 < p["value"]]
    text = f"The 95% interval of {' and of '.join(zero)} contains zero: these points do not "
    text += "determine it. Quote forecasts, not exponents"
    text += "." if names_runs(earlier) else "; runs over a wider range would help."
    return [text] if zero else []


def _value_warnings(fit: Fit, of_e: Profile | None, *, named: bool) -> list[str]:
    found: list[str] = []
    values = fit.values
    most = {letter: float(getattr(fit.points, letter).max()) for letter in "NDC"}
    size = count(4 * most["N"])
    steep = [name for name in values if name in EXPONENT_OF and values[name] > STEEPEST]
    unknown = "these points do not determine it. Do not quote it."
    if not (named or steep):
        tokens = count(4 * most["D"])
        unknown += f" Larger runs would determine it, such as N = {size} on {tokens} tokens."
    if "E" in values and values["E"] < 1e-2 * fit.points.loss.min():
        found.append(f"E is nearly zero in this fit: {unknown}")
    elif "E" in values and of_e is not None and of_e.low == 0:
        found.append(f"E = {values['E']:.3g}, but zero fits as well: {unknown}")
    for name in (key for key in values if key in EXPONENT_OF):
        letter = EXPONENT_OF[name]
        if values[name] <= 0:
            found.append(
                f"{name} = {values[name]:.3g} is not above zero: in these points the loss does not "
                f"fall with {letter}."
            )
        elif values[name] > STEEPEST:
            found.append(
                f"{name} = {values[name]:.3g} is steeper than any known law: these points hardly "
                f"show its term. Runs with {letter} = {count(most[letter] * 4)} and "
                f"{count(most[letter] / 16)}, everything else equal, would show it."
            )
    for name in (key for key in values if key in ("R_D", "R_N")):
        # exp and log do not return the bound itself to the last digit.
        if not REPEAT_BOUNDS[0] + 1e-6 < np.log(values[name]) < REPEAT_BOUNDS[1] - 1e-6:
            found.append(
                f"{name} = {values[name]:.3g} is at its bound: these points do not determine it. "
                f"Runs of N = {size} that see {count(most['D'] / 64)} distinct tokens 4, 16 and 64 "
                f"times would."
            )
    return found
