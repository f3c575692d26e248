"""Predict how precisely a sweep will forecast a target; find the cheapest ladder for a given width.

Laws are drawn from a prior, the losses of the runs are drawn from each law with noise, and every
simulated sweep is fitted by the code that will fit the real one (`study`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import tomli_w

from pipeline.config.schema import RunSpec
from pipeline.errors import ConfigError, DataError
from pipeline.planner import count as account
from pipeline.planner.work import training_flops
from pipeline.scaling.backtest import CUTS, ENOUGH, FEWEST, TYPICAL, TYPICAL_CUTS, half_width
from pipeline.scaling.fitting import Show, silent
from pipeline.scaling.points import Array, Points
from pipeline.scaling.study import study
from pipeline.sweep.grid import Planned, Sweep, branched, configs_of, plan
from pipeline.units import count, power

MOST_TOKENS = 1e18  # of a target; the planner refuses longer runs too
NOISE = 0.003  # relative scatter of runs about a law; ladders of one recipe have 0.2 to 1%
DRAWS = 8
SEARCH_DRAWS = 3  # for a ladder that may be rejected
MOST_TRIED = 6  # ladders that are simulated before giving up; each takes seconds
# Lengths of a ladder, in tokens per parameter. Fewer than two do not separate N and D, and lengths
# within a factor of four hardly do.
LENGTHS = (
    (5.0, 20.0),
    (10.0, 40.0),
    (2.5, 5.0, 10.0, 20.0),
    (5.0, 10.0, 20.0, 40.0),
    (5.0, 20.0, 80.0),
    (5.0, 10.0, 20.0, 40.0, 80.0),
)
FEWEST_SIZES = 3
MOST_SIZES = 7
SPREAD = 30.0  # smallest allowed ratio of compute between the largest and the smallest run
STEP = 1.4  # between neighboring sizes of a ladder


@dataclass(frozen=True)
class Target:
    """The run that is to be forecast."""

    name: str
    N: float
    D: float
    C: float


@dataclass(frozen=True)
class Width:
    """Half of the relative 95% interval at the target, over simulated sweeps."""

    median: float
    worst: float
    error: float  # mean absolute error of the forecasts
    inside: int  # sweeps whose interval contains the truth
    draws: int
    beyond: float  # compute of the target over that of the largest run


@dataclass(frozen=True)
class PriorLaw:
    """L = E + a·(N/N0)^−α + b·(D/D0)^−β."""

    E: float
    a: float
    alpha: float
    b: float
    beta: float
    D0: float
    N0: float = 1e8

    @classmethod
    def draw(cls, rng: np.random.Generator) -> "PriorLaw":
        """Draw a law like those published for text and code (arXiv 2203.15556, 2305.16264,
        2404.10102). At 100M parameters and the best number of tokens, the two terms together
        are 1.3 to 2 nats.
        """
        alpha, beta = np.clip(rng.normal(0.35, 0.05, 2), 0.2, 0.55)
        reducible = 1.6 * np.exp(rng.normal(0, 0.15))
        ratio = np.exp(rng.uniform(np.log(10), np.log(40)))  # optimal tokens per parameter
        # At the optimum both terms decrease at the same rate: α·a = β·b.
        a = reducible * beta / (alpha + beta)
        b = reducible * alpha / (alpha + beta)
        floor = 1.8 * np.exp(rng.normal(0, 0.15))
        return cls(float(floor), float(a), float(alpha), float(b), float(beta), 1e8 * float(ratio))

    def loss(self, N: Array, D: Array) -> Array:
        of_n = self.a * (N / self.N0) ** -self.alpha
        of_d = self.b * (D / self.D0) ** -self.beta
        return np.asarray(self.E + of_n + of_d)

    def gradient(self, N: Array, D: Array) -> Array:
        """Return the gradient of log loss by the five parameters, (5, n)."""
        of_n = self.a * (N / self.N0) ** -self.alpha
        of_d = self.b * (D / self.D0) ** -self.beta
        by_alpha = -np.log(N / self.N0) * of_n
        by_beta = -np.log(D / self.D0) * of_d
        rows = [np.full_like(N, self.E), of_n, by_alpha, of_d, by_beta]
        return np.stack(rows) / self.loss(N, D)


MIDDLE = PriorLaw(E=1.8, a=0.8, alpha=0.35, b=0.8, beta=0.35, D0=2e9)


def target_of(sweep: Sweep, size: str, tokens: float | None = None) -> Target:
    """Return a size as the target, trained on this many tokens or for its usual length."""
    if tokens is not None and not 0 < tokens < MOST_TOKENS:
        limits = f"above zero and below {MOST_TOKENS:g}"
        raise ConfigError(f"target_tokens={tokens:g} must be a number {limits}, such as 4e8")
    spec = configs_of(sweep.model_copy(update={"sizes": (size,)}))[size]
    N = float(account.params(spec.model).scaling)
    D = tokens or spec.train.tokens_per_param * N
    return Target(size, N, D, D * training_flops(spec).model)


def width(
    runs: Sequence[Planned],
    target: Target,
    noise: float = NOISE,
    draws: int = DRAWS,
    show: Show = silent,
) -> Width:
    """Simulate the runs under laws from the prior and fit each simulation."""
    N, D, C = (np.array([getattr(run, key) for run in runs], float) for key in "NDC")
    N_target, D_target, C_target = (np.array([value]) for value in (target.N, target.D, target.C))
    place = Points(N_target, D_target, C_target, C_target * np.nan, ("",), "planned")
    if C.min() > target.C:
        text = f"target_size={target.name} on {count(target.D)} tokens is smaller than every run"
        raise ConfigError(f"{text} of the sweep; choose a larger target")
    found = []
    for seed in range(draws):
        rng = np.random.default_rng(seed)
        law = PriorLaw.draw(rng)
        loss = law.loss(N, D) * np.exp(rng.normal(0, noise, len(N)))
        points = Points(N, D, C, loss, tuple(run.name for run in runs), "planned")
        try:
            simulated = study(points, profiled=False)
        except DataError as failure:  # the noise hides the effect of compute
            text = f"noise={noise:.3g}: in a simulated sweep {str(failure).partition(' (')[0]}"
            raise ConfigError(f"{text}; give a smaller --noise or a wider ladder") from None
        middle, low, high = (float(x[0]) for x in simulated.interval(place))
        truth = float(law.loss(place.N, place.D)[0])
        found.append((np.log(high / low) / 2, abs(np.log(middle / truth)), low <= truth <= high))
        show(f"simulating {len(runs)} runs", (seed + 1) / draws)
    half, error, inside = np.array(found, float).T
    # A law without an interval counts as infinitely wide.
    half = np.nan_to_num(half, nan=np.inf)
    return Width(
        median=float(np.median(half)),
        worst=float(half.max()),
        error=float(error.mean()),
        inside=int(inside.sum()),
        draws=draws,
        beyond=target.C / float(C.max()),
    )


def rough_width(runs: Sequence[Planned], target: Target, noise: float = NOISE) -> float:
    """Estimate the half width quickly, to choose the ladders to simulate.

    It is the larger of two half widths: one by linear error propagation, and one of the interval
    that backtests would give if their errors were only the noise of the runs.
    """
    N, D, C = (np.array([getattr(run, key) for run in runs], float) for key in "NDC")
    slope = MIDDLE.gradient(N, D)
    # Standard deviations of the prior: 15% for E, 20% for the two terms, 0.05 for the exponents.
    prior = np.diag(1 / np.array([0.15, 0.2, 0.05, 0.2, 0.05]) ** 2)
    covariance = np.linalg.inv(slope @ slope.T / noise**2 + prior)
    there = MIDDLE.gradient(np.array([target.N]), np.array([target.D]))[:, 0]
    spare = max(len(N) - 5, 1)
    # Student's t for few spare runs, to about 10%.
    t = 2 * (1 + 2 / spare**1.5)
    linear = float(t * np.sqrt(noise**2 + there @ covariance @ there))
    # As in `backtest`: few runs have few cuts, and with too few errors there is no backtest at all.
    cuts = [cut for cut in CUTS if cut * len(runs) >= FEWEST]
    if sum((1 - cut) * len(runs) for cut in cuts) < ENOUGH:
        cuts = []
    squares = TYPICAL_CUTS * TYPICAL**2 + len(cuts) * noise**2
    scale = float(np.sqrt(squares / (TYPICAL_CUTS + len(cuts))))
    beyond = np.array([target.C / C.max()])
    return max(linear, float(half_width(scale, len(runs), beyond, np.zeros(1))[0]))


def cheapest(
    sweep: Sweep, target: Target, wanted: float, noise: float = NOISE, show: Show = silent
) -> tuple[Sweep, list[Planned], Width]:
    """Find the cheapest ladder whose simulated interval at the target is as narrow as wanted."""
    options = sorted(_candidates(sweep, target), key=lambda option: _price(option[1]))
    if not options:
        text = f"target_size={target.name} on {count(target.D)} tokens leaves no ladder"
        text += f" of {FEWEST_SIZES} smaller sizes with at most a third of its compute"
        raise ConfigError(f"{text}; choose a larger target")
    rough = {id(runs): rough_width(runs, target, noise) for _, runs in options}
    ratios: list[float] = []  # of simulated to rough widths
    narrowest = float("inf")
    best: tuple[Sweep, list[Planned], Width] | None = None
    for tried in range(MOST_TRIED):
        # Expect a little more with every try, so that the search does not stay among near misses.
        factor = float(np.median(ratios or [1.0])) * 1.05**tried
        fitting = [at for at, (_, runs) in enumerate(options) if factor * rough[id(runs)] <= wanted]
        if not options or (best is not None and not fitting):
            break
        # If no estimate is narrow enough, simulate the ladder with the narrowest estimate.
        at = min(fitting, default=int(np.argmin([rough[id(runs)] for _, runs in options])))
        chosen, runs = options[at]
        found = width(runs, target, noise, SEARCH_DRAWS, show)
        if found.median <= wanted:
            found = width(runs, target, noise, DRAWS, show)
        ratios.append(found.median / rough[id(runs)])
        narrowest = min(narrowest, found.median)
        if found.median <= wanted:
            best = (chosen, runs, found)
            options = options[:at]  # only cheaper ones
        else:
            del options[at]
    if best is not None:
        return best
    raise ConfigError(
        f"width={wanted:.3g}: no ladder below {target.name} ({power(target.C)} FLOPs) is that "
        f"precise; the narrowest tried is ± {narrowest:.1%}. Give a larger --width or a smaller "
        f"--target-size"
    )


def _price(runs: Sequence[Planned]) -> tuple[float, float]:
    return sum(run.hours or 0 for run in runs), sum(run.cost for run in runs)


def _candidates(sweep: Sweep, target: Target) -> list[tuple[Sweep, list[Planned]]]:
    """List ladders of neighboring sizes whose runs each cost less than a third of the target."""
    every = tuple(sorted({length for lengths in LENGTHS for length in lengths}))
    configs = configs_of(sweep.model_copy(update={"sizes": ()}))
    sizes = _ladder_sizes(configs, target.N)
    if len(sizes) < FEWEST_SIZES:
        return []
    update = {"kind": "ladder", "sizes": sizes, "tokens": (), "tokens_per_param": every}
    runs = {run.name: run for run in plan(sweep.model_copy(update={**update, "trunk": False}))}
    found = []
    for many, lengths in product(range(FEWEST_SIZES, MOST_SIZES + 1), LENGTHS):
        for first in range(len(sizes) - many + 1):
            part = sizes[first : first + many]
            update |= {"sizes": part, "tokens_per_param": lengths}
            chosen = sweep.model_copy(update=update)
            picked = [runs[f"{name}-{length:g}x"] for name in part for length in lengths]
            costs = [run.C for run in picked]
            if max(costs) < target.C / 3 and max(costs) > SPREAD * min(costs):
                found.append((chosen, branched(chosen, configs, picked)))
    return found


def _ladder_sizes(configs: dict[str, RunSpec], most: float) -> tuple[str, ...]:
    """Sizes below the target, from small to large, without those that hardly differ."""
    sizes = {name: account.params(config.model).scaling for name, config in configs.items()}
    chosen: list[str] = []
    for name in sorted(sizes, key=lambda name: sizes[name]):
        if sizes[name] < most and (not chosen or sizes[name] > STEP * sizes[chosen[-1]]):
            chosen.append(name)
    return tuple(chosen)


def as_toml(sweep: Sweep, found: Width, target: Target) -> str:
    """Return the proposed ladder as a sweep file."""
    run = f"{target.name} ({count(target.N)} on {count(target.D)} tokens)"
    note = f"# Planned for {run}: ± {found.median:.1%} in simulation.\n"
    return note + tomli_w.dumps(sweep.model_dump(mode="json", exclude_none=True))
