"""Read an experiment from MLflow as run directories are read: the same runs, from the copy that a server keeps."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import RunError
from pipeline.scaling.runs import Record, Run
from pipeline.track import store

EVENT = {"FINISHED": "finish", "KILLED": "interrupt", "FAILED": "fail"}
NUMBERS = {"total", "active", "non_embedding", "scaling", "steps", "bytes_per_token", "flops_per_token", "version"}


def read_experiment(name: str) -> list[Run]:
    """Every run of an experiment in the configured store (MLFLOW_TRACKING_URI, or the local database)."""
    uri = _store()
    if uri is None:
        raise RunError(f"experiment={name}: no runs/{name} here and no MLflow store; set MLFLOW_TRACKING_URI")
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    except ImportError:
        raise RunError(f"experiment={name}: MLflow is not installed; give --runs DIR") from None
    try:
        client = MlflowClient(tracking_uri=uri)
        found = client.get_experiment_by_name(name)
        if found is None:
            known = ", ".join(e.name for e in client.search_experiments(max_results=20) if e.name != "Default")
            raise RunError(f"experiment={name} is not in {store.public(uri)}; it has {known or 'none'}")
        runs = [read(client, run) for run in client.search_runs([found.experiment_id], max_results=5000)]
    except MlflowException as error:
        raise RunError(f"experiment={name}: {store.public(uri)}: {store.reason(error)}; give --runs DIR") from None
    ours = [run for run in runs if run is not None]
    if not ours:
        raise RunError(
            f"experiment={name} holds no run of ours in {store.public(uri)}; train one with `launch pretrain`"
        )
    return sorted(ours, key=lambda run: (run.N, run.name))


def _store() -> str | None:
    """The configured store; None where it would be a local database that is not there."""
    store.quicken()
    logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells of every table it looks at
    uri = store.resolve("")
    return None if uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists() else uri


def keep(experiment: str, paths: Sequence[Path]) -> str | None:
    """Copy registered forecasts to the experiment's own run; what went wrong, if it did: the files are the record."""
    uri = _store()
    if uri is None:
        return None  # nobody here uses MLflow
    try:
        there = store.Store(uri)
        run_id, _ = there.open(experiment, "forecasts", f"forecasts-{experiment}", None)
        there.upload(run_id, paths)
    except Exception as error:  # a server may fail in any way, and none may cost the forecast
        return f"MLflow has no copy of this forecast ({store.reason(error)}); the file is the record."
    return None


def read(client: Any, run: Any) -> Run | None:
    """None for a run that another program logged."""
    record: Record = {"name": run.info.run_name, "convention": run.data.tags.get("convention", "unknown")}
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
    events: list[Record] = [{"kind": "event", "time": run.info.start_time / 1000, "step": 0, "event": "start"}]
    if event := EVENT.get(run.info.status):
        events.append({"kind": "event", "time": (run.info.end_time or 0) / 1000, "step": 0, "event": event})
    steps, evals = (history(client, run, prefix) for prefix in ("train", "eval"))
    return Run(Path(run.info.run_id), record, steps, evals, tuple(events))


def history(client: Any, run: Any, prefix: str) -> tuple[Record, ...]:
    rows: dict[int, Record] = {}
    for key in run.data.metrics:
        if key.startswith(f"{prefix}/"):
            for metric in client.get_metric_history(run.info.run_id, key):
                row = rows.setdefault(metric.step, {"step": metric.step, "time": metric.timestamp / 1000})
                row[key.removeprefix(f"{prefix}/")] = metric.value
    return tuple(rows[step] for step in sorted(rows) if {"tokens", "flops"} <= rows[step].keys())
