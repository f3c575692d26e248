"""What the data determine and what they do not: the profile of E, and doubts in plain words."""

from dataclasses import dataclass, replace

import numpy as np

from pipeline.scaling.choose import runs_across
from pipeline.scaling.figures import count
from pipeline.scaling.fit import DELTA, Fit, descend
from pipeline.scaling.interval import Scatter
from pipeline.scaling.points import Array
from pipeline.scaling.repeats import BOUNDS


@dataclass(frozen=True)
class Profile:
    """The objective at fixed values of E, everything else refitted, and where it stays within the 95% level."""

    E: Array
    objective: Array
    low: float  # zero where nothing keeps E from it
    high: float

    def beside(self, other: "Profile | None") -> "Profile":
        """This one, where the other's values are possible too."""
        return (
            self
            if other is None
            else replace(self, low=min(self.low, other.low), high=max(self.high, other.high))
        )


def profile(fit: Fit, spread: Scatter, values: int = 41) -> Profile | None:
    """Refit with E held at each of many values, more of them about the edges of what the points allow.

    None for a law without E or without points to spare."""
    if "E" not in fit.law.parameters or spread.freedom <= 0 or fit.objective < 1e-12:
        return None
    best, least = float(np.exp(fit.theta[0])), float(fit.points.loss.min())
    level = fit.objective + spread.rise
    held = np.unique(np.append(np.linspace(0.02, 0.9995, values) * least, best))
    objective = held_at(fit, held)
    for _ in range(2):  # the interval may be far narrower than the first grid
        inside = np.flatnonzero((objective <= level) | (held == best))
        edges = held[[max(inside[0] - 1, 0), min(inside[-1] + 1, len(held) - 1)]]
        finer = np.setdiff1d(np.linspace(edges[0], edges[1], values), held)
        if not len(finer):  # all of the grid is inside
            break
        order = np.argsort(together := np.append(held, finer))
        held, objective = together[order], np.append(objective, held_at(fit, finer))[order]
    inside = held[(objective <= level) | (held == best)]
    low = 0.0 if inside.min() <= held[0] else float(inside.min())
    return Profile(held, objective, low, float(inside.max()))


def held_at(fit: Fit, values: Array) -> Array:
    """The objective with E held at each value and everything else refitted."""
    starts = np.repeat(fit.theta[None], len(values), axis=0)
    starts[:, 0] = np.log(values)
    return (
        descend(fit.points, fit.law, fit.inputs, starts, fit.weights, frozen=0, tolerance=1e-8)[1]
        * DELTA
    )


def doubts(fit: Fit, spread: Scatter, of_e: Profile | None) -> list[str]:
    """What in this fit should not be quoted."""
    said: list[str] = []
    values = fit.values
    most = {letter: float(getattr(fit.points, letter).max()) for letter in "NDC"}
    nearer = f"Runs nearer to it would tell, such as N = {count(4 * most['N'])} on {count(4 * most['D'])} tokens."
    if spread.freedom <= 0:
        said.append(
            "As many parameters as points: nothing is left over to say how wrong the law is."
        )
    elif spread.freedom <= 2:
        spare = f"{spread.freedom:.0f} point{'s' * (spread.freedom > 1)}"
        said.append(f"Only {spare} to spare: the interval is wide because little is known.")
    if "E" in values:
        if values["E"] < 1e-2 * fit.points.loss.min():
            said.append(
                f"E ran to zero: the floor is not determined by these points. Do not quote it. {nearer}"
            )
        elif of_e is not None and of_e.low == 0:
            said.append(
                f"E = {values['E']:.3g}, but zero fits as well: the floor is not determined. Do not quote it. {nearer}"
            )
    for name, letter in {
        "alpha": "N",
        "beta": "D",
        "g": "C",
        "alpha_N": "N",
        "alpha_D": "D",
    }.items():
        if name in values and values[name] <= 0:
            said.append(
                f"{name} = {values[name]:.3g} is not above zero: loss does not fall that way in these points."
            )
        elif name in values and values[name] > 2:
            said.append(
                f"{name} = {values[name]:.3g} is steeper than any known law: its term is hardly seen here. Runs with "
                f"{letter} = {count(most[letter] * 4)} and {count(most[letter] / 16)}, the rest alike, would show it."
            )
    for name in ("R_D", "R_N"):
        if name in values and not BOUNDS[0] < np.log(values[name]) < BOUNDS[1]:
            said.append(
                f"{name} = {values[name]:.3g} ran to its bound: these points do not determine it. Runs of N = "
                f"{count(4 * most['N'])} that see {count(most['D'] / 64)} distinct tokens 4, 16 and 64 times would."
            )
    if spread.condition > 1e10:
        said.append(
            f"Some parameters can be traded for each other freely: quote predictions, not "
            f"parameters. What would part them: {runs_across(fit.points)}."
        )
    if fit.agreement < 0.2:
        share = f"{fit.agreement:.0%}"
        said.append(
            f"Only {share} of the starts reached this optimum: there may be a better one (--full-grid)."
        )
    return said
