"""Check whether points suit a law: units and ranges, failed runs, goodness of fit.

A fit always returns numbers. These checks warn if the points are probably wrong.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

from pipeline.scaling.fitting import Fit, fit
from pipeline.scaling.frontier import flops_per_parameter_token
from pipeline.scaling.points import Array, Points

# The loss of a model that knows only how frequent each token is. Trained models are far below.
UNTRAINED_LOSS = 7.5
FEWEST_PARAMETERS = 2000.0  # the smallest shipped size has 15,000
# Tokens per parameter. Published runs have 0.3 to 60,000 (Qwen3-0.6B); a wrong unit is 1000× off.
TOKENS_PER_PARAMETER = (0.02, 2e5)
# No ladder has only runs outside of these: its N and D are swapped, or one of them is in thousands.
LADDER_TOKENS_PER_PARAMETER = (1.0, 1000.0)
MOST_EPOCHS = 1e4  # published runs have up to 1,500 (arXiv 2305.16264)
ALL_REPEAT = 50.0  # passes; if every run has more, the unit of `unique` is probably wrong
LONE_GAP = 8.0  # between the tokens per parameter of one run and of all others
UNIT_GAP = 100.0  # between two groups of tokens per parameter; units differ by 1000×
# C / (N·D) is 6 without attention. Small models with a large head or a long context have more, and
# 2 is a forward pass alone.
FLOPS_PER_PARAMETER_TOKEN = (3.0, 100.0)
# Because of attention and the head, C / (N·D) of a small model may be several times that of a large
# one, but not ten times. In runs of one size it is the same, apart from the length of sequences.
MIXED_COUNTS = 10.0
MIXED_IN_SIZE = 1.5
TWIN = 3e-4  # relative difference of two losses; those of two random seeds differ by ten times this
TWIN_TOKENS = 0.02  # relative difference of the tokens of copies, one of them rounded
MOST_TWINS = 0.25  # share of rows
ROUNDED = 0.3  # share of losses without a second decimal; by chance it is 0.1
FEW = 10  # of fewer losses, this share may occur by chance
WORSE = 0.03  # relative; noise between seeds is a tenth of it
SAMPLE = 1500  # points in the pairwise comparison, which takes their square in memory
NOISE = 0.02  # relative; ladders of one recipe scatter 0.2 to 1% around a law
EXPLAINED = 0.9  # R²; the public sets have 0.93 to 1.00
OUTLIER_SIGMAS = 5.0
SMALLEST_OUTLIER = 0.005  # relative; points without noise have tiny residuals and no outliers
NAMED = 3
# A wrong run at the edge of a ladder bends the law to itself. Without it, the scatter of the others
# falls to less than this share; without a right one, to 0.4 or more in our ladders (docs/LOG.md).
BENT = 0.3
MOST_AT_EDGES = 60  # runs; one of more cannot bend a law unseen


@dataclass(frozen=True)
class Outlier:
    """A run far from the law that describes the others."""

    run: str
    error: float  # measured over predicted loss, less one
    sigmas: float  # robust standard deviations


@dataclass(frozen=True)
class Goodness:
    """How well a law fitted with equal weights describes the points."""

    r2: float  # of log loss, adjusted for the parameters, without the outliers
    noise: float  # robust relative scatter around the law
    outliers: tuple[Outlier, ...]


def goodness(even: Fit) -> Goodness | None:
    """Measure the fit; None if there are no more points than parameters."""
    residuals = even.residuals
    spare = len(residuals) - len(even.theta)
    if spare < 1:
        return None
    size = np.sort(np.abs(residuals))
    # The fit is nearly one of least absolute deviations, which passes exactly through as many
    # points as it has parameters. Those residuals of zero do not measure the scatter.
    noise = float(np.median(size[len(even.theta) :])) / float(special.ndtri(0.75))
    sigmas = np.abs(residuals) / max(noise, SMALLEST_OUTLIER / OUTLIER_SIGMAS)
    # With few spare points the scatter is poorly known, so the limit for outliers is higher.
    student = special.stdtrit(max(spare - 1, 1), 1 - 0.005 / len(residuals))
    limit = max(OUTLIER_SIGMAS, float(student))
    out = (sigmas > limit) & (np.abs(residuals) > SMALLEST_OUTLIER)
    far = np.flatnonzero(out)
    worst = far[np.argsort(-sigmas[far])]
    named = tuple(
        Outlier(even.points.run[i], float(np.expm1(residuals[i])), float(sigmas[i])) for i in worst
    )
    return Goodness(_explained(even, ~out), noise, named)


def edge_warnings(even: Fit, named: Sequence[str]) -> list[str]:
    """Return a warning about a run at the edge of the points without which the others scatter much
    less. `named` are known outliers."""
    points = even.points
    scatter = _root_mean_square(even.residuals)
    spare = len(points) - len(even.theta)
    if not 3 <= spare < MOST_AT_EDGES or scatter < SMALLEST_OUTLIER:
        return []
    ranked = (points.N, points.D, points.C, points.D / points.N, points.loss)
    edges = {int(at) for values in ranked for at in (np.argmin(values), np.argmax(values))}
    found = []
    for at in edges:
        others = fit(points.take(np.delete(np.arange(len(points)), at)), even.law)
        found.append((_root_mean_square(others.residuals), points.run[at]))
    least, run = min(found)
    if least > BENT * scatter or run in named:
        return []
    return [
        f"Without {run}, the other runs scatter {least:.1%} instead of {scatter:.1%} around the "
        f"law: check its N, D and loss, or leave it out and fit again."
    ]


def _root_mean_square(residuals: Array) -> float:
    return float(np.sqrt(np.mean(residuals**2)))


def _explained(even: Fit, kept: Any) -> float:
    """Adjusted R² of log loss."""
    log_loss = np.log(even.points.loss[kept])
    spare = len(log_loss) - len(even.theta)
    total = float(((log_loss - log_loss.mean()) ** 2).sum())
    if spare < 1 or total == 0:
        return math.nan
    left = float((even.residuals[kept] ** 2).sum())
    return 1 - left / spare * (len(log_loss) - 1) / total


def fit_warnings(found: Goodness | None) -> list[str]:
    """Return warnings from the scatter around the law."""
    if found is None:
        return []
    warnings = []
    for one in found.outliers[:NAMED]:
        side = "above" if one.error > 0 else "below"
        warnings.append(
            f"{one.run} lies {abs(one.error):.1%} {side} the law, {one.sigmas:.0f} robust standard "
            f"deviations: check that run, or leave it out and fit again."
        )
    more = len(found.outliers) - NAMED
    if more > 0:
        warnings.append(f"{more} more outlier{'s' * (more > 1)}: one law may not fit all runs.")
    if found.r2 < EXPLAINED:
        warnings.append(
            f"The law explains only {max(found.r2, 0):.0%} of the variance of the loss (R²; a "
            f"ladder of one recipe has 95% or more): something else causes most of it."
        )
    if found.noise > NOISE:
        warnings.append(
            f"The runs scatter {found.noise:.1%} around the law; ladders of one recipe scatter "
            f"0.2 to 1%: compare their data, rates and lengths before you trust a forecast."
        )
    return warnings


def point_warnings(points: Points) -> list[str]:
    """Return warnings about the points themselves: units, losses, runs that failed."""
    if not len(points):
        return []
    found = [*unit_warnings(points), *_loss_warnings(points), *_lost_to_smaller(points)]
    found += _count_warnings(points) + _twin_warnings(points)
    names, rows = np.unique(np.array(points.run), return_inverse=True)
    largest = np.zeros(len(names))
    np.maximum.at(largest, rows, points.N)
    mixed = np.unique(rows[largest[rows] > points.N])
    if len(mixed):
        found.append(
            f"run={names[mixed[0]]} names rows of several sizes, which count as one run, so that "
            f"intervals are too wide: give every run its own name."
        )
    return found


def unit_warnings(points: Points) -> list[str]:
    """Return warnings about N, D and C that cannot be parameters, tokens and FLOPs."""
    warnings: list[str] = []
    if not len(points):
        return warnings
    if points.N.min() < FEWEST_PARAMETERS:
        warnings.append(
            f"The smallest N is {points.N.min():g}; give parameters, not thousands or millions."
        )
    ratio = points.D / points.N
    low, high = TOKENS_PER_PARAMETER
    odd = np.flatnonzero((ratio < low) | (ratio > high))
    if len(odd):
        first = int(odd[0])
        warnings.append(
            f"{named_rows(points, odd)}: {ratio[first]:.2g} tokens per parameter (N = "
            f"{points.N[first]:g}, D = {points.D[first]:g}): is N in parameters and D in tokens?"
        )
    few, many = LADDER_TOKENS_PER_PARAMETER
    if not len(odd) and (ratio.max() < few or ratio.min() > many):
        warnings.append(
            f"Every run has {ratio.min():.2g} to {ratio.max():.2g} tokens per parameter: are the "
            f"columns N and D swapped, or is one of them in thousands?"
        )
    gap = _gap(ratio)
    if gap is not None:
        warnings.append(
            f"Tokens per parameter fall into two groups, up to {gap[0]:.3g} and from {gap[1]:.3g}: "
            f"are D or N of some rows in another unit?"
        )
    else:
        warnings += _lone_warnings(points, ratio)
    if points.unique is not None:
        epochs = points.D / points.unique
        odd = np.flatnonzero((epochs > MOST_EPOCHS) | (epochs.min() >= ALL_REPEAT))
        if len(odd):
            warnings.append(
                f"{named_rows(points, odd)}: {epochs[odd[0]]:.2g} passes over unique = "
                f"{points.unique[odd[0]]:g} distinct tokens: is `unique` in tokens?"
            )
    each = flops_per_parameter_token(points)
    low, high = FLOPS_PER_PARAMETER_TOKEN
    if not low < each < high:
        warnings.append(
            f"C / (N·D) is {each:.3g}, but usually 6 to 20: C counts FLOPs of the whole training, "
            f"N parameters and D tokens. N* and D* are meaningless until they agree."
        )
    return warnings


def _lone_warnings(points: Points, ratio: Array) -> list[str]:
    """Warn about one run with far fewer or far more tokens per parameter than all others."""
    found = []
    order = np.argsort(ratio)
    ends = ((order[0], order[1]), (order[-1], order[-2])) if len(order) > 3 else ()
    for lone, nearest in ends:
        gap = max(ratio[lone] / ratio[nearest], ratio[nearest] / ratio[lone])
        corner = all((v == v[lone]).sum() > 1 for v in (points.N, points.D))  # of a grid
        if gap >= LONE_GAP and not corner:
            found.append(
                f"{points.run[lone]} has {ratio[lone]:.3g} tokens per parameter, and the nearest "
                f"other run {ratio[nearest]:.3g}: are its N and D right, and not swapped?"
            )
    return found


def _count_warnings(points: Points) -> list[str]:
    """Warn if some rows count N, D or C unlike others."""
    each = points.C / (points.N * points.D)
    # The rows with the lowest and the highest figure of each size.
    order = np.lexsort((each, points.N))
    size = points.N[order]
    ends = np.append(size[1:] != size[:-1], True)
    low = order[np.roll(ends, 1)]
    high = order[ends]
    worst = int(np.argmax(each[high] / each[low]))
    if each[high[worst]] > MIXED_IN_SIZE * each[low[worst]]:
        first, last = low[worst], high[worst]
    elif each.max() > MIXED_COUNTS * each.min():
        first, last = np.argmin(each), np.argmax(each)
    else:
        return []
    return [
        f"C / (N·D) ranges from {each[first]:.3g} ({points.run[int(first)]}) to {each[last]:.3g} "
        f"({points.run[int(last)]}): unless all rows count N and C alike, N* and D* are wrong."
    ]


def _twin_warnings(points: Points) -> list[str]:
    """Warn if many rows are nearly copies of others, which would make intervals too narrow."""
    found: list[tuple[str, str]] = []
    for keys in (("N", "D"), ("N",), ("D",)):
        # Sorted, a twin is next to its original.
        order = np.lexsort((points.loss, *(points.columns[key] for key in reversed(keys))))
        every = points.take(order)
        off = {key: np.abs(x[1:] / x[:-1] - 1) for key, x in every.columns.items()}
        same = off[keys[0]] == 0
        if len(keys) > 1:
            same &= (off["D"] < TWIN_TOKENS) & (off["loss"] < TWIN)
        else:  # with another D or N, only the same three decimals are no coincidence
            same &= (off["loss"] == 0) & (np.round(every.loss[1:], 2) != every.loss[1:])
        for key in off.keys() & {"experts", "unique"}:
            same &= off[key] == 0
        twins = [(every.run[i], every.run[i + 1]) for i in np.flatnonzero(same)]
        twins = [(one, other) for one, other in twins if one != other]
        found = max(found, twins, key=len)
    if len(found) <= MOST_TWINS * len(points):
        return []
    return [
        f"{len(found)} of {len(points)} rows have nearly the loss of another row with the same N "
        f"or D, such as {found[0][0]} and {found[0][1]}: if they are copies of one run, intervals "
        f"are too narrow; keep one of them."
    ]


def _gap(values: Array) -> tuple[float, float] | None:
    """Return the widest gap between values, if it is too wide for one grid of runs."""
    ordered = np.sort(values)
    steps = ordered[1:] / ordered[:-1]
    if not len(steps):
        return None
    at = int(np.argmax(steps))
    low = float(ordered[at])
    high = float(ordered[at + 1])
    # A size has several lengths, so rows in another unit make a gap below 1000. Divided by 1000,
    # their median lies among the others.
    corrected = np.median(ordered[at + 1 :]) / 1000
    in_thousands = steps[at] > UNIT_GAP / 3 and ordered[0] <= corrected <= low
    return (low, high) if steps[at] >= UNIT_GAP or in_thousands else None


def named_rows(points: Points, rows: npt.NDArray[np.intp]) -> str:
    """Name the first runs, and count the others."""
    named = ", ".join(points.run[int(i)] for i in rows[:NAMED])
    return named if len(rows) <= NAMED else f"{named} and {len(rows) - NAMED} more"


def _loss_warnings(points: Points) -> list[str]:
    warnings = []
    if points.vocab:
        ceiling = math.log(points.vocab)
        above = np.flatnonzero(points.loss > ceiling)
        if len(above):
            warnings.append(
                f"{named_rows(points, above)}: loss {points.loss[above[0]]:.4g} is above "
                f"ln({points.vocab}) = {ceiling:.4g}, worse than guessing: diverged, or not in "
                f"nats per token."
            )
    median = float(np.median(points.loss))
    if median > UNTRAINED_LOSS:
        warnings.append(
            f"Half of the losses are above {median:.3g}, but a model that knows only how frequent "
            f"each token is reaches about {UNTRAINED_LOSS}: are these perplexities? Give nats "
            f"per token (the logarithm of the perplexity)."
        )
    tenths = int((np.round(points.loss, 1) == points.loss).sum())
    if len(points) > 2 and not (points.loss % 1).any():
        warnings.append("All losses are whole numbers: write decimals as 3.25, not as 3,25.")
    elif tenths == len(points) > 2 or (len(points) >= FEW and tenths > ROUNDED * len(points)):
        warnings.append(
            f"{tenths} of {len(points)} losses have one decimal, which moves N* and D* by more "
            f"than the noise of runs: give three decimals or more."
        )
    if len(points) > 2 and points.loss.max() < 1.0001 * points.loss.min():
        warnings.append("All losses are equal: these points do not show any effect of N or D.")
    return warnings


def _lost_to_smaller(points: Points) -> list[str]:
    """Warn about runs that are worse than a smaller one on fewer tokens: diverged or mislabeled."""
    every = points.take(np.argsort(points.C)[:: -(-len(points) // SAMPLE)])
    # `beats[i, j]`: run j has no more parameters, tokens or distinct tokens than i, and less loss.
    beats = every.loss[None] * (1 + WORSE) < every.loss[:, None]
    for key in ("N", "D", "unique"):
        column = every.columns.get(key)
        if column is not None:
            beats &= column[None] <= column[:, None]
    if every.experts is not None:
        beats &= every.experts[None] == every.experts[:, None]
    # A small run that is too good makes many others look bad, so the smaller group is named.
    worse = np.flatnonzero(beats.any(axis=1))
    better = np.flatnonzero(beats.any(axis=0))
    if not len(worse):
        return []
    if len(better) < len(worse):
        first = int(better[0])
        other = int(np.flatnonzero(beats[:, first])[0])
        what = f"better than {every.run[other]} ({every.loss[other]:.4g}), which is larger or saw"
        return [
            f"{named_rows(every, better)}: loss {every.loss[first]:.4g} is {what} more tokens: is "
            f"its loss, N or D wrong?"
        ]
    first = int(worse[0])
    other = int(np.flatnonzero(beats[first])[0])
    return [
        f"{named_rows(every, worse)}: loss {every.loss[first]:.4g} is worse than that of "
        f"{every.run[other]} ({every.loss[other]:.4g}), which is no larger and saw no more tokens: "
        f"it diverged, stopped early, or has a wrong N or D."
    ]


def repeats(points: Points) -> bool:
    """Whether some runs repeat their data enough to show what repeats are worth."""
    # Fewer repeats count nearly like new tokens (arXiv 2305.16264) and do not show R*.
    return points.unique is not None and bool((1.5 * points.unique < points.D).any())


def column_warnings(points: Points, law: str) -> list[str]:
    """Columns that vary and that this law does not use."""
    found = []
    experts = np.unique([] if points.experts is None else points.experts)
    if len(experts) > 1 and law != "moe":
        found.append(
            f"law={law} ignores `experts` ({experts[0]:g} to {experts[-1]:g}): it mixes "
            f"architectures. Fit each number of experts separately, or choose --law moe."
        )
    if repeats(points) and law != "data-constrained":
        found.append(
            f"law={law} counts repeated tokens like new ones, and some runs repeat their data "
            f"(`unique`); --law data-constrained does not."
        )
    return found
