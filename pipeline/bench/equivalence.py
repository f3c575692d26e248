"""Check that all layouts train the same: compare some steps of each with one plain torch process.

`launch verify` starts the ranks. They run layout after layout in one process group. On a CPU the
plain run (plain_run.py) is computed once; on GPUs every rank computes it for itself.
"""

import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from pipeline.bench.plain_run import Trajectory, draw_batch, step_count, train_plain
from pipeline.config.layers import merge, validate
from pipeline.config.schema import RunConfig
from pipeline.parallel.build_engine import build_engine
from pipeline.parallel.engine import Engine, accept_always
from pipeline.parallel.world import World, leave
from pipeline.process import end_with_parent, one_node, redirect_output
from pipeline.train.measure import cut

# Largest difference of a loss (absolute), of a gradient norm (relative) and of gradients (relative
# to the largest of their group). bf16 rounds at 2^-9.
BOUND = {"fp32": 1e-5, "bf16": 5e-2}
# The deliberate error of the control: a factor on the gradients of the experts, or of the FFNs.
_CONTROL = {"fp32": 1.01, "bf16": 1.1}


@dataclass(frozen=True, slots=True)
class Layout:
    zero: int = 1
    ep: int = 1
    sp: int = 1
    engine: str = "deepspeed"
    control: bool = False  # with a deliberate error

    @property
    def name(self) -> str:
        if self.control:
            return f"control: {'experts' if self.ep > 1 else 'ffn'} mis-scaled"
        stage = "accelerate" if self.engine == "accelerate" else f"zero {self.zero}"
        ep = f" ep {self.ep}" if self.ep > 1 else ""
        sp = f" sp {self.sp}" if self.sp > 1 else ""
        return stage + ep + sp


REFERENCE = Layout(0, engine="accelerate")


