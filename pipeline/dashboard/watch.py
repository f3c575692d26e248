"""Keeps what the page shows up to date: reads what has changed, fits what that changes, tells what is new."""

import hashlib
import json
import logging
import shlex
import threading
import time
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from pipeline.dashboard import rows
from pipeline.dashboard.law_view import clusters, law_data
from pipeline.dashboard.source import Seen, Source
from pipeline.errors import UserError
from pipeline.scaling.record import score
from pipeline.units import finite

EVERY_S = 2.0
AT_REST = 4  # of the time that a look took: watching a large store must not become its load
POINTS, LEAST, MOST = 40_000, 40, 512  # drawn on one chart in all, and per run
PAGE_POINTS, STATIC_POINTS = 1200, 60_000  # on a run's own page, and on all of them in one file
UNREADABLE = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
)  # what a record of another shape comes to


@dataclass(frozen=True)
class Snapshot:
    """What a request is answered from; never changed, only replaced."""

    revision: int = 0
    runs: dict[str, tuple[int, bytes]] = field(
        default_factory=dict
    )  # id → revision of its last change, row and curve
    laws: bytes = b"[]"
    laws_revision: int = 0
    notes: tuple[str, ...] = ()
    reading: tuple[int, int] | None = None  # runs read so far, of how many


