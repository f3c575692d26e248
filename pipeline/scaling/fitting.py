"""Fit a law: Huber's loss on log loss, minimized from many starts at once; and variable projection, its slow twin."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import optimize

from pipeline.scaling.laws import (
    Chinchilla,
    Compute,
    DataConstrained,
    Gamma,
    Inputs,
    Kaplan,
    Law,
    Power,
    Routed,
    steepness,
)
from pipeline.scaling.points import Array, Points

Rows = npt.NDArray[np.intp]  # which of all problems these are
Objective = Callable[
    [Array, Rows], tuple[Array, Array]
]  # theta (R, P) and rows (R,) → value (R,), gradient (R, P)
Metric = Callable[[Array, Rows], Array]


@np.errstate(over="ignore", invalid="ignore")  # a wild start may overflow: it is then left behind
def minimize(
    objective: Objective, metric: Metric, start: Array, rows: Rows, *, tolerance: float = 1e-11, patience: int = 8,
    iterations: int = 400,
) -> tuple[Array, Array]:  # fmt: skip
    """BFGS with backtracking from every row of `start`; `metric` gives the first Hessian, (R, P, P)."""
    theta, size = start.copy(), start.shape[1]
    best, gradient = objective(theta, rows)
    inverse = _inverse(metric(theta, rows))
    quiet = np.zeros(len(theta), dtype=int)
    live = np.isfinite(best)
    for _ in range(iterations):
        at = np.flatnonzero(live)
        if not len(at):
            break
        g, h = gradient[at], inverse[at]
        step = -np.einsum("rij,rj->ri", h, g)
        slope = np.einsum("ri,ri->r", g, step)
        lost = slope >= 0  # the approximation has gone bad: start it afresh
        if lost.any():
            h[lost] = _inverse(metric(theta[at[lost]], rows[at[lost]]))
            step[lost] = -np.einsum("rij,rj->ri", h[lost], g[lost])
            slope[lost] = np.einsum("ri,ri->r", g[lost], step[lost])
        taken, value, new_g = _backtrack(objective, theta[at], best[at], g, step, slope, rows[at])
        s, y = taken, new_g - g
        gain = best[at] - value
        small = gain <= tolerance * np.abs(value)
        quiet[at] = np.where(small, quiet[at] + 1, 0)
        theta[at] += s
        best[at], gradient[at] = value, new_g
        curved = np.einsum("ri,ri->r", s, y)
        ok = (
            curved
            > 1e-12 * np.sqrt(np.einsum("ri,ri->r", s, s) * np.einsum("ri,ri->r", y, y)) + 1e-300
        )
        rho = np.where(ok, 1 / np.where(ok, curved, 1), 0)
        left = np.eye(size) - rho[:, None, None] * s[:, :, None] * y[:, None, :]
        h = left @ h @ left.transpose(0, 2, 1) + rho[:, None, None] * s[:, :, None] * s[:, None, :]
        # A line search that found nothing, or a quiet spell, asks for a fresh metric before giving up.
        stuck = small & (quiet[at] % 3 == 0)
        if stuck.any():
            h[stuck] = _inverse(metric(theta[at[stuck]], rows[at[stuck]]))
        inverse[at] = h
        live[at[(quiet[at] >= patience) | ~np.isfinite(value)]] = False
    return theta, best


def _backtrack(
    objective: Objective, theta: Array, value: Array, gradient: Array, step: Array, slope: Array, rows: Rows
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Armijo's rule per row: halve until the value falls; a row that never falls stays where it is."""
    scale = np.minimum(
        1.0, 2.0 / (np.abs(step).max(axis=1) + 1e-300)
    )  # logs: a longer step is a blind one
    taken, best, best_g = np.zeros_like(step), value.copy(), gradient.copy()
    open_ = np.arange(len(rows))
    for _ in range(25):
        trial = scale[open_, None] * step[open_]
        f, g = objective(theta[open_] + trial, rows[open_])
        good = f <= value[open_] + 1e-4 * scale[open_] * slope[open_]
        done = open_[good]
        taken[done], best[done], best_g[done] = trial[good], f[good], g[good]
        open_ = open_[~good]
        if not len(open_):
            break
        scale[open_] *= 0.4
    return taken, best, best_g


def _inverse(matrices: Array) -> Array:
    scale = np.sqrt(np.maximum(np.einsum("rii->ri", matrices), 1e-300))
    unit = matrices / (scale[:, :, None] * scale[:, None, :])
    unit = unit + 1e-9 * np.eye(matrices.shape[1])  # flat directions stay finite
    inverse: Array = np.linalg.pinv(unit, hermitian=True) / (scale[:, :, None] * scale[:, None, :])
    return inverse


GRID = np.array([0.03, 0.07, 0.12, 0.2, 0.3, 0.4, 0.5, 0.65, 0.85, 1.2])


def screened(points: Points, law: Law, x: Inputs, keep: int, weights: Array | None = None) -> Array:
    """For each exponent on the grid the coefficients are linear; keep the starts that fit best."""
    starts = raw(points, law, x)
    residual = np.abs(law.log_loss(starts, x)[0] - np.log(points.loss)) @ (
        np.ones(len(points)) if weights is None else weights
    )
    return starts[np.argsort(residual)[:keep]]


def raw(points: Points, law: Law, x: Inputs) -> Array:
    match law:
        case Power():
            slope, level = np.polyfit(x.c, np.log(points.loss), 1)
            return np.array([[level, -slope], [level, -slope / 2]])
        case Compute():
            linear = project(np.exp(-GRID[:, None, None] * x.c), points.loss)
            return np.column_stack([linear, GRID])
        case Routed():
            base = two_terms(points, x)
            return np.column_stack(
                [base[:, :3], np.zeros((len(base), 2)), base[:, 3:], np.zeros((len(base), 2))]
            )
        case DataConstrained():  # arXiv 2305.16264 found R* of 15 for tokens and 5 for parameters
            base = two_terms(points, x)
            return np.concatenate(
                [np.column_stack([base, np.full((len(base), 2), np.log(r))]) for r in (3, 10, 30)]
            )
        case Gamma():
            base = two_terms(points, x)
            # With exponents and coefficients divided by γ, each term alone keeps its size.
            return np.concatenate(
                [
                    np.column_stack([base[:, :1], base[:, 1:] / g, np.full(len(base), np.log(g))])
                    for g in (0.5, 0.75, 1, 1.5)
                ]
            )
        case Kaplan():
            level = np.log(points.loss).mean()
            choices = itertools.product(
                (0.04, 0.07, 0.1, 0.15, 0.25), (0.4, 0.7, 1, 1.5), (-3, 0, 3)
            )
            return np.array(
                [[level / g + lean, r, level / g - lean, np.log(g)] for g, r, lean in choices]
            )
        case Chinchilla():
            return two_terms(points, x)
        case _:
            raise TypeError(f"{law.name} is not fitted from starts")


def two_terms(points: Points, x: Inputs) -> Array:
    exponents = np.array(list(itertools.product(GRID, GRID)))
    linear = project(np.exp(-exponents[:, :, None] * np.stack([x.n, x.d])), points.loss)
    return np.stack(
        [linear[:, 0], linear[:, 1], exponents[:, 0], linear[:, 2], exponents[:, 1]], axis=1
    )


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
    grid = np.array(list(itertools.product(np.arange(-1, 1.01, 0.5), sizes, steps, sizes, steps)))
    grid[:, 1] -= grid[:, 2] * x.centre[0]
    grid[:, 3] -= grid[:, 4] * x.centre[1]
    return grid


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
