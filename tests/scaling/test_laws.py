"""Each law recovers the parameters that the points were drawn from."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import minimize

from pipeline.errors import DataError
from pipeline.scaling.fitting import fit, vpnls
from pipeline.scaling.frontier import at, envelope, isoflop, optimum
from pipeline.scaling.intervals import bootstrap, refit_vpnls
from pipeline.scaling.laws import LAWS, REPEAT_BOUNDS, Inputs
from pipeline.scaling.points import Points
from pipeline.scaling.predict import at_sizes, cautions, forecast
from pipeline.scaling.study import study
from tests.scaling.made_runs import LAW, true_loss


def grid(count: int = 6) -> tuple[np.ndarray, np.ndarray]:
    N, D = np.meshgrid(np.geomspace(1e7, 1e10, count), np.geomspace(1e9, 1e12, count))
    return N.ravel(), D.ravel()


def points(N: np.ndarray, D: np.ndarray, loss: np.ndarray, **more: np.ndarray) -> Points:
    return Points(N, D, 6 * N * D, loss, tuple(map(str, range(N.size))), "made", **more)


def test_gamma() -> None:
    N, D = grid()
    done = fit(points(N, D, 1.5 + (300 * N**-0.4 + 900 * D**-0.38) ** 0.7), LAWS["gamma"])
    want = {"E": 1.5, "A": 300, "alpha": 0.4, "B": 900, "beta": 0.38, "gamma": 0.7}
    assert done.values == pytest.approx(want, rel=1e-3)


def test_kaplan() -> None:
    N, D = grid()
    loss = ((8.8e13 / N) ** (0.076 / 0.095) + 5.4e13 / D) ** 0.095
    want = {"Nc": 8.8e13, "alpha_N": 0.076, "Dc": 5.4e13, "alpha_D": 0.095}
    assert fit(points(N, D, loss), LAWS["kaplan"]).values == pytest.approx(want, rel=1e-3)


def test_routed() -> None:
    N, D = (np.tile(column, 4) for column in grid())
    M = np.repeat([1.0, 4.0, 16.0, 64.0], 36)
    m = np.log(M)
    loss = 1.6 + 90 * M**-0.2 * N ** -(0.32 - 0.005 * m) + 300 * M**0.05 * D ** -(0.33 + 0.002 * m)
    made = points(N, D, loss, experts=M)
    done = study(made, "moe")
    assert done.fit.values["E"] == pytest.approx(1.6, rel=1e-3)
    assert done.fit.values["delta"] == pytest.approx(-0.2, abs=1e-2)
    assert done.fit.values["gamma"] == pytest.approx(-0.005, abs=1e-3)
    chosen = study(made)
    assert chosen.name == "moe"
    dense, routed = (chosen.optimum(np.array([1e22]), np.array([many])) for many in (1.0, 64.0))
    assert dense is not None and routed is not None
    by_hand = optimum(chosen.fit, np.array([1e22]), np.array([64.0]))
    assert by_hand is not None and routed.N[0] == pytest.approx(by_hand.N[0]) != dense.N[0]
    assert routed.loss[0] < 0.99 * dense.loss[0]
    far = forecast(
        chosen, at(made, *np.array([[1e22], [1e10], [1e22 / 6e10]]), experts=np.array([64.0]))
    )
    assert far[0].optimum is not None and far[0].optimum["N"] == pytest.approx(routed.N[0])
    with pytest.raises(DataError, match="column `experts`"):
        study(points(*grid(), true_loss(*grid())), "moe")
    # All dense runs have one D / N, so that most draws of the law have no optimum.
    N = np.repeat(np.geomspace(1e6, 1e9, 5), 3)
    ratio = np.tile([5.0, 20, 80], 5)
    loss = true_loss(N, N * ratio) * np.exp(np.random.default_rng(0).normal(0, 0.002, 15))
    tangled = study(points(N, N * ratio, loss, experts=np.tile([1.0, 8, 8], 5)), "moe")
    assert tangled.to_json()["exponents"].keys() == {"a", "b", "from"}


def test_repeated_data() -> None:
    N, D = grid()
    U = np.minimum(D, 5e9)
    worth = U * (1 + 15 * -np.expm1(-(D / U - 1) / 15))
    made = points(
        N, D, true_loss(N, worth), unique=U
    )  # excess parameters cost nothing here, so R_N is high
    done = study(made, "data-constrained")
    assert done.fit.values["R_D"] == pytest.approx(15, rel=0.05)
    assert done.fit.values["beta"] == pytest.approx(LAW["beta"], rel=0.02)
    assert any("R_N" in warning and "is at its bound" in warning for warning in done.warnings)
    target = at_sizes(done, 1e10, 1e12)
    assert "`unique`" in cautions(done, target, forecast(done, target))[0]
    with pytest.raises(DataError, match="column `unique`"):
        study(points(N, D, true_loss(N, D)), "data-constrained")


@pytest.mark.parametrize("most_epochs", [60, 2])
def test_resamples_of_repeated_data_reach_their_optimum(most_epochs: int) -> None:
    """182 runs as in arXiv 2305.16264; scipy's L-BFGS-B for one resample at a time finds no better.

    If no run repeats its data more than twice, R_D goes to its bound, where others must not stop.
    """
    rng = np.random.default_rng(11)
    N = np.exp(rng.uniform(np.log(7e6), np.log(9e9), 182))
    U = np.exp(rng.uniform(np.log(1e8), np.log(178e9), 182))
    D = U * np.where(rng.random(182) < 0.8, 1, rng.uniform(1, most_epochs, 182))
    law = LAWS["data-constrained"]
    made = points(N, D, np.ones(182), unique=U)
    x = Inputs.of(made)
    truth = np.array([0.63, -0.64, 0.353, -0.9, 0.353, np.log(15.4), np.log(5.3)])
    log_loss = law.log_loss(truth[None], x)[0][0] + rng.normal(0, 0.005, 182)
    done = fit(replace(made, loss=np.exp(log_loss)), law)
    assert (done.theta[5] >= REPEAT_BOUNDS[1]) == (most_epochs == 2)
    found = bootstrap(done, 40)
    assert (found[:, 5] < 5).any()
    draws = np.random.default_rng(0).multinomial(182, np.full(182, 1 / 182), 40)
    weights = draws[:, np.unique(np.array(made.run), return_inverse=True)[1]]

    def objective(theta: np.ndarray, weight: np.ndarray) -> tuple[float, np.ndarray]:
        value, jacobian = law.log_loss(theta[None], x)
        clipped = np.clip(value[0] - log_loss, -1e-3, 1e-3)
        total = weight @ (clipped * (value[0] - log_loss - 0.5 * clipped))
        return total * 1e3, jacobian[:, 0] @ (weight * clipped) * 1e3

    free = [(None, None)] * 5 + [REPEAT_BOUNDS] * 2
    for theta, weight in zip(found, weights, strict=True):
        slow = minimize(objective, truth, weight, jac=True, bounds=free, tol=1e-12)
        assert objective(theta, weight)[0] < slow.fun * (1 + 1e-6)


UNEVEN = {"E": 1.7, "A": 800.0, "alpha": 0.46, "B": 60.0, "beta": 0.27}


def drifting_grid(width: float = 4.0) -> tuple[Points, np.ndarray, np.ndarray]:
    """isoFLOP budgets whose center drifts from a third of N* to three times N*, as with a wrong first guess."""
    E, A, alpha, B, beta = UNEVEN.values()
    G, a = (alpha * A / (beta * B)) ** (1 / (alpha + beta)), beta / (alpha + beta)
    C = np.repeat(np.geomspace(1e18, 1e21, 7), 7)
    N = (
        G
        * (C / 6) ** a
        * np.repeat(np.geomspace(1 / 3, 3, 7), 7)
        * np.tile(np.geomspace(1 / width, width, 7), 7)
    )
    D = C / 6 / N
    far = np.array([1e24])
    return points(N, D, E + A * N**-alpha + B * D**-beta), far, far / 6 / (G * (far / 6) ** a)


@pytest.mark.parametrize("name", ["chinchilla", "gamma", "vpnls"])
def test_a_known_law_gives_its_optimum_to_a_millionth(name: str) -> None:
    made, far, D_far = drifting_grid()
    best = optimum(vpnls(made) if name == "vpnls" else fit(made, LAWS[name]), far)
    assert best is not None
    assert best.D[0] == pytest.approx(D_far[0], rel=1e-6)


def test_auto_stays_with_the_simpler_law_where_it_is_exact() -> None:
    made, far, D_far = drifting_grid()
    done = study(made)
    assert done.name == "chinchilla"
    best = done.optimum(far)
    assert best is not None
    assert best.D[0] == pytest.approx(D_far[0], rel=1e-6)


def test_an_off_center_parabola_is_more_biased_than_akima() -> None:
    made, far, D_far = drifting_grid()
    parabola, akima = (
        isoflop(made, method).path(far)[1][0] / D_far[0] - 1 for method in ("parabola", "akima")
    )
    assert 0.04 < abs(parabola) < 0.35
    assert abs(akima) < abs(parabola) / 5


def test_valleys_without_a_bottom_are_refused() -> None:
    made, far, _ = drifting_grid()
    three = study(made.take(made.C < 2e19), "isoflop")  # a straight line
    beyond = three.frontier(far)
    assert any("no floor" in text for text in cautions(three, beyond, forecast(three, beyond)))
    made, _, _ = drifting_grid(1.3)  # so narrow that an edge is the best where the guess is off
    with pytest.raises(DataError, match="beyond the"):
        isoflop(made.take(made.C < 5e18))


def test_scattered_compute_is_not_isoflop() -> None:
    N, D = np.geomspace(1e7, 1e9, 200), np.geomspace(1e9, 1e10, 200)
    with pytest.raises(DataError, match="equal compute"):
        isoflop(points(N, D, true_loss(N, D)))


def test_a_maximum_is_not_a_valley() -> None:
    C = np.repeat([1e18, 4e18, 1.6e19], 5)
    N = np.tile(np.geomspace(1e7, 1e9, 5), 3)
    hill = 3 - 0.1 * np.log10(C / 1e18) - 0.1 * (np.log10(N) - 8) ** 2
    with pytest.raises(DataError, match="downward"):
        isoflop(points(N, C / 6 / N, hill), "parabola")


def test_the_envelope_follows_the_best_curve() -> None:
    sizes, names = np.geomspace(1e7, 1e9, 9), []
    rows = []
    for N in sizes:
        for D in np.geomspace(1e8, 1e11, 40):
            rows.append((N, D, true_loss(N, D)))
            names.append(f"{N:.3g}")
    N, D, loss = np.array(rows).T
    curves = Points(N, D, 6 * N * D, loss, tuple(names), "made")
    found = envelope(curves)
    assert found.a == pytest.approx(LAW["beta"] / (LAW["alpha"] + LAW["beta"]), abs=0.05)
    done = study(curves, "envelope")
    assert done.fit.law.name == "compute"
    assert any("not annealed" in warning for warning in done.warnings)
    with pytest.raises(DataError, match="three sizes"):
        envelope(curves.take(sizes[2] > N))


def test_resamples_of_vpnls_surround_its_optimum() -> None:
    N, D = grid()
    made = points(N, D, true_loss(N, D) * np.exp(np.random.default_rng(0).normal(0, 0.003, N.size)))
    done = vpnls(made)
    assert refit_vpnls(done, np.ones((1, len(made))))[0] == pytest.approx(done.theta, rel=1e-3)
    draws = done.law.natural(bootstrap(done, 200), done.inputs)
    spread = dict(zip(done.law.parameters, draws.std(axis=0), strict=True))
    twin = fit(made, LAWS["chinchilla"])
    draws = twin.law.natural(bootstrap(twin, 200), twin.inputs)
    other = dict(zip(twin.law.parameters, draws.std(axis=0), strict=True))
    for name in ("E", "alpha", "beta"):
        assert (
            0.4 < spread[name] / other[name] < 2
        )  # least squares and Huber's loss on the same points
