"""SLURM's queue, and the status of runs from their jobs and their run directories."""

import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import RunError, UserError
from pipeline.runs.directory import RunDir
from pipeline.runs.history import find_runs, is_run, remaining_s, status_of
from pipeline.runs.log import Record, last_records, printable, read
from pipeline.slurm.submit import job_of

ATTEMPTS = "attempts.jsonl"  # in the run directory: every start of its jobs, and how it ended
# States of a job that uses its run directory now or later.
_ALIVE = {
    "PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED",
    "RESIZING", "STOPPED",
}  # fmt: skip
# The state of a run that no job in the queue trains. One that no longer logs anything has died.
_STATES = {
    "new": "NEW", "running": "RUNNING", "stale": "FAILED", "finished": "FINISHED",
    "interrupted": "STOPPED", "failed": "FAILED",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    job: str  # 12, or 12_3 for a member of an array
    number: str  # the job's own SLURM_JOB_ID
    state: str
    nodes: str
    reason: str

    @property
    def alive(self) -> bool:
        return self.state in _ALIVE


def entries(*which: str) -> dict[str, Entry]:
    """The queue by job; this user's if `which` is empty. Ended jobs stay for a few minutes."""
    fields = "--format=%i %A %T %N %r"  # %N may be empty, and %r may hold any character
    lines = _call("squeue", "--noheader", "--array", "--states=all", fields, *(which or ("--me",)))
    found = (Entry(*line.split(" ", 4)) for line in lines.splitlines())
    return {entry.job: entry for entry in found}


def entry(job: str) -> Entry | None:
    """One job, or None if SLURM has forgotten it."""
    try:
        found = entries(f"--jobs={job}")
    except RunError as error:
        if "Invalid job id" not in str(error):
            raise
        return None
    return next((e for e in found.values() if job in (e.job, e.number)), None)


def requeue(job: str) -> None:
    _call("scontrol", "requeue", job)


def cancel(job: str, *, save: bool) -> None:
    """End a job: at once, or by a signal to its batch step, which saves and does not come back."""
    _call("scancel", *(("--batch", "--signal=TERM") if save else ()), job)


def hosts(nodelist: str) -> list[str]:
    return _call("scontrol", "show", "hostnames", nodelist).split()


def _call(*command: str) -> str:
    tool = command[0]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise RunError(f"{tool} is not installed here; use a login node of a cluster") from None
    except subprocess.TimeoutExpired:
        raise RunError(f"{tool} does not answer; check the controller: `scontrol ping`") from None
    if done.returncode > 0:  # below 0: killed together with the job that it requeues
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        reason = lines[-1].removeprefix(f"{tool}: ")
        raise RunError(f"{' '.join(command[:2])} failed: {reason}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class Status:
    run: str
    job: str | None
    state: str
    nodes: str = ""
    step: int = 0
    steps: int = 0
    loss: float | None = None
    eta_s: float | None = None  # at the present pace of training
    restarts: int = 0
    note: str = ""


def statuses(paths: Iterable[Path]) -> list[Status]:
    """The status of every run in `paths` or below; a damaged run is listed with its fault."""
    runs: list[Path] = []
    for path in paths:
        inside = [path] if RunDir(path).exists else find_runs(path)
        if not inside:
            raise RunError(f"{path} contains no run; give a run directory, or a directory of runs")
        runs += inside
    jobs = {path: job_of(path) for path in runs}
    queue: dict[str, Entry] = {}
    silence = ""
    if any(jobs.values()):
        try:
            queue = entries()
        except RunError as error:  # the run directories still have the progress
            silence = str(error)
    found = []
    for path, job in jobs.items():
        try:
            status = _status(path, job, queue.get(job or ""), silence if job else "")
        except UserError as error:
            status = Status(printable(path), job, "DAMAGED", note=str(error))
        if is_run(path) or RunDir(path).exists:  # otherwise it was deleted after it was found
            found.append(status)
    return found


def past_attempts(run: Path) -> list[Record]:
    return list(read(run / ATTEMPTS, log=False))


def _status(path: Path, job: str | None, entry: Entry | None, silence: str) -> Status:
    run = RunDir(path)
    attempts = past_attempts(path)
    ended = next((r for r in reversed(attempts) if r["event"] != "begin"), {})
    records = last_records(run.log)
    steps = [r for r in records if r["kind"] == "step"]
    total = run.fact("steps") or 0
    if entry and entry.alive:
        state = entry.state
    else:
        state = _STATES[status_of(records, time.time(), path)]
        died = ended.get("event") == "stop"
        # No job trains it, so a run that looks alive was killed before it could log its end.
        if (state == "NEW" and died) or (state == "RUNNING" and (died or entry is not None)):
            state = "FAILED"
    note = str(ended.get("reason", ""))
    if job is None and state == "FAILED":
        note = "no process trains it any more; --resume continues it"
    restarts = sum(attempt["event"] == "begin" for attempt in attempts) - 1
    if not attempts:  # without a job, every fault led to a restart, except the one that ended it
        faults = len(run.past_faults())
        restarts = faults - 1 if state == "FAILED" else faults
    waits = entry.reason if entry is not None and state == "PENDING" else ""
    return Status(
        run=printable(path),
        job=job,
        state=state,
        nodes=entry.nodes if entry is not None and state == "RUNNING" else "",
        step=int(steps[-1]["step"]) if steps else 0,
        steps=total,
        loss=steps[-1].get("loss") if steps else None,
        eta_s=remaining_s(steps[-32:], total, time.time()) if state == "RUNNING" else None,
        restarts=max(0, restarts),
        note=silence or waits or note,
    )
