"""Merge layers of TOML into one config.

base < size × architecture < recipe < data < cluster < file < --set: later layers override earlier
ones. The recipe is a setting, so --set can change it. An architecture may name its objective, its
recipe and a length of rows, which never exceeds that of base.
"""

import json
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from difflib import get_close_matches
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError

from pipeline.atomic import read_regular
from pipeline.config.distill import teacher_kind_refusal
from pipeline.config.dump import dotted, idle
from pipeline.config.objective import Objective, padded_vocab
from pipeline.config.parts import Frozen, rename_old
from pipeline.config.schema import VERSION, Cluster, RunConfig, RunSpec
from pipeline.config.shape import Arch, Size, cross
from pipeline.errors import ConfigError
from pipeline.units import parse_count

T = TypeVar("T", bound=Frozen)
Table = Mapping[str, Any]

# A wheel has the configs inside the package, a checkout beside it.
_PACKAGE = Path(__file__).resolve().parent.parent
_PLACES = (_PACKAGE / "configs", _PACKAGE.parent / "configs")
CONFIGS = next((place for place in _PLACES if place.is_dir()), _PLACES[0])
RECIPE = "adamw"  # for architectures that name no recipe, and for --init


def load(
    *,
    size: str | None = None,
    arch: str | None = None,
    model: Table | None = None,
    data: Table | None = None,
    cluster: str | None = None,
    file: Path | None = None,
    sets: Iterable[str] = (),
    over: Table | None = None,
    pieces: int | None = None,
) -> RunSpec:
    """Merge the shipped files, the user's file and the command line; `over` is applied last.

    If the data is known, its tokenizer has `pieces` ids, and the vocabulary is these plus the
    special ids of the objective."""
    base = read_toml(CONFIGS / "base.toml")
    shape: Table = {"model": model}  # the model of --init
    if model is None:
        assert size is not None
        shape = _named_model(size, arch, base["model"]["seq"])
    own = [*_own_layers(file, sets), over or {}]
    lengths: Any = reduce(merge, own).get("model")
    if model is not None and isinstance(lengths, Mapping) and "seq" in lengths:
        # The weights' other length does not fit the new one, unless it is given, too.
        shape = {"model": {key: model[key] for key in model if key != "source_seq"}}
    layers = [base, shape, recipe_layer([shape, *own]), data or {}]
    layers += [named_table("cluster", cluster)] if cluster else []
    table = reduce(merge, [*layers, *own])
    table = merge(table, _generator(table))
    objective = validate(_Predicted, {"objective": table["objective"]}).objective
    taught = _teacher(table.get("distill"), objective)
    if pieces is not None:
        vocab = taught["distill"]["model"]["vocab"] if taught else padded_vocab(pieces, objective)
        layers.append({"model": {"vocab": vocab}})
        table = reduce(merge, [*layers, *own])
        table = merge(table, _generator(table))
    table = merge(table, taught)
    if isinstance(table["model"], Mapping):
        table = merge(table, _lengths(table["model"], objective))
    return validate(RunSpec, table)


def refuse_idle(spec: RunSpec, sets: Iterable[str]) -> None:
    """Refuse a `--set` that changes nothing because another setting is missing."""
    for text in sets:
        if problem := idle(spec, parse_set(text)):
            raise ConfigError(f"{problem}; remove it")


class _Predicted(Frozen):
    objective: Objective


def _generator(table: Table) -> dict[str, Any]:
    """Derive `objective.trained`, unless it is given, from whether the model has a generator."""
    model = table["model"]
    objective = table["objective"]
    if not isinstance(model, Mapping) or not isinstance(objective, Mapping):
        return {}  # the validation reports it
    if objective.get("kind") != "replaced" or "trained" in objective:
        return {}
    return {"objective": {"trained": model.get("generator") is not None}}