class Watcher:
    """`refresh` looks once; `start` goes on looking beside the server."""

    def __init__(self, source: Source, law: str = "auto") -> None:
        self.source, self.law = source, law
        self.boot = hashlib.sha256(str(time.time_ns()).encode()).hexdigest()[
            :8
        ]  # revisions count within it
        self.snapshot = Snapshot(reading=(0, 0))
        self._seen: dict[str, tuple[Hashable, Seen]] = {}
        self._told: dict[
            str, tuple[Hashable, bytes]
        ] = {}  # id → what it was told for, row and curve
        self._fitted: dict[str, tuple[str, dict[str, Any]]] = {}
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
            except Exception as error:  # a fault of ours: say so, and go on watching
                logging.getLogger(__name__).exception("looking for changes failed")
                self._publish(
                    [f"{type(error).__name__} while looking for changes: {error}"],
                    self.snapshot.laws,
                )
            self._stop.wait(max(EVERY_S, AT_REST * (time.monotonic() - began)))

    def refresh(self, *, strict: bool = False) -> None:
        """Look once; what cannot be read becomes a note beside what was known, or with `strict` an error."""
        notes: list[str] = []
        try:
            there = self.source.scan()
        except UserError as error:
            if strict:
                raise
            self._publish([str(error)], self.snapshot.laws)
            return
        self._seen = {key: seen for key, seen in self._seen.items() if key in there}
        changed = [
            key
            for key, stamp in there.items()
            if key not in self._seen or self._seen[key][0] != stamp
        ]
        show_at = time.monotonic() + EVERY_S
        for done, key in enumerate(changed):
            try:
                seen = self.source.read(key)
                rows.row(key, seen, 0.0)
                self._seen[key] = there[key], seen
            except UserError as error:
                notes.append(str(error))
            except UNREADABLE as error:
                notes.append(f"run {key} is not as our runs are ({error!r}); it is left out")
            if time.monotonic() > show_at:  # a large store shows what it has so far
                began = time.monotonic()
                self._publish(notes, self.snapshot.laws, (done + 1, len(changed)), len(there))
                show_at = time.monotonic() + max(EVERY_S, AT_REST * (time.monotonic() - began))
            if self._stop.is_set():
                return
        self._publish(
            notes, self.snapshot.laws, count=len(there)
        )  # the curves do not wait for the fit
        laws = self._laws(notes)
        self._publish(notes, laws, count=len(there))

    def _publish(
        self,
        notes: list[str],
        laws: bytes,
        reading: tuple[int, int] | None = None,
        count: int | None = None,
    ) -> None:
        old, now = self.snapshot, time.time()
        limit = LEAST
        while limit < MOST and 2 * limit * (count or len(self._seen)) <= POINTS:
            limit *= 2
        runs: dict[str, tuple[int, bytes]] = {}
        for key, (stamp, seen) in self._seen.items():
            if self._told.get(key, ((), b""))[0] != (stamp, limit):
                row = rows.row(key, seen, now)
                text = b'{"row":%b,"curves":%b}' % (encode(row), encode(rows.curves(seen, limit)))
                # a run that is under way may fall silent: it is looked at again though nothing of it changed
                self._told[key] = (() if row["status"] == "running" else (stamp, limit)), text
            before, text = old.runs.get(key), self._told[key][1]
            runs[key] = before if before and before[1] == text else (old.revision + 1, text)
        laws_revision = old.laws_revision + (laws != old.laws)
        same = (
            runs == old.runs
            and laws == old.laws
            and tuple(notes) == old.notes
            and reading == old.reading
        )
        self.snapshot = Snapshot(
            old.revision + (not same), runs, laws, laws_revision, tuple(notes), reading
        )

    def _laws(self, notes: list[str]) -> bytes:
        groups: dict[str, dict[str, Seen]] = defaultdict(dict)
        for key, (_, seen) in self._seen.items():
            groups[rows.group(seen)][key] = seen
        found = []
        for key, members in sorted(groups.items(), key=lambda item: -len(item[1])):
            runs = sorted(
                (seen.run for seen in members.values()), key=lambda run: (run.N, run.name)
            )
            try:
                scores = score(self.source.forecasts(members), runs)
            except UserError as error:
                notes.append(str(error))
                scores = []
            told = json.dumps(
                [[r.name, r.finished, r.N, *map(repr, r.evals[-1:])] for r in runs] + [repr(scores)]
            )
            if self._fitted.get(key, ("",))[0] != told:
                self._fitted[key] = told, law_data(runs, self.law, scores)
            record = next(iter(members.values())).record
            found.append({
                "group": key, "runs": len(members), "convention": record["convention"],
                "label": " · ".join(filter(None, (record.get("experiment"), record.get("arch")))),
                "options": self.source.options or f"--experiment {shlex.quote(str(record.get('experiment')))}",
                **self._fitted[key][1],
            })  # fmt: skip
        return encode(found)

    def runs(self, since: int = 0) -> bytes:
        """Every run that has changed since a revision, and which there are."""
        now = self.snapshot
        head = {
            "boot": self.boot, "revision": now.revision, "laws_revision": now.laws_revision, "time": time.time(),
            "title": self.source.title, "notes": now.notes, "reading": now.reading, "clusters": clusters(),
            "ids": list(now.runs),
        }  # fmt: skip
        news = b",".join(text for revision, text in now.runs.values() if revision > since)
        return encode(head)[:-1] + b',"runs":[' + news + b"]}"

    def page(self, key: str, limit: int = PAGE_POINTS) -> bytes | None:
        """A run's own page; None for an id that is not one of ours."""
        if key not in self.snapshot.runs:
            return None
        try:
            return encode(rows.page(key, self.source.read(key, whole=True), time.time(), limit))
        except (UserError, *UNREADABLE):
            return None  # it has gone since, or its store has

    def everything(self) -> bytes:
        """All answers in one: what the page needs where there is nobody to ask."""
        limit = max(LEAST, min(PAGE_POINTS, STATIC_POINTS // max(1, len(self.snapshot.runs))))
        pages = b",".join(
            b'"%b":%b' % (key.encode(), self.page(key, limit) or b"null")
            for key in self.snapshot.runs
        )
        return b'{"runs":%b,"laws":%b,"pages":{%b}}' % (self.runs(), self.snapshot.laws, pages)


def encode(value: Any) -> bytes:
    return json.dumps(finite(value), allow_nan=False, separators=(",", ":")).encode()
