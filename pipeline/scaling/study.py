"""From points to a law: which law they can support, how well it forecasts, and its uncertainty."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.errors import ConfigError, DataError
from pipeline.scaling.fitting import Fit, Show, descend, fit, screened, silent, vpnls
from pipeline.scaling.frontier import Minima, Optimum, at, envelope, exponents, isoflop, optimum
from pipeline.scaling.intervals import Profile, Scatter, bootstrap, doubts, profile, scatter
from pipeline.scaling.laws import (
    LAWS,
    Inputs,
    Law,
)
from pipeline.scaling.points import Array, Points, runs_across
from pipeline.units import count, power

CUTS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # share of the points, by compute, that a fit may see
STARTS = 6
ROUGH = 1e-6  # relative, of the objective: errors are wanted to a hundredth of themselves
ENOUGH = 8  # errors, before their 95th percentile means anything
MANY = 1000  # points, evenly by compute: more say nothing new about errors
VALLEY = 0.025  # loss above the best for its compute, relative, at which a point counts half
NEIGHBOUR = 1.2  # budgets within 20% are one


@dataclass(frozen=True)
class Backtest:
    """One law's errors, log(measured / predicted), with how far beyond the fit and the frontier each lay."""

    law: Law
    errors: Array
    ratio: Array  # compute over the largest fitted
    excess: Array  # log of the predicted loss over the best predicted for that compute
    cut: Array  # the largest compute the fit was shown

    @property
    def score(self) -> float:
        """Mean absolute error, scaled like the interval, later cuts counting more."""
        return float(
            np.average(np.abs(self.errors) / growth(self.ratio, self.excess), weights=self.cut)
        )

    def half_width(self, ratio: Array, excess: Array) -> Array:
        """Half the 95% interval of log loss: the 95th percentile of scaled errors, later cuts counting more."""
        scaled = np.abs(self.errors) / growth(self.ratio, self.excess)
        order = np.argsort(scaled)
        share = np.cumsum(self.cut[order]) / self.cut.sum()
        last = min(int(np.searchsorted(share, 0.95)), len(order) - 1)
        half: Array = scaled[order][last] * growth(ratio, excess)
        return half


def growth(ratio: Array, excess: Array) -> Array:
    """How errors widen: once more per decade beyond the fit, and per 5% of loss above the frontier."""
    return (1 + np.log10(np.maximum(ratio, 1))) * (1 + excess / 0.05)


def focus(points: Points, law: Law) -> Array:
    """Weights for forecasting: what lies near the largest compute and near the best loss for its compute counts most.

    No law here holds over four decades and for badly split runs as well, and a forecast is asked for neither.
    On 16 public sets, where these constants were also chosen, forecasts went from 7% off to 2% (docs/SCALING.md).
    """
    best = np.array([points.loss[NEIGHBOUR * c >= points.C].min() for c in points.C])
    excess = points.loss / best - 1
    sharp = points.C / points.C.max() / (1 + (excess / VALLEY) ** 2)
    # Softened until Kish's effective number of points is twice the parameters: a law on five points is a whim.
    for sharpness in np.linspace(1, 0, 21):
        weights: Array = sharp**sharpness
        if weights.sum() ** 2 / (weights**2).sum() >= 2 * len(law.parameters):
            break
    return np.asarray(weights / weights.mean())


def waste(fit: Fit, points: Points, loss: Array) -> Array:
    """How badly N and D are split, as the law sees it: log of the predicted loss over the best for that compute."""
    best = optimum(fit, points.C, points.experts)
    return (
        np.zeros(len(points))
        if best is None
        else np.nan_to_num(np.maximum(np.log(loss / best.loss), 0))
    )


