"""Lay out a sweep before it costs anything: which sizes on how many tokens, and what all of it takes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from pipeline.config.layers import load, names, read_toml, validate
from pipeline.config.parts import Frozen
from pipeline.config.schema import RunSpec, WSDSpec
from pipeline.data.corpus import Corpus
from pipeline.errors import ConfigError
from pipeline.optim.schedule import decay_start
from pipeline.planner import count as account
from pipeline.planner.check import resolve
from pipeline.planner.memory import Layout, memory
from pipeline.planner.speed import estimate
from pipeline.units import count, power

SIDE = (
    2  # sizes wanted on each side of N*: an Akima valley needs them, and one alone may be the edge
)
SPACING = 4.0  # between budgets planned from a total
LAYER_S = 2e-3  # the least a step takes per layer, however small: its kernels have to be started (docs/LOG.md)
TIMING = "steps as `launch show` estimates them, and at least 2 ms per layer"
RATES = 2.0  # between the recipe's rates of lengths that share a trunk; the plateau is flat that far about its best
Positive = Annotated[float, Field(gt=0)]


class Sweep(Frozen):
    """A sweep file."""

    kind: Literal["isoflop", "ladder"]
    experiment: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    arch: str = "dense"
    budgets: tuple[Positive, ...] = ()  # FLOPs, of an isoFLOP grid
    sizes: tuple[
        str, ...
    ] = ()  # of a ladder; for an isoFLOP grid the rungs to choose from, all if empty
    tokens_per_param: tuple[Positive, ...] = (
        20.0,
    )  # horizons of a ladder; the first is an isoFLOP grid's guess of D*/N*
    tokens: tuple[
        Positive, ...
    ] = ()  # horizons of a ladder in tokens, the same for every size, instead
    trunk: bool = True  # lengths of one size, whose rates agree within RATES, branch off the longest of them (WSD)
    wide: Annotated[float, Field(ge=2)] = 8.0  # each budget's sizes reach from N*/wide to N*·wide
    set: tuple[str, ...] = ()  # settings over every run's config
    data: str | None = None  # shards; known, every run is counted with their vocabulary
    nproc: Annotated[int, Field(ge=1)] = 1  # processes of each run, one per GPU
    cluster: str | None = None  # of configs/cluster; left out, the runs are planned for CPUs


@dataclass(frozen=True)
class Planned:
    """One run of a sweep."""

    name: str
    size: str
    N: int
    D: float
    C: float
    lr: float
    warmup_steps: int
    batch_tokens: int
    steps: int
    memory_bytes: int  # per rank, ZeRO 1
    mfu: float | None  # of the sweep's GPUs
    hours: float | None
    cost: float  # FLOPs this run adds: C, less what its trunk has done
    trunk: str | None = None  # the run in whose plateau this one begins
    begins: int = 0  # at this step


def read(path: Path) -> Sweep:
    return validate(Sweep, read_toml(path), where=str(path))


def plan(
    sweep: Sweep, best: Callable[[float], float] | None = None, mfu: float | None = None
) -> list[Planned]:
    """Every run of the sweep; `best` gives N*(C) where an earlier fit knows it, `mfu` replaces the rule of TIMING."""
    rungs = _rungs(sweep.sizes, sweep.arch, sweep.data, sweep.cluster, sweep.set)
    if sweep.kind == "ladder":
        if not sweep.sizes:
            raise ConfigError(
                "sizes=[] in a ladder; name the rungs, such as sizes = ['tiny', '1m', '3m']"
            )
        runs = []
        for name, config in rungs.items():
            N = account.params(config.model).scaling
            lengths = {f"{ratio:g}x": ratio * N for ratio in sweep.tokens_per_param}
            if sweep.tokens:
                lengths = {count(tokens): tokens for tokens in sweep.tokens}
            runs += [
                _planned(sweep, config, f"{name}-{label}", tokens, mfu)
                for label, tokens in lengths.items()
            ]
        return _branched(sweep, rungs, runs)
    if len(sweep.budgets) < 3:
        raise ConfigError(
            f"budgets={list(sweep.budgets)}: a law through valleys needs three budgets; add larger ones"
        )
    runs = [run for budget in sweep.budgets for run in _valley(sweep, rungs, budget, best, mfu)]
    return _branched(sweep, rungs, runs)


@lru_cache(4)  # a plan within limits is many plans
def _rungs(
    sizes: tuple[str, ...], arch: str, data: str | None, cluster: str | None, sets: tuple[str, ...]
) -> dict[str, RunSpec]:
    # the vocabulary as `launch pretrain` takes it from the shards
    layer = {"model": {"vocab": Corpus.open(Path(data)).padded_vocab}} if data else None
    return {
        name: load(size=name, arch=arch, data=layer, cluster=cluster, sets=sets)
        for name in sizes or names("size")
    }


def _branched(sweep: Sweep, rungs: dict[str, RunSpec], runs: list[Planned]) -> list[Planned]:
    """The same runs, the shorter of a size begun in the plateau of its longest, with the rate and warmup of that."""
    placed = {run.name: run for run in runs}
    for name, config in rungs.items():
        schedule = config.optim.schedule
        left = sorted((run for run in runs if run.size == name), key=lambda run: -run.steps)
        while sweep.trunk and isinstance(schedule, WSDSpec) and left:
            longest, *others = left
            left = []
            for run in others:
                begins = decay_start(schedule, run.steps)
                if run.lr > RATES * longest.lr or begins < 2 * longest.warmup_steps:
                    left.append(run)
                    continue
                share = 1 - begins / run.steps
                placed[run.name] = replace(
                    run, lr=longest.lr, warmup_steps=longest.warmup_steps, trunk=longest.name, begins=begins,
                    cost=run.C * share, hours=None if run.hours is None else run.hours * share,
                )  # fmt: skip
    return list(placed.values())


def _valley(
    sweep: Sweep,
    rungs: dict[str, RunSpec],
    C: float,
    best: Callable[[float], float] | None,
    mfu: float | None,
) -> list[Planned]:
    """The rungs about N*; refused where too few of them lie on either side."""
    sizes = {name: account.params(config.model).scaling for name, config in rungs.items()}
    middle = best(C) if best else _guess(rungs, C, sweep.tokens_per_param[0])
    chosen = {
        name: N for name, N in sizes.items() if middle / sweep.wide <= N <= middle * sweep.wide
    }
    for side, there in (
        ("below", [N for N in chosen.values() if middle > N]),
        ("above", [N for N in chosen.values() if middle < N]),
    ):
        if len(there) < SIDE:
            raise ConfigError(
                f"budget {power(C)}: {len(there)} of the sizes lie {side} N* ≈ {count(middle)} and {SIDE} are needed, "
                f"or the minimum sits on the edge; {'raise' if side == 'below' else 'lower'} the budget, name more "
                f"sizes, or set wide above {sweep.wide:g}"
            )
    label = f"{C:.1e}".replace("+", "")
    return [
        _planned(
            sweep,
            rungs[name],
            f"{label}-{name}",
            C / account.flops_per_token(rungs[name].model).model,
            mfu,
        )
        for name in chosen
    ]


def _guess(rungs: dict[str, RunSpec], C: float, ratio: float) -> float:
    """N where C buys `ratio` tokens per parameter, between the rungs by interpolation in logs."""
    models = [config.model for config in rungs.values()]
    pairs = [(account.params(m).scaling, account.flops_per_token(m).model) for m in models]
    costs, sizes = np.log(
        np.array(sorted((float(ratio * N * flops), float(N)) for N, flops in pairs))
    ).T
    return float(np.exp(np.interp(np.log(C), costs, sizes)))


def _planned(sweep: Sweep, config: RunSpec, name: str, tokens: float, mfu: float | None) -> Planned:
    train = config.train.model_copy(
        update={"tokens": max(1, int(tokens)), "steps": None, "flops": None}
    )
    run = resolve(
        config.model_copy(update={"train": train}), ranks=sweep.nproc, gpu=sweep.cluster is not None
    )
    settled, lr, warmup = run.train, run.optim.lr, run.optim.schedule.warmup_steps
    D = float(settled.steps * settled.batch_tokens)
    C = D * account.flops_per_token(run.model).model
    layout = Layout(sweep.nproc, 1, micro_batch=settled.micro_batch, recompute=settled.recompute)
    hours = None
    if run.cluster.rates and (peak := run.cluster.peak_flops):
        step_s = C / settled.steps / (peak * sweep.nproc * mfu) if mfu else max(
            estimate(run, layout).step_s, LAYER_S * run.model.layers
        )  # fmt: skip
        hours = settled.steps * step_s / 3600
        mfu = C / (hours * 3600 * peak * sweep.nproc)
    return Planned(
        name, run.model.size, account.params(run.model).scaling, D, C, lr, warmup, settled.batch_tokens, settled.steps,
        memory(run, layout).total, mfu, hours, C,
    )  # fmt: skip


def within(
    sweep: Sweep, flops: float | None, hours: float | None = None, best: Callable[[float], float] | None = None,
    mfu: float | None = None,
) -> Sweep:  # fmt: skip
    """The same isoFLOP sweep with four budgets, each four times the last, that together keep to FLOPs and hours."""
    for key, value in (("budget", flops), ("hours", hours)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(
                f"{key}={value:g} must be a number above zero, such as {'1e19' if key == 'budget' else 6}"
            )
    if sweep.kind == "ladder":
        raise ConfigError(
            "budget and hours lay out an isoFLOP grid, and kind is 'ladder', which costs what its sizes and tokens do; "
            "leave them out, or set kind = 'isoflop'"
        )
    peak = load(size="tiny", cluster=sweep.cluster).cluster.peak_flops if sweep.cluster else None
    most = flops or math.inf
    if hours is not None:
        if peak is None:
            raise ConfigError(
                "hours needs to know the GPUs; set cluster = 'h100' (configs/cluster) in the sweep"
            )
        most = min(most, hours * 3600 * sweep.nproc * peak)
    refused = least = ""
    for step in range(60):
        top = most / 4 / 1.2**step
        budgets = tuple(top / SPACING**i for i in (3, 2, 1, 0))
        tried = sweep.model_copy(update={"budgets": budgets})
        try:
            runs = plan(tried, best, mfu)
        except ConfigError as error:  # between two rungs far apart; a little less may do
            refused = refused or f" ({error})"
            continue
        cost, time = sum(run.cost for run in runs), sum(run.hours or 0 for run in runs)
        if cost <= most and time <= (hours or math.inf):
            return tried
        least = f" (the least takes {power(cost)} FLOPs" + (
            f" and {time:.2g} hours)" if time else ")"
        )
    asked = " and ".join(
        f"{key}={value:.3g}" for key, value in (("budget", flops), ("hours", hours)) if value
    )
    raise ConfigError(
        f"{asked} does not buy four valleys of these sizes{least or refused}; raise it, or name other sizes"
    )
