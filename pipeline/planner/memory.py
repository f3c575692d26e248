"""Bytes that a rank holds while it trains, bytes of a checkpoint, and the memory of a device."""

import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Literal, assert_never

from pipeline.config.dump import Change, changed
from pipeline.config.optimizer import MuonSpec
from pipeline.config.parts import FFN, GQA, MLA, Dtype, MoE, Recompute
from pipeline.config.schema import Lora, Offload, RunConfig, RunSpec
from pipeline.config.shape import Model
from pipeline.planner import count
from pipeline.planner.work import adapters, frozen_params, trained_params

MEMORY_ERROR = 0.1  # the largest relative error of an estimate (docs/BENCHMARKS.md)
# Share of a GPU's memory that tensors can use; driver, NCCL and fragmentation take the rest.
USABLE = 0.92
# Muon's temporary tensors: a matrix before and after an iteration and two products in bf16, or two
# fp32 copies of weights.
_BATCH = 2**26  # elements: MAX_ELEMENTS in optim/muon.py
_BATCH_BYTES = 8  # per element
# Measured memory of a rank on a CPU besides its tensors: torch and DeepSpeed themselves.
PROCESS_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class Layout:
    """How a run is divided over its ranks."""

    ranks: int
    zero: int
    ep: int = 1
    micro_batch: int = 1
    recompute: Recompute = False
    sp: int = 1

    @classmethod
    def of(cls, config: RunConfig, ranks: int) -> "Layout":
        parallel = config.parallel
        train = config.train
        micro_batch = train.micro_batch
        return cls(ranks, parallel.zero, parallel.ep, micro_batch, train.recompute, parallel.sp)

    def change(self, before: "Layout | None" = None) -> Change:
        """Return the settings that differ from another layout, or from the defaults."""
        # -1 differs from every value: zero and micro_batch default to "auto" and are always listed.
        before = before or Layout(self.ranks, zero=-1, micro_batch=-1)
        keys = ("zero", "ep", "sp", "train.micro_batch", "train.recompute")
        names = [(key, key.removeprefix("train.")) for key in keys]
        pairs = ((key, getattr(self, name), getattr(before, name)) for key, name in names)
        return {key: new for key, new, old in pairs if new != old}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank. States are exact; the activations that autograd keeps are an estimate. The
    peak is at the start of the last backward pass, or at the update."""

    weights: int
    gradients: int  # gradients of earlier micro-batches
    optimizer: int
    gathered: int  # the largest block out of ZeRO's shards: weights, prefetched weights, gradients
    activations: int
    loss: int
    update: int  # all gradients, with the activations of one block or with copies for the update

    @property
    def total(self) -> int:
        backward = self.gradients + self.gathered + self.activations + self.loss
        return self.weights + self.optimizer + max(backward, self.update)

    def figures(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"total": self.total}


def model_memory(
    model: Model,
    layout: Layout,
    dtype: Dtype,
    *,
    loss_chunk: int = 1,
    accumulate: bool = True,
    offload: bool = False,
    muon: bool = False,
    lora: Lora | None = None,
) -> Memory:
    """ZeRO shards the optimizer from stage 1, gradients from 2, weights from 3. A rank holds
    everything that is not sharded, but only 1/`ep` of the experts and 1/`sp` of a sequence's
    activations. A step of one micro-batch does not `accumulate`. With `offload`, the optimizer's
    states are elsewhere. LoRA's frozen weights are whole, without gradients and moments."""
    experts = count.params(model).experts
    trained = trained_params(model, lora)
    size = count.BYTES[dtype]
    zero = layout.zero
    ranks = layout.ranks
    tokens = layout.micro_batch * model.seq // layout.sp

    def held(bytes_per_param: int, *, sharded: bool, of: int = trained) -> int:
        dense = (of - experts) * bytes_per_param // (ranks if sharded else 1)
        return dense + experts * bytes_per_param // (ranks if sharded else layout.ep)

    # Only unsharded fp32 training updates the weights in place; others have fp32 master weights.
    master = 0 if dtype == "fp32" and zero == 0 else 4
    gradients = held(size, sharded=zero >= 2)
    part = held(size, sharded=zero >= 1)
    # Stage 2 collects the gradients of one block; stage 3 also its weights and the next block's.
    copied = (0, 0, 1, 3)[zero] if ranks > 1 else 0
    gathered = copied * _largest_block(model, layout.ep, lora) * size
    kept, largest = _activations(model, layout.recompute, lora)
    first_block = gathered + tokens * largest * size  # the backward pass reaches it last
    # The gradients of one group are copied to fp32; before that, ZeRO makes them contiguous.
    copies = _group(model, layout, lora) * ((4 if size != 4 else 0) + (size if zero else 0))
    moments = held(master + 8, sharded=zero >= 1)  # 8: both moments
    if muon:
        # A matrix has one moment. Its updates travel in bf16, and a rank also holds the buffers:
        # sent and received ones at ZeRO-3, and those for all other ranks at ZeRO-0.
        moments -= held(4, sharded=zero >= 1, of=matrix_params(model))
        own = held(1, sharded=zero >= 1, of=matrix_params(model))
        copies += 2 * own * (3 if ranks > 1 and zero in (0, 3) else 1)
        copies += _BATCH_BYTES * min(own, _BATCH)
    update = 0 if offload else max(gradients + (part if zero == 1 else 0), part + copies)
    head = 0 if lora else 4 * model.vocab * model.width  # fp32 gradient
    return Memory(
        weights=held(size, sharded=zero >= 3) + frozen_params(model, lora) * size,
        gradients=gradients if accumulate or zero == 3 else 0,  # ZeRO-3 allocates them at the start
        optimizer=0 if offload else moments,
        gathered=gathered,
        activations=tokens * kept * size,
        # Logits, an fp32 copy of them, and their gradient.
        loss=min(loss_chunk, tokens) * model.vocab * (4 + 4 + size) + head,
        update=max(gradients + first_block, update),
    )


