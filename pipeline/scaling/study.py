"""From points to a law and everything that may be said about it."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.errors import ConfigError, DataError
from pipeline.scaling.backtest import ENOUGH, Backtest, backtest, focus, waste
from pipeline.scaling.bootstrap import bootstrap
from pipeline.scaling.choose import LAWS, SPARE, check, check_law, choose
from pipeline.scaling.fit import Fit, Show, fit, silent
from pipeline.scaling.frontier import Optimum, at, exponents, optimum
from pipeline.scaling.identify import Profile, doubts, profile
from pipeline.scaling.interval import Scatter, scatter
from pipeline.scaling.points import Array, Points
from pipeline.scaling.valleys import Minima, envelope, isoflop
from pipeline.scaling.vpnls import vpnls

NAMES = ("auto", *LAWS, "isoflop", "parabola", "envelope", "vpnls")


quiet = np.errstate(
    over="ignore", divide="ignore", invalid="ignore"
)  # a fit that makes no sense is told in words


@dataclass(frozen=True)
class Study:
    """A fit with its uncertainty, and its warnings in plain words."""

    name: str
    fit: Fit  # all points alike: the parameters, N* and D*
    near: Fit  # the same law for forecasting losses, focused where that was asked for
    scatter: Scatter  # about `near`
    backtest: Backtest | None
    profile: Profile | None
    minima: Minima | None
    draws: Array | None  # natural parameters of the bootstrap, (R, P)
    warnings: tuple[str, ...]

    @quiet
    def optimum(self, C: Array, experts: Array | None = None) -> Optimum | None:
        """The compute-optimal N and D, where the law or the valleys know them, and the loss foretold there."""
        if self.minima is not None:
            N, D = self.minima.path(C)
        elif (best := optimum(self.fit, C, experts)) is not None:
            N, D = best.N, best.D
        else:
            return None
        return Optimum(C, N, D, self.near.predict(at(self.fit.points, C, N, D, experts=experts)))

    @quiet
    def interval(self, places: Points) -> tuple[Array, Array, Array]:
        """Loss and its 95% interval at each place: what backtests show, and never less than the scatter allows."""
        loss = self.near.predict(places)
        half = self.scatter.half_width(places)
        if self.backtest is not None and len(self.backtest.errors) >= ENOUGH:
            ratio = places.C / self.fit.points.C.max()
            half = np.fmax(half, self.backtest.half_width(ratio, waste(self.near, places, loss)))
        return loss, loss * np.exp(-half), loss * np.exp(half)

    def frontier(self, C: Array) -> Points:
        """The compute-optimal runs; N and D are not numbers where the law knows compute alone."""
        best = self.optimum(C)
        return at(self.fit.points, C, *((C * np.nan,) * 2 if best is None else (best.N, best.D)))

    def band(self, C: Array) -> dict[str, Array]:
        """The law against compute, on the frontier where one is known."""
        return {
            "C": C,
            **dict(zip(("loss", "low", "high"), self.interval(self.frontier(C)), strict=True)),
        }

    def to_json(self) -> dict[str, Any]:
        split = (self.minima.a, self.minima.b) if self.minima else exponents(self.fit)
        return {
            "law": self.name,
            "formula": self.fit.law.formula,
            "parameters": self.parameters(),
            "errors_from": "scatter" if self.draws is None else "bootstrap",
            "objective": self.fit.objective,
            "exponents": None if split is None else {"a": split[0], "b": split[1]},
            "points": {"used": len(self.fit.points), "dropped": list(self.fit.points.dropped)},
            "convention": self.fit.points.convention,
            "starts_agreeing": self.fit.agreement,
            "backtest": None if self.backtest is None else {
                "mean_absolute_error": self.backtest.score, "errors": len(self.backtest.errors)},
            "profile_E": None if self.profile is None else {"low": self.profile.low, "high": self.profile.high},
            "minima": None if self.minima is None else [
                {key: float(getattr(self.minima.points, key)[i]) for key in ("C", "N", "D", "loss")}
                for i in range(len(self.minima.points))],
            "warnings": list(self.warnings),
        }  # fmt: skip

    @quiet
    def parameters(self) -> dict[str, dict[str, float]]:
        """Value, standard error and 95% interval: by the bootstrap where it was run, else from the scatter."""
        values = self.fit.values
        if self.draws is not None:
            low, high = np.percentile(self.draws, [2.5, 97.5], axis=0)
            errors = self.draws.std(axis=0, ddof=1)
            return {
                name: {
                    "value": value,
                    "se": float(errors[i]),
                    "low": float(low[i]),
                    "high": float(high[i]),
                }
                for i, (name, value) in enumerate(values.items())
            }
        even = scatter(self.fit)
        errors, t = even.standard_errors(), even.t
        told = {
            name: {"value": value, "se": se, **span(name, value, t * se)}
            for (name, value), se in zip(values.items(), map(float, errors), strict=True)
        }
        if self.profile is not None:  # which does not take the law for linear in E
            told["E"] |= {"low": self.profile.low, "high": self.profile.high}
        return told


def span(name: str, value: float, half: float) -> dict[str, float]:
    """A 95% interval; a coefficient is positive, so its interval is even in its logarithm."""
    if not name[0].isupper():
        return {"low": value - half, "high": value + half}
    ratio = np.exp(min(half / value, 700.0)) if value > 0 else float("inf")
    return {"low": float(value / ratio), "high": float(value * ratio)}


@quiet
def study(
    points: Points,
    law: str = "auto",
    *,
    resamples: int = 0,
    full_grid: bool = False,
    focused: bool | None = None,
    show: Show = silent,
) -> Study:
    """Fit the named law, or with `auto` the one that forecasts best of those the points can determine.

    Parameters, N* and D* always come from all points alike. Losses are forecast `focused` (see backtest.focus): with
    `auto`, and where it is asked for.
    """
    check(points)
    if law not in NAMES:
        raise ConfigError(f"law={law!r} is unknown; choose one of {', '.join(NAMES)}")
    notes, minima, test = list(points.warnings), None, None
    if law in ("isoflop", "parabola", "envelope"):
        minima = (
            envelope(points)
            if law == "envelope"
            else isoflop(points, "akima" if law == "isoflop" else "parabola")
        )
        notes += minima.notes
        points = minima.points
        chosen = LAWS["compute" if len(points) >= 4 else "power"]
    elif law == "auto":
        chosen, test, why = choose(points)
        notes += why
    else:
        chosen = LAWS["chinchilla" if law == "vpnls" else law]
    check_law(points, chosen)
    result = (
        vpnls(points) if law == "vpnls" else fit(points, chosen, full_grid=full_grid, show=show)
    )
    near = result
    if law == "auto" if focused is None else focused:
        test = test or backtest(points, chosen)
        if minima is None and len(points) > len(chosen.parameters) + 2:
            near = fit(points, chosen, weights=focus(points, chosen))
            minima, why = valleys_instead(result)
            notes += why
    of_e = None if law == "vpnls" else profile(result, scatter(result))
    if (
        law == "auto"
        and chosen.name == "chinchilla"
        and of_e
        and len(points) >= len(LAWS["gamma"].parameters) + SPARE
    ):
        of_e = of_e.beside(floor(points))
    draws = None
    # Of a handful of runs most resamples hold one twice and lack another: then the scatter is the better witness.
    if resamples and len(set(points.run)) >= 4 * len(chosen.parameters):
        draws = result.law.natural(bootstrap(result, resamples, show=show), result.inputs)
    name = chosen.name if law == "auto" else law
    said = (*notes, *doubts(result, scatter(result), of_e))
    return Study(name, result, near, scatter(near), test, of_e, minima, draws, said)


def floor(points: Points) -> Profile | None:
    """Of the γ-law, which is Chinchilla's where γ = 1: that it is 1 is an assumption, and E's interval is not to rest
    on it where nobody asked for that law."""
    wider = fit(points, LAWS["gamma"])
    return profile(wider, scatter(wider))


def valleys_instead(result: Fit) -> tuple[Minima | None, list[str]]:
    """Measured isoFLOP valleys, where there are enough and the law's N* lies elsewhere."""
    if result.points.experts is not None or result.points.unique is not None:
        return None, []  # a budget's valley then mixes architectures, or fresh data with repeated
    try:
        found = isoflop(result.points)
    except DataError:
        return None, []
    law = optimum(result, found.points.C)
    if law is None or len(found.points) < 4:
        return None, []
    off = float(np.median(np.abs(np.log(law.N / found.points.N))))
    if off < 0.1:
        return None, []
    return found, [
        f"The law's N* lies {np.expm1(off):.0%} off the measured valleys, so N* and D* are read from the valleys: the "
        f"law describes the losses, not their minima."
    ]
