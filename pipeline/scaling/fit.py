"""Fit a law: Huber's loss on log loss, from screened starts, all descended at once."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pipeline.errors import DataError
from pipeline.scaling.laws import Chinchilla, Compute, Inputs, Law, Power
from pipeline.scaling.minimize import minimize
from pipeline.scaling.points import Array, Points

T = TypeVar("T")
Rows = npt.NDArray[np.intp]
DELTA = 1e-3  # Hoffmann et al.; summed, because the mean with default tolerances converges from no start at all
KEPT_STARTS = 24


@dataclass(frozen=True)
class Fit:
    """A law with its best parameters for these points."""

    law: Law
    theta: Array  # (P,), centred logarithms
    inputs: Inputs
    points: Points
    objective: float  # Σ huber, as published figures quote it
    agreement: float  # share of the descended starts that ended in this optimum

    @property
    def values(self) -> dict[str, float]:
        natural = self.law.natural(self.theta[None], self.inputs)[0]
        return dict(zip(self.law.parameters, map(float, natural), strict=True))

    @property
    def residuals(self) -> Array:
        """log(measured loss) − log(law's loss)."""
        gap: Array = np.log(self.points.loss) - self.law.log_loss(self.theta[None], self.inputs)[0][0]
        return gap

    def predict(self, points: Points) -> Array:
        """The law's loss at other points (their own loss column is not read)."""
        x = Inputs.of(points, self.inputs.centre)
        loss: Array = np.exp(self.law.log_loss(self.theta[None], x)[0][0])
        return loss


def fit(points: Points, law: Law, *, full_grid: bool = False) -> Fit:
    """The best of many descents; `full_grid` uses Hoffmann's 4500 starts, otherwise the best screened ones."""
    if len(points) < len(law.parameters):
        raise DataError(
            f"law={law.name} has {len(law.parameters)} parameters and there are {len(points)} points; "
            f"train {len(law.parameters) - len(points)} more runs or choose --law auto"
        )
    x = Inputs.of(points)
    starts = hoffmann_grid(x) if full_grid and isinstance(law, Chinchilla) else screened(points, law, x)
    theta, value = descend(points, law, x, starts)
    best = int(np.argmin(value))
    near = value <= value[best] * (1 + 1e-4) + 1e-12
    return Fit(law, theta[best], x, points, float(value[best]) * DELTA, float(near.mean()))


def descend(points: Points, law: Law, x: Inputs, starts: Array, weights: Array | None = None) -> tuple[Array, Array]:
    """Minimise from every start; `weights` (R, n) makes each row a resample of its own."""
    target = np.log(points.loss)

    def weight(rows: Rows) -> Array | float:
        return 1.0 if weights is None else weights[rows]

    def objective(theta: Array, rows: Rows) -> tuple[Array, Array]:
        value, jacobian = law.log_loss(theta, x)
        residual = value - target
        clipped = np.clip(residual, -DELTA, DELTA) * weight(rows)
        # Huber = ½c² + |c|(|r| − |c|) with c the clipped residual: both branches in one expression. Divided by δ.
        total = np.einsum("ri,ri->r", clipped, residual - 0.5 * np.clip(residual, -DELTA, DELTA)) / DELTA
        return total, np.einsum("pri,ri->rp", jacobian, clipped) / DELTA

    def metric(theta: Array, rows: Rows) -> Array:
        value, jacobian = law.log_loss(theta, x)
        w = weight(rows) / np.maximum(np.abs(value - target), DELTA)  # reweighted least squares
        normal: Array = np.einsum("pri,qri->rpq", jacobian * w, jacobian, optimize=True)
        return normal

    parts = [minimize(shifted(objective, at), shifted(metric, at), starts[at]) for at in chunks(len(starts))]
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


def chunks(count: int, size: int = 256) -> list[Rows]:
    return [np.arange(at, min(at + size, count)) for at in range(0, count, size)]  # what fits the cache


def shifted(function: Callable[[Array, Rows], T], at: Rows) -> Callable[[Array, Rows], T]:
    return lambda theta, rows: function(theta, at[rows])


def screened(points: Points, law: Law, x: Inputs) -> Array:
    """Variable projection: for each exponent on a grid the coefficients are linear; keep the starts that fit best."""
    grid = np.array([0.03, 0.07, 0.12, 0.2, 0.3, 0.4, 0.5, 0.65, 0.85, 1.2])
    match law:
        case Power():
            slope, level = np.polyfit(x.c, np.log(points.loss), 1)
            return np.array([[level, -slope], [level, -slope / 2]])
        case Compute():
            exponents = grid[:, None]
            basis = np.exp(-exponents[:, :, None] * x.c)
            linear = project(basis, points.loss)
            starts = np.stack([linear[:, 0], linear[:, 1], exponents[:, 0]], axis=1)
        case Chinchilla():
            exponents = np.array(list(itertools.product(grid, grid)))
            basis = np.exp(-exponents[:, :, None] * np.stack([x.n, x.d]))
            linear = project(basis, points.loss)
            starts = np.stack([linear[:, 0], linear[:, 1], exponents[:, 0], linear[:, 2], exponents[:, 1]], axis=1)
        case _:
            raise NotImplementedError(law.name)
    residual = np.abs(law.log_loss(starts, x)[0] - np.log(points.loss)).sum(axis=1)
    return starts[np.argsort(residual)[:KEPT_STARTS]]


def project(basis: Array, loss: Array) -> Array:
    """Logs of E and the coefficients, by relative least squares; what comes out negative becomes small."""
    design = np.concatenate([np.ones((len(basis), 1, len(loss))), basis], axis=1) / loss
    normal = design @ design.transpose(0, 2, 1)
    ridge = 1e-9 * np.einsum("rii->ri", normal)[:, :, None] * np.eye(normal.shape[1])
    solved = np.linalg.solve(normal + ridge, design.sum(axis=2)[:, :, None])[:, :, 0]
    logs: Array = np.log(np.maximum(solved, 1e-2 * loss.min()))
    return logs


def hoffmann_grid(x: Inputs) -> Array:
    """The 4500 starts of arXiv 2203.15556, appendix D.3, in centred coordinates."""
    steps = np.arange(0, 2.01, 0.5)
    sizes = np.arange(0, 25.1, 5)
    raw = np.array(list(itertools.product(np.arange(-1, 1.01, 0.5), sizes, steps, sizes, steps)))
    raw[:, 1] -= raw[:, 2] * x.centre[0]
    raw[:, 3] -= raw[:, 4] * x.centre[1]
    return raw