@lru_cache(maxsize=256)
def _largest_block(model: Model, ep: int, lora: Lora | None) -> int:
    """Parameters of the largest block that ZeRO gathers; with LoRA, the adapters of a block."""
    if lora is not None:
        return trained_params(model, lora) // model.layers
    decoder = [count.layer_params(model, layer) for layer in range(model.layers)]
    encoder = [count.layer_params(model, each, source=True) for each in range(model.source_layers)]
    return max(each.total - each.experts + each.experts // ep for each in decoder + encoder)


@lru_cache(maxsize=256)
def _activations(model: Model, recompute: Recompute, lora: Lora | None = None) -> tuple[int, int]:
    """Return how many numbers are kept per token: for the model, and for the largest block."""
    blocks = [_kept(model, model.routed(layer)) for layer in count.block_layers(model)]
    whole = [attention + ffn for attention, ffn in blocks]
    # Tensors outside of the blocks are always kept: value embeddings, smear's and backout's.
    beside = count.value_layers(model) * count.value_width(model)
    beside += (2 * model.smear + model.backout) * model.width
    beside += _source_activations(model, recompute)
    beside += 0 if lora is None else adapters(model) * lora.rank
    if model.generator_model is not None:
        beside += _activations(model.generator_model, recompute)[0]
    match recompute:
        case False:
            return beside + sum(whole), max(whole)
        case "selective":
            ffns = [ffn for _, ffn in blocks]
            return beside + sum(whole) - sum(ffns) + max(ffns), max(whole)
        case True:  # the stream at the start of each block, and everything of one block
            return beside + 2 * model.width * len(blocks) + max(whole), max(whole)


def _source_activations(model: Model, recompute: Recompute) -> int:
    """Numbers kept for the encoder and for cross-attention, per token of the decoder."""
    if not model.source_layers:
        return 0
    a = model.attention
    # Cross-attention: norm input and output, queries and result; keys and values of the source.
    crossed = model.layers * (2 * model.width + 2 * a.heads * a.head_dim)
    per_source = model.layers * 2 * count.value_width(model)
    if recompute is True:
        crossed = 0
        per_source = 2 * model.width * model.source_layers
    else:
        each = (_kept(model, model.routed(layer)) for layer in range(model.source_layers))
        per_source += sum(attention + (0 if recompute else ffn) for attention, ffn in each)
    return crossed + -(-per_source * model.source_length // model.seq)


def _kept(model: Model, routed: bool) -> tuple[int, int]:
    """Return how many numbers autograd keeps per token in a block's attention and feed-forward.
    Attention: norm inputs, a norm's output, q and k before and after rotation, v and the result.
    Feed-forward: a norm's output and inner tensors; if routed, also the rows sent to experts."""
    a = model.attention
    match a:
        case GQA():
            inner = 3 * (a.heads + a.kv_heads) * a.head_dim
        case MLA():
            heads = a.heads * (2 * a.score_dim + a.nope_dim + 3 * a.v_dim)
            inner = 2 * ((a.q_rank or 0) + a.kv_rank) + heads
        case _:
            assert_never(a)
    f = model.ffn
    per_hidden = 3 if f.gated else 2
    if routed:
        assert isinstance(f, MoE)
        ffn = (f.top_k + f.shared) * per_hidden * f.hidden + 2 * f.top_k * model.width
    else:
        ffn = per_hidden * (f.hidden if isinstance(f, FFN) else f.dense_hidden)
    # With scales, the stream is kept before and after scaling.
    streams = 4 if model.residual_scales else 3
    return streams * model.width + inner, model.width + ffn


def _group(model: Model, layout: Layout, lora: Lora | None) -> int:
    """Return the most parameters that DeepSpeed 0.19.8 updates at once on a rank: without ZeRO all,
    otherwise one group (optim/groups.py: matrices, the rest, experts that ranks share)."""
    counted = count.params(model)
    trained = trained_params(model, lora)
    if layout.zero == 0:
        return trained - counted.experts + counted.experts // layout.ep
    rest = 0 if lora else counted.tables
    shared = counted.experts if layout.ep > 1 else 0
    largest = max(trained - shared - rest, rest, shared) // layout.ranks
    return min(largest, 10**9) if layout.zero == 3 else largest  # DeepSpeed's sub_group_size


def memory(config: RunConfig, layout: Layout) -> Memory:
    """Return the memory of one rank of a run in a layout."""
    offload = config.parallel.offload
    held = model_memory(
        config.model,
        layout,
        config.train.dtype,
        loss_chunk=config.train.loss_chunk,
        accumulate=config.rows * layout.sp > layout.ranks * layout.micro_batch,
        offload=offload.optimizer is not None,
        muon=uses_muon(config),
        lora=config.lora,
    )
    size = count.BYTES[config.train.dtype]
    if offload.params:
        held = replace(held, weights=frozen_params(config.model, config.lora) * size)
    teacher = config.distill.model if config.distill else None
    if teacher is None:
        return held
    # Every rank has the whole teacher, and its logits and probabilities beside the student's.
    logits = config.train.loss_chunk * teacher.vocab * 8
    weights = held.weights + count.params(teacher).total * size
    return replace(held, weights=weights, loss=held.loss + logits)


def offloaded(config: RunConfig, layout: Layout, to: Literal["cpu", "nvme"]) -> int:
    """Bytes that all ranks together store on the CPU or on NVMe instead of on their GPUs."""
    offload = config.parallel.offload
    held = memory(changed(config, {"parallel.offload": Offload()}), layout)
    optimizer = held.optimizer if offload.optimizer == to else 0
    weights = held.weights if offload.params == to else 0
    return layout.ranks * (optimizer + weights)


def uses_muon(config: RunSpec) -> bool:
    return isinstance(config.optim.optimizer, MuonSpec)


@lru_cache(maxsize=256)
def matrix_params(model: Model) -> int:
    """Number of parameters that Muon updates."""
    return sum(rows * columns * number for rows, columns, number in count.matrices(model))


def checkpoint_bytes(config: RunConfig) -> int:
    """Bytes of the tensors of one checkpoint: fp32 master weights and two moments. A matrix that
    Muon trains has one moment, and a variance for each row. Frozen weights have none."""
    model = config.model
    numbers = 3 * trained_params(model, config.lora)
    if uses_muon(config):
        rows = sum(rows * number for rows, _, number in count.matrices(model))
        numbers += rows - matrix_params(model)
    return 4 * numbers + count.BYTES[config.train.dtype] * frozen_params(model, config.lora)


def disk_bytes(config: RunConfig, ranks: int) -> int:
    """Upper bound for one checkpoint on disk: its tensors, manifest, padding and random states."""
    # Master weights and moments of a tensor are one contiguous run each: on every rank at ZeRO-0
    # and 3, otherwise cut where the parts of two ranks meet. Every rank saves some frozen weights.
    model = config.model
    experts = 3 * model.ffn.experts if isinstance(model.ffn, MoE) else 0
    blocks = (model.layers + model.mtp) * (1 if model.generator is None else 2)
    writers = ranks if config.parallel.zero in (0, 3) or config.lora is not None else 1
    runs = (4 + 20 * blocks) * writers + experts * blocks + 4 * ranks
    # 256 bytes of manifest and padding per run; a random state and a file block per rank.
    return checkpoint_bytes(config) + 3 * 256 * runs + 16384 * ranks


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory for the ranks: one GPU for each rank, or the host's memory, shared by all ranks."""

    memory_bytes: int | None  # None: not known here
    device: str = "GPU"
    shared: bool = False

    @property
    def usable(self) -> float:
        if self.memory_bytes is None:
            return math.inf
        return self.memory_bytes if self.shared else self.memory_bytes * USABLE

    def need(self, config: RunConfig, layout: Layout) -> int:
        """Return the bytes of one rank, or of all ranks that share the memory. On a CPU, offloaded
        states and the copy for a checkpoint count, too, unless they are on NVMe."""
        each = memory(config, layout).total
        if not self.shared:
            return each
        copy = 0 if config.parallel.offload.nvme else checkpoint_bytes(config)
        return layout.ranks * (each + PROCESS_BYTES) + offloaded(config, layout, "cpu") + copy

    def fits(self, config: RunConfig, layout: Layout) -> bool:
        """Return whether a layout fits. With auto_batch a trial decides, so that a slightly larger
        estimate is accepted, but not in shared memory: the trial may kill another process."""
        need = self.need(config, layout)
        if not config.train.auto_batch or self.shared:
            return need <= self.usable
        return need * (1 - MEMORY_ERROR) <= (self.memory_bytes or math.inf)
