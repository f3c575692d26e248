"""What MLflow gets and how: a run directory in its terms, and the client that every call goes through."""

import hashlib
import json
import math
import os
import posixpath
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from pipeline.atomic import locked
from pipeline.track import environment

DEFAULT = "sqlite:///mlflow.db"  # what a plain `mlflow ui` in the same folder opens
BATCH_METRICS = 1000  # MLflow's limits per request
BATCH_PARAMS = 100
ID_TAG = "isoflop.id"
SWEEP_ID = "sweep-"  # before the experiment's name, the identity of a sweep's parent run


class UnusableError(Exception):
    """This store can never work as it is named, or MLflow is not installed: waiting is no remedy."""


def quicken() -> None:
    """Fail fast: the waiting between tries is ours, and MLflow's own (seven tries, 120 s each) would outlast it."""
    for key, value in {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
        "MLFLOW_ARTIFACT_UPLOAD_DOWNLOAD_TIMEOUT": "10",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }.items():
        os.environ.setdefault(key, value)


def resolve(stored: str) -> str:
    """MLFLOW_TRACKING_URI, or the store this run already went to, or a database in the current folder."""
    uri = os.environ.get("MLFLOW_TRACKING_URI") or stored or DEFAULT
    if uri.startswith("sqlite:///") and not uri.startswith("sqlite:////"):
        uri = f"sqlite:///{Path(uri.removeprefix('sqlite:///')).absolute()}"  # a later sync may start elsewhere
    return uri


def public(uri: str) -> str:
    """Without user and password: the form that may be written down."""
    parts = urlsplit(uri)
    return (
        urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        if "@" in parts.netloc
        else uri
    )


