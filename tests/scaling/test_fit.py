import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import ConfigError, DataError
from pipeline.scaling.fitting import descend, fit, screened
from pipeline.scaling.laws import LAWS, Inputs, Law
from pipeline.scaling.points import Points, read_csv
from pipeline.scaling.study import study
from pipeline.scaling.two_groups import TwoGroups, group_warnings
from tests.scaling.made_runs import LAW, make_ladder, true_loss


def grid(noise: float = 0.0, count: int = 7, seed: int = 0) -> Points:
    axes = np.meshgrid(np.geomspace(1e6, 1e9, count), np.geomspace(1e8, 1e11, count))
    N, D = (axis.ravel() for axis in axes)
    loss = true_loss(N, D) * np.exp(np.random.default_rng(seed).normal(0, 1, N.size) * noise)
    return Points(N, D, 6 * N * D, loss, tuple(map(str, range(N.size))), "made")


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
def test_gradients_match_differences(law: Law) -> None:
    points = grid(0.01, 4)
    rows = np.arange(len(points))
    points = replace(points, experts=1.0 + rows % 3, unique=points.D / (1 + rows % 5))
    x = Inputs.of(points)
    theta = screened(points, law, x, 2) + 0.1
    value, gradient = law.log_loss(theta, x)
    for p in range(theta.shape[1]):
        step = np.zeros(theta.shape[1])
        step[p] = 1e-6
        slope = (law.log_loss(theta + step, x)[0] - law.log_loss(theta - step, x)[0]) / 2e-6
        np.testing.assert_allclose(gradient[p], slope, atol=1e-7)
    assert value.shape == (2, 16)


def test_a_known_law_comes_back() -> None:
    done = fit(grid(), LAWS["chinchilla"])
    for name, value in LAW.items():
        assert done.values[name] == pytest.approx(value, rel=1e-5)


def test_many_rows_descend_as_one_would() -> None:
    points = grid(0.01)
    law, x = LAWS["chinchilla"], Inputs.of(points)
    starts = screened(points, law, x, 5)
    even = np.full(len(points), 1 / len(points))
    weights = np.random.default_rng(0).multinomial(len(points), even, 5).astype(float)
    together, _ = descend(points, law, x, starts, weights)
    for i in range(5):
        alone, _ = descend(points, law, x, starts[i : i + 1], weights[i : i + 1])
        np.testing.assert_allclose(together[i], alone[0], rtol=1e-6)


def test_three_runs_fall_back_with_a_warning(ladder: Path, launch) -> None:
    data = json.loads(launch("fit --json --runs", ladder))
    assert data["law"] == "power"
    assert data["points"]["used"] == 3
    assert data["exponents"] is None
    words = " ".join(data["warnings"])
    assert "3 runs cannot determine" in words
    assert "more runs would" in words
    assert "1 point more than parameters" in words
    assert data["errors_from"] == "scatter"  # three runs cannot be resampled
    g = data["parameters"]["g"]
    assert g["low"] < g["value"] < g["high"]


def test_five_runs_on_a_ladder_give_a_floor_but_not_n_and_d(tmp_path: Path) -> None:
    from pipeline.runs.history import read_runs
    from pipeline.scaling.points import points_of

    done = study(points_of(read_runs(make_ladder(tmp_path / "x", 5))))
    assert done.fit.law.name == "compute"
    assert any("more runs would" in warning for warning in done.warnings)


@pytest.mark.parametrize("count", [5, 9])
def test_only_one_warning_names_runs_that_would_help(count: int) -> None:
    """Five of the demo's runs do not determine a law of N and D; nine determine no floor or exponent."""
    points = read_csv(Path(__file__).with_name("demo.csv")).take(np.arange(count))
    words = ("more runs would", "Larger runs would", "would separate", "wider range would help")
    warnings = study(points).warnings
    assert any("zero fits as well" in text for text in warnings)
    assert sum(any(word in text for word in words) for text in warnings) == 1


