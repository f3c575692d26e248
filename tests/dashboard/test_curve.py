"""Columns that stay small and still draw the same."""

import math

import numpy as np
import pytest

from pipeline.dashboard.payload import SLACK, RunLog, thin


def step(number: int, **more: object) -> dict[str, object]:
    at = {
        "kind": "step",
        "time": float(number),
        "step": number,
        "tokens": 100 * number,
        "flops": 1e6 * number,
    }
    return (
        at
        | {"loss": 3.0, "grad_norm": 0.5, "tokens_per_s": 1000.0, "hash": f"{number:016x}"}
        | more
    )


def test_thinning_keeps_the_extremes() -> None:
    x = np.linspace(1, 1e6, 20000)
    y, z = np.random.default_rng(0).normal(3, 0.1, (2, x.size))
    y[12345], y[777], z[5000], z[100] = 9.0, 0.5, 9.0, math.nan
    kept = thin(x, [y, z], 100)
    assert {0, 777, 5000, 12345, 19999} <= set(kept)
    assert len(kept) <= 2 + 4 * 100


def test_a_long_run_stays_small_and_keeps_its_spike() -> None:
    folded, rng = RunLog(limit=50), np.random.default_rng(0)
    for i in range(1, 20001):
        folded.add(step(i, loss=50.0 if i == 4321 else 3 + rng.normal(0, 0.01)))
    rows = folded.steps.rows
    assert len(rows) <= SLACK * 50 + 1
    assert rows[0][0] == 1 and rows[-1][0] == 20000
    drawn = folded.steps.columns(("step", "loss"), 40, log=True)
    assert len(drawn["step"]) <= 42 and max(drawn["loss"]) == 50.0
    assert folded.hours == pytest.approx(20000 * 100 / 1000 / 3600)


def test_a_step_told_again_counts_once_and_ranks_multiply_hours() -> None:
    folded = RunLog()
    folded.add({"kind": "event", "time": 0.0, "step": 0, "event": "start", "world": 4})
    for i in [*range(1, 11), *range(6, 13)]:  # cut at step 10, resumed from 5
        folded.add(step(i, loss=float(i)))
    assert list(folded.steps.column("step")) == list(range(1, 13))
    assert folded.steps.column("hours")[-1] == pytest.approx(4 * 12 * 100 / 1000 / 3600)


def test_spikes_are_found_by_the_rule_that_skips_them() -> None:
    folded, rng = RunLog(), np.random.default_rng(0)
    for i in range(1, 501):
        folded.add(step(i, loss=3 + rng.normal(0, 0.01) + (i == 400)))
    assert [spike["step"] for spike in folded.spikes()] == [400]


def test_token_hashes_are_sampled_where_other_runs_are_too() -> None:
    long, brief = RunLog(), RunLog()
    for i in range(1, 3001):
        long.add(step(i))
    for i in range(1, 101):
        brief.add(step(i, hash=float(i)))  # as MLflow keeps it
    assert len(long.token_hashes()["step"]) <= 512
    assert set(long.token_hashes()["step"]) & set(brief.token_hashes()["step"])
    assert brief.token_hashes()["hash"][0] == f"{1:013x}"


def test_phases_are_never_crowded_out() -> None:
    folded = RunLog(limit=50)
    for i in range(2000):
        folded.add({"kind": "event", "time": float(i), "step": i, "event": "skip"})
    folded.add({"kind": "event", "time": 3000.0, "step": 2000, "event": "finish"})
    assert folded.events[-1]["event"] == "finish" and len(folded.events) < 600
