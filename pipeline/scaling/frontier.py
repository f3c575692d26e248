"""The compute-optimal N and D: from a law, from isoFLOP valleys, or from training curves."""

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from pipeline.errors import DataError
from pipeline.scaling.fitting import Fit
from pipeline.scaling.laws import Law
from pipeline.scaling.points import Array, Points

Method = Literal["akima", "parabola"]
EQUAL = 1e-6  # relative difference of prices that are the same
OFF_LINE = 0.05  # largest relative error of UnitFlops; above it the points have no common one
ROUNDS = 30  # of the search for N*; each makes the error at least five times smaller
GAP = 1.1  # compute values more than 10% apart belong to two budgets
UNEQUAL = 1.5  # the largest ratio of compute within one budget


def flops_per_parameter_token(points: Points) -> float:
    """C / (N·D): 6 by Hoffmann's convention, a little more where attention is counted."""
    return float(np.median(points.C / (points.N * points.D)))


@dataclass(frozen=True)
class UnitFlops:
    """Training FLOPs per parameter and token of models of one shape: base + extra · N^(−1/3).

    The second part is attention, whose FLOPs per token grow with layers × width, while N grows with
    layers × width². It is zero where a file counts C = 6·N·D.
    """

    base: float
    extra: float

    @classmethod
    def of(cls, points: Points) -> "UnitFlops":
        """Return the figure that the points have in common, or their median if they have none."""
        each = points.C / (points.N * points.D)
        if len(np.unique(points.N)) >= 3 and np.ptp(each) > EQUAL * each.max():
            extra, base = np.polyfit(np.cbrt(1 / points.N), each, 1)
            found = cls(float(base), float(extra))
            off = np.abs(found.each(points.N) / each - 1).max()
            if base > 0 and extra > 0 and off < OFF_LINE:
                return found
        return cls(float(np.median(each)), 0.0)

    def each(self, N: Array) -> Array:
        return np.asarray(self.base + self.extra * np.cbrt(1 / N))

    def growth(self, N: Array) -> Array:
        """d log(N · unit FLOPs) / d log N; 1 for C = 6·N·D."""
        return np.asarray(1 - self.extra * np.cbrt(1 / N) / (3 * self.each(N)))

    def at_ratio(self, C: Array, ratio: float) -> Array:
        """Return N for each compute at this many tokens per parameter: C = each(N) · ratio · N²."""
        N = np.sqrt(C / (self.base * ratio))
        for _ in range(ROUNDS if self.extra else 0):
            N = np.sqrt(C / (self.each(N) * ratio))
        return N


def at(points: Points, C: Array, N: Array, D: Array, **columns: Any) -> Points:
    """Places without a loss, in the convention of these points; `columns`: run, experts, unique."""
    loss = np.full_like(C, np.nan)
    given = {"run": ("",) * len(C), "experts": None, "unique": None, "warnings": (), **columns}
    return replace(points, C=C, N=N, D=D, loss=loss, accuracy=None, dropped=(), **given)


def terms_of(law: Law, natural: Array, experts: Array) -> Array | None:
    """Columns log A, α, log B, β for each row of natural parameters; None for a law of compute."""
    found = []
    with np.errstate(divide="ignore", invalid="ignore"):
        for row, many in np.broadcast(np.arange(len(natural)), experts):
            values = dict(zip(law.parameters, map(float, natural[row]), strict=True))
            terms = law.terms(values, float(many))
            if terms is None:
                return None
            found.append(terms)
    return np.array(found, dtype=float).reshape(-1, 4)


def exponents(law: Law, natural: Array) -> Array | None:
    """a and b of N* ∝ C^a and D* ∝ C^b, in rows; None for a law of compute alone.

    M = 1 for mixtures.
    """
    terms = terms_of(law, natural, np.ones(1))
    if terms is None:
        return None
    # At the optimum αA·N^−α = βB·D^−β. With N·D ∝ C this is N^(α+β) ∝ C^β.
    return np.asarray(terms[:, [3, 1]] / (terms[:, 1] + terms[:, 3])[:, None])


