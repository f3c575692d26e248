"""Our model settings as Hugging Face's config.json, and back.

configs/hub has a table for each class of transformers. Most settings have another name there
(`Family.keys`); a `Converter` handles the rest. A class has no counterpart for a setting that does
not survive the round trip to config.json and back.
"""

import math
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any, get_args

from pydantic import Field

from pipeline.config.dump import flat
from pipeline.config.layers import CONFIGS, merge, nearest, nested, read_toml, validate
from pipeline.config.parts import NTK, Frozen, MoE, RoPE
from pipeline.config.shape import Model
from pipeline.config.switches import Multipliers
from pipeline.errors import ConfigError
from pipeline.hub.settings import CONVERTERS, Table


class Family(Frozen):
    """A class of transformers; configs/hub/decoders.toml explains the entries."""

    architecture: str  # the class
    kind: str  # model_type
    like: tuple[str, ...] = ()
    base: str = ""
    row_head: str = ""
    keys: dict[str, str | tuple[str, ...]]
    values: dict[str, dict[str, str]] = Field(default_factory=dict)
    implied: Table
    fixed: Table = Field(default_factory=dict)
    convert: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    tensors: dict[str, str]


def _read_families() -> Iterator[Family]:
    written: Table = {}
    # Our own class comes last, because more programs can run the classes of transformers.
    for name in ("decoders", "encoders", "isoflop"):
        written |= read_toml(CONFIGS / "hub" / f"{name}.toml")

    def whole(name: str) -> Table:
        """Return a table merged into the tables that it is `like`."""
        table = written[name]
        return reduce(merge, [*map(whole, table.get("like", ())), table])

    for name in written:
        table = whole(name)
        if "kind" in table:
            yield validate(Family, {"architecture": name, **table}, f"configs/hub, {name}")


# If several families lose equally little of a model, the first one is chosen.
FAMILIES = tuple(_read_families())

# Settings that only training uses, and the names of a model: an export may lose them.
_FREE = {"size", "arch", "scaled_embedding", "mtp", "mtp_weight"}
_FREE |= {"init", "init_out", "embedding_std", "head_std", "ffn.init_scale"}
_FREE |= {f"ffn.{key}" for key in ("aux_loss", "seq_aux_loss", "z_loss", "bias_step")}


def to_hub_config(model: Model, family: Family) -> Table:
    """Return the model part of config.json, without token ids and dtype."""
    model = _expressible(model)
    settings = flat(model)
    table: Table = {"architectures": [family.architecture], "model_type": family.kind}
    table |= family.fixed
    # Reversed, so that the first of several pairs with the same key of theirs wins.
    for theirs, ours in reversed(_pairs(family)):
        if ours in settings:
            names = {value: name for name, value in family.values.get(theirs, {}).items()}
            table[theirs] = names[settings[ours]] if names else settings[ours]
    table |= dict.fromkeys(family.zeros, 0.0)
    for name in family.convert:
        table |= CONVERTERS[name].write(model)
    return table


def from_hub_config(theirs: Mapping[str, Any]) -> tuple[Model, Family]:
    """Return our model for a config.json in which transformers has filled in every default."""
    kind = str(theirs.get("model_type"))
    found = [family for family in FAMILIES if family.kind == kind]
    if not found:
        known = nearest(kind, [family.kind for family in FAMILIES])
        raise ConfigError(f"model_type={kind!r} in config.json is not supported{known}")
    # Some kinds have several classes, of which the first has every part.
    classes = theirs.get("architectures") or []
    family = next((each for each in found if each.architecture in classes), found[0])
    for key, value in family.fixed.items():
        if theirs.get(key, value) != value:
            text = f"{key}={theirs[key]!r} in config.json is not supported"
            raise ConfigError(f"{text}; it must be {value!r}")
    return _read(theirs, family), family


