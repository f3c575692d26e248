"""Bytes that a rank holds while it trains, and the bytes of a checkpoint."""

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal, assert_never

from pipeline.config.dump import Change, changed
from pipeline.config.parts import FFN, GQA, MLA, Dtype, MoE, Recompute
from pipeline.config.schema import Offload, RunConfig
from pipeline.config.shape import Model
from pipeline.planner.count import BYTES, layer_params, params

MEMORY_ERROR = 0.1  # of account's bytes, at most: docs/BENCHMARKS.md
USABLE = 0.92  # of a GPU's memory: the rest is the driver's, NCCL's, and lost between allocations


@dataclass(frozen=True, slots=True)
class Layout:
    ranks: int
    zero: int
    ep: int = 1
    micro_batch: int = 1
    recompute: Recompute = False
    sp: int = 1

    @classmethod
    def of(cls, config: RunConfig, ranks: int) -> "Layout":
        micro = config.train.micro_batch
        assert micro != "auto", "resolve the recipe first"
        at = config.parallel
        return cls(ranks, at.zero, at.ep, micro, config.train.recompute, at.sp)

    def change(self, before: "Layout | None" = None) -> Change:
        """What differs from another layout, or from the defaults."""
        before = before or Layout(self.ranks, zero=-1, micro_batch=-1)
        keys = ("zero", "ep", "sp", "train.micro_batch", "train.recompute")
        pairs = (
            (key, *map(attrgetter(key.removeprefix("train.")), (self, before))) for key in keys
        )
        return {key: mine for key, mine, other in pairs if mine != other}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank while it trains. States are exact; activations are the tensors autograd keeps, an estimate.
    What a step adds to weights and optimizer is most as its last backward pass begins, or as the update follows."""

    weights: int
    gradients: int  # of earlier micro-batches
    optimizer: int
    gathered: int  # of what ZeRO shards, the largest block whole: weights in use and of the next block, gradients
    activations: int
    loss: int
    update: (
        int  # all gradients, beside the activations of one block, and then beside their own copies
    )

    @property
    def total(self) -> int:
        backward = self.gradients + self.gathered + self.activations + self.loss
        return self.weights + self.optimizer + max(backward, self.update)


def model_memory(
    model: Model,
    *,
    dtype: Dtype,
    zero: Literal[0, 1, 2, 3] | int,
    ranks: int,
    micro_batch: int,
    loss_chunk: int,
    recompute: Recompute = False,
    ep: int = 1,
    sp: int = 1,
    accumulate: bool = True,
    away: bool = False,
) -> Memory:
    """ZeRO shards the optimizer at 1, the gradients at 2, the weights at 3; below 3 what a rank holds is whole, but for
    the experts, of which it holds one part in `ep`. Of a sequence's activations it holds one part in `sp`. A step of a
    single micro-batch does not `accumulate`; an optimizer that is `away` holds and updates its states elsewhere."""
    count, size = params(model), BYTES[dtype]
    master = (
        0 if dtype == "fp32" and zero == 0 else 4
    )  # only unsharded fp32 updates the weights themselves
    tokens = micro_batch * model.seq // sp
    layers = [
        _kept(model, layer) for layer in [*range(model.layers), *[model.layers - 1] * model.mtp]
    ]
    again = {
        False: [0] * len(layers),
        "selective": [ffn for _, ffn in layers],
        True: [*map(sum, layers)],
    }[recompute]
    kept = (
        sum(map(sum, layers))
        - sum(again)
        + (2 * model.width * len(layers) if recompute is True else 0)
    )
    once = max(again)
    chunk = min(loss_chunk, tokens)
    block = max(
        each.attention + each.vectors + each.ffn + each.norm - each.experts + each.experts // ep
        for each in (layer_params(model, layer) for layer in range(model.layers))
    )

    def held(sharded: bool, of: int) -> int:
        """Of `of` bytes per parameter: what ZeRO shards lies on every rank once, the experts on every ep-th."""
        own = (count.total - count.experts) * of // (ranks if sharded else 1)
        return own + count.experts * of // (ranks if sharded else ep)

    gradients, part = held(zero >= 2, size), held(zero >= 1, size)
    gathered = (0, 0, 1, 3)[zero] * block * size if ranks > 1 else 0
    first = gathered + tokens * max(map(sum, layers)) * size  # the last to be reached
    # those of a group: in fp32, and for that ZeRO lays them in a row
    copies = _group(model, zero, ranks, ep) * ((4 if size != 4 else 0) + (size if zero else 0))
    return Memory(
        weights=held(zero >= 3, size),
        gradients=gradients
        if accumulate or zero == 3
        else 0,  # ZeRO-3 has a place for them from the beginning
        optimizer=0 if away else held(zero >= 1, master + 8),
        gathered=gathered,
        activations=tokens * (kept + once) * size,
        loss=chunk * model.vocab * (4 + 4 + size) + 4 * model.vocab * model.width,
        update=max(
            gradients + first,
            0 if away else max(gradients + (part if zero == 1 else 0), part + copies),
        ),
    )


def _group(model: Model, zero: int, ranks: int, ep: int) -> int:
    """The most parameters that DeepSpeed 0.19.8 updates on a rank at once. Without ZeRO all of them, else those of one
    group (optim/groups.py: matrices, the rest, experts that ranks share), in ZeRO-3 of its `sub_group_size` at most."""
    count = params(model)
    if zero == 0:
        return count.total - count.experts + count.experts // ep
    rest, shared = count.embedding + count.position, count.experts if ep > 1 else 0
    largest = max(count.total - shared - rest, rest, shared) // ranks
    return min(largest, 10**9) if zero == 3 else largest


def _kept(model: Model, layer: int) -> tuple[int, int]:
    """Numbers that autograd keeps per token and block. Of the attention: norm inputs, a norm's output, q and k before
    and after rotation, v, what comes of them. Of the feed-forward: a norm's output and its inner tensors, of a routed
    one also the rows on their way to the experts."""
    a, f = model.attention, model.ffn
    match a:
        case GQA():
            inner = 3 * (a.heads + a.kv_heads) * a.head_dim
        case MLA():
            inner = 2 * ((a.q_rank or 0) + a.kv_rank) + a.heads * (
                2 * a.score_dim + a.nope_dim + 3 * a.v_dim
            )
        case _:
            assert_never(a)
    per_hidden = 3 if f.gated else 2
    if not model.routed(layer):
        ffn = per_hidden * (f.hidden if isinstance(f, FFN) else f.dense_hidden)
    else:
        assert isinstance(f, MoE)
        ffn = (f.top_k + f.shared) * per_hidden * f.hidden + 2 * f.top_k * model.width
    return 3 * model.width + inner, model.width + ffn


def checkpoint_bytes(model: Model) -> int:
    """The numbers of one checkpoint, all ranks together: fp32 masters and two moments."""
    return params(model).total * 12


def disk_bytes(model: Model, *, ranks: int, zero: int) -> int:
    """Upper bound of one checkpoint on disk: its numbers and what surrounds them.

    A manifest entry and padding take at most 256 bytes per run of numbers. The masters and moments
    of a tensor are one run each: on every rank at ZeRO-0 and 3, else cut where two ranks meet.
    Each rank adds its random state and a partly filled block.
    """
    experts = 3 * model.ffn.experts if isinstance(model.ffn, MoE) else 0
    blocks = model.layers + model.mtp
    runs = (4 + 20 * blocks) * (ranks if zero in (0, 3) else 1) + experts * blocks + 4 * ranks
    return checkpoint_bytes(model) + 3 * 256 * runs + 16384 * ranks


def memory(config: RunConfig, layout: Layout) -> Memory:
    """Of one rank, of a resolved config."""
    train = config.train
    assert train.dtype != "auto" and train.loss_chunk != "auto", "resolve the recipe first"
    held = model_memory(
        config.model,
        dtype=train.dtype,
        zero=layout.zero,
        ranks=layout.ranks,
        micro_batch=layout.micro_batch,
        loss_chunk=train.loss_chunk,
        recompute=layout.recompute,
        ep=layout.ep,
        sp=layout.sp,
        accumulate=config.rows * layout.sp > layout.ranks * layout.micro_batch,
        away=config.parallel.offload.optimizer is not None,
    )
    return replace(held, weights=0) if config.parallel.offload.params else held


def offloaded(config: RunConfig, layout: Layout, to: Literal["cpu", "nvme"]) -> int:
    """What lies there instead, of all ranks together."""
    away, held = (
        config.parallel.offload,
        memory(changed(config, {"parallel.offload": Offload()}), layout),
    )
    return layout.ranks * (
        held.optimizer * (away.optimizer == to) + held.weights * (away.params == to)
    )
