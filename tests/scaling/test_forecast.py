"""Forecasts: their errors, their agreement with the printed law, and their registration."""

import json
import math
import platform
import shlex
import stat
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from pipeline.config.dump import to_toml
from pipeline.config.layers import load
from pipeline.dashboard.law_view import law_data, line, size_lines
from pipeline.dashboard.live import Watcher
from pipeline.dashboard.source import Directories
from pipeline.data.shards import Manifest
from pipeline.errors import ConfigError, RunError, UserError
from pipeline.planner.check import resolve
from pipeline.planner.count import params
from pipeline.runs.history import HOST_FILE, read_runs
from pipeline.scaling.backtest import backtest, focus
from pipeline.scaling.laws import LAWS
from pipeline.scaling.points import Points, points_of
from pipeline.scaling.predict import at_sizes
from pipeline.scaling.record import _digest, kind_of, registered, score
from pipeline.scaling.study import study
from tests.scaling.made_runs import make_run, true_loss


def drawn(noise: float, seed: int, budgets: int = 8) -> Points:
    C = np.repeat(np.geomspace(1e17, 1e21, budgets), 6)
    N = np.tile(np.geomspace(0.4, 2.5, 6), budgets) * 0.1 * C**0.5
    D = C / 6 / N
    loss = true_loss(N, D) * np.exp(np.random.default_rng(seed).normal(0, noise, N.size))
    return Points(N, D, C, loss, tuple(map(str, range(N.size))), "made")


def write(path: Path, points: Points) -> Path:
    rows = zip(points.N, points.D, points.loss, strict=True)
    path.write_text("N,D,loss\n" + "".join(f"{N},{D},{loss}\n" for N, D, loss in rows))
    return path


def test_the_interval_covers_what_comes_next() -> None:
    inside = []
    widths = []
    for seed in range(3):
        points = drawn(0.003, seed)
        smaller = points.take(points.C < 1e20)
        larger = points.take(points.C > 1e20)
        loss, low, high = study(smaller).interval(larger)
        inside.append((low <= larger.loss) & (larger.loss <= high))
        widths.append(np.median(high / loss - 1))
    assert np.mean(inside) >= 0.9
    assert np.mean(widths) < 0.05  # and narrow enough to be useful


def test_the_interval_widens_outside_of_the_runs_ratios_not_off_the_optimum() -> None:
    """Runs on too few tokens, as in the demo: a larger run like them is no riskier than they are."""
    N = np.repeat([43e6, 108e6, 300e6], 3)
    D = np.tile([5e6, 20e6, 79e6], 3)
    loss = true_loss(N, D) * np.exp(np.random.default_rng(0).normal(0, 0.003, 9))
    done = study(Points(N, D, 6 * N * D, loss, tuple("abcdefghi"), "made"), profiled=False)
    half = {}
    for tokens in (16e6, 1.6e9, 16e9):  # 0.02, 2 and 20 per parameter; the runs have 0.016 to 1.8
        _, low, high = done.interval(at_sizes(done, 8e8, tokens))
        half[tokens] = float(np.log(high / low)[0] / 2)
    assert half[16e6] < 0.03
    assert half[16e9] > 1.5 * half[1.6e9] > 3 * half[16e6]


@pytest.mark.parametrize("shift", [0.5, 2.0])
def test_small_budgets_with_another_optimum_do_not_move_that_of_large_ones(shift: float) -> None:
    """Up to 3e18 FLOPs, valleys have half or twice the N. Equal weights would give +54% and −42%."""
    C = np.repeat(np.geomspace(1e17, 1e21, 8), 6)
    N = np.tile(np.geomspace(0.15, 6, 6), 8) * 0.1 * C**0.5
    D = C / 6 / N
    moved = np.where(C < 3e18, shift, 1.0)
    noise = np.random.default_rng(0).normal(0, 0.0007, N.size)
    loss = true_loss(N * moved, D / moved) * np.exp(noise)
    best = study(Points(N, D, C, loss, tuple(map(str, range(48))), "made")).optimum(
        np.array([1e22])
    )
    many = np.geomspace(1e9, 1e12, 20_001)
    truth = many[np.argmin(true_loss(many, 1e22 / 6 / many))]
    assert best is not None and abs(best.N[0] / truth - 1) < 0.1


