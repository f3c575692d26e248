"""Losses before the decay as points, compared with curves of another published law."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from launch.dashboard import app
from pipeline.config.optimizer import WSD
from pipeline.dashboard import source
from pipeline.dashboard.live import Watcher
from pipeline.errors import ConfigError, DataError
from pipeline.optim.schedule import learning_rate
from pipeline.runs.history import Run
from pipeline.scaling.annealing import fit_gap, plateau, with_curves
from pipeline.scaling.frontier import at
from pipeline.scaling.points import points_of
from pipeline.scaling.study import study
from tests.scaling.made_runs import CONVENTION, make_ladder, make_run

SCHEDULE = WSD(warmup_steps=50, decay_share=0.2)
BATCH = 20_000  # tokens
MEMORY = 0.99  # the momentum of annealing


def losses(N: float, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Rates and losses of a run by arXiv 2408.11029: E + A·N^−α + B·S1^−β − c·S2, where S1 sums the
    rates and S2 their decrease with momentum."""
    rate = np.array([learning_rate(SCHEDULE, 1.0, step, steps) for step in range(steps)])
    momentum = 0.0
    annealed = []
    for fall in -np.diff(rate, prepend=rate[0]):
        momentum = MEMORY * momentum + max(fall, 0.0)
        annealed.append(momentum)
    S1 = BATCH * np.cumsum(rate)
    S2 = np.cumsum(annealed)
    return rate, 1.7 + 60 * N**-0.31 + 120 * S1**-0.33 - 8e-4 * S2


