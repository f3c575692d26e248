"""The laws: each maps centred logarithms to log loss, with its analytic gradient, for many parameter vectors at once.

R parameter vectors × n points. Every law is a log-sum-exp of terms, so nothing overflows, and the
logarithms are centred, so that a coefficient and its exponent are nearly independent (uncentred, Hoffmann's
objective converges from 7% of starts; centred, with a gradient, from 37%).
"""

from dataclasses import dataclass
from functools import reduce

import numpy as np

from pipeline.scaling.points import Array, Points

KNOWN = (
    0.35,
    0.1,
)  # α·γ and β·γ of laws fitted over many decades (arXiv 2404.10102 and others), and their spread
OFF = 0.01  # relative; the losses of runs as small as forecasts are made from lie about so far off any law


@dataclass(frozen=True)
class Inputs:
    """Centred logarithms of a set of points."""

    n: Array
    d: Array
    c: Array
    m: Array  # experts
    u: Array  # distinct tokens, on the scale of d and never above it
    centre: tuple[float, float, float, float]

    @classmethod
    def of(
        cls, points: Points, centre: tuple[float, float, float, float] | None = None
    ) -> "Inputs":
        n, d, c = np.log(points.N), np.log(points.D), np.log(points.C)
        m = np.zeros_like(n) if points.experts is None else np.log(points.experts)
        u = d if points.unique is None else np.minimum(np.log(points.unique), d)
        n0, d0, c0, m0 = centre or (
            float(n.mean()),
            float(d.mean()),
            float(c.mean()),
            float(m.mean()),
        )
        return cls(n - n0, d - d0, c - c0, m - m0, u - d0, (n0, d0, c0, m0))


class Law:
    """A law with its parameter names; `theta` is (R, P), the answer (R, n) and its gradient (P, R, n)."""

    name: str
    formula: str
    parameters: tuple[str, ...]

    def log_loss(self, theta: Array, x: Inputs) -> tuple[Array, Array]:
        raise NotImplementedError

    def natural(self, theta: Array, x: Inputs) -> Array:
        """Parameters as people write them (E, A, α …), uncentred; same shape as theta."""
        raise NotImplementedError

    def balance(
        self, values: dict[str, float], experts: float
    ) -> tuple[float, float, float, float] | None:
        """log A, α, log B, β of the terms A·N^−α and B·D^−β that compute is split between; None where there are none.

        Logarithms, because a bad fit's coefficients overflow."""
        return None


def mix(*terms: Array) -> tuple[Array, Array]:
    """Log-sum-exp over the terms, and each term's share (its gradient)."""
    top = reduce(np.maximum, terms)
    z = np.empty((len(terms), *top.shape))
    for term, place in zip(terms, z, strict=True):
        np.exp(term - top, out=place)
    total = z.sum(axis=0)
    return top + np.log(total), z / total


class Chinchilla(Law):
    """Hoffmann et al., arXiv 2203.15556, approach 3."""

    name = "chinchilla"
    formula = "L = E + A·N^−α + B·D^−β"
    parameters: tuple[str, ...] = ("E", "A", "alpha", "B", "beta")

    def log_loss(self, theta: Array, x: Inputs) -> tuple[Array, Array]:
        e, a, alpha, b, beta = (column[:, None] for column in theta.T)
        value, share = mix(e, a - alpha * x.n, b - beta * x.d)
        return value, np.stack([share[0], share[1], -share[1] * x.n, share[2], -share[2] * x.d])

    def natural(self, theta: Array, x: Inputs) -> Array:
        e, a, alpha, b, beta = theta.T
        return np.stack(
            [
                np.exp(e),
                np.exp(a + alpha * x.centre[0]),
                alpha,
                np.exp(b + beta * x.centre[1]),
                beta,
            ],
            axis=1,
        )

    def balance(
        self, values: dict[str, float], experts: float
    ) -> tuple[float, float, float, float] | None:
        return (
            float(np.log(values["A"])),
            values["alpha"],
            float(np.log(values["B"])),
            values["beta"],
        )


