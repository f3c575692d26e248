"""Whether layouts train the same training: each is run for some steps beside one plain torch process.

`launch verify` starts the processes; each of them runs layout after layout in one group, and computes the plain
reference for itself: same weights, same batches, torch's own AdamW and clipping, no engine.
"""

import logging
import math
import os
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from pipeline.config.layers import merge, validate
from pipeline.config.schema import RunConfig
from pipeline.model.build import build_model, init_weights
from pipeline.model.stack import Losses
from pipeline.objective.batch import Batch
from pipeline.optim.groups import adamw
from pipeline.parallel.build_engine import build_engine
from pipeline.parallel.engine import accept_always, balance
from pipeline.parallel.world import World
from pipeline.process import end_with_parent, one_node, redirect_output
from pipeline.train.evaluation import cut

# of the loss absolute, of the gradient norm relative, of gradients over the largest of their group; bf16 rounds at 2^-9
BOUND = {"fp32": 1e-5, "bf16": 5e-2}
STEPS = 3
_CONTROL = {
    "fp32": 1.01,
    "bf16": 1.1,
}  # on the experts' gradients, or the FFN's: an error that must be seen


@dataclass(frozen=True, slots=True)
class Layout:
    zero: int = 1
    ep: int = 1
    sp: int = 1
    engine: str = "deepspeed"
    control: bool = False  # a deliberate error

    @property
    def name(self) -> str:
        if self.control:
            return f"control: {'experts' if self.ep > 1 else 'ffn'} mis-scaled"
        stage = "accelerate" if self.engine == "accelerate" else f"zero {self.zero}"
        return stage + f" ep {self.ep}" * (self.ep > 1) + f" sp {self.sp}" * (self.sp > 1)


REFEREE = Layout(0, engine="accelerate")


def layouts(config: RunConfig, nproc: int) -> list[Layout]:
    """The referee, every one that these processes can take, and the negative control."""
    eps, sps = config.model.degrees(nproc), config.model.shares(nproc)
    least = config.parallel.offload.least_zero
    found = [Layout(zero, ep, sp) for sp in sps for ep in eps for zero in range(least, 4)]
    if config.train.dtype == "fp32" and not least:
        found = [*(Layout(0, 1, sp, "accelerate") for sp in sps), *found]
    return [*found, Layout(max(1, least), eps[-1], control=True)]


@dataclass(frozen=True, slots=True)
class Outcome:
    layout: str
    loss: float  # the largest difference of any step
    grad_norm: float
    gradients: dict[
        str, float
    ]  # by group; in bf16, where the weights soon round apart, at the first step
    tokens: bool  # every rank saw its rows of the same batches
    bound: float
    control: bool
    referee: float | None = (
        None  # the largest difference of all these from accelerate's run, where it ran
    )

    @property
    def differs(self) -> bool:
        worst = max(
            self.loss, self.grad_norm, *self.gradients.values(), self.referee or 0.0, key=weight
        )
        return not (worst <= self.bound and self.tokens)

    @property
    def passed(self) -> bool:
        return self.differs == self.control


