"""Read an experiment from MLflow as run directories are read: the same runs, from the copy that a server keeps."""

import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.errors import RunError
from pipeline.runs import log
from pipeline.runs.history import Run
from pipeline.runs.log import Record
from pipeline.track import mlflow_store as store

FORECASTS = (
    "forecasts"  # where registered ones lie, in a run directory and among the artifacts of a sweep
)
EVENT = {"FINISHED": "finish", "KILLED": "interrupt", "FAILED": "fail"}
NUMBERS = {"total", "active", "non_embedding", "scaling", "steps", "bytes_per_token", "flops_per_token", "version",
           "batch_tokens"}  # fmt: skip


def read_experiment(name: str) -> list[Run]:
    """Every run of an experiment in the configured store (MLFLOW_TRACKING_URI, or the local database)."""
    uri = configured()
    if uri is None:
        raise RunError(
            f"experiment={name}: no runs/{name} here and no MLflow store; set MLFLOW_TRACKING_URI"
        )
    with asking(uri, name) as client:
        runs = [read(client, run) for _, run in search(client, uri, name)]
    ours = [run for run in runs if run is not None]
    if not ours:
        raise RunError(
            f"experiment={name} holds no run of ours in {store.public(uri)}; train one with `launch pretrain`"
        )
    return sorted(ours, key=lambda run: (run.N, run.name))


@contextmanager
def asking(uri: str, name: str | None) -> Iterator[Any]:
    """A client of the store, whose failures are one line."""
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    except ImportError:
        raise RunError(f"experiment={name}: MLflow is not installed; give --runs DIR") from None
    try:
        yield MlflowClient(tracking_uri=uri)
    except MlflowException as error:
        raise RunError(
            f"experiment={name}: {store.public(uri)}: {store.reason(error)}; give --runs DIR"
        ) from None


def search(client: Any, uri: str, name: str | None) -> Iterator[tuple[str, Any]]:
    """The runs of an experiment, or of all, each with its experiment's name; their curves are not read."""
    known = {e.experiment_id: e.name for e in client.search_experiments()}
    ids = [key for key, known_name in known.items() if name in (None, known_name)]
    if name is not None and not ids:
        others = ", ".join(sorted(n for n in known.values() if n != "Default")[:20])
        raise RunError(
            f"experiment={name} is not in {store.public(uri)}; it has {others or 'none'}"
        )
    token = None
    while ids:
        page = client.search_runs(ids, max_results=1000, page_token=token)
        yield from ((known[run.info.experiment_id], run) for run in page)
        token = page.token
        if not token:
            return


def configured() -> str | None:
    """The configured store; None where it would be a local database that is not there."""
    store.quicken()
    logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells of every table it looks at
    uri = store.resolve("")
    return (
        None
        if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists()
        else uri
    )


def keep(
    experiment: str, paths: Sequence[Path] = (), forecasts: Sequence[Path] = (), **about: Any
) -> str | None:
    """Copy files to the sweep's parent run, and what it is; a line where that failed: the files are the record."""
    uri = configured()
    if uri is None:
        return None  # nobody here uses MLflow
    try:
        there = store.Store(uri)
        run_id = there.parent(experiment)
        if about:
            there.describe(run_id, store.flat(about), {})
            there.set_status(run_id, "FINISHED", None)
        there.upload(run_id, paths)
        there.upload(run_id, forecasts, FORECASTS)
    except Exception as error:  # a server may fail in any way, and none may cost the forecast
        why = store.reason(error)
        return f"MLflow has no copy of this ({why}); the files are the record, and `launch sync` sends a sweep's."
    return None


def record_of(run: Any) -> Record | None:
    """What the run is; None for one that another program logged."""
    record: Record = {
        "name": run.info.run_name,
        "convention": run.data.tags.get("convention", "unknown"),
    }
    for key, text in run.data.params.items():
        if key.startswith("run."):
            *path, last = key.removeprefix("run.").split(".")
            place = record
            for part in path:
                place = place.setdefault(part, {})
            place[last] = float(text) if last in NUMBERS else text
    if "scaling" not in record.get("params", {}):
        return None
    record["steps"] = int(record.get("steps", 0))
    return record


def read(client: Any, run: Any) -> Run | None:
    """A run with its curves; None for one that another program logged."""
    record = record_of(run)
    if record is None:
        return None
    steps, evals = (history(client, run, prefix) for prefix in ("train", "eval"))
    return Run(Path(run.info.run_id), record, steps, evals, events(client, run))


def loads(client: Any, run_id: str) -> list[Record]:
    """What each expert of a mixture was given, from the file that goes along with a run's numbers."""
    if not any(artifact.path == store.LOADS for artifact in client.list_artifacts(run_id)):
        return []  # one that was fed by an older version, or not for a minute yet
    with tempfile.TemporaryDirectory() as folder:
        return list(log.read(Path(client.download_artifacts(run_id, store.LOADS, folder))))


def events(client: Any, run: Any) -> tuple[Record, ...]:
    """What happened, in order; the store's own status has the last word, whatever the log last said."""
    found: list[Record] = []
    for key in run.data.metrics:
        if key.startswith("event/") and key != "event/world":
            for metric in client.get_metric_history(run.info.run_id, key):
                found.append(
                    {"step": metric.step, "time": metric.timestamp / 1000, "event": key[6:]}
                )
    if not found:
        found.append({"time": run.info.start_time / 1000, "step": 0, "event": "start"})
    told = [e for e in found if e["event"] not in EVENT.values()]
    if event := EVENT.get(run.info.status):
        told.append({"time": (run.info.end_time or 0) / 1000, "step": 0, "event": event})
    world = run.data.metrics.get("event/world")
    return tuple(
        {"kind": "event", "world": world, **e} for e in sorted(told, key=lambda e: float(e["time"]))
    )


def history(client: Any, run: Any, prefix: str) -> tuple[Record, ...]:
    rows: dict[int, Record] = {}
    for key in run.data.metrics:
        if key.startswith(f"{prefix}/"):
            for metric in client.get_metric_history(run.info.run_id, key):
                row = rows.setdefault(
                    metric.step, {"step": metric.step, "time": metric.timestamp / 1000}
                )
                row[key.removeprefix(f"{prefix}/")] = metric.value
    return tuple(rows[step] for step in sorted(rows) if {"tokens", "flops"} <= rows[step].keys())
