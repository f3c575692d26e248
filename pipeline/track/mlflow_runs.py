"""A run in MLflow: write its params, tags, metrics and files, and read the run back."""

import hashlib
import json
import math
import posixpath
import re
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tomli_w

from pipeline.atomic import read_regular
from pipeline.config.dump import dotted
from pipeline.errors import RunError
from pipeline.runs import log
from pipeline.runs.history import ENVIRONMENT_FILE, PHASES, RUN_FILE, Run, read_json
from pipeline.runs.log import Record
from pipeline.track.mlflow_store import Store, configured, connect, public, reason

CONFIG_FILE = "config.toml"
FILES = (CONFIG_FILE, RUN_FILE, ENVIRONMENT_FILE)
SWEEP_FILE = "sweep.json"
FORECASTS = "forecasts"  # folder of registered forecasts, on disk and among a sweep's artifacts
LOADS = "experts.jsonl"  # the share of tokens of each expert: metrics cannot hold lists
MAX_NAME = 250  # mlflow.utils.validation.MAX_ENTITY_KEY_LENGTH
MAX_VALUE = 500  # the limit of servers before 2.8; artifacts hold the whole value
PREFIXES = {"step": "train", "eval": "eval", "moe": "moe"}
STATUS = {"running": "RUNNING", "finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
ENDINGS = {"FINISHED": "finish", "KILLED": "interrupt", "FAILED": "fail"}
# Keys of run.json, and the keys of config.toml with the same value. Only the latter are sent.
IN_CONFIG = {
    "name": "name",
    "experiment": "experiment",
    "recipe": "recipe",
    "optimizer": "optim.optimizer.kind",
    "size": "model.size",
    "arch": "model.arch",
    "vocab": "model.vocab",
    "seq": "model.seq",
    "source_seq": "model.source_seq",  # of an encoder–decoder; not a key of run.json
    "data": "data.hash",
    "batch_tokens": "train.batch_tokens",
    "steps": "train.steps",
    "tasks": "eval.tasks",
}
# Keys of run.json whose values are read back as numbers: params are text in MLflow.
NUMBERS = {
    *("total", "active", "non_embedding", "scaling", "steps", "bytes_per_token"),
    *("flops_per_token", "version", "batch_tokens"),
}
MASK = "***"  # stands for every value of an environment table
_ENVIRONMENT_SETTING = re.compile(r"^([\w.]*\benv(?:\.\w+)*\s*=).*", re.DOTALL)


# ---- from a run directory to MLflow


def read_table(path: Path) -> dict[str, Any]:
    """Return a JSON or TOML file of a run without secrets; empty if it is missing or damaged."""
    try:
        if path.suffix == ".toml":
            table = tomllib.loads(read_regular(path).decode())
        else:
            table = read_json(path)
    except (OSError, ValueError, RecursionError, RunError):
        return {}  # a run that died early still has a curve
    found: dict[str, Any] = masked(table)  # run directories of earlier releases have secrets
    return found


def masked(value: Any, key: str = "") -> Any:
    """Hide the values of environment tables, such as tokens in `[cluster.slurm.env]`."""
    match value:
        case dict() if key == "env":
            return dict.fromkeys(value, MASK)
        case dict():
            return {name: masked(item, name) for name, item in value.items()}
        case list():
            return [masked(item) for item in value]
        case str():  # the same as a setting of a sweep: "cluster.slurm.env.HF_TOKEN=secret"
            return _ENVIRONMENT_SETTING.sub(rf"\1{MASK}", value)
        case _:
            return value


def read_sweep(folder: Path) -> dict[str, Any]:
    """Return sweep.json, or nothing. It makes the runs of its folder children of one parent."""
    return read_table(folder / SWEEP_FILE)


def artifacts(run_dir: Path) -> dict[str, str]:
    """Return the text of the files that go to MLflow, without secrets."""
    found = {}
    for name in FILES:
        table = read_table(run_dir / name)
        if table:
            toml = name == CONFIG_FILE
            found[name] = tomli_w.dumps(table) if toml else json.dumps(table, indent=1) + "\n"
    return found


def digest(run_dir: Path) -> str:
    """Return a checksum that changes when params or artifacts have to be sent again."""
    return hashlib.sha256(json.dumps(artifacts(run_dir)).encode()).hexdigest()[:16]


def params(run_dir: Path) -> dict[str, str]:
    """Return the resolved config under its own keys, and the rest of run.json under `run.`."""
    config = flat(read_table(run_dir / CONFIG_FILE))
    about = flat({"run": read_table(run_dir / RUN_FILE)})
    for key, other in IN_CONFIG.items():
        # Only an equal value is a copy.
        if other in config and about.get(f"run.{key}") == config[other]:
            del about[f"run.{key}"]
    return config | about


def flat(table: Mapping[str, Any]) -> dict[str, str]:
    """Return every value as text, under its dotted key."""
    found: dict[str, str] = {}
    for key, value in dotted(table):
        if value not in ("", None) and value == value:  # NaN differs from itself
            plain = isinstance(value, str | int | float)  # else a list or a date
            found[name(key)] = clip(str(value) if plain else json.dumps(value, default=str))
    return found


def tags(run_dir: Path) -> dict[str, str]:
    about = read_table(run_dir / RUN_FILE)
    env = read_table(run_dir / ENVIRONMENT_FILE)
    packages = env.get("packages", {})
    commit = about.get("git_commit") or env.get("commit")
    found = {
        "convention": about.get("convention"),
        "git_commit": commit,
        # MLflow shows this tag as the version of the source. It does not know "-dirty".
        "mlflow.source.git.commit": commit and str(commit).removesuffix("-dirty"),
        "host": env.get("host"),
        "python": env.get("python"),
    }
    for package in ("isoflop", "torch", "deepspeed", "mlflow"):
        found[f"version.{package}"] = packages.get(package)
    return {key: clip(str(value)) for key, value in found.items() if value}


def metrics(record: Record) -> dict[str, float]:
    """Return every number of a record, with tokens and FLOPs, so that they can be the x-axis."""
    if record["kind"] == "event":
        # Tags keep the latest event of each kind. As metrics, pages can mark all at their steps.
        found = {name(f"event/{record['event']}"): 1.0}
        if isinstance(record.get("world"), int):
            found["event/world"] = float(record["world"])
        return found
    prefix = PREFIXES.get(record["kind"])
    if prefix is None:
        return {}
    found = {
        name(f"{prefix}/{key}"): float(value)
        for key, value in record.items()
        if key not in ("time", "step") and isinstance(value, int | float)
    }
    tokens = record.get("hash")
    if isinstance(tokens, str) and re.fullmatch(r"[0-9a-f]{13,}", tokens):
        found[f"{prefix}/hash"] = float(int(tokens[:13], 16))  # 52 bits: exact in a double
    return found


def event_tag(record: Record) -> tuple[str, str]:
    """Return the tag of an event: `event.save` = `step 1200 at 2026-11-15T01:36:00+00:00`."""
    try:
        when = datetime.fromtimestamp(record["time"], UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        when = "?"
    return name(f"event.{record['event']}"), f"step {record['step']} at {when}"


def name(key: str) -> str:
    """Return a valid name. MLflow treats names as paths, and refuses most punctuation."""
    clean = re.sub(r"[^\w\-. :/]", "_", key, flags=re.ASCII)[:MAX_NAME]
    return posixpath.normpath(clean).lstrip("/.") or "_"


def clip(value: str) -> str:
    return value if len(value) <= MAX_VALUE else value[: MAX_VALUE - 1] + "…"


def keep(
    experiment: str, paths: Sequence[Path] = (), forecasts: Sequence[Path] = (), **about: Any
) -> str | None:
    """Copy files to the run of a whole sweep; return a line if that failed, which loses nothing."""
    uri = configured()
    if uri is None:  # nobody uses MLflow here
        return None
    try:
        store = Store(uri)
        run_id = store.parent(experiment)
        if about:  # the settings of a sweep
            store.describe(run_id, flat(masked(about)), {})
            store.set_status(run_id, "FINISHED", None)
        for path in paths:
            if path.name == SWEEP_FILE:
                text = json.dumps(read_table(path), indent=1) + "\n"
                store.client.log_text(run_id, text, SWEEP_FILE)
            else:
                store.client.log_artifact(run_id, str(path))
        for path in forecasts:
            store.client.log_artifact(run_id, str(path), FORECASTS)
    except Exception as error:  # MLflow raises exceptions of many kinds
        return (
            f"MLflow has no copy of this ({reason(error)}); the files on disk are complete, and "
            "`launch sync` sends those of a sweep."
        )
    return None


# ---- from MLflow to a run


def read_experiment(experiment: str) -> list[Run]:
    """Read every run of an experiment from the configured store, or the local database."""
    uri = configured()
    if uri is None:
        text = f"experiment={experiment}: no runs in runs/{experiment} and no MLflow store"
        raise RunError(f"{text}; set MLFLOW_TRACKING_URI")
    with connect(uri, experiment) as client:
        found = [read(client, run) for _, run in search(client, uri, experiment)]
    runs = [run for run in found if run is not None]
    if not runs:
        text = f"experiment={experiment} holds no run of ours in {public(uri)}"
        raise RunError(f"{text}; train one with `launch pretrain`")
    return sorted(runs, key=lambda run: (run.N, run.name))


def search(client: Any, uri: str, experiment: str | None) -> Iterator[tuple[str, Any]]:
    """Yield the runs of an experiment, or of all, with the experiment's name and no curves."""
    names = {found.experiment_id: found.name for found in client.search_experiments()}
    ids = [key for key, known in names.items() if experiment in (None, known)]
    if experiment is not None and not ids:
        others = ", ".join(sorted(known for known in names.values() if known != "Default")[:20])
        raise RunError(
            f"experiment={experiment} is not in {public(uri)}; it has {others or 'none'}"
        )
    token = None
    while ids:
        page = client.search_runs(ids, max_results=1000, page_token=token)
        yield from ((names[run.info.experiment_id], run) for run in page)
        token = page.token
        if not token:
            return


def record_of(run: Any) -> Record | None:
    """Rebuild run.json from a run's params; None for a run that another program logged."""
    given = run.data.params
    # Earlier releases sent every key of run.json under `run.`, also copies of the config's values.
    found = {key.removeprefix("run."): text for key, text in given.items() if key[:4] == "run."}
    for key, other in IN_CONFIG.items():
        if other in given:
            found.setdefault(key, given[other])
    if "params.scaling" not in found:
        return None
    record: Record = {"convention": run.data.tags.get("convention", "unknown")}
    for key, text in found.items():
        table, _, last = key.rpartition(".")
        place = record.setdefault(table, {}) if table else record
        try:
            place[last] = float(text) if last in NUMBERS else text
            finite = last not in NUMBERS or math.isfinite(place[last])
        except (ValueError, TypeError):  # no number, or the table's name is also the key of a text
            finite = False
        if not finite:
            raise RunError(
                f"run_id={run.info.run_id}: run.{key}={text!r} is no finite number; delete the run"
            )
    record["name"] = run.info.run_name
    record["steps"] = int(record.get("steps", 0))
    return record


def read(client: Any, run: Any) -> Run | None:
    """Read a run with its curves; None for a run that another program logged."""
    record = record_of(run)
    if record is None:
        return None
    steps = _history(client, run, "train")
    evals = _history(client, run, "eval")
    return Run(Path(run.info.run_id), record, steps, evals, _events(client, run))


def loads(client: Any, run_id: str) -> list[Record]:
    """Return the load of each expert from its file among the artifacts."""
    if not any(artifact.path == LOADS for artifact in client.list_artifacts(run_id)):
        return []  # an older release sent this run, or its first minute is not over
    with tempfile.TemporaryDirectory() as folder:
        return list(log.read(Path(client.download_artifacts(run_id, LOADS, folder))))


def _events(client: Any, run: Any) -> tuple[Record, ...]:
    """Return the events in order. MLflow's own status determines how the run ended."""
    world = run.data.metrics.get("event/world")
    found: list[Record] = []

    def add(event: str, step: int, time_ms: int | None) -> None:
        record = {"kind": "event", "world": world, "step": step, "time": (time_ms or 0) / 1000}
        found.append({**record, "event": event})

    for key in run.data.metrics:
        event = key.removeprefix("event/")
        if event not in (key, "world") and PHASES.get(event, "running") == "running":
            for metric in client.get_metric_history(run.info.run_id, key):
                add(event, metric.step, metric.timestamp)
    # The store returns metrics by name. An end comes last, even if the clock was wrong.
    found.sort(key=lambda record: float(record["time"]))
    if not found:
        add("start", 0, run.info.start_time)
    if run.info.status in ENDINGS:
        add(ENDINGS[run.info.status], 0, run.info.end_time)
    return tuple(found)


def _history(client: Any, run: Any, prefix: str) -> tuple[Record, ...]:
    rows: dict[int, Record] = {}
    for key in run.data.metrics:
        if key.startswith(f"{prefix}/"):
            for metric in client.get_metric_history(run.info.run_id, key):
                start = {"step": metric.step, "time": metric.timestamp / 1000}
                row = rows.setdefault(metric.step, start)
                row[key.removeprefix(f"{prefix}/")] = metric.value
    # Every record of ours has both. Another program may log metrics of these names to the run.
    return tuple(rows[step] for step in sorted(rows) if {"tokens", "flops"} <= rows[step].keys())
