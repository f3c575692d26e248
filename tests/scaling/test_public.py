"""Published figures, reproduced from the points their authors published; skipped where those are not at hand."""

import csv
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from pipeline.scaling.fitting import fit
from pipeline.scaling.frontier import budgets_of, isoflop
from pipeline.scaling.intervals import bootstrap
from pipeline.scaling.laws import LAWS
from pipeline.scaling.points import Points, read_csv
from pipeline.scaling.study import study


@pytest.fixture(scope="module")
def chinchilla(public: Path) -> Points:
    return read_csv(public / "chinchilla_points.csv").drop_highest(5)


@pytest.fixture(scope="module")
def porian(public: Path) -> dict[str, Points]:
    rows = defaultdict(list)
    with (public / "porian_isoflop_points.csv").open() as file:
        for row in csv.DictReader(file):
            rows[row["file"], row["config"]].append(
                [float(row[key]) for key in ("N", "D", "C", "loss")]
            )
    columns = {key: np.array(values).T for key, values in rows.items()}
    return {
        key: Points(*c, tuple(map(str, range(c.shape[1]))), "Porian") for key, c in columns.items()
    }


def test_the_chinchilla_optimum(chinchilla: Points) -> None:
    done = fit(chinchilla, LAWS["chinchilla"])
    assert done.objective <= 0.00101828
    assert done.values["E"] == pytest.approx(1.8172, abs=5e-4)
    assert done.values["alpha"] == pytest.approx(0.3473, abs=5e-4)
    assert done.values["beta"] == pytest.approx(0.3672, abs=1e-3)
    assert done.agreement > 0.9


def test_bootstrap_errors_are_those_published(chinchilla: Points) -> None:
    done = fit(chinchilla, LAWS["chinchilla"])
    draws = done.law.natural(bootstrap(done, 1000), done.inputs)
    for found, published in zip(
        draws.std(axis=0), [0.0257, 124.5, 0.0154, 1293, 0.0206], strict=True
    ):
        assert found == pytest.approx(published, rel=0.15)


def test_the_profile_of_e_agrees_with_the_bootstrap(chinchilla: Points) -> None:
    done = study(chinchilla, "chinchilla", resamples=300)
    assert done.profile is not None
    spread = done.parameters()["E"]
    assert done.profile.low == pytest.approx(spread["low"], abs=0.02)
    assert done.profile.high == pytest.approx(spread["high"], abs=0.02)


def test_isoflop_exponents_are_those_published(public: Path, porian: dict[str, Points]) -> None:
    published = json.loads((public / "porian_published.json").read_text())
    off = [
        abs(isoflop(porian[one["file"], one["config"]]).a - one["a_bs_median_weighted"])
        for one in published
    ]  # fmt: skip
    assert len(off) == 15
    assert max(off) < 0.012
    assert np.median(off) < 0.006


@pytest.mark.slow
def test_larger_runs_are_predicted_from_smaller_ones(
    chinchilla: Points, porian: dict[str, Points]
) -> None:
    """Fit on the lower 60% and 80% of compute, predict everything above: its loss and the N* of
    each held-out budget."""
    errors, covered, widths, off = [], [], [], []
    for points in [chinchilla, *porian.values()]:
        for share in (0.6, 0.8):
            edge = np.quantile(points.C, share)
            larger = points.take(edge < points.C)
            done = study(points.take(edge >= points.C), profiled=False)
            loss, low, high = done.interval(larger)
            errors.append(np.abs(loss / larger.loss - 1).mean())
            covered.append(((low <= larger.loss) & (larger.loss <= high)).mean())
            widths.append(((high - low) / loss).mean())
            C, n = np.array(valleys(larger)).reshape(-1, 2).T
            best = done.optimum(C)
            if points is not chinchilla and best is not None:  # which has no distinct budgets
                off.append(np.abs(best.N / np.exp(n) - 1).mean())
    assert len(errors) == 32
    assert np.mean(errors) <= 0.011
    assert np.mean(errors[::2]) <= 0.0175  # beyond the lower cut, up to 87 times its compute
    assert 0.9 <= np.mean(covered) <= 0.97
    assert np.mean(widths) <= 0.06
    assert np.mean(off) <= 0.085


@pytest.mark.slow
def test_small_ladders(chinchilla: Points, porian: dict[str, Points]) -> None:
    """Sets of 22 runs near the best of their budget: fit on 13 or 17, predict the others."""
    rng = np.random.default_rng(1)
    errors = []
    for points in [chinchilla, *porian.values()]:
        budget = [np.abs(np.log(points.C / c)) < np.log(1.2) for c in points.C]
        best = np.array([points.loss[same].min() for same in budget])
        good = points.take(points.loss < 1.08 * best)
        some = good.take(np.sort(rng.choice(len(good), 22, replace=False)))
        for share in (0.6, 0.8):
            edge = np.quantile(some.C, share)
            larger = some.take(edge < some.C)
            loss, _, _ = study(some.take(edge >= some.C), profiled=False).interval(larger)
            errors.append(np.abs(loss / larger.loss - 1).mean())
    assert np.mean(errors) <= 0.015


def valleys(points: Points) -> list[tuple[float, float]]:
    """C and log N* of each budget, by a parabola through the runs within 3% of its best."""
    found = []
    for group in budgets_of(points):
        n, y = np.log(group.N), np.log(group.loss)
        near = (y < y.min() + 0.03) & (np.abs(n - n[y.argmin()]) < 1.3)
        if near.sum() >= 4:
            curve, slope, _ = np.polyfit(n[near], y[near], 2)
            if curve > 0 and n[near].min() < -slope / (2 * curve) < n[near].max():
                found.append((float(np.median(group.C)), -slope / (2 * curve)))
    return found


@pytest.mark.parametrize("law", ["auto", "chinchilla"])
def test_the_famous_split(chinchilla: Points, law: str) -> None:
    """With 5.76e23 FLOPs, Chinchilla has 70B parameters and 1.4T tokens."""
    done = study(chinchilla, law, profiled=False)
    best = done.optimum(np.array([5.76e23]))
    span = done.optimum_range(np.array([5.76e23]))
    assert best is not None and span is not None
    assert 55e9 < best.N[0] < 90e9
    assert 1.0e12 < best.D[0] < 1.8e12
    assert span["N"][0][0] < best.N[0] < span["N"][1][0] < 200e9
