"""How far to trust a fit: resampling, standard errors, the profile of E, and warnings."""

from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from pipeline.scaling.fitting import DELTA, LAW, Fit, Show, descend, refit, silent
from pipeline.scaling.laws import BOUNDS, Inputs
from pipeline.scaling.points import Array, Points, runs_across
from pipeline.units import count


def bootstrap(fit: Fit, count: int, seed: int = 0, show: Show = silent) -> Array:
    """Theta of `count` refits, each to as many runs as there are, drawn with replacement.

    A run's rows are drawn together: they share its seed and its data order, so apart they would count twice.
    """
    names, cluster = np.unique(np.array(fit.points.run), return_inverse=True)
    draws = np.random.default_rng(seed).multinomial(
        len(names), np.full(len(names), 1 / len(names)), count
    )
    weights = draws.astype(float)[:, cluster] * (1.0 if fit.weights is None else fit.weights)
    if fit.law == LAW:
        return refit(fit, weights)
    starts = np.repeat(fit.theta[None], count, axis=0)
    return descend(fit.points, fit.law, fit.inputs, starts, weights, tolerance=1e-8, show=show)[0]


@dataclass(frozen=True)
class Scatter:
    """Linearised about the optimum, with Student's t: with one degree of freedom it is wide, and ought to be."""

    fit: Fit
    covariance: Array  # (P, P) of theta
    sigma: float  # relative scatter of the losses
    freedom: float
    condition: float  # of the scaled normal matrix: above ~1e4 some direction is not determined

    @property
    def t(self) -> float:
        return float(stats.t.ppf(0.975, self.freedom)) if self.freedom > 0 else float("inf")

    @property
    def rise(self) -> float:
        """How far above its least the objective stays within the 95% region of one parameter."""
        square, inside = huber_moments(DELTA / max(self.sigma, 1e-12))
        return 0.5 * (self.t * self.sigma) ** 2 * square / inside

    def standard_errors(self) -> Array:
        """Of the natural parameters, by the delta method."""
        law, x = self.fit.law, self.fit.inputs
        step = 1e-5
        nudges = self.fit.theta + step * np.concatenate(
            [np.eye(len(self.fit.theta)), -np.eye(len(self.fit.theta))]
        )
        up, down = np.split(law.natural(nudges, x), 2)
        jacobian = (up - down).T / (2 * step)
        return np.sqrt(np.maximum(np.diag(jacobian @ self.covariance @ jacobian.T), 0))

    def half_width(self, points: Points) -> Array:
        """Half the 95% interval of log loss for a new run at each point."""
        x = Inputs.of(points, self.fit.inputs.centre)
        jacobian = self.fit.law.log_loss(self.fit.theta[None], x)[1][:, 0]
        spread = np.einsum("pi,pq,qi->i", jacobian, self.covariance, jacobian)
        half: Array = self.t * np.sqrt(self.sigma**2 + np.maximum(spread, 0))
        return half


def huber_moments(k: float) -> tuple[float, float]:
    """E ψ² and E ψ′ of Huber's estimator for normal scatter of unit variance, threshold k (Huber 1964).

    E ψ² / (E ψ′)² is its variance, π/2 as k → 0: δ = 1e-3 lies below most scatter, so this is nearly a fit of absolute
    deviations.
    """
    k = max(k, 0.01)
    inside = float(2 * stats.norm.cdf(k) - 1)
    return float(inside - 2 * k * stats.norm.pdf(k) + k**2 * (1 - inside)), inside


def scatter(fit: Fit) -> Scatter:
    jacobian = fit.law.log_loss(fit.theta[None], fit.inputs)[1][:, 0]
    weights = np.ones(len(fit.points)) if fit.weights is None else fit.weights
    # Kish's effective number of points: weighting gives some of them away.
    effective = float(weights.sum() ** 2 / (weights**2).sum())
    freedom = (
        len(fit.points) - len(fit.theta)
        if fit.weights is None
        else max(effective - len(fit.theta), 1.0)
    )
    mean_square = float(np.average(fit.residuals**2, weights=weights))
    sigma = float(np.sqrt(mean_square * effective / freedom)) if freedom > 0 else float("nan")
    normal = (jacobian * weights) @ jacobian.T
    scale = np.sqrt(np.maximum(np.diag(normal), 1e-300))
    unit = normal / np.outer(scale, scale)
    inverse = np.linalg.pinv(unit, rcond=1e-14, hermitian=True) / np.outer(scale, scale)
    meat = (jacobian * weights**2) @ jacobian.T
    square, inside = huber_moments(DELTA / max(sigma, 1e-12))
    covariance = square / inside**2 * sigma**2 * inverse @ meat @ inverse
    return Scatter(fit, covariance, sigma, freedom, float(np.linalg.cond(unit)))