def curve_run(N: float, ratio: float, seed: int, name: str = "") -> Run:
    steps = int(ratio * N / BATCH)
    rate, loss = losses(N, steps)
    noise = np.random.default_rng(seed).normal(0, 0.001)  # one error for the whole run
    evals = []
    for step in [*range(steps // 24, steps, steps // 24), steps]:
        D = step * BATCH
        held_out = float(loss[step - 1] * np.exp(noise))
        evals.append({"step": step, "tokens": D, "flops": 6 * N * D, "loss": held_out})
    logged = [{"step": i + 1, "lr": float(r), "tokens": 0} for i, r in enumerate(rate)]
    record = {
        "name": name or f"{N:.0e}-{ratio}",
        "params": {"scaling": N},
        "convention": CONVENTION,
    }
    done = ({"event": "finish", "time": 0.0},)
    return Run(Path(), record, tuple(logged), tuple(evals), done)


SIZES = (1e6, 2e6, 4e6, 8e6)


def errors(runs: list[Run], *, curves: bool) -> list[float]:
    """Relative errors of runs of four times the largest size, at 5, 20 and 80 tokens per parameter."""
    points = points_of(runs)
    done = study(with_curves(points, runs) if curves else points, profiled=False)
    N = 4 * SIZES[-1]
    found = []
    for ratio in (5, 20, 80):
        D = np.array([ratio * N])
        truth = losses(N, int(ratio * N / BATCH))[1][-1]
        loss = done.fit.predict(at(points, 6 * N * D, np.array([N]), D))
        found.append(float(abs(loss[0] / truth - 1)))
    return found


def test_one_length_per_size_determines_a_law() -> None:
    runs = [curve_run(N, 40, seed) for seed, N in enumerate(SIZES)]
    points = points_of(runs)
    assert study(points).name == "power"
    more = with_curves(points, runs)
    done = study(more, profiled=False)
    assert done.optimum(np.array([1e16])) is not None
    assert max(errors(runs, curves=True)) < 0.012
    assert max(errors(runs, curves=False)) > 0.05
    # The corrected losses equal those of shorter runs whose rate decayed.
    for N, D, loss in list(zip(more.N, more.D, more.loss, strict=True))[len(runs) :]:
        assert loss == pytest.approx(losses(N, int(D / BATCH))[1][-1], rel=0.015)


def test_the_gap_follows_the_runs_where_they_show_it() -> None:
    rows = [(n, n + z, 0.03 + 0.01 * z) for n in (14.0, 15, 16) for z in (1.6, 3.0, 4.4, 5.8)]
    steep = fit_gap(rows)
    assert steep.slopes == pytest.approx([-0.01, 0.01], abs=0.001)
    assert steep.at(np.exp(15), np.exp(18)) == pytest.approx(0.06, abs=1e-3)
    single = fit_gap([(15.0, 18.0, 0.03)])
    assert single.slopes == pytest.approx([-0.003, 0.004])  # those of the prior
    assert single.at(np.exp(15), np.exp(18)) == pytest.approx(0.03)


def test_three_lengths_need_no_curves() -> None:
    runs = [curve_run(N, ratio, i) for i, N in enumerate(SIZES[:2]) for ratio in (15, 30, 60)]
    with pytest.raises(DataError, match="leave out"):
        with_curves(points_of(runs), runs)
    more = [*runs, curve_run(SIZES[2], 30, 9, "one")]
    points = with_curves(points_of(more), more)
    assert set(points.run[len(more) :]) == {"one"}


def test_a_branch_does_not_count_its_trunk_twice() -> None:
    trunk = curve_run(4e6, 60, 0, "trunk")
    short = curve_run(4e6, 30, 0, "short")
    early = [entry for entry in trunk.evals if entry["step"] <= 0.8 * short.last["step"]]
    branch = Run(short.path, short.record, short.steps, (*early, short.evals[-1]), short.events)
    runs = [branch, trunk]
    points = with_curves(points_of(runs), runs)
    rows = list(zip(points.D, points.loss, strict=True))
    assert len(set(rows)) == len(rows)
    assert plateau(trunk) is not None and sum(name == "trunk" for name in points.run) == 7


def test_curves_on_the_command_line(tmp_path: Path, launch, monkeypatch) -> None:
    ladder = make_ladder(tmp_path / "flat", 4)  # the rate in these logs is constant
    for folder in ladder.iterdir():
        log = folder / "log.jsonl"
        records = [json.loads(line) for line in log.read_text().splitlines()]
        for record in records:
            if record["kind"] == "step":
                record["lr"] = 1e-3 * min(1.0, (400 - record["step"] + 1) / 60)
        log.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert json.loads(launch("fit --bootstrap 0 --json --runs", ladder))["law"] == "power"
    found = json.loads(launch("fit --bootstrap 0 --json --curves --runs", ladder))
    assert found["law"] in ("chinchilla", "gamma")
    assert any("before the decay" in warning for warning in found["warnings"])
    made = json.loads(launch("forecast --curves --json --params 3e7 --tokens 6e8 --runs", ladder))
    assert made["optimum"]["N"] > 0
    # The page has the same law, although it keeps only some rows of each log.
    monkeypatch.setattr(source, "KEPT_ROWS", 16)
    page = Watcher(source.Directories(ladder), curves=True)
    page.refresh(strict=True)
    (shown,) = json.loads(page.snapshot.laws)
    assert shown["options"] == f"--runs {ladder} --curves" and shown["law"] == found["law"]
    assert shown["parameters"]["A"]["value"] == pytest.approx(found["parameters"]["A"]["value"])
    static = tmp_path / "page.html"
    call = CliRunner().invoke(app, ["--runs", str(ladder), "--curves", "--static", str(static)])
    assert call.exit_code == 0 and b"before the decay" in static.read_bytes()
    call = CliRunner().invoke(app, ["--runs", str(ladder), "--curves", "--law", "envelope"])
    assert isinstance(call.exception, ConfigError) and "--curves" in str(call.exception)
    for wrong in ("--points x.csv", f"--runs {ladder} --law envelope"):
        with pytest.raises(ConfigError, match="--curves"):
            launch("fit --curves", wrong)
    make_run(tmp_path / "unannealed", "a", 1e6, 2e7, steps=20)
    with pytest.raises(DataError, match="curves"):
        launch("fit --curves --runs", tmp_path / "unannealed")
