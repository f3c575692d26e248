"""The history of a run: what it is (run.json), what it logged, its status and its goodput."""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import psutil

from pipeline.errors import RunError
from pipeline.runs.log import Record

VERSION = 1
STALE_S = 600.0  # a run that has said nothing for ten minutes is not shown as running
END = {"finish": "finished", "interrupt": "interrupted", "fail": "failed"}


@dataclass(frozen=True)
class Run:
    """One run: its record and its log, read as far as it goes."""

    path: Path
    record: Record
    steps: tuple[Record, ...]
    evals: tuple[Record, ...]
    events: tuple[Record, ...]

    @property
    def name(self) -> str:
        return str(self.record["name"])

    @property
    def N(self) -> float:  # noqa: N802  the law's own letter
        """Parameters without the input embedding, with the head (arXiv 2406.19146)."""
        return float(self.record["params"]["scaling"])

    @property
    def last(self) -> Record:
        """The newest figures of any kind."""
        logged = (*self.steps[-1:], *self.evals[-1:])
        return max(
            logged, key=lambda r: int(r["step"]), default={"step": 0, "tokens": 0, "flops": 0.0}
        )

    def status(self, now: float) -> str:
        """finished, interrupted, failed, running or stale."""
        told = [
            END.get(e["event"], "")
            for e in self.events
            if e["event"] in (*END, "start", "resume", "restart")
        ]
        if told and told[-1]:
            return told[-1]
        newest = (*self.steps[-1:], *self.evals[-1:], *self.events[-1:])
        heard = max((float(record.get("time", 0)) for record in newest), default=0.0)
        return "running" if now - heard < STALE_S else "stale"

    @property
    def finished(self) -> bool:
        return self.status(now=0.0) == "finished"


def read_record(path: Path) -> Record:
    """What the run is: run.json, of a version and with the keys that everything here reads."""
    try:
        record = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(
            f"run={path}: run.json cannot be read ({error.strerror}); is this a run directory?"
        ) from None
    except ValueError:
        raise RunError(
            f"run={path}: run.json is not JSON; copy it again or train the run again"
        ) from None
    if not isinstance(record, dict) or record.get("version") != VERSION:
        found = record.get("version") if isinstance(record, dict) else None
        raise RunError(
            f"{path}/run.json: version={found!r}, this release reads {VERSION}; use the one that wrote it"
        )
    for key in ("name", "params", "convention", "tokenizer"):
        if key not in record:
            raise RunError(
                f"{path}/run.json: {key} is missing; train the run again with this release"
            )
    return record


def read_run(path: Path) -> Run:
    """One run directory; records past a resume replace what they repeat, a torn last line is left out."""
    record = read_record(path)
    kinds: dict[str, dict[int, Record]] = {"step": {}, "eval": {}}
    events: list[Record] = []
    log = path / "log.jsonl"
    lines = log.read_bytes().split(b"\n") if log.exists() else []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            kind, step = entry["kind"], int(entry["step"])
        except (ValueError, KeyError, TypeError):
            if number == len(lines):
                continue  # the run was cut off while writing it
            raise RunError(
                f"{log}:{number} is not a log record; move the file away and resume the run"
            ) from None
        if kind == "event":
            events.append(entry)
        elif kind in kinds:
            kinds[kind][step] = entry
    steps, evals = (tuple(kinds[kind][s] for s in sorted(kinds[kind])) for kind in ("step", "eval"))
    return Run(path, record, steps, evals, tuple(events))


def run_paths(root: Path) -> list[Path]:
    """Every run directory in `root`, itself included."""
    return [
        file.parent
        for pattern in ("run.json", "*/run.json", "*/*/run.json")
        for file in root.glob(pattern)
    ]


def read_runs(root: Path) -> list[Run]:
    """Every run in `root`, itself included, by size and then name."""
    if not root.is_dir():
        raise RunError(
            f"runs={root} is not a directory; give one that holds runs, such as runs/demo"
        )
    found = run_paths(root)
    if not found:
        raise RunError(
            f"runs={root} holds no run (no run.json below it); train one with `launch pretrain`"
        )
    return sorted((read_run(path) for path in found), key=lambda run: (run.N, run.name))


BEGINNINGS = ("start", "resume", "restart", "rollback")


def startup_cost(before: list[Record], start: int, *, failed: bool) -> dict[str, float]:
    """What an attempt that begins at step `start` has cost already, given all that was recorded before it: the work
    past its checkpoint, and the time since the last word of an attempt that failed, else since this process began."""
    now = time.time()
    kept = [record for record in before if record["step"] <= start]
    return {
        "start_s": now - before[-1]["time"]
        if failed and before
        else now - psutil.Process().create_time(),
        "replay_s": before[-1]["time"] - reduce(_until, kept, 0.0)
        if kept and (failed or kept != before)
        else 0.0,
    }


def goodput(records: Iterable[Record]) -> dict[str, float]:
    """Seconds by cause, and the share that is left. Between a stop that was asked for and its resume no time passes."""
    wall_s, last = 0.0, 0.0
    lost = dict.fromkeys(("start_s", "replay_s", "checkpoint_s", "wait_s", "skipped_s"), 0.0)
    for record in records:
        event, before, last = record.get("event"), last, _until(last, record)
        if event in BEGINNINGS:
            for key in ("start_s", "replay_s"):
                lost[key] += record.get(key, 0.0)
                wall_s += record.get(key, 0.0)
        else:
            wall_s += last - before
        if event == "save":
            lost["checkpoint_s"] += _blocked_s(record)
        elif event == "skip":
            lost["skipped_s"] += record["seconds"]
        elif record["kind"] == "step":
            lost["wait_s"] += record["wait_s"]
    return {"goodput": 1 - sum(lost.values()) / wall_s if wall_s else 1.0, "wall_s": wall_s, **lost}


def _until(until: float, record: Record) -> float:
    """To when the time is accounted for, with one record more. A save is told when it is committed, past steps that a
    cut may have taken away: what it stands for is the time in which the training waited."""
    time_s = float(record["time"])
    return min(until + _blocked_s(record), time_s) if record.get("event") == "save" else time_s


def _blocked_s(save: Record) -> float:
    return float(save["blocked_s" if "blocked_s" in save else "seconds"])
