"""Settings of config.json that need more than a new name, each with a writer and a reader."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pipeline.config.parts import FFN, Frozen, Linear, Llama3, RoPE, YaRN
from pipeline.config.shape import Model
from pipeline.errors import ConfigError

Table = dict[str, Any]


class Converter(NamedTuple):
    write: Callable[[Model], Table]  # our model → keys of config.json
    read: Callable[[Mapping[str, Any]], Table]  # config.json → part of our model's table


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
    # silently uses a theta of 10,000 and no scaling without them.
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
            f"rope_type={kind!r} with partial_rotary_factor={partial} in config.json is not "
            f"supported; supported: default, {', '.join(_SCALINGS)}, each with a factor of 1"
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


def _check_regular(key: str, what: str, layers: list[int], regular: range) -> None:
    if layers != list(regular):
        text = f"{key} in config.json: the {what} layers {layers} are not evenly spaced"
        raise ConfigError(f"{text}; import a model whose layers are")


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
    # Our models have a window in all layers except every n-th.
    every = full[0] + 1 if full else None
    if every:
        _check_regular("layer_types", "full attention", full, range(every - 1, len(kinds), every))
    return {"attention": {"window": theirs["sliding_window"], "global_every": every}}


def _write_routed(model: Model) -> Table:
    return {"mlp_only_layers": [layer for layer in range(model.layers) if not model.routed(layer)]}


def _read_routed(theirs: Mapping[str, Any]) -> Table:
    layers = theirs["num_hidden_layers"]
    step = theirs["decoder_sparse_step"]
    dense = theirs["mlp_only_layers"] or []
    routed = [layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0]
    # Our models route every n-th layer after the first dense ones.
    every = routed[1] - routed[0] if len(routed) > 1 else 1
    first = routed[0] - every + 1 if routed else layers
    regular = range(first + every - 1, layers, every) if first >= 0 else range(0)
    _check_regular(f"mlp_only_layers={dense}", "routed", routed, regular)
    return {"ffn": {"dense_layers": first, "every": every}}


def _write_dense(model: Model) -> Table:
    if not isinstance(model.ffn, FFN):
        return {}
    return {"first_k_dense_replace": model.layers, "intermediate_size": model.ffn.hidden}


def _read_dense(theirs: Mapping[str, Any]) -> Table:
    # A dense model with MLA is DeepSeek's class without routed layers.
    if theirs["first_k_dense_replace"] < theirs["num_hidden_layers"]:
        return {}
    return {"ffn": {"kind": "ffn", "activation": "swiglu", "hidden": theirs["intermediate_size"]}}


def _read_gpt2_hidden(theirs: Mapping[str, Any]) -> Table:
    return {} if theirs["n_inner"] else {"ffn": {"hidden": 4 * theirs["n_embd"]}}


def _write_greedy(model: Model) -> Table:
    grouped = getattr(model.ffn, "groups", 1) > 1
    return {"topk_method": "group_limited_greedy" if grouped else "greedy"}


def _read_greedy(theirs: Mapping[str, Any]) -> Table:
    # With "greedy" transformers ignores n_group and topk_group.
    greedy = theirs["topk_method"] == "greedy"
    return {"ffn": {"groups": 1, "top_groups": 1}} if greedy else {}


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
    _check_regular("layer_types", "full attention", full, range(0, len(kinds), every))
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


def _write_sides(model: Model) -> Table:
    both = {"encoder_ffn_dim": model.ffn.hidden, "encoder_attention_heads": model.attention.heads}
    return {**both, "max_position_embeddings": max(model.seq, model.source_length)}


def _read_sides(theirs: Mapping[str, Any]) -> Table:
    for key in ("ffn_dim", "attention_heads"):
        sides = theirs[f"encoder_{key}"], theirs[f"decoder_{key}"]
        if sides[0] != sides[1]:
            text = f"encoder_{key}={sides[0]} and decoder_{key}={sides[1]} in config.json"
            raise ConfigError(f"{text} must be equal; import another model")
    longest = theirs["max_position_embeddings"]
    return {"seq": longest, "source_seq": longest}


def _read_t5(theirs: Mapping[str, Any]) -> Table:
    """transformers moves the file's tie_word_embeddings to scale_decoder_outputs, and ties all."""
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
        raise ConfigError("model.segments=0: BERT's classes need a segment; set model.segments=2")
    return {}


def _nothing(_: Any) -> Table:
    return {}


# Names in configs/hub → converters.
CONVERTERS = {
    "rope": Converter(_write_rope, _read_rope),
    "rope_and_scores": Converter(_write_rope, lambda theirs: _read_rope(theirs, scores=True)),
    "windows": Converter(_write_windows, _read_windows),
    "routed": Converter(_write_routed, _read_routed),
    "dense_first": Converter(_write_dense, _read_dense),
    "greedy": Converter(_write_greedy, _read_greedy),
    "gpt2_hidden": Converter(_nothing, _read_gpt2_hidden),
    "segments": Converter(_refuse_no_segments, _nothing),
    # Two rows of RoBERTa's table are not used.
    "offset": Converter(
        lambda model: {"max_position_embeddings": model.seq + 2},
        lambda theirs: {"seq": theirs["max_position_embeddings"] - 2},
    ),
    "modernbert": Converter(_write_modernbert, _read_modernbert),
    "sides": Converter(_write_sides, _read_sides),
    "t5": Converter(_write_t5, _read_t5),
    "scale": Converter(
        lambda model: {"scale_embedding": model.embedding_multiplier != 1},
        lambda theirs: (
            {"multipliers": {"embedding": "root_width"}} if theirs["scale_embedding"] else {}
        ),
    ),
    "electra": Converter(lambda model: {"embedding_size": model.input_width}, _read_electra),
}
