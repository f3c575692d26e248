"""Find rows whose D or N is in another unit, such as bytes: they form a second group of runs.

Most ladders are grids: if a factor on some rows completes the grid, a tenth less scatter is enough.
Otherwise the law gets this factor as a parameter, and the gain must pay for the choice of the rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy import special

from pipeline.scaling.fitting import Fit, descend, fit, screened
from pipeline.scaling.laws import LAWS, Chinchilla, Gamma, Inputs, Law
from pipeline.scaling.points import Array, Points
from pipeline.scaling.quality import named_rows

FACTORS = (1.8, 2e4)  # tokens have about 4 bytes, and thousands are 1000
# Factors of the starts. That on the loss describes runs that were trained otherwise.
STARTS = {"D": (2.5, 5.0, 30.0, 1000.0), "N": (2.5, 5.0, 30.0, 1000.0), "loss": (1.01, 1.04, 1.1)}
KEPT_STARTS = 6
TRIED = 8  # optima that are compared
FEWEST = 3  # rows in the smaller group, and at least a tenth of all rows; fewer are outliers
MOST_ROWS = 150  # a table of twice as many is thinned
SURE = 5.0  # nats of evidence; clean made ladders had less than 1 (docs/LOG.md)
CLEARER = 2.0  # nats more than for a factor on the loss
MOST_LEFT = 1 / 3  # of the scatter; public sets of unlike runs keep 0.38 or more
LEFT_ON_GRID = 0.9  # most clean ladders that look like a damaged grid keep more (docs/LOG.md)
MOST_SCATTER = 0.01  # relative; for more, the losses alone are no evidence (docs/LOG.md)
SMALLEST_SCATTER = 1e-4  # relative, of losses with four decimals
GRID = 0.01  # relative; rows of one length or size agree to this
GRID_NATS = 5.0  # evidence of a row that the factor puts on the grid of the others
GRID_SEARCH = 0.2  # the fitted log factor is this inexact


class TwoGroups(Law):
    """A law with one more parameter: the log of a factor on a column, for the rows that it
    describes better with this factor than without."""

    def __init__(self, inner: Law, column: str, log_loss: Array) -> None:
        self.inner = inner
        self.column = column
        self.measured = log_loss

    def log_loss(self, theta: Array, x: Inputs) -> tuple[Array, Array]:
        factor = theta[:, -1:]
        one, by_one = self.inner.log_loss(theta[:, :-1], x)
        # The gradients by A and B, times α and β, are those by −log N and −log D.
        match self.column:
            case "N":
                moved = replace(x, n=x.n - factor)
                other, by_other = self.inner.log_loss(theta[:, :-1], moved)
                by_factor = theta[:, 2:3] * by_other[1]
            case "D":
                moved = replace(x, d=x.d - factor)
                other, by_other = self.inner.log_loss(theta[:, :-1], moved)
                by_factor = theta[:, 4:5] * by_other[3]
            case _:
                other, by_other, by_factor = one + factor, by_one, np.ones_like(one)
        second = np.abs(other - self.measured) < np.abs(one - self.measured)
        gradient = [np.where(second, by_other, by_one), np.where(second, by_factor, 0)[None]]
        return np.where(second, other, one), np.concatenate(gradient)


@dataclass(frozen=True)
class Split:
    """Two groups of rows that differ by a factor on one column."""

    column: str
    rows: npt.NDArray[np.bool_]  # the smaller group
    whole: bool  # all rows of one size or of one length
    factor: float  # of the column in these rows
    before: float  # mean absolute residual of one group
    after: float  # and of two
    nats: float  # of evidence for two groups; infinite if they complete a grid


def group_warnings(even: Fit) -> list[str]:
    """Return a warning about rows that fit the grid or the law of the others with D or N in another
    unit."""
    few = even.points.take(even.points.thinned(MOST_ROWS))
    even = replace(even, points=few, inputs=Inputs.of(few, even.inputs.center))
    if len(few) < len(even.theta) + FEWEST or type(even.law) not in (Chinchilla, Gamma):
        return []
    found = _on_grid(even) or _by_loss(even)
    if found is None:
        return []
    grid = "form a grid and " if found.nats == np.inf else ""
    what = "bytes, repeats" if found.column == "D" else "embeddings, experts"
    by = f"divided by {found.factor:.3g}"
    if found.factor < 1:
        by = f"multiplied by {1 / found.factor:.3g}"
    return [
        f"{named_rows(few, np.flatnonzero(found.rows))}: with {found.column} {by}, the {len(few)} "
        f"runs {grid}scatter {found.after:.2%} instead of {found.before:.2%} around a law: check "
        f"whether {found.column} of these or of the other rows counts {what} or thousands, and "
        f"whether all runs had the same recipe and data."
    ]


def _on_grid(even: Fit) -> Split | None:
    """Return the rows that a factor puts on the grid of the others, if the law then fits better."""
    before = _scatter(even.residuals, len(even.theta))
    found = []
    for column, rows, factor in _off_grid(even.points):
        corrected = getattr(even.points, column) * np.exp(-factor * rows)
        other = fit(replace(even.points, **{column: corrected}), even.law)
        after = _scatter(other.residuals, len(other.theta))
        most = LEFT_ON_GRID if after < MOST_SCATTER else MOST_LEFT
        if after < most * before:
            found.append(Split(column, rows, False, float(np.exp(factor)), before, after, np.inf))
    return min(found, key=lambda one: one.after, default=None)


def _off_grid(points: Points) -> Iterator[tuple[str, npt.NDArray[np.bool_], float]]:
    """Yield columns, rows and logs of factors without which the points would be a full grid."""
    n, d = np.log(points.N), np.log(points.D)
    # Every line of a grid, such as the runs of one size, has the same lengths, or ratios D/N.
    for column, other, own in (("D", n, d), ("D", n, d - n), ("N", d, n), ("N", d, n - d)):
        line = _lines(other)
        counts = np.bincount(line)
        if len(counts) < 3 or counts.min() < counts.max():
            continue
        # Along a line the loss falls, so it gives the right order even if the column is wrong.
        order = np.lexsort((-points.loss, line))
        table = own[order].reshape(len(counts), -1)
        low, high = table.min(axis=0), table.max(axis=0)
        for right, factor in ((low, np.max(high - low)), (high, np.min(low - high))):
            moved = np.abs(table - right) > GRID
            alike = np.abs(table - right - factor * moved).max() <= GRID
            # One moved length may be a coincidence, and a whole moved line may be planned.
            mixed = moved.any(axis=0).sum() > 1 and (moved.any(axis=1) > moved.all(axis=1)).any()
            if alike and mixed and np.diff(right).min() > GRID and _likely(column, factor, moved):
                yield column, moved.ravel()[np.argsort(order)], float(factor)


def _likely(column: str, factor: float, rows: npt.NDArray[np.bool_]) -> bool:
    """Whether the log factor is like one between units, and the rows neither few nor most."""
    unit = column == "loss" or np.log(FACTORS[0]) <= abs(factor) <= np.log(FACTORS[1])
    return bool(unit and max(FEWEST, rows.size / 10) <= rows.sum() <= rows.size / 2)


def _by_loss(even: Fit) -> Split | None:
    """Return the two groups that the losses show, if nothing else explains them as well."""
    tried = [split(even, "D"), split(even, "N")]
    found = max(filter(None, tried), key=lambda one: one.nats, default=None)
    if found is None or found.nats < SURE or found.after > MOST_LEFT * found.before:
        return None
    # One size or length is worth a warning, whether its N or D is wrong or its rate is.
    otherwise = None if found.whole else split(even, "loss")
    nats = -np.inf if otherwise is None else otherwise.nats
    if type(even.law) is Chinchilla:  # which may misfit all runs, so that groups imitate the γ-law
        gamma = fit(even.points, LAWS["gamma"])
        after = _scatter(gamma.residuals, len(gamma.theta))
        spare = len(even.points) - len(even.theta)
        nats = max(nats, spare * np.log(found.before) - (spare - 1) * np.log(after))
    return found if found.nats >= nats + CLEARER and found.after <= MOST_SCATTER else None


def _scatter(residuals: Array, parameters: int) -> float:
    return max(float(np.abs(residuals).sum()) / (len(residuals) - parameters), SMALLEST_SCATTER)


def split(even: Fit, column: str) -> Split | None:
    """Return the two groups with the most evidence; None if there is no factor like a unit."""
    law = TwoGroups(even.law, column, np.log(even.points.loss))
    thetas = screened(even.points, even.law, even.inputs, KEPT_STARTS)
    thetas = np.concatenate([even.theta[None], thetas])
    sides = np.log([factor**sign for factor in STARTS[column] for sign in (1, -1)])
    starts = np.column_stack([np.repeat(thetas, len(sides), 0), np.tile(sides, len(thetas))])
    thetas, value = descend(even.points, law, even.inputs, starts, tolerance=1e-6)
    thetas = thetas[np.argsort(value)]
    second = law.log_loss(thetas, even.inputs)[1][-1] != 0  # (starts, rows)
    _, first = np.unique(second, axis=0, return_index=True)
    tried = [_judged(even, law, thetas[i], second[i]) for i in np.sort(first)[:TRIED]]
    return max(filter(None, tried), key=lambda one: one.nats, default=None)


def _judged(even: Fit, law: TwoGroups, theta: Array, rows: npt.NDArray[np.bool_]) -> Split | None:
    """The log likelihood that two groups gain, less the cost of choosing their rows."""
    n, factor = len(rows), float(theta[-1])
    if 2 * rows.sum() > n:
        rows, factor = ~rows, -factor
    k = int(rows.sum())
    if not _likely(law.column, factor, rows):
        return None
    spare = n - len(even.theta)
    residuals = law.log_loss(theta[None], even.inputs)[0][0] - law.measured
    before = _scatter(even.residuals, len(even.theta))
    after = _scatter(residuals, len(theta))
    nats = spare * np.log(before) - (spare - 1) * np.log(after)
    own, other = even.inputs.d, even.inputs.n
    if law.column == "N":
        own, other = other, own
    alike = np.abs(own - own[rows][0]) < GRID
    whole = law.column != "loss" and bool((alike == rows).all())
    if whole:
        nats -= np.log(_distinct(own))
    else:
        nats -= special.gammaln(n + 1) - special.gammaln(k + 1) - special.gammaln(n - k + 1)
        more = 0 if law.column == "loss" else min(_onto_grid(own, other, rows, factor), 5)
        nats += GRID_NATS * more if more != 1 else 0  # one may be a coincidence
    return Split(law.column, rows, whole, float(np.exp(factor)), before, after, float(nats))


def _distinct(values: Array) -> int:
    return 1 + int(_lines(values).max())


def _lines(values: Array) -> npt.NDArray[np.int64]:
    """Number the values from the smallest; values that agree get the same number."""
    order = np.argsort(values)
    is_next = np.diff(values[order], prepend=values.min()) > GRID
    return np.cumsum(is_next, dtype=np.int64)[np.argsort(order)]


def _onto_grid(own: Array, other: Array, rows: npt.NDArray[np.bool_], factor: float) -> int:
    """How many rows more have the D, N, D/N or N·D of other rows if the factor is corrected.

    Ladders are grids. Rows in another unit are off the grid, but rows with an unusual loss are not.
    The result is negative if a correction takes rows off the grid, and most negative if none of
    them reaches a row of the other group.
    """

    shared = [own, own + other, own - other]
    gaps = np.concatenate([np.subtract.outer(v[rows], v[~rows]).ravel() for v in shared])
    gaps = np.unique(np.round(gaps[np.abs(gaps - factor) < GRID_SEARCH], 3))
    after = min((_distinct(v - gap * rows) for gap in gaps for v in shared), default=len(rows))
    before = min(map(_distinct, shared))
    # Runs of random lengths are no grid, and a few of them coincide by chance.
    is_grid = 2 * after <= len(rows)
    return before - after if is_grid else min(before - after, 0)
