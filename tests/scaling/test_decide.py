"""Chosen runs, compared with closed forms, brute-force grids and the figures of the papers."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import ConfigError
from pipeline.scaling import decide, frontier
from pipeline.scaling.decide import (
    Demand,
    best,
    cost,
    least_cost,
    loss_of,
    planned_mfu,
    priced,
    unplanned,
)
from pipeline.scaling.fitting import Fit
from pipeline.scaling.frontier import at
from pipeline.scaling.intervals import scatter
from pipeline.scaling.laws import LAWS, Inputs
from pipeline.scaling.points import SIX_ND, Points, read_csv
from pipeline.scaling.predict import at_sizes, cautions, forecast
from pipeline.scaling.study import Study, study

# The coefficients that each paper's examples were computed with.
SARDANA = {"E": 1.69, "A": 406.4, "alpha": 0.336, "B": 410.7, "beta": 0.283}
MUENNIGHOFF = {
    "E": math.exp(0.6254804),
    "A": math.exp(6.255414),
    "alpha": 0.3526596,
    "B": math.exp(7.3049974),
    "beta": 0.3526596,
}


def law_of(E: float, A: float, alpha: float, B: float, beta: float) -> Study:
    """Return a study of points that were computed by a known law."""
    N, D = (
        grid.ravel() for grid in np.meshgrid(np.geomspace(1e7, 1e10, 5), np.geomspace(1e9, 1e12, 5))
    )
    loss = E + A * N**-alpha + B * D**-beta
    points = Points(N, D, 6 * N * D, loss, tuple(map(str, range(25))), SIX_ND)
    x = Inputs.of(points)
    theta = [E, A * math.exp(-alpha * x.center[0]), 1, B * math.exp(-beta * x.center[1]), 1]
    theta = np.log(theta)
    theta[2] = alpha
    theta[4] = beta
    fit = Fit(LAWS["chinchilla"], theta, x, points, 0.0, 1.0)
    np.testing.assert_allclose(fit.predict(points), loss)
    nothing = (None, None, None, None)
    return Study("chinchilla", fit, scatter(fit), None, math.nan, *nothing, (), None)


@pytest.fixture(scope="module")
def sardana() -> Study:
    return law_of(**SARDANA)


def test_least_compute_of_a_loss_is_hoffmanns_closed_form(sardana: Study) -> None:
    law = SARDANA
    for C in (1e19, 1e22, 1e25):
        there = sardana.frontier(np.array([C]))
        loss = float(sardana.fit.predict(there)[0])
        assert least_cost(sardana, loss, Demand()) == pytest.approx(C, rel=1e-6)
    G = (law["alpha"] * law["A"] / (law["beta"] * law["B"])) ** (1 / (law["alpha"] + law["beta"]))
    found = best(sardana, np.array([6e22]), Demand())
    assert found.N[0] == pytest.approx(G * 1e22 ** (law["beta"] / (law["alpha"] + law["beta"])))
    with pytest.raises(ConfigError, match=r"target_loss=1\.6 is out of reach"):
        least_cost(sardana, 1.6, Demand())
    with pytest.raises(ConfigError, match="target_loss=1000 is above"):
        least_cost(sardana, 1000, Demand())


@pytest.mark.parametrize(
    ("quality", "tokens", "N", "saved"),
    [(13e9, 2e12, 7.0e9, 0.17), (30e9, 1e13, 13.6e9, 0.28)],  # arXiv 2401.00448, figure 1 and text
)
def test_inference_makes_the_model_smaller_as_published(
    sardana: Study, quality: float, tokens: float, N: float, saved: float
) -> None:
    law = SARDANA
    ratio = law["alpha"] * law["A"] / (law["beta"] * law["B"])
    D = (quality ** law["alpha"] / ratio) ** (1 / law["beta"])  # best for this N without inference
    loss = law["E"] + law["A"] * quality ** -law["alpha"] + law["B"] * D ** -law["beta"]
    demand = Demand(tokens)
    total = least_cost(sardana, loss, demand)
    found = best(sardana, np.array([total]), demand)
    assert found.N[0] == pytest.approx(N, rel=0.01)
    assert 1 - total / (6 * quality * D + 2 * quality * tokens) == pytest.approx(saved, abs=0.006)
    # Brute force: for every N, the D that the loss needs.
    sizes = np.geomspace(quality / 5, quality, 200_001)
    left = loss - law["E"] - law["A"] * sizes ** -law["alpha"]
    with np.errstate(invalid="ignore"):
        lengths = (law["B"] / left) ** (1 / law["beta"])
    totals = np.where(left > 0, 6 * sizes * lengths + 2 * sizes * tokens, np.inf)
    assert total == pytest.approx(totals.min(), rel=1e-6)
    assert found.N[0] == pytest.approx(sizes[totals.argmin()], rel=1e-3)
    # Inference that costs more per FLOP makes it smaller still.
    costly = Demand(tokens, inference_price=4.0)
    assert best(sardana, np.array([least_cost(sardana, loss, costly)]), costly).N[0] < found.N[0]


def test_repeated_data_as_published() -> None:
    """The two models of figure 1 and the best allocation, from the authors' repository."""
    study = law_of(**MUENNIGHOFF)
    N = np.array([6.34e9, 8.67e9])
    D = np.array([242e9, 178e9])
    places = at(study.fit.points, 6 * N * D, N, D)
    np.testing.assert_allclose(
        loss_of(study.fit, places, 25e9), [2.2256440889984477, 2.2269634075087867], rtol=1e-9
    )
    found = best(study, np.array([6 * 8.67e9 * 178e9]), Demand(unique=25e9))
    assert found.N[0] == pytest.approx(6.8e9, rel=0.01)
    assert found.D[0] == pytest.approx(227e9, rel=0.01)
    # Brute force over N at the same compute.
    sizes = np.geomspace(1e9, 1e11, 100_001)
    grid = at(study.fit.points, sizes, sizes, 8.67e9 * 178e9 / sizes)
    losses = loss_of(study.fit, grid, 25e9)
    assert found.N[0] == pytest.approx(sizes[losses.argmin()], rel=1e-3)
    # Enough data changes nothing. With too little, some losses cannot be reached.
    assert best(study, np.array([1e22]), Demand(unique=1e300)).N[0] > 0
    plenty = best(study, np.array([1e22]), Demand(unique=1e15))
    assert plenty.N[0] == pytest.approx(study.frontier(np.array([1e22])).N[0], rel=1e-4)
    with pytest.raises(ConfigError, match="1B distinct tokens"):
        least_cost(study, 2.2, Demand(unique=1e9))


