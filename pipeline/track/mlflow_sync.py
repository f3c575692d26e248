"""Copy a run's log to MLflow: the records to send, the progress so far, and `launch sync`."""

import contextlib
import json
import logging
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from pipeline.atomic import locked, read_regular, replace
from pipeline.errors import RunError
from pipeline.runs.history import PHASES, RUN_FILE
from pipeline.runs.log import FILE as LOG_FILE
from pipeline.runs.log import Record, Tail, encode, read
from pipeline.track import mlflow_runs
from pipeline.track.mlflow_store import Store, UnusableError, configure, public, reason, resolve

STATE_FILE = "mlflow.json"
LOCK_FILE = "mlflow.lock"
WAIT_S = 20.0  # how long to try a server that does not answer after training has ended
POLL_S = 1.0
LONGEST_PAUSE_S = 30.0
CHUNK_RECORDS = 500
BATCH_METRICS = 300  # per request: about 0.1 s of a server's time, so that a slow server keeps up
LOADS_EVERY_S = 60.0
# Metrics of every record of a kind, which show whether a request arrived whose answer was lost.
ALWAYS_THERE = {
    "step": ("train/tokens", "train/loss"),
    "eval": ("eval/tokens", "eval/loss"),
    "moe": ("moe/tokens",),
}


@dataclass
class State:
    """The progress of copying one run: mlflow.json in the run directory.

    Progress is the training step, not a position in the log: a resumed run logs the steps after
    its checkpoint again. For events it is their sequence number ("seq")."""

    # A tag of the MLflow run, which finds the run again if run_id is lost.
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    uri: str = ""  # without user and password
    experiment: str = ""
    run_id: str = ""
    sent: dict[str, float] = field(default_factory=dict)  # kind → highest step, "seq" for events
    sending: bool = False  # a batch is on its way: after a crash, ask the server if it arrived
    restarts: int = 0
    status: str = ""
    described: str = ""  # checksum of the files that params, tags and artifacts come from


def load_state(run_dir: Path) -> State:
    """Return the saved state, or a new one: the server can restore a lost state."""
    try:
        found = TypeAdapter(State).validate_json(read_regular(run_dir / STATE_FILE))
    except (OSError, ValidationError):
        return State()
    if "event" in found.sent:  # earlier releases kept the time of the last event, in seconds
        found.sent["seq"] = int(found.sent.pop("event") * 1000)
    return found


def save_state(run_dir: Path, state: State) -> None:
    replace(run_dir / STATE_FILE, json.dumps(asdict(state), indent=1).encode() + b"\n")


def _advance(record: Record, sent: dict[str, float]) -> bool:
    """Set the progress to this record; return whether the record is new."""
    key = "seq" if record["kind"] == "event" else record["kind"]
    number = record["seq" if key == "seq" else "step"]
    if number <= sent.get(key, -1.0):
        return False
    sent[key] = number
    return True


