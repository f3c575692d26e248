"""What the page says of a law: the line, the valleys, how far to trust it, and a grid of forecasts for the sliders."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from pipeline.config.layers import CONFIGS, read_toml
from pipeline.dashboard.payload import short
from pipeline.errors import DataError
from pipeline.runs.history import Run
from pipeline.scaling import predict
from pipeline.scaling.frontier import at, bottom, budgets_of, flops_per_parameter_token
from pipeline.scaling.points import Array, Points, points_of
from pipeline.scaling.record import Score
from pipeline.scaling.study import Study, study
from pipeline.units import power

AHEAD = 10.0  # how far beyond the largest run the law is drawn
PER_DECADE, BEHIND, BEYOND = 20, 2, 4  # slider stops, and decades below and above the largest run
SIZES = 2.0 ** np.linspace(-4, 4, 33)  # of N*, at each compute


def law_data(runs: Sequence[Run], law: str, forecasts: Sequence[Score]) -> dict[str, Any]:
    """The law of runs that belong together; one that cannot be fitted becomes a sentence, not a failure."""
    told = [dict(vars(score)) for score in forecasts]
    try:
        points = points_of(runs)
        done = study(points, law, focused=True)
    except DataError as error:
        return {"law": None, "warnings": [f"No law yet: {error}"], "forecasts": told}
    line = done.band(np.geomspace(points.C.min() / 2, points.C.max() * AHEAD, 120))
    return {
        **done.to_json(),
        "plain": in_words(done),
        "line": {key: values.tolist() for key, values in line.items()},
        "points_used": columns(done.fit.points) | {"residual": numbers(done.fit.residuals)},
        "backtest_errors": None if done.backtest is None else {
            "ratio": numbers(done.backtest.ratio), "error": numbers(np.expm1(done.backtest.errors))},
        "profile": None if done.profile is None else {
            "E": numbers(done.profile.E), "objective": numbers(done.profile.objective),
            "low": done.profile.low, "high": done.profile.high},
        "isoflop": valleys(points, done),
        "grid": grid(done),
        "forecasts": told,
    }  # fmt: skip


def in_words(done: Study) -> str:
    """The law as one sentence."""
    top = float(done.fit.points.C.max())
    band = done.band(np.array([top / 10, top, top * 10]))
    below, here, beyond = (float(v) for v in band["loss"])
    said = (
        f"Up to the largest run ({power(top)} FLOPs) each tenfold of compute lowers the held-out loss by about "
        f"{1 - here / below:.1%}. Ten times more compute would give {beyond:.3f}"
    )
    low, high = (float(band[key][2]) for key in ("low", "high"))
    if not math.isfinite(high):
        return said + "; these runs leave nothing over to say how far off that may be."
    return said + f" (95% interval {low:.3f} to {high:.3f})."


def valleys(points: Points, done: Study) -> list[dict[str, Any]]:
    """Each budget with two sizes or more: its runs, its valley where it has one, and the law's N* and D*."""
    from scipy.interpolate import Akima1DInterpolator

    found = []
    for runs in budgets_of(points):
        x, index = np.unique(np.log(runs.N), return_inverse=True)
        if len(x) < 2 or runs.C.max() > 1.5 * runs.C.min():
            continue
        C, each = float(np.median(runs.C)), flops_per_parameter_token(runs)
        low = bottom(np.log(runs.N), runs.loss, "akima")
        best = done.optimum(np.array([C]))
        valley = None
        if len(x) >= 4:
            fine = np.linspace(x[0], x[-1], 60)
            depth = Akima1DInterpolator(
                x, np.bincount(index, weights=runs.loss) / np.bincount(index)
            )(fine)
            valley = {"N": numbers(np.exp(fine)), "loss": numbers(depth)}
        found.append({
            **columns(runs), "budget": C, "valley": valley,
            "minimum": low if isinstance(low, str) else {
                "N": math.exp(low[0]), "D": C / each / math.exp(low[0]), "loss": low[1]},
            "law": None if best is None else {"N": float(best.N[0]), "D": float(best.D[0])},
        })  # fmt: skip
    return found


def grid(done: Study) -> dict[str, Any]:
    """Forecasts at every stop of the sliders, by the functions behind `launch forecast`: the page computes no loss."""
    top = math.log10(float(done.fit.points.C.max()))
    C = 10.0 ** (
        np.round(np.arange(top - BEHIND, top + BEYOND, 1 / PER_DECADE) * PER_DECADE) / PER_DECADE
    )
    best = done.optimum(C)
    if best is None:  # the law knows compute alone
        loss, low, high = done.interval(at(done.fit.points, C, C * np.nan, C * np.nan))
        return {
            "C": C.tolist(),
            "sizes": None,
            "loss": loss.tolist(),
            "low": low.tolist(),
            "high": high.tolist(),
        }
    each = flops_per_parameter_token(done.fit.points)
    N = np.outer(best.N, SIZES).ravel()
    D = np.repeat(C, len(SIZES)) / each / N
    loss, low, high = done.interval(at(done.fit.points, each * N * D, N, D))
    return {
        "C": C.tolist(), "sizes": SIZES.tolist(), "N": best.N.tolist(), "D": best.D.tolist(), "each": each,
        "loss": loss.tolist(), "low": low.tolist(), "high": high.tolist(),
    }  # fmt: skip


@cache
def clusters() -> list[dict[str, Any]]:
    """The shipped clusters whose peak is known, for the time that a forecast run takes."""
    paths = sorted((CONFIGS / "cluster").glob("*.toml"))
    tables = [read_toml(path)["cluster"] for path in paths if path.stem != "example"]
    return [
        {key: table.get(key) for key in ("name", "peak_flops", "usd_per_gpu_hour")}
        | {"mfu": predict.MFU}
        for table in tables
        if table.get("peak_flops")
    ]


def columns(points: Points) -> dict[str, list[Any]]:
    return {
        "run": list(points.run),
        **{key: numbers(getattr(points, key)) for key in ("N", "D", "C", "loss")},
    }


def numbers(values: Array) -> list[float]:
    return [short(float(value)) for value in values]