def _teacher(distill: object, objective: Objective) -> dict[str, Any]:
    """Read the shape of a teacher from its config. Empty if the run has no teacher."""
    if not isinstance(distill, Mapping) or "teacher" not in distill:
        return {}  # if the teacher is missing, the validation reports it
    # Absolute, because a job may start in another directory.
    folder = Path(str(distill["teacher"])).absolute()
    config = reload(_config_of(folder))
    refusal = teacher_kind_refusal(config.objective, objective)
    if refusal:
        raise ConfigError(refusal)
    # `context` belongs to the teacher's weights; the student starts from new ones.
    model = config.model.model_dump(exclude_none=True, exclude={"context"})
    return {"distill": {"teacher": str(folder), "model": model}}


def _config_of(folder: Path) -> Path:
    """Return the config of a run, a checkpoint or an import; the latter has checkpoints only."""
    places = ("config.toml", "checkpoints/step-*/config.toml", "step-*/config.toml")
    for place in places:
        found = sorted(folder.glob(place))
        if found:
            return found[-1]
    remedy = "give a run, a checkpoint or a directory of `launch import`"
    if (folder / "config.json").is_file():
        remedy = f"first `launch import --from {folder} --out RUN`"
    raise ConfigError(f"distill.teacher={folder} has no config.toml; {remedy}")


def _lengths(model: Table, objective: Objective) -> dict[str, Any]:
    """The two lengths of an encoder–decoder; one of them follows from the other."""
    seq: Any = model.get("seq")
    source_seq: Any = model.get("source_seq")
    valid = all(type(length) is int and length > 1 for length in (seq, source_seq or seq))
    if model.get("stack") != "encoder-decoder" or not valid:
        return {}  # invalid lengths are reported by the validation
    seq, source_seq = objective.lengths(seq, source_seq)
    return {"model": {"seq": seq, "source_seq": source_seq or seq}}


def recipe_layer(layers: Iterable[Table] = ()) -> dict[str, Any]:
    """Return the settings of the recipe that the last of these layers names, or of RECIPE."""
    named = [layer["recipe"] for layer in layers if "recipe" in layer]
    name = str(named[-1]) if named else RECIPE
    return {"recipe": name, **read_toml(_named("recipe", name))}


def reload(
    path: Path,
    layers: Iterable[Table] = (),
    *,
    cluster: str | None = None,
    file: Path | None = None,
    sets: Iterable[str] = (),
    over: Table | None = None,
) -> RunConfig:
    """Read the config.toml of a run directory, with further layers on top. Settings that an older
    release did not have get their defaults."""
    table = read_toml(path)
    version = table.get("version")
    if version != VERSION:
        raise ConfigError(
            f"version={version} in {path} but this isoflop reads version {VERSION}; "
            "continue the run with the release that started it, or start a new one"
        )
    table = merge(read_toml(CONFIGS / "base.toml"), table)
    if cluster:
        table |= named_table("cluster", cluster)  # replaces every setting of the old cluster
    trained_with = _optimizer(table)
    for layer in [*layers, *_own_layers(file, sets), over or {}]:
        table = merge(table, layer)
    if _optimizer(table) != trained_with:
        # The moments in its checkpoints are those of the other optimizer.
        raise ConfigError(
            f"optim.optimizer.kind={_optimizer(table)!r} but {path} has {trained_with!r}, which a "
            "run keeps; start a new run from its weights with --init"
        )
    return validate(RunConfig, table, where=str(path))


def _optimizer(table: Table) -> object:
    return dict(dotted(table)).get("optim.optimizer.kind")


class _Machine(Frozen):
    cluster: Cluster


def load_cluster(
    name: str | None, *, run: Path | None = None, file: Path | None = None, sets: Iterable[str] = ()
) -> Cluster:
    """The cluster alone, before a run is planned; `run` is the config.toml of a run to continue."""
    # A cluster file replaces the cluster whole, as in `reload`.
    table = read_toml(run or CONFIGS / "base.toml") | (named_table("cluster", name) if name else {})
    for layer in _own_layers(file, sets):
        table = merge(table, {"cluster": layer.get("cluster", {})})
    return validate(_Machine, {"cluster": table["cluster"]}).cluster


