"""Carries a run's records to MLflow, each exactly once, over restarts of the run, of this process and of the server.

What makes it so: a batch is resent unchanged until it is acknowledged, and the store drops what it already has; the
state says before each batch that one is on its way, so that a new process asks the server how far it got.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.runs.log import Record, encode, read
from pipeline.runs.tail import Tail
from pipeline.track import describe, state
from pipeline.track.store import BATCH_METRICS, Store, public, resolve

CHUNK_RECORDS = 500
LEAST_METRICS = 50
LOADS_EVERY_S = 60.0
ALWAYS_THERE = {
    "step": ("train/tokens", "train/loss"),
    "eval": ("eval/tokens", "eval/loss"),
    "moe": ("moe/tokens",),
}


class Feeder:
    """`pump` until it returns True; it raises whatever MLflow raises, and may simply be called again."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.state = state.load(run_dir)
        self.uri = resolve(self.state.uri)
        self.records_sent = 0
        self._tail = Tail(run_dir / "log.jsonl")
        self._store: Store | None = None
        self._batch: list[Record] = []  # taken from the log and not yet acknowledged
        self._phase: Record | None = None  # the last event that says what the run is doing
        self._metrics_at_once = BATCH_METRICS
        self._routed, self._loads_at = (
            True,
            0.0,
        )  # whether the log may have loads that MLflow has not, and when to look

    def pump(self, over: bool = False) -> bool:
        """Send one batch, or when none is left whatever else changed; True when MLflow has everything."""
        if not self._recorded():
            return True
        store = self._connect()
        if not self._batch:
            self._batch = self._take()
        if self._batch:
            self._send(store)
            return False
        self._describe(store)
        self._upload_loads(store, over)
        self._set_status(store, over)
        return True

    @property
    def settled(self) -> bool:
        """The log says that training has ended, in whatever way."""
        return self._phase is not None and describe.STATUS[self._phase["event"]] != "RUNNING"

    def _recorded(self) -> bool:
        try:
            return self._tail.path.stat().st_size > 0
        except FileNotFoundError:
            return False

    def _connect(self) -> Store:
        if self._store is not None:
            return self._store
        store = Store(self.uri)
        if self.state.uri != public(self.uri) or not store.has(self.state.run_id):
            self.state = state.State(
                id=self.state.id, uri=public(self.uri)
            )  # another store: all of it again
        if not self.state.run_id:
            state.save(
                self.run_dir, self.state
            )  # the identity first: it finds a run whose creation we never heard of
            about = describe.run(self.run_dir)
            self.state.experiment = str(about.get("experiment") or "isoflop")
            name = str(about.get("name") or self.run_dir.resolve().name)
            first = next(
                iter(Tail(self._tail.path).take(1)), {}
            )  # a replay may come days after the run began
            opened = store.open(self.state.experiment, name, self.state.id, _time_ms(first))
            self.state.run_id, self.state.sending = opened
        if describe.sweep(self.run_dir.resolve().parent):
            store.adopt(self.state.run_id, store.parent(self.state.experiment))
        if self.state.sending:
            self._ask_how_far(store)
        state.save(self.run_dir, self.state)
        self._store = store
        self._describe(
            store, files=False
        )  # params before the first point: a curve without them says little
        return store

    def _ask_how_far(self, store: Store) -> None:
        for kind, keys in ALWAYS_THERE.items():
            step = store.highest_step(self.state.run_id, keys)
            if step is not None:
                state.advance({"kind": kind, "step": step}, self.state.sent)
        self.state.sending = False

    def _take(self) -> list[Record]:
        sent = dict(self.state.sent)
        batch: list[Record] = []
        while not batch:
            taken = self._tail.take(CHUNK_RECORDS)
            if self._tail.rewound:
                self._phase = None
            if not taken:
                break
            for record in taken:
                if record.get("kind") == "event" and record.get("event") in describe.STATUS:
                    self._phase = record
                if state.fresh(record, sent):
                    state.advance(record, sent)
                    batch.append(record)
        return batch

    def _send(self, store: Store) -> None:
        points: list[tuple[str, float, int, int]] = []
        tags: dict[str, str] = {}
        restarts, count = self.state.restarts, 0
        for record in self._batch:
            found = describe.metrics(record)
            if record.get("kind") == "event":
                tags.update([describe.event_tag(record)])
                if record.get("event") in ("resume", "restart"):
                    restarts += 1
                    found["restarts"] = float(restarts)
            if count and len(points) + len(found) > self._metrics_at_once:
                break  # a record is never split, so that one metric tells how far all of them got
            time_ms, step = _time_ms(record) or 0, int(record.get("step") or 0)
            points.extend((key, value, time_ms, step) for key, value in found.items())
            count += 1

        self.state.sending = True
        state.save(self.run_dir, self.state)
        try:
            store.send(self.state.run_id, points, tags)
        except Exception:
            # Perhaps the server is only slow: ask less of it at a time.
            self._metrics_at_once = max(LEAST_METRICS, self._metrics_at_once // 2)
            raise
        self._metrics_at_once = min(BATCH_METRICS, self._metrics_at_once * 2)
        self._acknowledge(self._batch[:count], restarts)

    def _acknowledge(self, records: Sequence[Record], restarts: int) -> None:
        for record in records:
            state.advance(record, self.state.sent)
        self.state.restarts, self.state.sending = restarts, False
        state.save(self.run_dir, self.state)
        self._batch = self._batch[len(records) :]
        self.records_sent += len(records)
        self._routed |= any(record.get("kind") == "moe" for record in records)

    def _describe(self, store: Store, files: bool = True) -> None:
        digest = describe.digest(self.run_dir)
        if digest == self.state.described:
            return
        store.describe(
            self.state.run_id, describe.params(self.run_dir), describe.tags(self.run_dir)
        )
        if files:
            there = [
                self.run_dir / name for name in describe.FILES if (self.run_dir / name).exists()
            ]
            store.upload(self.state.run_id, there)
            self.state.described = digest
            state.save(self.run_dir, self.state)

    def _upload_loads(self, store: Store, over: bool) -> None:
        """All of them again, now and then: a hundred records at most, and a file of MLflow's cannot grow."""
        if not self._routed or (time.monotonic() < self._loads_at and not (over or self.settled)):
            return
        lines = [encode(record) for record in read(self._tail.path) if record.get("kind") == "moe"]
        if lines:
            store.put(self.state.run_id, b"".join(lines).decode(), describe.LOADS)
        self._routed, self._loads_at = False, time.monotonic() + LOADS_EVERY_S

    def _set_status(self, store: Store, over: bool) -> None:
        if self._phase is None:
            return
        status = describe.STATUS[self._phase["event"]]
        if over and status == "RUNNING":
            status = "FAILED"  # it ended without a word
        if status != self.state.status:
            store.set_status(
                self.state.run_id, status, _time_ms(self._phase) if self.settled else None
            )
            self.state.status = status
            state.save(self.run_dir, self.state)


def _time_ms(record: Record) -> int | None:
    when = record.get("time")
    return int(when * 1000) if isinstance(when, int | float) else None
