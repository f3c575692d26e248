"""Choose a run: the least compute for a loss, with inference or with limited data, and its price.

One law gives every loss and chooses N and D, so that no answer contradicts another. The least cost
for a loss is found by searching over total costs.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from scipy import optimize

from pipeline.config.layers import load, load_cluster, names
from pipeline.config.schema import Cluster
from pipeline.errors import ConfigError
from pipeline.planner.check import resolve
from pipeline.planner.count import params
from pipeline.planner.speed import plan, recommend
from pipeline.scaling.fitting import Fit
from pipeline.scaling.frontier import ROUNDS, UnitFlops, at
from pipeline.scaling.laws import DataConstrained
from pipeline.scaling.points import Array, Points
from pipeline.scaling.study import Study, quiet
from pipeline.units import count

# Muennighoff et al. (arXiv 2305.16264), appendix A: 182 runs on C4, 1 to 500 epochs.
R_TOKENS = 15.387756
R_PARAMETERS = 5.309743
FORWARD = 1 / 3  # inference FLOPs per token over those of training: no backward pass
WIDEST = 12.0  # log N above and below the square root of N·D: tokens per parameter within e^±24
FLAT = 1e-13  # relative difference of losses that are equal
LARGEST_FLOPS = 1e40
FARTHEST = 4.0  # times N of a shipped size, beyond which its speed says nothing
MFU = 0.4  # if the planner has no estimate; 1–7B on H100s reach 41–47% (llm-foundry, Megatron)


@dataclass(frozen=True)
class Demand:
    """Requirements besides one training on new data: inference, or limited data."""

    inference_tokens: float = 0.0
    inference_price: float = 1.0  # price of an inference FLOP relative to a training FLOP
    unique: float | None = None  # number of distinct tokens available

    @property
    def served(self) -> float:
        """Training tokens that cost as much as the inference."""
        return self.inference_price * self.inference_tokens * FORWARD


def best(study: Study, C: Array, demand: Demand) -> Points:
    """Return the best run for each total cost, in training FLOPs; its C counts training only."""
    if demand == Demand():
        return study.frontier(C)
    needs_terms(study)
    unit_flops = UnitFlops.of(study.fit.points)
    N, D = np.array([_best_split(study.fit, unit_flops, c, demand) for c in C]).T
    return at(study.fit.points, unit_flops.each(N) * N * D, N, D)


def needs_terms(study: Study) -> None:
    """Refuse a law that does not separate the effects of N and D."""
    if study.fit.law.terms(study.fit.values, 1.0) is None or "experts" in study.fit.points.columns:
        raise ConfigError(
            f"law={study.name} does not give the loss of every N and D, which --inference-tokens "
            f"and --unique need; add runs off the ladder, or choose --law chinchilla"
        )


@quiet
def _best_split(fit: Fit, unit_flops: UnitFlops, C: float, demand: Demand) -> tuple[float, float]:
    """Return the N and D of the lowest loss with unit FLOPs · N · (D + served tokens) = C."""
    middle = 0.5 * math.log(C / unit_flops.base)
    low = middle - WIDEST
    high = middle + WIDEST
    if demand.served:
        high = min(high, math.log(C / unit_flops.base / demand.served) - 1e-9)  # D stays above zero
        low = min(low, high - WIDEST)
    # The loss has one valley in log N. Each round narrows it a hundredfold, down to a flat bottom,
    # which is wide where more repetition gains nothing; there, the middle of it is returned.
    for _ in range(5):
        n = np.linspace(low, high, 201)
        N = np.exp(n)
        D = C / unit_flops.each(N) / N - demand.served  # below zero, its loss is NaN
        loss = loss_of(fit, at(fit.points, N * D, N, D), demand.unique)
        flat = np.flatnonzero(loss <= np.nanmin(loss) * (1 + FLAT))
        low, high = n[np.clip([flat[0] - 1, flat[-1] + 1], 0, 200)]
    N_best = np.exp((low + high) / 2)
    return float(N_best), float(C / unit_flops.each(N_best) / N_best - demand.served)


def loss_of(fit: Fit, places: Points, unique: float | None) -> Array:
    return fit.predict(worth(fit, places, unique))


def worth(fit: Fit, places: Points, unique: float | None) -> Points:
    """Return the places with N and D reduced to their worth if only `unique` tokens are distinct.

    Repeated tokens count less, and so do parameters that are too many for the data.
    """
    if unique is None:
        return places
    if isinstance(fit.law, DataConstrained):  # the law itself models repetition
        return replace(places, unique=np.full(len(places), unique))
    terms = fit.law.terms(fit.values, 1.0)
    assert terms is not None
    # N*(U), the N of the best split with U tokens: αA·N^−α = βB·U^−β · growth, as in `best_split`.
    level = math.log(terms.alpha / terms.beta) + terms.log_a - terms.log_b
    unit_flops = UnitFlops.of(fit.points)
    filled = unique
    for _ in range(ROUNDS if unit_flops.extra else 1):
        growth = math.log(float(unit_flops.growth(np.array(filled))))
        # With very much data, exp would overflow; exp(700) is above every N.
        power_of_n = level - growth + terms.beta * math.log(unique)
        filled = math.exp(min(power_of_n / terms.alpha, 700.0))
    return replace(
        places, D=_worth(places.D, unique, R_TOKENS), N=_worth(places.N, filled, R_PARAMETERS)
    )


def _worth(used: Array, distinct: float, half: float) -> Array:
    """Equations 5 and 6 of arXiv 2305.16264."""
    repeats = np.maximum(used / distinct - 1, 0)
    return np.minimum(used, distinct) + distinct * half * -np.expm1(-repeats / half)


def least_cost(study: Study, target: float, demand: Demand) -> float:
    """Return the least total cost, in training FLOPs, whose best run has the target loss."""

    def loss(log_c: float) -> float:
        places = best(study, np.array([math.exp(log_c)]), demand)
        return float(loss_of(study.fit, places, demand.unique)[0])

    low = math.log(study.fit.points.C.min()) - 15
    if demand.served:  # below, inference alone costs more
        low = max(low, math.log(UnitFlops.of(study.fit.points).base * demand.served))
    high = math.log(LARGEST_FLOPS)
    floor = loss(high)
    if not target > floor * (1 + 1e-6):
        data = f" on {count(demand.unique)} distinct tokens" if demand.unique else ""
        note = ", an estimate"
        fewer = " or fewer --inference-tokens" if demand.served else ""
        interval = study.parameters().get("E", {"low": math.nan, "high": math.nan})
        # On limited data, or with inference to pay for, the lowest loss is not E.
        if demand == Demand() and math.isfinite(interval["low"] + interval["high"]):
            note += f" (95% interval of E: {interval['low']:.4g} to {interval['high']:.4g})"
        raise ConfigError(
            f"target_loss={target:g} is out of reach: by this law no run{data} gets below "
            f"{floor:.4g}{note}; choose a higher loss{fewer}"
        )
    if target > loss(low):
        text = f"target_loss={target:g} is above every loss that the law describes"
        raise ConfigError(f"{text}; the largest measured is {study.fit.points.loss.max():.4g}")
    return math.exp(optimize.brentq(lambda log_c: loss(log_c) - target, low, high))


def cost_range(
    study: Study, target: float, total: float, demand: Demand
) -> tuple[float | None, float | None]:
    """Return the total costs at which the interval's ends reach the target; None where unknown."""
    # The interval widens with the distance from the runs, so its upper end may never get there.
    C = total * np.geomspace(1e-4, 1e4, 161)
    if demand.served:
        C = C[UnitFlops.of(study.fit.points).base * demand.served < C]
    places = worth(study.fit, best(study, C, demand), demand.unique)
    _, low, high = study.interval(places)
    too_cheap = C[(total > C) & (low > target)]
    enough = C[(total <= C) & (high <= target)]
    first, last = (float(C[0]) if len(C) else None for C in (too_cheap[-1:], enough[:1]))
    return first, last