def named_table(kind: str, name: str, key: str = "") -> dict[str, Any]:
    """A shipped file of configs/KIND by its name, or any TOML file by its path."""
    return read_toml(Path(name) if name.endswith(".toml") else _named(kind, name, key))


def _own_layers(file: Path | None, sets: Iterable[str]) -> list[dict[str, Any]]:
    return [read_toml(file) if file else {}, *map(parse_set, sets)]


def names(kind: str) -> list[str]:
    """Valid values of --size, --arch, --recipe or --cluster."""
    if kind == "size":
        return list(read_toml(CONFIGS / "sizes.toml"))
    return sorted(p.stem for p in (CONFIGS / kind).glob("*.toml"))


def _named_model(name: str, arch: str | None, seq: int) -> dict[str, Any]:
    """Return the model of a size and an architecture, and the architecture's usual objective and
    recipe. The size of a published model has its own architecture unless another is given."""
    rows = read_toml(CONFIGS / "sizes.toml")
    if name not in rows:
        known = nearest(_nearest_size(name, rows), rows)
        raise ConfigError(f"size={name!r} is not in configs/sizes.toml{known}")
    size = validate(Size, rows[name], where="configs/sizes.toml")
    arch = arch or size.arch or "dense"
    path = _named("arch", arch)
    table = read_toml(path)
    usual: dict[str, Any] = {key: table.pop(key) for key in ("objective", "recipe") if key in table}
    crossed = cross(size, validate(Arch, table, str(path)), seq)
    return {"model": {"size": name, "arch": arch, **crossed}, **usual}


def _nearest_size(name: str, known: Iterable[str]) -> str:
    """The size with the nearest number: by spelling, 2b would be nearest to 236b."""
    asked = parse_count(name)
    if not asked:
        return name
    return min(
        (k for k in known if parse_count(k)), key=lambda k: abs(math.log(parse_count(k) / asked))
    )


def _named(kind: str, name: str, key: str = "") -> Path:
    known = names(kind)
    if name not in known:
        what = f"{key or kind}={name!r} does not exist in configs/{kind}"
        raise ConfigError(f"{what}{nearest(name, known)}")
    return CONFIGS / kind / f"{name}.toml"


# The shipped tables are read for every size and architecture of a plan.
_parsed = lru_cache(maxsize=64)(tomllib.loads)


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return rename_old(deepcopy(_parsed(read_regular(path).decode())))
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist; check the path") from None
    except RecursionError:
        raise ConfigError(f"config file {path} cannot be read: it is nested too deeply") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"config file {path} cannot be read: {reason}; check the file") from None


def merge(low: Table, high: Table) -> dict[str, Any]:
    """Merge `high` over `low`, recursively. A table with another `kind` replaces the old one."""
    out = dict(low)
    for key, value in high.items():
        old = out.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            same_kind = value.get("kind", old.get("kind")) == old.get("kind")
            out[key] = merge(old, value) if same_kind else value
        else:
            out[key] = value
    return out