class Gamma(Chinchilla):
    """Chinchilla's with the two shortages joined: γ < 1 where lack of one hides lack of the other."""

    name = "gamma"
    formula = "L = E + (A·N^−α + B·D^−β)^γ"
    parameters = ("E", "A", "alpha", "B", "beta", "gamma")

    def log_loss(self, theta: Array, x: Inputs) -> tuple[Array, Array]:
        e, a, alpha, b, beta, log_gamma = (column[:, None] for column in theta.T)
        gamma = np.exp(log_gamma)
        inner, part = mix(a - alpha * x.n, b - beta * x.d)
        value, share = mix(e, gamma * inner)
        outer = share[1] * gamma
        first, second = outer * part[0], outer * part[1]
        return value, np.stack(
            [share[0], first, -first * x.n, second, -second * x.d, outer * inner]
        )

    def natural(self, theta: Array, x: Inputs) -> Array:
        return np.concatenate([super().natural(theta[:, :5], x), np.exp(theta[:, 5:])], axis=1)


def steepness(law: Law, theta: Array) -> tuple[Array, Array, Array]:
    """How far the exponents lie beyond those of published laws: a penalty, its gradient and its curvature."""
    penalty, gradient, curvature = np.zeros(len(theta)), np.zeros_like(theta), np.zeros_like(theta)
    gamma = np.exp(theta[:, 5]) if isinstance(law, Gamma) else np.ones(len(theta))
    for p in (2, 4) if isinstance(law, Chinchilla) else ():
        z = np.maximum(theta[:, p] * gamma - KNOWN[0], 0) / KNOWN[1]
        penalty += OFF * z**2 / 2
        gradient[:, p] += OFF * z * gamma / KNOWN[1]
        curvature[:, p] += OFF * (z > 0) * (gamma / KNOWN[1]) ** 2
        if isinstance(law, Gamma):
            gradient[:, 5] += OFF * z * gamma * theta[:, p] / KNOWN[1]
    return penalty, gradient, curvature


class Kaplan(Law):
    """Kaplan et al., arXiv 2001.08361, equation 1.5: no floor, so loss falls for ever."""

    name = "kaplan"
    formula = "L = ((Nc/N)^(αN/αD) + Dc/D)^αD"
    parameters = ("Nc", "alpha_N", "Dc", "alpha_D")

    def log_loss(self, theta: Array, x: Inputs) -> tuple[Array, Array]:
        a, ratio, b, log_gamma = (column[:, None] for column in theta.T)
        gamma = np.exp(log_gamma)
        inner, part = mix(a - ratio * x.n, b - x.d)
        first = gamma * part[0]
        return gamma * inner, np.stack([first, -first * x.n, gamma * part[1], gamma * inner])

    def natural(self, theta: Array, x: Inputs) -> Array:
        a, ratio, b, log_gamma = theta.T
        alpha_d = np.exp(log_gamma)
        return np.stack(
            [np.exp(a / ratio + x.centre[0]), ratio * alpha_d, np.exp(b + x.centre[1]), alpha_d],
            axis=1,
        )

    def balance(
        self, values: dict[str, float], experts: float
    ) -> tuple[float, float, float, float] | None:
        ratio = values["alpha_N"] / values["alpha_D"]
        return ratio * float(np.log(values["Nc"])), ratio, float(np.log(values["Dc"])), 1.0


class Compute(Law):
    """The loss along one path through (N, D), such as a ladder of fixed tokens per parameter or the frontier."""

    name = "compute"
    formula = "L = E + K·C^−g"
    parameters = ("E", "K", "g")

    def log_loss(self, theta: Array, x: Inputs) -> tuple[Array, Array]:
        e, k, g = (column[:, None] for column in theta.T)
        value, share = mix(e, k - g * x.c)
        return value, np.stack([share[0], share[1], -share[1] * x.c])

    def natural(self, theta: Array, x: Inputs) -> Array:
        e, k, g = theta.T
        return np.stack([np.exp(e), np.exp(k + g * x.centre[2]), g], axis=1)


class Power(Law):
    """A straight line on log axes: all that two to four runs can determine. It has no floor."""

    name = "power"
    formula = "L = K·C^−g"
    parameters = ("K", "g")

    def log_loss(self, theta: Array, x: Inputs) -> tuple[Array, Array]:
        k, g = (column[:, None] for column in theta.T)
        value = k - g * x.c
        return value, np.stack([np.ones_like(value), np.broadcast_to(-x.c, value.shape)])

    def natural(self, theta: Array, x: Inputs) -> Array:
        k, g = theta.T
        return np.stack([np.exp(k + g * x.centre[2]), g], axis=1)
