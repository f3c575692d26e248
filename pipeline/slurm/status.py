"""Where runs stand: what SLURM says of their jobs, joined with what their directories say."""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.layers import read_toml
from pipeline.errors import RunError
from pipeline.runs.directory import RunDir
from pipeline.runs.log import Record, decode
from pipeline.slurm import attempts, queue
from pipeline.slurm.submit import job_of

_TAIL_BYTES = 65536  # of a log: its last hundred steps or more
_SILENT_S = 600.0  # a local run that has written nothing for so long has died


@dataclass(frozen=True, slots=True)
class Status:
    run: str
    job: str | None
    state: str
    nodes: str
    step: int
    steps: int
    loss: float | None
    eta_s: float | None  # of the training itself, at its present pace
    restarts: int
    note: str


def runs(paths: Iterable[Path]) -> list[Path]:
    """Run directories, given or found below what is given."""
    found: list[Path] = []
    for path in paths:
        inside = [path] if RunDir(path).exists else sorted(p.parent for p in path.rglob("run.json"))
        if not inside:
            raise RunError(f"{path} holds no run; give a run directory or a folder of them")
        found += inside
    return found


def statuses(paths: Iterable[Path]) -> list[Status]:
    places = runs(paths)
    jobs = {path: job_of(path) for path in places}
    there, silence = {}, ""
    if any(jobs.values()):
        try:
            there = queue.entries()
        except RunError as error:  # the directories still say how far it has got
            silence = str(error)
    return [
        _status(path, job, there.get(job or ""), silence if job else "")
        for path, job in jobs.items()
    ]


def _status(path: Path, job: str | None, entry: queue.Entry | None, silence: str) -> Status:
    run, tries = RunDir(path), attempts.past(path)
    records = tail(run.log)
    steps = [r for r in records if r.get("kind") == "step"]
    last = next((r for r in reversed(records) if r.get("kind") == "event"), {})
    ended = next((r for r in reversed(tries) if r["event"] != "begin"), {})
    total = int(read_toml(run.config).get("train", {}).get("steps", 0))
    state = (
        entry.state
        if entry and entry.living
        else _settled(last, ended, records, over=entry is not None)
    )
    waits = entry.reason if entry is not None and state == "PENDING" else ""
    return Status(
        run=str(path),
        job=job,
        state=state,
        nodes=entry.nodes if entry is not None and state == "RUNNING" else "",
        step=int(steps[-1]["step"]) if steps else 0,
        steps=total,
        loss=steps[-1].get("loss") if steps else None,
        eta_s=_eta(steps, total) if state == "RUNNING" else None,
        restarts=max(0, sum(r["event"] == "begin" for r in tries) - 1),
        note=silence or waits or str(ended.get("reason", "")),
    )


def _settled(last: Record, ended: Record, records: list[Record], *, over: bool) -> str:
    """Of a run that no job in the queue trains: by what it wrote last."""
    match last.get("event"):
        case "finish":
            return "FINISHED"
        case "interrupt":
            return "STOPPED"
        case None:
            return "NEW" if ended.get("event") != "stop" else "FAILED"
        case _:
            over |= (
                time.time() - float(records[-1]["time"]) > _SILENT_S or ended.get("event") == "stop"
            )
            return "FAILED" if over else "RUNNING"


def _eta(steps: list[Record], total: int) -> float | None:
    recent = steps[-32:]
    if len(recent) < 2 or recent[-1]["step"] <= recent[0]["step"]:
        return None
    pace = (recent[-1]["time"] - recent[0]["time"]) / (recent[-1]["step"] - recent[0]["step"])
    return float(max(0.0, pace * (total - recent[-1]["step"]) - (time.time() - recent[-1]["time"])))


def tail(path: Path) -> list[Record]:
    """The last records of a log that may be large and is being written."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [decode(line) for line in lines[size > _TAIL_BYTES :] if line.endswith(b"\n")]
