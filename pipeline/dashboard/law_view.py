"""The page's data about a law: its line, the valleys, its uncertainty, and its forecasts."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from pipeline.config.layers import CONFIGS, read_toml
from pipeline.dashboard.payload import short, text
from pipeline.errors import DataError
from pipeline.runs.history import Run
from pipeline.scaling import decide
from pipeline.scaling.annealing import with_curves
from pipeline.scaling.frontier import (
    UnitFlops,
    at,
    bottom,
    budgets_of,
    flops_per_parameter_token,
    valley,
)
from pipeline.scaling.points import Array, Points, points_of
from pipeline.scaling.predict import PROVEN_REACH, is_far
from pipeline.scaling.record import Score, about_targets
from pipeline.scaling.study import RESAMPLES, Study, study
from pipeline.units import count, power

AHEAD = 10.0  # the law is drawn up to this multiple of the largest run's compute
AROUND = 4.0  # the law of a size is drawn this factor beyond its shortest and longest run
STOPS_PER_DECADE = 20  # of the sliders
DECADES_BELOW = 2  # range of the sliders around the largest run
DECADES_ABOVE = 4
GPUS = (1, 8, 64, 512)  # choices on the page; planning all sizes for one of them takes a second
SIZES = 2.0 ** np.linspace(-4, 4, 33)  # multiples of N*, at each compute


def law_data(
    runs: Sequence[Run], law: str, forecasts: Sequence[Score], curved: Sequence[Run] | None = None
) -> dict[str, Any]:
    """Return the law of a group of runs, or the reason if none can be fitted.

    `curved` are runs with whole logs, whose losses before the decay are points too.
    """
    # Losses and accuracies have separate charts.
    made = {
        "forecasts": [dict(vars(score)) for score in forecasts if score.task is None],
        "task_forecasts": [dict(vars(score)) for score in forecasts if score.task is not None],
    }
    try:
        points = points_of(runs)
        fitted = points if curved is None else with_curves(points, curved)
        # The page draws intervals, so a law that was requested by name is backtested too.
        done = study(fitted, law, tested=True, resamples=RESAMPLES)
    except DataError as error:
        return {"law": None, "warnings": [f"No law yet: {error}"], **made}
    used = _columns(done.fit.points)
    used["residual"] = _numbers(done.fit.residuals)
    backtest = None
    if done.backtest is not None:
        errors = _numbers(np.expm1(done.backtest.errors))
        backtest = {"ratio": _numbers(done.backtest.ratio), "error": errors}
    profile: dict[str, Any] | None = None
    if done.profile is not None:
        profile = {key: _numbers(getattr(done.profile, key)) for key in ("E", "objective")}
        profile |= {"low": done.profile.low, "high": done.profile.high}
    ratio = drawn_ratio(done, points)
    sentences = [in_words(done, points, ratio), *about_targets(forecasts, fitted.run)]
    sizes = {run.N: text(run.record.get("size")) for run in runs}
    return {
        **done.to_json(),
        "plain": " ".join(sentences).strip(),
        "line": line(done, points, ratio),
        "size_lines": size_lines(done, points, sizes),
        "points_used": used,
        "backtest_errors": backtest,
        "profile": profile,
        "isoflop": valleys(points, done),
        "grid": grid(done),
        **made,
    }


def line(done: Study, points: Points, ratio: float | None) -> dict[str, Any] | None:
    """Return the law with its interval for each compute; None if it has no finite losses.

    All places have the best N and D, or one ratio of tokens to parameters (see `drawn_ratio`): with
    the ratios of the runs, the line would be a zigzag. `size_lines` passes through the runs.
    """
    C = np.geomspace(points.C.min() / 2, points.C.max() * AHEAD, 120)
    loss, low, high = done.interval(_places(done, C, ratio))
    if not np.isfinite(loss).all():
        return None
    band = {"C": C.tolist(), "loss": loss.tolist(), "low": low.tolist(), "high": high.tolist()}
    return {**band, "tokens_per_param": ratio}


def drawn_ratio(done: Study, points: Points) -> float | None:
    """Return the tokens per parameter at which the line is drawn; None for the best N and D.

    If the best N and D for the compute of the runs are far outside of the runs, or do not exist
    because an exponent is below zero, the line has the median tokens per parameter of the runs.
    """
    best = done.optimum(np.geomspace(points.C.min(), points.C.max(), 20))
    if best is None:  # a law of compute alone
        return None
    if np.isfinite(best.N).all() and not is_far(done.fit.points, best.N, best.D).any():
        return None
    return float(np.median(points.D / points.N))


def _places(done: Study, C: Array, ratio: float | None) -> Points:
    """Return N and D for each compute: the best, or those with this many tokens per parameter."""
    if ratio is None:
        return done.frontier(C)
    N = UnitFlops.of(done.fit.points).at_ratio(C, ratio)
    return at(done.fit.points, C, N, ratio * N)


def size_lines(done: Study, points: Points, names: dict[float, str]) -> list[dict[str, Any]]:
    """Return the law of each size over its tokens: the loss that runs of other lengths would reach.

    `names` are the sizes by N. A law of compute alone does not know sizes.
    """
    if done.minima is not None or done.optimum(np.ones(1)) is None:
        return []
    found = []
    for N in np.unique(points.N):
        runs = points.take(points.N == N)
        D = np.geomspace(runs.D.min() / AROUND, runs.D.max() * AROUND, 60)
        C = D * np.median(runs.C / runs.D)
        loss = done.fit.predict(at(points, C, np.full_like(D, N), D))
        columns = {"flops": _numbers(C), "tokens": _numbers(D), "loss": _numbers(loss)}
        found.append({"size": names[float(N)], "N": float(N), **columns})
    return found


def in_words(done: Study, points: Points, ratio: float | None) -> str:
    """Describe the law in a few sentences; nothing if it has no finite losses."""
    top = float(points.C.max())
    places = _places(done, np.array([top / 10, top, top * 10]), ratio)
    loss, low, high = done.interval(places)
    if not np.isfinite(loss).all():
        return ""
    where = ""
    if ratio is not None:
        exists = np.isfinite(done.frontier(places.C).N).all()
        why = "are far outside of them" if exists else "do not exist for this law"
        where = (
            f" These figures are at {ratio:.3g} tokens per parameter, the median of the runs, "
            f"because the best N and D {why}."
        )
    beyond = ""
    if is_far(done.fit.points, places.N[2:], places.D[2:]).any():
        run = f"N = {count(places.N[2])} on {count(places.D[2])} tokens"
        beyond = f" That would be a run of {run}, far outside of these runs."
    words = (
        f"Up to the largest run ({power(top)} FLOPs), ten times the compute lowers the held-out "
        f"loss by about {1 - loss[1] / loss[0]:.1%}. Ten times more would give {loss[2]:.3f}"
    )
    if not math.isfinite(high[2]):
        return f"{words}; these runs do not determine an interval.{beyond}{where}"
    return f"{words} (95% interval {low[2]:.3f} to {high[2]:.3f}).{beyond}{where}"


def valleys(points: Points, done: Study) -> list[dict[str, Any]]:
    """Return each budget of two or more sizes: its runs, its valley if any, the law's N* and D*."""
    from scipy.interpolate import Akima1DInterpolator

    found = []
    for runs in budgets_of(points):
        x, losses = valley(np.log(runs.N), runs.loss)
        # Runs whose compute differs by more do not share a budget (frontier.UNEQUAL).
        if len(x) < 2 or runs.C.max() > 1.5 * runs.C.min():
            continue
        C = float(np.median(runs.C))
        entry: dict[str, Any] = {**_columns(runs), "budget": C, "valley": None, "law": None}
        if len(x) >= 4:
            fine = np.linspace(x[0], x[-1], 60)
            depth = Akima1DInterpolator(x, losses)(fine)
            entry["valley"] = {"N": _numbers(np.exp(fine)), "loss": _numbers(depth)}
        low = bottom(np.log(runs.N), runs.loss, "akima")
        entry["minimum"] = low  # a reason, where there is no minimum
        if not isinstance(low, str):
            N = math.exp(low[0])
            D = C / flops_per_parameter_token(runs) / N
            entry["minimum"] = {"N": N, "D": D, "loss": low[1]}
        best = done.optimum(np.array([C]))
        if best is not None:
            entry["law"] = {"N": float(best.N[0]), "D": float(best.D[0])}
        found.append(entry)
    return found


