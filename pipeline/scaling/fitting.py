"""Fit a law: Huber's loss on log loss, minimized from many starts at once.

`fit` is the estimator of the papers. `vpnls`, variable projection, is a slow alternative.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import optimize

from pipeline.scaling import laws
from pipeline.scaling.points import Array, Points

# Hoffmann et al. use the same δ. The objective is a sum: with the mean and default tolerances, no
# start converges at all.
DELTA = 1e-3
RUN_NOISE = 0.003  # assumed relative scatter of runs; sets the weight of the prior
KEPT_STARTS = 24
THINNED = 2000  # points that the starts of a larger fit are descended on first
POLISHED = 3  # number of those descents that continue with all points
CACHED = 1 << 15  # numbers per array of a descent; larger arrays no longer fit the cache
LONGEST = 2.0  # step of a logarithm; a factor above e² is too far for a local model
EXPONENTS = np.array([0.03, 0.07, 0.12, 0.2, 0.3, 0.4, 0.5, 0.65, 0.85, 1.2])

Rows = npt.NDArray[np.intp]  # the indices of some of the problems
# theta (R, P) and rows (R,) → value (R,) and gradient (R, P)
Objective = Callable[[Array, Rows], tuple[Array, Array]]
Metric = Callable[[Array, Rows], Array]
Show = Callable[[str, float], None]  # what is being done, and the share that is done


@dataclass(frozen=True)
class Fit:
    """A law with its best parameters for these points."""

    law: laws.Law
    theta: Array  # (P,), centered logarithms
    inputs: laws.Inputs
    points: Points
    objective: float  # Σ huber, as published figures quote it
    agreement: float  # share of the starts that ended in this optimum
    # Weights of the points, for a fit for forecasting. Such a fit also has a prior (laws.prior).
    # None: equal weights and no prior.
    weights: Array | None = None

    @property
    def values(self) -> dict[str, float]:
        natural = self.law.natural(self.theta[None], self.inputs)[0]
        return dict(zip(self.law.parameters, map(float, natural), strict=True))

    @property
    def residuals(self) -> Array:
        """log(measured loss) − log(loss of the law)."""
        log_loss = self.law.log_loss(self.theta[None], self.inputs)[0][0]
        return np.asarray(np.log(self.points.loss) - log_loss)

    def predict(self, points: Points) -> Array:
        """The law's loss at other points; their own loss column is not read."""
        x = laws.Inputs.of(points, self.inputs.center)
        return np.asarray(np.exp(self.law.log_loss(self.theta[None], x)[0][0]))


def silent(_what: str, _share: float) -> None:
    """Show no progress."""


def fit(
    points: Points,
    law: laws.Law,
    *,
    weights: Array | None = None,
    full_grid: bool = False,
    show: Show = silent,
) -> Fit:
    """The best of many descents: from screened starts, or Hoffmann's 4500 with `full_grid`."""
    x = laws.Inputs.of(points)
    forecasting = weights is not None
    thin = points.thinned(THINNED)
    few = points.take(thin)
    x_few = laws.Inputs.of(few, x.center)
    weights_few = None if weights is None else weights[thin]
    if full_grid and type(law) is laws.Chinchilla:
        starts = laws.hoffmann_grid(x)
    else:
        starts = screened(few, law, x_few, KEPT_STARTS, weights_few)
    theta, value = descend(few, law, x_few, starts, weights_few, forecasting=forecasting, show=show)
    # The absolute part is for exact points, whose objective is zero.
    near = value <= value.min() * (1 + 1e-4) + 1e-12
    if len(few) < len(points):
        starts = theta[np.argsort(value)[:POLISHED]]
        theta, value = descend(points, law, x, starts, weights, forecasting=forecasting, show=show)
    best = int(np.argmin(value))
    return Fit(law, theta[best], x, points, float(value[best]) * DELTA, float(near.mean()), weights)