def test_backtests_never_see_what_they_predict() -> None:
    points = drawn(0.003, 0)
    test = backtest(points, LAWS["chinchilla"], focused=True)
    spoiled = points.loss.copy()
    spoiled[points.C.max() == points.C] *= 1.5  # this may change only the errors at the last budget
    again = backtest(replace(points, loss=spoiled), LAWS["chinchilla"], focused=True)
    assert test is not None and again is not None
    earlier = ~np.isclose(test.cut * test.ratio, points.C.max())
    assert earlier.any()
    np.testing.assert_allclose(test.errors[earlier], again.errors[earlier], atol=1e-4)
    moved = again.errors[~earlier] - test.errors[~earlier]
    np.testing.assert_allclose(moved, np.log(1.5), atol=1e-2)


def test_focus_keeps_enough_points() -> None:
    points = drawn(0.01, 0)
    for law in (LAWS["chinchilla"], LAWS["gamma"]):
        weights = focus(points, law)
        assert weights.sum() ** 2 / (weights**2).sum() >= 2 * len(law.parameters)
        assert weights[points.C.max() == points.C].max() == weights.max()


@pytest.mark.parametrize("law", ["auto", "gamma"])
def test_the_forecast_is_the_printed_law(law: str, tmp_path: Path, launch) -> None:
    """The exponents of this ladder are steep, so a second, hidden law would give other losses."""
    source = f"--points {Path(__file__).with_name('synthetic.csv')} --law {law} --json"
    printed = json.loads(launch("fit --bootstrap 0", source))
    p = {name: figures["value"] for name, figures in printed["parameters"].items()}
    places = tmp_path / "places.csv"
    places.write_text("N,D\n15e3,262144\n108e3,2e6\n1e9,2e10\n")
    made = json.loads(launch("forecast", source, "--targets", places))["forecasts"]
    for one in made:
        terms = p["A"] * one["N"] ** -p["alpha"] + p["B"] * one["D"] ** -p["beta"]
        assert one["loss"] == pytest.approx(p["E"] + terms ** p.get("gamma", 1.0), rel=1e-9)
        assert one["loss"] > p["E"] >= printed["parameters"]["E"]["low"]


def test_a_ladder_of_one_gpu_forecasts_a_run_with_five_times_the_compute(
    tmp_path: Path, launch
) -> None:
    """The ladder `gpu` as an H200 trained it, the `30m` after it, and two of other calls."""
    targets = tmp_path / "targets.csv"
    columns = ("N,D,C", "33730304,190021632,5.040e16")
    others = ("33730304,179994624,4.774e16", "33730304,200048640,5.306e16")
    targets.write_text("\n".join((*columns, *others)))
    source = f"--points {Path(__file__).with_name('h200.csv')}"
    found = json.loads(launch("forecast --json", source, "--targets", targets))["forecasts"]
    for made, measured in zip(found, (1.1577, 1.1656, 1.1663), strict=True):
        assert made["extrapolation"] > 5
        assert made["loss"] == pytest.approx(measured, rel=0.015)
        assert made["low"] < measured < made["high"]
        assert made["high"] / made["loss"] < 1.04
        assert made["optimum"]["loss"] <= made["loss"]
    # FLOPs per parameter and token fall from 12.2 to 9.4 in the ladder, and to 7.9 in these runs.
    again = json.loads(launch("forecast --json --params 33730304 --tokens 179994624", source))
    assert again["C"] == pytest.approx(4.774e16, rel=0.07)


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ("N,D\n7000,140000\n", "below the smallest run"),
        ("N,D,C\n1e12,2e13,1e23\n", "C / (N·D) of the targets"),
        ("N,D,unique\n1e12,2e13,1e9\n", "ignores the column `unique`"),
        ("N,D,experts\n1e12,2e13,64\n", "ignores the column `experts`"),
        ("N,D,num_experts\n1e12,2e13,64\n", "column `num_experts` is not read"),
        ("N,D,epochs\n1e12,2e13,40\n", "column `epochs` is not read"),
    ],
)
def test_targets_that_the_law_does_not_describe_are_named(
    targets: str, words: str, tmp_path: Path, launch
) -> None:
    places = tmp_path / "places.csv"
    places.write_text(targets)
    source = f"--points {write(tmp_path / 'points.csv', drawn(0.002, 0))} --law chinchilla"
    warnings = json.loads(launch("forecast --json --targets", places, source))["warnings"]
    assert sum(words in warning for warning in warnings) == 1


