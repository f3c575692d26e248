"""Which of Hugging Face's classes a model of ours is, and what its config.json says: one table per family, both ways.

What has no counterpart is found by going there and back: a setting that does not return has none.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline.config.dump import flat
from pipeline.config.layers import merge, nearest, validate
from pipeline.config.parts import NTK, MoE, RoPE
from pipeline.config.shape import Model
from pipeline.errors import ConfigError
from pipeline.hub.settings import (
    DENSE_FIRST,
    GPT2_SHAPE,
    GREEDY,
    ROPE,
    ROPE_AND_SCORES,
    ROUTED,
    WINDOWS,
    Also,
    Table,
)


class Family(NamedTuple):
    kind: str  # transformers' model_type
    architecture: str
    keys: str  # theirs:ours
    implied: Table  # of ours
    fixed: Table  # of theirs: written, and held on import
    also: tuple[Also, ...] = ()
    silent: tuple[str, ...] = ()  # theirs, written as 0: dropout


# ── The families ─────────────────────────────────────────────────────────────────────────────────────────────────────

_ENDS = "vocab_size:vocab initializer_range:init_std tie_word_embeddings:tied"
_SHAPE = (
    f"{_ENDS} max_position_embeddings:seq hidden_size:width num_hidden_layers:layers "
    "num_attention_heads:attention.heads"
)
_GROUPED = f"{_SHAPE} rms_norm_eps:norm.eps num_key_value_heads:attention.kv_heads head_dim:attention.head_dim"
_BIASES = "attention_bias:attention.bias attention_bias:attention.out_bias"
_DENSE = f"{_GROUPED} intermediate_size:ffn.hidden"
_EXPERTS = "num_experts_per_tok:ffn.top_k moe_intermediate_size:ffn.hidden intermediate_size:ffn.dense_hidden"
_SHARED = (
    f"{_EXPERTS} n_group:ffn.groups topk_group:ffn.top_groups n_routed_experts:ffn.experts n_shared_experts:ffn.shared "
    "routed_scaling_factor:ffn.scale first_k_dense_replace:ffn.dense_layers"
)
_LATENT = (
    f"{_SHAPE} {_SHARED} num_key_value_heads:attention.heads q_lora_rank:attention.q_rank "
    "kv_lora_rank:attention.kv_rank qk_nope_head_dim:attention.nope_dim qk_rope_head_dim:attention.rope_dim "
    "v_head_dim:attention.v_dim"
)
_RMS = {"norm": {"kind": "rmsnorm"}}
_SWIGLU = {"ffn": {"kind": "ffn", "activation": "swiglu"}}
_SOFTMAX = {"ffn": {"kind": "moe", "activation": "swiglu", "router": "softmax"}}
_SIGMOID = {"ffn": {"kind": "moe", "activation": "swiglu", "router": "sigmoid", "bias_step": 0.001}}
_QK_NORM = {"attention": {"kind": "gqa", "qk_norm": True}}
_PLAIN = {"attention": {"kind": "gqa"}}
_MLA = {
    "norm": {"kind": "rmsnorm", "eps": 1e-6},
    "attention": {"kind": "mla"},
}  # its inner norms take no other eps
_SILU = {"hidden_act": "silu"}
_DEEPSEEK = {**_SILU, "attention_bias": False, "rms_norm_eps": 1e-6}

FAMILIES = (
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        f"{_ENDS} n_positions:seq n_embd:width n_layer:layers n_head:attention.heads n_inner:ffn.hidden "
        "layer_norm_epsilon:norm.eps",
        {
            "norm": {"kind": "layernorm", "bias": True},
            "position": {"kind": "learned"},
            "attention": {"kind": "gqa", "bias": True, "out_bias": True},
            "ffn": {"kind": "ffn", "activation": "gelu_tanh", "bias": True},
        },
        {
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        (GPT2_SHAPE,),
        ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    ),
    Family(
        "llama",
        "LlamaForCausalLM",
        f"{_DENSE} {_BIASES} mlp_bias:ffn.bias",
        {**_RMS, **_PLAIN, **_SWIGLU},
        _SILU,
        (ROPE,),
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        f"{_DENSE} {_BIASES}",
        {**_RMS, **_QK_NORM, **_SWIGLU},
        _SILU,
        (ROPE, WINDOWS),
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        f"{_DENSE} sliding_window:attention.window",
        {**_RMS, **_PLAIN, **_SWIGLU},
        _SILU,
        (ROPE,),
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        f"{_DENSE} intermediate_size:ffn.dense_hidden sliding_window:attention.window num_local_experts:ffn.experts "
        "num_experts_per_tok:ffn.top_k",
        {**_RMS, **_PLAIN, **_SOFTMAX},
        _SILU,
        (ROPE,),
        ("router_jitter_noise",),
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        f"{_GROUPED} {_BIASES} {_EXPERTS} norm_topk_prob:ffn.normalise num_experts:ffn.experts "
        "num_local_experts:ffn.experts",  # its newer name for it
        {**_RMS, **_QK_NORM, **_SOFTMAX},
        {**_SILU, "decoder_sparse_step": 1, "use_sliding_window": False},
        (ROPE, ROUTED),
    ),
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        f"{_LATENT} norm_topk_prob:ffn.normalise num_nextn_predict_layers:mtp",
        {**_MLA, **_SIGMOID},
        {**_DEEPSEEK, "rope_interleave": True},
        (ROPE_AND_SCORES, DENSE_FIRST),
    ),
    Family(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        _LATENT,
        {**_MLA, "ffn": {**_SOFTMAX["ffn"], "normalise": False}},
        {**_DEEPSEEK, "norm_topk_prob": False, "mlp_bias": False},
        (ROPE_AND_SCORES, DENSE_FIRST, GREEDY),
    ),
    Family(
        "dots1",
        "Dots1ForCausalLM",
        f"{_GROUPED} {_BIASES} {_SHARED} norm_topk_prob:ffn.normalise",
        {**_RMS, **_QK_NORM, **_SIGMOID},
        _SILU,
        (ROPE, WINDOWS),
    ),
)

# what only training uses, and what names a model
_FREE = {
    "size",
    "arch",
    "scaled_embedding",
    "mtp",
    "mtp_weight",
    *(f"ffn.{k}" for k in ("aux_loss", "seq_aux_loss", "z_loss", "bias_step")),
}


def to_hub_config(model: Model, family: Family) -> Table:
    """config.json, without tokens and dtype."""
    model = _plain(model)
    settings = flat(model)
    table: Table = {
        "architectures": [family.architecture],
        "model_type": family.kind,
        **family.fixed,
    }
    table |= {
        theirs: settings[ours] for theirs, ours in reversed(_pairs(family)) if ours in settings
    }
    table |= dict.fromkeys(family.silent, 0.0)
    for also in family.also:
        table |= also.write(model)
    return table


def from_hub_config(theirs: Mapping[str, Any]) -> tuple[Model, Family]:
    """Our model of a config.json that has every default filled in."""
    kind = str(theirs.get("model_type"))
    family = next((f for f in FAMILIES if f.kind == kind), None)
    if family is None:
        raise ConfigError(
            f"model_type={kind!r} in config.json has no counterpart{nearest(kind, [f.kind for f in FAMILIES])}"
        )
    for key, value in family.fixed.items():
        if theirs.get(key, value) != value:
            raise ConfigError(
                f"{key}={theirs[key]!r} in config.json has no counterpart here, only {value!r}"
            )
    if theirs.get("head_dim") is None and "hidden_size" in theirs:
        theirs = {**theirs, "head_dim": theirs["hidden_size"] // theirs["num_attention_heads"]}
    return _read(theirs, family), family


def _read(theirs: Mapping[str, Any], family: Family) -> Model:
    table: Table = {"arch": family.kind, **family.implied}
    for key, ours in _pairs(family):
        if (part := theirs.get(key)) is not None:
            for name in reversed(ours.split(".")):
                part = {name: part}
            table = merge(table, part)
    for also in family.also:
        table = merge(table, also.read(theirs))
    return validate(Model, table, where="config.json")


def choose_family(model: Model) -> Family:
    """The family that says all of it, or an error that names the first thing the nearest one cannot say."""
    lost = {family.kind: _lost(model, family) for family in FAMILIES}
    family = min(FAMILIES, key=lambda f: len(lost[f.kind]))
    if lost[family.kind]:
        nowhere = [key for key in lost[family.kind] if all(key in other for other in lost.values())]
        key = (nowhere or list(lost[family.kind]))[0]
        raise ConfigError(
            f"model.{key}={lost[family.kind][key]!r} has no counterpart in {family.architecture}, the nearest of "
            "transformers' classes; a model without it has one"
        )
    return family


def _lost(model: Model, family: Family) -> Table:
    ours = flat(_plain(model))
    try:
        back = flat(_read(to_hub_config(model, family), family))
    except (ConfigError, KeyError):
        return {**ours, "": ""}  # cannot say it at all
    if isinstance(model.ffn, MoE) and all(model.routed(layer) for layer in range(model.layers)):
        ours["ffn.dense_hidden"] = back.get("ffn.dense_hidden")
    return {
        k: ours.get(k)
        for k in {**ours, **back}
        if k not in _FREE and not _same(ours.get(k), back.get(k))
    }


def _plain(model: Model) -> Model:
    """NTK scaling is another base, and nothing else."""
    if not (isinstance(model.position, RoPE) and isinstance(model.position.scaling, NTK)):
        return model
    dim, factor = model.attention.rotary_dim, model.position.scaling.factor
    theta = model.position.theta * factor ** (dim / (dim - 2))
    return model.model_copy(update={"position": RoPE(theta=theta)})


def _pairs(family: Family) -> list[tuple[str, str]]:
    return [
        (theirs, ours) for theirs, _, ours in (pair.partition(":") for pair in family.keys.split())
    ]


def _same(a: Any, b: Any) -> bool:
    return (
        math.isclose(a, b, rel_tol=1e-9)
        if isinstance(a, float) and isinstance(b, float)
        else bool(a == b)
    )
