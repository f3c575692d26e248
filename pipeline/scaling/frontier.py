"""The compute-optimal N and D: from a law, from isoFLOP valleys, or from the envelope of training curves."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from pipeline.errors import DataError
from pipeline.scaling.fitting import Fit
from pipeline.scaling.points import Array, Points


@dataclass(frozen=True)
class Optimum:
    """The best split of each compute: N*(C), D*(C) and the loss there."""

    C: Array
    N: Array
    D: Array
    loss: Array


def flops_per_parameter_token(points: Points) -> float:
    """C / (N·D) of these points: 6 by Hoffmann's convention, a little more where attention is counted."""
    return float(np.median(points.C / (points.N * points.D)))


def at(
    points: Points, C: Array, N: Array, D: Array, *, run: tuple[str, ...] | None = None,
    experts: Array | None = None, unique: Array | None = None,
) -> Points:  # fmt: skip
    """Places without a loss, in the convention of these points."""
    return replace(
        points, C=C, N=N, D=D, loss=np.full_like(C, np.nan), run=run or ("",) * len(C), experts=experts, unique=unique,
        dropped=(),
    )  # fmt: skip


def exponents(fit: Fit) -> tuple[float, float] | None:
    """a and b of N* ∝ C^a and D* ∝ C^b, where the law has them (of dense models, where it knows experts)."""
    terms = fit.law.balance(fit.values, 1.0)
    if terms is None:
        return None
    _, alpha, _, beta = terms
    return beta / (alpha + beta), alpha / (alpha + beta)


def optimum(fit: Fit, C: Array, experts: Array | None = None) -> Optimum | None:
    """Hoffmann et al., equation 4; None for laws that know only compute."""
    many = np.ones_like(C) if experts is None else experts
    with np.errstate(divide="ignore"):
        terms = [fit.law.balance(fit.values, float(m)) for m in many]
    if any(term is None for term in terms):
        return None
    a, alpha, b, beta = np.array(terms, dtype=float).reshape(-1, 4).T
    unit = np.log(C / flops_per_parameter_token(fit.points))
    with np.errstate(all="ignore"):  # a fit that makes no sense has no optimum: not a number
        n = (np.log(alpha / beta) + a - b + beta * unit) / (alpha + beta)
        N, D = np.exp(n), np.exp(unit - n)
    return Optimum(C, N, D, fit.predict(at(fit.points, C, N, D, experts=experts)))


Method = Literal["akima", "parabola"]
GAP = 1.1  # budgets further apart than 10% are two


@dataclass(frozen=True)
class Minima:
    """The best run of each compute, as points, with N* ∝ C^a and D* ∝ C^b through them."""

    points: Points
    a: float
    b: float
    levels: tuple[float, float]
    notes: tuple[str, ...]

    def path(self, C: Array) -> tuple[Array, Array]:
        """N*(C) and D*(C)."""
        return np.exp(self.levels[0]) * C**self.a, np.exp(self.levels[1]) * C**self.b


def budgets_of(points: Points) -> list[Points]:
    """The points of each isoFLOP budget, by compute."""
    order = np.argsort(points.C)
    parts = np.split(order, np.flatnonzero(np.diff(np.log(points.C[order])) > np.log(GAP)) + 1)
    return [points.take(part) for part in parts]


def isoflop(points: Points, method: Method = "akima") -> Minima:
    """Approach 2 of arXiv 2203.15556. Akima follows the valley; a parabola off its centre biases D* by 4–35%."""
    budgets = budgets_of(points)
    rows: list[tuple[float, float, float, float]] = []
    notes: list[str] = []
    for group in budgets:
        C = float(np.median(group.C))
        if group.C.max() > 1.5 * group.C.min():
            raise DataError(
                f"law=isoflop needs runs of equal compute, and from {group.C.min():.2g} to {group.C.max():.2g} FLOPs "
                f"they are spread without a gap; plan budgets with `launch sweep plan`, or choose --law chinchilla"
            )
        found = bottom(np.log(group.N), group.loss, method)
        if isinstance(found, str):
            notes.append(f"C = {C:.3g}: {found}")
            continue
        N = float(np.exp(found[0]))
        rows.append((N, C / (N * float(np.median(group.C / (group.N * group.D)))), C, found[1]))
    if len(rows) < 3:
        raise DataError(
            f"law=isoflop found a valley in {len(rows)} of {len(budgets)} budgets and needs three; add runs on both "
            f"sides of the best N of each ({'; '.join(notes[:3]) or 'too few budgets'})"
        )
    return through(points, rows, notes)