class Feeder:
    """Send a run's records to MLflow, each once, whatever is restarted: run, feeder or server.

    Call `pump` until it returns True. It raises MLflow's errors, and may be called again: a batch
    is sent unchanged until MLflow acknowledges it, and the store drops records that it has."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.state = load_state(run_dir)
        self.uri = resolve(self.state.uri)
        self.records_sent = 0
        self._tail = Tail(run_dir / LOG_FILE)
        self._store: Store | None = None
        self._batch: list[Record] = []  # read from the log and not yet acknowledged
        self._phase: Record | None = None  # the last event that changed the run's status
        self._sequence = 0  # of the last event that was read
        self._new_loads = True  # whether the log may have expert loads that MLflow does not have
        self._loads_at = 0.0

    def pump(self, over: bool) -> bool:
        """Send one batch or, after the last one, files and status. Return True when MLflow has
        everything. `over`: training has ended, and may not have logged that."""
        log = self._tail.path
        if not log.exists() or log.stat().st_size == 0:
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
    def ended(self) -> bool:
        """Whether training has ended, in any way, according to the log."""
        return self._phase is not None and PHASES[self._phase["event"]] != "running"

    def _connect(self) -> Store:
        if self._store is not None:
            return self._store
        store = Store(self.uri)
        state = self.state
        if state.uri != public(self.uri) or not store.has(state.run_id):
            state = State(id=state.id, uri=public(self.uri))  # another store: send everything
            self.state = state
        if not state.run_id:
            # Saved first, because the id finds the run if the answer to its creation is lost.
            save_state(self.run_dir, state)
            about = mlflow_runs.read_table(self.run_dir / RUN_FILE)
            state.experiment = str(about.get("experiment") or "isoflop")
            name = str(about.get("name") or self.run_dir.resolve().name)
            first = Tail(self._tail.path).take(1)  # a replay may come days after the run began
            began_ms = int(first[0]["time"] * 1000) if first else None
            opened = store.open(state.experiment, name, state.id, began_ms)
            state.run_id, state.sending = opened
        if mlflow_runs.read_sweep(self.run_dir.resolve().parent):
            parent = store.parent(state.experiment)
            store.client.set_tag(state.run_id, "mlflow.parentRunId", parent)  # pages nest by it
        if state.sending:
            for kind, keys in ALWAYS_THERE.items():
                step = store.highest_step(state.run_id, keys)
                if step is not None:
                    _advance({"kind": kind, "step": step}, state.sent)
            state.sending = False
        save_state(self.run_dir, state)
        self._store = store
        self._describe(store, files=False)  # params come before the first point
        return store

    def _take(self) -> list[Record]:
        """Return the next records that MLflow does not have."""
        sent = dict(self.state.sent)
        batch: list[Record] = []
        while not batch:
            records = self._tail.take(CHUNK_RECORDS)
            if self._tail.rewound:
                self._phase = None
                self._sequence = 0
            if not records:
                break
            for record in records:
                if record["kind"] == "event":
                    # Logs of earlier releases have no numbers: use the time, in increasing order.
                    time_ms = int(record["time"] * 1000)
                    self._sequence = record.get("seq") or max(time_ms, self._sequence + 1)
                    record["seq"] = self._sequence
                    if record["event"] in PHASES:
                        self._phase = record
                if _advance(record, sent):
                    batch.append(record)
        return batch

    def _send(self, store: Store) -> None:
        points: list[tuple[str, float, int, int]] = []
        tags: dict[str, str] = {}
        restarts = self.state.restarts
        records = 0
        for record in self._batch:
            found = mlflow_runs.metrics(record)
            # A record is never split, so that one of its metrics shows that all arrived.
            if records and len(points) + len(found) > BATCH_METRICS:
                break
            if record["kind"] == "event":
                tags.update([mlflow_runs.event_tag(record)])
                if record["event"] == "start":
                    restarts = 0  # the log of a branch begins with its trunk's
                elif record["event"] in ("resume", "restart"):
                    restarts += 1
                    found["restarts"] = float(restarts)
            time_ms = int(record["time"] * 1000)
            points += [(key, value, time_ms, record["step"]) for key, value in found.items()]
            records += 1

        self.state.sending = True
        save_state(self.run_dir, self.state)
        store.send(self.state.run_id, points, tags)
        for record in self._batch[:records]:
            _advance(record, self.state.sent)
            self._new_loads |= record["kind"] == "moe"
        self.state.restarts = restarts
        self.state.sending = False
        save_state(self.run_dir, self.state)
        del self._batch[:records]
        self.records_sent += records

    def _describe(self, store: Store, files: bool = True) -> None:
        digest = mlflow_runs.digest(self.run_dir)
        if digest == self.state.described:
            return
        params = mlflow_runs.params(self.run_dir)
        store.describe(self.state.run_id, params, mlflow_runs.tags(self.run_dir))
        if files:
            for name, text in mlflow_runs.artifacts(self.run_dir).items():
                store.client.log_text(self.state.run_id, text, name)
            self.state.described = digest
            save_state(self.run_dir, self.state)

    def _upload_loads(self, store: Store, over: bool) -> None:
        """Upload all expert loads again from time to time: a file in MLflow cannot grow."""
        due = over or self.ended or time.monotonic() >= self._loads_at
        if not self._new_loads or not due:
            return
        lines = [encode(record) for record in read(self._tail.path) if record["kind"] == "moe"]
        if lines:
            text = b"".join(lines).decode()
            store.client.log_text(self.state.run_id, text, mlflow_runs.LOADS)
        self._new_loads = False
        self._loads_at = time.monotonic() + LOADS_EVERY_S

    def _set_status(self, store: Store, over: bool) -> None:
        if self._phase is None:
            return
        status = mlflow_runs.STATUS[PHASES[self._phase["event"]]]
        if over and status == "RUNNING":
            status = "FAILED"  # training ended without logging why
        if status != self.state.status:
            ended_ms = int(self._phase["time"] * 1000) if self.ended else None
            store.set_status(self.state.run_id, status, ended_ms)
            self.state.status = status
            save_state(self.run_dir, self.state)


def sync(run_dir: Path, wait_s: float = WAIT_S) -> Feeder:
    """Send all records that MLflow does not have, in this process."""
    if not (run_dir / LOG_FILE).is_file():
        raise RunError(f"run={run_dir} has no {LOG_FILE}; name a run directory, such as runs/NAME")
    configure()
    with locked(run_dir / LOCK_FILE) as alone, contextlib.redirect_stdout(sys.stderr):
        if not alone:
            raise RunError(f"run={run_dir} is being sent to MLflow right now; nothing to do")
        feeder = Feeder(run_dir)
        fault = follow(feeder, lambda: True, wait_s, lambda: False)
    if fault:
        text = f"MLflow at {public(feeder.uri)} does not have all of {run_dir} ({fault})"
        raise RunError(f"{text}; fix that and sync again")
    return feeder


def follow(
    feeder: Feeder, ended: Callable[[], bool], wait_s: float, stopping: Callable[[], bool]
) -> str:
    """Feed until training has ended and MLflow has everything; otherwise return the reason.

    After the end of training, or a signal to this process, a server that does not answer gets
    `wait_s` more seconds."""
    deadline = float("inf")
    pause_s = POLL_S
    fault = ""
    while True:
        over = ended()  # asked first, so that `pump` sees everything logged before the end
        if (over or stopping()) and deadline == float("inf"):
            deadline = time.monotonic() + wait_s
            pause_s = POLL_S
        try:
            done = feeder.pump(over)
            if done and (over or (stopping() and feeder.ended)):
                return ""
            if fault:
                logging.info("MLflow is back")
            fault = ""
            pause_s = POLL_S
            if not done:
                if over:  # the deadline is only for a server that does not answer
                    deadline = time.monotonic() + wait_s
                if time.monotonic() < deadline:
                    continue
        except UnusableError as error:
            return str(error)
        except Exception as error:  # MLflow raises many kinds; none of them may end the feeding
            if not fault:
                logging.warning("%s; records wait in the log", reason(error))
            fault = reason(error)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
        if time.monotonic() >= deadline:
            return fault or "time ran out"
        wake = time.monotonic() + pause_s
        while time.monotonic() < min(wake, deadline):
            if deadline == float("inf") and (ended() or stopping()):
                break
            time.sleep(0.1)
