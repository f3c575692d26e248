"""A RunConfig as TOML text that loads back to itself, and the difference of two of them."""

from collections.abc import Iterator, Mapping
from typing import Any

import tomli_w

from pipeline.config.parts import Frozen
from pipeline.config.schema import RunConfig


def to_toml(config: RunConfig) -> str:
    """Write every setting as TOML. TOML has no null, so None is left out: it is those fields' default."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def flat(config: Frozen) -> dict[str, Any]:
    """Settings by dotted key."""
    return dict(_flat(config.model_dump(mode="json"), ""))


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
