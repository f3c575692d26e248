"""Predicted widths of forecasts, compared with fits to simulated runs."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import ConfigError
from pipeline.sweep import design
from pipeline.sweep.grid import plan, read


def test_a_shipped_ladder_has_spread_and_smooth_rates() -> None:
    for name in ("cpu", "gpu", "ladder"):
        runs = plan(read(name))
        C = [run.C for run in runs]
        ratio = [run.D / run.N for run in runs]
        # The compute of `gpu` spreads by 15, and that ladder was measured (docs/SCALING.md).
        assert max(C) > 14 * min(C), name
        assert max(ratio) / min(ratio) > 3.9, name
        assert len({run.size for run in runs}) >= 3, name
    # Neighboring sizes of a grid have neighboring rates, along each budget.
    runs = plan(read("isoflop"))
    for budget in read("isoflop").budgets:
        rates = [run.lr for run in runs if abs(run.C / budget - 1) < 0.02]
        steps = np.array(rates[1:]) / np.array(rates[:-1])
        assert (steps < 1.5).all() and (steps > 0.5).all(), rates


def test_more_noise_and_farther_targets_are_wider() -> None:
    sweep = read("ladder")
    runs = plan(sweep)
    near = design.target_of(sweep, "760m")
    far = design.target_of(sweep, "13b")
    widths = [design.rough_width(runs, target) for target in (near, far)]
    assert widths[0] < widths[1]
    assert design.rough_width(runs, near, noise=0.01) > 1.3 * widths[0]
    found = design.width(runs, near)
    assert 0.7 * widths[0] < found.median < 1.5 * widths[0]
    # Eight runs are too few for a backtest, so their interval is wider than the noise suggests.
    few = [
        run for run in runs if run.size in ("3m", "15m", "30m", "125m") and "20x" not in run.name
    ]
    assert len(few) == 8
    assert design.width(few, near, draws=2).median < 1.15 * design.rough_width(few, near)
    # A 95% interval may miss one of eight.
    assert found.inside >= 7 and found.error < 0.5 * found.median


def test_the_gradient_of_the_prior_law() -> None:
    law = design.PriorLaw.draw(np.random.default_rng(3))
    N = np.array([1e7, 3e9])
    D = np.array([1e9, 1e11])
    slope = law.gradient(N, D)
    for row, (key, log) in enumerate([("E", 1), ("a", 1), ("alpha", 0), ("b", 1), ("beta", 0)]):
        step = 1e-6
        value = getattr(law, key)
        moved = replace(law, **{key: value * np.exp(step) if log else value + step})
        change = (np.log(moved.loss(N, D)) - np.log(law.loss(N, D))) / step
        np.testing.assert_allclose(slope[row], change, rtol=1e-4)


def test_the_cheapest_ladder_is_proposed(
    tmp_path: Path, launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search itself, with the rough width in the place of the slow simulation."""

    def rough(runs, target, noise, *_, show=None):
        # Some ladders of few runs are three times as wide as estimated.
        half = (3 if len(runs) < 8 else 1.2) * design.rough_width(runs, target, noise)
        return design.Width(half, half, half / 3, 1, 1, target.C / max(run.C for run in runs))

    monkeypatch.setattr(design, "width", rough)
    file = tmp_path / "proposed.toml"
    costs = []
    for width in ("6%", "0.03"):
        options = f"--target-size 1b --width {width} --save {file}"
        found = json.loads(launch("sweep plan --json", options))
        assert found["width"]["median"] <= 0.06
        costs.append(found["total"]["hours"])
        assert plan(read(file)) == plan(read(file))
        assert {run["name"] for run in found["runs"]} == {run.name for run in plan(read(file))}
    assert found["width"]["median"] <= 0.03 and costs[0] < costs[1]
    assert "interval ±" in launch("sweep plan --target-size 1b --width 6%")
    assert len(json.loads(launch("sweep plan --json --target-size 1m --width 3%"))["runs"]) == 12
    # The target has 20 tokens per parameter, or the tokens that the user gives.
    for options, tokens in {"": 9.68e8, "--target-tokens 4e8": 4e8}.items():
        found = json.loads(launch("sweep plan gpu --json --target-size 30m", options))
        assert found["target"]["D"] == pytest.approx(tokens, rel=1e-3)
        assert found["width"]["beyond"] == pytest.approx(23.1 * tokens / 9.68e8, rel=1e-2)
    for wrong, words in {
        "gpu --target-tokens 4e8": "target_tokens=4e.*give --target-size",
        "gpu --target-size 30m --target-tokens nan": "target_tokens=nan must be",
        "gpu --target-size 30m --target-tokens inf": "target_tokens=inf must be",
        "gpu --target-size 30m --target-tokens 0": "target_tokens=0 must be",
        "--target-size 1b --target-tokens 1e3 --width 3%": "1b on 1k tokens leaves no ladder",
        "--target-size 1b --width 0.01%": "width=",
        # The message has the width for the noise that the user gives, not for the default.
        "--target-size 1b --width 1% --noise 20%": "narrowest .* ± [1-9][0-9]",
        "--target-size 1b --width much": "width=much",
        "--width 3%": "target-size",
        "": "FILE",
        "--target-size 7k --width 3%": "target_size=7k",
    }.items():
        with pytest.raises(ConfigError, match=words):
            launch("sweep plan", wrong)
