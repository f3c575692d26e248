"""Goodput: the share of a run's time that went into steps it kept, and what the rest went into, from its log alone."""

import time
from collections.abc import Iterable
from functools import reduce

import psutil

from pipeline.runs.log import Record

BEGINNINGS = ("start", "resume", "restart", "rollback")


def beginning(before: list[Record], start: int, *, failed: bool) -> dict[str, float]:
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
