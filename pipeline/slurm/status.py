"""The status of runs: SLURM's entry of their jobs, joined with their run directories."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import RunError, UserError
from pipeline.runs.directory import RunDir
from pipeline.runs.history import find_runs, status_of
from pipeline.runs.log import Record, last_records, printable, read_lines
from pipeline.slurm import queue
from pipeline.slurm.submit import job_of

ATTEMPTS = "attempts.jsonl"  # in the run directory: every start of its jobs, and how it ended
# A run that no job in the queue trains. One that logs nothing any more has died.
_STATES = {
    "new": "NEW",
    "running": "RUNNING",
    "stale": "FAILED",
    "finished": "FINISHED",
    "interrupted": "STOPPED",
    "failed": "FAILED",
}


@dataclass(frozen=True, slots=True)
class Status:
    run: str
    job: str | None
    state: str
    nodes: str
    step: int
    steps: int
    loss: float | None
    eta_s: float | None  # at the present pace of training
    restarts: int
    note: str


def past_attempts(run: Path) -> list[Record]:
    return list(read_lines(run / ATTEMPTS))


def runs(paths: Iterable[Path]) -> list[Path]:
    """Return the run directories in `paths`, given or found below what is given."""
    found: list[Path] = []
    for path in paths:
        inside = [path] if RunDir(path).exists else find_runs(path)
        if not inside:
            raise RunError(f"{path} holds no run; give a run directory or a folder of them")
        found += inside
    return found


def statuses(paths: Iterable[Path]) -> list[Status]:
    """Return the status of every run; a damaged run directory is listed with its fault."""
    jobs = {path: job_of(path) for path in runs(paths)}
    entries: dict[str, queue.Entry] = {}
    silence = ""
    if any(jobs.values()):
        try:
            entries = queue.entries()
        except RunError as error:  # the run directories still have the progress
            silence = str(error)
    found = []
    for path, job in jobs.items():
        try:
            status = _status(path, job, entries.get(job or ""), silence if job else "")
        except UserError as error:
            status = Status(printable(path), job, "DAMAGED", "", 0, 0, None, None, 0, str(error))
        if path.exists():  # otherwise it was deleted after it was found
            found.append(status)
    return found


def _status(path: Path, job: str | None, entry: queue.Entry | None, silence: str) -> Status:
    run = RunDir(path)
    attempts = past_attempts(path)
    records = last_records(run.log)
    steps = [r for r in records if r["kind"] == "step"]
    ended = next((r for r in reversed(attempts) if r.get("event") != "begin"), {})
    total = _steps(run)
    if entry and entry.alive:
        state = entry.state
    else:
        state = _STATES[status_of(records, time.time())]
        died = ended.get("event") == "stop"
        # No job trains it, so a run that looks alive was killed before it could log its end.
        if (state == "NEW" and died) or (state == "RUNNING" and (died or entry is not None)):
            state = "FAILED"
    waits = entry.reason if entry is not None and state == "PENDING" else ""
    return Status(
        run=printable(path),
        job=job,
        state=state,
        nodes=entry.nodes if entry is not None and state == "RUNNING" else "",
        step=int(steps[-1]["step"]) if steps else 0,
        steps=total,
        loss=steps[-1].get("loss") if steps else None,
        eta_s=_eta(steps, total) if state == "RUNNING" else None,
        restarts=max(0, sum(r.get("event") == "begin" for r in attempts) - 1),
        note=silence or waits or str(ended.get("reason", "")),
    )


def _steps(run: RunDir) -> int:
    steps = run.fact("steps") or 0
    if type(steps) is not int or not 0 <= steps < 2**53:
        raise RunError(f"{printable(run.path)}/run.json: steps={steps!r} is not a number")
    return steps


def _eta(steps: list[Record], total: int) -> float | None:
    recent = steps[-32:]
    if len(recent) < 2 or recent[-1]["step"] <= recent[0]["step"]:
        return None
    first = recent[0]
    last = recent[-1]
    pace_s = (last["time"] - first["time"]) / (last["step"] - first["step"])
    since_s = time.time() - last["time"]
    return float(max(0.0, pace_s * (total - last["step"]) - since_s))