def test_the_price_is_at_the_planners_speed() -> None:
    site = priced("h100")
    mfu = planned_mfu(1.1e9, site, 8, "1b")
    assert mfu is not None and 0.3 < mfu < 0.7
    found = cost([(1e21, 1.1e9)], site, 8, "1b")
    assert found["gpu_hours"] == pytest.approx(1e21 / 989e12 / mfu / 3600)
    assert found["hours"] == pytest.approx(found["gpu_hours"] / 8)
    assert found["usd"] == pytest.approx(3.99 * found["gpu_hours"])
    assert cost([(1e21, 1.1e9)], site, 8)["mfu"] == pytest.approx(mfu)  # of the nearest size
    # Small batches and short sequences are slow on any GPU.
    slow = cost([(1e21, 1.1e9)], site, 8, sets=["train.batch_tokens=1024", "model.seq=128"])
    assert slow["usd"] > 3 * found["usd"]
    two = cost([(1e21, 1.1e9), (2e21, 1.1e9)], site, 8, "1b")
    assert two["usd"] == pytest.approx(3 * found["usd"])
    assert cost([(1e21, 1.1e9)], priced("example"), 8)["mfu_from"] == "assumed"
    # This batch does not divide over so many GPUs.
    many = cost([(1e21, 1.1e9)], site, 10**6, "1b", sets=["train.batch_tokens=524288"])
    assert "1000000" in unplanned(many, "1b", site)[0] and not unplanned(found, "1b", site)


def test_on_the_command_line(tmp_path: Path, launch) -> None:
    points = law_of(**MUENNIGHOFF).fit.points
    file = tmp_path / "p.csv"
    rows = zip(points.N, points.D, points.loss, strict=True)
    file.write_text("N,D,loss\n" + "".join(f"{n},{d},{loss}\n" for n, d, loss in rows))
    source = f"forecast --law chinchilla --points {file} --json"
    plain = json.loads(launch(source, "--target-loss 2.1 --cluster h100"))
    assert plain["loss"] == pytest.approx(2.1)
    low, high = (plain["decision"][key] for key in ("flops_low", "flops_high"))
    assert low <= plain["C"] * 1.13 and high >= plain["C"] / 1.13
    served = json.loads(launch(source, "--target-loss 2.1 --inference-tokens 1e13"))
    assert served["N"] < plain["N"] and served["loss"] == pytest.approx(2.1)
    assert served["decision"]["saved"] > 0.02
    absurd = json.loads(launch(source, "--flops 1e14 --inference-tokens 1e20"))
    assert "saved" not in absurd["decision"]  # an error once named a target loss that nobody gave
    short = json.loads(launch(source, "--flops 1e22 --unique 25e9"))
    assert short["decision"]["epochs"] > 2
    assert short["loss"] > short["decision"]["loss_with_new_data"]
    for wrong, words in {
        "--size 1b --inference-tokens 1e12": "target-loss",
        "--flops 1e22 --inference-mfu 0.1": "inference-tokens",
        "--flops 1e22 --target-loss 2": "--flops and --target-loss name 2 targets; give one of",
        "--target-loss nan": "target_loss=nan",
        "--target-loss 1": r"out of reach: .* an estimate \(95% interval of E: ",
        "--flops 1e22 --gpus 4": "--gpus 4",
        "--flops 1e22 --unique -1": "unique=-1",
        "--flops 1e22 --arch moe": "--arch moe",
        "--flops 1e22 --unique 1e9 --law compute": "law=compute",
    }.items():
        with pytest.raises(ConfigError, match=words):
            launch(source, wrong)


