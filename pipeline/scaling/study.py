"""From points to a law and what may be said about it: choose what the data can determine, and say the rest aloud."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.errors import ConfigError, DataError
from pipeline.scaling.figures import count, power
from pipeline.scaling.fit import Fit, fit
from pipeline.scaling.frontier import at, exponents, optimum
from pipeline.scaling.interval import Scatter, scatter
from pipeline.scaling.laws import Chinchilla, Compute, Law, Power
from pipeline.scaling.points import Array, Points

LAWS: dict[str, Law] = {"chinchilla": Chinchilla(), "compute": Compute(), "power": Power()}
SPARE = 2  # points beyond the parameters before a law is trusted to be determined at all
ACROSS = 0.15  # spread of log D about its trend in log N, below which N and D cannot be told apart


@dataclass(frozen=True)
class Study:
    """A fit with its uncertainty and its warnings in plain words."""

    fit: Fit
    scatter: Scatter
    warnings: tuple[str, ...]

    def band(self, C: Array) -> dict[str, Array]:
        """The law against compute, on the frontier where it knows one, with its 95% interval."""
        best = optimum(self.fit, C)
        blank = np.full_like(C, np.nan)
        places = at(self.fit.points, C, blank, blank) if best is None else at(self.fit.points, C, best.N, best.D)
        loss = self.fit.predict(places)
        half = self.scatter.half_width(places)
        return {"C": C, "loss": loss, "low": loss * np.exp(-half), "high": loss * np.exp(half)}

    def to_json(self) -> dict[str, Any]:
        errors, t = self.scatter.standard_errors(), self.scatter.t
        split = exponents(self.fit)
        return {
            "law": self.fit.law.name,
            "formula": self.fit.law.formula,
            "parameters": {
                name: {"value": value, "se": se, **span(name, value, t * se)}
                for (name, value), se in zip(self.fit.values.items(), map(float, errors), strict=True)
            },
            "objective": self.fit.objective,
            "exponents": None if split is None else {"a": split[0], "b": split[1]},
            "points": {"used": len(self.fit.points), "dropped": list(self.fit.points.dropped)},
            "convention": self.fit.points.convention,
            "warnings": list(self.warnings),
        }


def span(name: str, value: float, half: float) -> dict[str, float]:
    """A 95% interval; a coefficient is positive, so its interval is even in its logarithm."""
    if not name.isupper():
        return {"low": value - half, "high": value + half}
    ratio = np.exp(min(half / value, 700.0)) if value > 0 else float("inf")
    return {"low": float(value / ratio), "high": float(value * ratio)}


def study(points: Points, law: str = "auto", *, full_grid: bool = False) -> Study:
    """Fit the named law, or with `auto` the richest one that these points can determine."""
    check(points)
    notes = list(points.warnings)
    if law == "auto":
        chosen, why = choose(points)
        notes += why
    elif law in LAWS:
        chosen = LAWS[law]
    else:
        raise ConfigError(f"law={law!r} is unknown; choose auto, {', '.join(LAWS)}")
    result = fit(points, chosen, full_grid=full_grid)
    spread = scatter(result)
    return Study(result, spread, (*notes, *doubts(result, spread)))


def check(points: Points) -> None:
    """Refuse what no law can be drawn through."""
    if len(points) < 2:
        raise DataError(
            f"points={len(points)}: a law needs at least two finished runs of different compute; {more(points)}"
        )
    if points.C.max() < 1.5 * points.C.min():
        raise DataError(
            f"compute spans only {points.C.max() / points.C.min():.2f}×; add runs with at least 4× more FLOPs "
            f"(such as {power(4 * points.C.max())})"
        )
    order = np.argsort(points.C)
    third = max(1, len(order) // 3)
    early, late = points.loss[order[:third]], points.loss[order[-third:]]
    if late.min() >= early.min():
        raise DataError(
            f"loss rises with compute (best {early.min():.4g} at the smallest budgets, {late.min():.4g} at the "
            f"largest): no law describes that; look for runs that diverged or stopped early, such as "
            f"{points.run[order[-1]]}"
        )


def tangled(points: Points) -> bool:
    """Whether N and D grow together so that their effects cannot be told apart."""
    n, d = np.log(points.N), np.log(points.D)
    if len(np.unique(points.N)) < 3 or len(points) < 4:
        return True
    slope, level = np.polyfit(n, d, 1)
    return bool(np.std(d - slope * n - level) < ACROSS)


def choose(points: Points) -> tuple[Law, list[str]]:
    """The richest law with points to spare, and the reasons in plain words."""
    runs = len(points)
    if runs >= 5 + SPARE and not tangled(points):
        return LAWS["chinchilla"], []
    why = (
        "N and D grow together in these runs, so their effects cannot be told apart"
        if runs >= 5 + SPARE
        else f"{runs} runs cannot determine the five parameters of L = E + A·N^−α + B·D^−β"
    )
    if runs >= 3 + SPARE:
        return LAWS["compute"], [f"{why}; fitted L = E + K·C^−g along this ladder instead. {more(points)}"]
    return LAWS["power"], [
        f"{why}, nor a floor E; fitted the straight line L = K·C^−g instead. It has no floor, so it is too "
        f"optimistic far beyond the last run: read it within the measured range. {more(points)}"
    ]


def more(points: Points) -> str:
    """Which runs would determine more."""
    if not len(points):
        return "start with three sizes at 20 tokens per parameter."
    middle = int(np.argsort(points.C)[len(points) // 2])
    N, D, C = points.N[middle], points.D[middle], points.C[middle]
    missing = max(2, 5 + SPARE - len(points))
    return (
        f"{missing} more runs would, off this line and at equal compute: for C ≈ {power(C)} FLOPs, "
        f"N = {count(N / 2)} on {count(D * 2)} tokens and N = {count(N * 2)} on {count(D / 2)}, and the same about a "
        f"smaller and a larger run."
    )


def doubts(result: Fit, spread: Scatter) -> list[str]:
    """What in this fit the data do not determine."""
    said: list[str] = []
    values, errors = result.values, dict(zip(result.values, spread.standard_errors(), strict=True))
    if spread.freedom == 0:
        said.append("As many parameters as points: nothing is left over to say how wrong the law is.")
    elif spread.freedom <= 2:
        spare = f"{spread.freedom} point{'s' * (spread.freedom > 1)}"
        said.append(f"Only {spare} to spare: the interval is wide because little is known.")
    if "E" in values:
        low = values["E"] - spread.t * errors["E"]
        if values["E"] < 1e-2 * result.points.loss.min():
            said.append("E ran to zero: the floor is not determined by these points. Do not quote it.")
        elif not low > 0:
            said.append(f"E = {values['E']:.3g}, uncertain down to zero: the floor is not determined. Do not quote it.")
    for name in ("alpha", "beta", "g"):
        if name in values and values[name] <= 0:
            said.append(f"{name} = {values[name]:.3g} is not above zero: loss does not fall that way in these points.")
    if result.agreement < 0.2:
        share = f"{result.agreement:.0%}"
        said.append(f"Only {share} of the starts reached this optimum: there may be a better one (--full-grid).")
    return said
