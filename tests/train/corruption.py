"""`python -m tests.train.corruption FLIPS STEPS`: every engine skips a step and is struck by flipped bits, on four
ranks, and DDP trains in peace, on two; rank 0 prints what was seen.

One launch for all: importing is most of what it costs. Of four ranks a majority can name the odd one; of two that share
experts none can, and both are named.
"""

import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from pipeline.config.load import load
from pipeline.config.schema import RunConfig
from pipeline.objective.batch import Batch
from pipeline.parallel.build import engine
from pipeline.parallel.engine import Engine, Micro
from pipeline.parallel.world import World
from pipeline.recipe import resolve
from pipeline.track.tracker import Fan
from pipeline.train.guard import Guard
from pipeline.train.loop import Loop
from pipeline.train.replicas import DivergenceError, Replicas
from pipeline.train.rundir import RunDir
from pipeline.train.stop import Stop
from tests.worlds import fork

LAYOUTS = [("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3), ("accelerate", 0)]
SHARED = [("deepspeed", 0, 2), ("deepspeed", 1, 2)]  # experts, each on two ranks
VOCAB, SEQ = 64, 16
WORLD: World


def config(engine: str, zero: int, ep: int = 1) -> RunConfig:
    sets = ("model.layers=1", f"model.vocab={VOCAB}", f"model.seq={SEQ}", f"train.batch_tokens={WORLD.size * SEQ}",
            "train.micro_batch=1", "train.steps=1000", "optim.lr=0.001", f"parallel.zero={zero}",
            f"parallel.engine={engine}", "train.dtype=fp32", f"parallel.ep={ep}")  # fmt: skip
    return resolve(load(size="tiny", arch="moe" if ep > 1 else "dense", sets=sets), ranks=WORLD.size, gpu=False)


def batch(step: int) -> list[Micro]:
    """One row of this rank: a walk that goes one or two tokens on, which can be learnt in part."""
    source = torch.Generator().manual_seed(step * WORLD.size + WORLD.rank)
    row = torch.randint(1, 3, (1, SEQ + 1), generator=source).cumsum(1) % VOCAB
    return [Micro(row[:, :-1], row[:, 1:])]


def state(worker: Any) -> list[Tensor]:
    """Weights, their fp32 masters and Adam's moments and counts, wherever the engine keeps them."""
    held, wrapper = worker.held(), worker._optimizer
    optimizer = getattr(wrapper, "optimizer", wrapper)
    masters = [p for group in optimizer.param_groups for p in group["params"]]
    moments = [m for p in masters for m in optimizer.state[p].values()]
    return [t.detach().clone() for t in (*held.everywhere, *held.here, *held.experts, *masters, *moments)]


@contextmanager
def nan_on(rank: int) -> Iterator[None]:
    def poison(module: nn.Module, _inputs: object, output: Tensor) -> Tensor | None:
        return output * torch.nan if isinstance(module, nn.Embedding) and rank == WORLD.rank else None

    handle = register_module_forward_hook(poison)
    yield
    handle.remove()


def skipped(name: str, zero: int) -> dict[str, bool]:
    """A NaN on one rank: all refuse the step, nothing changes, and what follows is as if it had never been."""
    struck, spared, guard = engine(config(name, zero), WORLD), engine(config(name, zero), WORLD), Guard([])
    said: list[str] = []

    def accept(nll: Tensor, norm: Tensor) -> bool:
        loss, norm = (WORLD.sum([], first=torch.stack((nll, norm))) / WORLD.size).tolist()
        said.append(guard.judge(loss, norm))
        return not said[-1]

    for worker in (struck, spared):
        worker.update(batch(0), 1e-3, accept)
    before = state(struck)
    with nan_on(rank=1):
        struck.update(batch(9), 1e-3, accept)
    untouched = all(map(torch.equal, before, state(struck)))
    losses = [[worker.update(batch(step), 1e-3, accept).nll.item() for step in (1, 2)] for worker in (struck, spared)]
    return {
        "refused": said == ["", "", "loss is nan", "", "", "", ""],
        "untouched": untouched,
        "same after": losses[0] == losses[1] and all(map(torch.equal, state(struck), state(spared))),
    }


def flip(tensors: list[Tensor], source: random.Random) -> tuple[Tensor, int, int]:
    words = source.choice(tensors).detach().reshape(-1).view(torch.int32)
    index, bit = source.randrange(len(words)), source.randrange(32)
    words[index] ^= _bit(bit)
    return words, index, bit


def _bit(bit: int) -> int:
    return (1 << bit) - (1 << 32 if bit == 31 else 0)  # as a signed word


def strike(worker: Engine, replicas: Replicas, step: int, where: str, mine: random.Random | None) -> str:
    """What was said of a step in which a bit flips on one rank, the one that has a source of its own."""
    held, done, told = worker.held(), [], []
    if where == "result" and mine:  # as if its optimizer had computed something else
        done = [flip([*held.experts] or held.everywhere, mine)]
    replicas.remember()
    if where == "memory" and mine:  # weights that change while nobody writes
        done = [flip([*held.everywhere, *held.here, *held.experts], mine)]

    def accept(_nll: Tensor, _norm: Tensor) -> bool:
        if where == "gradient" and mine:
            flip([*worker.held().expert_gradients] or worker.held().gradients, mine)
        if WORLD.sum([], first=replicas.look()).any():
            told.append(str(replicas.blame(step)))
        return not told

    worker.update(batch(step), 1e-3, accept)
    for words, index, bit in done:
        words[index] ^= _bit(bit)
    return told[0] if told else ""


def flips(count: int, name: str, zero: int, ep: int = 1) -> int:
    """How many of so many flips were caught before the step, with the struck rank named."""
    worker, caught, source = engine(config(name, zero, ep), WORLD), 0, random.Random(zero)
    replicas = Replicas(worker, WORLD, ep)
    for step in range(count):
        where = ["memory", "result", "gradient"][step % (3 if zero == 0 else 2 if zero < 3 else 1)]
        victim, seed = source.randrange(WORLD.size), source.random()  # drawn on every rank
        told = strike(worker, replicas, step, where, random.Random(seed) if victim == WORLD.rank else None)
        both = f"of ranks {victim % 2}, {victim % 2 + 2} differ, and no majority"
        caught += f"of rank {victim} " in told or (ep == 2 and both in told)
        assert worker.update(batch(step), 1e-3).nll.isfinite(), "the flip was not taken back"
    return caught


def clean(count: int) -> list[str]:
    """Alarms in so many good steps, under DDP: it has the most to compare, gradients too."""
    worker, guard, alarms = engine(config("accelerate", 0), WORLD), Guard([]), []
    replicas = Replicas(worker, WORLD, 1)

    def accept(nll: Tensor, norm: Tensor) -> bool:
        first = torch.cat((torch.stack((nll.double(), norm.double())), replicas.look()))
        loss, norm, *wrong = (WORLD.sum([], first=first) / WORLD.size).tolist()
        if reason := guard.judge(loss, norm) or (any(wrong) and str(replicas.blame(0))):
            alarms.append(reason)
        guard.hear({"kind": "step", "loss": loss, "grad_norm": norm})
        return True

    for step in range(count):
        worker.update(batch(step), 1e-3, accept)
        replicas.remember()
    return alarms


def looped(save: bool) -> str:
    """What the real loop says of a flip between two steps, or before a checkpoint; it needs no more than this here."""
    worker = engine(config("deepspeed", 1), WORLD)
    loop = Loop(config("deepspeed", 1), RunDir(Path()), worker, WORLD, Fan([]), Stop(), None, Guard([]), None)
    rows = [Batch(*micro[:2], 0) for step in range(2) for micro in batch(step)]
    loop.step(0, rows[0], 0.0)
    if WORLD.rank == 1:
        flip(worker.held().everywhere, random.Random(1))
    try:
        loop.save(1) if save else loop.step(1, rows[1], 0.0)
    except DivergenceError as error:
        return str(error)
    return ""


def routed(zero: int) -> str:
    """What is said of a flip in a router's balancing counts, which every rank must have alike."""
    worker: Any = engine(config("deepspeed", zero, 2), WORLD)
    replicas = Replicas(worker, WORLD, 2)
    if WORLD.rank == 1:
        flip([worker.module.routers()[0].steps], random.Random(zero))
    return str(replicas.blame(1)) if WORLD.sum([], first=replicas.look()).any() else ""


def war(world: World) -> None:
    global WORLD
    WORLD, each = world, int(sys.argv[1]) // len(LAYOUTS)
    say(
        skipped={f"{name} {zero}": skipped(name, zero) for name, zero in LAYOUTS},
        caught={str(layout): flips(each, *layout) for layout in [*LAYOUTS, *SHARED]},
        looped=[looped(save=False), looped(save=True)],
        routed=[routed(1), routed(3)],
    )


def peace(world: World) -> None:
    global WORLD
    WORLD = world
    say(alarms=clean(int(sys.argv[2])))


def say(**seen: object) -> None:
    if WORLD.first:
        print("RESULT", json.dumps(seen), flush=True)


if __name__ == "__main__":
    import pipeline.parallel.ddp
    import pipeline.parallel.zero  # noqa: F401 before the fork

    torch.set_num_threads(1)  # threads do not survive it
    fork(4, war)
    fork(2, peace)
