"""Points from the middle of a run: held-out losses before the learning rate decays.

On the plateau of a WSD schedule the loss is higher than that of a run that ends there, because the
rate has not decayed. This gap is measured at the end of every finished run, as the plateau's trend
minus the final loss, and it changes slowly with N and D. A plateau loss minus its gap is then a
point like that of a shorter run, so that one run per size shows the effect of D. Finished runs of
three lengths show it better: the plateaus of such sizes are not used (docs/LOG.md, 2026-11-17).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from pipeline.errors import DataError
from pipeline.runs.history import Run
from pipeline.runs.log import Record
from pipeline.scaling.points import Array, Points

AT_PEAK = 0.999  # share of the largest logged rate above which the rate has not decayed
EARLIEST = 1 / 16  # share of a run; earlier losses still depend on warmup
PER_RUN = 6  # rows from one plateau; more would count the same random seed more often
TREND = 0.5  # the trend is fitted to losses after this share of the plateau's tokens
REACH = 1.5  # largest ratio of a run's tokens to those of its last plateau loss
ENOUGH_LENGTHS = 3  # finished runs of a size that show the effect of D without its plateaus
# How the gap changes when N or D grows by a factor of e, before any run is seen, as a share of the
# loss: OLMo's runs of 190M to 3B have about −0.6% and +0.5%, and curves simulated by arXiv
# 2408.11029 have +0.1% and +0.5%.
SLOPES = np.array([-0.003, 0.004])
SLOPE_SPREADS = np.array([0.004, 0.003])
GAP_NOISE = 0.001  # of one measured gap


class Plateau(NamedTuple):
    """The held-out losses of a run while its rate was at the peak, by tokens."""

    run: Run
    D: Array
    C: Array
    loss: Array


class Gap(NamedTuple):
    """log(plateau loss / annealed loss), linear in log N and log D."""

    center: Array  # log N and log D of the runs that show it
    level: float
    slopes: Array  # by log N and log D

    def at(self, N: float, D: float) -> float:
        away = np.log([N, D]) - self.center
        return float(self.level + self.slopes @ away)


def plateau(run: Run) -> Plateau | None:
    """Return the losses on a run's plateau; None if there are fewer than two, or no decay."""
    rates = [(int(step["step"]), float(step.get("lr") or 0)) for step in run.steps]
    peak = max((rate for _, rate in rates if rate > 0), default=0.0)  # the page has NaN for none
    held = [step for step, rate in rates if rate >= AT_PEAK * peak]
    if not held or held[-1] >= int(run.last["step"]):  # this run never decayed
        return None
    first = max(held[0], EARLIEST * int(run.last["step"]))
    rows = [
        (entry["tokens"], entry["flops"], entry["loss"])
        for entry in run.evals
        if first <= entry["step"] <= held[-1] and _is_whole(entry)
    ]
    if len(rows) < 2:
        return None
    D, C, loss = np.array(sorted(rows), float).T
    return Plateau(run, D, C, loss)


def measured_gap(found: Plateau) -> tuple[float, float, float] | None:
    """Return log N, log D and the gap at the end of a run; None if its plateau ends too early."""
    last = found.run.evals[-1]
    late = found.D[-1] * TREND <= found.D
    if late.sum() < 2 or float(last["tokens"]) > REACH * found.D[-1]:
        return None
    slope, level = np.polyfit(np.log(found.D[late]), np.log(found.loss[late]), 1)
    end = float(np.log(last["tokens"]))
    gap = float(level + slope * end - np.log(last["loss"]))
    return float(np.log(found.run.N)), end, gap


def fit_gap(gaps: Sequence[tuple[float, float, float]]) -> Gap:
    """Fit the gap by least squares, with the prior for its slopes.

    With one length per size, N and D grow together and the runs show only the sum of both slopes.
    """
    rows = np.array(gaps)
    center = rows[:, :2].mean(axis=0)
    design = np.column_stack([np.ones(len(rows)), rows[:, :2] - center])
    known = np.append(0.0, SLOPE_SPREADS**-2)  # the level has no prior
    normal = design.T @ design / GAP_NOISE**2 + np.diag(known)
    right = design.T @ rows[:, 2] / GAP_NOISE**2 + known * np.append(0.0, SLOPES)
    level, *slopes = np.linalg.solve(normal, right)
    return Gap(center, float(level), np.array(slopes))


def with_curves(points: Points, runs: Sequence[Run]) -> Points:
    """Return the final points of these runs, and corrected losses from their plateaus."""
    # The longest first: a branch repeats the losses of its trunk, which must not count twice.
    finished = sorted(filter(_has_loss, runs), key=lambda run: -float(run.evals[-1]["tokens"]))
    gaps = []
    plateaus = []
    for found in filter(None, map(plateau, finished)):
        measured = measured_gap(found)
        # Without its own gap, a plateau would be corrected by an extrapolation.
        if measured is not None:
            gaps.append(measured)
            plateaus.append(found)
    if not gaps:
        raise DataError(
            f"curves: none of {len(runs)} runs logged held-out losses on a plateau; train with "
            f"--set optim.schedule.kind=wsd and a smaller train.eval_every, or leave out --curves"
        )
    gap = fit_gap(gaps)
    lengths = Counter(run.N for run in finished)
    rows: list[tuple[float, ...]] = []
    names: list[str] = []
    for found in plateaus:
        N = found.run.N
        if lengths[N] >= ENOUGH_LENGTHS:
            continue
        # Evenly spaced by log D.
        wanted = np.geomspace(found.D[0], found.D[-1], PER_RUN)
        near = np.abs(np.log(found.D[:, None] / wanted)).argmin(axis=0)
        for D, C, loss in np.column_stack([found.D, found.C, found.loss])[np.unique(near)]:
            row = (N, D, C, loss * np.exp(-gap.at(N, D)))
            if row not in rows:
                rows.append(row)
                names.append(found.run.name)
    if not rows:
        raise DataError(
            f"curves: every size has {ENOUGH_LENGTHS} or more finished runs, which show the effect "
            f"of D better than losses before the decay; leave out --curves"
        )
    return _joined(points, np.array(rows), names, gap)


def _has_loss(run: Run) -> bool:
    return run.final is not None and _is_whole(run.final)


def _is_whole(entry: Record) -> bool:
    # A loss that was not finite is logged as null, and a damaged log may lack a key.
    return all((entry.get(key) or 0) > 0 for key in ("tokens", "flops", "loss"))


def _joined(points: Points, rows: Array, names: Sequence[str], gap: Gap) -> Points:
    lowered = [gap.at(N, D) for N, D in rows[:, :2]]
    note = (
        f"{len(names)} losses before the decay are used as points, lowered by {min(lowered):.2%} "
        f"to {max(lowered):.2%}: that is what the decay gains at the end of these runs."
    )
    columns: dict[str, Any] = {
        key: np.concatenate([getattr(points, key), column])
        for key, column in zip(("N", "D", "C", "loss"), rows.T, strict=True)
    }
    run = (*points.run, *names)
    return replace(points, run=run, warnings=(*points.warnings, note), **columns)
