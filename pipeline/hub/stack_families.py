"""Families of transformers that are encoders or encoder–decoders (families.py has the decoders)."""

from collections.abc import Mapping
from typing import Any

from pipeline.config.shape import Model
from pipeline.errors import ConfigError
from pipeline.hub.settings import Converter, Family, Table, layer_types

# Their name of an activation → ours.
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu", "silu": "silu"}
_T5_ACTIVATIONS = {"relu": "relu", "gated-gelu": "tanh_geglu", "gated-silu": "swiglu"}


def _renamed(key: str, ours: str, names: Mapping[Any, Any]) -> Converter:
    """A setting whose values have other names too."""
    back = {value: name for name, value in names.items()}
    table, _, leaf = ours.partition(".")

    def write(model: Model) -> Table:
        return {key: back[getattr(getattr(model, table), leaf)]}

    def read(theirs: Mapping[str, Any]) -> Table:
        if theirs[key] not in names:
            known = ", ".join(map(repr, names))
            raise ConfigError(f"{key}={theirs[key]!r} in config.json is none of {known}")
        return {table: {leaf: names[theirs[key]]}}

    return Converter(write, read)


def _heads(width: str, heads: str) -> Converter:
    """Every head has its own keys, and the heads together have the width of the stream."""

    def read(theirs: Mapping[str, Any]) -> Table:
        count = theirs[heads]
        return {"attention": {"kv_heads": count, "head_dim": theirs[width] // count}}

    return Converter(lambda model: {}, read)


_OFFSET = Converter(
    lambda model: {"max_position_embeddings": model.seq + 2},
    lambda theirs: {"seq": theirs["max_position_embeddings"] - 2},
)


def _write_modernbert(model: Model) -> Table:
    position = model.position
    theta = getattr(position, "theta", None)
    return {
        "layer_types": layer_types(model),
        "local_attention": 2 * ((model.attention.window or 1) - 1),
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": theta},
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": getattr(position, "window_theta", None) or theta,
            },
        },
    }


def _read_modernbert(theirs: Mapping[str, Any]) -> Table:
    kinds = theirs["layer_types"]
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    every = full[1] if len(full) > 1 else len(kinds)
    if full != list(range(0, len(kinds), every)):
        raise ConfigError(
            f"layer_types in config.json: the layers with full attention, {full}, have no regular "
            "step from the first and so no counterpart here"
        )
    thetas = {kind: each["rope_theta"] for kind, each in theirs["rope_parameters"].items()}
    return {
        "position": {
            "kind": "rope",
            "theta": thetas["full_attention"],
            "window_theta": thetas["sliding_attention"],
        },
        "attention": {
            "window": theirs["local_attention"] // 2 + 1,
            "global_every": every,
            "global_first": True,
        },
    }


def _write_lengths(model: Model) -> Table:
    both = {"encoder_ffn_dim": model.ffn.hidden, "encoder_attention_heads": model.attention.heads}
    return {**both, "max_position_embeddings": max(model.seq, model.source_length)}


def _read_lengths(theirs: Mapping[str, Any]) -> Table:
    for key in ("ffn_dim", "attention_heads"):
        sides = theirs[f"encoder_{key}"], theirs[f"decoder_{key}"]
        if sides[0] != sides[1]:
            text = f"encoder_{key}={sides[0]} and decoder_{key}={sides[1]} in config.json differ"
            raise ConfigError(f"{text}; here both sides have the same")
    longest = theirs["max_position_embeddings"]
    return {"seq": longest, "source_seq": longest}


def _read_t5(theirs: Mapping[str, Any]) -> Table:
    """transformers ties every T5 but scales its logits by this key; T5 v1.1 has neither."""
    scaled = theirs.get("scale_decoder_outputs", theirs["tie_word_embeddings"])
    length = theirs.get("n_positions", 512)
    table: Table = {"tied": scaled, "seq": length, "source_seq": length}
    return table | ({"multipliers": {"logits": "root_width"}} if scaled else {})


def _write_t5(model: Model) -> Table:
    return {"tie_word_embeddings": model.tied, "n_positions": max(model.seq, model.source_length)}


