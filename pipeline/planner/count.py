"""The one place that counts the parameters and FLOPs of a model, in integers and without torch.

FLOPs are those of training on one token. A multiply-add counts 2, and the backward pass costs twice
the forward pass. Matmuls cost 6 × the parameters that a token uses: with the head, without the
input embedding and the value embeddings, which are lookups. Attention costs 3·heads·(score width +
value width)·seq per layer (6·heads·head_dim·seq if both are head_dim): only the causal half counts,
because the kernel skips the masked half. A window reduces it further. An encoder has both halves.
In an encoder–decoder, tokens are the decoder's; each includes its share of the source.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import assert_never

from pipeline.config.parts import FFN, GQA, MLA, Dtype, Learned, MoE, Recompute, RelativeBias
from pipeline.config.shape import Model

# Do not edit this text: every run records it, and a fit refuses runs with different texts.
CONVENTION = (
    "FLOPs = 6·matmul parameters (head in, input embedding out) + "
    "6·layers·heads·head_dim·seq (causal attention); "
    "N = parameters without input embedding, with head"
)

BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, slots=True)
class Params:
    """`active` counts the parameters that one token uses at inference. `scaling` is the N of every
    fit: active parameters with the head, without the input embedding, because then all sizes lie on
    one line (arXiv 2406.19146). Value embeddings are lookups, too, so N does not count them."""

    embedding: int
    value_embeddings: int
    position: int  # learned positions and segments
    head: int  # 0 if tied to the embedding
    attention: int
    ffn: int
    norm: int
    ends: int  # parts between embedding and blocks, and between blocks and head
    mixing: int  # gate of smear and scales of the stream (model/stream.py)
    mtp: int  # blocks for multi-token prediction, which only training uses
    generator: int  # ELECTRA's generator without shared parameters; only training uses it
    experts: int  # routed parameters, part of ffn and mtp
    active: int
    scaling: int

    @property
    def total(self) -> int:
        return self.tables + self.head + self.non_embedding + self.mtp + self.generator

    @property
    def tables(self) -> int:
        """Parameters that are looked up."""
        return self.embedding + self.value_embeddings + self.position

    @property
    def non_embedding(self) -> int:
        return self.attention + self.ffn + self.norm + self.ends + self.mixing

    @property
    def active_non_embedding(self) -> int:
        return self.active - self.tables - self.head


@lru_cache(maxsize=256)  # one plan asks for the same model hundreds of times
def params(model: Model) -> Params:
    decoder = range(1 if model.shares("decoder") else model.layers)
    layers = [layer_params(model, layer) for layer in decoder]
    if model.source_layers:
        encoder = range(1 if model.shares("encoder") else model.source_layers)
        layers += [layer_params(model, layer, source=True) for layer in encoder]
    attention = sum(each.attention + each.vectors for each in layers) + _value_gates(model)
    ffn = sum(each.ffn for each in layers)
    # With a norm after each layer, the stream is already normalized after the last block.
    sides = 2 if model.source_layers else 1
    final_norm = _norm(model, model.width) if model.placement in ("pre", "sandwich") else 0
    norm = sum(each.norm for each in layers) + sides * final_norm
    embedding = (1 + model.own_encoder_embedding) * model.vocab * model.input_width
    head = 0 if model.tied else head_matrix(model)
    ends = _ends(model)
    position = _position(model)
    # Each block for multi-token prediction has a layer, a projection of two inputs and three norms.
    extra = layer_params(model, model.layers - 1)
    joint = 2 * model.width**2 + 3 * _norm(model, model.width)
    mtp = model.mtp * (joint + extra.total)
    idle = sum(each.ffn - each.ffn_active for each in layers)  # experts that a token does not use
    mixing = (model.smear_inputs + 1) * model.smear + model.backout
    mixing += 2 * len(decoder) * model.residual_scales
    blocks = attention + ffn + norm + ends + mixing - idle
    values = value_layers(model) * model.vocab * value_width(model)
    return Params(
        embedding=embedding,
        value_embeddings=values,
        position=position,
        head=head,
        attention=attention,
        ffn=ffn,
        norm=norm,
        ends=ends,
        mixing=mixing,
        mtp=mtp,
        generator=_generator(model),
        experts=sum(each.experts for each in layers) + model.mtp * extra.experts,
        active=embedding + values + position + head + blocks,
        scaling=blocks + head_matrix(model),  # tied or not
    )


def _generator(model: Model) -> int:
    """Parameters of the generator, which shares all tables and the norm of their sum."""
    generator = model.generator_model
    if generator is None:
        return 0
    summed = generator.embedding_norm == "sum"
    shared_norm = _norm(generator, generator.input_width) if summed else 0
    return params(generator).total - params(generator).tables - shared_norm


def head_matrix(model: Model) -> int:
    """Parameters of the output matrix, which may be tied to the embedding."""
    return (1 if model.head == "replaced" else model.vocab) * model.head_width


def _ends(model: Model) -> int:
    """Count norm and projection of the embedding, transform and bias of the head, and row head."""
    biased = isinstance(model.ffn, FFN) and model.ffn.bias
    start = _norm(model, model.input_width) if model.embedding_norm == "sum" else 0
    if model.embedding_rank is not None:
        start += (model.embedding_rank + biased) * model.width
    ends = start * (2 if model.source_layers else 1) + transform_matrix(model)
    if model.head_transform:
        ends += biased * model.head_width
        ends += _norm(model, model.head_width) if model.head == "tokens" else 0
    if model.head_bias:
        ends += 1 if model.head == "replaced" else model.vocab
    return ends + sum(row_head(model))


def row_head(model: Model) -> tuple[int, int]:
    """Parameters of the row head's matrices and of its biases."""
    outputs = model.row_classes
    if model.stack != "encoder" or not outputs:
        return model.width * outputs, 0
    outputs += model.width  # BERT's pooler
    return model.width * outputs, outputs


