"""Where runs come from: run directories, or an MLflow store; each tells cheaply what has changed."""

import hashlib
import shlex
import tempfile
import time
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pipeline.dashboard.curve import Folded, Rows, number
from pipeline.errors import RunError
from pipeline.runs.history import Run, read_record, run_paths
from pipeline.runs.log import Record, Tail
from pipeline.scaling.record import registered
from pipeline.track import mlflow_runs
from pipeline.track import mlflow_store as store
from pipeline.track.mlflow_runs import FORECASTS
from pipeline.track.mlflow_sync import load_state

KEPT_ROWS = 600  # per run and kind, in memory; more than a screen has pixels to tell apart
CHUNK_RECORDS = 5000


@dataclass(frozen=True)
class Seen:
    """A run as far as it is known now."""

    record: Record
    folded: Folded
    link: str | None  # to the run in MLflow's own pages

    @property
    def run(self) -> Run:
        """As the fits read it."""
        steps, evals = records(self.folded.steps, 1), records(self.folded.evals)
        return Run(Path(), self.record, steps, evals, tuple(self.folded.events))


class Source(Protocol):
    title: str
    options: (
        str | None
    )  # what makes other commands read the same runs, where it is not their experiment's name

    def scan(self) -> dict[str, Hashable]:
        """Every run's id, and a stamp that changes when the run does."""
        ...

    def read(self, key: str, *, whole: bool = False) -> Seen:
        """One run that `scan` named: what it needs for the overview, or every record."""
        ...

    def forecasts(self, keys: Collection[str]) -> list[dict[str, Any]]:
        """Those registered for these runs."""
        ...


class Directories:
    """Run directories below a root; a log is read on from where it was left."""

    def __init__(self, root: Path) -> None:
        self.root, self.title = root, root.resolve().name
        self.options: str | None = f"--runs {shlex.quote(str(root))}"
        self._paths: dict[str, Path] = {}
        self._following: dict[str, tuple[Tail, Folded]] = {}

    def scan(self) -> dict[str, Hashable]:
        found = {
            hashlib.sha256(str(path).encode()).hexdigest()[:12]: path
            for path in run_paths(self.root)
        }
        self._paths = found
        return {
            key: tuple(stamp(path / name) for name in ("run.json", "log.jsonl"))
            for key, path in found.items()
        }

    def read(self, key: str, *, whole: bool = False) -> Seen:
        path = self._paths[key]
        record = read_record(path)
        fresh = Tail(path / "log.jsonl"), Folded(None if whole else KEPT_ROWS)
        tail, folded = fresh if whole else self._following.pop(key, fresh)
        while taken := tail.take(CHUNK_RECORDS):
            if tail.rewound:
                folded = Folded(folded.limit)  # a resume has cut the log back: start again
            for entry in taken:
                folded.add(entry)
        seen = Seen(record, folded, self._link(path))
        if not whole and seen.run.status(time.time()) == "running":
            self._following[key] = tail, folded
        else:
            tail.close()  # an ended run is rarely read again, and neither files nor memory are for hoarding
            folded.steps.settle()
            folded.evals.settle()
        return seen

    def _link(self, path: Path) -> str | None:
        known = load_state(path)
        linked = known.run_id and known.uri.startswith(("http://", "https://"))
        return f"{known.uri.rstrip('/')}/#/runs/{known.run_id}" if linked else None

    def forecasts(self, keys: Collection[str]) -> list[dict[str, Any]]:
        folders = {self.root, *(self._paths[key].parent for key in keys)}
        return [content for folder in sorted(folders) for content in registered(folder / FORECASTS)]


class Store:
    """An experiment of an MLflow store, or all of them."""

    options: str | None = None

    def __init__(self, uri: str, experiment: str | None) -> None:
        self.uri, self.experiment = uri, experiment
        self.title = experiment or store.public(uri).rpartition("/")[2]
        self._runs: dict[str, tuple[str, Any]] = {}
        self._sweeps: dict[str, str] = {}  # experiment → the run that stands for all of it
        self._kept: dict[str, tuple[Hashable, list[dict[str, Any]]]] = {}

    def scan(self) -> dict[str, Hashable]:
        with mlflow_runs.asking(self.uri, self.experiment) as client:
            every = {
                run.info.run_id: (name, run)
                for name, run in mlflow_runs.search(client, self.uri, self.experiment)
            }
        identity = {
            key: str(run.data.tags.get(store.ID_TAG, "")) for key, (_, run) in every.items()
        }
        self._sweeps = {
            name: key
            for key, (name, _) in every.items()
            if identity[key].startswith(store.SWEEP_ID)
        }
        self._runs = {
            key: found
            for key, found in every.items()
            if mlflow_runs.record_of(found[1]) is not None
        }
        return {
            key: (run.info.status, tuple(sorted(run.data.metrics.items())))
            for key, (_, run) in self._runs.items()
        }

    def read(self, key: str, *, whole: bool = False) -> Seen:
        experiment, found = self._runs[key]
        with mlflow_runs.asking(self.uri, self.experiment) as client:
            run = mlflow_runs.read(client, found)
            loads = (
                mlflow_runs.loads(client, key)
                if whole and "moe/tokens" in found.data.metrics
                else []
            )
        assert run is not None
        folded = Folded(None if whole else KEPT_ROWS)
        logged = [
            {**r, "kind": kind}
            for kind, rows in (("step", run.steps), ("eval", run.evals))
            for r in rows
        ]
        for entry in (
            *run.events,
            *sorted(logged, key=lambda r: (r["step"], r["kind"] == "eval")),
            *loads,
        ):
            folded.add(entry)
        linked = self.uri.startswith(("http://", "https://"))
        page = f"{store.public(self.uri).rstrip('/')}/#/experiments/{found.info.experiment_id}/runs/{key}"
        return Seen({"experiment": experiment, **run.record}, folded, page if linked else None)

    def forecasts(self, keys: Collection[str]) -> list[dict[str, Any]]:
        sweep = self._sweeps.get(self._runs[next(iter(keys))][0])
        if sweep is None:
            return []
        seen, contents = self._kept.get(sweep, ((), []))
        with (
            mlflow_runs.asking(self.uri, self.experiment) as client,
            tempfile.TemporaryDirectory() as folder,
        ):
            now = tuple(
                sorted(artifact.path for artifact in client.list_artifacts(sweep, FORECASTS))
            )
            if now != seen:
                for path in now:
                    client.download_artifacts(sweep, path, folder)
                contents = registered(Path(folder) / FORECASTS)
                self._kept[sweep] = now, contents
        return contents


def open_source(runs: Path | None, experiment: str | None) -> Source:
    """`--runs`, or the configured store, or the run directories where there is none."""
    if runs is not None:
        root = runs / experiment if experiment else runs
        if not root.is_dir():
            raise RunError(
                f"runs={root} is not a directory; give one that holds runs, such as runs/demo"
            )
        return Directories(root)
    uri = mlflow_runs.configured()
    if uri is not None:
        return Store(uri, experiment)
    return Directories(Path("runs") / experiment if experiment else Path("runs"))


def stamp(path: Path) -> Hashable:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def records(rows: Rows, last: int = 0) -> tuple[Record, ...]:
    """What the fits read, in numbers."""
    return tuple(
        {**{k: number(v) for k, v in zip(rows.keys, row, strict=True)}, "step": row[0]}
        for row in rows.rows[-last:]
    )