def _read(theirs: Mapping[str, Any], family: Family) -> Model:
    table: Table = {"arch": family.kind, **family.implied}
    for key, ours in _pairs(family):
        value = theirs.get(key)
        names = family.values.get(key, {})
        if names and value not in names:
            known = ", ".join(map(repr, names))
            raise ConfigError(f"{key}={value!r} in config.json must be one of {known}")
        # A key that is missing or null leaves our default. Our own class has keys of every kind.
        if value is not None and _exists(ours, table):
            table = merge(table, nested(ours, names[value] if names else value))
    for name in family.convert:
        table = merge(table, CONVERTERS[name].read(theirs))
    attention = table["attention"]
    if attention["kind"] == "gqa":
        # Without these keys, every head has its own key and value, and the heads fill the width.
        heads = attention["heads"]
        shape = {"kv_heads": heads, "head_dim": table["width"] // heads}
        table["attention"] = shape | attention
    return validate(Model, table, where="config.json")


def _exists(ours: str, table: Table) -> bool:
    """Return whether a setting exists in the kind of attention, ffn, … that the table names."""
    part, _, name = ours.partition(".")
    kinds = get_args(Model.model_fields[part].annotation)  # empty if there is only one
    if not kinds or name in ("", "kind"):
        return True
    fields = {each.model_fields["kind"].default: each.model_fields for each in kinds}
    return name in fields[table[part]["kind"]]


def choose_family(model: Model) -> Family:
    """Return the family that can express the model, or raise an error that names a setting."""
    lost = {family.architecture: _lost(model, family) for family in FAMILIES}
    family = min(FAMILIES, key=lambda family: len(lost[family.architecture]))
    missing = lost[family.architecture]
    if missing:
        # Name a setting that every family loses, if there is one.
        always = [key for key in missing if all(key in other for other in lost.values())]
        key = (always or list(missing))[0]
        raise ConfigError(
            f"model.{key}={missing[key]!r} has no counterpart in {family.architecture}, the "
            "nearest class of transformers; only a model without it can be exported"
        )
    return family


def _lost(model: Model, family: Family) -> Table:
    """Return our settings that do not survive the round trip through the family's config.json."""
    ours = flat(_expressible(model))
    try:
        back = flat(_expressible(_read(to_hub_config(model, family), family)))
    except (ConfigError, KeyError):
        return {**ours, "": ""}  # worse than any partial loss
    if isinstance(model.ffn, MoE) and all(model.routed(layer) for layer in range(model.layers)):
        ours["ffn.dense_hidden"] = back.get("ffn.dense_hidden")  # no layer uses it
    free = set(_FREE)
    if model.stack == "encoder-decoder":
        free |= {"seq", "source_seq"}  # config.json has the longer one
    keys = [key for key in {**ours, **back} if key not in free]
    return {key: ours.get(key) for key in keys if not _same(ours.get(key), back.get(key))}


def _expressible(model: Model) -> Model:
    """Return an equal model in the terms of config.json: factors as numbers, both lengths,
    `global_every` at most `layers`, and a larger theta instead of NTK scaling."""
    scales = Multipliers(
        embedding=model.embedding_multiplier,
        residual=model.multipliers.residual,
        logits=model.logit_multiplier,
    )
    changes: Table = {"multipliers": scales, "seq": model.longest, "context": None}
    attention = model.attention
    if attention.global_every is not None and attention.global_every > model.layers:
        # Then only the first layer is global (`global_first`), or none.
        every = model.layers if attention.global_first else None
        changes["attention"] = attention.model_copy(update={"global_every": every})
    if model.stack == "encoder-decoder":
        changes |= {"encoder_layers": model.source_layers, "source_seq": model.source_length}
    if isinstance(model.position, RoPE) and isinstance(model.position.scaling, NTK):
        dim = model.attention.rotary_dim
        # This exponent divides the slowest frequency by exactly `factor`.
        theta = model.position.theta * model.position.scaling.factor ** (dim / (dim - 2))
        changes["position"] = RoPE(theta=theta)
    return model.model_copy(update=changes)


def _pairs(family: Family) -> list[tuple[str, str]]:
    """Return pairs of their key and our key. One key of theirs may stand for several of ours."""
    pairs = family.keys.items()
    return [(key, each) for key, ours in pairs for each in ([ours] if type(ours) is str else ours)]


def _same(a: Any, b: Any) -> bool:
    # YaRN's factor goes through a logarithm and back, which changes its last digits.
    floats = isinstance(a, float) and isinstance(b, float)
    return math.isclose(a, b, rel_tol=1e-9) if floats else bool(a == b)
