"""Our model settings as Hugging Face's config.json, and back: one row per family of transformers.

Most settings are renamed (`Family.keys`); a `Converter` handles the rest. A setting that does not
survive the round trip to config.json and back has no counterpart in that family.
"""

import math
from collections.abc import Mapping
from typing import Any

from pipeline.config.dump import flat
from pipeline.config.layers import merge, nearest, nested, validate
from pipeline.config.parts import NTK, MoE, RoPE
from pipeline.config.shape import Model
from pipeline.config.switches import Multipliers
from pipeline.errors import ConfigError
from pipeline.hub import settings
from pipeline.hub.settings import Family, Table
from pipeline.hub.stack_families import STACK_FAMILIES

_ENDS = "vocab_size:vocab initializer_range:init_std tie_word_embeddings:tied"
_SHAPE = (
    f"{_ENDS} max_position_embeddings:seq hidden_size:width num_hidden_layers:layers "
    "num_attention_heads:attention.heads"
)
_GROUPED = (
    f"{_SHAPE} rms_norm_eps:norm.eps num_key_value_heads:attention.kv_heads "
    "head_dim:attention.head_dim"
)
_BIASES = "attention_bias:attention.bias attention_bias:attention.out_bias"
_DENSE = f"{_GROUPED} intermediate_size:ffn.hidden"
_EXPERTS = (
    "num_experts_per_tok:ffn.top_k moe_intermediate_size:ffn.hidden "
    "intermediate_size:ffn.dense_hidden"
)
_SHARED = (
    f"{_EXPERTS} n_group:ffn.groups topk_group:ffn.top_groups n_routed_experts:ffn.experts "
    "n_shared_experts:ffn.shared routed_scaling_factor:ffn.scale "
    "first_k_dense_replace:ffn.dense_layers"
)
# MLA has no grouped keys, but transformers reads num_key_value_heads all the same.
_LATENT = (
    f"{_SHAPE} {_SHARED} num_key_value_heads:attention.heads q_lora_rank:attention.q_rank "
    "kv_lora_rank:attention.kv_rank qk_nope_head_dim:attention.nope_dim "
    "qk_rope_head_dim:attention.rope_dim v_head_dim:attention.v_dim"
)
# The class of our own (modeling_isoflop.py) has a key for most settings.
_OURS = (
    f"{_SHAPE} num_key_value_heads:attention.kv_heads head_dim:attention.head_dim "
    "norm_type:norm.kind norm_eps:norm.eps norm_gain:norm.gain norm_bias:norm.bias "
    "norm_placement:placement parallel_block:parallel_block position_type:position.kind "
    "nope_every:nope_every qk_norm:attention.qk_norm "
    "attention_bias:attention.bias attention_out_bias:attention.out_bias "
    "attention_window:attention.window global_attention_every:attention.global_every "
    "attention_softcap:attention.softcap attention_sinks:attention.sinks "
    "score_scale:attention.score_scale ffn_type:ffn.kind hidden_act:ffn.activation "
    "intermediate_size:ffn.hidden embedding_norm:embedding_norm "
    "value_embeddings:value_embeddings smear:smear residual_scales:residual_scales "
    "backout:backout logit_softcap:logit_softcap embedding_multiplier:multipliers.embedding "
    "residual_multiplier:multipliers.residual logit_multiplier:multipliers.logits"
)
# Parts of `Family.implied`.
_RMS = {"norm": {"kind": "rmsnorm"}}
_SWIGLU = {"ffn": {"kind": "ffn", "activation": "swiglu"}}
_SOFTMAX = {"ffn": {"kind": "moe", "activation": "swiglu", "router": "softmax"}}
_SIGMOID = {"ffn": {"kind": "moe", "activation": "swiglu", "router": "sigmoid", "bias_step": 0.001}}
_QK_NORM = {"attention": {"kind": "gqa", "qk_norm": True}}
_PLAIN = {"attention": {"kind": "gqa"}}
# the norms inside DeepSeek's attention always use this eps
_MLA = {"norm": {"kind": "rmsnorm", "eps": 1e-6}, "attention": {"kind": "mla"}}
# Parts of `Family.fixed`.
_SILU = {"hidden_act": "silu"}
_DEEPSEEK = {**_SILU, "attention_bias": False, "rms_norm_eps": 1e-6}

