"""Which of Hugging Face's classes a model of ours is, and what its config.json says: one table per family, both ways.

What has no counterpart is found by going there and back: a setting that does not return has none.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pipeline.config.load import merge, nearest, validate
from pipeline.config.schema import FFN, NTK, Linear, Llama3, Model, MoE, RoPE, YaRN
from pipeline.errors import ConfigError

Table = dict[str, Any]


class Also(NamedTuple):
    """What takes more than a name: ours → their keys, and back to a part of our table."""

    write: Callable[[Model], Table]
    read: Callable[[Mapping[str, Any]], Table]


class Family(NamedTuple):
    kind: str  # transformers' model_type
    architecture: str
    keys: tuple[tuple[str, str], ...]  # theirs, ours
    implied: Table  # of ours
    fixed: Table  # of theirs: written, and held on import
    also: tuple[Also, ...] = ()
    silent: tuple[str, ...] = ()  # theirs, written as 0: dropout


# ── What takes more than a name ──────────────────────────────────────────────────────────────────────────────────────


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def _write_rope(model: Model) -> Table:
    if not isinstance(model.position, RoPE):
        return {}
    s, theta = model.position.scaling, model.position.theta
    match s:
        case Linear():
            more: Table = {"rope_type": "linear", "factor": s.factor}
        case Llama3():
            more = {"rope_type": "llama3", "factor": s.factor, "low_freq_factor": s.low, "high_freq_factor": s.high}
            more["original_max_position_embeddings"] = s.original_seq
        case YaRN():
            more = {"rope_type": "yarn", "factor": s.factor, "beta_fast": s.beta_fast, "beta_slow": s.beta_slow}
            more["original_max_position_embeddings"] = s.original_seq
            if s.attention is not None:
                more["attention_factor"] = s.attention
            if s.scores != 1 and s.factor > 1:
                more["mscale_all_dim"] = (math.sqrt(s.scores) - 1) / (0.1 * math.log(s.factor))
        case _:
            more = {"rope_type": "default"}
    return {"rope_parameters": {"rope_theta": theta, **more}}


def _read_rope(theirs: Mapping[str, Any], *, scores: bool = False) -> Table:
    p = theirs["rope_parameters"]
    kind, theta = p.get("rope_type", "default"), {"kind": "rope", "theta": p["rope_theta"]}
    if p.get("partial_rotary_factor", 1.0) != 1:
        raise ConfigError(f"partial_rotary_factor={p['partial_rotary_factor']} in config.json: we turn all channels")
    original = p.get("original_max_position_embeddings") or theirs["max_position_embeddings"]
    match kind:
        case "default":
            return {"position": theta}
        case "linear":
            scaling: Table = {"kind": "linear", "factor": p["factor"]}
        case "llama3":
            scaling = {"kind": "llama3", "factor": p["factor"], "original_seq": original}
            scaling |= {"low": p["low_freq_factor"], "high": p["high_freq_factor"]}
        case "yarn":
            factor = p.get("factor") or theirs["max_position_embeddings"] / original
            attention, whole = p.get("attention_factor"), p.get("mscale_all_dim") or 0
            if attention is None and p.get("mscale") and whole:
                attention = _mscale(factor, p["mscale"]) / _mscale(factor, whole)
            scaling = {"kind": "yarn", "factor": factor, "original_seq": original, "attention": attention}
            scaling |= {"beta_fast": p.get("beta_fast") or 32, "beta_slow": p.get("beta_slow") or 1}
            scaling["scores"] = _mscale(factor, whole) ** 2 if scores and whole else 1.0
        case _:
            raise ConfigError(f"rope_type={kind!r} in config.json; known: default, linear, llama3, yarn")
    return {"position": {**theta, "scaling": scaling}}


def _write_windows(model: Model) -> Table:
    kinds = ["sliding" if model.windowed(layer) else "full" for layer in range(model.layers)]
    window = model.attention.window
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": [f"{kind}_attention" for kind in kinds],
    }


def _read_windows(theirs: Mapping[str, Any]) -> Table:
    kinds = theirs.get("layer_types") or []
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    if len(full) == len(kinds):
        return {}
    every = full[0] + 1 if full else None
    if every and full != list(range(every - 1, len(kinds), every)):
        raise ConfigError(f"layer_types in config.json: full attention in layers {full}, which is no regular step")
    return {"attention": {"window": theirs["sliding_window"], "global_every": every}}


def _write_routed(model: Model) -> Table:
    return {"mlp_only_layers": [layer for layer in range(model.layers) if not model.routed(layer)]}


def _read_routed(theirs: Mapping[str, Any]) -> Table:
    layers, step, dense = theirs["num_hidden_layers"], theirs["decoder_sparse_step"], theirs["mlp_only_layers"] or []
    routed = {layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0}
    for first in range(layers):
        for every in range(1, layers - first + 1):
            if routed == {layer for layer in range(first, layers) if (layer - first) % every == every - 1}:
                return {"ffn": {"dense_layers": first, "every": every}}
    raise ConfigError(f"mlp_only_layers={dense} in config.json leaves routed layers at no regular step")


def _write_dense(model: Model) -> Table:
    if not isinstance(model.ffn, FFN):
        return {}
    return {"first_k_dense_replace": model.layers, "intermediate_size": model.ffn.hidden}


def _read_dense(theirs: Mapping[str, Any]) -> Table:
    if theirs["first_k_dense_replace"] < theirs["num_hidden_layers"]:
        return {}
    return {"ffn": {"kind": "ffn", "activation": "swiglu", "hidden": theirs["intermediate_size"]}}


_ROPE = Also(_write_rope, _read_rope)
_ROPE_AND_SCORES = Also(_write_rope, lambda theirs: _read_rope(theirs, scores=True))
_WINDOWS = Also(_write_windows, _read_windows)
_ROUTED = Also(_write_routed, _read_routed)
_DENSE_FIRST = Also(_write_dense, _read_dense)
_GREEDY = Also(
    lambda model: {"topk_method": "group_limited_greedy" if getattr(model.ffn, "groups", 1) > 1 else "greedy"},
    lambda theirs: {"ffn": {"groups": 1, "top_groups": 1}} if theirs["topk_method"] == "greedy" else {},
)
_GPT2_SHAPE = Also(
    lambda model: {},
    lambda theirs: {
        "attention": {"kv_heads": theirs["n_head"], "head_dim": theirs["n_embd"] // theirs["n_head"]},
        "ffn": {"hidden": theirs["n_inner"] or 4 * theirs["n_embd"]},
    },
)


# ── The families ─────────────────────────────────────────────────────────────────────────────────────────────────────

_ENDS = (("vocab_size", "vocab"), ("initializer_range", "init_std"), ("tie_word_embeddings", "tied"))
_SHAPE = (
    *_ENDS,
    ("max_position_embeddings", "seq"),
    ("hidden_size", "width"),
    ("num_hidden_layers", "layers"),
    ("rms_norm_eps", "norm.eps"),
    ("num_attention_heads", "attention.heads"),
)
_GROUPED = (*_SHAPE, ("num_key_value_heads", "attention.kv_heads"), ("head_dim", "attention.head_dim"))
_BIASES = (("attention_bias", "attention.bias"), ("attention_bias", "attention.out_bias"))
_DENSE = (("intermediate_size", "ffn.hidden"),)
_GROUPS = (("n_group", "ffn.groups"), ("topk_group", "ffn.top_groups"))
_EXPERTS = (
    ("num_experts_per_tok", "ffn.top_k"),
    ("moe_intermediate_size", "ffn.hidden"),
    ("intermediate_size", "ffn.dense_hidden"),
)
_SHARED = (
    *_EXPERTS,
    *_GROUPS,
    ("n_routed_experts", "ffn.experts"),
    ("n_shared_experts", "ffn.shared"),
    ("routed_scaling_factor", "ffn.scale"),
    ("first_k_dense_replace", "ffn.dense_layers"),
)
_LATENT = (
    *(pair for pair in _SHAPE if pair[1] != "norm.eps"),
    ("num_key_value_heads", "attention.heads"),
    ("q_lora_rank", "attention.q_rank"),
    ("kv_lora_rank", "attention.kv_rank"),
    ("qk_nope_head_dim", "attention.nope_dim"),
    ("qk_rope_head_dim", "attention.rope_dim"),
    ("v_head_dim", "attention.v_dim"),
)
_RMS = {"norm": {"kind": "rmsnorm"}}
_SWIGLU = {"ffn": {"kind": "ffn", "activation": "swiglu"}}
_SOFTMAX = {"ffn": {"kind": "moe", "activation": "swiglu", "router": "softmax"}}
_SIGMOID = {"ffn": {"kind": "moe", "activation": "swiglu", "router": "sigmoid", "bias_step": 0.001}}
_QK_NORM = {"attention": {"kind": "gqa", "qk_norm": True}}
_PLAIN = {"attention": {"kind": "gqa"}}
_MLA = {"norm": {"kind": "rmsnorm", "eps": 1e-6}, "attention": {"kind": "mla"}}  # its inner norms take no other eps
_SILU = {"hidden_act": "silu"}
_DEEPSEEK = {**_SILU, "attention_bias": False, "rms_norm_eps": 1e-6}

FAMILIES = (
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        (
            *_ENDS,
            ("n_positions", "seq"),
            ("n_embd", "width"),
            ("n_layer", "layers"),
            ("n_head", "attention.heads"),
            ("n_inner", "ffn.hidden"),
            ("layer_norm_epsilon", "norm.eps"),
        ),
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
        (_GPT2_SHAPE,),
        ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    ),
    Family(
        "llama",
        "LlamaForCausalLM",
        (*_GROUPED, *_DENSE, *_BIASES, ("mlp_bias", "ffn.bias")),
        {**_RMS, **_PLAIN, **_SWIGLU},
        _SILU,
        (_ROPE,),
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        (*_GROUPED, *_DENSE, *_BIASES),
        {**_RMS, **_QK_NORM, **_SWIGLU},
        _SILU,
        (_ROPE, _WINDOWS),
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        (*_GROUPED, *_DENSE, ("sliding_window", "attention.window")),
        {**_RMS, **_PLAIN, **_SWIGLU},
        _SILU,
        (_ROPE,),
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        (
            *_GROUPED,
            ("sliding_window", "attention.window"),
            ("num_local_experts", "ffn.experts"),
            ("num_experts_per_tok", "ffn.top_k"),
            ("intermediate_size", "ffn.hidden"),
            ("intermediate_size", "ffn.dense_hidden"),
        ),
        {**_RMS, **_PLAIN, **_SOFTMAX},
        _SILU,
        (_ROPE,),
        ("router_jitter_noise",),
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        (
            *_GROUPED,
            *_BIASES,
            *_EXPERTS,
            ("num_experts", "ffn.experts"),
            ("num_local_experts", "ffn.experts"),  # its newer name for it
            ("norm_topk_prob", "ffn.normalise"),
        ),
        {**_RMS, **_QK_NORM, **_SOFTMAX},
        {**_SILU, "decoder_sparse_step": 1, "use_sliding_window": False},
        (_ROPE, _ROUTED),
    ),
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        (*_LATENT, *_SHARED, ("norm_topk_prob", "ffn.normalise"), ("num_nextn_predict_layers", "mtp")),
        {**_MLA, **_SIGMOID},
        {**_DEEPSEEK, "rope_interleave": True},
        (_ROPE_AND_SCORES, _DENSE_FIRST),
    ),
    Family(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        (*_LATENT, *_SHARED),
        {**_MLA, "ffn": {**_SOFTMAX["ffn"], "normalise": False}},
        {**_DEEPSEEK, "norm_topk_prob": False, "mlp_bias": False},
        (_ROPE_AND_SCORES, _DENSE_FIRST, _GREEDY),
    ),
    Family(
        "dots1",
        "Dots1ForCausalLM",
        (*_GROUPED, *_BIASES, *_SHARED, ("norm_topk_prob", "ffn.normalise")),
        {**_RMS, **_QK_NORM, **_SIGMOID},
        _SILU,
        (_ROPE, _WINDOWS),
    ),
)

# what only training uses, and what names a model
_FREE = {
    "size",
    "arch",
    "mtp",
    "mtp_weight",
    *(f"ffn.{k}" for k in ("aux_loss", "seq_aux_loss", "z_loss", "bias_step")),
}


def write(model: Model, family: Family) -> Table:
    """config.json, without tokens and dtype."""
    flat = _flat(model)
    table: Table = {"architectures": [family.architecture], "model_type": family.kind, **family.fixed}
    table |= {theirs: flat[ours] for theirs, ours in reversed(family.keys) if ours in flat}
    table |= dict.fromkeys(family.silent, 0.0)
    for also in family.also:
        table |= also.write(model)
    return table


def read(theirs: Mapping[str, Any]) -> tuple[Model, Family]:
    """Our model of a config.json that has every default filled in."""
    kind = str(theirs.get("model_type"))
    family = next((f for f in FAMILIES if f.kind == kind), None)
    if family is None:
        raise ConfigError(
            f"model_type={kind!r} in config.json has no counterpart{nearest(kind, [f.kind for f in FAMILIES])}"
        )
    for key, value in family.fixed.items():
        if theirs.get(key, value) != value:
            raise ConfigError(f"{key}={theirs[key]!r} in config.json has no counterpart here, only {value!r}")
    if theirs.get("head_dim") is None and "hidden_size" in theirs:
        theirs = {**theirs, "head_dim": theirs["hidden_size"] // theirs["num_attention_heads"]}
    return _read(theirs, family), family


def _read(theirs: Mapping[str, Any], family: Family) -> Model:
    table: Table = {"arch": family.kind, **family.implied}
    for key, ours in family.keys:
        if key in theirs:
            part = theirs[key]
            for name in reversed(ours.split(".")):
                part = {name: part}
            table = merge(table, part)
    for also in family.also:
        table = merge(table, also.read(theirs))
    return validate(Model, _without_none(table), where="config.json")


def choose(model: Model) -> Family:
    """The family that says all of it, or an error that names the first thing the nearest one cannot say."""
    if isinstance(model.position, RoPE) and isinstance(model.position.scaling, NTK):  # another base, and nothing else
        dim, factor = model.attention.rotary_dim, model.position.scaling.factor
        position = RoPE(theta=model.position.theta * factor ** (dim / (dim - 2)))
        model = model.model_copy(update={"position": position})
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
    flat = _flat(model)
    try:
        back = _flat(_read(write(model, family), family))
    except (ConfigError, KeyError):
        return {**flat, "": ""}  # cannot say it at all
    if isinstance(model.ffn, MoE) and all(model.routed(layer) for layer in range(model.layers)):
        flat["ffn.dense_hidden"] = back.get("ffn.dense_hidden")
    return {k: flat.get(k) for k in {**flat, **back} if k not in _FREE and not _same(flat.get(k), back.get(k))}


def _same(a: Any, b: Any) -> bool:
    return math.isclose(a, b, rel_tol=1e-9) if isinstance(a, float) and isinstance(b, float) else bool(a == b)


def _flat(model: Model) -> Table:
    def walk(table: Mapping[str, Any], at: str) -> Table:
        out: Table = {}
        for key, value in table.items():
            out |= walk(value, f"{at}{key}.") if isinstance(value, dict) else {f"{at}{key}": value}
        return out

    return walk(model.model_dump(), "")


def _without_none(table: Table) -> Table:
    return {k: _without_none(v) if isinstance(v, dict) else v for k, v in table.items() if v is not None}
