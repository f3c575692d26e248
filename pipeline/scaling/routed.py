"""The law for routed experts: every coefficient and exponent of Chinchilla's may lean on the number of experts."""

import numpy as np

from pipeline.scaling.laws import Inputs, Law, mix
from pipeline.scaling.points import Array


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
