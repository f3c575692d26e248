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


def at(
    points: Points, C: Array, N: Array, D: Array, *, run: tuple[str, ...] | None = None,
    experts: Array | None = None, unique: Array | None = None,
) -> Points:  # fmt: skip
    """Places without a loss, in the convention of these points."""
    return replace(
        points, C=C, N=N, D=D, loss=np.full_like(C, np.nan), run=run or ("",) * len(C), experts=experts, unique=unique,
        dropped=(),
    )  # fmt: skip


def exponents(fit: Fit) -> tuple[float, float] | None:
    """a and b of N* ∝ C^a and D* ∝ C^b, where the law has them (of dense models, where it knows experts)."""
    terms = fit.law.balance(fit.values, 1.0)
    if terms is None:
        return None
    _, alpha, _, beta = terms
    return beta / (alpha + beta), alpha / (alpha + beta)


def optimum(fit: Fit, C: Array, experts: Array | None = None) -> Optimum | None:
    """Hoffmann et al., equation 4; None for laws that know only compute."""
    many = np.ones_like(C) if experts is None else experts
    with np.errstate(divide="ignore"):
        terms = [fit.law.balance(fit.values, float(m)) for m in many]
    if any(term is None for term in terms):
        return None
    a, alpha, b, beta = np.array(terms, dtype=float).reshape(-1, 4).T
    unit = np.log(C / flops_per_parameter_token(fit.points))
    with np.errstate(all="ignore"):  # a fit that makes no sense has no optimum: not a number
        n = (np.log(alpha / beta) + a - b + beta * unit) / (alpha + beta)
        N, D = np.exp(n), np.exp(unit - n)
    return Optimum(C, N, D, fit.predict(at(fit.points, C, N, D, experts=experts)))
