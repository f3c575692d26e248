"""What the data determine and what they do not: the profile of E, and doubts in plain words."""

from dataclasses import dataclass

import numpy as np

from pipeline.scaling.choose import runs_across
from pipeline.scaling.figures import count
from pipeline.scaling.fit import DELTA, Fit, descend
from pipeline.scaling.interval import Scatter
from pipeline.scaling.points import Array


@dataclass(frozen=True)
class Profile:
    """The objective at fixed values of E, everything else refitted, and where it stays within the 95% level."""

    E: Array
    objective: Array
    low: float  # zero where nothing keeps E from it
    high: float


def profile(fit: Fit, values: int = 41) -> Profile | None:
    """Refit with E held at each of many values; None for a law without E or without points to spare."""
    spare = len(fit.points) - len(fit.theta)
    if "E" not in fit.law.parameters or spare < 1 or fit.objective < 1e-12:
        return None
    least = float(fit.points.loss.min())
    held = np.unique(np.append(np.linspace(0.02, 0.995, values) * least, np.exp(fit.theta[0])))
    starts = np.repeat(fit.theta[None], len(held), axis=0)
    starts[:, 0] = np.log(held)
    weights = None if fit.weights is None else np.repeat(fit.weights[None], len(held), axis=0)
    objective = descend(fit.points, fit.law, fit.inputs, starts, weights, frozen=0)[1] * DELTA
    # Scatter beyond δ is Laplace-like, its scale unknown: 2·n·log(S / S_min) against χ²₁ = 3.84.
    level = fit.objective * np.exp(3.84 / (2 * spare))
    inside = held[(objective <= level) | (held == np.exp(fit.theta[0]))]
    low = 0.0 if inside.min() <= held[0] else float(inside.min())
    return Profile(held, objective, low, float(inside.max()))


def doubts(fit: Fit, spread: Scatter, of_e: Profile | None) -> list[str]:
    """What in this fit should not be quoted."""
    said: list[str] = []
    values = fit.values
    most = {letter: float(getattr(fit.points, letter).max()) for letter in "NDC"}
    nearer = f"Runs nearer to it would tell, such as N = {count(4 * most['N'])} on {count(4 * most['D'])} tokens."
    if spread.freedom <= 0:
        said.append("As many parameters as points: nothing is left over to say how wrong the law is.")
    elif spread.freedom <= 2:
        spare = f"{spread.freedom:.0f} point{'s' * (spread.freedom > 1)}"
        said.append(f"Only {spare} to spare: the interval is wide because little is known.")
    if "E" in values:
        if values["E"] < 1e-2 * fit.points.loss.min():
            said.append(f"E ran to zero: the floor is not determined by these points. Do not quote it. {nearer}")
        elif of_e is not None and of_e.low == 0:
            said.append(
                f"E = {values['E']:.3g}, but zero fits as well: the floor is not determined. Do not quote it. {nearer}"
            )
    for name, letter in {"alpha": "N", "beta": "D", "g": "C", "alpha_N": "N", "alpha_D": "D"}.items():
        if name in values and values[name] <= 0:
            said.append(f"{name} = {values[name]:.3g} is not above zero: loss does not fall that way in these points.")
        elif name in values and values[name] > 2:
            said.append(
                f"{name} = {values[name]:.3g} is steeper than any known law: its term is hardly seen here. Runs with "
                f"{letter} = {count(most[letter] * 4)} and {count(most[letter] / 16)}, the rest alike, would show it."
            )
    if spread.condition > 1e10:
        said.append(
            f"Some parameters can be traded for each other freely: quote predictions, not "
            f"parameters. What would part them: {runs_across(fit.points)}."
        )
    if fit.agreement < 0.2:
        share = f"{fit.agreement:.0%}"
        said.append(f"Only {share} of the starts reached this optimum: there may be a better one (--full-grid).")
    return said
