"""Follow the runs of a directory or an MLflow store, and keep the page's data up to date.

1. A source lists runs with a stamp that changes when the run does, and reads one run.
2. `Watcher.refresh` reads the runs whose stamp has changed and fits the laws of their groups.
3. Requests are answered from the last `Snapshot`, so that they never wait for a file or a server.
"""

import hashlib
import json
import logging
import os
import shlex
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.dashboard.law_view import clusters, law_data
from pipeline.dashboard.payload import RunLog, RunView, text
from pipeline.errors import RunError, UserError
from pipeline.runs.history import RUN_FILE, find_runs, read_record
from pipeline.runs.log import FILE, Tail
from pipeline.scaling.record import registered, score
from pipeline.track import mlflow_runs
from pipeline.track import mlflow_store as store
from pipeline.track.mlflow_runs import FORECASTS
from pipeline.track.mlflow_sync import load_state
from pipeline.units import finite

REFRESH_S = 2.0
# After a look that took t seconds, rest for at least 4t: watching must not become the load.
REST_FACTOR = 4
KEPT_ROWS = 600  # per run and kind, in memory; a screen has no more pixels to show them
CHUNK_RECORDS = 5000
CHART_POINTS = 40_000  # of all runs together on one chart
MIN_POINTS = 40  # of one run, however many there are
MAX_POINTS = 512
PAGE_POINTS = 1200  # on a run's own page
STATIC_POINTS = 60_000  # on all run pages together in one file
MAX_NOTES = 20


class Directories:
    """Run directories below a root. A growing log is read on from where the last look ended."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.title = root.resolve().name
        # Options that make other commands read the same runs; None means `--experiment NAME`.
        self.options: str | None = f"--runs {shlex.quote(str(root))}"
        self._paths: dict[str, Path] = {}
        self._following: dict[str, tuple[Tail, RunLog]] = {}

    def scan(self) -> dict[str, Hashable]:
        """Return every run's id with a stamp that changes when the run does."""
        # File names may be any bytes, so the id is a hash of the bytes, not of text.
        self._paths = {
            hashlib.sha256(os.fsencode(path)).hexdigest()[:12]: path
            for path in find_runs(self.root)
        }
        return {
            key: tuple(_stamp(path / name) for name in (RUN_FILE, FILE))
            for key, path in self._paths.items()
        }

    def read(self, key: str, *, whole: bool = False) -> RunView:
        """Read one run that `scan` found: enough for the overview, or every record."""
        path = self._paths[key]
        record = read_record(path)
        fresh = (Tail(path / FILE), RunLog(None if whole else KEPT_ROWS))
        tail, log = fresh if whole else self._following.pop(key, fresh)
        try:
            while records := tail.take(CHUNK_RECORDS):
                if tail.rewound:
                    log = RunLog(log.limit)  # a resume has truncated the log: start again
                for entry in records:
                    log.add(entry)
            view = RunView(record, log, self._link(path))
            running = not whole and view.run.status(time.time()) == "running"
        except BaseException:
            tail.close()
            raise
        if running:
            self._following[key] = (tail, log)
        else:  # an ended run is rarely read again: keep neither its file nor spare rows
            tail.close()
            log.steps.reduce()
            log.evals.reduce()
        return view

    def label(self, key: str) -> str | None:
        """Name a run for a message; None if it no longer exists."""
        path = self._paths.get(key)
        return text(str(path)) if path is not None and os.path.lexists(path / "run.json") else None

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

    options: str | None = None

    def __init__(self, uri: str, experiment: str | None) -> None:
        self.uri = uri
        self.experiment = experiment
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
            raise RunError(f"runs={root} is not a directory; give one that holds runs: runs/demo")
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
    return found.st_ino, found.st_size, found.st_mtime_ns


def _is_ours(run: Any) -> bool:
    """Tell runs of other programs apart. A damaged run of ours stays, so that reading names it."""
    try:
        return mlflow_runs.record_of(run) is not None
    except Exception:  # any parameter may be damaged in any way
        return True


