"""Resample runs, refit, and see how far the parameters move."""

import numpy as np

from pipeline.scaling.fit import Fit, Show, descend, silent
from pipeline.scaling.points import Array
from pipeline.scaling.vpnls import LAW, refit


def bootstrap(fit: Fit, count: int, seed: int = 0, show: Show = silent) -> Array:
    """Theta of `count` refits, each to as many runs as there are, drawn with replacement.

    A run's rows are drawn together: they share its seed and its data order, so apart they would count twice.
    """
    names, cluster = np.unique(np.array(fit.points.run), return_inverse=True)
    draws = np.random.default_rng(seed).multinomial(
        len(names), np.full(len(names), 1 / len(names)), count
    )
    weights = draws.astype(float)[:, cluster] * (1.0 if fit.weights is None else fit.weights)
    if fit.law == LAW:
        return refit(fit, weights)
    starts = np.repeat(fit.theta[None], count, axis=0)
    return descend(fit.points, fit.law, fit.inputs, starts, weights, tolerance=1e-8, show=show)[0]