# Of several families that lose equally little of a model, the first is chosen.
FAMILIES = (
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        f"{_ENDS} n_positions:seq n_embd:width n_layer:layers n_head:attention.heads "
        "n_inner:ffn.hidden layer_norm_epsilon:norm.eps",
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
        (settings.GPT2_SHAPE,),
        ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    ),
    Family(
        "llama",
        "LlamaForCausalLM",
        f"{_DENSE} {_BIASES} mlp_bias:ffn.bias",
        {**_RMS, **_PLAIN, **_SWIGLU},
        _SILU,
        (settings.ROPE,),
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        f"{_DENSE} {_BIASES}",
        {**_RMS, **_QK_NORM, **_SWIGLU},
        _SILU,
        (settings.ROPE, settings.WINDOWS),
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        f"{_DENSE} sliding_window:attention.window",
        {**_RMS, **_PLAIN, **_SWIGLU},
        _SILU,
        (settings.ROPE,),
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        f"{_DENSE} intermediate_size:ffn.dense_hidden sliding_window:attention.window "
        "num_local_experts:ffn.experts num_experts_per_tok:ffn.top_k",
        {**_RMS, **_PLAIN, **_SOFTMAX},
        _SILU,
        (settings.ROPE,),
        ("router_jitter_noise",),
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        # num_local_experts is the newer name of num_experts
        f"{_GROUPED} {_BIASES} {_EXPERTS} norm_topk_prob:ffn.normalise "
        "num_experts:ffn.experts num_local_experts:ffn.experts",
        {**_RMS, **_QK_NORM, **_SOFTMAX},
        {**_SILU, "decoder_sparse_step": 1, "use_sliding_window": False},
        (settings.ROPE, settings.ROUTED),
    ),
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        f"{_LATENT} norm_topk_prob:ffn.normalise num_nextn_predict_layers:mtp",
        {**_MLA, **_SIGMOID},
        {**_DEEPSEEK, "rope_interleave": True},
        (settings.ROPE_AND_SCORES, settings.DENSE_FIRST),
    ),
    Family(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        _LATENT,
        {**_MLA, "ffn": {**_SOFTMAX["ffn"], "normalise": False}},
        {**_DEEPSEEK, "norm_topk_prob": False, "mlp_bias": False},
        (settings.ROPE_AND_SCORES, settings.DENSE_FIRST, settings.GREEDY),
    ),
    Family(
        "dots1",
        "Dots1ForCausalLM",
        f"{_GROUPED} {_BIASES} {_SHARED} norm_topk_prob:ffn.normalise",
        {**_RMS, **_QK_NORM, **_SIGMOID},
        _SILU,
        (settings.ROPE, settings.WINDOWS),
    ),
    *STACK_FAMILIES,
    # Last, because a class of transformers itself runs in more programs.
    Family(
        "isoflop",
        "IsoflopForCausalLM",
        _OURS,
        _PLAIN,
        {
            "auto_map": {
                "AutoConfig": "configuration_isoflop.IsoflopConfig",
                "AutoModelForCausalLM": "modeling_isoflop.IsoflopForCausalLM",
            }
        },
        (settings.OUR_FFN, settings.OUR_POSITION),
    ),
)

# settings that only training uses, and the names of a model
_FREE = {"size", "arch", "scaled_embedding", "mtp", "mtp_weight"}
_FREE |= {"init", "init_out", "embedding_std", "head_std", "ffn.init_scale"}
_FREE |= {f"ffn.{key}" for key in ("aux_loss", "seq_aux_loss", "z_loss", "bias_step")}


def to_hub_config(model: Model, family: Family) -> Table:
    """Return the model part of config.json, without token ids and dtype."""
    model = _in_numbers(model)
    ours_flat = flat(model)
    table: Table = {"architectures": [family.architecture], "model_type": family.kind}
    table |= family.fixed
    # Reversed, so that the first of several pairs with the same key of theirs wins.
    for theirs, ours in reversed(_pairs(family)):
        if ours in ours_flat:
            table[theirs] = ours_flat[ours]
    table |= dict.fromkeys(family.zeros, 0.0)
    for converter in family.converters:
        table |= converter.write(model)
    return table