@dataclass(frozen=True)
class Snapshot:
    """What requests are answered from. It is never changed, only replaced."""

    revision: int = 0
    # Run id → revision of the run's last change, and its row and curves as JSON.
    runs: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    laws: bytes = b"[]"
    laws_revision: int = 0
    notes: tuple[str, ...] = ()
    reading: tuple[int, int] | None = None  # runs read so far, runs in all


class Watcher:
    """`refresh` looks for changes once; `start` repeats that in a thread beside the server."""

    def __init__(self, source: Source, law: str = "auto") -> None:
        self.source = source
        self.law = law
        self.boot = hashlib.sha256(str(time.time_ns()).encode()).hexdigest()[:8]
        self.snapshot = Snapshot(reading=(0, 0))
        self._views: dict[str, tuple[Hashable, RunView]] = {}  # run id → stamp, view
        self._encoded: dict[str, tuple[Hashable, bytes]] = {}  # run id → what it was made of, JSON
        self._laws: dict[str, tuple[str, dict[str, Any]]] = {}  # group → what was fitted, law
        self._stop = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self.refresh()
            except Exception as error:  # a bug of ours must not end the watching
                logging.getLogger(__name__).exception("looking for changes failed")
                note = f"{type(error).__name__} while looking for changes: {error}"
                self.snapshot = replace(
                    self.snapshot, revision=self.snapshot.revision + 1, notes=(note,)
                )
            self._stop.wait(max(REFRESH_S, REST_FACTOR * (time.monotonic() - began)))

    def refresh(self, *, strict: bool = False) -> None:
        """Look once. A source that cannot be read becomes a note, or an error if `strict`."""
        try:
            stamps = self.source.scan()
        except UserError as error:
            if strict:
                raise
            self._publish([str(error)], self.snapshot.laws)
            return
        notes: list[str] = []
        self._views = {key: view for key, view in self._views.items() if key in stamps}
        changed = [
            key
            for key, stamp in stamps.items()
            if key not in self._views or self._views[key][0] != stamp
        ]
        show_at = time.monotonic() + REFRESH_S
        for done, key in enumerate(changed, start=1):
            view = self._read(key, notes)
            if view is not None:
                self._views[key] = (stamps[key], view)
            if time.monotonic() > show_at:  # show what a large store has given so far
                began = time.monotonic()
                self._publish(notes, self.snapshot.laws, (done, len(changed)), len(stamps))
                rest_s = REST_FACTOR * (time.monotonic() - began)
                show_at = time.monotonic() + max(REFRESH_S, rest_s)
            if self._stop.is_set():
                return
        # The curves do not wait for the fit.
        self._publish(notes, self.snapshot.laws, count=len(stamps))
        laws = self._fit(notes)
        self._publish(notes, laws, count=len(stamps))

    def _read(self, key: str, notes: list[str]) -> RunView | None:
        """Read one run. If that fails in any way, note it and go on with the others."""
        try:
            view = self.source.read(key)
            view.row(key, 0.0)
        except Exception as error:
            label = self.source.label(key)
            if label is not None:  # otherwise the run was deleted while it was read
                notes.append(f"{label} is left out: {_reason(error)}")
            return None
        return view

    def _publish(
        self,
        notes: list[str],
        laws: bytes,
        reading: tuple[int, int] | None = None,
        count: int | None = None,
    ) -> None:
        """Replace the snapshot; the revision grows if anything in it is new."""
        old = self.snapshot
        limit = MIN_POINTS
        while limit < MAX_POINTS and 2 * limit * (count or len(self._views)) <= CHART_POINTS:
            limit *= 2
        runs: dict[str, tuple[int, bytes]] = {}
        for key, (stamp, view) in self._views.items():
            content = self._encode(key, stamp, view, limit)
            before = old.runs.get(key)
            same = before is not None and before[1] == content
            runs[key] = before if same and before else (old.revision + 1, content)
        now = replace(
            old,
            runs=runs,
            laws=laws,
            laws_revision=old.laws_revision + (laws != old.laws),
            notes=tuple(notes),
            reading=reading,
        )
        self.snapshot = replace(now, revision=old.revision + (now != old))

    def _encode(self, key: str, stamp: Hashable, view: RunView, limit: int) -> bytes:
        made_of, content = self._encoded.get(key, ((), b""))
        if made_of != (stamp, limit):
            row = view.row(key, time.time())
            content = encode({"row": row, "curves": view.curves(limit)})
            # A running run becomes stale without a change of its files, so it is never reused.
            self._encoded[key] = (() if row["status"] == "running" else (stamp, limit), content)
        return content

    def _fit(self, notes: list[str]) -> bytes:
        """Fit one law per group, largest group first; refit only what has changed."""
        groups: dict[str, dict[str, RunView]] = defaultdict(dict)
        for key, (_, view) in self._views.items():
            groups[view.group][key] = view
        found = []
        for group, members in sorted(groups.items(), key=lambda item: -len(item[1])):
            record = next(iter(members.values())).record
            name = " · ".join(text(record[k]) for k in ("experiment", "arch") if record.get(k))
            experiment = shlex.quote(text(record.get("experiment")))
            found.append(
                {
                    "group": group,
                    "runs": len(members),
                    "convention": text(record["convention"]),
                    "label": name,
                    "options": self.source.options or f"--experiment {experiment}",
                    **self._law(group, name, members, notes),
                }
            )
        return encode(found)

    def _law(
        self, group: str, name: str, members: dict[str, RunView], notes: list[str]
    ) -> dict[str, Any]:
        views = [view.run for view in members.values()]
        runs = sorted(views, key=lambda run: (run.N, run.name))
        try:
            scores = score(self.source.forecasts(members), runs)
        except Exception as error:  # one damaged forecast must not cost the law
            notes.append(f"{name}: no forecasts: {_reason(error)}")
            scores = []
        basis = repr(([(r.name, r.finished, r.N, r.evals[-1:]) for r in runs], scores))
        if self._laws.get(group, ("",))[0] != basis:
            try:
                law = law_data(runs, self.law, scores)
            except Exception as error:  # numbers that no fit can use
                logging.getLogger(__name__).debug("no law for %s", name, exc_info=True)
                law = {"law": None, "warnings": [f"No law: {_reason(error)}"], "forecasts": []}
            self._laws[group] = (basis, law)
        return self._laws[group][1]

    def runs(self, since: int = 0) -> bytes:
        """Return as JSON every run that has changed since a revision, and the ids of all."""
        now = self.snapshot
        notes = list(now.notes[:MAX_NOTES])
        if len(now.notes) > MAX_NOTES:
            notes.append(f"and {len(now.notes) - MAX_NOTES} more")
        head = {
            "boot": self.boot,  # revisions count from the start of this process
            "revision": now.revision,
            "laws_revision": now.laws_revision,
            "time": time.time(),
            "title": self.source.title,
            "notes": notes,
            "reading": now.reading,
            "clusters": clusters(),
            "ids": list(now.runs),
        }
        news = b",".join(content for revision, content in now.runs.values() if revision > since)
        return encode(head)[:-1] + b',"runs":[' + news + b"]}"

    def page(self, key: str, limit: int = PAGE_POINTS) -> bytes | None:
        """Return a run's own page as JSON; None if there is no such run or it is unreadable now."""
        if key not in self.snapshot.runs:
            return None
        try:
            return encode(self.source.read(key, whole=True).page(key, time.time(), limit))
        except Exception:
            logging.getLogger(__name__).debug("run %s cannot be read", key, exc_info=True)
            return None

    def everything(self) -> bytes:
        """Return all answers in one, for a page without a server."""
        limit = max(MIN_POINTS, min(PAGE_POINTS, STATIC_POINTS // max(1, len(self.snapshot.runs))))
        pages = b",".join(
            b'"%b":%b' % (key.encode(), self.page(key, limit) or b"null")
            for key in self.snapshot.runs
        )
        return b'{"runs":%b,"laws":%b,"pages":{%b}}' % (self.runs(), self.snapshot.laws, pages)


def _reason(error: Exception) -> str:
    """Return an exception as one short line; ours explain themselves."""
    line = text(" ".join(str(error).split()))
    return line if isinstance(error, UserError) else f"{type(error).__name__}: {line}"


def encode(value: Any) -> bytes:
    """Return compact JSON; a number that is not finite becomes null."""
    return json.dumps(finite(value), allow_nan=False, separators=(",", ":")).encode()