def test_a_size_has_the_architecture_and_vocabulary_of_the_points(tmp_path: Path, launch) -> None:
    made = drawn(0.002, 0)
    rows = zip(made.N, made.D, made.loss, strict=True)
    lines = [f"{N},{D},{loss},isoflop,4096,causal,f00d\n" for N, D, loss in rows]
    points = tmp_path / "points.csv"
    points.write_text("N,D,loss,arch,vocab,objective,tokenizer\n" + "".join(lines))
    found = json.loads(launch("forecast --size 30m --json --points", points))
    assert "--arch isoflop" in found["recipe"]["command"]
    config = load(size="30m", arch="isoflop", over={"model": {"vocab": 4096}})
    assert found["N"] == params(resolve(config, ranks=1, gpu=False).model).scaling
    tiny = json.loads(launch("forecast --params 1e4 --tokens 1e6 --json --points", points))
    assert any("below the smallest shipped size, `7k`" in warning for warning in tiny["warnings"])
    targets = tmp_path / "targets.csv"
    for columns, cells, wrong in (
        ("arch,vocab,objective", "bert,8192,mlm", {"arch=bert", "vocab=8192", "objective=mlm"}),
        ("vocab", "beef", {"tokenizer=beef"}),  # a digest, as in our own points.csv
        ("arch,vocab,objective", "isoflop,4096.0,causal", set()),
    ):
        targets.write_text(f"N,D,{columns}\n1e12,2e13,{cells}\n")
        found = json.loads(launch("forecast --json --points", points, "--targets", targets))
        named = [text for text in found["warnings"] if text.startswith("The targets have")]
        assert {text.split()[3].strip(",") for text in named} == wrong
    for wrong in ("--arch dense", "--tokens nan"):
        with pytest.raises(ConfigError, match=wrong.split()[0].removeprefix("--")):
            launch("forecast --size 30m --points", points, wrong)


def test_an_error_is_quoted_only_where_there_were_runs_to_test_it() -> None:
    points = drawn(0.003, 0, budgets=3).take(np.arange(0, 18, 2))
    done = study(points)
    assert any("Too few runs to test" in warning for warning in done.warnings)
    assert done.backtest is None and done.to_json()["backtest"] is None


def test_a_forecast_has_the_ladders_own_recipe(ladder: Path, launch, corpus: Path) -> None:
    own = ["model.seq=128", "optim.lr=2e-3", "train.batch_tokens=1024", "train.eval_every=7"]
    own += ["model.segments=2"]  # an old release accepted it for a decoder
    for run in ladder.iterdir():
        size = json.loads((run / "run.json").read_text())["size"]
        size = {"mini": "500k", "small": "1m"}.get(size, size)
        over = {"model": {"vocab": 4096}, "data": {"dir": str(corpus)}}
        config = load(size=size, sets=own, over=over)
        (run / "config.toml").write_text(to_toml(resolve(config, ranks=1, gpu=False)))
    # The command names the data only if its hash is that of the runs.
    manifest = Manifest.load(corpus)
    for known in (False, True):
        made = json.loads(launch("forecast --size 3m --json --runs", ladder))
        assert any("passes over" in text for text in made["warnings"]) == known
        for run in ladder.glob("*/run.json"):
            run.write_text(run.read_text().replace('"cafe"', f'"{manifest.hash}"'))
    unique = f"--unique {manifest.splits['train'].tokens}"
    assert unique in " ".join(made["warnings"])
    assert made["recipe"]["lr"] == 2e-3 and made["recipe"]["batch_tokens"] == 1024
    words = shlex.split(made["recipe"]["command"])
    assert words[:4] == ["launch", "pretrain", "--size", "3m"]
    assert words[words.index("--out") + 1].startswith(f"{ladder}/3m-")  # `launch score` finds it
    sets = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    assert {"model.seq=128", "optim.lr=0.002", "train.batch_tokens=1024"} <= set(sets)
    # The first is not a part of the recipe, and `launch pretrain` would refuse the second.
    assert not any(text.startswith(("train.eval_every", "model.segments")) for text in sets)
    made = json.loads(launch("forecast --size 3m --set train.tokens=5e6 --json --runs", ladder))
    assert "train.tokens" not in made["recipe"]["command"]  # because --steps gives the length
    trained = resolve(load(size="3m", sets=sets), ranks=8, gpu=True)
    assert trained.optim.lr == 2e-3 and trained.model.seq == 128


