"""A run directory in MLflow's words: names and values cut to what every server takes."""

import hashlib
import json
import math
import posixpath
import re
import tomllib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.track import environment

FILES = ("config.toml", "run.json", environment.FILE)
SWEEP = "sweep.json"
LOADS = "experts.jsonl"  # the log's records of what each expert was given, which are no numbers
NAME_CHARACTERS = 250  # mlflow.utils.validation.MAX_ENTITY_KEY_LENGTH
VALUE_CHARACTERS = 500  # servers before 2.8 take no more; the whole value is in the artifact
PREFIX = {"step": "train", "eval": "eval", "moe": "moe"}
NOT_METRICS = {"kind", "time", "step"}
STATUS = {
    "start": "RUNNING",
    "resume": "RUNNING",
    "restart": "RUNNING",
    "finish": "FINISHED",
    "interrupt": "KILLED",
    "fail": "FAILED",
}


def run(run_dir: Path) -> dict[str, Any]:
    """run.json, or nothing: a run that died before it wrote one still has a curve."""
    return _json(run_dir / "run.json")


def sweep(folder: Path) -> dict[str, Any]:
    """sweep.json, which makes the run directories beside it the children of one parent; or nothing."""
    return _json(folder / SWEEP)


def digest(run_dir: Path) -> str:
    """Changes when params or artifacts should be sent again."""
    whole = hashlib.sha256()
    for name in FILES:
        path = run_dir / name
        whole.update(path.read_bytes() if path.exists() else b"-")
    return whole.hexdigest()[:16]


def params(run_dir: Path) -> dict[str, str]:
    """The resolved config under its own keys, run.json's figures under `run.`."""
    try:
        config = tomllib.loads((run_dir / "config.toml").read_text())
    except (FileNotFoundError, ValueError):
        config = {}
    return flat({**config, "run": run(run_dir)})


def flat(table: Mapping[str, Any]) -> dict[str, str]:
    return {name(key): clip(value, VALUE_CHARACTERS) for key, value in _flat("", table)}


def tags(run_dir: Path) -> dict[str, str]:
    about, env = run(run_dir), _json(run_dir / environment.FILE)
    packages = env.get("packages", {})
    found = {
        "convention": about.get("convention"),
        "git_commit": about.get("git_commit") or env.get("commit"),
        "host": env.get("host"),
        "python": env.get("python"),
        **{
            f"version.{package}": packages.get(package)
            for package in ("isoflop", "torch", "deepspeed", "mlflow")
        },
    }
    return {key: clip(str(value), VALUE_CHARACTERS) for key, value in found.items() if value}


def metrics(record: Mapping[str, object]) -> dict[str, float]:
    """Every number of a record, tokens and FLOPs among them: any of them can be the x-axis."""
    prefix = PREFIX.get(str(record.get("kind")))
    if prefix is None:
        return _event_metrics(record) if record.get("kind") == "event" else {}
    found = {
        name(f"{prefix}/{key}"): float(value)
        for key, value in record.items()
        if key not in NOT_METRICS and isinstance(value, int | float)
    }
    if isinstance(tokens := record.get("hash"), str):
        found[f"{prefix}/hash"] = float(
            int(tokens[:13], 16)
        )  # 52 bits: what a double holds exactly
    return found


def _event_metrics(record: Mapping[str, object]) -> dict[str, float]:
    """An event as a point at its step: tags keep the latest of each sort, a page marks all of them."""
    world = record.get("world")
    return {name(f"event/{record.get('event')}"): 1.0} | (
        {"event/world": float(world)} if isinstance(world, int) else {}
    )


def event_tag(record: Mapping[str, object]) -> tuple[str, str]:
    """The latest event of each sort: `event.save` = `step 1200 at 2026-11-15T01:36:00+00:00`."""
    when = record.get("time")
    moment = (
        datetime.fromtimestamp(when, UTC).isoformat(timespec="seconds")
        if isinstance(when, int | float)
        else "?"
    )
    return name(f"event.{record.get('event')}"), f"step {record.get('step')} at {moment}"


def name(key: str) -> str:
    """MLflow treats names as paths: no odd characters, nothing that resolves to another name."""
    clean = re.sub(r"[^\w\-. :/]", "_", key, flags=re.ASCII)[:NAME_CHARACTERS]
    return posixpath.normpath(clean).lstrip("/.") or "_"


def clip(value: str, characters: int) -> str:
    return value if len(value) <= characters else value[: characters - 1] + "…"


def _flat(prefix: str, tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{key}.", value)
        elif isinstance(value, str | int | float):
            if value != "" and not (isinstance(value, float) and math.isnan(value)):
                yield f"{prefix}{key}", str(value)
        elif value is not None:  # lists, dates
            yield f"{prefix}{key}", json.dumps(value, default=str)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
