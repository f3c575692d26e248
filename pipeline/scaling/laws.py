"""The scaling laws: each maps centered logarithms to log loss, with its analytic gradient.

A law is evaluated for R parameter vectors at n points in one call. Every law is a log-sum-exp of
terms, so nothing overflows. The logarithms are centered, which makes a coefficient nearly
independent of its exponent: uncentered, Hoffmann's objective converges from 7% of starts;
centered, from 37%.
"""

import itertools
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import numpy as np

from pipeline.scaling.points import Array, Points

# The prior of a fit for forecasting. Widths are standard deviations of logarithms, wide enough for
# every published law (arXiv 2203.15556, 2404.10102, 2406.19146, 2502.06857). Thirty runs outweigh
# the prior, and with eight runs it prevents E = 0 or β = 1.
PRIOR_EXPONENT = 0.3  # of α·γ and β·γ, where the loss falls with N or D alone
PRIOR_COMPUTE_EXPONENT = 0.15  # along a frontier: αβ / (α + β)
EXPONENT_SPREAD = 0.5
PRIOR_FLOOR = 0.5  # E over the lowest loss
FLOOR_SPREAD = 1.0
GAMMA_SPREAD = 1.0  # about γ = 1, which is Chinchilla's law
FLATTEST = 0.02  # below this exponent, the cost uses the tangent of the logarithm
REPEAT_BOUNDS = (-5.0, 12.0)  # of log R*: there, repeats count for nothing or like new tokens


@dataclass(frozen=True)
class Inputs:
    """Centered logarithms of a set of points."""

    n: Array
    d: Array
    c: Array
    m: Array  # experts
    u: Array  # distinct tokens, on the scale of d and never above it
    center: tuple[float, float, float, float]  # of n, d, c and m

    @classmethod
    def of(
        cls, points: Points, center: tuple[float, float, float, float] | None = None
    ) -> "Inputs":
        n = np.log(points.N)
        d = np.log(points.D)
        c = np.log(points.C)
        m = np.zeros_like(n) if points.experts is None else np.log(points.experts)
        u = d if points.unique is None else np.minimum(np.log(points.unique), d)
        if center is None:
            center = (float(n.mean()), float(d.mean()), float(c.mean()), float(m.mean()))
        n0, d0, c0, m0 = center
        return cls(n - n0, d - d0, c - c0, m - m0, u - d0, center)


class Terms(NamedTuple):
    """The two terms A·N^−α and B·D^−β that compute is split between."""

    log_a: float  # logarithms, because the coefficients of a bad fit overflow
    alpha: float
    log_b: float
    beta: float


class Law:
    """A law and its parameter names.

    `theta` has shape (R, P). Log loss has shape (R, n) and its gradient (P, R, n).
    """

    name: str
    formula: str
    parameters: tuple[str, ...]
    exponents: tuple[int, ...] = ()  # the columns of theta to which the exponents' prior applies
    bounded: tuple[int, ...] = ()  # the columns of theta that stay within REPEAT_BOUNDS

    def log_loss(self, theta: Array, x: Inputs) -> tuple[Array, Array]:
        raise NotImplementedError

    def natural(self, theta: Array, x: Inputs) -> Array:
        """The parameters as people write them (E, A, α …), uncentered; same shape as theta."""
        raise NotImplementedError

    def terms(self, values: dict[str, float], experts: float) -> Terms | None:
        """The terms in N and D, or None for a law of compute alone."""
        return None


def log_sum_exp(*terms: Array) -> tuple[Array, Array]:
    """The log of the summed terms, and each term's share of the sum, which is its gradient."""
    # Relative to the largest term, so that no exponential overflows.
    top = reduce(np.maximum, terms)
    parts = np.empty((len(terms), *top.shape))
    for term, part in zip(terms, parts, strict=True):
        np.exp(term - top, out=part)
    total = parts.sum(axis=0)
    return top + np.log(total), parts / total