def test_the_page_draws_smooth_lines_through_runs_of_different_ratios() -> None:
    N = np.repeat([1e7, 3e7, 1e8, 3e8], 3)
    D = N * np.tile([5.0, 20.0, 80.0], 4)
    loss = true_loss(N, D) * np.exp(np.random.default_rng(0).normal(0, 0.001, 12))
    ladder = Points(N, D, 6 * N * D, loss, tuple(map(str, range(12))), "made")
    done = study(ladder)
    shown = line(done, ladder, None)
    assert shown is not None
    best = done.optimum(np.array(shown["C"]))
    assert best is not None
    np.testing.assert_allclose(shown["loss"], best.loss)
    sizes = size_lines(done, ladder, {1e7: "10m", 3e7: "30m", 1e8: "100m", 3e8: "300m"})
    assert [(one["size"], one["N"]) for one in sizes] == [
        ("10m", 1e7), ("30m", 3e7), ("100m", 1e8), ("300m", 3e8)
    ]  # fmt: skip
    for one in sizes:
        runs = ladder.take(one["N"] == ladder.N)
        here = np.exp(np.interp(np.log(runs.C), np.log(one["flops"]), np.log(one["loss"])))
        np.testing.assert_allclose(here, done.fit.predict(runs), rtol=1e-4)
        assert one["tokens"][0] < runs.D.min() and one["tokens"][-1] > runs.D.max()
    # A zigzag has slopes that rise and fall again.
    for x, y in [(shown["C"], shown["loss"]), *((one["flops"], one["loss"]) for one in sizes)]:
        slopes = np.diff(np.log(y)) / np.diff(np.log(x))
        assert (slopes < 0).all() and (np.diff(slopes) > -1e-4).all()
    no_sizes = study(ladder.take(np.arange(0, 12, 3)))
    assert no_sizes.name == "power" and size_lines(no_sizes, ladder, {}) == []
    assert line(no_sizes, ladder, None) is not None


def test_the_interval_widens_with_the_reach() -> None:
    done = study(drawn(0.001, 0))
    loss, _, high = done.interval(done.frontier(np.array([1e21, 1e22, 1e23, 1e24])))
    assert (np.diff(high / loss) > 0).all()


@pytest.mark.parametrize("text", ["N,D,loss\n,,\n", "N,D,loss\n1e6,,3\n,1e8,2.9\n"])
def test_empty_cells_are_one_line(text: str, tmp_path: Path, launch) -> None:
    empty = tmp_path / "empty.csv"
    empty.write_text(text)
    with pytest.raises(UserError, match="points=0"):
        launch("fit --points", empty)
    full = write(tmp_path / "p.csv", drawn(0.001, 0))
    with pytest.raises(ConfigError, match=r"empty\.csv:\d: [ND] is empty"):
        launch("forecast --points", full, "--targets", empty)


def test_targets_from_a_file(tmp_path: Path, launch) -> None:
    points = drawn(0.001, 0)
    small = write(tmp_path / "small.csv", points.take(points.C < 1e20))
    large = write(tmp_path / "large.csv", points.take(points.C > 1e20))
    made = json.loads(launch("forecast --json --points", small, "--targets", large))["forecasts"]
    losses = [one["loss"] for one in made]
    np.testing.assert_allclose(losses, points.loss[points.C > 1e20], rtol=0.01)
    one = made[-1]
    assert one["low"] < one["loss"] < one["high"]
    reach = points.C.max() / points.C[points.C < 1e20].max()
    assert one["extrapolation"] == pytest.approx(reach, rel=1e-6)
    assert one["optimum"]["N"] * one["optimum"]["D"] * 6 == pytest.approx(one["C"])
    assert one["optimum"]["loss"] <= one["loss"] * 1.001


