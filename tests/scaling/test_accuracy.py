"""Forecasts of tasks: against known curves, with binomial noise, and on the command line."""

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import ConfigError, DataError, RunError
from pipeline.scaling import accuracy, predict
from pipeline.scaling.points import Points
from pipeline.scaling.study import Study, study
from pipeline.tasks.questions import read_task
from tests.scaling.made_runs import make_ladder, make_run

CURVE = {"chance": 0.25, "ceiling": 0.92, "middle": 1.3, "slope": 4.0}


def true_accuracy(bits: np.ndarray, curve: dict[str, float] = CURVE) -> np.ndarray:
    rise = 1 / (1 + np.exp(curve["slope"] * (bits - curve["middle"])))
    return curve["chance"] + (curve["ceiling"] - curve["chance"]) * rise


def true_bits(C: np.ndarray) -> np.ndarray:
    return 0.55 + 1.0 * (C / 1e14) ** -0.16


def drawn(rng: np.random.Generator, questions: int, curve: dict[str, float], runs: int = 12) -> Points:  # fmt: skip
    """A ladder at 20 tokens per parameter, with the noise of runs and of questions."""
    N = np.geomspace(3e5, 3e7, runs)
    C = 120 * N**2
    bits = true_bits(C)
    right = rng.binomial(questions, true_accuracy(bits, curve)) / questions
    bits = bits * np.exp(rng.normal(0, 0.004, runs))
    return Points(N, 20 * N, C, bits, tuple(f"r{i}" for i in range(runs)), "6ND", accuracy=right)


def at(done: Study, N: float, chance: float | None = 0.25) -> tuple[accuracy.TaskForecast, str]:
    made = predict.forecast(done, predict.at_sizes(done, N, 20 * N))
    (found,), warnings = accuracy.forecast(done, "task", made, chance)
    return found, " ".join(warnings)


@pytest.mark.parametrize("chance", [0.25, None], ids=["chance given", "chance fitted"])
def test_a_curve_without_noise_is_recovered(chance: float | None) -> None:
    x = np.linspace(0.3, 2.8, 60)
    found = accuracy.fit_curves(x, true_accuracy(x), np.ones((1, 60)), 0.002, chance)
    assert found.values() == pytest.approx(CURVE, rel=0.01)
    # One run that went wrong hardly moves it: least squares would be off by 3 points there.
    spoiled = true_accuracy(x)
    spoiled[20] = 0.0
    robust = accuracy.fit_curves(x, spoiled, np.ones((1, 60)), 0.01, chance)
    assert np.abs(robust.at(x) - true_accuracy(x)).max() < 0.01


def test_the_gradient_is_that_of_the_curve() -> None:
    theta = np.array([[-0.4, 0.3, 1.2, -0.9]])
    z = np.linspace(-3, 2, 7)
    for chance, size in ((None, 4), (0.3, 3)):
        _, gradient = accuracy._logistic(theta[:, :size], z, chance)
        for i in range(size):
            step = np.eye(4)[i, :size] * 1e-6
            up = accuracy._logistic(theta[:, :size] + step, z, chance)[0]
            down = accuracy._logistic(theta[:, :size] - step, z, chance)[0]
            assert gradient[i] == pytest.approx((up - down) / 2e-6, abs=1e-8)


@pytest.mark.slow
def test_the_interval_covers_larger_runs(monkeypatch) -> None:
    """For each of 40 ladders, a larger run has 9 times the compute of the largest."""
    monkeypatch.setattr(accuracy, "RESAMPLES", 150)  # 500 give the same intervals
    inside = 0
    widths = []
    off = []
    for seed in range(40):
        # Every other ladder is mostly at chance.
        curve = CURVE | {"middle": (1.3, 0.9)[seed % 2]}
        rng = np.random.default_rng(seed)
        done = study(drawn(rng, 500, curve), "compute", tested=True, profiled=False)
        found, _ = at(done, 9e7)
        truth = float(true_accuracy(true_bits(np.array(120 * 9e7**2)), curve))
        inside += found.low <= rng.binomial(500, truth) / 500 <= found.high
        widths.append(found.high - found.low)
        off.append(abs(found.accuracy - truth))
    assert inside >= 36
    # The noise of 500 questions alone makes an interval of about 0.08.
    assert np.median(widths) < 0.2
    assert np.mean(off) < 0.03
    print(f"{inside} of 40, median width {np.median(widths):.3f}, {np.mean(off):.3f} off")


