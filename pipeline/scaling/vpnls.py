"""Chinchilla's law by variable projection: for each α and β the rest is linear, so only those two are searched.

Least squares on the loss itself, with E, A and B kept from below zero; the slow twin of the Huber fit, and exact on
points without noise, where a parabola through an isoFLOP valley is not.
"""

import itertools

import numpy as np
from scipy import optimize

from pipeline.scaling.fit import Fit
from pipeline.scaling.laws import Chinchilla, Inputs
from pipeline.scaling.minimize import Rows, minimize
from pipeline.scaling.points import Array, Points


class Projected(Chinchilla):
    name = "vpnls"


LAW = Projected()


def refit(fit: Fit, weights: Array) -> Array:
    """Theta of the same least squares for each row of `weights`, all at once, followed from this optimum."""
    loss = fit.points.loss

    def objective(theta: Array, rows: Rows) -> tuple[Array, Array]:
        value, jacobian = LAW.log_loss(theta, fit.inputs)
        gap = np.exp(value) - loss
        gradient = np.einsum("pri,ri->rp", jacobian, weights[rows] * gap * np.exp(value))
        return 0.5 * np.einsum("ri,ri->r", weights[rows] * gap, gap), gradient

    def metric(theta: Array, rows: Rows) -> Array:
        value, jacobian = LAW.log_loss(theta, fit.inputs)
        slope = jacobian * np.exp(value)
        normal: Array = np.einsum("pri,qri->rpq", slope * weights[rows], slope, optimize=True)
        return normal

    starts = np.repeat(fit.theta[None], len(weights), axis=0)
    return minimize(objective, metric, starts, np.arange(len(starts)), tolerance=1e-10)[0]


def vpnls(points: Points) -> Fit:
    """The best E, A, B for the best α, β; its objective is the sum of squared errors of loss."""
    x = Inputs.of(points)

    def solve(alpha: float, beta: float) -> tuple[Array, float]:
        design = np.stack([np.ones(len(points)), np.exp(-alpha * x.n), np.exp(-beta * x.d)], axis=1)
        linear, norm = optimize.nnls(design, points.loss)
        return linear, float(norm)

    grid = [float(g) for g in np.geomspace(0.03, 1.5, 16)]
    ranked = sorted(itertools.product(grid, grid), key=lambda pair: solve(*pair)[1])

    def error(pair: Array) -> float:
        return solve(*pair)[1]

    found = [
        optimize.minimize(error, list(start), method="Nelder-Mead", tol=1e-13)
        for start in ranked[:4]
    ]
    best = min(found, key=lambda result: float(result.fun))
    alpha, beta = map(float, best.x)
    linear, norm = solve(alpha, beta)
    E, A, B = np.log(np.maximum(linear, 1e-12))
    near = np.mean([result.fun <= best.fun * (1 + 1e-4) + 1e-12 for result in found])
    return Fit(LAW, np.array([E, A, alpha, B, beta]), x, points, norm**2, float(near))
