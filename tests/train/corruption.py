"""`python -m tests.train.corruption FLIPS STEPS`: on four ranks, every engine finds flipped bits; on two, it skips a
step, steps do not wait and DDP raises no alarm. Rank 0 prints the results.

One launch for all, because importing takes most of the time. Of four ranks, a majority names the one that differs; of
two ranks that share experts, both are named.
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

from pipeline.bench.step_profile import count_host_reads
from pipeline.config.layers import load
from pipeline.config.schema import RunConfig
from pipeline.objective.batch import Batch, Micro
from pipeline.parallel.build_engine import build_engine
from pipeline.parallel.engine import Engine
from pipeline.parallel.world import World
from pipeline.planner.check import resolve
from pipeline.process import StopRequest
from pipeline.runs.directory import RunDir
from pipeline.train.guard import DivergenceError, Guard, Replicas
from pipeline.train.loop import Loop
from tests.worlds import fork

LAYOUTS = [*(("deepspeed", zero) for zero in range(4)), ("accelerate", 0)]
# Without stage 2 in bf16: DeepSpeed has one optimizer for stages 1 and 2.
KINDS = [(*layout, "fp32") for layout in LAYOUTS]
KINDS += [("deepspeed", zero, "bf16") for zero in (0, 1, 3)]
DENSE = ("deepspeed", 1, "fp32", "dense")
SHARED = [("deepspeed", 0, 2), ("deepspeed", 1, 2)]  # experts, each on two ranks
VOCAB, SEQ = 64, 16
WORLD: World


def config(
    engine: str, zero: int, dtype: str = "fp32", arch: str = "dense", ep: int = 1
) -> RunConfig:
    sets = ("model.layers=1", f"model.vocab={VOCAB}", f"model.seq={SEQ}", f"train.batch_tokens={WORLD.size * SEQ}",
            "train.micro_batch=1", "train.steps=1000", "optim.lr=0.001", f"parallel.zero={zero}",
            f"parallel.engine={engine}", f"train.dtype={dtype}", f"parallel.ep={ep}",
            "train.log_every=1", "train.check_every=1", *(["model.ffn.experts=4"] if arch == "moe" else []))  # fmt: skip
    return resolve(load(size="27k", arch=arch, sets=sets), ranks=WORLD.size, gpu=False)


def batch(step: int) -> list[Micro]:
    """One row of this rank: a walk with steps of one or two tokens, which can be learned in part."""
    source = torch.Generator().manual_seed(step * WORLD.size + WORLD.rank)
    row = torch.randint(1, 3, (1, SEQ + 1), generator=source).cumsum(1) % VOCAB
    return [Micro(row[:, :-1], row[:, 1:])]


def rows(step: int) -> Batch:
    (micro,) = batch(step)
    return Batch(micro.tokens_BS, micro.targets_BS, hash=step)


class Heard(list[dict[str, Any]]):
    record = list.append


def looping(config: RunConfig, guard: Guard | None = None) -> tuple[Loop, Heard]:
    """Build the real loop with the minimum that it needs; return it and its records."""
    heard: Any = Heard()
    made = build_engine(config, WORLD), WORLD, heard, StopRequest(), None, guard or Guard([]), None
    return Loop(config, RunDir(Path()), *made), heard


def state(worker: Any) -> list[Tensor]:
    """Weights, their fp32 masters and Adam's moments and counts, wherever the engine keeps them."""
    held, wrapper = worker.local_tensors(), worker._optimizer
    optimizer = getattr(wrapper, "optimizer", wrapper)
    masters = [p for group in optimizer.param_groups for p in group["params"]]
    moments = [m for p in masters for m in optimizer.state[p].values()]
    tensors = (*held.copies, *held.own, *held.expert_copies, *masters, *moments)
    return [t.detach().clone() for t in tensors]


@contextmanager
def nan_on(rank: int) -> Iterator[None]:
    def poison(module: nn.Module, _inputs: object, output: Tensor) -> Tensor | None:
        struck = isinstance(module, nn.Embedding) and rank == WORLD.rank
        return output * torch.nan if struck else None

    handle = register_module_forward_hook(poison)
    yield
    handle.remove()


def skipped(name: str, zero: int, dtype: str) -> dict[str, bool]:
    """A NaN on one rank, and then a finite loss that is far too high: all ranks reject the step, nothing changes, not
    even the routers' counts, and later steps are not affected."""
    one = {"kind": "step", "loss": 4.2, "grad_norm": 1.0}
    usual = [{**one, "step": step} for step in range(-128, 0)]
    both = [looping(config(name, zero, dtype, "moe"), Guard(usual)) for _ in range(2)]
    (struck, heard), (spared, undisturbed) = both
    for loop, _ in both:
        loop.step(0, rows(0), 0.0)
    before = state(struck.engine)
    with nan_on(rank=1):
        struck.step(1, rows(9), 0.0)
    untouched = all(map(torch.equal, before, state(struck.engine)))
    struck.guard, guard = Guard([{**each, "loss": 1.0} for each in usual]), struck.guard
    struck.step(2, rows(9), 0.0)
    untouched &= all(map(torch.equal, before, state(struck.engine)))
    struck.settle()
    struck.guard = guard
    for loop, _ in both:
        loop.step(3, rows(1), 0.0)
        loop.step(4, rows(2), 0.0)
        loop.settle()
    nan, far = (record["reason"] for record in heard if record.get("event") == "skip")
    both = ([r["loss"] for r in records if r["kind"] == "step"] for records in (heard, undisturbed))
    same_losses = len({tuple(losses) for losses in both}) == 1
    same_state = all(map(torch.equal, state(struck.engine), state(spared.engine)))
    return {
        "refused": nan == "loss is nan" and far.startswith("loss 4.") and "usual 1" in far,
        "untouched": untouched,
        "same after": same_losses and same_state,
        "balanced": any(r.steps.any() for r in struck.engine.module.routers()),  # in a later step
    }