def bottom(log_n: Array, loss: Array, method: Method) -> tuple[float, float] | str:
    """Where and how deep the valley is, or why there is none."""
    from scipy.interpolate import Akima1DInterpolator

    x, index = np.unique(log_n, return_inverse=True)
    y = np.bincount(index, weights=loss) / np.bincount(index)
    need = 3 if method == "parabola" else 4
    if len(x) < need:
        return f"{len(x)} sizes, and a valley needs {need}"
    if method == "parabola":
        curve, slope, level = np.polyfit(x - x.mean(), y, 2)
        if curve <= 0:
            return "the losses curve downwards: no valley"
        at = float(x.mean() - slope / (2 * curve))
        if not x[0] < at < x[-1]:
            return f"the minimum lies beyond the {'smallest' if at <= x[0] else 'largest'} model"
        return at, float(level - slope**2 / (4 * curve))
    fine = np.linspace(x[0], x[-1], 4001)
    depth = Akima1DInterpolator(x, y)(fine)
    low = int(np.argmin(depth))
    if low in (0, len(fine) - 1):
        return f"the {'largest' if low else 'smallest'} model is the best: the minimum lies beyond the edge"
    return float(fine[low]), float(depth[low])


def envelope(points: Points, steps: int = 60) -> Minima:
    """Approach 1: at each compute the lowest of all training curves. Rows that share `run` are one curve."""
    names = np.array(points.run)
    curves = [
        points.take(names == name)
        for name in dict.fromkeys(points.run)
        if (names == name).sum() >= 3
    ]
    if len({float(curve.N[0]) for curve in curves}) < 3:
        raise DataError(
            f"law=envelope needs curves (three rows or more with one `run`) of three sizes and found {len(curves)}; "
            f"give run directories, or log held-out losses along the run"
        )
    curves = [curve.take(np.argsort(curve.C)) for curve in curves]
    grid = np.geomspace(points.C.min(), points.C.max(), steps)
    losses = np.array(
        [
            np.interp(np.log(grid), np.log(c.C), np.log(c.loss), left=np.inf, right=np.inf)
            for c in curves
        ]
    )
    rows: list[tuple[float, float, float, float]] = []
    for column, C in enumerate(grid):
        best = int(np.argmin(losses[:, column]))
        # Where one curve alone is left, nothing says that another size would not be better.
        if np.isfinite(losses[:, column]).sum() >= 2:
            curve = curves[best]
            D = float(np.exp(np.interp(np.log(C), np.log(curve.C), np.log(curve.D))))
            rows.append((float(curve.N[0]), D, float(C), float(np.exp(losses[best, column]))))
    # The smallest and the largest size win also where a size beyond them would: such stretches are edges.
    inner = [row for row in rows if points.N.min() < row[0] < points.N.max()]
    notes = ["Curves along a run are not annealed: finished runs do better than their envelope."]
    if len({row[0] for row in inner}) < 3:
        inner = rows
        notes.append(
            "Too few sizes to leave out the edges of the envelope: its exponents lean on the grid of sizes."
        )
    if len(inner) < 5:
        raise DataError(
            "law=envelope: the curves hardly overlap in compute; train sizes whose budgets overlap"
        )
    return through(points, inner, notes)


def through(
    points: Points, rows: list[tuple[float, float, float, float]], notes: list[str]
) -> Minima:
    N, D, C, loss = np.array(rows).T
    a, n0 = np.polyfit(np.log(C), np.log(N), 1)
    b, d0 = np.polyfit(np.log(C), np.log(D), 1)
    minima = replace(
        points,
        N=N,
        D=D,
        C=C,
        loss=loss,
        run=tuple(f"minimum at {c:.3g}" for c in C),
        experts=None,
        unique=None,
    )
    return Minima(minima, float(a), float(b), (float(n0), float(d0)), tuple(notes))
