"""Every parameter, FLOP and byte, in integers and without torch. Planner, meter, sweep and fit all quote these.

FLOPs are those of training one token: a multiply-add counts 2, the backward pass twice the forward. Matmuls cost
6 × the parameters a token meets, the head included and the input embedding, a lookup, not; attention costs
3·heads·(score width + value width)·seq in every layer (6·heads·head_dim·seq where both are the head's), the causal
half, since the kernel skips what the mask hides; a window hides more.
"""

from dataclasses import dataclass
from typing import Literal, assert_never

from pipeline.config.frozen import Dtype, Recompute
from pipeline.config.model import Model
from pipeline.config.parts import FFN, GQA, MLA, Learned, MoE, RelativeBias

CONVENTION = (
    "FLOPs = 6·matmul parameters (head in, input embedding out) + 6·layers·heads·head_dim·seq (causal attention); "
    "N = parameters without input embedding, with head"
)

BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, slots=True)
class Params:
    """`active` are those that one token meets when the model is used; `scaling` is the N of every fit: active, with
    head, without input embedding, which keeps small sizes on the same line as large ones (arXiv 2406.19146)."""

    embedding: int
    position: int  # learned
    head: int  # 0 when tied: the embedding serves twice
    attention: int
    ffn: int
    norm: int
    mtp: int  # of multi-token prediction, which only training uses
    experts: int  # of ffn and mtp, those that are routed
    active: int
    scaling: int

    @property
    def total(self) -> int:
        return (
            self.embedding
            + self.position
            + self.head
            + self.attention
            + self.ffn
            + self.norm
            + self.mtp
        )

    @property
    def non_embedding(self) -> int:
        return self.attention + self.ffn + self.norm

    @property
    def active_non_embedding(self) -> int:
        return self.active - self.embedding - self.position - self.head