def _read_electra(theirs: Mapping[str, Any]) -> Table:
    rank = theirs["embedding_size"]
    return {"embedding_rank": None if rank == theirs["hidden_size"] else rank}


def _refuse_no_segments(model: Model) -> Table:
    if not model.segments:
        raise ConfigError("model.segments=0: BERT's classes always look up a segment")
    return {}


_BERT_KEYS = (
    "vocab_size:vocab initializer_range:init_std hidden_size:width num_hidden_layers:layers "
    "num_attention_heads:attention.heads intermediate_size:ffn.hidden layer_norm_eps:norm.eps "
    "max_position_embeddings:seq"
)
_BERT_TIED = f"{_BERT_KEYS} tie_word_embeddings:tied type_vocab_size:segments"
# Parts of `Family.implied`.
_LAYERNORM = {"norm": {"kind": "layernorm", "bias": True}}
_BIASED: Table = {
    **_LAYERNORM,
    "placement": "post",
    "attention": {"kind": "gqa", "bias": True, "out_bias": True},
    "ffn": {"kind": "ffn", "bias": True},
}
_BERT: Table = {
    **_BIASED,
    "stack": "encoder",
    "position": {"kind": "learned"},
    "embedding_norm": "sum",
    "head_transform": True,
    "head_bias": True,
}
_ROWS: Table = {**_BERT, "row_classes": 2}
_NO_DECODER = {"is_decoder": False, "add_cross_attention": False}
_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_BERT_PARTS = (
    _renamed("hidden_act", "ffn.activation", _ACTIVATIONS),
    _heads("hidden_size", "num_attention_heads"),
    Converter(_refuse_no_segments, lambda theirs: {}),
)
_SIDES = (
    "vocab_size:vocab init_std:init_std d_model:width decoder_layers:layers "
    "encoder_layers:encoder_layers decoder_attention_heads:attention.heads "
    "decoder_ffn_dim:ffn.hidden tie_word_embeddings:tied"
)
_SCALE = Converter(
    lambda model: {"scale_embedding": model.embedding_multiplier != 1},
    lambda theirs: (
        {"multipliers": {"embedding": "root_width"}} if theirs["scale_embedding"] else {}
    ),
)
_SIDES_PARTS = (
    _renamed("activation_function", "ffn.activation", _ACTIVATIONS),
    _heads("d_model", "decoder_attention_heads"),
    Converter(_write_lengths, _read_lengths),
    _SCALE,
)
_SIDES_DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")
_SIDES_IMPLIED: Table = {**_BIASED, "stack": "encoder-decoder"}
_SIDES_IMPLIED["norm"] = {**_LAYERNORM["norm"], "eps": 1e-5}  # of nn.LayerNorm, not in config.json
_SIDES_IGNORED = (
    "lm_head.weight",
    "final_logits_bias",
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
)
_COPIES = ("decoder.weight", "decoder.bias")

