"""Layers of TOML become one RunConfig: base < size < arch < data < cluster < file < --set."""

import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from pipeline.config.dump import flat
from pipeline.config.parts import Frozen
from pipeline.config.schema import VERSION, Cluster, RunConfig
from pipeline.config.shape import Arch, Size, cross
from pipeline.errors import ConfigError

T = TypeVar("T", bound=Frozen)
_PACKAGE = Path(__file__).resolve().parent.parent
CONFIGS = next(
    (p for p in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if p.is_dir()),
    _PACKAGE / "configs",
)


def load(
    *,
    size: str | None = None,
    arch: str = "dense",
    model: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    cluster: str | None = None,
    file: Path | None = None,
    sets: Iterable[str] = (),
    over: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Layer the shipped files, the user's own file and the command line's settings; `over` is applied last. The
    model is a size crossed with an architecture, or a table of its own."""
    table = read_toml(CONFIGS / "base.toml")
    if model is None:
        assert size is not None
        model = {"size": size, "arch": arch, **cross(_size(size), _arch(arch))}
    layers: list[Mapping[str, Any]] = [{"model": model}, data or {}]
    if cluster:
        layers.append(cluster_layer(cluster))
    if file:
        layers.append(read_toml(file))
    layers += [parse_set(s) for s in sets]
    layers.append(over or {})
    for layer in layers:
        table = merge(table, layer)
    return validate(RunConfig, table)


def reload(
    path: Path,
    layers: Iterable[Mapping[str, Any]] = (),
    *,
    cluster: str | None = None,
    file: Path | None = None,
    sets: Iterable[str] = (),
    over: Mapping[str, Any] | None = None,
) -> RunConfig:
    """A resolved config.toml, as a run directory holds it, with what is set on top of it. What an older release did not
    know yet has its default."""
    table = read_toml(path)
    if (version := table.get("version")) != VERSION:
        raise ConfigError(
            f"version={version} in {path} but this isoflop reads version {VERSION}; "
            "continue the run with the release that started it, or start a new one"
        )
    table = merge(read_toml(CONFIGS / "base.toml"), table)
    if cluster:
        table |= cluster_layer(cluster)  # another machine: nothing of the old one stays
    for layer in [*layers, *([read_toml(file)] if file else []), *map(parse_set, sets), over or {}]:
        table = merge(table, layer)
    config = validate(RunConfig, table, where=str(path))
    for key, value in flat(config).items():
        if value == "auto" or (key == "train.steps" and value is None):
            raise ConfigError(
                f"{key}={value!r} in {path} is not a number; restore the file or start a new run"
            )
    return config


def names(kind: str) -> list[str]:
    """What can be given as --size, --arch or --cluster."""
    if kind == "size":
        return list(read_toml(CONFIGS / "sizes.toml"))
    return sorted(p.stem for p in (CONFIGS / kind).glob("*.toml"))


def _size(name: str) -> Size:
    rows = read_toml(CONFIGS / "sizes.toml")
    if name not in rows:
        raise ConfigError(f"size={name!r} is not on the ladder{nearest(_rung(name, rows), rows)}")
    return validate(Size, rows[name], where="configs/sizes.toml")


def _rung(name: str, known: Iterable[str]) -> str:
    """The size whose number is nearest, since 2b is spelt like 236b; what is no number stays as it is."""
    if not (asked := _number(name)):
        return name
    return min((k for k in known if _number(k)), key=lambda k: abs(math.log(_number(k) / asked)))


def _number(size: str) -> float:
    found = re.fullmatch(r"(\d*\.?\d+)([kmbt])", size.lower())
    return float(found[1]) * 1000 ** ("kmbt".index(found[2]) + 1) if found else 0.0


def _arch(name: str) -> Arch:
    return validate(Arch, read_toml(_named("arch", name)), where=f"configs/arch/{name}.toml")


class _Machine(Frozen):
    cluster: Cluster


def load_cluster(
    name: str | None, *, run: Path | None = None, file: Path | None = None, sets: Iterable[str] = ()
) -> Cluster:
    """The machine alone, before the run on it is settled; `run` is the config.toml of the one to be continued."""
    table = read_toml(run or CONFIGS / "base.toml") | (cluster_layer(name) if name else {})
    for layer in [read_toml(file) if file else {}, *map(parse_set, sets)]:
        table = merge(table, {"cluster": layer.get("cluster", {})})
    return validate(_Machine, {"cluster": table["cluster"]}).cluster


def cluster_layer(name: str) -> dict[str, Any]:
    """A shipped cluster by its name, or a site's own file by its path."""
    return read_toml(Path(name) if name.endswith(".toml") else _named("cluster", name))


def _named(kind: str, name: str) -> Path:
    if name not in (known := names(kind)):
        raise ConfigError(f"{kind}={name!r} does not exist in configs/{kind}{nearest(name, known)}")
    return CONFIGS / kind / f"{name}.toml"


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None


def merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """`high` over `low`, table by table; a table that changes its `kind` replaces the old one whole."""
    out = dict(low)
    for key, value in high.items():
        old = out.get(key)
        if (
            isinstance(value, Mapping)
            and isinstance(old, Mapping)
            and value.get("kind", k := old.get("kind")) == k
        ):
            out[key] = merge(old, value)
        else:
            out[key] = value
    return out


def parse_set(text: str) -> dict[str, Any]:
    """`a.b=c` as a nested table; the value is TOML where it parses as TOML, a string otherwise."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set {text!r} is not of the form key.subkey=value")
    try:
        parsed: Any = tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        parsed = value
    for part in reversed(key.split(".")):
        parsed = {part.strip(): parsed}
    return parsed  # type: ignore[no-any-return]


def validate(kind: type[T], table: Mapping[str, Any], where: str = "") -> T:
    """Pydantic's check, its first complaint as one line with key, value and remedy."""
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        raise ConfigError(_one_line(kind, error, where)) from None


def _one_line(kind: type[BaseModel], error: ValidationError, where: str) -> str:
    # unknown keys first: a misspelt key also makes its right name "missing", and the misspelling is the news
    first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    place = f" in {where}" if where else ""
    if first["type"] == "extra_forbidden":
        *at, last = map(str, first["loc"])
        above, known = _follow(kind, at)
        return f"{'.'.join((*above, last))} is not a setting{place}{nearest(last, known)}"
    at, inner = _follow(kind, map(str, first["loc"]))
    key = ".".join(at)
    if first["type"] == "missing":
        return f"{key} is missing{place}"
    text = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if first["type"] == "tuple_type":
        text = f"must be a list; write {key}=[{first['input']!r}]"
    if first["type"] == "model_type" and inner:
        text = f"has settings of its own; write {key}={{}} for their defaults, or {key}.{inner[0]}=… ({', '.join(inner)})"
    secret = "env" in at  # an environment table's value may be a credential
    value = "" if secret or isinstance(first["input"], dict) else f"={first['input']!r}"
    return f"{key}{value}{place}: {text}" if key else text


def _follow(kind: type[BaseModel], path: Iterable[str]) -> tuple[list[str], list[str]]:
    """A path as the user writes it, without the arms of unions that pydantic names, and the fields found there."""
    key: list[str] = []
    models: list[type[BaseModel]] = [kind]
    free = False  # a table with keys of the user's own
    for part in path:
        found = [m.model_fields[part].annotation for m in models if part in m.model_fields]
        if found or free:
            key.append(part)
            free = any(get_origin(f) is dict for f in found)
            models = [model for f in found for model in _models(f)]
        else:
            tagged = [m for m in models if "kind" in m.model_fields]
            models = [
                m for m in tagged if part in get_args(m.model_fields["kind"].annotation)
            ] or models
    return key, [name for m in models for name in m.model_fields]


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models(inner)]


def nearest(name: str, known: Iterable[str]) -> str:
    """A clause that names the closest known name, or all of them where none is close."""
    known = list(known)
    if close := get_close_matches(name.lower(), known, n=1, cutoff=0.5):
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(known)}" if known else ""