def transform_matrix(model: Model) -> int:
    """Parameters of the layer before the head."""
    projected = model.head_transform or model.head_width != model.width
    return model.width * model.head_width if projected else 0


@dataclass(frozen=True, slots=True)
class LayerParams:
    attention: int  # matrices, including cross-attention
    source: int  # part of `attention` that reads the encoder's output
    vectors: int  # biases and sinks of the attention
    norm: int
    ffn: int  # with biases and all experts
    ffn_active: int  # part of `ffn` that one token uses
    ffn_matmul: int  # matrices of `ffn_active`
    ffn_recomputed: int  # part of `ffn_matmul` that recomputation multiplies again
    experts: int  # routed experts, part of `ffn`

    @property
    def total(self) -> int:
        return self.attention + self.vectors + self.ffn + self.norm


def layer_params(model: Model, layer: int, *, source: bool = False) -> LayerParams:
    """With `source`, a layer of an encoder–decoder's encoder, which has no cross-attention."""
    crosses = model.source_layers > 0 and not source
    normed = model.placement in ("pre", "sandwich") and layer == 0 and not model.first_norm
    return _layer_params(model, model.routed(layer), crosses, normed)


@lru_cache(maxsize=256)
def _layer_params(model: Model, routed: bool, crosses: bool, normed: bool) -> LayerParams:
    # Cross-attention has the same matrices; those of keys and values read the source.
    times = 2 if crosses else 1
    attention, vectors, inner_norms = (times * count for count in _attention(model))
    source = 2 * model.width * value_width(model) if crosses else 0
    # Norms of the model's width per layer: attention, cross-attention, feed-forward.
    layers = 1 if model.parallel_block else times + 1
    outer = layers * (2 if model.placement == "sandwich" else 1) - normed
    norm = outer * _norm(model, model.width) + inner_norms
    f = model.ffn
    # Gate, up and down projections, or up and down without a gate.
    per_hidden = (3 if f.gated else 2) * model.width
    if routed:
        assert isinstance(f, MoE)
        router = model.width * f.experts
        experts = per_hidden * f.experts * f.hidden
        shared = per_hidden * f.shared * f.hidden
        active = router + shared + per_hidden * f.top_k * f.hidden
        total = router + shared + experts
        return LayerParams(attention, source, vectors, norm, total, active, active, active, experts)
    hidden = f.hidden if isinstance(f, FFN) else f.dense_hidden
    biases = 0
    if isinstance(f, FFN) and f.bias:
        biases = (2 if f.gated else 1) * hidden + model.width
    matrices = per_hidden * hidden
    # The backward pass does not need the output of the last matrix again.
    recomputed = matrices - model.width * hidden
    total = matrices + biases
    return LayerParams(
        attention, source, vectors, norm, total, total, matrices, recomputed, experts=0
    )