@dataclass(frozen=True, slots=True)
class Run:
    """What others are held against: one process with every row, or the referee."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]  # of each step, in host memory
    hashes: list[int]


def weight(difference: float) -> float:
    """By which the worst is found: NaN, which `max` alone may pass over, is below no bound."""
    return math.inf if math.isnan(difference) else difference


def plain(config: RunConfig, device: torch.device) -> Run:
    assert config.train.loss_chunk != "auto"
    alone = World(0, 1, device)
    dtype = torch.bfloat16 if config.train.dtype == "bf16" else torch.float32
    model = build_model(
        config.model, z_loss=config.optim.z_loss, loss_chunk=config.train.loss_chunk
    )
    init_weights(model, config.model, config.seed)
    model.to(device, dtype)
    masters = deepcopy(model).float()
    optimizer = adamw(masters, config)
    losses, norms, hashes, gradients = [], [], [], list[dict[str, Tensor]]()
    for step in range(STEPS):
        batch = _batch(config, step, alone)
        micros, nlls, routings = cut(batch, config, alone), [], []
        for each in micros:
            out: Losses = model(*each)
            (out.total / len(micros)).backward()  # type: ignore[no-untyped-call]
            nlls.append(out.nll.item())
            routings.append(out.routing)
        # a copy: on a CPU nothing else makes one
        gradients.append(
            {
                n: p.grad.to("cpu", copy=True)
                for n, p in model.named_parameters()
                if p.grad is not None
            }
        )
        for weight, master in zip(model.parameters(), masters.parameters(), strict=True):
            master.grad, weight.grad = None if weight.grad is None else weight.grad.float(), None
        norms.append(torch.nn.utils.clip_grad_norm_(masters.parameters(), config.optim.clip).item())
        optimizer.step()
        with torch.no_grad():
            for weight, master in zip(model.parameters(), masters.parameters(), strict=True):
                weight.copy_(master)
        balance(model, routings, alone)
        losses.append(sum(nlls) / len(nlls))
        hashes.append(batch.hash)
    return Run(losses, norms, gradients, hashes)


def held_against(
    config: RunConfig, wanted: Sequence[Run], layout: Layout, world: World
) -> tuple[Outcome, Run]:
    """By how much it differs from the plain run, and from the referee's if that is known; and what it gave."""
    over = {
        "parallel": {"zero": layout.zero, "ep": layout.ep, "sp": layout.sp, "engine": layout.engine}
    }
    config = validate(RunConfig, merge(config.model_dump(), over))
    lr = config.optim.lr
    assert isinstance(lr, float) and config.train.dtype in BOUND
    worker, mine, tokens = build_engine(config, world), Run([], [], [], []), True
    found: list[list[dict[str, float]]] = []  # by step, against each
    compared = STEPS if config.train.dtype == "fp32" else 1
    if layout.control:  # at the last step that is compared: those before it are as they should be
        part, factor = ".experts." if layout.ep > 1 else ".ffn.", _CONTROL[config.train.dtype]
        for name, parameter in worker.module.named_parameters():
            if part in name:
                parameter.register_hook(  # type: ignore[no-untyped-call]
                    lambda grad: grad * (factor if len(found) == compared - 1 else 1.0)
                )

    def look(nll: Tensor, norm: Tensor) -> Tensor:
        if (step := len(found)) < compared:
            gradients = {
                name: gradient.to("cpu", copy=True) for name, gradient in worker.gradients()
            }
            found.append(
                [_differences(gradients, want.gradients[step], worker.module) for want in wanted]
            )
            mine.gradients.append(gradients if layout == REFEREE else {})
        return accept_always(nll, norm)

    for step in range(STEPS):
        batch = _batch(config, step, world)
        update = worker.update(cut(batch, config, world), lr, look)
        mine.losses.append(world.sum([], first=update.nll).item() / world.size)
        mine.norms.append(float(update.grad_norm))
        tokens &= (
            sum(world.gather(batch.hash)) % 2**64 == wanted[0].hashes[step] * layout.sp % 2**64
        )
    everywhere = [each for steps in world.gather(found) for each in steps]
    losses, norms, groups = [], [], []
    for at, want in enumerate(wanted):
        losses.append(
            max((abs(a - b) for a, b in zip(mine.losses, want.losses, strict=True)), key=weight)
        )
        norms.append(
            max((abs(a - b) / b for a, b in zip(mine.norms, want.norms, strict=True)), key=weight)
        )
        groups.append(
            {
                group: max((each[at][group] for each in everywhere), key=weight)
                for group in found[0][at]
            }
        )
    referee = max(losses[1], norms[1], *groups[1].values(), key=weight) if len(wanted) > 1 else None
    bound = BOUND[str(config.train.dtype)]
    return Outcome(
        layout.name, losses[0], norms[0], groups[0], tokens, bound, layout.control, referee
    ), mine