def decision(study: Study, places: Points, demand: Demand) -> dict[str, Any]:
    """Describe the effect of the demand: inference FLOPs, epochs, and the run without it."""
    unit_flops = UnitFlops.of(study.fit.points)
    N = float(places.N[0])
    D = float(places.D[0])
    each = float(unit_flops.each(places.N)[0])
    loss = float(loss_of(study.fit, places, demand.unique)[0])
    found: dict[str, Any] = {}
    if demand.inference_tokens:
        total = each * N * (D + demand.served)
        found["inference_flops"] = each * N * demand.inference_tokens * FORWARD
        found["total_cost_flops"] = total
        found["inference_price"] = demand.inference_price
        without = Demand(unique=demand.unique)
        with suppress(ConfigError):  # a loss at the floor of the law or far above the runs
            plain = best(study, np.array([least_cost(study, loss, without)]), without)
            found["training_optimum"] = {"N": float(plain.N[0]), "D": float(plain.D[0])}
            usual = float((unit_flops.each(plain.N) * plain.N * (plain.D + demand.served))[0])
            found["saved"] = max(0.0, 1 - total / usual)
    if demand.unique is not None:
        found["epochs"] = max(1.0, D / demand.unique)
        found["loss_with_new_data"] = float(study.fit.predict(places)[0])
        fitted = isinstance(study.fit.law, DataConstrained)
        found["repeats_from"] = "the fit" if fitted else "arXiv 2305.16264"
        if not fitted:
            found["worth_tokens"] = float(_worth(places.D, demand.unique, R_TOKENS)[0])
    return found


