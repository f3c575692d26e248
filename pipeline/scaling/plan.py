"""Lay out a sweep before it costs anything: which sizes on how many tokens, and what all of it takes."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline import account
from pipeline.config.load import load, names, read_toml, validate
from pipeline.config.schema import Frozen, RunConfig
from pipeline.data.shards import Corpus
from pipeline.errors import ConfigError
from pipeline.recipe import resolve
from pipeline.scaling.figures import count, power
from pipeline.scaling.forecast import MFU

SIDE = 2  # sizes wanted on each side of N*: an Akima valley needs them, and one alone may be the edge
SPACING = 4.0  # between budgets planned from a total
Positive = Annotated[float, Field(gt=0)]


class Sweep(Frozen):
    """A sweep file."""

    kind: Literal["isoflop", "ladder"]
    experiment: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    arch: str = "dense"
    budgets: tuple[Positive, ...] = ()  # FLOPs, of an isoFLOP grid
    sizes: tuple[str, ...] = ()  # of a ladder; for an isoFLOP grid the rungs to choose from, all if empty
    tokens_per_param: tuple[Positive, ...] = (
        20.0,
    )  # horizons of a ladder; the first is an isoFLOP grid's guess of D*/N*
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
    hours: float | None

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def read(path: Path) -> Sweep:
    return validate(Sweep, read_toml(path), where=str(path))


def plan(sweep: Sweep, best: Callable[[float], float] | None = None) -> list[Planned]:
    """Every run of the sweep; `best` gives N*(C) where an earlier fit knows it."""
    # the vocabulary as `launch pretrain` takes it from the shards
    layer = {"model": {"vocab": Corpus.open(Path(sweep.data)).padded_vocab}} if sweep.data else None
    rungs = {
        name: load(size=name, arch=sweep.arch, data=layer, cluster=sweep.cluster, sets=sweep.set)
        for name in sweep.sizes or names("size")
    }
    if sweep.kind == "ladder":
        if not sweep.sizes:
            raise ConfigError("sizes=[] in a ladder; name the rungs, such as sizes = ['tiny', '1m', '3m']")
        return [
            _planned(sweep, config, f"{name}-{ratio:g}x", ratio * account.params(config.model).scaling)
            for name, config in rungs.items()
            for ratio in sweep.tokens_per_param
        ]
    if len(sweep.budgets) < 3:
        raise ConfigError(f"budgets={list(sweep.budgets)}: a law through valleys needs three budgets; add larger ones")
    return [run for budget in sweep.budgets for run in _valley(sweep, rungs, budget, best)]


def _valley(
    sweep: Sweep, rungs: dict[str, RunConfig], C: float, best: Callable[[float], float] | None
) -> list[Planned]:
    """The rungs about N*; refused where too few of them lie on either side."""
    sizes = {name: account.params(config.model).scaling for name, config in rungs.items()}
    middle = best(C) if best else _guess(rungs, C, sweep.tokens_per_param[0])
    chosen = {name: N for name, N in sizes.items() if middle / sweep.wide <= N <= middle * sweep.wide}
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
        _planned(sweep, rungs[name], f"{label}-{name}", C / account.flops_per_token(rungs[name].model).model)
        for name in chosen
    ]


def _guess(rungs: dict[str, RunConfig], C: float, ratio: float) -> float:
    """N where C buys `ratio` tokens per parameter, between the rungs by interpolation in logs."""
    costs = []
    for config in rungs.values():
        N = account.params(config.model).scaling
        costs.append((math.log(ratio * N * account.flops_per_token(config.model).model), math.log(N)))
    costs.sort()
    want = math.log(C)
    for (c0, n0), (c1, n1) in itertools.pairwise(costs):
        if c0 <= want <= c1:
            return math.exp(n0 + (n1 - n0) * (want - c0) / (c1 - c0))
    return math.exp(costs[0][1] if want < costs[0][0] else costs[-1][1])


def _planned(sweep: Sweep, config: RunConfig, name: str, tokens: float) -> Planned:
    train = config.train.model_copy(update={"tokens": max(1, int(tokens)), "steps": None, "flops": None})
    run = resolve(config.model_copy(update={"train": train}), ranks=sweep.nproc, gpu=sweep.cluster is not None)
    settled, lr, warmup = run.train, run.optim.lr, run.optim.schedule.warmup_steps
    assert settled.steps and settled.batch_tokens != "auto" and settled.micro_batch != "auto"
    assert settled.dtype != "auto" and lr != "auto" and warmup != "auto"
    D = float(settled.steps * settled.batch_tokens)
    C = D * account.flops_per_token(run.model).model
    memory = account.memory(
        run.model, dtype=settled.dtype, zero=1, ranks=sweep.nproc, micro_batch=settled.micro_batch,
        loss_chunk=settled.loss_chunk, recompute=settled.recompute,
    )  # fmt: skip
    peak = run.cluster.peak_flops
    hours = C / (peak * MFU * sweep.nproc) / 3600 if peak and sweep.cluster else None
    return Planned(
        name, run.model.size, account.params(run.model).scaling, D, C, lr, warmup, settled.batch_tokens, settled.steps,
        memory.total, hours,
    )  # fmt: skip


def within(sweep: Sweep, total: float, best: Callable[[float], float] | None = None) -> Sweep:
    """The same isoFLOP sweep with four budgets, each four times the last, that together cost no more than `total`."""
    refused = ""
    for step in range(60):
        top = total / 4 / 1.2**step
        budgets = tuple(top / SPACING**i for i in (3, 2, 1, 0))
        tried = sweep.model_copy(update={"kind": "isoflop", "budgets": budgets})
        try:
            if sum(run.C for run in plan(tried, best)) <= total:
                return tried
        except ConfigError as error:  # between two rungs far apart; a little less may do
            refused = f" ({error})"
    raise ConfigError(f"budget={power(total)} does not buy four valleys of these sizes{refused}")