def test_by_size_flops_and_numbers(tmp_path: Path, launch) -> None:
    source = f"forecast --points {write(tmp_path / 'p.csv', drawn(0.001, 0))}"
    by_size = json.loads(launch(source, "--size 1b --cluster h100 --json"))
    assert by_size["D"] / by_size["N"] == pytest.approx(20, rel=0.01)
    assert by_size["recipe"]["lr"] > 0 and by_size["recipe"]["name"] == "muon"
    mfu = by_size["cost"]["mfu"]
    assert by_size["cost"]["mfu_from"] == "planner"
    assert by_size["cost"]["gpu_hours"] == pytest.approx(by_size["C"] / 989e12 / mfu / 3600)
    assert by_size["cost"]["usd"] == pytest.approx(3.99 * by_size["cost"]["gpu_hours"])
    by_flops = json.loads(launch(source, "--flops 1e22 --json"))
    assert by_flops["N"] == pytest.approx(by_flops["optimum"]["N"])
    place = f"--params {by_flops['N']} --tokens {by_flops['D']}"
    by_numbers = json.loads(launch(source, place, "--json"))
    assert by_numbers["loss"] == pytest.approx(by_flops["loss"])
    assert "recipe muon:" in launch(source, "--flops 1e22")
    rates = {}
    for column, value in (("arch", "dense"), ("arch", "mla"), ("recipe", "adamw")):
        first, *rest = (tmp_path / "p.csv").read_text().splitlines()
        lines = [f"{first},{column}", *(f"{line},{value}" for line in rest)]
        (tmp_path / "named.csv").write_text("\n".join(lines))
        for target in ("--flops 1e22", "--size 1b"):
            text = launch(f"forecast --points {tmp_path}/named.csv --json", target)
            recipe = json.loads(text)["recipe"]
            assert recipe["name"] == ("adamw" if value == "adamw" else "muon")
            rates[value, target] = recipe["lr"]
    assert rates["mla", "--flops 1e22"] == pytest.approx(
        rates["dense", "--flops 1e22"] / 2, rel=0.01
    )
    assert "training along the fitted runs" in launch(source, "--law compute --target-loss 2.5")
    assert "No token repeats." in launch(source, "--target-loss 2.5 --unique 1e15")