STACK_FAMILIES = (
    Family(
        "bert",
        "BertForPreTraining",
        _BERT_TIED,
        _ROWS,
        _NO_DECODER,
        _BERT_PARTS,
        _DROPOUTS,
        (*(f"cls.predictions.{copy}" for copy in _COPIES), "bert.embeddings.position_ids"),
    ),
    Family(
        "bert",
        "BertForMaskedLM",
        _BERT_TIED,
        _BERT,
        _NO_DECODER,
        _BERT_PARTS,
        _DROPOUTS,
        (*(f"cls.predictions.{copy}" for copy in _COPIES), "bert.embeddings.position_ids"),
    ),
    Family(
        "roberta",
        "RobertaForMaskedLM",
        _BERT_TIED.replace(" max_position_embeddings:seq", ""),
        {**_BERT, "position": {"kind": "learned", "offset": 2}},
        {**_NO_DECODER, "pad_token_id": 1},  # positions count from the token after padding
        (*_BERT_PARTS, _OFFSET),
        _DROPOUTS,
        (*(f"lm_head.{copy}" for copy in _COPIES), "roberta.embeddings.position_ids"),
    ),
    Family(
        "modernbert",
        "ModernBertForMaskedLM",
        "vocab_size:vocab initializer_range:init_std hidden_size:width num_hidden_layers:layers "
        "num_attention_heads:attention.heads intermediate_size:ffn.hidden norm_eps:norm.eps "
        "max_position_embeddings:seq tie_word_embeddings:tied norm_bias:norm.bias "
        "attention_bias:attention.bias attention_bias:attention.out_bias mlp_bias:ffn.bias "
        "classifier_bias:ffn.bias decoder_bias:head_bias",
        {
            "stack": "encoder",
            "norm": {"kind": "layernorm"},
            "first_norm": False,
            "embedding_norm": "sum",
            "head_transform": True,
            "attention": {"kind": "gqa"},
            "ffn": {"kind": "ffn", "activation": "geglu"},
        },
        {"hidden_activation": "gelu", "classifier_activation": "gelu"},
        (
            _heads("hidden_size", "num_attention_heads"),
            Converter(_write_modernbert, _read_modernbert),
        ),
        ("attention_dropout", "embedding_dropout", "mlp_dropout"),
        ("decoder.weight",),
    ),
    Family(
        "distilbert",
        "DistilBertForMaskedLM",
        "vocab_size:vocab initializer_range:init_std dim:width n_layers:layers "
        "n_heads:attention.heads hidden_dim:ffn.hidden max_position_embeddings:seq "
        "tie_word_embeddings:tied",
        {**_BERT, "norm": {**_LAYERNORM["norm"], "eps": 1e-12}},
        {"sinusoidal_pos_embds": False},
        (_renamed("activation", "ffn.activation", _ACTIVATIONS), _heads("dim", "n_heads")),
        ("dropout", "attention_dropout"),
        ("vocab_projector.weight",),
    ),
    Family(
        "albert",
        "AlbertForPreTraining",
        f"{_BERT_TIED} embedding_size:embedding_rank",
        {**_ROWS, "share_layers": True},
        {"num_hidden_groups": 1, "inner_group_num": 1},
        _BERT_PARTS,
        _DROPOUTS,
        tuple(f"predictions.{copy}" for copy in _COPIES),
    ),
    Family(
        "electra",
        "ElectraForPreTraining",
        f"{_BERT_KEYS} type_vocab_size:segments",
        {**_BERT, "head": "replaced", "tied": False},
        _NO_DECODER,
        (
            *_BERT_PARTS,
            Converter(lambda model: {"embedding_size": model.input_width}, _read_electra),
        ),
        _DROPOUTS,
        ("electra.embeddings.position_ids",),
    ),
    Family(
        "t5",
        "T5ForConditionalGeneration",
        "vocab_size:vocab initializer_factor:init_std d_model:width num_decoder_layers:layers "
        "num_layers:encoder_layers num_heads:attention.heads num_heads:attention.kv_heads "
        "d_kv:attention.head_dim d_ff:ffn.hidden layer_norm_epsilon:norm.eps "
        "relative_attention_num_buckets:position.buckets "
        "relative_attention_max_distance:position.max_distance",
        {
            "stack": "encoder-decoder",
            "norm": {"kind": "rmsnorm"},
            "position": {"kind": "relative"},
            "attention": {"kind": "gqa", "scaled": False},
            "ffn": {"kind": "ffn"},
        },
        {"is_encoder_decoder": True},
        (
            _renamed("feed_forward_proj", "ffn.activation", _T5_ACTIVATIONS),
            Converter(_write_t5, _read_t5),
        ),
        ("dropout_rate",),
        ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),
    ),
    Family(
        "bart",
        "BartForConditionalGeneration",
        _SIDES,
        {**_SIDES_IMPLIED, "embedding_norm": "sum", "position": {"kind": "learned", "offset": 2}},
        {"is_encoder_decoder": True},
        _SIDES_PARTS,
        _SIDES_DROPOUTS,
        _SIDES_IGNORED,
    ),
    Family(
        "marian",
        "MarianMTModel",
        _SIDES,
        {**_SIDES_IMPLIED, "position": {"kind": "sinusoidal", "halves": True}},
        {"is_encoder_decoder": True, "share_encoder_decoder_embeddings": True},
        _SIDES_PARTS,
        _SIDES_DROPOUTS,
        (
            *_SIDES_IGNORED,
            "model.encoder.embed_positions.weight",
            "model.decoder.embed_positions.weight",
        ),
    ),
)