def grid(done: Study) -> dict[str, Any]:
    """Return forecasts at every stop of the sliders, as `launch forecast` makes them.

    The page itself computes no loss.
    """
    top = math.log10(float(done.fit.points.C.max()))
    stops = np.arange(top - DECADES_BELOW, top + DECADES_ABOVE, 1 / STOPS_PER_DECADE)
    # Round to whole stops, so that the sliders of two ladders stop at the same places.
    C = 10.0 ** (np.round(stops * STOPS_PER_DECADE) / STOPS_PER_DECADE)
    best = done.optimum(C)
    found: dict[str, Any] = {"C": C.tolist(), "sizes": None}
    if best is None:  # a law of compute alone
        places = done.frontier(C)
    else:
        # One row per compute and size, in this order: the page computes the index from both.
        N = np.outer(best.N, SIZES).ravel()
        spent = np.repeat(C, len(SIZES))
        D = spent / UnitFlops.of(done.fit.points).each(N) / N
        places = at(done.fit.points, spent, N, D)
        found |= {"sizes": SIZES.tolist(), "N": best.N.tolist(), "D": best.D.tolist()}
        found["tokens"] = D.tolist()
        far = is_far(done.fit.points, N, D) | (spent > PROVEN_REACH * done.fit.points.C.max())
        found["far"] = far.astype(int).tolist()
        found["mfu"] = speeds(float(N.min()), float(N.max()))
    loss, low, high = done.interval(places)
    return {**found, "loss": loss.tolist(), "low": low.tolist(), "high": high.tolist()}


