"""The law for repeated data: a token seen again is worth less, and so is a parameter the data cannot fill."""

import numpy as np

from pipeline.scaling.laws import Chinchilla, Inputs, mix
from pipeline.scaling.points import Array

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