def descend(
    points: Points,
    law: laws.Law,
    x: laws.Inputs,
    starts: Array,
    weights: Array | None = None,
    *,
    frozen: int | None = None,
    forecasting: bool = False,
    tolerance: float = 1e-11,
    show: Show = silent,
) -> tuple[Array, Array]:
    """Minimize from every start and return theta and objective/δ of each.

    `weights` has shape (n), or (R, n) where each start has its own resample. `frozen` is the index
    of a parameter that keeps its start value. `forecasting` adds the prior.
    """
    target = np.log(points.loss)
    weight = np.broadcast_to(1.0 if weights is None else weights, (len(starts), len(points)))
    # The lowest loss of each row's points; a backtest gives points above its cut no weight.
    lowest = np.where(weight > 0, points.loss, np.inf).min(axis=1) if forecasting else None
    nats = RUN_NOISE**2 / DELTA  # one nat of the prior, in units of the objective

    def objective(theta: Array, rows: Rows) -> tuple[Array, Array]:
        value, jacobian = law.log_loss(theta, x)
        residual = value - target
        clipped = np.clip(residual, -DELTA, DELTA)
        weighted = clipped * weight[rows]
        # Huber's ½c² + |c|(|r| − |c|), with c the clipped residual, divided by δ.
        total = np.einsum("ri,ri->r", weighted, residual - 0.5 * clipped) / DELTA
        gradient = np.einsum("pri,ri->rp", jacobian, weighted) / DELTA
        if lowest is not None:
            before = laws.prior(law, theta, lowest[rows])
            total = total + nats * before.cost
            gradient = gradient + nats * before.gradient
        if frozen is not None:
            gradient[:, frozen] = 0
        return total, gradient

    def metric(theta: Array, rows: Rows) -> Array:
        """The Gauss–Newton matrix of the reweighted least-squares problem."""
        value, jacobian = law.log_loss(theta, x)
        w = weight[rows] / np.maximum(np.abs(value - target), DELTA)
        normal: Array = np.einsum("pri,qri->rpq", jacobian * w, jacobian, optimize=True)
        if lowest is not None:
            curvature = nats * laws.prior(law, theta, lowest[rows]).curvature
            normal += curvature[:, :, None] * np.eye(theta.shape[1])
        if frozen is not None:
            normal[:, frozen, :] = normal[:, :, frozen] = 0
        return normal

    # Blocks of starts whose arrays stay in the cache.
    size = max(1, CACHED // len(points))
    found: list[tuple[Array, Array]] = []
    for at in range(0, len(starts), size):
        rows = np.arange(at, min(at + size, len(starts)))
        ends = minimize(objective, metric, starts[rows], rows, law.bounded, tolerance=tolerance)
        found.append(ends)
        show(f"{len(starts)} descents", (rows[-1] + 1) / len(starts))
    return tuple(map(np.concatenate, zip(*found, strict=True)))  # type: ignore[return-value]


# --- the minimizer -----------------------------------------------------------------------------
# Quasi-Newton descent of many small problems side by side: all starts of a fit, or all of its
# bootstrap resamples. δ lies far below the scatter of real runs, so the objective is nearly
# piecewise linear: scipy's L-BFGS-B stops early from most starts, and one call of it per resample
# costs minutes.


@np.errstate(over="ignore", invalid="ignore")  # a wild start may overflow; it is then abandoned
def minimize(
    objective: Objective,
    metric: Metric,
    start: Array,
    rows: Rows,
    bounded: tuple[int, ...] = (),
    *,
    tolerance: float = 1e-11,
    patience: int = 5,
    iterations: int = 400,
) -> tuple[Array, Array]:
    """BFGS with backtracking from every row of `start`; `metric` gives Hessians, (R, P, P)."""
    theta = start.copy()
    best, gradient = objective(theta, rows)
    inverse = _inverse(metric(theta, rows))
    quiet = np.zeros(len(theta), dtype=int)  # iterations in a row that gained next to nothing
    live = np.isfinite(best)
    for _ in range(iterations):
        at = np.flatnonzero(live)
        if not len(at):
            break
        old = theta[at]
        g = gradient[at]
        h = inverse[at]
        step = _direction(h, g, old, bounded)
        slope = np.einsum("ri,ri->r", g, step)
        lost = slope >= 0  # the approximation has gone bad: restart it from the metric
        if lost.any():
            h[lost] = _inverse(metric(old[lost], rows[at[lost]]))
            step[lost] = _direction(h[lost], g[lost], old[lost], bounded)
            slope[lost] = np.einsum("ri,ri->r", g[lost], step[lost])
        found = _backtrack(objective, old, best[at], g, step, slope, rows[at])
        small = best[at] - found.value <= tolerance * np.abs(found.value)
        quiet[at] = np.where(small, quiet[at] + 1, 0)
        h = _updated(h, found.step, found.gradient - g)
        theta[at] = old + found.step
        best[at] = found.value
        gradient[at] = found.gradient
        # After a few iterations without gain, try a new metric before giving up.
        stuck = small & (quiet[at] % 3 == 0)
        if stuck.any():
            h[stuck] = _inverse(metric(theta[at[stuck]], rows[at[stuck]]))
        inverse[at] = h
        live[at[(quiet[at] >= patience) | ~np.isfinite(found.value)]] = False
    return theta, best


def _direction(inverse: Array, gradient: Array, theta: Array, bounded: tuple[int, ...]) -> Array:
    """The step to the minimum of a quadratic model, with `bounded` columns in REPEAT_BOUNDS."""
    low, high = laws.REPEAT_BOUNDS
    step: Array = -np.einsum("rij,rj->ri", inverse, gradient)
    for p in bounded:
        # Near its bounds a parameter has almost no effect, and its step would be far too long. Cut
        # only this step, and move the other parameters to their minimum for the shorter one.
        least = np.maximum(low - theta[:, p], -LONGEST)
        most = np.minimum(high - theta[:, p], LONGEST)
        column = inverse[:, p]
        excess = np.clip(step[:, p], least, most) - step[:, p]
        per_unit = np.where(column[:, p] > 0, 1 / np.maximum(column[:, p], 1e-300), 0)
        step += (excess * per_unit)[:, None] * column
        cut = np.where(excess == 0, 0, per_unit)
        inverse = inverse - cut[:, None, None] * column[:, :, None] * column[:, None, :]
    return step


def _updated(inverse: Array, s: Array, y: Array) -> Array:
    """BFGS's update of the inverse Hessians, where the curvature along the step is positive."""
    curved = np.einsum("ri,ri->r", s, y)
    lengths = np.sqrt(np.einsum("ri,ri->r", s, s) * np.einsum("ri,ri->r", y, y))
    positive = curved > 1e-12 * lengths + 1e-300
    # Where the curvature is not positive, rho = 0 keeps the old inverse.
    rho = np.where(positive, 1 / np.where(positive, curved, 1), 0)[:, None, None]
    left = np.eye(s.shape[1]) - rho * s[:, :, None] * y[:, None, :]
    return np.asarray(left @ inverse @ left.transpose(0, 2, 1) + rho * s[:, :, None] * s[:, None])


class _Step(NamedTuple):
    step: Array
    value: Array
    gradient: Array


def _backtrack(
    objective: Objective,
    theta: Array,
    value: Array,
    gradient: Array,
    step: Array,
    slope: Array,
    rows: Rows,
) -> _Step:
    """Armijo's rule for each row; a row whose value never falls stays where it is."""
    scale = np.minimum(1.0, LONGEST / (np.abs(step).max(axis=1) + 1e-300))
    found = _Step(np.zeros_like(step), value.copy(), gradient.copy())
    left = np.arange(len(rows))
    for _ in range(14):  # down to 0.4^14 ≈ 3e-6 of the first step
        trial = scale[left, None] * step[left]
        new_value, new_gradient = objective(theta[left] + trial, rows[left])
        good = new_value <= value[left] + 1e-4 * scale[left] * slope[left]
        done = left[good]
        found.step[done] = trial[good]
        found.value[done] = new_value[good]
        found.gradient[done] = new_gradient[good]
        left = left[~good]
        if not len(left):
            break
        scale[left] *= 0.4
    return found


def _inverse(matrices: Array) -> Array:
    diagonal = np.einsum("rii->ri", matrices)
    # A parameter without any effect keeps its value.
    scale = np.where(diagonal > 0, np.sqrt(diagonal), np.inf)
    outer = scale[:, :, None] * scale[:, None, :]
    unit = matrices / outer + 1e-9 * np.eye(matrices.shape[1])  # flat directions stay finite
    return np.asarray(np.linalg.pinv(unit, hermitian=True) / outer)


# --- starts ------------------------------------------------------------------------------------


def screened(
    points: Points, law: laws.Law, x: laws.Inputs, keep: int, weights: Array | None = None
) -> Array:
    """The `keep` best starts of a grid of exponents."""
    starts = _raw_starts(points, law, x)
    residual = np.abs(law.log_loss(starts, x)[0] - np.log(points.loss))
    total = residual @ (np.ones(len(points)) if weights is None else weights)
    return starts[np.argsort(total)[:keep]]


def _raw_starts(points: Points, law: laws.Law, x: laws.Inputs) -> Array:
    match law:
        case laws.Power():
            slope, level = np.polyfit(x.c, np.log(points.loss), 1)
            return np.array([[level, -slope], [level, -slope / 2]])
        case laws.Compute():
            linear = _project(np.exp(-EXPONENTS[:, None, None] * x.c), points.loss)
            return np.column_stack([linear, EXPONENTS])
        case laws.Kaplan():
            level = np.log(points.loss).mean()
            exponents = (0.04, 0.07, 0.1, 0.15, 0.25)
            choices = itertools.product(exponents, (0.4, 0.7, 1, 1.5), (-3, 0, 3))
            return np.array(
                [[level / g + lean, r, level / g - lean, np.log(g)] for g, r, lean in choices]
            )
    base = _two_terms(points, x)
    match law:
        case laws.Routed():
            none = np.zeros((len(base), 2))
            return np.column_stack([base[:, :3], none, base[:, 3:], none])
        case laws.DataConstrained():  # arXiv 2305.16264: R* of 15 for tokens, 5 for parameters
            repeats = [np.full((len(base), 2), np.log(r)) for r in (3, 10, 30)]
            return np.concatenate([np.column_stack([base, r]) for r in repeats])
        case laws.Gamma():
            # Exponents and coefficients divided by γ: each term alone then keeps its size.
            parts = [
                np.column_stack([base[:, :1], base[:, 1:] / g, np.full(len(base), np.log(g))])
                for g in (0.5, 0.75, 1, 1.5)
            ]
            return np.concatenate(parts)
        case laws.Chinchilla():
            return base
        case _:
            raise TypeError(f"{law.name} is not fitted from starts")


def _two_terms(points: Points, x: laws.Inputs) -> Array:
    """Starts of Chinchilla's law: pairs of exponents, with their coefficients solved linearly."""
    exponents = np.array(list(itertools.product(EXPONENTS, EXPONENTS)))
    linear = _project(np.exp(-exponents[:, :, None] * np.stack([x.n, x.d])), points.loss)
    return np.column_stack([linear[:, :2], exponents[:, 0], linear[:, 2], exponents[:, 1]])


def _project(basis: Array, loss: Array) -> Array:
    """Logs of E and the coefficients, by relative least squares; negative ones become small."""
    design = np.concatenate([np.ones((len(basis), 1, len(loss))), basis], axis=1) / loss
    normal = design @ design.transpose(0, 2, 1)
    ridge = 1e-9 * np.einsum("rii->ri", normal)[:, :, None] * np.eye(normal.shape[1])
    solved = np.linalg.solve(normal + ridge, design.sum(axis=2)[:, :, None])[:, :, 0]
    return np.asarray(np.log(np.maximum(solved, 1e-2 * loss.min())))


# --- variable projection -----------------------------------------------------------------------


class Projected(laws.Chinchilla):
    """Chinchilla's law by least squares on the loss itself, with E, A and B not below zero.

    For each α and β the rest is linear, so only those two are searched. Exact on points without
    noise, where a parabola through an isoFLOP valley is not.
    """

    name = "vpnls"


def vpnls(points: Points) -> Fit:
    """The best E, A, B for the best α, β; the objective is the sum of squared errors of loss."""
    x = laws.Inputs.of(points)

    def solve(pair: Array) -> tuple[Array, float]:
        alpha, beta = pair
        design = np.stack([np.ones(len(points)), np.exp(-alpha * x.n), np.exp(-beta * x.d)], axis=1)
        linear, norm = optimize.nnls(design, points.loss)
        return linear, float(norm)

    def error(pair: Array) -> float:
        return solve(pair)[1]

    grid = np.geomspace(0.03, 1.5, 16)
    ranked = sorted((np.array(pair) for pair in itertools.product(grid, grid)), key=error)
    found = [
        optimize.minimize(error, start, method="Nelder-Mead", tol=1e-13) for start in ranked[:4]
    ]
    best = min(found, key=lambda result: float(result.fun))
    linear, norm = solve(best.x)
    E, A, B = np.log(np.maximum(linear, 1e-12))
    theta = np.array([E, A, best.x[0], B, best.x[1]])
    near = np.mean([result.fun <= best.fun * (1 + 1e-4) + 1e-12 for result in found])
    return Fit(Projected(), theta, x, points, norm**2, float(near))