def test_a_grid_gives_the_whole_law_without_complaint() -> None:
    done = study(grid(0.001))
    assert done.name in ("chinchilla", "gamma")  # γ = 1 is Chinchilla's law
    assert done.warnings == ()
    a = LAW["beta"] / (LAW["alpha"] + LAW["beta"])
    assert done.to_json()["exponents"]["a"] == pytest.approx(a, abs=0.02)


def test_standard_errors_are_those_of_refits_to_new_noise() -> None:
    done = [study(grid(0.003, 6, seed), "chinchilla") for seed in range(25)]
    fits = [one.to_json()["parameters"] for one in done]
    for name, value in LAW.items():
        spread = np.std([found[name]["value"] for found in fits])
        assert 0.65 < np.mean([found[name]["se"] for found in fits]) / spread < 1.6
        assert np.mean([found[name]["low"] < value < found[name]["high"] for found in fits]) >= 0.84
    of_e = [one.profile for one in done]
    assert np.mean([p is not None and p.low < LAW["E"] < p.high for p in of_e]) >= 0.84


def test_a_warning_if_n_and_d_grow_together() -> None:
    N = np.geomspace(1e6, 1e9, 12)
    loss = true_loss(N, 20 * N)
    points = Points(N, 20 * N, 120 * N * N, loss, tuple(map(str, range(12))), "made")
    done = study(points)
    assert done.fit.law.name == "compute"
    assert "cannot be separated" in done.warnings[0]


def test_the_scatter_interval_covers() -> None:
    """95% nominal, 5 runs on a line in log space: Student's t with three degrees of freedom."""
    rng = np.random.default_rng(0)
    inside = 0
    C = np.geomspace(1e13, 1e15, 6)
    for _ in range(200):
        loss = 30 * C**-0.07 * np.exp(rng.normal(0, 0.01, 6))
        done = study(Points(C, C, C, loss, tuple("abcdef"), "made").take(np.arange(5)), "power")
        _, low, high = done.interval(done.frontier(C[5:]))
        inside += int(low[0] < loss[5] < high[0])
    assert 0.90 <= inside / 200 <= 0.99


def test_runs_that_do_not_vary() -> None:
    """Of one size, of one length, or too few: a warning with `auto`, an error for a named law."""
    D = np.geomspace(1e8, 1e11, 12)
    N = np.full_like(D, 1e7)
    size = Points(N, D, 6 * N * D, true_loss(N, D), tuple(map(str, range(12))), "made")
    assert "effect of N" in study(size).warnings[0]
    with pytest.raises(DataError, match="N = 10M"):
        study(size, "chinchilla")
    length = replace(size, N=size.D, D=size.N)
    assert any("effect of D" in warning for warning in study(length).warnings)
    with pytest.raises(DataError, match="D = 10M"):
        study(length, "chinchilla")
    assert any("same 10M tokens" in warning for warning in study(length.take(D < 1e9)).warnings)
    with pytest.raises(DataError, match="law=chinchilla has 5 parameters"):
        study(size.take(D < 3e8), "chinchilla")
    with pytest.raises(ConfigError, match="law='chinchila'"):
        study(size, "chinchila")


@pytest.mark.parametrize(
    ("loss", "C", "words"),
    [
        ([3.0], [1e12], "points=1"),
        ([3.0, 2.9], [1e12, 1.1e12], "spans only"),
        ([2.5, 2.7, 2.9], [1e12, 1e13, 1e14], "does not fall with compute"),
    ],
)
def test_points_without_a_law_are_refused(loss: list[float], C: list[float], words: str) -> None:
    c = np.array(C)
    with pytest.raises(DataError, match=words):
        study(Points(c, c, c, np.array(loss), tuple("abc"[: len(c)]), "made"))


def test_one_source_at_a_time(launch, ladder: Path) -> None:
    with pytest.raises(ConfigError, match="--runs"):
        launch("fit --points x.csv --runs", ladder)
    assert "power: L = K·C^−g" in launch("fit --runs", ladder)


