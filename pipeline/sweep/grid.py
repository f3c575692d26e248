"""Plan a sweep before it runs: which sizes, on how many tokens, at what cost."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from pipeline.config.dump import dotted
from pipeline.config.layers import CONFIGS, load, names, nearest, parse_set, read_toml, validate
from pipeline.config.optimizer import MuonSpec, WSDSpec
from pipeline.config.parts import Frozen
from pipeline.config.schema import RunSpec
from pipeline.data.corpus import Corpus
from pipeline.errors import ConfigError
from pipeline.optim.schedule import decay_start
from pipeline.planner import count as account
from pipeline.planner.check import resolve
from pipeline.planner.memory import Layout, memory
from pipeline.planner.speed import estimate
from pipeline.planner.work import training_flops
from pipeline.units import count, power

SIDE = 2  # sizes needed on each side of N*: Akima's spline uses two, and one may be the edge
SPACING = 4.0  # ratio of neighboring budgets, if they are derived from a limit on the total
LAYER_S = 2e-3  # shortest time of a step per layer, to launch its kernels (docs/LOG.md)
TIMING = "steps as `launch show` estimates them, and at least 2 ms per layer"
# Largest ratio of learning rates of runs that share a trunk. With 2, neighboring sizes of a grid
# got rates of 1.7e-3 and 4.3e-3, and the difference became noise in the fit.
LR_RATIO = 1.1
# Settings that the sweep sets for each run, and the keys of the sweep that they follow from.
OWN_KEYS = {
    "experiment": "experiment",
    "name": "experiment",
    "model.size": "sizes",
    "model.arch": "arch",
    "data.dir": "data",
    "data.hash": "data",
    "train.keep_at": "trunk",
    "train.steps": "tokens",
    "train.tokens": "tokens",
    "train.flops": "budgets",
    "train.tokens_per_param": "tokens_per_param",
}
Positive = Annotated[float, Field(gt=0, lt=1e40)]  # products of larger numbers would overflow
Name = Annotated[str, Field(min_length=1)]  # an empty text counts as "not given" in some places
Best = Callable[[float], float]  # N*(C) of an earlier fit


class SizesError(ConfigError):
    """A budget whose minimum cannot be found: too few sizes lie on one side of N*."""

    def __init__(self, text: str, side: str) -> None:
        super().__init__(text)
        self.side = side  # "below" or "above"


class Sweep(Frozen):
    """A sweep file."""

    kind: Literal["isoflop", "ladder"]
    experiment: Annotated[str, Field(pattern=r"^[\w-][\w.-]{0,63}$")]  # a directory, but not `..`
    arch: Name = "dense"
    budgets: tuple[Positive, ...] = ()  # FLOPs of each valley of an isoFLOP grid
    # The sizes of a ladder, or those to choose from for an isoFLOP grid; empty means all.
    sizes: tuple[str, ...] = ()
    # The lengths of a ladder; the first is an isoFLOP grid's guess of D*/N*.
    tokens_per_param: tuple[Positive, ...] = (20.0,)
    tokens: tuple[Positive, ...] = ()  # lengths of a ladder in tokens instead, for every size
    trunk: bool = True  # shorter lengths of a size branch off its longest run (WSD)
    # Sizes of a budget range from N*/wide to N*·wide.
    wide: Annotated[float, Field(ge=2, allow_inf_nan=False)] = 8.0
    set: tuple[str, ...] = ()  # settings of every run
    data: Name | None = None  # prepared data, which also determines the vocabulary
    nproc: Annotated[int, Field(ge=1)] = 1  # processes per run, one per GPU
    cluster: Name | None = None  # in configs/cluster; without one, runs are planned for CPUs


@dataclass(frozen=True)
class Planned:
    """One run of a sweep."""

    name: str
    size: str
    N: int  # parameters, as scaling laws count them
    D: float  # tokens
    C: float  # FLOPs
    lr: float
    warmup_steps: int
    batch_tokens: int
    steps: int
    memory_bytes: int  # per rank, at ZeRO-1
    mfu: float | None  # estimated or given, if the cluster's GPUs are known
    hours: float | None
    cost: float  # FLOPs that this run adds: C without the part that its trunk computes
    trunk: str | None = None  # the run that this one branches off
    begins: int = 0  # the step at which it branches off


def read(name: str | Path) -> Sweep:
    """Read a sweep file, or a shipped sweep by its name, such as `ladder`."""
    path = Path(name)
    folder = CONFIGS / "scaling"
    if path.name == str(name) and path.suffix != ".toml" and not path.is_file():
        path = folder / f"{name}.toml"
        if not path.exists():
            shipped = [p.stem for p in sorted(folder.glob("*.toml")) if "kind" in read_toml(p)]
            raise ConfigError(
                f"sweep={str(name)!r} is neither a file nor a shipped sweep"
                f"{nearest(str(name), shipped)}"
            )
    sweep = validate(Sweep, read_toml(path), where=str(path))
    for setting, problem in _problems(sweep):
        raise ConfigError(f"{setting} in {path}: {problem}")
    return sweep


def _problems(sweep: Sweep) -> Iterator[tuple[str, str]]:
    """Yield every setting that conflicts with another one or with the sweep, and the problem."""
    tokens = f"tokens={list(sweep.tokens)}"
    # Both may be present if one is empty, as in a proposed ladder; a default does not count.
    if sweep.tokens and sweep.tokens_per_param and "tokens_per_param" in sweep.model_fields_set:
        other = f"tokens_per_param={list(sweep.tokens_per_param)}"
        yield tokens, f"{other} also sets the lengths of the runs; remove one of them"
    if sweep.tokens and sweep.kind == "isoflop":
        reason = "the budgets of an isoFLOP grid set the lengths of its runs"
        yield tokens, f"{reason}; remove it, or set kind = 'ladder'"
    if sweep.budgets and sweep.kind == "ladder":
        remedy = "remove it, or set kind = 'isoflop'"
        yield f"budgets={list(sweep.budgets)}", f"a ladder has sizes and lengths; {remedy}"
    if len(set(sweep.sizes)) < len(sweep.sizes):
        yield f"sizes={list(sweep.sizes)}", "a size occurs twice; remove one"
    seen: set[str] = set()
    for text in sweep.set:
        for name, _ in dotted(parse_set(text)):  # one text may set a whole table
            key = name.strip()
            if key in OWN_KEYS:
                yield f"set={text}", f"a sweep sets {key} of every run itself; use {OWN_KEYS[key]}"
            if key == "init" or key.startswith("lora."):
                yield f"set={text}", "runs of a sweep start from random weights; remove it"
            if key in seen:
                yield f"set={text}", f"{key} is set twice; remove one of them"
            seen.add(key)


def plan(sweep: Sweep, best: Best | None = None, mfu: float | None = None) -> list[Planned]:
    """Return every run of the sweep. With `mfu`, the times follow from it, not from an estimate."""
    configs = configs_of(sweep)
    if sweep.kind == "ladder":
        runs = _ladder(sweep, configs, mfu)
    else:
        if len(sweep.budgets) < 3:
            text = f"budgets={list(sweep.budgets)}: a law through valleys needs three budgets"
            raise ConfigError(f"{text}; add larger ones")
        if len(sweep.tokens_per_param) != 1:
            raise ConfigError(
                f"tokens_per_param={list(sweep.tokens_per_param)}: an isoFLOP grid has one, its "
                f"guess of the best split; give one, such as [20]"
            )
        runs = [run for C in sweep.budgets for run in _valley(sweep, configs, C, best, mfu)]
    for name, many in Counter(run.name for run in runs).items():
        if many > 1:  # they would share a directory
            raise ConfigError(
                f"{many} runs would be named {name}: two budgets or lengths are almost equal; "
                f"leave one of them out"
            )
    return branched(sweep, configs, runs)


def configs_of(sweep: Sweep) -> dict[str, RunSpec]:
    """Return the settings of every size of the sweep, or of all sizes if it names none."""
    return _configs(sweep.sizes, sweep.arch, sweep.data, sweep.cluster, sweep.set)


@lru_cache(4)  # planning within limits plans the same sizes many times
def _configs(
    sizes: tuple[str, ...], arch: str, data: str | None, cluster: str | None, sets: tuple[str, ...]
) -> dict[str, RunSpec]:
    # The data determines the vocabulary, as in `launch pretrain`.
    pieces = Corpus.open(Path(data)).manifest.tokenizer.vocab if data else None
    return {
        name: load(size=name, arch=arch, cluster=cluster, sets=sets, pieces=pieces)
        for name in sizes or names("size")
    }


def _ladder(sweep: Sweep, configs: dict[str, RunSpec], mfu: float | None) -> list[Planned]:
    if not sweep.sizes:
        raise ConfigError("sizes=[] in a ladder; name them, such as sizes = ['tiny', '1m', '3m']")
    if not (sweep.tokens or sweep.tokens_per_param):
        raise ConfigError("tokens_per_param=[] in a ladder; give one length or more, such as [20]")
    runs = []
    for name, config in configs.items():
        N = account.params(config.model).scaling
        lengths = [(f"{ratio:g}x", ratio * N) for ratio in sweep.tokens_per_param]
        if sweep.tokens:
            lengths = [(count(tokens), tokens) for tokens in sweep.tokens]
        for label, tokens in lengths:
            runs.append(_planned(sweep, config, f"{name}-{label}", tokens, mfu))
    return runs


def branched(sweep: Sweep, configs: dict[str, RunSpec], runs: list[Planned]) -> list[Planned]:
    """Let shorter runs of a size branch off its longest run, with that run's rate and warmup."""
    placed = {run.name: run for run in runs}
    for name, config in configs.items():
        schedule = config.optim.schedule
        optimizer = config.optim.optimizer
        # By Muon's rule, the weight decay depends on the length of the run from its first step.
        if isinstance(optimizer, MuonSpec) and optimizer.decay == "auto":
            continue
        left = sorted((run for run in runs if run.size == name), key=lambda run: -run.steps)
        while sweep.trunk and isinstance(schedule, WSDSpec) and left:
            longest, *others = left
            left = []
            for run in others:
                begins = decay_start(schedule, run.steps)
                same = run.batch_tokens == longest.batch_tokens and run.lr <= LR_RATIO * longest.lr
                if not same or not 2 * longest.warmup_steps <= begins < run.steps:
                    left.append(run)  # may branch off another run
                    continue
                # A branch trains only its decay, so it adds only this share of its FLOPs.
                share = 1 - begins / run.steps
                placed[run.name] = replace(
                    run,
                    lr=longest.lr,
                    warmup_steps=longest.warmup_steps,
                    trunk=longest.name,
                    begins=begins,
                    cost=run.C * share,
                    hours=None if run.hours is None else run.hours * share,
                )
    return list(placed.values())


