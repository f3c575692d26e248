"""The sidecar: `python -m pipeline.track.mlflow_sync RUN_DIR` feeds MLflow from a run's log, in a process of its own.

Training never imports MLflow and never waits for it. Whatever happens here ends in exit status 0 and, if MLflow has
not got everything, in one line on standard output; the rest goes to standard error (`mlflow.log` in the run directory).
"""

import argparse
import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import FrameType

from pipeline.atomic import locked, replace
from pipeline.errors import RunError
from pipeline.process import python_module
from pipeline.runs.log import FILE as LOG_FILE
from pipeline.runs.log import Record, Tail, encode, read
from pipeline.track import environment, mlflow_store
from pipeline.track.mlflow_store import (
    BATCH_METRICS,
    Store,
    UnusableError,
    public,
    quicken,
    reason,
    resolve,
)

STATE_FILE = "mlflow.json"


@dataclass
class State:
    id: str = field(
        default_factory=lambda: uuid.uuid4().hex
    )  # the run's tag there: found again if run_id is lost
    uri: str = ""  # without user or password
    experiment: str = ""
    run_id: str = ""
    sent: dict[str, float] = field(default_factory=dict)  # kind → highest step, or time for events
    sending: bool = False  # a batch is on its way: after a crash, ask the server what it has
    restarts: int = 0
    status: str = ""
    described: str = ""  # digest of the files that params, tags and artifacts were last made from


def fresh(record: Mapping[str, object], sent: Mapping[str, float]) -> bool:
    mark = watermark(record)
    return mark is not None and mark[1] > sent.get(mark[0], float("-inf"))


def advance(record: Mapping[str, object], sent: dict[str, float]) -> None:
    mark = watermark(record)
    if mark is not None:
        sent[mark[0]] = max(mark[1], sent.get(mark[0], float("-inf")))


def watermark(record: Mapping[str, object]) -> tuple[str, float] | None:
    """(kind, number) by which a record is known to have been sent; None if it is none of ours."""
    kind = record.get("kind")
    number = record.get("time" if kind == "event" else "step")
    return (kind, number) if isinstance(kind, str) and isinstance(number, int | float) else None


def load_state(run_dir: Path) -> State:
    """The stored state, or a new one: a lost or damaged file costs a question to the server, not a record."""
    try:
        stored = json.loads((run_dir / STATE_FILE).read_bytes())
        return State(**{f.name: stored[f.name] for f in fields(State) if f.name in stored})
    except (FileNotFoundError, ValueError, TypeError):
        return State()


