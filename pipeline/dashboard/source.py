"""Where runs come from: run directories, or an MLflow store.

A source lists its runs, each with a stamp that changes when the run does, and reads one run.
"""

import hashlib
import os
import tempfile
import time
from collections.abc import Collection, Hashable
from pathlib import Path
from typing import Any

from pipeline.dashboard.payload import RunLog, RunView, text
from pipeline.runs.history import RUN_FILE, find_runs, read_record, read_runs
from pipeline.runs.log import FILE, Tail
from pipeline.scaling.record import registered
from pipeline.track import mlflow_runs
from pipeline.track import mlflow_store as store
from pipeline.track.mlflow_runs import FORECASTS
from pipeline.track.mlflow_sync import load_state

KEPT_ROWS = 600  # per run and kind, in memory; a screen has no more pixels to show them
CHUNK_RECORDS = 5000


class Directories:
    """Run directories below a root. A growing log is read from where the last read ended."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.title = root.resolve().name
        self._paths: dict[str, Path] = {}
        self._following: dict[str, tuple[Tail, RunLog]] = {}

    def scan(self) -> dict[str, Hashable]:
        """Return every run's id with a stamp that changes when the run does."""
        # File names may be any bytes, so the id is a hash of the bytes, not of text.
        self._paths = {
            hashlib.sha256(os.fsencode(path)).hexdigest()[:12]: path
            for path in find_runs(self.root)
        }
        for key in self._following.keys() - self._paths.keys():  # deleted runs
            self._following.pop(key)[0].close()
        return {
            key: tuple(_stamp(path / name) for name in (RUN_FILE, FILE))
            for key, path in self._paths.items()
        }

    def read(self, key: str, *, whole: bool = False) -> RunView:
        """Read one run that `scan` found: enough for the overview, or every record."""
        path = self._paths[key]
        record = read_record(path)
        # A running run continues where the last read ended; a whole read starts at the top.
        fresh = (Tail(path / FILE), RunLog(None if whole else KEPT_ROWS))
        tail, log = fresh if whole else self._following.pop(key, fresh)
        try:
            while records := tail.take(CHUNK_RECORDS):
                if tail.rewound:
                    log = RunLog(log.limit)  # a resume has truncated the log: start again
                for entry in records:
                    log.add(entry)
            view = RunView(record, log, self._link(path), path)
            # Runs that have ended are rarely read again.
            running = not whole and view.run.status(time.time()) == "running"
        except BaseException:
            tail.close()
            raise
        if running:
            self._following[key] = (tail, log)
        else:  # close the file and free the spare rows
            tail.close()
            log.steps.reduce()
            log.evals.reduce()
        return view

    def label(self, key: str) -> str | None:
        """Name a run for a message; None if it no longer exists."""
        path = self._paths.get(key)
        return text(str(path)) if path is not None and os.path.lexists(path / RUN_FILE) else None

    def forecasts(self, keys: Collection[str]) -> list[dict[str, Any]]:
        """Return the forecasts registered for these runs."""
        folders = {self.root, *(self._paths[key].parent for key in keys if key in self._paths)}
        return [content for folder in sorted(folders) for content in registered(folder / FORECASTS)]

    def _link(self, path: Path) -> str | None:
        state = load_state(path)
        if state.run_id and state.uri.startswith(("http://", "https://")):
            return f"{state.uri.rstrip('/')}/#/runs/{state.run_id}"
        return None


class Store:
    """One experiment of an MLflow store, or all of them."""

    def __init__(self, uri: str, experiment: str | None) -> None:
        self.uri = uri
        self.experiment = experiment
        # public: an address may contain a password.
        self.title = experiment or store.public(uri).rpartition("/")[2]
        self._runs: dict[str, tuple[str, Any]] = {}  # run id → experiment name, MLflow's run
        self._sweeps: dict[str, str] = {}  # experiment → id of the run that represents its sweep
        self._forecasts: dict[str, tuple[Hashable, list[dict[str, Any]]]] = {}

    def scan(self) -> dict[str, Hashable]:
        with store.connect(self.uri, self.experiment) as client:
            found = list(mlflow_runs.search(client, self.uri, self.experiment))
        self._sweeps = {
            name: run.info.run_id
            for name, run in found
            if str(run.data.tags.get(store.ID_TAG, "")).startswith(store.SWEEP_ID)
        }
        self._runs = {run.info.run_id: (name, run) for name, run in found if _is_ours(run)}
        # MLflow has no time of the last change, but every logged step changes the last metrics.
        return {
            key: (run.info.status, tuple(sorted(run.data.metrics.items())))
            for key, (_, run) in self._runs.items()
        }

    def read(self, key: str, *, whole: bool = False) -> RunView:
        experiment, found = self._runs[key]
        with store.connect(self.uri, self.experiment) as client:
            run = mlflow_runs.read(client, found)
            has_loads = whole and "moe/tokens" in found.data.metrics
            loads = mlflow_runs.loads(client, key) if has_loads else []
        assert run is not None, "scan keeps only our runs"
        logged = [{**record, "kind": "step"} for record in run.steps]
        logged += [{**record, "kind": "eval"} for record in run.evals]
        # An evaluation comes after the step that it belongs to.
        logged.sort(key=lambda record: (record["step"], record["kind"] == "eval"))
        log = RunLog(None if whole else KEPT_ROWS)
        for entry in (*run.events, *logged, *loads):
            log.add(entry)
        link = None
        if self.uri.startswith(("http://", "https://")):
            page = f"/#/experiments/{found.info.experiment_id}/runs/{key}"
            link = store.public(self.uri).rstrip("/") + page
        return RunView({"experiment": experiment, **run.record}, log, link)

    def label(self, key: str) -> str | None:
        return f"MLflow run {text(self._runs[key][1].info.run_name)} ({key})"

    def forecasts(self, keys: Collection[str]) -> list[dict[str, Any]]:
        sweep = self._sweeps.get(self._runs[next(iter(keys))][0])
        if sweep is None:
            return []
        with (
            store.connect(self.uri, self.experiment) as client,
            tempfile.TemporaryDirectory() as folder,
        ):
            names = tuple(sorted(file.path for file in client.list_artifacts(sweep, FORECASTS)))
            # A registered forecast never changes, so a new name is all there is to look for.
            if self._forecasts.get(sweep, ((), []))[0] != names:
                for name in names:
                    client.download_artifacts(sweep, name, folder)
                self._forecasts[sweep] = (names, registered(Path(folder) / FORECASTS))
        return self._forecasts.get(sweep, ((), []))[1]


Source = Directories | Store


def open_source(runs: Path | None, experiment: str | None) -> Source:
    """Choose the source: --runs, else the configured MLflow store, else the directory runs/."""
    if runs is not None:
        root = runs / experiment if experiment else runs
        if not root.is_dir():
            read_runs(root)  # raises the error that names a remedy
        return Directories(root)
    uri = store.configured()
    if uri is not None:
        return Store(uri, experiment)
    return Directories(Path("runs") / experiment if experiment else Path("runs"))


def _stamp(path: Path) -> Hashable:
    try:
        found = path.stat()
    except OSError:
        return None
    # A log may be replaced by another one of the same size; the inode shows that.
    return found.st_ino, found.st_size, found.st_mtime_ns


def _is_ours(run: Any) -> bool:
    """Recognize our runs. A damaged one counts, so that reading it reports it by name."""
    try:
        return mlflow_runs.record_of(run) is not None
    except Exception:  # any parameter may be damaged in any way
        return True
