"""Quasi-Newton descent of many small problems side by side: all starts of a fit, or all its bootstrap resamples.

Huber's δ = 1e-3 lies far below the scatter of real runs, so the objective is nearly piecewise linear:
scipy's L-BFGS-B stops early from most starts, and one call per resample costs minutes.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pipeline.scaling.points import Array

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
