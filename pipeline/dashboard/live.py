"""Keep the page's data up to date.

`Watcher.refresh` reads the runs that have changed and fits the laws of their groups. Requests are
answered from the last `Snapshot`, so that they never wait for a file or a server.
"""

import hashlib
import json
import logging
import shlex
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.dashboard.law_view import clusters, law_data
from pipeline.dashboard.payload import RunView, text
from pipeline.dashboard.source import Source
from pipeline.errors import UserError
from pipeline.scaling.record import score
from pipeline.units import finite

REFRESH_S = 2.0
# After a refresh of t seconds, wait for at least 4t: watching takes at most a fifth of a core.
REST_FACTOR = 4
PROGRESS_S = 5.0  # between two snapshots while a large store is read
CHART_POINTS = 40_000  # of all runs together on one chart
MIN_POINTS = 40  # of one run, however many there are
MAX_POINTS = 512
PAGE_POINTS = 1200  # on a run's own page
STATIC_POINTS = 60_000  # on all run pages together in one file
MAX_NOTES = 20


@dataclass(frozen=True)
class Snapshot:
    """The data from which requests are answered. It is never changed, only replaced."""

    revision: int = 0
    # Run id → revision of the run's last change, and its row and curves as JSON.
    runs: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    laws: bytes = b"[]"
    laws_revision: int = 0
    notes: tuple[str, ...] = ()
    reading: tuple[int, int] | None = None  # runs read so far, runs in all


class Watcher:
    """`refresh` looks for changes once; `start` repeats this in a thread."""

    def __init__(self, source: Source, law: str = "auto", *, curves: bool = False) -> None:
        self.source = source
        self.law = law
        self.curves = curves  # also fit losses before the decay, as `launch fit --curves`
        self.boot = hashlib.sha256(str(time.time_ns()).encode()).hexdigest()[:8]
        self.snapshot = Snapshot(reading=(0, 0))
        self._views: dict[str, tuple[Hashable, RunView]] = {}  # run id → stamp, view
        self._encoded: dict[str, tuple[Hashable, bytes]] = {}  # run id → its origin, JSON
        self._laws: dict[str, tuple[str, dict[str, Any]]] = {}  # group → fitted values, law
        self._count = 0  # runs in the source
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
            except Exception as error:  # a bug in our code must not end the thread
                logging.getLogger(__name__).exception("looking for changes failed")
                self._publish([f"Looking for changes failed: {_reason(error)}"])
            self._stop.wait(max(REFRESH_S, REST_FACTOR * (time.monotonic() - began)))

    def refresh(self, *, strict: bool = False) -> None:
        """Look for changes once. An unreadable source becomes a note, or an error if `strict`."""
        try:
            stamps = self.source.scan()
        except UserError as error:
            if strict:
                raise
            self._publish([str(error)])
            return
        notes: list[str] = []
        self._views = {key: view for key, view in self._views.items() if key in stamps}
        self._encoded = {key: found for key, found in self._encoded.items() if key in stamps}
        changed = [key for key in stamps if self._views.get(key, (None, None))[0] != stamps[key]]
        self._count = len(stamps)
        shown = time.monotonic()
        for done, key in enumerate(changed, start=1):
            view = self._read(key, notes)
            if view is not None:
                self._views[key] = (stamps[key], view)
            if time.monotonic() - shown > PROGRESS_S:  # show the runs read so far
                self._publish(notes, reading=(done, len(changed)))
                shown = time.monotonic()
            if self._stop.is_set():
                return
        self._publish(notes)  # the curves do not wait for the fit
        self._publish(notes, laws=self._fit(notes))

    def _read(self, key: str, notes: list[str]) -> RunView | None:
        """Read one run. If that fails in any way, note it and continue with the others."""
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
        self, notes: list[str], laws: bytes | None = None, reading: tuple[int, int] | None = None
    ) -> None:
        """Replace the snapshot; the revision grows if anything in it is new."""
        old = self.snapshot
        laws = old.laws if laws is None else laws
        limit = MIN_POINTS
        while limit < MAX_POINTS and 2 * limit * self._count <= CHART_POINTS:
            limit *= 2
        runs: dict[str, tuple[int, bytes]] = {}
        for key, (stamp, view) in self._views.items():
            content = self._encode(key, stamp, view, limit)
            before = old.runs.get(key, (0, b""))
            runs[key] = before if before[1] == content else (old.revision + 1, content)
        laws_revision = old.laws_revision + (laws != old.laws)
        now = Snapshot(old.revision, runs, laws, laws_revision, tuple(notes), reading)
        self.snapshot = replace(now, revision=old.revision + (now != old))

    def _encode(self, key: str, stamp: Hashable, view: RunView, limit: int) -> bytes:
        """Return a run's row and curves as JSON, from the cache if nothing has changed."""
        made_of, content = self._encoded.get(key, (None, b""))
        if made_of != (stamp, limit):
            row = view.row(key, time.time())
            content = encode({"row": row, "curves": view.curves(limit)})
            # A running run becomes stale without a change of its files, so it is never reused.
            self._encoded[key] = (None if row["status"] == "running" else (stamp, limit), content)
        return content

    def _fit(self, notes: list[str]) -> bytes:
        """Fit one law per group, largest group first; refit only groups that have changed."""
        groups: dict[str, dict[str, RunView]] = defaultdict(dict)
        for key, (_, view) in self._views.items():
            groups[view.group][key] = view
        found = []
        for group, members in sorted(groups.items(), key=lambda item: -len(item[1])):
            view = next(iter(members.values()))
            record = view.record
            # The larger run that was forecast often has another experiment than the ladder.
            named = Counter(text(member.record.get("experiment")) for member in members.values())
            experiment = named.most_common(1)[0][0]
            kinds = [text(record[key]) for key in ("arch", "recipe") if record.get(key)]
            name = " · ".join(part for part in (experiment, *kinds) if part != "?")
            # Options for `launch fit`, which refuses a directory with several recipes or models.
            options = f"--experiment {shlex.quote(experiment)}"
            if view.path is not None:
                options = f"--runs {shlex.quote(str(view.path.parent))}"
            about = {"group": group, "runs": len(members), "label": name}
            about["convention"] = text(record["convention"])
            about["options"] = options + " --curves" * self.curves
            found.append(about | self._law(group, name, members, notes))
        return encode(found)

    def _law(
        self, group: str, name: str, members: dict[str, RunView], notes: list[str]
    ) -> dict[str, Any]:
        views = [view.run for view in members.values()]
        runs = sorted(views, key=lambda run: (run.N, run.name))
        try:
            # Search all runs, like `launch score`: the forecast run may have another experiment.
            every = [view.run for _, view in self._views.values()]
            scores = score(self.source.forecasts(members), every)
        except Exception as error:  # one damaged forecast must not cost the law
            notes.append(f"{name}: no forecasts: {_reason(error)}")
            scores = []
        basis = repr(([(r.name, r.finished, r.N, r.evals[-1:]) for r in runs], scores))
        if self._laws.get(group, ("",))[0] != basis:
            try:
                # Read whole logs: in the thinned ones a plateau would end too early.
                whole = [
                    self.source.read(key, whole=True).curve
                    for key, view in members.items()
                    if self.curves and view.run.finished
                ]
                law = law_data(runs, self.law, scores, whole if self.curves else None)
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
        # The runs are JSON already: join the bytes instead of decoding and encoding each of them.
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
        """Return the answers to all requests, for a page without a server."""
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
