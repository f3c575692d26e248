"""Every parameter, FLOP and byte, in integers and without torch. Planner, meter, sweep and fit all quote these.

FLOPs are those of training one token: a multiply-add counts 2, the backward pass twice the forward. Matmuls cost
6 × the parameters a token meets, the head included and the input embedding, a lookup, not; attention costs
3·heads·(score width + value width)·seq in every layer (6·heads·head_dim·seq where both are the head's), the causal
half, since the kernel skips what the mask hides; a window hides more.
"""

from dataclasses import dataclass
from typing import assert_never

from pipeline.config.parts import FFN, GQA, MLA, Dtype, Learned, MoE, Recompute, RelativeBias
from pipeline.config.shape import Model

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
    layers = [layer_params(model, layer) for layer in range(model.layers)]
    attention, ffn = (
        sum(each.attention + each.vectors for each in layers),
        sum(each.ffn for each in layers),
    )
    final = _norm(model, model.width) if model.placement in ("pre", "sandwich") else 0
    norm = sum(each.norm for each in layers) + final
    extra = layer_params(model, model.layers - 1)
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
class LayerParams:
    attention: int  # matrices
    vectors: int  # biases and sinks of the attention
    ffn: int  # all of it, biases too
    ffn_active: int
    ffn_matmul: int  # what of it a token is multiplied with
    ffn_again: int  # and is once more if it is recomputed: of a plain one all but the last matrix
    experts: int
    norm: int


def layer_params(model: Model, layer: int) -> LayerParams:
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
        return LayerParams(
            attention, vectors, matrices + biases, matrices + biases, matrices, again, 0, norm
        )
    assert isinstance(f, MoE)
    always = model.width * f.experts + per_hidden * f.shared * f.hidden  # router and shared experts
    experts = per_hidden * f.experts * f.hidden
    active = always + per_hidden * f.top_k * f.hidden
    return LayerParams(attention, vectors, always + experts, active, active, active, experts, norm)


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
    each = [layer_params(model, layer) for layer in layers]
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