def test_arguments_are_checked_before_anything_is_fitted(
    tmp_path: Path, launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"forecast --points {write(tmp_path / 'p.csv', drawn(0.001, 0))}"
    (tmp_path / "text.csv").write_text("N,D\n1e9,no\n")
    (tmp_path / "gap.csv").write_text("N,D,C\n1e9,2e10,\n1e9,2e10,1e20\n")
    (tmp_path / "short.csv").write_text("N,D,vocab\n1e9,2e10,32k\n")
    (tmp_path / "wide.csv").write_text("N,D\n1e9,2e10\n", encoding="utf-16")
    monkeypatch.setattr("pipeline.scaling.study.study", None)  # so that any fit raises a TypeError
    for wrong, key in {
        "": "--size",
        "--params 1e9": "--size",
        "--flops 1e22 --tokens 1e9": "--tokens",
        "--params 1e9 --tokens 0": "tokens=0",
        "--size 1b --cluster=": "cluster=''",
        "--flops -1": "flops=",
        "--flops 1e45": "flops=1e\\+45 must be a number above zero and below",
        "--size 1c": "size=",
        f"--targets {tmp_path}/text.csv": "D=",
        f"--targets {tmp_path}/gap.csv": r"C= .* all empty cells \(here 1\)",
        f"--targets {tmp_path}/wide.csv": "save it as CSV in UTF-8",
        f"--targets {tmp_path}/short.csv": "vocab=32k is not a number",
        "--flops 1e22 --drop-highest 99": "drop_highest=99 leaves none",
        "--flops 1e22 --cluster nowhere": "cluster=",
    }.items():
        with pytest.raises(UserError, match=key):
            launch(source, wrong)


def test_a_target_off_the_ladder_gets_a_warning(ladder: Path, launch) -> None:
    made = json.loads(launch("forecast --params 5e6 --tokens 1e10 --json --runs", ladder))
    assert any("off that line" in warning for warning in made["warnings"])
    assert made["optimum"] is None


def test_the_page_fits_what_the_command_fits(tmp_path: Path, launch) -> None:
    """The law includes a larger run in the same directory, even if it names another experiment."""
    root = tmp_path / "grid"
    for i, (N, ratio) in enumerate(product((2e5, 6e5, 2e6, 7e6, 2e7), (5, 20, 60, 200))):
        make_run(root, f"run{i}", N, ratio * N, seed=i)
    make_run(root, "large", 6e7, 1.2e9, experiment="isoflop")
    found = json.loads(launch("fit --json --law chinchilla --runs", root))
    watcher = Watcher(Directories(tmp_path), "chinchilla")
    watcher.refresh(strict=True)
    (shown,) = json.loads(watcher.snapshot.laws)
    assert (shown["runs"], shown["options"]) == (21, f"--runs {root}")
    assert shown["label"] == "grid · dense"
    same = ("law", "parameters", "errors_from", "warnings", "points")
    assert found["errors_from"] == "bootstrap"
    assert all(shown[key] == found[key] for key in same)
    grid = shown["grid"]
    assert len(grid["far"]) == len(grid["loss"]) and 0 < sum(grid["far"]) < len(grid["far"])
    C = grid["C"][-1]
    made = json.loads(launch(f"forecast --json --law chinchilla --flops {C} --runs", root))
    assert grid["far"][-17] and any("far outside" in text for text in made["warnings"])
    for run in root.iterdir():
        recipe = "muon" if run.name == "large" else "adamw"
        (run / "config.toml").write_text(f'recipe = "{recipe}"')
    watcher = Watcher(Directories(root))
    watcher.refresh(strict=True)
    assert [law["runs"] for law in json.loads(watcher.snapshot.laws)] == [20, 1]


def test_a_forecast_names_the_kind_of_the_fitted_runs(ladder: Path) -> None:
    make_run(ladder, "unfinished", 1e5, 2e6, finish=False, tokenizer="beef")
    runs = read_runs(ladder)
    assert runs[0].name == "unfinished"
    assert kind_of(points_of(runs), runs)["tokenizer"] == "f00d"


def test_a_forecast_is_registered_once_and_scored(ladder: Path, launch) -> None:
    call = ("forecast --params 7e6 --tokens 1.4e8 --register --json --runs", ladder)
    compare = ("score --json --runs", ladder)
    with pytest.raises(ConfigError, match="forecasts="):
        launch(*compare)
    with pytest.raises(ConfigError, match="is not a directory"):
        launch(*compare, "--forecasts", ladder / "nowhere")
    path = Path(json.loads(launch(*call))["registered"][0])
    assert path.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH) == 0
    with pytest.raises(RunError, match=path.name):
        launch(*call)
    before = json.loads(launch(*compare))["calibration"]
    assert before["landed"] == before["counted"] == 0

    late = make_run(ladder, "base-20x", 7e6, 1.4e8, size="base")  # its log begins in 1970
    after = json.loads(launch(*compare))
    assert after["scores"][0]["run"] == "base-20x"
    assert after["scores"][0]["counts"] is False

    log = late / "log.jsonl"  # change it to a run that began after the forecast
    early = log.read_text()
    resumed = early.partition("\n")[2].replace('"time": 402.0', '"time": 1e11')
    log.write_text(resumed)  # without its first event; the last is newer than the forecast
    assert json.loads(launch(*compare))["scores"][0]["counts"] is False
    log.write_text(early.replace('"time": ', '"time": 1e11, "was": '))
    after = json.loads(launch(*compare))
    one = after["scores"][0]
    assert one["counts"] is True
    assert one["inside"] == (one["low"] <= one["measured"] <= one["high"])
    assert one["error"] == pytest.approx(one["measured"] / one["forecast"] - 1)
    assert after["calibration"]["counted"] == 1
    assert "1 of 1 inside" in launch("score --runs", ladder)
    # The page shows one experiment's law, and the run may belong to another experiment.
    (said,) = json.loads(launch("fit --json --runs", ladder))["targets"]
    assert "base-20x is the run of a registered forecast, which power made from 3 points" in said
    assert "fitted to 4 points, and this run is one of them" in said
    assert "base-20x is the run" in launch("fit --runs", ladder)
    runs = read_runs(ladder)
    scores = score(registered(path.parent), runs)
    shown = law_data([run for run in runs if run.name != "base-20x"], "auto", scores)
    assert "fitted to 3 points without this run" in shown["plain"]
    # The loss of a run with another tokenizer is not comparable.
    kind = late / "run.json"
    own = kind.read_text()
    for other in ('"tokenizer": "beef"', '"objective": "causal distilled"'):
        kind.write_text(own.removesuffix("}") + f", {other}}}")
        assert score(registered(path.parent), read_runs(late))[0].run is None
    kind.write_text(own)
    # Its last loss was not finite, and it failed.
    log.write_text(log.read_text().replace('"kind": "eval"', '"kind": "lost"'))
    assert "failed or diverged" in launch("score --runs", ladder)
    log.write_text(log.read_text().replace('"event": "finish"', '"event": "save"'))
    (running,) = json.loads(launch(*compare))["scores"]
    assert (running["run"], running["measured"]) == (None, None)
    (late / HOST_FILE).write_text(platform.node())  # started here, without a process left
    (failed,) = json.loads(launch(*compare))["scores"]
    assert (failed["run"], failed["measured"]) == ("base-20x", None)

    path.chmod(0o644)
    content = json.loads(path.read_text())
    copy = path.with_name("copy.json")
    copy.write_text(json.dumps(content))
    with pytest.raises(RunError, match=f"{copy.name} is a copy of|{path.name} is a copy of"):
        launch(*compare)
    copy.unlink()
    wrong = (
        {"task": 5},
        {"loss": 10**400},
        {"loss": 99.0},
        {"low": 9.0},
        {"N": math.inf},
        {"high": math.inf},
    )
    forged = [{"forecast": content["forecast"] | part} for part in wrong]
    times = ({"time": None}, {"time": math.nan})
    for part in ({"version": 2}, {"forecast": {}}, {"fit": None}, *times, *forged):
        other = {key: value for key, value in {**content, **part}.items() if key != "sha256"}
        path.write_text(json.dumps({**other, "sha256": _digest(other)}))
        with pytest.raises(RunError, match=f"{path.name} is not a complete forecast"):
            launch(*compare)
    path.write_text(json.dumps(content).replace('"loss": ', '"loss": 1'))
    with pytest.raises(RunError, match=f"{path.name} was changed"):
        launch(*compare)


def test_targets_are_registered_all_or_none(ladder: Path, launch) -> None:
    targets = ladder.with_name("t.csv")
    call = ("forecast --register --runs", ladder)
    targets.write_text("N,D\n7e6,1.4e8\n2e7,4e8\n3e7,6e8\n")
    folder = ladder / "forecasts"
    folder.mkdir()
    taken = folder / "N20M-D400M.json"  # the second of three
    taken.write_text("{}")
    with pytest.raises(RunError, match=taken.name):
        launch(*call, "--targets", targets)
    assert list(folder.iterdir()) == [taken]
    taken.write_text("[]")
    with pytest.raises(RunError, match=taken.name):
        launch("score --runs", ladder)
    taken.unlink()
    launch(*call, "--targets", targets)
    assert len(list(folder.iterdir())) == 3
    targets.write_text("N,D\n5e6,1e8\n5e6,1e8\n")
    with pytest.raises(RunError, match="N5M-D100M"):
        launch(*call, "--targets", targets)
    (folder / "file").write_text("")
    with pytest.raises(RunError, match="forecasts="):
        launch(*call, "--params 5e6 --tokens 1e8 --forecasts", folder / "file")
    assert len(list(folder.iterdir())) == 4