def test_methods_with_similar_errors_are_combined_and_a_worse_one_is_left_out() -> None:
    points = drawn(np.random.default_rng(0), 2000, CURVE)
    found, _ = at(study(points, "compute", tested=True), 9e7)
    step, direct = found.methods["two-step"], found.methods["direct"]
    assert found.method == "combined"
    odds = (direct["backtest_score"] / step["backtest_score"]) ** 2
    mean = (odds * step["accuracy"] + direct["accuracy"]) / (odds + 1)
    assert found.accuracy == pytest.approx(mean)
    assert found.low == min(step["low"], direct["low"])
    assert found.high == max(step["high"], direct["high"])
    for each in found.methods.values():
        assert each["backtest_errors"] >= 8
        for kind in ("bootstrap", "backtest"):
            low, high = each[f"{kind}_low"], each[f"{kind}_high"]
            assert each["low"] <= low < each["accuracy"] < high <= each["high"]
    # Runs of one compute with different accuracies: the direct method cannot tell them apart.
    N = np.geomspace(1e6, 1e8, 24)
    D = np.where(np.arange(24) % 2, 5, 320) * N
    bits = 0.5 + (N / 1e5) ** -0.3 + (D / 1e6) ** -0.3
    right = true_accuracy(bits, CURVE | {"slope": 8.0})
    split = Points(N, D, 6 * N * D, bits, tuple(map(str, N)), "6ND", accuracy=right)
    found, _ = at(study(split, "chinchilla", tested=True), 4e8)
    best = found.methods["two-step"]
    assert found.method == "two-step", {n: m["backtest_score"] for n, m in found.methods.items()}
    assert (found.accuracy, found.low, found.high) == (best["accuracy"], best["low"], best["high"])


def test_the_forecast_of_a_real_ladder_contains_two_larger_runs(tmp_path: Path, launch) -> None:
    """BLiMP of 12 runs on one H200. The larger runs have 5.7 and 5.5 times the compute (docs/TASKS.md)."""
    targets = tmp_path / "targets.csv"
    rows = ["19079424,124977152,1.9608e16", "35827456,67977216,1.8885e16"]
    targets.write_text("\n".join(["N,D,C", *rows]))
    points = Path(__file__).with_name("blimp.csv")
    call = f"forecast --points {points} --targets {targets} --task blimp --chance 0.5 --json"
    found = json.loads(launch(call))["forecasts"]
    for one, measured in zip(found, (0.6049, 0.5910), strict=True):
        assert one["low"] < measured < one["high"]
        assert one["method"] == "combined" and one["extrapolation"] > 5


def test_at_chance_the_interval_is_wide_and_says_so() -> None:
    flat = CURVE | {"middle": -2.0}
    done = study(drawn(np.random.default_rng(0), 200, flat), "compute", tested=True)
    found, warnings = at(done, 3e8)
    assert "No run is clearly above chance (25.0%" in warnings
    assert found.low < 0.3 and found.high - found.low > 0.25
    assert "Every run is below chance (50.0%" in at(done, 3e8, chance=0.5)[1]
    points = done.fit.points
    assert points.accuracy is not None
    upside_down = study(
        Points(**{**vars(points), "accuracy": np.linspace(0.6, 0.3, len(points))}), "compute"
    )
    assert "Accuracy falls with compute" in at(upside_down, 3e8)[1]


def test_a_task_is_registered_and_scored(tmp_path: Path, launch) -> None:
    ladder = make_ladder(tmp_path / "ladder", 4, questions=1000)
    call = ("forecast --task pairs --chance 0.5 --runs", ladder, "--params 2e7 --tokens 4e8")
    made = json.loads(launch(*call, "--register --json"))
    assert made["task"] == "pairs" and set(made["methods"]) == {"two-step", "direct"}
    assert 0.5 < made["low"] < made["accuracy"] < made["high"] < 1
    assert Path(made["registered"][0]).name == "N20M-D400M-pairs.json"
    with pytest.raises(RunError, match="already registered"):
        launch(*call, "--register")
    launch("forecast --params 2e7 --tokens 4e8 --register --runs", ladder)  # of the loss
    assert "too few to test" in launch(*call)

    run = make_run(ladder, "big-20x", 2e7, 4e8, size="big", questions=1000)
    log = run / "log.jsonl"  # the run was trained after the forecast
    log.write_text(log.read_text().replace('"time": ', '"time": 1e11, "was": '))
    scores = json.loads(launch("score --json --runs", ladder))
    (task,) = [one for one in scores["scores"] if one["task"] == "pairs"]
    measured = json.loads(log.read_text().splitlines()[-2])["pairs/accuracy"]
    assert (task["measured"], task["counts"], task["inside"]) == (measured, True, True)
    assert task["error"] == pytest.approx(measured - made["accuracy"])
    assert scores["calibration"]["mean_accuracy_error"] == abs(task["error"])
    printed = launch("score --runs", ladder)
    assert "2 of 2 inside" in printed and f"{measured:.1%}" in printed