@dataclass(frozen=True)
class Profile:
    """The objective at fixed values of E, everything else refitted, and where it stays within the 95% level."""

    E: Array
    objective: Array
    low: float  # zero where nothing keeps E from it
    high: float

    def beside(self, other: "Profile | None") -> "Profile":
        """This one, where the other's values are possible too."""
        return (
            self
            if other is None
            else replace(self, low=min(self.low, other.low), high=max(self.high, other.high))
        )


def profile(fit: Fit, spread: Scatter, values: int = 41) -> Profile | None:
    """Refit with E held at each of many values, more of them about the edges of what the points allow.

    None for a law without E or without points to spare."""
    if "E" not in fit.law.parameters or spread.freedom <= 0 or fit.objective < 1e-12:
        return None
    best, least = float(np.exp(fit.theta[0])), float(fit.points.loss.min())
    level = fit.objective + spread.rise
    held = np.unique(np.append(np.linspace(0.02, 0.9995, values) * least, best))
    objective = held_at(fit, held)
    for _ in range(2):  # the interval may be far narrower than the first grid
        inside = np.flatnonzero((objective <= level) | (held == best))
        edges = held[[max(inside[0] - 1, 0), min(inside[-1] + 1, len(held) - 1)]]
        finer = np.setdiff1d(np.linspace(edges[0], edges[1], values), held)
        if not len(finer):  # all of the grid is inside
            break
        order = np.argsort(together := np.append(held, finer))
        held, objective = together[order], np.append(objective, held_at(fit, finer))[order]
    inside = held[(objective <= level) | (held == best)]
    low = 0.0 if inside.min() <= held[0] else float(inside.min())
    return Profile(held, objective, low, float(inside.max()))


def held_at(fit: Fit, values: Array) -> Array:
    """The objective with E held at each value and everything else refitted."""
    starts = np.repeat(fit.theta[None], len(values), axis=0)
    starts[:, 0] = np.log(values)
    return (
        descend(fit.points, fit.law, fit.inputs, starts, fit.weights, frozen=0, tolerance=1e-8)[1]
        * DELTA
    )


def doubts(fit: Fit, spread: Scatter, of_e: Profile | None) -> list[str]:
    """What in this fit should not be quoted."""
    said: list[str] = []
    values = fit.values
    most = {letter: float(getattr(fit.points, letter).max()) for letter in "NDC"}
    nearer = f"Runs nearer to it would tell, such as N = {count(4 * most['N'])} on {count(4 * most['D'])} tokens."
    if spread.freedom <= 0:
        said.append(
            "As many parameters as points: nothing is left over to say how wrong the law is."
        )
    elif spread.freedom <= 2:
        spare = f"{spread.freedom:.0f} point{'s' * (spread.freedom > 1)}"
        said.append(f"Only {spare} to spare: the interval is wide because little is known.")
    if "E" in values:
        if values["E"] < 1e-2 * fit.points.loss.min():
            said.append(
                f"E ran to zero: the floor is not determined by these points. Do not quote it. {nearer}"
            )
        elif of_e is not None and of_e.low == 0:
            said.append(
                f"E = {values['E']:.3g}, but zero fits as well: the floor is not determined. Do not quote it. {nearer}"
            )
    for name, letter in {
        "alpha": "N",
        "beta": "D",
        "g": "C",
        "alpha_N": "N",
        "alpha_D": "D",
    }.items():
        if name in values and values[name] <= 0:
            said.append(
                f"{name} = {values[name]:.3g} is not above zero: loss does not fall that way in these points."
            )
        elif name in values and values[name] > 2:
            said.append(
                f"{name} = {values[name]:.3g} is steeper than any known law: its term is hardly seen here. Runs with "
                f"{letter} = {count(most[letter] * 4)} and {count(most[letter] / 16)}, the rest alike, would show it."
            )
    for name in ("R_D", "R_N"):
        if name in values and not BOUNDS[0] < np.log(values[name]) < BOUNDS[1]:
            said.append(
                f"{name} = {values[name]:.3g} ran to its bound: these points do not determine it. Runs of N = "
                f"{count(4 * most['N'])} that see {count(most['D'] / 64)} distinct tokens 4, 16 and 64 times would."
            )
    if spread.condition > 1e10:
        said.append(
            f"Some parameters can be traded for each other freely: quote predictions, not "
            f"parameters. What would part them: {runs_across(fit.points)}."
        )
    if fit.agreement < 0.2:
        share = f"{fit.agreement:.0%}"
        said.append(
            f"Only {share} of the starts reached this optimum: there may be a better one (--full-grid)."
        )
    return said
