"""A RunConfig as TOML text that loads back to itself, and the difference of two of them."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.config.parts import Frozen
from pipeline.config.schema import RunConfig


def to_toml(config: RunConfig) -> str:
    """TOML of every setting; what is None is left out, since TOML has no null and None is each such field's default."""
    return "\n".join(_table(config.model_dump(exclude_none=True), "")).lstrip("\n") + "\n"


def _table(table: Mapping[str, Any], path: str) -> Iterator[str]:
    for key, value in table.items():
        if not isinstance(value, Mapping):
            yield f"{key} = {_value(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield f"\n[{path}{key}]"
            yield from _table(value, f"{path}{key}.")


def _value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            text = repr(value)
            return text if {".", "e", "n"} & set(text) else f"{text}.0"
        case str():
            return json.dumps(value, ensure_ascii=False)  # a JSON string is a TOML basic string
        case list() | tuple():
            return f"[{', '.join(map(_value, value))}]"
        case _:
            return str(value)


def flat(config: Frozen) -> dict[str, Any]:
    """Settings by dotted key."""
    return dict(_flat(config.model_dump(), ""))


def _flat(table: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def differences(old: RunConfig, new: RunConfig) -> dict[str, tuple[Any, Any]]:
    """What changed, by dotted key."""
    a, b = flat(old), flat(new)
    return {k: (a.get(k), b.get(k)) for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)}


Change = dict[str, int | str | bool]
_TABLES = {
    "zero": "parallel",
    "ep": "parallel",
    "sp": "parallel",
    "engine": "parallel",
    "dtype": "train",
}


def changed(config: RunConfig, change: Mapping[str, object]) -> RunConfig:
    """`nproc` and `size` are not of a config: who asks for them sees to them."""
    for key in change.keys() - {"nproc", "size"}:
        table, _, name = (key if "." in key else f"{_TABLES[key]}.{key}").partition(".")
        part = getattr(config, table).model_copy(update={name: change[key]})
        config = config.model_copy(update={table: part})
    return config


def flags(change: Change, *, short: bool = True) -> str:
    """As `launch pretrain` takes them; without its own options, as every command does."""
    long = {} if short else {key: f"{table}.{key}" for key, table in _TABLES.items()}
    spelled = ((long.get(key, key), str(value).lower()) for key, value in change.items())
    return " ".join(
        f"--set {key}={value}" if "." in key else f"--{key} {value}" for key, value in spelled
    )