DEMO = Path(__file__).with_name("demo.csv")  # the runs of `make demo`


@pytest.mark.parametrize("unique", [None, 1e6])
def test_no_answer_contradicts_another(unique: float | None) -> None:
    """When N* and D* came from another fit than the loss, they cost 3 times the cheapest run."""
    done = study(read_csv(DEMO), profiled=False)
    new = Demand(unique=unique)
    plain = best(done, np.array([least_cost(done, 3.6, new)]), new)
    for tokens in (1e6, 1e9):
        demand = Demand(tokens, unique=unique)
        served = best(done, np.array([least_cost(done, 3.6, demand)]), demand)
        assert loss_of(done.fit, served, unique)[0] == pytest.approx(3.6) and served.C > plain.C
        found = decide.decision(done, served, demand)
        assert found["training_optimum"]["N"] == pytest.approx(plain.N[0], rel=1e-3)
    found = best(done, np.array([1e14]), new)
    factors = np.array([1, 0.1, 0.5, 0.9, 1.1, 2, 10])
    N = found.N * factors
    D = 1e14 / frontier.UnitFlops.of(done.fit.points).each(N) / N
    others = at(done.fit.points, 1e14 + 0 * factors, N, D)
    first, *made = forecast(done, others, unique)
    same = pytest.approx(first.optimum)
    assert all(one.loss >= first.loss and one.optimum == same for one in made)


def test_the_best_split_does_not_move_where_all_its_tokens_are_new() -> None:
    """The FLOPs of this ladder include attention. With C = 6·N·D, the best N would be 6% lower."""
    done = study(read_csv(DEMO.with_name("h200.csv")), "chinchilla", profiled=False)
    C = done.fit.points.C.max(keepdims=True)
    new = best(done, C, Demand())
    same = best(done, C, Demand(unique=float(new.D[0])))
    assert same.N[0] == pytest.approx(new.N[0], rel=1e-4)


def test_a_run_or_optimum_far_outside_of_the_runs_gets_a_warning() -> None:
    done = study(read_csv(DEMO), "chinchilla")
    for N, D, words in (
        (2e4, 7.3e8, "The run (N = 20k, D = 730M) is far outside"),
        (652640, 2e6, "The best split of its compute (N = "),
        # N and D within a factor of ten of the runs, but not their ratio.
        (done.fit.points.N.min() / 5, done.fit.points.D.max() * 5, "D / N from"),
        (59616, 1e5, None),
    ):
        place = at_sizes(done, N, D)
        warnings = cautions(done, place, forecast(done, place))
        far = "".join(text for text in warnings if "far outside" in text)
        assert words in far if words else not far
    place = at_sizes(done, 59616, 155648)
    made = forecast(done, place)
    assert "A fitted run has N = 59.6k and D = 156k already: 27k-156k, loss 4.5201." in cautions(
        done, place, made
    )
    place = at_sizes(done, 59616, 2 * 155648)
    assert not any("already" in text for text in cautions(done, place, forecast(done, place)))
    run = best(done, np.array([1e16]), Demand(unique=1e3))
    few, enough = cautions(done, run, forecast(done, run, 1e3), 1e3)[-2:]
    assert "unique=1k is far below" in few and "within 0.05% of this loss" in enough


def test_costs_are_printed_as_people_write_them(launch) -> None:
    call = f"forecast --points {DEMO} --cluster h100"
    small = " ".join(launch(call, "--target-loss 3.6").split())
    assert "Loss 3.6 takes" in small and "to no known upper limit" in small
    assert re.search(r"than a second on 8 × h100, less than 0\.01 GPU-.* than \$0\.01", small)
    large = " ".join(launch(call, "--flops 1e22").split())
    assert re.search(
        r"cost of training: \d+d\d\d on 8 × h100, [\d,]+\.\d\d GPU-hours, .* \$[\d,]+\.\d\d", large
    )