# --- the price ---------------------------------------------------------------------------------


def priced(cluster: str) -> Cluster:
    """Load a cluster, and refuse it if its speed is unknown."""
    if not cluster:  # an unset shell variable
        raise ConfigError("cluster='' is empty; give a name in configs/cluster, or a TOML file")
    found = load_cluster(cluster)
    if found.peak_flops is None:
        file = cluster if cluster.endswith(".toml") else f"configs/cluster/{cluster}.toml"
        raise ConfigError(f"cluster={cluster} has no peak_flops; add it to {file}")
    return found


def cost(
    runs: Sequence[tuple[float, float]],
    site: Cluster,
    gpus: int,
    size: str | None = None,
    arch: str | None = None,
    sets: Sequence[str] = (),
) -> dict[str, Any]:
    """Return GPU-hours, hours and price of runs (C, N) at the speed that the planner predicts for
    their architecture and settings."""
    assert site.peak_flops is not None
    planned = [planned_mfu(N, site, gpus, size, arch, sets) for _, N in runs]
    # peak_flops is the peak of one GPU, so these are GPU-hours.
    busy = [
        C / (site.peak_flops * (mfu or MFU)) / 3600
        for (C, _), mfu in zip(runs, planned, strict=True)
    ]
    hours = sum(busy)
    found = {
        "cluster": site.name,
        "gpus": gpus,
        "mfu": sum(C for C, _ in runs) / (site.peak_flops * 3600) / hours,
        "mfu_from": "planner" if all(planned) else "assumed",
        "gpu_hours": hours,
        "hours": hours / gpus,
    }
    if site.usd_per_gpu_hour is not None:
        found["usd"] = hours * site.usd_per_gpu_hour
    return found


def unplanned(cost: dict[str, Any] | None, size: str | None, site: Cluster | None) -> list[str]:
    """Return a warning about a size that the planner has no layout for, so that MFU is assumed."""
    if cost is None or size is None or cost["mfu_from"] == "planner":
        return []
    if site is None or site.rates is None:  # without rates, MFU is always assumed
        return []
    return [
        f"The planner has no layout for {size} with this batch on {cost['gpus']} {site.name} "
        f"GPUs, so hours and price assume an MFU of {MFU:g}; choose another number with --gpus."
    ]


@cache
def known_sizes(vocab: int | None = None) -> dict[str, float]:
    """Return N of every shipped size, with its own vocabulary or this one."""
    over = {"model": {"vocab": vocab}} if vocab else {}
    return {name: float(params(load(size=name, over=over).model).scaling) for name in names("size")}


def planned_mfu(
    N: float,
    site: Cluster,
    gpus: int,
    size: str | None,
    arch: str | None = None,
    sets: Sequence[str] = (),
) -> float | None:
    """Return the MFU of this size, or of the shipped size nearest to N; None if it is unknown."""
    if site.rates is None or not math.isfinite(N):
        return None
    if size is None:
        known = known_sizes()
        size = min(known, key=lambda name: abs(math.log(known[name] / N)))
        if abs(math.log(known[size] / N)) > math.log(FARTHEST):
            return None
    try:
        spec = load(size=size, arch=arch, sets=sets).model_copy(update={"cluster": site})
        chosen = recommend(spec, plan(resolve(spec, ranks=gpus, gpu=True), gpus, spec))
    except ConfigError:  # the batch does not divide over these GPUs
        return None
    return chosen.mfu if chosen is not None else None
