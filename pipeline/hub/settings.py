"""Settings of config.json that need more than a new name, each with a writer and a reader."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pipeline.config.parts import FFN, Frozen, Linear, Llama3, RoPE, YaRN
from pipeline.config.shape import Model
from pipeline.errors import ConfigError

Table = dict[str, Any]


class Converter(NamedTuple):
    """Settings that need more than a new name."""

    write: Callable[[Model], Table]  # our model → keys of config.json
    read: Callable[[Mapping[str, Any]], Table]  # config.json → part of our model's table


class Family(NamedTuple):
    """How one model_type of transformers spells our settings."""

    kind: str  # model_type
    architecture: str  # the class of transformers
    keys: str  # pairs "their key:our key"
    implied: Table  # settings of ours that every model of the family has
    fixed: Table  # settings of theirs that must have this value
    converters: tuple[Converter, ...] = ()
    zeros: tuple[str, ...] = ()  # their dropout rates, which we do not have
    # Tensors in some of their files that are copies of others, or constants.
    ignored: tuple[str, ...] = ()


_SCALINGS: dict[str, type[Frozen]] = {"linear": Linear, "llama3": Llama3, "yarn": YaRN}
# Their key → ours. Each kind of scaling has some of them.
_SCALING_KEYS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_seq",
    "low_freq_factor": "low",
    "high_freq_factor": "high",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention",
}


def _write_rope(model: Model) -> Table:
    rope = model.position
    if not isinstance(rope, RoPE):
        return {}
    scaling = rope.scaling
    parameters: Table = {"rope_type": "default" if scaling is None else scaling.kind}
    for theirs, ours in _SCALING_KEYS.items():
        if getattr(scaling, ours, None) is not None:
            parameters[theirs] = getattr(scaling, ours)
    if isinstance(scaling, YaRN) and scaling.scores != 1 and scaling.factor > 1:
        # Solve scores = _mscale(factor, weight)² for the weight.
        weight = (math.sqrt(scaling.scores) - 1) / (0.1 * math.log(scaling.factor))
        parameters["mscale_all_dim"] = weight
    # transformers 5 reads rope_parameters. transformers 4 reads rope_theta and rope_scaling, and
    # without them uses a theta of 10,000 and no scaling, silently.
    return {
        "rope_parameters": {"rope_theta": rope.theta, **parameters},
        "rope_theta": rope.theta,
        "rope_scaling": None if scaling is None else parameters,
    }


def _mscale(factor: float, weight: float) -> float:
    """YaRN's attention factor with DeepSeek's weight."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def _read_rope(theirs: Mapping[str, Any], *, scores: bool = False) -> Table:
    """`scores`: the family multiplies the softmax scale by YaRN's factor, as DeepSeek does."""
    given = dict(theirs["rope_parameters"])
    rope: Table = {"kind": "rope", "theta": given["rope_theta"]}
    kind = given.get("rope_type", "default")
    partial = given.get("partial_rotary_factor", 1.0)
    if partial != 1 or kind not in ("default", *_SCALINGS):
        raise ConfigError(
            f"rope_type={kind!r}, partial_rotary_factor={partial} in config.json have no "
            f"counterpart here, only all channels under default, {', '.join(_SCALINGS)}"
        )
    if kind == "default":
        return {"position": rope}
    longest = theirs["max_position_embeddings"]
    original = given.get("original_max_position_embeddings") or longest
    # Defaults that transformers applies when it builds the rotation, not in the config.
    given["original_max_position_embeddings"] = original
    given["factor"] = factor = given.get("factor") or longest / original
    # Keys of other kinds of scaling may be left in the file, and are ignored.
    fields = _SCALINGS[kind].model_fields
    scaling = {ours: given.get(key) for key, ours in _SCALING_KEYS.items() if ours in fields}
    scaling = {"kind": kind} | {ours: value for ours, value in scaling.items() if value is not None}
    all_dim = given.get("mscale_all_dim")
    if kind == "yarn" and all_dim:
        if scores:
            scaling["scores"] = _mscale(factor, all_dim) ** 2
        if given.get("mscale"):
            # As in transformers, an explicit attention_factor has priority over this ratio.
            ratio = _mscale(factor, given["mscale"]) / _mscale(factor, all_dim)
            scaling.setdefault("attention", ratio)
    return {"position": {**rope, "scaling": scaling}}


def layer_types(model: Model) -> list[str]:
    kinds = {True: "sliding_attention", False: "full_attention"}
    return [kinds[model.windowed(layer)] for layer in range(model.layers)]


def _write_windows(model: Model) -> Table:
    window = model.attention.window
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": layer_types(model),
    }