def backtest(points: Points, law: Law) -> Backtest | None:
    """All cuts descend at once, with weight zero above each; None where no cut leaves enough below it."""
    if len(points) > MANY:
        points = points.take(np.argsort(points.C)[:: -(-len(points) // MANY)])
    x = Inputs.of(points)
    edges: list[float] = []
    starts: list[Array] = []
    weights: list[Array] = []
    for cut in CUTS:
        edge = float(points.C[np.quantile(points.C, cut) >= points.C].max())
        below = edge >= points.C
        if below.sum() < len(law.parameters) + 2 or below.all() or edge in edges:
            continue
        weight = np.zeros(len(points))
        weight[below] = focus(points.take(below), law)
        edges.append(edge)
        starts.append(screened(points, law, x, STARTS, weight))
        weights.append(np.repeat(weight[None], len(starts[-1]), axis=0))
    if not edges:
        return None
    theta, value = descend(
        points,
        law,
        x,
        np.concatenate(starts),
        np.concatenate(weights),
        tempered=True,
        tolerance=ROUGH,
    )
    bounds = np.cumsum([len(tried) for tried in starts])[:-1]
    found = [
        t[np.argmin(v)]
        for t, v in zip(np.split(theta, bounds), np.split(value, bounds), strict=True)
    ]
    tests = [
        forward(Fit(law, best, x, points, 0.0, 0.0), edge)
        for best, edge in zip(found, edges, strict=True)
    ]
    return Backtest(law, *map(np.concatenate, zip(*tests, strict=True)))


def forward(fit: Fit, edge: float) -> tuple[Array, Array, Array, Array]:
    above = fit.points.take(edge < fit.points.C)
    loss = fit.predict(above)
    return (
        np.log(above.loss / loss),
        above.C / edge,
        waste(fit, above, loss),
        np.full(len(above), edge),
    )


SPARE = 2  # points beyond the parameters before a law is trusted to be determined at all
ACROSS = 0.15  # spread of log D about its trend in log N, below which N and D cannot be told apart
EXACT = 1e-5  # backtest error below which the simpler law needs no rival


def check(points: Points) -> None:
    """Refuse what no law can be drawn through."""
    if len(points) < 2:
        gone = f" ({len(points.dropped)} left out: {points.dropped[0]} …)" if points.dropped else ""
        raise DataError(
            f"points={len(points)}{gone}: a law needs at least two finished runs of different compute; train "
            f"{runs_across(points)}"
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
            f"largest): no law describes that; look for runs that diverged or stopped early, and train "
            f"{points.run[order[-1]]} again, at a lower rate"
        )


def check_law(points: Points, law: Law) -> None:
    """Refuse a law that was asked for by name and lacks what it needs."""
    missing = len(law.parameters) - len(points)
    if missing > 0:
        raise DataError(
            f"law={law.name} has {len(law.parameters)} parameters and there are {len(points)} points; train "
            f"{missing} more, such as {runs_across(points)}, or choose --law auto"
        )
    for key in ("N", "D") if law.name not in ("compute", "power") else ():
        if len(values := np.unique(getattr(points, key))) < 2:
            raise DataError(
                f"law={law.name}: all runs have {key} = {count(values[0])}; train {runs_across(points)}"
            )
    if law == LAWS["moe"] and (points.experts is None or len(np.unique(points.experts)) < 2):
        raise DataError(
            "law=moe needs a column `experts` with at least two values (1 for dense runs)"
        )
    if law == LAWS["data-constrained"] and (
        points.unique is None or not (1.5 * points.unique < points.D).any()
    ):
        raise DataError(
            "law=data-constrained needs a column `unique` (distinct tokens) and runs that repeat data"
        )


def tangled(points: Points) -> bool:
    """Whether N and D grow together so that their effects cannot be told apart."""
    n, d = np.log(points.N), np.log(points.D)
    if len(np.unique(points.N)) < 3 or len(points) < 4:
        return True
    slope, level = np.polyfit(n, d, 1)
    return bool(np.std(d - slope * n - level) < ACROSS)


def choose(points: Points) -> tuple[Law, Backtest | None, list[str]]:
    """The law for these points, its backtest, and the reasons in plain words."""
    runs = len(points)
    if runs >= 5 + SPARE and not tangled(points):
        return by_backtest(points)
    sizes = len(np.unique(points.N))
    if runs < 5 + SPARE:
        why = f"{runs} runs cannot determine the five parameters of L = E + A·N^−α + B·D^−β"
    elif len(np.unique(points.D)) < 2:
        why = "One length cannot tell what D does"
    elif sizes < 3:
        why = f"{sizes} size{'s' * (sizes > 1)} cannot tell what N does; add runs of {3 - sizes} other sizes or more"
    else:
        why = "N and D grow together in these runs, so their effects cannot be told apart"
    notes = []
    if sizes > 1 and points.D.max() < 1.1 * points.D.min():
        notes = [
            f"All runs saw the same {count(points.D[0])} tokens: this law is about size alone, at that length."
        ]
    if runs >= 3 + SPARE:
        said = f"{why}; fitted L = E + K·C^−g along this ladder instead. {more(points)}"
        return LAWS["compute"], backtest(points, LAWS["compute"]), [said, *notes]
    said = (
        f"{why}, nor a floor E; fitted the straight line L = K·C^−g instead. It has no floor, so it is too "
        f"optimistic far beyond the last run: read it within the measured range. {more(points)}"
    )
    return LAWS["power"], None, [said, *notes]


def by_backtest(points: Points) -> tuple[Law, Backtest | None, list[str]]:
    """The law that forecast best from below; the simpler one where both are exact."""
    names = ["chinchilla", "kaplan", "gamma"]
    if points.experts is not None and len(np.unique(points.experts)) > 1:
        names = ["moe"]
    elif points.unique is not None and (1.5 * points.unique < points.D).any():
        names = ["chinchilla", "data-constrained"]
    tests = [
        test
        for name in names
        if (test := backtest(points, LAWS[name])) and len(test.errors) >= ENOUGH
    ]
    if not tests:
        law = (
            LAWS[names[0]]
            if len(points) >= len(LAWS[names[0]].parameters) + SPARE
            else LAWS["chinchilla"]
        )
        return (
            law,
            None,
            [
                f"Too few runs to test {law.name} against held-out larger ones: its interval is a guess."
            ],
        )
    best = min(tests, key=lambda test: max(test.score, EXACT))
    return best.law, best, []


def more(points: Points) -> str:
    """How many runs would determine more, and which."""
    return f"{max(2, 5 + SPARE - len(points))} more runs would, off this line and at equal compute: {runs_across(points)}."


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
