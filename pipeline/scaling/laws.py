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


BOUNDS = (-5, 12)  # of log R*: beyond them repeats are worth nothing, or as much as new tokens


class DataConstrained(Chinchilla):
    """Muennighoff et al., arXiv 2305.16264: N and D count only as far as U distinct tokens carry them."""

    name = "data-constrained"
    formula = "L = E + A·N′^−α + B·D′^−β, D′ = U·(1 + R*(1 − exp(−(D/U − 1)/R*)))"
    parameters = ("E", "A", "alpha", "B", "beta", "R_D", "R_N")

    def log_loss(self, theta: Array, x: Inputs) -> tuple[Array, Array]:
        e, a, alpha, b, beta, r_d, r_n = (column[:, None] for column in theta.T)
        alpha, beta = np.maximum(alpha, 1e-6), np.maximum(beta, 1e-6)
        # N*(U): where a parameter more and a token more help alike, αA·N^−α = βB·D^−β.
        level = np.log(alpha / beta) + a - b + beta * x.u
        short = level / alpha < x.n  # fewer parameters than N can be filled
        s_n, by_u, by_r_n = saturated(x.n, np.where(short, level / alpha, x.n), r_n)
        s_d, _, by_r_d = saturated(x.d, x.u, r_d)
        value, (floor, first, second) = mix(e, a - alpha * s_n, b - beta * s_d)
        through = -alpha * by_u * short  # what N*(U) passes on of the parameters it is made of
        return value, np.stack(
            [
                floor,
                first * (1 + through / alpha),
                first * (-s_n + through * (1 - level) / alpha**2),
                second - first * through / alpha,
                -second * s_d + first * through * (x.u - 1 / beta) / alpha,
                -second * beta * by_r_d,
                -first * alpha * by_r_n,
            ]
        )

    def natural(self, theta: Array, x: Inputs) -> Array:
        return np.concatenate([super().natural(theta[:, :5], x), np.exp(theta[:, 5:])], axis=1)


def saturated(used: Array, distinct: Array, log_half: Array) -> tuple[Array, Array, Array]:
    """log of U·(1 + R*·(1 − exp(−R/R*))) for R = used/U − 1 repeats, in logs, and its slopes by log U and log R*."""
    half = np.exp(np.clip(log_half, *BOUNDS))
    repeats = np.expm1(np.clip(used - distinct, 0, 50))
    left = np.exp(-repeats / half)
    worth = 1 + half * (1 - left)
    return (
        distinct + np.log(worth),
        1 - left * (repeats + 1) / worth,
        (half * (1 - left) - repeats * left) / worth,
    )


class Routed(Law):
    """Ludziejewski et al., arXiv 2502.05172: N counts active parameters, M experts; dense runs are M = 1."""

    name = "moe"
    formula = "L = E + A·M^δ·N^−(α+γ·ln M) + B·M^ω·D^−(β+ζ·ln M)"
    parameters = ("E", "A", "alpha", "delta", "gamma", "B", "beta", "omega", "zeta")

    def log_loss(self, theta: Array, x: Inputs) -> tuple[Array, Array]:
        e, a, alpha, delta, gamma, b, beta, omega, zeta = (column[:, None] for column in theta.T)
        value, share = mix(
            e,
            a + delta * x.m - (alpha + gamma * x.m) * x.n,
            b + omega * x.m - (beta + zeta * x.m) * x.d,
        )
        first, second = share[1], share[2]
        return value, np.stack(
            [share[0], first, -first * x.n, first * x.m, -first * x.m * x.n,
             second, -second * x.d, second * x.m, -second * x.m * x.d]
        )  # fmt: skip

    def natural(self, theta: Array, x: Inputs) -> Array:
        e, a, alpha, delta, gamma, b, beta, omega, zeta = theta.T
        n0, d0, _, m0 = x.centre
        return np.stack(
            [np.exp(e),
             np.exp(a - delta * m0 + alpha * n0 - gamma * m0 * n0), alpha - gamma * m0, delta + gamma * n0, gamma,
             np.exp(b - omega * m0 + beta * d0 - zeta * m0 * d0), beta - zeta * m0, omega + zeta * d0, zeta], axis=1
        )  # fmt: skip

    def balance(
        self, values: dict[str, float], experts: float
    ) -> tuple[float, float, float, float] | None:
        m = float(np.log(experts))
        v = values
        return (
            float(np.log(v["A"])) + v["delta"] * m, v["alpha"] + v["gamma"] * m,
            float(np.log(v["B"])) + v["omega"] * m, v["beta"] + v["zeta"] * m,
        )  # fmt: skip


_ALL: tuple[Law, ...] = (
    Chinchilla(),
    Gamma(),
    Kaplan(),
    Routed(),
    DataConstrained(),
    Compute(),
    Power(),
)
LAWS: dict[str, Law] = {law.name: law for law in _ALL}