def save_state(run_dir: Path, state: State) -> None:
    replace(run_dir / STATE_FILE, json.dumps(asdict(state), indent=1).encode() + b"\n")


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
        self.state = load_state(run_dir)
        self.uri = resolve(self.state.uri)
        self.records_sent = 0
        self._tail = Tail(run_dir / LOG_FILE)
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
        return self._phase is not None and mlflow_store.STATUS[self._phase["event"]] != "RUNNING"

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
            self.state = State(
                id=self.state.id, uri=public(self.uri)
            )  # another store: all of it again
        if not self.state.run_id:
            save_state(
                self.run_dir, self.state
            )  # the identity first: it finds a run whose creation we never heard of
            about = mlflow_store.read_run_json(self.run_dir)
            self.state.experiment = str(about.get("experiment") or "isoflop")
            name = str(about.get("name") or self.run_dir.resolve().name)
            first = next(
                iter(Tail(self._tail.path).take(1)), {}
            )  # a replay may come days after the run began
            opened = store.open(self.state.experiment, name, self.state.id, _time_ms(first))
            self.state.run_id, self.state.sending = opened
        if mlflow_store.read_sweep(self.run_dir.resolve().parent):
            store.adopt(self.state.run_id, store.parent(self.state.experiment))
        if self.state.sending:
            self._ask_how_far(store)
        save_state(self.run_dir, self.state)
        self._store = store
        self._describe(
            store, files=False
        )  # params before the first point: a curve without them says little
        return store

    def _ask_how_far(self, store: Store) -> None:
        for kind, keys in ALWAYS_THERE.items():
            step = store.highest_step(self.state.run_id, keys)
            if step is not None:
                advance({"kind": kind, "step": step}, self.state.sent)
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
                if record.get("kind") == "event" and record.get("event") in mlflow_store.STATUS:
                    self._phase = record
                if fresh(record, sent):
                    advance(record, sent)
                    batch.append(record)
        return batch

    def _send(self, store: Store) -> None:
        points: list[tuple[str, float, int, int]] = []
        tags: dict[str, str] = {}
        restarts, count = self.state.restarts, 0
        for record in self._batch:
            found = mlflow_store.metrics(record)
            if record.get("kind") == "event":
                tags.update([mlflow_store.event_tag(record)])
                if record.get("event") in ("resume", "restart"):
                    restarts += 1
                    found["restarts"] = float(restarts)
            if count and len(points) + len(found) > self._metrics_at_once:
                break  # a record is never split, so that one metric tells how far all of them got
            time_ms, step = _time_ms(record) or 0, int(record.get("step") or 0)
            points.extend((key, value, time_ms, step) for key, value in found.items())
            count += 1

        self.state.sending = True
        save_state(self.run_dir, self.state)
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
            advance(record, self.state.sent)
        self.state.restarts, self.state.sending = restarts, False
        save_state(self.run_dir, self.state)
        self._batch = self._batch[len(records) :]
        self.records_sent += len(records)
        self._routed |= any(record.get("kind") == "moe" for record in records)

    def _describe(self, store: Store, files: bool = True) -> None:
        digest = mlflow_store.digest(self.run_dir)
        if digest == self.state.described:
            return
        store.describe(
            self.state.run_id, mlflow_store.params(self.run_dir), mlflow_store.tags(self.run_dir)
        )
        if files:
            there = [
                self.run_dir / name for name in mlflow_store.FILES if (self.run_dir / name).exists()
            ]
            store.upload(self.state.run_id, there)
            self.state.described = digest
            save_state(self.run_dir, self.state)

    def _upload_loads(self, store: Store, over: bool) -> None:
        """All of them again, now and then: a hundred records at most, and a file of MLflow's cannot grow."""
        if not self._routed or (time.monotonic() < self._loads_at and not (over or self.settled)):
            return
        lines = [encode(record) for record in read(self._tail.path) if record.get("kind") == "moe"]
        if lines:
            store.put(self.state.run_id, b"".join(lines).decode(), mlflow_store.LOADS)
        self._routed, self._loads_at = False, time.monotonic() + LOADS_EVERY_S

    def _set_status(self, store: Store, over: bool) -> None:
        if self._phase is None:
            return
        status = mlflow_store.STATUS[self._phase["event"]]
        if over and status == "RUNNING":
            status = "FAILED"  # it ended without a word
        if status != self.state.status:
            store.set_status(
                self.state.run_id, status, _time_ms(self._phase) if self.settled else None
            )
            self.state.status = status
            save_state(self.run_dir, self.state)


def _time_ms(record: Record) -> int | None:
    when = record.get("time")
    return int(when * 1000) if isinstance(when, int | float) else None


WAIT_S = 20.0  # for a server that is away when training has ended
POLL_S = 1.0
LONGEST_PAUSE_S = 30.0
MODULE = "pipeline.track.mlflow_sync"  # __name__ is __main__ in the sidecar itself