def list_layouts(config: RunConfig, nproc: int) -> list[Layout]:
    """Return the reference, every layout that these processes allow, and the control."""
    eps = config.model.expert_degrees(nproc)
    sps = config.model.sequence_degrees(nproc)
    least = config.parallel.offload.least_zero
    found = [Layout(zero, ep, sp) for sp in sps for ep in eps for zero in range(least, 4)]
    # Accelerate's DDP neither offloads nor keeps fp32 masters of bf16 weights.
    if config.train.dtype == "fp32" and not least:
        found = [*(Layout(0, 1, sp, "accelerate") for sp in sps), *found]
    # The control has to differ, which shows that the comparison can fail at all.
    return [*found, Layout(max(1, least), eps[-1], control=True)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far a layout is from the plain run."""

    layout: str
    loss: float  # the largest difference of any step
    grad_norm: float
    # By group of parameters. In bf16 only of the first step: after it, weights differ by rounding.
    gradients: dict[str, float]
    tokens: bool  # every rank saw its rows of the same batches
    bound: float
    control: bool
    referee: float | None = None  # the largest difference from the reference, if it ran

    @property
    def differs(self) -> bool:
        worst = _worst(self.loss, self.grad_norm, *self.gradients.values(), self.referee or 0.0)
        return not (worst <= self.bound and self.tokens)

    @property
    def passed(self) -> bool:
        return self.differs == self.control


def _worst(*differences: float) -> float:
    """Return the largest. NaN counts as infinite: `max` alone may skip it."""
    return max(math.inf if math.isnan(each) else each for each in differences)


class _GradientCheck:
    """An `accept` that compares the gradients of the first steps with the expected runs'."""

    def __init__(self, engine: Engine, expected: Sequence[Trajectory], steps: int) -> None:
        self._engine = engine
        self._expected = expected
        self._steps = steps
        self.gradients: list[dict[str, Tensor]] = []  # by step
        self.differences: list[list[dict[str, float]]] = []  # by step and expected run, by group

    @property
    def at_last_step(self) -> bool:
        return len(self.gradients) == self._steps - 1

    def __call__(self, nll: Tensor, norm: Tensor) -> Tensor:
        step = len(self.gradients)
        if step < self._steps:
            module = self._engine.module
            found = {name: grad.to("cpu", copy=True) for name, grad in self._engine.gradients()}
            self.gradients.append(found)
            wanted = [run.gradients[step] for run in self._expected]
            self.differences.append([_differences(found, each, module) for each in wanted])
        return accept_always(nll, norm)

    def scale_last_gradients(self, layout: Layout, factor: float) -> None:
        """Introduce the error of the control, in the last compared step only."""
        part = ".experts." if layout.ep > 1 else ".ffn."
        for name, parameter in self._engine.module.named_parameters():
            if part in name:
                parameter.register_hook(  # type: ignore[no-untyped-call]
                    lambda grad: grad * (factor if self.at_last_step else 1.0)
                )


def train_layout(
    config: RunConfig, expected: Sequence[Trajectory], layout: Layout, world: World
) -> tuple[Outcome, Trajectory]:
    """Train in a layout; return its differences from the expected runs, and its own numbers. The
    expected runs are the plain one and, if it has run, the reference."""
    parallel = {"zero": layout.zero, "ep": layout.ep, "sp": layout.sp, "engine": layout.engine}
    config = validate(RunConfig, merge(config.model_dump(), {"parallel": parallel}))
    dtype = config.train.dtype
    steps = step_count(config)
    engine = build_engine(config, world)
    check = _GradientCheck(engine, expected, steps if dtype == "fp32" else 1)
    if layout.control:
        check.scale_last_gradients(layout, _CONTROL[dtype])
    run = Trajectory()
    same_tokens = True
    for step in range(steps):
        batch = draw_batch(config, step, world)
        update = engine.update(cut(batch, config, world), config.optim.lr, check)
        run.losses.append(world.sum(update.nll).item() / world.size)
        run.norms.append(float(update.grad_norm))
        # Ranks that share sequences read the same rows, so each hash counts `sp` times.
        hashes = sum(world.gather(batch.hash))
        same_tokens &= (hashes - expected[0].hashes[step] * layout.sp) % 2**64 == 0
    if layout == REFERENCE:
        run.gradients.extend(check.gradients)
    # Each rank compares the gradients that it has. The worst of all ranks and steps counts.
    by_step = [step for steps in world.gather(check.differences) for step in steps]
    losses = []
    norms = []
    groups = []
    for number, want in enumerate(expected):
        pairs = zip(run.losses, want.losses, strict=True)
        losses.append(_worst(*(abs(own - other) for own, other in pairs)))
        pairs = zip(run.norms, want.norms, strict=True)
        norms.append(_worst(*(abs(own - other) / other for own, other in pairs)))
        names = check.differences[0][number]
        groups.append({name: _worst(*(step[number][name] for step in by_step)) for name in names})
    outcome = Outcome(
        layout=layout.name,
        loss=losses[0],
        grad_norm=norms[0],
        gradients=groups[0],
        tokens=same_tokens,
        bound=BOUND[dtype],
        control=layout.control,
        referee=_worst(losses[1], norms[1], *groups[1].values()) if len(expected) > 1 else None,
    )
    return outcome, run


def _differences(
    gradients: dict[str, Tensor], want: dict[str, Tensor], module: torch.nn.Module
) -> dict[str, float]:
    """Return the largest difference of each group, relative to the group's largest gradient."""
    shared = {name: p.expert[0] for name, p in module.named_parameters() if hasattr(p, "expert")}
    difference: dict[str, float] = {}
    largest: dict[str, float] = {}
    for name, gradient in gradients.items():
        whole = want[name]
        # This rank may have some of the experts; the expected run has all of them.
        if name in shared:
            local = len(gradient.view(-1, *whole.shape[1:]))
            whole = whole[shared[name] : shared[name] + local]
        group = _group(name)
        off = (gradient.float().view_as(whole) - whole.float()).abs().max().item()
        difference[group] = _worst(difference.get(group, 0.0), off)
        largest[group] = max(largest.get(group, 0.0), want[name].abs().max().item())
    # A group may have no gradients at all, such as experts that got no token.
    return {group: difference[group] / max(largest[group], 1e-12) for group in difference}


def _group(name: str) -> str:
    """Return the group of a parameter. Gains and biases have a group of their own, because an error
    in their gradients would not show beside the larger ones of a matrix."""
    for part in ("embedding", "head", "experts", "router", "shared", "ffn", "attention"):
        if f".{part}." in f".{name}" and not name.endswith((".gain", ".bias")):
            return part
    return "vectors"


def compare_layouts(
    config: RunConfig, layouts: Sequence[Layout], nproc: int, output: Path
) -> Iterator[Outcome]:
    """Yield outcomes as they are known. The output of the engines goes to a file.

    The ranks are forked, because importing everything in each would take longer than a layout. On
    GPUs they are spawned: CUDA does not survive a fork."""
    import torch._dynamo

    import pipeline.parallel.ddp
    import pipeline.parallel.zero  # noqa: F401 imported once, before the fork

    # If one rank fails, torch logs that it ends the others; the error itself is more useful.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    method = "spawn" if torch.cuda.is_available() else "fork"
    outcomes = get_context(method).SimpleQueue()
    torch.set_num_threads(1)  # the ranks share the cores, and threads do not survive a fork
    plain = train_plain(config, torch.device("cpu")) if method == "fork" else None
    with TemporaryDirectory(prefix="isoflop-") as private:
        environments = [one_node(rank, nproc, Path(private) / "store") for rank in range(nproc)]
        ranks = start_processes(  # type: ignore[no-untyped-call]
            _run_rank,
            (config, layouts, plain, environments, output, outcomes),
            nproc,
            join=False,
            start_method=method,
        )
        done = False
        while not done:
            # `join` raises the error of a failed rank. Empty the queue in between, because a rank
            # blocks when the queue's pipe is full.
            done = ranks.join(0.2)
            while not outcomes.empty():
                yield outcomes.get()


def _run_rank(
    rank: int,
    config: RunConfig,
    layouts: Sequence[Layout],
    plain: Trajectory | None,
    environments: list[dict[str, str]],
    output: Path,
    outcomes: Any,
) -> None:
    end_with_parent()
    redirect_output(output)
    torch.set_num_threads(1)
    os.environ |= environments[rank]
    world = World.from_environment(os.environ)
    expected = [plain or train_plain(config, world.device)]
    for layout in layouts:
        outcome, run = train_layout(config, expected, layout, world)
        if layout == REFERENCE:
            expected.append(run)
        if world.first:
            outcomes.put(outcome)
    leave()