def test_the_ladder_of_the_docs() -> None:
    """Trained here on synthetic:small, whose held-out entropy is 2.9497 nats per token (docs/SCALING.md)."""
    points = read_csv(Path(__file__).with_name("synthetic.csv"))
    done = study(points, "gamma")
    E = done.parameters()["E"]
    assert E["low"] < 2.9497 < E["high"] and E["high"] / E["low"] < 1.03
    assert [E[key] for key in ("low", "value", "high")] == pytest.approx(
        [2.940, 2.990, 3.006], abs=2e-3
    )
    assert done.warnings == ()
    simpler = study(points)  # Chinchilla's law, fitted for forecasting
    chosen = simpler.parameters()["E"]
    assert simpler.name == "chinchilla"
    (doubt,) = simpler.warnings  # the interval of α begins at -0.001
    assert "interval of alpha and of beta contains zero" in doubt
    # The interval contains what the points alone allow with a free γ, and the law's own E.
    assert chosen["high"] == pytest.approx(E["high"], abs=1e-3)
    assert chosen["low"] == chosen["value"] == pytest.approx(2.849, abs=3e-3)
    assert study(points, "chinchilla").parameters()["E"]["low"] > 2.9497
    fewer = study(
        points.take(points.D > 3e5), "chinchilla"
    )  # nine runs do not determine E, and a warning reports it
    assert fewer.parameters()["E"]["low"] == 0
    assert any("zero fits as well" in warning for warning in fewer.warnings)


def test_runs_too_short_for_their_size_break_no_backtest() -> None:
    """Measured on synthetic:small. The largest size has hardly begun to learn, so Kaplan's Nc diverges."""
    N = np.repeat([14992.0, 43232.0, 107952.0], [4, 4, 2])
    D = np.array([131072.0, 262144, 524288, 1048576] * 2 + [131072, 262144])
    loss = np.array(
        [3.2295, 3.1397, 3.1110, 3.0946, 3.1674, 3.0806, 3.0462, 3.0278, 3.3316, 3.0846]
    )
    made = Points(N, D, 7 * N * D, loss, tuple(map(str, range(10))), "made")
    done = study(made)
    loss, low, high = done.interval(done.frontier(np.geomspace(1e10, 1e12, 5)))
    assert np.isfinite(loss).all() and (low < high).all()
    assert any(
        "steeper than any known law" in w and "would show it" in w
        for w in study(made, "chinchilla").warnings
    )


def changed(column: str, factor: float) -> tuple[Points, list[str]]:
    """Five sizes at seven lengths, a random third of which have one column in another unit."""
    N, ratio = (
        axis.ravel() for axis in np.meshgrid(np.geomspace(1e6, 1e9, 5), np.geomspace(5, 80, 7))
    )
    rng = np.random.default_rng(0)
    loss = true_loss(N, N * ratio) * np.exp(rng.normal(0, 0.003, 35))
    columns = {"N": N, "D": N * ratio, "loss": loss}
    wrong = np.sort(rng.choice(35, 12, replace=False))
    columns[column][wrong] *= factor
    N, D, loss = columns.values()
    names = tuple(f"r{i}" for i in range(35))
    return Points(N, D, 6 * N * D, loss, names, "C = 6·N·D"), [names[i] for i in wrong]


@pytest.mark.parametrize(("column", "factor"), [("D", 3.5), ("D", 4.0), ("D", 1 / 3.5), ("N", 2.0)])
def test_rows_in_another_unit_are_named(column: str, factor: float) -> None:
    points, wrong = changed(column, factor)
    (warning,) = group_warnings(fit(points, LAWS["chinchilla"]))
    corrected = f"with {column} {'divided' if factor > 1 else 'multiplied'} by "
    assert warning.startswith(f"{', '.join(wrong[:3])} and 9 more: {corrected}")
    found = float(warning.split(corrected)[1].split(",")[0])
    assert found == pytest.approx(max(factor, 1 / factor), rel=0.1)


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_one_size_in_another_unit_is_named(factor: float) -> None:
    """A factor on the loss of this size fits as well, as if it had been trained otherwise."""
    points = read_csv(Path(__file__).parent / "h200.csv")
    N = points.N.copy()
    N[np.unique(N)[1] == N] *= factor
    (warning,) = group_warnings(fit(replace(points, N=N, C=6 * N * points.D), LAWS["gamma"]))
    assert f"with N {'divided' if factor > 1 else 'multiplied'} by " in warning