def waits(name: str, zero: int, dtype: str, arch: str) -> str:
    """Return where the real loop waits for its device in a step, apart from reading the step before."""
    loop, _ = looping(config(name, zero, dtype, arch))
    loop._routing_every = 1
    for step in range(2):  # in the first step, ZeRO-3 compares the operations of the ranks
        loop.step(step, rows(step), 0.0)
    return count_host_reads(lambda: loop.step(2, rows(2), 0.0), WORLD.device)


def flip(tensors: list[Tensor], source: random.Random) -> tuple[Tensor, int, Tensor]:
    """Flip a bit; return its place and the old value."""
    words = source.choice(tensors).detach().reshape(-1).view(torch.int32)
    index, bit = source.randrange(len(words)), source.randrange(32)
    before = words[index].clone()
    words[index] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)  # the words are signed
    return words, index, before


def strike(
    worker: Engine, replicas: Replicas, step: int, where: str, mine: random.Random | None
) -> str:
    """Return the error of a step in which a bit flips on the one rank that has its own random source."""
    held, done, messages = worker.local_tensors(), [], []
    if where == "result" and mine:  # the optimizer computed a wrong result
        done = [flip([*held.expert_copies] or held.copies, mine)]
    replicas.remember()
    if where == "memory" and mine:  # weights change without an update
        done = [flip([*held.copies, *held.own, *held.expert_copies], mine)]

    def accept(_nll: Tensor, _norm: Tensor) -> Tensor:
        if where == "gradient" and mine:
            now = worker.local_tensors()
            flip([*now.expert_gradient_copies] or now.gradient_copies, mine)
        comparison = replicas.compare()
        if wrong := WORLD.sum(comparison.flags).any():
            messages.append(str(replicas.blame(comparison, step)))
        return ~wrong

    worker.update(batch(step), 1e-3, accept)
    for words, index, before in done:
        words[index] = before
    return messages[0] if messages else ""


def flips(count: int, name: str, zero: int, ep: int = 1) -> int:
    """Count the flips that were caught before the step with the right rank named."""
    made = config(name, zero, arch="moe" if ep > 1 else "dense", ep=ep)
    worker, caught, source = build_engine(made, WORLD), 0, random.Random(zero)
    replicas = Replicas(worker, WORLD, ep)
    for step in range(count):
        where = ["memory", "result", "gradient"][step % (3 if zero == 0 else 2 if zero < 3 else 1)]
        victim, seed = source.randrange(WORLD.size), source.random()  # every rank draws the same
        mine = random.Random(seed) if victim == WORLD.rank else None
        message = strike(worker, replicas, step, where, mine)
        both = f"of ranks {victim % 2}, {victim % 2 + 2} differ, and there is no majority"
        caught += f"of rank {victim} " in message or (ep == 2 and both in message)
        assert worker.update(batch(step), 1e-3).nll.isfinite(), "the flip was not taken back"
    return caught


def clean(count: int) -> list[str]:
    """Count the alarms in good steps under DDP, which has the most to compare, including gradients."""
    loop, heard = looping(config("accelerate", 0))
    for step in range(count):
        loop.step(step, rows(step), 0.0)
    loop.settle()
    assert len(heard) == count
    return [record["reason"] for record in heard if record["kind"] != "step"]


def looped(save: bool) -> str:
    """Return the loop's error for a flip between two steps, at the next step or before a checkpoint."""
    loop, heard = looping(config("deepspeed", 1))
    loop.step(0, rows(0), 0.0)
    loop.settle()
    if WORLD.rank == 1:
        flip(loop.engine.local_tensors().copies, random.Random(1))
    try:
        if save:
            loop.save(1)
        loop.step(1, rows(1), 0.0)
        loop.step(2, rows(2), 0.0)
    except DivergenceError as error:
        assert [record["step"] for record in heard] == [1]
        return str(error)
    return ""


def routed(zero: int) -> str:
    """Return the error for a flip in a router's balancing counts, which are equal on all ranks."""
    worker: Any = build_engine(config("deepspeed", zero, arch="moe", ep=2), WORLD)
    replicas = Replicas(worker, WORLD, 2)
    if WORLD.rank == 1:
        flip([worker.module.routers()[0].steps], random.Random(zero))
    comparison = replicas.compare()
    return str(replicas.blame(comparison, 1)) if WORLD.sum(comparison.flags).any() else ""


def war(world: World) -> None:
    global WORLD
    WORLD, each = world, int(sys.argv[1]) // len(LAYOUTS)
    say(
        caught={str(layout): flips(each, *layout) for layout in [*LAYOUTS, *SHARED]},
        looped=[looped(save=False), looped(save=True)],
        routed=[routed(1), routed(3)],
    )


def peace(world: World) -> None:
    global WORLD
    WORLD = world
    say(
        skipped={str(kind): skipped(*kind) for kind in KINDS},
        alarms=clean(int(sys.argv[2])),
        waits={str(kind): waits(*kind) for kind in [*((*each, "moe") for each in KINDS), DENSE]},
    )


def say(**seen: object) -> None:
    if WORLD.first:
        print("RESULT", json.dumps(seen), flush=True)


if __name__ == "__main__":
    import pipeline.parallel.ddp
    import pipeline.parallel.zero  # noqa: F401 before the fork

    torch.set_num_threads(1)  # threads do not survive a fork
    fork(4, war)
    fork(2, peace)
