"""A log that is reduced while it is read still draws the same."""

import math
from pathlib import Path

import numpy as np
import pytest

from pipeline.dashboard import law_view
from pipeline.dashboard.payload import SLACK, RunLog, RunView, thin
from pipeline.scaling import decide
from pipeline.scaling.points import Points, read_csv
from pipeline.scaling.study import study


def step(number: int, **more: object) -> dict[str, object]:
    return {
        "kind": "step", "time": float(number), "step": number, "tokens": 100 * number,
        "flops": 1e6 * number, "loss": 3.0, "grad_norm": 0.5, "tokens_per_s": 1000.0,
        "hash": f"{number:016x}", **more,
    }  # fmt: skip


def event(number: int, name: str, **more: object) -> dict[str, object]:
    return {"kind": "event", "time": float(number), "step": number, "event": name, **more}


def test_thinning_keeps_the_extremes() -> None:
    x = np.linspace(1, 1e6, 20000)
    y, z = np.random.default_rng(0).normal(3, 0.1, (2, x.size))
    y[[12345, 777]] = 9.0, 0.5
    z[[5000, 100]] = 9.0, math.nan
    kept = thin(x, [y, z], 100)
    assert {0, 777, 5000, 12345, 19999} <= set(kept)
    assert len(kept) <= 2 + 4 * 100


def test_a_long_run_stays_small_and_keeps_its_spike() -> None:
    log = RunLog(limit=50)
    rng = np.random.default_rng(0)
    for i in range(1, 20001):
        log.add(step(i, loss=50.0 if i == 4321 else 3 + rng.normal(0, 0.01)))
    rows = log.steps.rows
    assert len(rows) <= SLACK * 50 + 1
    assert rows[0][0] == 1 and rows[-1][0] == 20000
    drawn = log.steps.columns(("step", "loss"), 40, log=True)
    assert len(drawn["step"]) <= 42 and max(drawn["loss"]) == 50.0
    assert log.hours == pytest.approx(20000 * 100 / 1000 / 3600)


def test_a_step_logged_again_counts_once_and_ranks_multiply_hours() -> None:
    log = RunLog()
    log.add(event(0, "start", world=4))
    for i in [*range(1, 11), *range(6, 13)]:  # interrupted at step 10, resumed from 5
        log.add(step(i, loss=float(i)))
    assert list(log.steps.column("step")) == list(range(1, 13))
    assert log.steps.column("hours")[-1] == pytest.approx(4 * 12 * 100 / 1000 / 3600)


def test_spikes_are_found() -> None:
    log = RunLog()
    rng = np.random.default_rng(0)
    for i in range(1, 501):
        log.add(step(i, loss=3 + rng.normal(0, 0.01) + (i == 400)))
    assert [spike["step"] for spike in log.spikes()] == [400]


def test_token_hashes_of_runs_of_any_length_share_steps() -> None:
    long = RunLog()
    brief = RunLog()
    for i in range(1, 3001):
        long.add(step(i))
    for i in range(1, 101):
        brief.add(step(i, hash=float(i)))  # as MLflow stores it
    assert len(long.token_hashes()["step"]) <= 512
    assert set(long.token_hashes()["step"]) & set(brief.token_hashes()["step"])
    assert brief.token_hashes()["hash"][0] == f"{1:013x}"


def test_events_that_decide_the_status_are_never_left_out() -> None:
    log = RunLog(limit=50)
    for i in range(2000):
        log.add(event(i, "skip"))
    log.add(event(3000, "finish"))
    assert log.events[-1]["event"] == "finish" and len(log.events) < 600


def test_restarts_of_a_trunk_are_not_those_of_its_branch() -> None:
    log = RunLog()
    for name in ("start", "restart", "start", "resume"):
        log.add(event(1, name))
    record = {"name": "branch", "params": {"scaling": 1e6}}
    assert RunView(record, log, None).row("a", 2.0)["restarts"] == 1


def test_scores_of_tasks_are_columns_from_where_they_begin() -> None:
    log = RunLog(limit=None)
    log.add({"kind": "eval", "step": 1, "loss": 3.0})
    log.add({"kind": "eval", "step": 2, "loss": 2.0, "quiz/accuracy": 0.5})
    log.add({"kind": "eval", "step": 3, "loss": 1.5, **{f"t/{i}": 0.0 for i in range(1000)}})
    scores = log.evals.column("quiz/accuracy")
    assert math.isnan(scores[0]) and scores[1] == 0.5
    assert len(log.evals.keys) == 100  # a hostile log does not grow the page without limit


def test_the_law_is_drawn_through_the_runs_of_each_size() -> None:
    """The line is drawn at the ratio of the runs. At the best split, it would be below every run here."""
    N, ratio = (part.ravel() for part in np.meshgrid(np.geomspace(1e6, 3e7, 5), [0.5, 2.0, 100.0]))
    D = N * ratio
    loss = 1.7 + 400 / N**0.34 + 410 / D**0.28
    names = tuple(f"run {i}" for i in range(N.size))
    points = Points(N=N, D=D, loss=loss, C=6 * N * D, run=names, convention="6ND")
    done = study(points, "chinchilla")
    lines = law_view.size_lines(done, points, {float(n): f"{n:.0f}" for n in N})
    for each in lines:
        ours = each["N"] == N
        drawn = np.interp(np.log(D[ours]), np.log(each["tokens"]), each["loss"])
        assert drawn == pytest.approx(loss[ours], rel=2e-3)
        assert np.abs(np.diff(np.log(each["loss"]))).max() < 0.06  # without a cliff
    assert law_view.drawn_ratio(done, points) is None
    best = law_view.line(done, points, None)
    assert best is not None and len(lines) == 5
    below = np.interp(np.log(points.C), np.log(best["C"]), best["loss"])
    assert (below < 0.99 * loss).all()


def test_the_law_is_drawn_near_the_runs_where_the_best_splits_are_far() -> None:
    """In the demo, N* is a hundredth of the smallest run; there the interval covers every loss."""
    points = read_csv(Path(__file__).parents[1] / "scaling" / "demo.csv")
    done = study(points, "auto", tested=True)
    ratio = law_view.drawn_ratio(done, points)
    assert ratio == pytest.approx(np.median(points.D / points.N))
    drawn = law_view.line(done, points, ratio)
    assert drawn is not None
    near = np.abs(np.log(points.D / points.N / ratio)) < 0.2
    expected = np.interp(np.log(points.C), np.log(drawn["C"]), drawn["loss"])
    assert near.sum() >= 2
    assert expected[near] == pytest.approx(points.loss[near], rel=0.03)
    assert (np.array(drawn["high"]) < 1.25 * np.array(drawn["low"])).all()
    words = law_view.in_words(done, points, ratio)
    assert f"{ratio:.3g} tokens per parameter" in words and "far outside of them" in words


def test_the_page_has_the_mfu_that_the_command_prices_with() -> None:
    table = law_view.speeds(2e6, 3e7)
    assert {"gpus", "N", "h100"} <= set(table)
    site = decide.priced("h100")
    # The rule of page/law.js: the nearest size, at most 4 times off.
    for N in np.geomspace(2e6, 3e7, 5):
        nearest = int(np.argmin(np.abs(np.log(np.array(table["N"]) / N))))
        for row, gpus in zip(table["h100"], table["gpus"], strict=True):
            assert row[nearest] == decide.planned_mfu(float(N), site, gpus, None)