def best_split(terms: Array, log_c: Array, unit_flops: UnitFlops) -> Array:
    """Log N of the least A·N^−α + B·D^−β for each C: αA·N^−α = βB·D^−β · growth."""
    a, alpha, b, beta = terms.T
    unit = log_c - np.log(unit_flops.base)  # log N + log D
    growth: Array | float = 1.0
    with np.errstate(all="ignore"):  # a bad fit has no optimum: the result is NaN
        for _ in range(ROUNDS if unit_flops.extra else 1):
            n = (np.log(alpha / beta / growth) + a - b + beta * unit) / (alpha + beta)
            N = np.exp(n)
            unit = log_c - np.log(unit_flops.each(N))
            growth = unit_flops.growth(N)
    return np.asarray(n)


def optimum(fit: Fit, C: Array, experts: Array | None = None) -> Points | None:
    """The best splits; None for a law of compute alone (Hoffmann et al., equation 4)."""
    many = np.ones_like(C) if experts is None else experts
    natural = fit.law.natural(fit.theta[None], fit.inputs)
    terms = terms_of(fit.law, natural, many) if len(C) else None
    if terms is None:
        return None
    unit_flops = UnitFlops.of(fit.points)
    n = best_split(terms, np.log(C), unit_flops)
    with np.errstate(all="ignore"):
        N = np.exp(n)
        D = C / unit_flops.each(N) / N
    return at(fit.points, C, N, D, experts=experts)


@dataclass(frozen=True)
class Minima:
    """The best run of each compute, as points, with N* ∝ C^a and D* ∝ C^b through them."""

    points: Points
    a: float
    b: float
    levels: tuple[float, float]  # log N* and log D* at C = 1
    notes: tuple[str, ...]

    def path(self, C: Array) -> tuple[Array, Array]:
        """N*(C) and D*(C)."""
        return np.exp(self.levels[0]) * C**self.a, np.exp(self.levels[1]) * C**self.b


class Minimum(NamedTuple):
    """A row of Minima."""

    N: float
    D: float
    C: float
    loss: float


def budgets_of(points: Points) -> list[Points]:
    """The points of each isoFLOP budget, by compute."""
    order = np.argsort(points.C)
    # Runs of one budget differ slightly in compute, because steps are whole: split at the gaps.
    parts = np.split(order, np.flatnonzero(np.diff(np.log(points.C[order])) > np.log(GAP)) + 1)
    return [points.take(part) for part in parts]


def isoflop(points: Points, method: Method = "akima") -> Minima:
    """Approach 2 of arXiv 2203.15556.

    Akima's spline follows the valley; a parabola that is not centered biases D* by 4–35%.
    """
    law = "isoflop" if method == "akima" else method
    budgets = budgets_of(points)
    rows: list[Minimum] = []
    notes: list[str] = []
    for group in budgets:
        C = float(np.median(group.C))
        if group.C.max() > UNEQUAL * group.C.min():
            raise DataError(
                f"law={law} needs runs of equal compute, but from {group.C.min():.2g} to "
                f"{group.C.max():.2g} FLOPs they are spread without a gap; plan budgets with "
                f"`launch sweep plan`, or choose --law chinchilla"
            )
        found = bottom(np.log(group.N), group.loss, method)
        if isinstance(found, str):
            notes.append(f"C = {C:.3g}: {found}")
            continue
        # D from this budget's own C / (N·D), which varies with size where attention is counted.
        N = float(np.exp(found[0]))
        rows.append(Minimum(N, C / (N * flops_per_parameter_token(group)), C, found[1]))
    # Two minima always lie on a line, so at least three are needed.
    if len(rows) < 3:
        raise DataError(
            f"law={law} needs a valley in three budgets and found {len(rows)} in {len(budgets)}; "
            f"add runs on both sides of the best N of each "
            f"({'; '.join(notes[:3]) or 'too few budgets'})"
        )
    return _through(points, rows, notes)


def valley(log_n: Array, loss: Array) -> tuple[Array, Array]:
    """Return the distinct sizes of one budget in order, each with its mean loss."""
    # Runs that differ only in their seed have the same N, and a spline needs distinct x.
    x, index = np.unique(log_n, return_inverse=True)
    return x, np.bincount(index, weights=loss) / np.bincount(index)


