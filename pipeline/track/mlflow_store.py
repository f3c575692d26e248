"""The MLflow client. Nothing here runs inside training: every call may be slow or fail."""

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from pipeline.atomic import locked
from pipeline.errors import RunError

DEFAULT = "sqlite:///mlflow.db"  # the database that a plain `mlflow ui` in this folder opens
MAX_METRICS = 1000  # per request, a limit of MLflow
MAX_PARAMS = 100  # likewise
ID_TAG = "isoflop.id"
SWEEP_ID = "sweep-"  # plus the experiment's name: the id of the run that stands for a sweep
# Without this tag MLflow opens an experiment in its view for GenAI traces.
KIND_TAG = "mlflow.experimentKind"
KIND = "custom_model_development"
_SETTINGS = {
    # Fail fast: the sidecar itself waits and tries again. MLflow would try 7 times for 120 s.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_ARTIFACT_UPLOAD_DOWNLOAD_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class UnusableError(Exception):
    """This address can never work, or MLflow is not installed: do not try again."""


def configure() -> None:
    """Set MLflow's timeouts and silence it; call this before its first import."""
    for key, value in _SETTINGS.items():
        os.environ.setdefault(key, value)
    for name in ("mlflow", "alembic", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)


def resolve(stored: str) -> str:
    """Return MLFLOW_TRACKING_URI, the store that a run uses, or a database in this folder."""
    uri = os.environ.get("MLFLOW_TRACKING_URI") or stored or DEFAULT
    if uri.startswith("sqlite:///") and not uri.startswith("sqlite:////"):
        # Absolute: `launch sync` may run in another folder later.
        uri = f"sqlite:///{_database(uri).absolute()}"
    return uri


def configured() -> str | None:
    """Return the address of the store; None if it would be a local database that does not exist."""
    configure()
    uri = resolve("")
    return None if uri.startswith("sqlite:///") and not _database(uri).exists() else uri


def public(uri: str) -> str:
    """Return an address without user and password, so that it may be saved and printed."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def reason(error: Exception) -> str:
    """Describe an exception in one line, without the password that MLflow's messages quote."""
    line = re.sub(r"//[^/\s@]*@", "//", " ".join(str(error).split()))  # user:password@
    silent = re.match(r"API request to (\S+?)/api/\S* failed with exception", line)
    return f"{silent[1]} does not answer" if silent else f"{type(error).__name__}: {line}"[:240]


@contextmanager
def connect(uri: str, experiment: str | None) -> Iterator[Any]:
    """Yield an `MlflowClient` for reading; its failures become one `RunError`."""
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    except ImportError:
        text = f"experiment={experiment}: MLflow is not installed"
        raise RunError(f"{text}; give --runs DIR") from None
    try:
        yield MlflowClient(tracking_uri=uri)
    except MlflowException as error:
        raise RunError(
            f"experiment={experiment}: {public(uri)}: {reason(error)}; give --runs DIR"
        ) from None


class Store:
    """A store that runs are written to."""

    def __init__(self, uri: str) -> None:
        if urlsplit(uri).scheme in {"", "file"} and not uri.startswith("databricks"):
            # MLflow would silently create a folder of that name.
            raise UnusableError(_remedy(uri, "names a folder"))
        try:
            from mlflow import MlflowClient
            from mlflow.tracking.registry import UnsupportedModelRegistryStoreURIException
        except ImportError as error:
            raise UnusableError(
                f"MLflow is not installed ({error}); pip install mlflow, then replay"
            ) from None
        try:
            if uri.startswith("sqlite:///"):
                folder = _database(uri).parent
                folder.mkdir(parents=True, exist_ok=True)
                # The first use creates the tables. MLflow does not lock out other processes.
                with locked(folder / ".mlflow.lock", wait_s=60):
                    self.client = MlflowClient(uri)
                    self.client.search_experiments(max_results=1)
            else:
                self.client = MlflowClient(uri)
        except UnsupportedModelRegistryStoreURIException:
            raise UnusableError(_remedy(uri, "is not supported by MLflow")) from None

    def has(self, run_id: str) -> bool:
        """Return whether the store has a run. A run that somebody deleted there stays deleted."""
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
            text = f"run_id={run_id} was deleted in MLflow"
            raise UnusableError(f"{text}; restore it, or remove mlflow.json for a new run")
        return True

    def open(
        self, experiment: str, name: str, identity: str, began_ms: int | None
    ) -> tuple[str, bool]:
        """Find or create a run; return its MLflow id, and whether it existed."""
        experiment_id = self._experiment(experiment)
        # A request whose answer was lost may have created the run, so search for it first.
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
        """Return the run that stands for a whole sweep; create it if there is none."""
        identity = f"{SWEEP_ID}{experiment}"
        run_id, existed = self.open(experiment, "sweep", identity, None)
        first = run_id if existed else self.open(experiment, "sweep", identity, None)[0]
        if first != run_id:  # two processes created it at once: keep the earlier one
            self.client.delete_run(run_id)
        return first

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        found = self.client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self.client.create_experiment(name, tags={KIND_TAG: KIND}))
            except MlflowException:
                # Another run of the same sweep may have created it since.
                found = self.client.get_experiment_by_name(name)
                if found is None:
                    raise
        if KIND_TAG not in found.tags:
            self.client.set_experiment_tag(found.experiment_id, KIND_TAG, KIND)
        return str(found.experiment_id)

    def highest_step(self, run_id: str, keys: Sequence[str]) -> int | None:
        """Return the last step that arrived, by the first of these metrics that has values. Every
        record has them all, and a record is never split between two transactions."""
        for key in keys:
            history = self.client.get_metric_history(run_id, key)
            if history:
                return max(int(metric.step) for metric in history)
        return None

    def describe(self, run_id: str, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Set tags, and params that MLflow does not have yet: it never changes a param."""
        from mlflow.entities import Param

        # A resumed run may have other values, and sending another value would be an error.
        known = self.client.get_run(run_id).data.params
        new = [Param(key, value) for key, value in params.items() if key not in known]
        for start in range(0, len(new), MAX_PARAMS):
            batch = new[start : start + MAX_PARAMS]
            self.client.log_batch(run_id, params=batch, synchronous=True)
        self.send(run_id, [], tags)

    def send(
        self, run_id: str, points: Sequence[tuple[str, float, int, int]], tags: Mapping[str, str]
    ) -> None:
        """Send metrics as (name, value, time in ms, step). All four are the key of MLflow's table,
        so a metric sent twice is stored once. The time has to be that of the record."""
        from mlflow.entities import Metric, RunTag

        all_tags = [RunTag(key, value) for key, value in tags.items()]
        for start in range(0, max(1, len(points)), MAX_METRICS):
            metrics = [Metric(*point) for point in points[start : start + MAX_METRICS]]
            self.client.log_batch(
                run_id, metrics=metrics, tags=all_tags if start == 0 else [], synchronous=True
            )

    def set_status(self, run_id: str, status: str, time_ms: int | None) -> None:
        if status == "RUNNING":  # set_terminated would set an end time
            self.client.update_run(run_id, status=status)
        else:
            self.client.set_terminated(run_id, status, end_time=time_ms)


def _database(uri: str) -> Path:
    return Path(uri.removeprefix("sqlite:///"))


def _remedy(uri: str, fault: str) -> str:
    return f"MLFLOW_TRACKING_URI={public(uri)} {fault}; try http://HOST:PORT or {DEFAULT}"