def _read_windows(theirs: Mapping[str, Any]) -> Table:
    kinds = theirs.get("layer_types") or []
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    if len(full) == len(kinds):
        return {}
    # We have a window in all layers but every n-th.
    every = full[0] + 1 if full else None
    if every and full != list(range(every - 1, len(kinds), every)):
        raise ConfigError(
            f"layer_types in config.json: the layers with full attention, {full}, have no regular "
            "step and so no counterpart here"
        )
    return {"attention": {"window": theirs["sliding_window"], "global_every": every}}


def _write_routed(model: Model) -> Table:
    return {"mlp_only_layers": [layer for layer in range(model.layers) if not model.routed(layer)]}


def _read_routed(theirs: Mapping[str, Any]) -> Table:
    layers = theirs["num_hidden_layers"]
    step = theirs["decoder_sparse_step"]
    dense = theirs["mlp_only_layers"] or []
    routed = [layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0]
    # we route every n-th layer after the first dense ones
    every = routed[1] - routed[0] if len(routed) > 1 else 1
    first = routed[0] - every + 1 if routed else layers
    if first < 0 or routed != list(range(first + every - 1, layers, every)):
        raise ConfigError(
            f"mlp_only_layers={dense} in config.json: the routed layers, {routed}, have no regular "
            "step and so no counterpart here"
        )
    return {"ffn": {"dense_layers": first, "every": every}}


def _write_dense(model: Model) -> Table:
    if not isinstance(model.ffn, FFN):
        return {}
    return {"first_k_dense_replace": model.layers, "intermediate_size": model.ffn.hidden}


def _read_dense(theirs: Mapping[str, Any]) -> Table:
    # Our dense model with MLA is theirs with no routed layer.
    if theirs["first_k_dense_replace"] < theirs["num_hidden_layers"]:
        return {}
    return {"ffn": {"kind": "ffn", "activation": "swiglu", "hidden": theirs["intermediate_size"]}}


def _read_gpt2(theirs: Mapping[str, Any]) -> Table:
    heads = theirs["n_head"]
    width = theirs["n_embd"]
    return {
        "attention": {"kv_heads": heads, "head_dim": width // heads},
        "ffn": {"hidden": theirs["n_inner"] or 4 * width},  # null means 4 × n_embd
    }


def _write_greedy(model: Model) -> Table:
    grouped = getattr(model.ffn, "groups", 1) > 1
    return {"topk_method": "group_limited_greedy" if grouped else "greedy"}


def _read_greedy(theirs: Mapping[str, Any]) -> Table:
    # With "greedy" transformers ignores n_group and topk_group.
    greedy = theirs["topk_method"] == "greedy"
    return {"ffn": {"groups": 1, "top_groups": 1}} if greedy else {}


# Keys of our own class that exist with one kind of feed-forward only: theirs → ours.
_DENSE_KEYS = {"mlp_bias": "bias"}
_ROUTED_KEYS = {
    "dense_intermediate_size": "dense_hidden",
    "num_experts": "experts",
    "num_experts_per_tok": "top_k",
    "num_shared_experts": "shared",
    "router_type": "router",
    "router_groups": "groups",
    "router_top_groups": "top_groups",
    "router_bias_step": "bias_step",
    "norm_topk_prob": "normalise",
    "routed_scaling_factor": "scale",
    "first_dense_layers": "dense_layers",
    "routed_every": "every",
}


def _write_our_ffn(model: Model) -> Table:
    keys = _DENSE_KEYS if isinstance(model.ffn, FFN) else _ROUTED_KEYS
    return {theirs: getattr(model.ffn, ours) for theirs, ours in keys.items()}


def _read_our_ffn(theirs: Mapping[str, Any]) -> Table:
    keys = _ROUTED_KEYS if theirs["ffn_type"] == "moe" else _DENSE_KEYS
    return {"ffn": {ours: theirs[key] for key, ours in keys.items()}}


def _write_our_position(model: Model) -> Table:
    return {"rope_theta": model.position.theta} if isinstance(model.position, RoPE) else {}


def _read_our_position(theirs: Mapping[str, Any]) -> Table:
    kind = theirs["position_type"]
    if kind == "rope":
        return {"position": {"theta": theirs["rope_theta"]}}
    if kind != "none":
        raise ConfigError(f'position_type={kind!r} in config.json is neither "rope" nor "none"')
    return {}


ROPE = Converter(_write_rope, _read_rope)
ROPE_AND_SCORES = Converter(_write_rope, lambda theirs: _read_rope(theirs, scores=True))
WINDOWS = Converter(_write_windows, _read_windows)
ROUTED = Converter(_write_routed, _read_routed)
DENSE_FIRST = Converter(_write_dense, _read_dense)
GREEDY = Converter(_write_greedy, _read_greedy)
OUR_FFN = Converter(_write_our_ffn, _read_our_ffn)
OUR_POSITION = Converter(_write_our_position, _read_our_position)
GPT2_SHAPE = Converter(lambda model: {}, _read_gpt2)  # `Family.keys` writes everything