def _norm(model: Model, width: int) -> int:
    return width * (model.norm.gain + model.norm.bias)


def value_layers(model: Model) -> int:
    return sum(map(model.value_layer, range(model.layers)))


def value_width(model: Model) -> int:
    """Width of a token's values in one layer."""
    a = model.attention
    return a.kv_heads * a.head_dim if isinstance(a, GQA) else 0


def _value_gates(model: Model) -> int:
    """Parameters of the gates of value embeddings: one output per key/value head."""
    heads = value_width(model) // model.attention.head_dim
    return value_layers(model) * model.value_gate_inputs * heads


def _attention(model: Model) -> tuple[int, int, int]:
    """Return the parameters of the matrices, of biases and sinks, and of the norms inside."""
    width = model.width
    a = model.attention
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
            # Down to the latent and the shared rotated key, then up to each head's key and value.
            latent = width * (a.kv_rank + a.rope_dim) + a.kv_rank * a.heads * (a.nope_dim + a.v_dim)
            norms = _norm(model, a.kv_rank) + (0 if a.q_rank is None else _norm(model, a.q_rank))
            return queries + latent + a.heads * a.v_dim * width, sinks, norms
        case _:
            assert_never(a)


def matrices(model: Model) -> list[tuple[int, int, int]]:
    """Return outputs, inputs and number of the matrices that Muon orthogonalizes: the matrices of
    the blocks, with fused projections split into their parts (optim/matrices.py)."""
    width = model.width
    a = model.attention
    match a:
        case GQA():
            heads = a.heads * a.head_dim
            attention = [(heads, width, 1), (a.kv_heads * a.head_dim, width, 2), (width, heads, 1)]
        case MLA():
            attention = [] if a.q_rank is None else [(a.q_rank, width, 1)]
            attention += [(a.heads * a.score_dim, a.q_rank or width, 1)]
            attention += [(a.kv_rank, width, 1), (a.rope_dim, width, 1)]
            attention += [(a.heads * dim, a.kv_rank, 1) for dim in (a.nope_dim, a.v_dim)]
            attention += [(width, a.heads * a.v_dim, 1)]
        case _:
            assert_never(a)
    f = model.ffn
    found = [(width, 2 * width, model.mtp)]
    layers = block_layers(model)
    if model.shares("decoder"):
        layers = layers[model.layers - 1 :]
    if model.source_layers:
        found += attention * len(layers)  # cross-attention
        layers = [*layers, *range(1 if model.shares("encoder") else model.source_layers)]
    for layer in layers:
        found += attention
        hidden = {f.hidden: 1} if isinstance(f, FFN) else {f.dense_hidden: 1}
        if model.routed(layer):
            assert isinstance(f, MoE)
            hidden = {f.shared * f.hidden: 1} if f.shared > 1 else {}
            hidden[f.hidden] = f.experts + (f.shared == 1)
        for inner, number in hidden.items():
            found += [(inner, width, number * (2 if f.gated else 1)), (width, inner, number)]
    return found


def orthogonalization_flops(rows: int, columns: int) -> int:
    """FLOPs of Muon's five iterations on one matrix. With the smaller side m, each iteration has
    three products: X·Xᵀ and a polynomial of it times X, 2·m²·n each, and (X·Xᵀ)², 2·m³."""
    m = min(rows, columns)
    n = max(rows, columns)
    return 5 * (4 * m * m * n + 2 * m**3)