def test_points_of_a_file(tmp_path: Path, launch) -> None:
    points = drawn(np.random.default_rng(0), 2000, CURVE)
    assert points.accuracy is not None
    rows = zip(points.N, points.D, points.loss, points.accuracy, strict=True)
    file = tmp_path / "points.csv"
    lines = [f"{N},{D},3,{bits},{right}" for N, D, bits, right in rows]
    file.write_text("\n".join(["N,D,loss,quiz/bpb,quiz/accuracy", *lines]))
    call = ("forecast --points", file, "--params 9e7 --tokens 1.8e9 --json")
    made = json.loads(launch(*call, "--task quiz --chance 0.25"))
    truth = float(true_accuracy(true_bits(np.array(120 * 9e7**2))))
    assert made["accuracy"] == pytest.approx(truth, abs=0.03)
    assert made["low"] < truth < made["high"]
    for wrong in ("-0.25 is not a share; give one", "40 is not a share; divide percent"):
        bad = ["N,D,loss,quiz/bpb,quiz/accuracy", f"1e6,2e7,3,1.2,{wrong.split()[0]}", *lines]
        file.write_text("\n".join(bad))
        left_out = json.loads(launch(*call, "--task quiz --chance 0.25"))["warnings"]
        assert any(f"accuracy={wrong}" in line for line in left_out)
    coarse = [f"{1e6 * 2**i},{2e7 * 2**i},3,{4 - 0.3 * i:.1f},{0.3 + i / 20}" for i in range(8)]
    file.write_text("\n".join([bad[0], *coarse]))
    warnings = json.loads(launch(*call, "--task quiz --chance 0.25"))["warnings"]
    assert any("bits per byte of quiz as the loss: 8 of 8 losses" in text for text in warnings)
    rising = [f"{1e6 * 2**i},{2e7 * 2**i},3,{1 + i},0.5" for i in range(6)]
    file.write_text("\n".join([bad[0], *rising]))
    with pytest.raises(
        DataError, match="task=quiz, with its bits per byte as the loss: loss does not"
    ):
        launch(*call, "--task quiz")
    file.write_text("N,D,quiz/accuracy\n1e6,2e7,0.5\n")
    with pytest.raises(DataError, match="quiz/bpb is missing, and so is loss"):
        launch(*call, "--task quiz")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--task piqa --params 2e7 --tokens 4e8", "task=piqa: none of 3 runs logged piqa/accuracy"),
        ("--task pairs --chance 1 --params 2e7 --tokens 4e8", "chance=1.0 must be"),
        ("--task pairs --target-loss 2", "cannot be combined with --target-loss"),
        ("--task pairs", "give one of .* --flops C or --targets"),
        ("--task pairs --law isoflop --flops 1e18", "law=isoflop"),
    ],
)
def test_an_error_is_one_line(tmp_path: Path, launch, options: str, message: str) -> None:
    ladder = make_ladder(tmp_path / "ladder", questions=500)
    with pytest.raises((ConfigError, DataError), match=message) as error:
        launch("forecast --runs", ladder, options)
    assert "\n" not in str(error.value)


def test_too_few_runs_are_refused(tmp_path: Path, launch) -> None:
    ladder = make_ladder(tmp_path / "ladder", 2, questions=500)
    with pytest.raises(DataError, match="task=pairs: a curve needs 3 finished runs"):
        launch("forecast --task pairs --params 2e7 --tokens 4e8 --runs", ladder)


def test_chance_is_that_of_the_questions(tmp_path: Path) -> None:
    file = tmp_path / "quiz.jsonl"
    rows = [
        {"task": "a", "good": "x", "bad": "y"},
        {"task": "b", "prompt": "p", "choices": ["1", "2", "3", "4"], "answer": 0},
        {"task": "b", "prompt": "p", "continuation": "1"},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert read_task(file).chance == pytest.approx((0.5 + (0.25 + 0) / 2) / 2)