def _differences(
    gradients: dict[str, Tensor], want: dict[str, Tensor], module: torch.nn.Module
) -> dict[str, float]:
    """The largest by group, over the largest gradient of the group."""
    shared = {name: p.expert for name, p in module.named_parameters() if hasattr(p, "expert")}
    off: dict[str, float] = {}
    size: dict[str, float] = {}
    for name, gradient in gradients.items():
        whole = want[name]
        if name in shared:
            whole = whole[
                shared[name][0] : shared[name][0] + len(gradient.view(-1, *whole.shape[1:]))
            ]
        group = _group(name)
        difference = (gradient.float().view_as(whole) - whole.float()).abs().max().item()
        off[group] = max(off.get(group, 0.0), difference, key=weight)
        size[group] = max(size.get(group, 0.0), want[name].abs().max().item())
    return {group: off[group] / max(size[group], 1e-12) for group in off}


def _group(name: str) -> str:
    for part in ("embedding", "head", "experts", "router", "shared", "ffn", "attention"):
        if f".{part}." in f".{name}" and not name.endswith((".gain", ".bias")):
            return part
    return "vectors"


def _batch(config: RunConfig, step: int, world: World) -> Batch:
    """Rows of a seeded draw, hashed as the loader hashes its own. In the second step every token is the same: all
    choose the same experts, and some ranks' get none."""
    seq, vocab, rows = config.model.seq, config.model.vocab, config.rows
    generator = torch.Generator().manual_seed(config.seed * 1000 + step)
    tokens = torch.randint(vocab, (rows, seq + 1), generator=generator)
    if step == 1:
        tokens = tokens[:1, :1].repeat(rows, seq + 1)
    reader, readers = world.reader(config.parallel.sp)
    mine = range(reader * rows // readers, (reader + 1) * rows // readers)
    digest = sum(xxhash.xxh3_64_intdigest(tokens[row].numpy().data, row) for row in mine)
    own = tokens[mine.start : mine.stop]
    return Batch(own[:, :-1].contiguous(), own[:, 1:].contiguous(), digest % 2**64)


def held(
    config: RunConfig, layouts: Sequence[Layout], nproc: int, noise: Path
) -> Iterator[Outcome]:
    """The outcomes as they are known; what engines print goes to a file. The processes are forked, since importing
    everything in each would take longer than a layout, except on GPUs: their driver does not survive that."""
    import torch._dynamo

    import pipeline.parallel.ddp
    import pipeline.parallel.zero  # noqa: F401 once, before the fork

    logging.getLogger("torch.multiprocessing.spawn").setLevel(
        logging.ERROR
    )  # that it ends the others of a group
    method = "spawn" if torch.cuda.is_available() else "fork"
    said = get_context(method).SimpleQueue()
    private = TemporaryDirectory(prefix="isoflop-")
    where = [one_node(rank, nproc, Path(private.name) / "store") for rank in range(nproc)]
    group = start_processes(
        _rank, (config, layouts, where, noise, said), nproc, join=False, start_method=method
    )  # type: ignore[no-untyped-call]
    while True:
        done = group.join(0.2)
        while not said.empty():
            yield said.get()
        if done:
            return


def _rank(
    rank: int,
    config: RunConfig,
    layouts: Sequence[Layout],
    where: list[dict[str, str]],
    noise: Path,
    said: Any,
) -> None:
    end_with_parent()
    redirect_output(noise)
    torch.set_num_threads(1)
    os.environ |= where[rank]
    world = World.from_environment(os.environ)
    wanted = [plain(config, world.device)]
    for layout in layouts:
        outcome, run = held_against(config, wanted, layout, world)
        if layout == REFEREE:
            wanted.append(run)
        if world.first:
            said.put(outcome)
