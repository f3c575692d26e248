"""Uncertainty from the scatter about a fit: standard errors of its parameters and an interval for its predictions."""

from dataclasses import dataclass

import numpy as np
from scipy import stats

from pipeline.scaling.fit import DELTA, Fit
from pipeline.scaling.laws import Inputs
from pipeline.scaling.points import Array, Points


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
