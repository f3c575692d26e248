"""Which law these points can carry: refuse what no law fits, count what there is, let backtests decide the rest."""

import numpy as np

from pipeline.errors import DataError
from pipeline.scaling.backtest import ENOUGH, Backtest, backtest
from pipeline.scaling.figures import count, power
from pipeline.scaling.laws import Chinchilla, Compute, Gamma, Kaplan, Law, Power
from pipeline.scaling.points import Points
from pipeline.scaling.repeats import DataConstrained
from pipeline.scaling.routed import Routed

_ALL: tuple[Law, ...] = (
    Chinchilla(),
    Gamma(),
    Kaplan(),
    Routed(),
    DataConstrained(),
    Compute(),
    Power(),
)
LAWS: dict[str, Law] = {law.name: law for law in _ALL}
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


def runs_across(points: Points) -> str:
    """Runs that tell what N does from what D does: about one that is there, its compute split otherwise."""
    if not len(points):
        return "three sizes at 20 tokens per parameter"
    middle = int(np.argsort(points.C)[len(points) // 2])
    N, D, C = points.N[middle], points.D[middle], points.C[middle]
    return (
        f"for C ≈ {power(C)} FLOPs N = {count(N / 2)} on {count(D * 2)} tokens and N = {count(N * 2)} on "
        f"{count(D / 2)}, and the same about a smaller and a larger run"
    )
