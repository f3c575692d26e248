"""Fit a law: Huber's loss on log loss, from screened starts, all descended at once."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipeline.scaling.laws import Chinchilla, Inputs, Law, steepness
from pipeline.scaling.minimize import Rows, minimize
from pipeline.scaling.points import Array, Points
from pipeline.scaling.starts import hoffmann_grid, screened

DELTA = 1e-3  # Hoffmann et al.; summed, because the mean with default tolerances converges from no start at all
KEPT_STARTS = 24
Show = Callable[[str, float], None]  # what is being done, and the share of it that is
CACHED = 1 << 15  # numbers in each array of a descent: more of them no longer fit the cache


@dataclass(frozen=True)
class Fit:
    """A law with its best parameters for these points."""

    law: Law
    theta: Array  # (P,), centred logarithms
    inputs: Inputs
    points: Points
    objective: float  # Σ huber, as published figures quote it
    agreement: float  # share of the descended starts that ended in this optimum
    weights: Array | None = None  # how much each point counted; None where all count alike

    @property
    def values(self) -> dict[str, float]:
        natural = self.law.natural(self.theta[None], self.inputs)[0]
        return dict(zip(self.law.parameters, map(float, natural), strict=True))

    @property
    def residuals(self) -> Array:
        """log(measured loss) − log(law's loss)."""
        gap: Array = (
            np.log(self.points.loss) - self.law.log_loss(self.theta[None], self.inputs)[0][0]
        )
        return gap

    def predict(self, points: Points) -> Array:
        """The law's loss at other points (their own loss column is not read)."""
        x = Inputs.of(points, self.inputs.centre)
        loss: Array = np.exp(self.law.log_loss(self.theta[None], x)[0][0])
        return loss


def silent(_what: str, _share: float) -> None:
    """Show nothing."""


def fit(
    points: Points, law: Law, *, weights: Array | None = None, full_grid: bool = False, show: Show = silent
) -> Fit:  # fmt: skip
    """The best of many descents; `full_grid` uses Hoffmann's 4500 starts, otherwise the best screened ones."""
    x = Inputs.of(points)
    starts = (
        hoffmann_grid(x)
        if full_grid and type(law) is Chinchilla
        else screened(points, law, x, KEPT_STARTS, weights)
    )
    theta, value = descend(points, law, x, starts, weights, tempered=weights is not None, show=show)
    best = int(np.argmin(value))
    near = value <= value[best] * (1 + 1e-4) + 1e-12
    return Fit(law, theta[best], x, points, float(value[best]) * DELTA, float(near.mean()), weights)


def descend(
    points: Points,
    law: Law,
    x: Inputs,
    starts: Array,
    weights: Array | None = None,
    *,
    frozen: int | None = None,
    tempered: bool = False,
    tolerance: float = 1e-11,
    show: Show = silent,
) -> tuple[Array, Array]:
    """Minimise from every start; `weights` (n) or, each row a resample of its own, (R, n), `frozen` holds a parameter,
    `tempered` keeps exponents from running steep (see laws.steepness)."""
    target = np.log(points.loss)
    weight = np.broadcast_to(1.0 if weights is None else weights, (len(starts), len(points)))

    def objective(theta: Array, rows: Rows) -> tuple[Array, Array]:
        value, jacobian = law.log_loss(theta, x)
        residual = value - target
        clipped = np.clip(residual, -DELTA, DELTA) * weight[rows]
        # Huber = ½c² + |c|(|r| − |c|) with c the clipped residual: both branches in one expression. Divided by δ.
        total = (
            np.einsum("ri,ri->r", clipped, residual - 0.5 * np.clip(residual, -DELTA, DELTA))
            / DELTA
        )
        gradient = np.einsum("pri,ri->rp", jacobian, clipped) / DELTA
        if tempered:
            steep = steepness(law, theta)
            total, gradient = total + steep[0], gradient + steep[1]
        if frozen is not None:
            gradient[:, frozen] = 0
        return total, gradient

    def metric(theta: Array, rows: Rows) -> Array:
        value, jacobian = law.log_loss(theta, x)
        w = weight[rows] / np.maximum(np.abs(value - target), DELTA)  # reweighted least squares
        normal: Array = np.einsum("pri,qri->rpq", jacobian * w, jacobian, optimize=True)
        if tempered:
            normal += steepness(law, theta)[2][:, :, None] * np.eye(theta.shape[1])
        if frozen is not None:
            normal[:, frozen, :] = normal[:, :, frozen] = 0
            normal[:, frozen, frozen] = 1
        return normal

    size = max(1, CACHED // len(points))
    parts = []
    for at in range(0, len(starts), size):
        rows = np.arange(at, min(at + size, len(starts)))
        parts.append(minimize(objective, metric, starts[rows], rows, tolerance=tolerance))
        show(f"{len(starts)} descents", (rows[-1] + 1) / len(starts))
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
