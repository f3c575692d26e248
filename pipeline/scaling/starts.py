"""Where descents begin: exponents from a grid, coefficients by variable projection, the best of them kept."""

import itertools

import numpy as np

from pipeline.scaling.laws import Chinchilla, Compute, Gamma, Inputs, Kaplan, Law, Power
from pipeline.scaling.points import Array, Points
from pipeline.scaling.repeats import DataConstrained
from pipeline.scaling.routed import Routed

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