def start(run_dir: Path) -> "subprocess.Popen[str]":
    """Start the sidecar beside training; it ends by itself when this process has ended, however it did."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "mlflow.log").open("a") as log:
        return subprocess.Popen(
            python_module(MODULE, run_dir),
            stdin=subprocess.PIPE,  # the kernel closes it with us: no pid to poll, none to be reused
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C in the terminal is for training; this one still has to deliver
        )


def finish(process: "subprocess.Popen[str]", wait_s: float = WAIT_S) -> str:
    """Let it deliver the rest; the line to show if MLflow has not got everything, or nothing."""
    try:
        said, _ = process.communicate(timeout=wait_s + 10)  # its own give-up comes first
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return _replay(Path(process.args[-1]), "MLflow is slow")  # type: ignore[index,arg-type]  # the list above
    return said.strip()


def sync(run_dir: Path, wait_s: float = WAIT_S) -> Feeder:
    """Replay what MLflow has not got, here and now."""
    if not (run_dir / LOG_FILE).is_file():
        raise RunError(f"run={run_dir} has no {LOG_FILE}; name a run directory, such as runs/NAME")
    _settle_mlflow()
    with locked(run_dir / "mlflow.lock", wait_s=0) as alone, contextlib.redirect_stdout(sys.stderr):
        if not alone:
            raise RunError(f"run={run_dir} is being fed to MLflow right now; nothing to do")
        feeder = Feeder(run_dir)
        fault = follow(feeder, lambda: True, wait_s, _never)
    if fault:
        raise RunError(
            f"MLflow at {public(feeder.uri)} has not got all of {run_dir} ({fault}); mend that and sync again"
        )
    return feeder


def follow(
    feeder: Feeder, ended: Callable[[], bool], wait_s: float, told_to_stop: Callable[[], bool]
) -> str:
    """Feed until training has ended and all is sent, or the wait after its end for MLflow is over: then the reason."""
    deadline, pause_s, fault = float("inf"), POLL_S, ""
    while True:
        over = ended()  # asked before pumping: what was written before the end is then surely seen
        if (over or told_to_stop()) and deadline == float("inf"):
            deadline, pause_s = time.monotonic() + wait_s, POLL_S
        try:
            done = feeder.pump(over)
            if fault:
                logging.info("MLflow is back")
            pause_s, fault = POLL_S, ""
            if done and (over or (told_to_stop() and feeder.settled)):
                return ""
            if not done and over:
                deadline = (
                    time.monotonic() + wait_s
                )  # the wait is for a server that is away, not for one at work
            if not done and time.monotonic() < deadline:
                continue
        except UnusableError as error:
            return str(error)
        except Exception as error:  # MLflow raises many kinds, and none of them may end the feeding
            again, fault = bool(fault), reason(error)
            if not again:
                logging.warning("%s; records wait in the log", fault)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
        if time.monotonic() >= deadline:
            return fault or "time ran out"
        _pause(pause_s, deadline, ended if deadline == float("inf") else _never)


def _never() -> bool:
    return False


def _pause(pause_s: float, deadline: float, wake: Callable[[], bool]) -> None:
    until = min(time.monotonic() + pause_s, deadline)
    while (left_s := until - time.monotonic()) > 0 and not wake():
        time.sleep(min(0.1, left_s))


def _settle_mlflow() -> None:
    quicken()
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO, stream=sys.stderr)
    for chatty in ("mlflow", "alembic", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def _replay(run_dir: Path, fault: str) -> str:
    return f"MLflow has not got all of {run_dir} ({fault}); launch sync {run_dir} replays it"


def _closed_stdin() -> bool:
    """Training has ended, however it did."""
    return bool(select.select([0], [], [], 0)[0]) and os.read(0, 1 << 16) == b""


def main(arguments: Sequence[str] | None = None) -> int:
    what = "Feed MLflow from a run's log until standard input closes."
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=what)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument(
        "--wait", type=float, default=WAIT_S, help="seconds to wait then for a server that is away"
    )
    options = parser.parse_args(arguments)

    stopping = False

    def stop(_signal: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True  # a preempted job: training still saves and says so; then, or after the wait, we go

    signal.signal(signal.SIGTERM, stop)
    with contextlib.suppress(OSError):
        os.nice(10)  # training has the processors first

    _settle_mlflow()
    with contextlib.redirect_stdout(sys.stderr):  # MLflow prints where the run can be viewed
        fault = _attend(options.run_dir, _closed_stdin, options.wait, lambda: stopping)
    if fault:
        logging.warning(fault)
        with contextlib.suppress(OSError):
            sys.stdout.write(_replay(options.run_dir, fault) + "\n")
            sys.stdout.flush()
    return 0


def _attend(
    run_dir: Path, ended: Callable[[], bool], wait_s: float, told_to_stop: Callable[[], bool]
) -> str:
    try:
        while True:
            # The sidecar of the interrupted run may still be delivering, or somebody runs `launch sync`.
            with locked(run_dir / "mlflow.lock", wait_s=WAIT_S) as alone:
                if alone:
                    environment.write(run_dir)
                    return follow(Feeder(run_dir), ended, wait_s, told_to_stop)
            if ended() or told_to_stop():
                return "another process is feeding it"
    except OSError as error:  # a full disk, a vanished folder: training will say so itself
        return str(error)


if __name__ == "__main__":
    sys.exit(main())