def _valley(
    sweep: Sweep, configs: dict[str, RunSpec], C: float, best: Best | None, mfu: float | None
) -> list[Planned]:
    """Plan the runs of one budget, with sizes around N*; raise if too few lie on either side."""
    sizes = {name: account.params(config.model).scaling for name, config in configs.items()}
    center = best(C) if best else _guess(configs, C, sweep.tokens_per_param[0])
    chosen = [name for name, N in sizes.items() if 1 / sweep.wide <= N / center <= sweep.wide]
    below = sum(sizes[name] < center for name in chosen)
    above = sum(sizes[name] > center for name in chosen)
    for side, found, remedy in (("below", below, "raise"), ("above", above, "lower")):
        if found < SIDE:
            raise SizesError(
                f"budget {power(C)}: {found} of the sizes lie {side} N* ≈ {count(center)}, but "
                f"{SIDE} are needed to find the minimum; {remedy} the budget, name more sizes, or "
                f"set wide above {sweep.wide:g}",
                side,
            )
    label = f"{C:.1e}".replace("+", "")
    runs = []
    for name in chosen:
        tokens = C / training_flops(configs[name]).model
        runs.append(_planned(sweep, configs[name], f"{label}-{name}", tokens, mfu))
    return runs


def _guess(configs: dict[str, RunSpec], C: float, ratio: float) -> float:
    """Return the N for which C is enough for `ratio` tokens per parameter, by interpolation."""
    specs = configs.values()
    pairs = [(account.params(s.model).scaling, training_flops(s).model) for s in specs]
    table = np.array(sorted((float(ratio * N * flops), float(N)) for N, flops in pairs))
    costs, sizes = np.log(table).T
    return float(np.exp(np.interp(np.log(C), costs, sizes)))