class Chinchilla(Law):
    """Hoffmann et al., arXiv 2203.15556, approach 3."""

    name = "chinchilla"
    formula = "L = E + A·N^−α + B·D^−β"
    parameters: tuple[str, ...] = ("E", "A", "alpha", "B", "beta")
    exponents = (2, 4)

    def log_loss(self, theta: Array, x: Inputs) -> tuple[Array, Array]:
        # E, A and B are fitted as logarithms, A and B at the center of the points.
        e, a, alpha, b, beta = (column[:, None] for column in theta.T)
        value, share = log_sum_exp(e, a - alpha * x.n, b - beta * x.d)
        return value, np.stack([share[0], share[1], -share[1] * x.n, share[2], -share[2] * x.d])

    def natural(self, theta: Array, x: Inputs) -> Array:
        e, a, alpha, b, beta = theta[:, :5].T
        coefficient_n = np.exp(a + alpha * x.center[0])
        coefficient_d = np.exp(b + beta * x.center[1])
        five = np.stack([np.exp(e), coefficient_n, alpha, coefficient_d, beta], axis=1)
        # Parameters that variants of this law add after the first five are fitted as logarithms.
        return np.concatenate([five, np.exp(theta[:, 5:])], axis=1)

    def terms(self, values: dict[str, float], experts: float) -> Terms | None:
        log_a = float(np.log(values["A"]))
        log_b = float(np.log(values["B"]))
        return Terms(log_a, values["alpha"], log_b, values["beta"])


class Gamma(Chinchilla):
    """Chinchilla's law with its two terms under one exponent γ."""

    name = "gamma"
    formula = "L = E + (A·N^−α + B·D^−β)^γ"
    parameters = ("E", "A", "alpha", "B", "beta", "gamma")

    def log_loss(self, theta: Array, x: Inputs) -> tuple[Array, Array]:
        e, a, alpha, b, beta, log_gamma = (column[:, None] for column in theta.T)
        gamma = np.exp(log_gamma)
        inner, part = log_sum_exp(a - alpha * x.n, b - beta * x.d)
        # The chain rule: from the sum with E, through the power γ, to each of the two terms.
        value, share = log_sum_exp(e, gamma * inner)
        outer = share[1] * gamma
        first = outer * part[0]
        second = outer * part[1]
        return value, np.stack(
            [share[0], first, -first * x.n, second, -second * x.d, outer * inner]
        )


class Prior(NamedTuple):
    """A prior's cost in nats at each theta, its gradient and its diagonal curvature."""

    cost: Array  # (R,)
    gradient: Array  # (R, P)
    curvature: Array  # (R, P)
    terms: int  # number of quantities that it constrains


def prior(law: Law, theta: Array, lowest: Array) -> Prior:
    """Log-normal priors on E (relative to the lowest loss of the points), exponents and γ."""
    found = Prior(np.zeros(len(theta)), np.zeros_like(theta), np.zeros_like(theta), 0)
    log_gamma = theta[:, 5] if isinstance(law, Gamma) else np.zeros(len(theta))
    usual = PRIOR_COMPUTE_EXPONENT if isinstance(law, Compute) else PRIOR_EXPONENT
    # Each term: columns of theta with the slopes of its logarithm, that logarithm, and its spread.
    terms: list[tuple[dict[int, Array], Array, float]] = []
    one = np.ones(len(theta))
    if law.parameters[0] == "E":
        terms.append(({0: one}, theta[:, 0] - np.log(PRIOR_FLOOR * lowest), FLOOR_SPREAD))
    for p in law.exponents:
        steep = np.maximum(theta[:, p], FLATTEST)
        value = np.log(steep) + (theta[:, p] - steep) / FLATTEST + log_gamma - np.log(usual)
        slopes = {p: 1 / steep, 5: one} if isinstance(law, Gamma) else {p: 1 / steep}
        terms.append((slopes, value, EXPONENT_SPREAD))
    if isinstance(law, Gamma):
        terms.append(({5: one}, log_gamma, GAMMA_SPREAD))
    for slopes, value, spread in terms:
        z = value / spread
        found.cost[:] += z**2 / 2
        for column, slope in slopes.items():
            found.gradient[:, column] += z * slope / spread
            found.curvature[:, column] += (slope / spread) ** 2
    return found._replace(terms=len(terms))


