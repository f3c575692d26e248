"""The compute-optimal frontier of a law in N and D: where a FLOP buys most."""

from dataclasses import dataclass, replace

import numpy as np

from pipeline.scaling.fit import Fit
from pipeline.scaling.points import Array, Points


@dataclass(frozen=True)
class Optimum:
    """The best split of each compute: N*(C), D*(C) and the loss there."""

    C: Array
    N: Array
    D: Array
    loss: Array


def flops_per_parameter_token(points: Points) -> float:
    """C / (N·D) of these points: 6 by Hoffmann's convention, a little more where attention is counted."""
    return float(np.median(points.C / (points.N * points.D)))


def at(points: Points, C: Array, N: Array, D: Array) -> Points:
    """Places without a loss, in the same convention."""
    return replace(
        points, C=C, N=N, D=D, loss=np.full_like(C, np.nan), run=("",) * len(C), experts=None, unique=None, dropped=()
    )


def exponents(fit: Fit, experts: float = 1.0) -> tuple[float, float] | None:
    """a and b of N* ∝ C^a and D* ∝ C^b, where the law has them."""
    terms = fit.law.balance(fit.values, experts)
    if terms is None:
        return None
    _, alpha, _, beta = terms
    return beta / (alpha + beta), alpha / (alpha + beta)


def optimum(fit: Fit, C: Array, experts: float = 1.0) -> Optimum | None:
    """Hoffmann et al., equation 4; None for laws that know only compute."""
    terms = fit.law.balance(fit.values, experts)
    if terms is None:
        return None
    A, alpha, B, beta = terms
    unit = C / flops_per_parameter_token(fit.points)
    N = (alpha * A / (beta * B) * unit**beta) ** (1 / (alpha + beta))
    D = unit / N
    return Optimum(C, N, D, fit.predict(at(fit.points, C, N, D)))