def _position(model: Model) -> int:
    sides = 2 if model.source_layers else 1
    learned = model.segments * model.input_width
    match model.position:
        case Learned(offset=offset):
            learned += (model.learned_positions + offset) * sides * model.input_width
        case RelativeBias(buckets=buckets):
            learned += buckets * model.attention.heads * sides
        case _:
            pass
    return learned


@dataclass(frozen=True, slots=True)
class Flops:
    """FLOPs of training on one token. Recomputed FLOPs take time but do not count for MFU."""

    matmul: int
    attention: int
    recompute: int

    def __add__(self, other: "Flops") -> "Flops":
        attention = self.attention + other.attention
        return Flops(self.matmul + other.matmul, attention, self.recompute + other.recompute)

    @property
    def model(self) -> int:
        return self.matmul + self.attention

    @property
    def hardware(self) -> int:
        return self.model + self.recompute


@lru_cache(maxsize=256)
def flops_per_token(
    model: Model, *, recompute: Recompute = False, predicted: int | None = None
) -> Flops:
    """`predicted` is the number of tokens of a row that the head reads; None: all of them."""
    projections = model.mtp * 2 * model.width**2
    blocks = projections + _value_gates(model)
    blocks += sum_blocks(model, lambda each, _: each.attention - each.source + each.ffn_matmul)
    smear = model.smear_inputs * model.smear
    heads = (1 + model.mtp) * (head_matrix(model) + transform_matrix(model))
    heads = heads * (predicted or model.seq) // model.seq
    inputs = (1 + model.mtp) * (model.embedding_rank or 0) * model.width
    heads += row_head(model)[0] // model.seq  # reads one token of each row
    attention = sum_blocks(model, lambda _, layer: _scores(model, layer))
    encoder = [layer_params(model, each, source=True) for each in range(model.source_layers)]
    if encoder:
        # Counted per row, then divided among the decoder's tokens.
        read = sum_blocks(model, lambda each, _: each.source)
        read += sum(each.attention + each.ffn_matmul for each in encoder)
        blocks += read * model.source_length // model.seq
        inputs += inputs * model.source_length // model.seq
        attention += _source_scores(model)
    repeated = 0
    if recompute is True:
        # One more forward pass, which is a third of forward and backward.
        repeated = 2 * blocks + attention // 3
    elif recompute == "selective":
        repeated = 2 * sum_blocks(model, lambda each, _: each.ffn_recomputed)
        source = sum(each.ffn_recomputed for each in encoder)
        repeated += 2 * source * model.source_length // model.seq
    return Flops(6 * (blocks + smear + heads + inputs), attention, repeated)


def block_layers(model: Model) -> list[int]:
    """Return the layer of every block. Blocks for multi-token prediction are like the last one."""
    return [*range(model.layers), *[model.layers - 1] * model.mtp]


def sum_blocks(model: Model, count: Callable[[LayerParams, int], int]) -> int:
    return sum(count(layer_params(model, layer), layer) for layer in block_layers(model))


def _source_scores(model: Model) -> int:
    """FLOPs of cross-attention and of the encoder's attention, per token of the decoder."""
    a = model.attention
    keys = model.source_length
    per_key = 6 * a.heads * (a.score_dim + a.value_dim)
    flops = model.layers * per_key * keys
    for layer in range(model.source_layers):
        window = min(a.window or keys, keys) if model.windowed(layer) else keys
        # The same average number of keys as in `_scores`, on both sides.
        flops += per_key * window * (2 * keys - window) // model.seq
    return flops


def _scores(model: Model, layer: int) -> int:
    """FLOPs of scores and weighted values in one layer, per token."""
    a = model.attention
    seq = model.seq
    window = min(a.window, seq) if a.window is not None and model.windowed(layer) else seq
    # The i-th query attends to min(i, window) keys, on average window·(2·seq − window) / (2·seq).
    sides = 1 if model.causal else 2  # an encoder also attends to as many keys on the right
    return sides * 3 * a.heads * (a.score_dim + a.value_dim) * window * (2 * seq - window) // seq