class Store:
    """One MLflow run in one store."""

    def __init__(self, uri: str) -> None:
        _check(uri)
        try:
            from mlflow import MlflowClient
            from mlflow.tracking.registry import UnsupportedModelRegistryStoreURIException
        except ImportError as error:
            raise UnusableError(
                f"MLflow is not installed ({error}); pip install mlflow, then replay"
            ) from None
        try:
            self.client = MlflowClient(uri)
            if uri.startswith("sqlite:///"):
                folder = Path(uri.removeprefix("sqlite:///")).parent
                folder.mkdir(parents=True, exist_ok=True)
                # The first query creates the tables, and MLflow does not guard that against others.
                with locked(folder / ".mlflow.lock", wait_s=60):
                    self.client.search_experiments(max_results=1)
        except UnsupportedModelRegistryStoreURIException:
            raise UnusableError(_remedy(uri, "is of no kind that MLflow knows")) from None

    def has(self, run_id: str) -> bool:
        """False if the store was wiped since; a run that somebody deleted there stays deleted."""
        from mlflow.exceptions import MlflowException

        if not run_id:
            return False
        try:
            run = self.client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise
        if run.info.lifecycle_stage == "deleted":
            raise UnusableError(
                f"run_id={run_id} was deleted in MLflow; restore it, or remove mlflow.json for a new run"
            )
        return True

    def open(
        self, experiment: str, name: str, identity: str, began_ms: int | None
    ) -> tuple[str, bool]:
        """The run's MLflow id, and whether it was there already."""
        experiment_id = self._experiment(experiment)
        # A create whose answer was lost did happen: look before making a second one.
        found = self.client.search_runs(
            [experiment_id],
            f"tags.`{ID_TAG}` = '{identity}'",
            max_results=1,
            order_by=["attributes.start_time ASC"],
        )
        if found:
            return found[0].info.run_id, True
        run = self.client.create_run(experiment_id, began_ms, {ID_TAG: identity}, name)
        return run.info.run_id, False

    def parent(self, experiment: str) -> str:
        """The run that stands for the whole sweep; an experiment holds one, made by whoever needs it first."""
        run_id, there = self.open(experiment, "sweep", f"{SWEEP_ID}{experiment}", None)
        first = (
            run_id if there else self.open(experiment, "sweep", f"{SWEEP_ID}{experiment}", None)[0]
        )
        if first != run_id:  # two came at once: the earlier one stays
            self.client.delete_run(run_id)
        return first

    def adopt(self, run_id: str, parent: str) -> None:
        self.client.set_tag(run_id, "mlflow.parentRunId", parent)  # what the UI nests by

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        found = self.client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        try:
            return str(self.client.create_experiment(name))
        except MlflowException:
            found = self.client.get_experiment_by_name(
                name
            )  # another run of the same sweep was faster
            if found is None:
                raise
            return str(found.experiment_id)

    def highest_step(self, run_id: str, keys: Sequence[str]) -> int | None:
        """Batches are transactions, so any metric that each record carries tells how far they got."""
        for key in keys:
            history = self.client.get_metric_history(run_id, key)
            if history:
                return max(int(metric.step) for metric in history)
        return None

    def describe(self, run_id: str, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Params never change in MLflow: those already there stay, the artifacts show the newest."""
        from mlflow.entities import Param, RunTag

        there = self.client.get_run(run_id).data.params
        new = [Param(key, value) for key, value in params.items() if key not in there]
        for start in range(0, len(new), BATCH_PARAMS):
            self.client.log_batch(
                run_id, params=new[start : start + BATCH_PARAMS], synchronous=True
            )
        self.client.log_batch(
            run_id, tags=[RunTag(key, value) for key, value in tags.items()], synchronous=True
        )

    def upload(self, run_id: str, paths: Sequence[Path], folder: str | None = None) -> None:
        for path in paths:
            self.client.log_artifact(run_id, str(path), folder)

    def put(self, run_id: str, text: str, name: str) -> None:
        self.client.log_text(run_id, text, name)

    def send(
        self, run_id: str, points: Sequence[tuple[str, float, int, int]], tags: Mapping[str, str]
    ) -> None:
        """Points are (name, value, time in ms, step). Sending the same ones twice stores them once: all four are the
        key of MLflow's table, which is why the time is the record's and never now."""
        from mlflow.entities import Metric, RunTag

        for start in range(0, max(1, len(points)), BATCH_METRICS):
            self.client.log_batch(
                run_id,
                metrics=[Metric(*point) for point in points[start : start + BATCH_METRICS]],
                tags=[RunTag(key, value) for key, value in tags.items()] if start == 0 else [],
                synchronous=True,
            )

    def set_status(self, run_id: str, status: str, time_ms: int | None) -> None:
        if status == "RUNNING":
            self.client.update_run(run_id, status=status)
        else:
            self.client.set_terminated(run_id, status, end_time=time_ms)


def reason(error: Exception) -> str:
    """An exception in one short line; MLflow's quote the whole address, password included."""
    line = re.sub(r"//[^/\s@]*@", "//", " ".join(str(error).split()))
    silent = re.match(r"API request to (\S+?)/api/\S* failed with exception", line)
    return f"{silent[1]} does not answer" if silent else f"{type(error).__name__}: {line}"[:240]


def _check(uri: str) -> None:
    scheme = urlsplit(uri).scheme
    if uri.startswith("databricks"):
        return
    if scheme in {"", "file"}:  # MLflow would quietly make a folder of that name
        raise UnusableError(_remedy(uri, "names a folder"))


def _remedy(uri: str, fault: str) -> str:
    return f"MLFLOW_TRACKING_URI={public(uri)} {fault}; try http://HOST:PORT or {DEFAULT}"


FILES = ("config.toml", "run.json", environment.FILE)
SWEEP_FILE = "sweep.json"
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


def read_run_json(run_dir: Path) -> dict[str, Any]:
    """run.json, or nothing: a run that died before it wrote one still has a curve."""
    return _json(run_dir / "run.json")


def read_sweep(folder: Path) -> dict[str, Any]:
    """sweep.json, which makes the run directories beside it the children of one parent; or nothing."""
    return _json(folder / SWEEP_FILE)


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
    return flat({**config, "run": read_run_json(run_dir)})


def flat(table: Mapping[str, Any]) -> dict[str, str]:
    return {name(key): clip(value, VALUE_CHARACTERS) for key, value in _flat("", table)}


def tags(run_dir: Path) -> dict[str, str]:
    about, env = read_run_json(run_dir), _json(run_dir / environment.FILE)
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