def _planned(sweep: Sweep, config: RunSpec, name: str, tokens: float, mfu: float | None) -> Planned:
    length = {"tokens": max(1, int(tokens)), "steps": None, "flops": None}
    train = config.train.model_copy(update=length)
    asked = config.model_copy(update={"train": train})
    run = resolve(asked, ranks=sweep.nproc, gpu=sweep.cluster is not None)
    train = run.train
    D = float(train.steps * train.batch_tokens)
    if train.batch_tokens > 2 * tokens:
        remedy = "a larger budget"
        if sweep.kind == "ladder":
            remedy = "more tokens (tokens_per_param counts per parameter)"
        raise ConfigError(
            f"{name} has {count(tokens)} tokens, and one step of {run.model.size} has "
            f"{count(train.batch_tokens)}; give {remedy}, or a smaller train.batch_tokens in `set`"
        )
    C = D * training_flops(run).model
    layout = Layout(sweep.nproc, 1, micro_batch=train.micro_batch, recompute=train.recompute)
    hours = None
    peak = run.cluster.peak_flops
    if run.cluster.rates and peak:
        if mfu:
            step_s = C / train.steps / (peak * sweep.nproc * mfu)
        else:
            step_s = max(estimate(run, layout).step_s, LAYER_S * run.model.layers)
        hours = train.steps * step_s / 3600
        mfu = C / (hours * 3600 * peak * sweep.nproc)
    return Planned(
        name=name,
        size=run.model.size,
        N=account.params(run.model).scaling,
        D=D,
        C=C,
        lr=run.optim.lr,
        warmup_steps=run.optim.schedule.warmup_steps,
        batch_tokens=train.batch_tokens,
        steps=train.steps,
        memory_bytes=memory(run, layout).total,
        mfu=mfu,
        hours=hours,
        cost=C,
    )