@pytest.mark.parametrize(
    ("column", "factor", "rows"), [("D", 4.0, [1, 2, 3, 7]), ("N", 4.0, [6, 7, 8, 10])]
)
def test_rows_off_a_small_grid_are_named(column: str, factor: float, rows: list[int]) -> None:
    """The losses alone do not show it: the law bends, and the runs still scatter only 0.3%."""
    points = read_csv(Path(__file__).parent / "synthetic.csv")
    assert not group_warnings(fit(points, LAWS["chinchilla"]))
    values = getattr(points, column).copy()
    values[rows] *= factor
    (warning,) = group_warnings(fit(replace(points, **{column: values}), LAWS["chinchilla"]))
    assert f"with {column} " in warning and "by 4, the 12 runs form a grid" in warning
    if column == "D":  # with other rows divided by 4, N would form a grid, too
        assert warning.startswith("7k-524k, 7k-1.05M, 7k-2.1M and 1 more: with D divided by 4")


def test_lengths_that_look_like_a_damaged_grid_are_right() -> None:
    """Some runs are twice as long as those of other sizes, and the law fits them as they are."""
    N = np.repeat([1e6, 4e6, 16e6], 4)
    D = np.array([1, 2, 4, 8, 1, 4, 8, 16, 1, 2, 8, 16]) * 1e8
    loss = true_loss(N, D) * np.exp(np.random.default_rng(0).normal(0, 0.003, 12))
    points = Points(N, D, 6 * N * D, loss, tuple(map(str, range(12))), "C = 6·N·D")
    assert not group_warnings(fit(points, LAWS["chinchilla"]))


def test_a_law_that_is_off_everywhere_makes_no_second_group() -> None:
    """The true law has a γ of 0.5, which Chinchilla's law cannot follow."""
    N = np.repeat(np.geomspace(3e5, 1.8e8, 6), 3)
    D = N * np.tile([5.0, 33.0, 215.0], 6)
    loss = 0.3 + (6e5 * N**-0.86 + 9e6 * D**-0.82) ** 0.5
    points = Points(N, D, 6 * N * D, loss, tuple(map(str, range(18))), "C = 6·N·D")
    assert not group_warnings(fit(points, LAWS["chinchilla"]))


def test_bytes_in_a_small_measured_ladder() -> None:
    points = read_csv(Path(__file__).parent / "h200.csv")
    D = points.D.copy()
    D[[1, 4, 7, 10, 14]] *= 3.5
    wrong = replace(points, D=D, C=6 * points.N * D)
    assert any("with D divided by 3." in text for text in study(wrong, "chinchilla").warnings)
    assert not group_warnings(fit(points, LAWS["chinchilla"]))


@pytest.mark.parametrize("factor", [1.0, 1.02, 1.05])
@pytest.mark.parametrize("law", ["chinchilla", "gamma"])
def test_runs_that_were_trained_otherwise_are_not_in_another_unit(factor: float, law: str) -> None:
    """A third of the runs have a higher loss, for example because their rate did not decay."""
    points, _ = changed("loss", factor)
    assert not group_warnings(fit(points, LAWS[law]))


@pytest.mark.parametrize("column", ["N", "D", "loss"])
@pytest.mark.parametrize("law", ["chinchilla", "gamma"])
def test_gradients_of_two_groups_match_differences(column: str, law: str) -> None:
    points = grid(0.01, 4)
    x = Inputs.of(points)
    inner = LAWS[law]
    both = TwoGroups(inner, column, np.log(points.loss))
    theta = np.column_stack([screened(points, inner, x, 2), [0.7, -1.0]])
    gradient = both.log_loss(theta, x)[1]
    for p, step in enumerate(1e-7 * np.eye(theta.shape[1])):
        slope = (both.log_loss(theta + step, x)[0] - both.log_loss(theta - step, x)[0]) / 2e-7
        np.testing.assert_allclose(gradient[p], slope, atol=1e-6)