class DataConstrained(Chinchilla):
    """Muennighoff et al., arXiv 2305.16264: repeated tokens count less, and so do parameters that
    are too many for U distinct tokens."""

    name = "data-constrained"
    formula = "L = E + A·N′^−α + B·D′^−β, D′ = U·(1 + R*(1 − exp(−(D/U − 1)/R*)))"
    parameters = ("E", "A", "alpha", "B", "beta", "R_D", "R_N")
    bounded = (5, 6)

    def log_loss(self, theta: Array, x: Inputs) -> tuple[Array, Array]:
        e, a, alpha, b, beta, r_d, r_n = (column[:, None] for column in theta.T)
        # N*(U) divides by α and β, and a descent may step below zero.
        alpha = np.maximum(alpha, 1e-6)
        beta = np.maximum(beta, 1e-6)
        # N*(U): where more parameters and more tokens help equally, αA·N^−α = βB·D^−β.
        level = np.log(alpha / beta) + a - b + beta * x.u
        short = level / alpha < x.n  # N is above N*(U)
        s_n, by_u, by_r_n = _saturated(x.n, np.where(short, level / alpha, x.n), r_n)
        s_d, _, by_r_d = _saturated(x.d, x.u, r_d)
        value, (floor, first, second) = log_sum_exp(e, a - alpha * s_n, b - beta * s_d)
        through = -alpha * by_u * short  # the chain rule through N*(U)
        # In the order of `parameters`; all but α and β are logarithms.
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


def _saturated(used: Array, distinct: Array, log_half: Array) -> tuple[Array, Array, Array]:
    """The log of U·(1 + R*·(1 − exp(−R/R*))) for R = used/U − 1 repeats, from logarithms; then its
    slopes by log U and by log R*."""
    half = np.exp(np.clip(log_half, *REPEAT_BOUNDS))
    # e^50 repeats are beyond any data, and exp does not overflow there.
    repeats = np.expm1(np.clip(used - distinct, 0, 50))
    left = np.exp(-repeats / half)
    worth = 1 + half * (1 - left)
    by_distinct = 1 - left * (repeats + 1) / worth
    by_half = (half * (1 - left) - repeats * left) / worth
    return distinct + np.log(worth), by_distinct, by_half


class Routed(Law):
    """Ludziejewski et al., arXiv 2502.05172, for mixtures: every coefficient and exponent depends
    on the number of experts M. N counts active parameters; dense runs have M = 1."""

    name = "moe"
    formula = "L = E + A·M^δ·N^−(α+γ·ln M) + B·M^ω·D^−(β+ζ·ln M)"
    parameters = ("E", "A", "alpha", "delta", "gamma", "B", "beta", "omega", "zeta")
    exponents = (2, 6)

    def log_loss(self, theta: Array, x: Inputs) -> tuple[Array, Array]:
        e, a, alpha, delta, gamma, b, beta, omega, zeta = (column[:, None] for column in theta.T)
        of_n = a + delta * x.m - (alpha + gamma * x.m) * x.n
        of_d = b + omega * x.m - (beta + zeta * x.m) * x.d
        value, (floor, first, second) = log_sum_exp(e, of_n, of_d)
        by_n = [first, -first * x.n, first * x.m, -first * x.m * x.n]
        by_d = [second, -second * x.d, second * x.m, -second * x.m * x.d]
        return value, np.stack([floor, *by_n, *by_d])

    def natural(self, theta: Array, x: Inputs) -> Array:
        e, a, alpha, delta, gamma, b, beta, omega, zeta = theta.T
        n0, d0, _, m0 = x.center
        # Uncentering log M moves part of δ and γ into A and α, and of ω and ζ into B and β.
        log_a = a - delta * m0 + alpha * n0 - gamma * m0 * n0
        log_b = b - omega * m0 + beta * d0 - zeta * m0 * d0
        of_n = [np.exp(log_a), alpha - gamma * m0, delta + gamma * n0, gamma]
        of_d = [np.exp(log_b), beta - zeta * m0, omega + zeta * d0, zeta]
        return np.stack([np.exp(e), *of_n, *of_d], axis=1)

    def terms(self, values: dict[str, float], experts: float) -> Terms | None:
        v = values
        m = float(np.log(experts))
        return Terms(
            float(np.log(v["A"])) + v["delta"] * m,
            v["alpha"] + v["gamma"] * m,
            float(np.log(v["B"])) + v["omega"] * m,
            v["beta"] + v["zeta"] * m,
        )