def speeds(low: float, high: float) -> dict[str, Any]:
    """Return the planned MFU by cluster, GPUs and size, for prices as `launch forecast` gives them.

    The sizes are those that are nearest to some N between `low` and `high`.
    """
    known = sorted(decide.known_sizes().items(), key=lambda item: item[1])
    below = [i for i, (_, N) in enumerate(known) if low >= N]
    above = [i for i, (_, N) in enumerate(known) if high <= N]
    near = known[below[-1] if below else 0 : above[0] + 1 if above else len(known)]
    found: dict[str, Any] = {"N": [N for _, N in near], "gpus": list(GPUS)}
    for cluster in clusters():
        found[cluster["name"]] = [
            [_mfu(size, cluster["name"], gpus) for size, _ in near] for gpus in GPUS
        ]
    return found


@cache
def _mfu(size: str, cluster: str, gpus: int) -> float | None:
    return decide.planned_mfu(1.0, decide.priced(cluster), gpus, size)


@cache
def clusters() -> list[dict[str, Any]]:
    """Return the shipped clusters whose peak is known, to compute the time of a run."""
    paths = sorted((CONFIGS / "cluster").glob("*.toml"))
    # example.toml is a template for a site's own file, not a cluster.
    tables = [read_toml(path)["cluster"] for path in paths if path.stem != "example"]
    keys = ("name", "peak_flops", "usd_per_gpu_hour")
    return [
        {**{key: table.get(key) for key in keys}, "mfu": decide.MFU}
        for table in tables
        if table.get("peak_flops")
    ]


def _columns(points: Points) -> dict[str, list[Any]]:
    figures = {key: _numbers(getattr(points, key)) for key in ("N", "D", "C", "loss")}
    return {"run": list(points.run), **figures}


def _numbers(values: Array) -> list[float]:
    return [short(float(value)) for value in values]
