"""Write a config as TOML or as dotted keys, compare two configs, change and check settings."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import tomli_w

from pipeline.config.parts import Frozen
from pipeline.config.schema import RunSpec

Run = TypeVar("Run", bound=RunSpec)
# Settings by dotted key or by option: those below, and nproc and size, which no config contains.
Change = dict[str, int | str | bool]
_OPTIONS = {
    "zero": "parallel",
    "ep": "parallel",
    "sp": "parallel",
    "engine": "parallel",
    "dtype": "train",
}


def to_toml(config: RunSpec) -> str:
    """Return every setting as TOML. TOML has no null, so None is left out; it is the default."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def flat(config: Frozen) -> dict[str, Any]:
    """Settings by dotted key, secrets masked."""
    return dict(dotted(config.model_dump(mode="json")))


def dotted(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a nested table, each with its dotted key."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from dotted(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def differences(old: RunSpec, new: RunSpec) -> dict[str, tuple[Any, Any]]:
    """Old and new value of every setting that changed, by dotted key."""
    before = flat(old)
    after = flat(new)
    keys = sorted(before.keys() | after.keys())
    return {k: (before.get(k), after.get(k)) for k in keys if before.get(k) != after.get(k)}


def changed(config: Run, change: Mapping[str, object]) -> Run:
    """A copy with some settings changed, not validated. Ignores nproc and size."""
    for key in change.keys() - {"nproc", "size"}:
        table, _, name = (key if "." in key else f"{_OPTIONS[key]}.{key}").partition(".")
        part = getattr(config, table).model_copy(update={name: change[key]})
        config = config.model_copy(update={table: part})
    return config


def flags(change: Change, *, short: bool = True) -> str:
    """Return the change as options of `launch pretrain`, or as --set, which every command has."""
    words = []
    for key, value in change.items():
        if not short and key in _OPTIONS:
            key = f"{_OPTIONS[key]}.{key}"
        text = str(value).lower()
        words.append(f"--set {key}={text}" if "." in key else f"--{key} {text}")
    return " ".join(words)


def idle(spec: RunSpec, settings: Mapping[str, Any]) -> str:
    """Return why one of these settings changes nothing, or an empty text."""
    model = spec.model
    needs = {
        "model.segments": ('model.stack="encoder"', model.stack == "encoder"),
        "model.mtp_weight": ("model.mtp", model.mtp),
        "model.replaced_weight": ("model.generator", model.generator),
        "model.mup_base": ('model.parametrization="mup"', model.mup),
        "model.position.window_theta": ("model.attention.window", model.attention.window),
        "eval.questions": ("eval.tasks", spec.eval.tasks),
    }
    for key, value in dotted(settings):
        for start, (other, there) in needs.items():
            if value and not there and f"{key}.".startswith(f"{start}."):
                return f"{key}={value} has no effect without {other}"
    return ""