def within(
    sweep: Sweep,
    flops: float | None,
    hours: float | None = None,
    best: Best | None = None,
    mfu: float | None = None,
) -> Sweep:
    """Return the isoFLOP sweep with four budgets, each 4× the last, within the FLOPs and hours."""
    for key, value, example in (("budget", flops, "1e19"), ("hours", hours, "6")):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{key}={value:g} must be a number above zero, such as {example}")
    if sweep.kind == "ladder":
        raise ConfigError(
            "budget and hours lay out an isoFLOP grid, but kind is 'ladder', whose cost follows "
            "from its sizes and tokens; leave them out, or set kind = 'isoflop'"
        )
    most = flops or math.inf
    if hours is not None:
        cluster = load(size="tiny", cluster=sweep.cluster).cluster if sweep.cluster else None
        if cluster is None or cluster.peak_flops is None:
            raise ConfigError(
                "hours needs the GPUs' speed; set cluster = 'h100' (configs/cluster) in the sweep"
            )
        most = min(most, hours * 3600 * sweep.nproc * cluster.peak_flops)
    refused: list[ConfigError] = []
    least = ""
    for step in range(60):
        # Try large budgets first; 60 steps of 1.2 go down by a factor of about 50,000.
        top = most / 4 / 1.2**step
        budgets = tuple(top / SPACING**i for i in (3, 2, 1, 0))
        tried = sweep.model_copy(update={"budgets": budgets})
        try:
            runs = plan(tried, best, mfu)
        except ConfigError as error:  # no size is near enough; a smaller budget may work
            refused.append(error)
            continue
        cost = sum(run.cost for run in runs)
        time = sum(run.hours or 0 for run in runs)
        if cost <= most and time <= (hours or math.inf):
            return tried
        least = f"the least takes {power(cost)} FLOPs"
        least += f" and {time:.2g} hours" if time else ""
    given = {"budget": flops, "hours": hours}
    asked = " and ".join(f"{key}={value:.3g}" for key, value in given.items() if value)
    if least:
        text = f"{asked} is not enough for four budgets of these sizes ({least})"
        raise ConfigError(f"{text}; raise it, or name other sizes")
    raise _no_grid(asked, refused)


def _no_grid(asked: str, refused: list[ConfigError]) -> ConfigError:
    """Explain why every grid within the limits was refused; `refused` begins with the largest."""
    for error in refused:
        if not isinstance(error, SizesError):  # another limit would not help
            return error
    sides = {error.side for error in refused if isinstance(error, SizesError)}
    # The reason for the budget that is nearest to the sizes names the best remedy.
    reason = str(refused[-1] if sides == {"above"} else refused[0])
    if len(sides) == 2:
        reason = "large ones have too few sizes above N*, small ones below; add sizes or raise wide"
    return ConfigError(f"{asked} leaves no four budgets of these sizes: {reason}")