def params(model: Model) -> Params:
    embedding = model.vocab * model.width
    layers = [_layer(model, layer) for layer in range(model.layers)]
    attention, ffn = (
        sum(each.attention + each.vectors for each in layers),
        sum(each.ffn for each in layers),
    )
    final = _norm(model, model.width) if model.placement in ("pre", "sandwich") else 0
    norm = sum(each.norm for each in layers) + final
    extra = _layer(model, model.layers - 1)
    joint = 2 * model.width**2 + 3 * _norm(
        model, model.width
    )  # projection, its two norms, and one before the head
    mtp = model.mtp * (joint + extra.attention + extra.vectors + extra.ffn + extra.norm)
    head = 0 if model.tied else embedding
    position = _position(model)
    idle = sum(each.ffn - each.ffn_active for each in layers)
    blocks = attention + ffn + norm - idle
    return Params(
        embedding=embedding,
        position=position,
        head=head,
        attention=attention,
        ffn=ffn,
        norm=norm,
        mtp=mtp,
        experts=sum(each.experts for each in layers) + model.mtp * extra.experts,
        active=embedding + position + head + blocks,
        scaling=blocks + embedding,
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    attention: int  # matrices
    vectors: int  # biases and sinks of the attention
    ffn: int  # all of it, biases too
    ffn_active: int
    ffn_matmul: int  # what of it a token is multiplied with
    ffn_again: int  # and is once more if it is recomputed: of a plain one all but the last matrix
    experts: int
    norm: int


def _layer(model: Model, layer: int) -> _Layer:
    attention, vectors, inner = _attention(model)
    outer = {"pre": 1 if model.parallel_block else 2, "post": 2, "sandwich": 4, "deepnorm": 2}[
        model.placement
    ]
    norm = outer * _norm(model, model.width) + inner
    f = model.ffn
    per_hidden = (3 if f.gated else 2) * model.width
    if not model.routed(layer):
        hidden = f.hidden if isinstance(f, FFN) else f.dense_hidden
        biases = (
            (2 if f.gated else 1) * hidden + model.width if isinstance(f, FFN) and f.bias else 0
        )
        matrices = per_hidden * hidden
        again = matrices - model.width * hidden
        return _Layer(
            attention, vectors, matrices + biases, matrices + biases, matrices, again, 0, norm
        )
    assert isinstance(f, MoE)
    always = model.width * f.experts + per_hidden * f.shared * f.hidden  # router and shared experts
    experts = per_hidden * f.experts * f.hidden
    active = always + per_hidden * f.top_k * f.hidden
    return _Layer(attention, vectors, always + experts, active, active, active, experts, norm)


def _norm(model: Model, width: int) -> int:
    return width * (2 if model.norm.bias else 1)


def _attention(model: Model) -> tuple[int, int, int]:
    """Matrices, biases and sinks, and the gains of the norms inside."""
    width, a = model.width, model.attention
    sinks = a.heads if a.sinks else 0
    match a:
        case GQA():
            qkv = (a.heads + 2 * a.kv_heads) * a.head_dim
            biases = (qkv if a.bias else 0) + (width if a.out_bias else 0)
            norms = 2 * _norm(model, a.head_dim) if a.qk_norm else 0
            return width * qkv + a.heads * a.head_dim * width, biases + sinks, norms
        case MLA():
            q = a.heads * a.score_dim
            queries = width * q if a.q_rank is None else a.q_rank * (width + q)
            latent = width * (a.kv_rank + a.rope_dim) + a.kv_rank * a.heads * (a.nope_dim + a.v_dim)
            norms = _norm(model, a.kv_rank) + (0 if a.q_rank is None else _norm(model, a.q_rank))
            return queries + latent + a.heads * a.v_dim * width, sinks, norms
        case _:
            assert_never(a)


def _position(model: Model) -> int:
    match model.position:
        case Learned():
            return model.seq * model.width
        case RelativeBias(buckets=buckets):
            return buckets * model.attention.heads
        case _:
            return 0


@dataclass(frozen=True, slots=True)
class Flops:
    """Of training one token. `recompute` is work done twice: it costs time but earns no MFU."""

    matmul: int
    attention: int
    recompute: int

    @property
    def model(self) -> int:
        return self.matmul + self.attention

    @property
    def hardware(self) -> int:
        return self.model + self.recompute


def flops_per_token(model: Model, *, recompute: Recompute = False) -> Flops:
    layers = [*range(model.layers), *[model.layers - 1] * model.mtp]
    each = [_layer(model, layer) for layer in layers]
    blocks = sum(one.attention + one.ffn_matmul for one in each) + model.mtp * 2 * model.width**2
    heads = (1 + model.mtp) * model.vocab * model.width
    attention = sum(_scores(model, layer) for layer in layers)
    again = 2 * sum(one.ffn_again for one in each) if recompute else 0
    return Flops(
        matmul=6 * (blocks + heads),
        attention=attention,
        recompute=2 * blocks + attention // 3 if recompute is True else again,
    )


def _scores(model: Model, layer: int) -> int:
    """Scores and sums of values in one layer: a query sees half the sequence, or what of it the window leaves."""
    a, seq = model.attention, model.seq
    window = min(a.window, seq) if a.window is not None and model.windowed(layer) else seq
    return 3 * a.heads * (a.score_dim + a.value_dim) * window * (2 * seq - window) // seq


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


def memory(
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
        for each in (_layer(model, layer) for layer in range(model.layers))
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
    """One checkpoint on disk: its numbers, and at most so much around them, which is most of a small one. Torch wraps
    each run of numbers, and the manifest has its place, 1.9 kB together; a tensor's masters and moments are one each,
    of every rank at ZeRO-0 and 3, else cut where two ranks meet. Random states and whole blocks come by rank."""
    experts = 3 * model.ffn.experts if isinstance(model.ffn, MoE) else 0
    blocks = model.layers + model.mtp
    runs = (4 + 20 * blocks) * (ranks if zero in (0, 3) else 1) + experts * blocks + 4 * ranks
    return checkpoint_bytes(model) + 3 * 2048 * runs + 16384 * ranks
