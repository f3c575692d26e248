"""SLURM's queue: what is in it, and how jobs are requeued and cancelled."""

import subprocess
from dataclasses import dataclass

from pipeline.errors import RunError

# states in which a job holds its run, or will again
ALIVE = {
    "PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED",
    "RESIZING", "STOPPED",
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
        return self.state in ALIVE


def entries(*which: str) -> dict[str, Entry]:
    """The queue by job; this user's if `which` is empty. Ended jobs stay for a few minutes."""
    fields = "--format=%i %A %T %N %r"  # %N may be empty, and %r may hold any character
    lines = _call("squeue", "--noheader", "--array", "--states=all", fields, *(which or ("--me",)))
    found = (Entry(*line.split(" ", 4)) for line in lines.stdout.splitlines())
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
    return _call("scontrol", "show", "hostnames", nodelist).stdout.split()


def _call(*command: str) -> "subprocess.CompletedProcess[str]":
    tool = command[0]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise RunError(f"{tool} is not here; this needs SLURM, on a login node") from None
    except subprocess.TimeoutExpired:
        raise RunError(f"{tool} does not answer; check the controller: `scontrol ping`") from None
    if done.returncode > 0:  # below 0: killed together with the job that it requeues
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        reason = lines[-1].removeprefix(f"{tool}: ")
        raise RunError(f"{' '.join(command[:2])} failed: {reason}")
    return done
