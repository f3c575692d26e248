"""Settings that take more than a name in config.json: each is written from our model and read back into our table."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pipeline.config.parts import FFN, Linear, Llama3, RoPE, YaRN
from pipeline.config.shape import Model
from pipeline.errors import ConfigError

Table = dict[str, Any]


class Also(NamedTuple):
    """What takes more than a name: ours → their keys, and back to a part of our table."""

    write: Callable[[Model], Table]
    read: Callable[[Mapping[str, Any]], Table]


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
            more = {
                "rope_type": "llama3",
                "factor": s.factor,
                "low_freq_factor": s.low,
                "high_freq_factor": s.high,
            }
            more["original_max_position_embeddings"] = s.original_seq
        case YaRN():
            more = {
                "rope_type": "yarn",
                "factor": s.factor,
                "beta_fast": s.beta_fast,
                "beta_slow": s.beta_slow,
            }
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
        raise ConfigError(
            f"partial_rotary_factor={p['partial_rotary_factor']} in config.json: we turn all channels"
        )
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
            scaling = {
                "kind": "yarn",
                "factor": factor,
                "original_seq": original,
                "attention": attention,
            }
            scaling |= {"beta_fast": p.get("beta_fast") or 32, "beta_slow": p.get("beta_slow") or 1}
            scaling["scores"] = _mscale(factor, whole) ** 2 if scores and whole else 1.0
        case _:
            raise ConfigError(
                f"rope_type={kind!r} in config.json; known: default, linear, llama3, yarn"
            )
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
        raise ConfigError(
            f"layer_types in config.json: full attention in layers {full}, which is no regular step"
        )
    return {"attention": {"window": theirs["sliding_window"], "global_every": every}}


def _write_routed(model: Model) -> Table:
    return {"mlp_only_layers": [layer for layer in range(model.layers) if not model.routed(layer)]}


def _read_routed(theirs: Mapping[str, Any]) -> Table:
    layers, step, dense = (
        theirs["num_hidden_layers"],
        theirs["decoder_sparse_step"],
        theirs["mlp_only_layers"] or [],
    )
    routed = {layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0}
    for first in range(layers):
        for every in range(1, layers - first + 1):
            if routed == {
                layer for layer in range(first, layers) if (layer - first) % every == every - 1
            }:
                return {"ffn": {"dense_layers": first, "every": every}}
    raise ConfigError(
        f"mlp_only_layers={dense} in config.json leaves routed layers at no regular step"
    )


def _write_dense(model: Model) -> Table:
    if not isinstance(model.ffn, FFN):
        return {}
    return {"first_k_dense_replace": model.layers, "intermediate_size": model.ffn.hidden}


def _read_dense(theirs: Mapping[str, Any]) -> Table:
    if theirs["first_k_dense_replace"] < theirs["num_hidden_layers"]:
        return {}
    return {"ffn": {"kind": "ffn", "activation": "swiglu", "hidden": theirs["intermediate_size"]}}


ROPE = Also(_write_rope, _read_rope)
ROPE_AND_SCORES = Also(_write_rope, lambda theirs: _read_rope(theirs, scores=True))
WINDOWS = Also(_write_windows, _read_windows)
ROUTED = Also(_write_routed, _read_routed)
DENSE_FIRST = Also(_write_dense, _read_dense)
GREEDY = Also(
    lambda model: {
        "topk_method": "group_limited_greedy" if getattr(model.ffn, "groups", 1) > 1 else "greedy"
    },
    lambda theirs: (
        {"ffn": {"groups": 1, "top_groups": 1}} if theirs["topk_method"] == "greedy" else {}
    ),
)
GPT2_SHAPE = Also(
    lambda model: {},
    lambda theirs: {
        "attention": {
            "kv_heads": theirs["n_head"],
            "head_dim": theirs["n_embd"] // theirs["n_head"],
        },
        "ffn": {"hidden": theirs["n_inner"] or 4 * theirs["n_embd"]},
    },
)