def parse_set(text: str) -> dict[str, Any]:
    """Parse `a.b=c` into a nested table. A value that is not valid TOML is a string."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set {text!r} is not of the form KEY=VALUE, such as seed=1")
    try:
        parsed: Any = tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        parsed = value
    except RecursionError:
        raise ConfigError(f"--set {key}=...: the value is nested too deeply") from None
    return rename_old(nested(key, parsed))


def as_sets(settings: Table) -> list[str]:
    """Return settings by dotted key as `--set` takes them."""
    # A `kind` comes first: setting it later would reset the settings of its table.
    ordered = sorted(settings.items(), key=lambda item: not item[0].endswith("kind"))
    values = {key: v if isinstance(v, str) else json.dumps(v) for key, v in ordered}
    return [f"{key}={value}" for key, value in values.items()]


def nested(key: str, value: Any) -> dict[str, Any]:
    """Return the table in which a dotted key has this value: a.b gives {"a": {"b": value}}."""
    for part in reversed(key.split(".")):
        value = {part.strip(): value}
    return cast("dict[str, Any]", value)


def validate(kind: type[T], table: Table, where: str = "") -> T:
    """Validate a table; the first error becomes one line with key, value and remedy."""
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        raise ConfigError(_one_line(kind, error, where)) from None


def _one_line(kind: type[BaseModel], error: ValidationError, where: str) -> str:
    # Unknown keys first: a misspelled key also makes the right one "missing".
    first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    place = f" in {where}" if where else ""
    *above, last = map(str, first["loc"] or ("",))
    if first["type"] == "extra_forbidden":
        path, known = _follow(kind, above)
        own = ".".join((*path, last))
        keys = list(_keys(kind))
        same = [key for key in keys if key.rpartition(".")[2] == last]
        if same and own not in keys:  # otherwise it is a key of another variant
            return f"{own} is not a setting{place}; did you mean {min(same, key=len)!r}?"
        return f"{own} is not a setting{place}{nearest(last, known, path)}"
    path, inner = _follow(kind, [*above, last])
    key = ".".join(path)
    if first["type"] == "missing":
        return f"{key} is missing{place}"
    text = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    text = text.replace("String should", "must").replace(str(10**38), "1e38")
    if last == "bool":  # the first type of a union; pydantic reports each type separately
        arms = [e for e in error.errors() if e["loc"][: len(path)] == tuple(path)]
        words = [e["ctx"]["expected"] for e in arms if e["type"] == "literal_error"]
        pair = "two positive whole numbers, such as [50, 500]"  # of the only union without words
        *most, final = ["false", *" or ".join(words or [pair]).split(" or ")]
        text = f"must be true, {', '.join(most)} or {final}"
    # Pydantic's messages for these three errors do not explain what to write instead.
    if first["type"] == "int_parsing_size":
        text = "must be less than 2^63"
    if first["type"] == "tuple_type":
        text = f"must be a list; write {key}=[{first['input']!r}]"
    if first["type"] in ("model_type", "model_attributes_type") and inner:
        text = f"is a table; set {key}.{inner[0]} or another of its keys: {', '.join(inner)}"
    # A value of an environment table may be a credential.
    hidden = "env" in path or isinstance(first["input"], dict)
    value = "" if hidden else f"={first['input']!r}"
    return f"{key}{value}{place}: {text}" if key else text


def _keys(kind: type[BaseModel]) -> Iterator[str]:
    """Yield the dotted keys of every setting, in all variants."""
    for name, field in kind.model_fields.items():
        yield name
        listed = get_origin(field.annotation) is tuple  # its tables have no keys of their own
        for inner in () if listed else _models(field.annotation):
            yield from (f"{name}.{key}" for key in _keys(inner))


def _follow(kind: type[BaseModel], loc: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the path of an error as the user writes it, and the fields at that place."""
    path: list[str] = []
    models: list[type[BaseModel]] = [kind]
    is_dict = False  # whether the keys here are the user's own
    for part in loc:
        found = [m.model_fields[part].annotation for m in models if part in m.model_fields]
        tagged = [m for m in models if "kind" in m.model_fields]
        arms = [m for m in tagged if part in get_args(m.model_fields["kind"].annotation)]
        if arms and len(models) > 1:
            # An arm of a union, which pydantic names by its kind. A field of another arm may have
            # the same name.
            models = arms
        elif found or is_dict:
            path.append(part)
            is_dict = any(get_origin(f) is dict for f in found)
            models = [model for f in found for model in _models(f)]
    return path, list(dict.fromkeys(name for m in models for name in m.model_fields))


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models(inner)]


def nearest(name: str, known: Iterable[str], above: Iterable[str] = ()) -> str:
    """Return the end of an error message: the closest known name, with the tables that contain it,
    or all known names if none is similar."""
    known = list(known)
    # 0.5: a name of four letters with two wrong still counts as close.
    close = get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {'.'.join((*above, close[0]))!r}?"
    return f"; known: {', '.join(known)}" if known else ""