def bottom(log_n: Array, loss: Array, method: Method) -> tuple[float, float] | str:
    """Return log N and loss of the valley's minimum, or the reason why there is none."""
    from scipy.interpolate import Akima1DInterpolator

    x, y = valley(log_n, loss)
    # A parabola has three coefficients. Akima's spline needs a neighbor on each side of two.
    need = 3 if method == "parabola" else 4
    if len(x) < need:
        return f"{len(x)} of the {need} sizes that a valley needs"
    if method == "parabola":
        # Centered, because log N of billions makes the squares nearly collinear.
        curve, slope, level = np.polyfit(x - x.mean(), y, 2)
        if curve <= 0:
            return "the losses curve downward: no valley"
        lowest = float(x.mean() - slope / (2 * curve))
        if not x[0] < lowest < x[-1]:
            side = "smallest" if lowest <= x[0] else "largest"
            return f"the minimum lies beyond the {side} model"
        return lowest, float(level - slope**2 / (4 * curve))
    fine = np.linspace(x[0], x[-1], 4001)  # far finer than the noise of N*
    depth = Akima1DInterpolator(x, y)(fine)
    low = int(np.argmin(depth))
    if low in (0, len(fine) - 1):
        side = "largest" if low else "smallest"
        return f"the {side} model is the best: the minimum lies beyond the edge"
    return float(fine[low]), float(depth[low])


def envelope(points: Points, steps: int = 60) -> Minima:
    """Approach 1: the lowest of all training curves at each compute. Rows with the same `run` are
    one curve."""
    names = np.array(points.run)
    curves = [points.take(names == name) for name in dict.fromkeys(points.run)]
    curves = [curve.take(np.argsort(curve.C)) for curve in curves if len(curve) >= 3]
    if len({float(curve.N[0]) for curve in curves}) < 3:
        raise DataError(
            f"law=envelope needs curves (three rows or more with one `run`) of three sizes and "
            f"found {len(curves)}; give run directories, or log held-out losses along the run"
        )
    grid = np.geomspace(points.C.min(), points.C.max(), steps)
    x = np.log(grid)
    # Infinite outside of a curve's own range, so that no curve is extrapolated.
    losses = np.array(
        [np.interp(x, np.log(c.C), np.log(c.loss), left=np.inf, right=np.inf) for c in curves]
    )
    rows: list[Minimum] = []
    for column, C in enumerate(grid):
        best = int(np.argmin(losses[:, column]))
        # With a single curve, another size might be better.
        if np.isfinite(losses[:, column]).sum() >= 2:
            curve = curves[best]
            D = float(np.exp(np.interp(x[column], np.log(curve.C), np.log(curve.D))))
            loss = float(np.exp(losses[best, column]))
            rows.append(Minimum(float(curve.N[0]), D, float(C), loss))
    # Beyond the range of sizes the smallest or the largest one always wins: drop those edges.
    inner = [row for row in rows if points.N.min() < row.N < points.N.max()]
    notes = ["Curves along a run are not annealed: finished runs do better than their envelope."]
    if len({row.N for row in inner}) < 3:
        inner = rows
        notes.append(
            "Too few sizes to drop the edges of the envelope: its exponents depend on the grid "
            "of sizes."
        )
    if len(inner) < 5:
        raise DataError(
            "law=envelope: the curves hardly overlap in compute; train sizes whose budgets overlap"
        )
    return _through(points, inner, notes)


def _through(points: Points, rows: list[Minimum], notes: list[str]) -> Minima:
    N, D, C, loss = np.array(rows).T
    a, n0 = np.polyfit(np.log(C), np.log(N), 1)
    b, d0 = np.polyfit(np.log(C), np.log(D), 1)
    names = tuple(f"minimum at {c:.3g}" for c in C)
    minima = replace(at(points, C, N, D, run=names), loss=loss, dropped=points.dropped)
    return Minima(minima, float(a), float(b), (float(n0), float(d0)), tuple(notes))
