"""The law for repeated data: a token seen again is worth less, and so is a parameter the data cannot fill."""

from dataclasses import dataclass

import numpy as np

from pipeline.scaling.laws import Inputs, mix
from pipeline.scaling.points import Array


@dataclass(frozen=True)
class DataConstrained:
    """Muennighoff et al., arXiv 2305.16264: N and D count only as far as U distinct tokens carry them."""

    name: str = "data-constrained"
    formula: str = "L = E + A·N′^−α + B·D′^−β, D′ = U·(1 + R*(1 − exp(−(D/U − 1)/R*)))"
    parameters: tuple[str, ...] = ("E", "A", "alpha", "B", "beta", "R_D", "R_N")

    def log_loss(self, theta: Array, x: Inputs) -> tuple[Array, Array]:
        """Central differences: the parameters' saturation hangs on all the others through N*(U)."""
        step = 1e-6
        nudge = step * np.eye(theta.shape[1])
        slopes = [(self._value(theta + by, x) - self._value(theta - by, x)) / (2 * step) for by in nudge]
        return self._value(theta, x), np.stack(slopes)

    def _value(self, theta: Array, x: Inputs) -> Array:
        e, a, alpha, b, beta, r_d, r_n = (column[:, None] for column in theta.T)
        # N*(U): where a parameter more and a token more help alike, αA·N^−α = βB·D^−β.
        balanced = np.log(np.maximum(alpha, 1e-6) / np.maximum(beta, 1e-6)) + a - b + beta * x.u
        u_n = np.minimum(x.n, balanced / np.maximum(alpha, 1e-6))
        value, _ = mix(e, a - alpha * saturated(x.n, u_n, r_n), b - beta * saturated(x.d, x.u, r_d))
        return value

    def natural(self, theta: Array, x: Inputs) -> Array:
        e, a, alpha, b, beta, r_d, r_n = theta.T
        return np.stack(
            [np.exp(e), np.exp(a + alpha * x.centre[0]), alpha, np.exp(b + beta * x.centre[1]), beta,
             np.exp(r_d), np.exp(r_n)], axis=1
        )  # fmt: skip

    def balance(self, values: dict[str, float], experts: float) -> tuple[float, float, float, float] | None:
        """With fresh data for all."""
        return values["A"], values["alpha"], values["B"], values["beta"]


def saturated(log_used: Array, log_distinct: Array, log_half: Array) -> Array:
    """log of U·(1 + R*·(1 − exp(−R/R*))), R = used/U − 1 repeats."""
    half = np.exp(np.clip(log_half, -5, 12))
    repeats = np.expm1(np.clip(log_used - log_distinct, 0, 50))
    worth: Array = log_distinct + np.log1p(-half * np.expm1(-repeats / half))
    return worth