class Kaplan(Law):
    """Kaplan et al., arXiv 2001.08361, equation 1.5. It has no floor: the loss falls forever."""

    name = "kaplan"
    formula = "L = ((Nc/N)^(αN/αD) + Dc/D)^αD"
    parameters = ("Nc", "alpha_N", "Dc", "alpha_D")

    def log_loss(self, theta: Array, x: Inputs) -> tuple[Array, Array]:
        # Fitted as the γ-law without E and with β = 1: γ is αD, `ratio` is αN/αD.
        a, ratio, b, log_gamma = (column[:, None] for column in theta.T)
        gamma = np.exp(log_gamma)
        inner, part = log_sum_exp(a - ratio * x.n, b - x.d)
        first = gamma * part[0]
        return gamma * inner, np.stack([first, -first * x.n, gamma * part[1], gamma * inner])

    def natural(self, theta: Array, x: Inputs) -> Array:
        a, ratio, b, log_gamma = theta.T
        alpha_d = np.exp(log_gamma)
        # (Nc/N)^ratio is fitted as exp(a − ratio·n), so log Nc = a / ratio, uncentered.
        n_c = np.exp(a / ratio + x.center[0])
        d_c = np.exp(b + x.center[1])
        return np.stack([n_c, ratio * alpha_d, d_c, alpha_d], axis=1)

    def terms(self, values: dict[str, float], experts: float) -> Terms | None:
        # The outer power αD is monotonic, so it does not move the optimum.
        ratio = values["alpha_N"] / values["alpha_D"]
        return Terms(ratio * float(np.log(values["Nc"])), ratio, float(np.log(values["Dc"])), 1.0)


class Compute(Law):
    """The loss along one path through (N, D): a ladder of fixed tokens per parameter, or the
    frontier."""

    name = "compute"
    formula = "L = E + K·C^−g"
    parameters = ("E", "K", "g")
    exponents = (2,)

    def log_loss(self, theta: Array, x: Inputs) -> tuple[Array, Array]:
        e, k, g = (column[:, None] for column in theta.T)
        value, share = log_sum_exp(e, k - g * x.c)
        return value, np.stack([share[0], share[1], -share[1] * x.c])

    def natural(self, theta: Array, x: Inputs) -> Array:
        e, k, g = theta.T
        return np.stack([np.exp(e), np.exp(k + g * x.center[2]), g], axis=1)


class Power(Law):
    """A straight line on log axes, which two to four runs can determine. It has no floor."""

    name = "power"
    formula = "L = K·C^−g"
    parameters = ("K", "g")

    def log_loss(self, theta: Array, x: Inputs) -> tuple[Array, Array]:
        k, g = (column[:, None] for column in theta.T)
        value = k - g * x.c
        return value, np.stack([np.ones_like(value), np.broadcast_to(-x.c, value.shape)])

    def natural(self, theta: Array, x: Inputs) -> Array:
        k, g = theta.T
        return np.stack([np.exp(k + g * x.center[2]), g], axis=1)


LAWS: dict[str, Law] = {
    law.name: law
    for law in (Chinchilla(), Gamma(), Kaplan(), Routed(), DataConstrained(), Compute(), Power())
}


def hoffmann_grid(x: Inputs) -> Array:
    """The 4500 starts of arXiv 2203.15556, appendix D.3, in centered coordinates."""
    steps = np.arange(0, 2.01, 0.5)
    sizes = np.arange(0, 25.1, 5)
    grid = np.array(list(itertools.product(np.arange(-1, 1.01, 0.5), sizes, steps, sizes, steps)))
    grid[:, 1] -= grid[:, 2] * x.center[0]
    grid[:, 3] -= grid[:, 4] * x.center[1]
    return grid
