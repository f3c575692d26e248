"""Settings that differ, by their keys: as a config takes them and as the command line says them."""

from collections.abc import Mapping

from pipeline.config.schema import RunConfig

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