def from_hub_config(theirs: Mapping[str, Any]) -> tuple[Model, Family]:
    """Return our model for a config.json in which transformers has filled in every default."""
    kind = str(theirs.get("model_type"))
    found = [family for family in FAMILIES if family.kind == kind]
    # Some kinds have several classes, of which the first has every part.
    classes = theirs.get("architectures") or []
    family = next((each for each in found if each.architecture in classes), None)
    family = family or next(iter(found), None)
    if family is None:
        known = nearest(kind, [family.kind for family in FAMILIES])
        raise ConfigError(f"model_type={kind!r} in config.json has no counterpart here{known}")
    for key, value in family.fixed.items():
        if theirs.get(key, value) != value:
            raise ConfigError(
                f"{key}={theirs[key]!r} in config.json has no counterpart here, only {value!r}"
            )
    # Older files leave head_dim out.
    if theirs.get("head_dim") is None and "hidden_size" in theirs:
        theirs = {**theirs, "head_dim": theirs["hidden_size"] // theirs["num_attention_heads"]}
    return _read(theirs, family), family


def _read(theirs: Mapping[str, Any], family: Family) -> Model:
    table: Table = {"arch": family.kind, **family.implied}
    for key, ours in _pairs(family):
        # A key that is missing or null leaves our default.
        if theirs.get(key) is not None:
            table = merge(table, nested(ours, theirs[key]))
    for converter in family.converters:
        table = merge(table, converter.read(theirs))
    return validate(Model, table, where="config.json")


def choose_family(model: Model) -> Family:
    """Return the family that can express the model, or raise an error that names a setting."""
    lost = {family.architecture: _lost(model, family) for family in FAMILIES}
    family = min(FAMILIES, key=lambda family: len(lost[family.architecture]))
    missing = lost[family.architecture]
    if missing:
        # name a setting that no family has, if there is one
        nowhere = [key for key in missing if all(key in other for other in lost.values())]
        key = (nowhere or list(missing))[0]
        raise ConfigError(
            f"model.{key}={missing[key]!r} has no counterpart in {family.architecture}, the "
            "nearest class of transformers; only a model without it can be exported"
        )
    return family


def _lost(model: Model, family: Family) -> Table:
    """Return our settings that do not survive the round trip through the family's config.json."""
    ours = flat(_in_numbers(model))
    try:
        back = flat(_in_numbers(_read(to_hub_config(model, family), family)))
    except (ConfigError, KeyError):
        return {**ours, "": ""}  # worse than any partial loss
    if isinstance(model.ffn, MoE) and all(model.routed(layer) for layer in range(model.layers)):
        ours["ffn.dense_hidden"] = back.get("ffn.dense_hidden")  # no layer uses it
    free = set(_FREE)
    if model.stack == "encoder-decoder":
        free |= {"seq", "source_seq"}  # config.json has the longer one
    keys = [key for key in {**ours, **back} if key not in free]
    return {key: ours.get(key) for key in keys if not _same(ours.get(key), back.get(key))}


def _in_numbers(model: Model) -> Model:
    """Return the same model as config.json can express it: factors as numbers, both lengths, and a
    larger theta instead of NTK scaling."""
    scales = Multipliers(
        embedding=model.embedding_multiplier,
        residual=model.multipliers.residual,
        logits=model.logit_multiplier,
    )
    changes: Table = {"multipliers": scales}
    if model.stack == "encoder-decoder":
        changes |= {"encoder_layers": model.source_layers, "source_seq": model.source_length}
    if isinstance(model.position, RoPE) and isinstance(model.position.scaling, NTK):
        dim = model.attention.rotary_dim
        # This exponent divides the slowest frequency by exactly `factor`.
        theta = model.position.theta * model.position.scaling.factor ** (dim / (dim - 2))
        changes["position"] = RoPE(theta=theta)
    return model.model_copy(update=changes)


def _pairs(family: Family) -> list[tuple[str, str]]:
    """(their key, our key)"""
    pairs = (pair.partition(":") for pair in family.keys.split())
    return [(theirs, ours) for theirs, _, ours in pairs]


def _same(a: Any, b: Any) -> bool:
    # YaRN's factor goes through a logarithm and back, which changes its last digits.
    floats = isinstance(a, float) and isinstance(b, float)
    return math.isclose(a, b, rel_tol=1e-9) if floats else bool(a == b)
