"""SLURM's own words: what is in the queue, and what it is told."""

import subprocess
from dataclasses import dataclass

from pipeline.errors import RunError

# states in which a job still holds its run or will again
LIVING = {
    "PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "RESIZING", "STOPPED",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    job: str  # 12, or 12_3 for a member of an array
    number: str  # as the job itself knows it
    state: str
    nodes: str
    reason: str

    @property
    def living(self) -> bool:
        return self.state in LIVING


def entries(*which: str) -> dict[str, Entry]:
    """The queue by job, of this user if nothing else is said. Ended jobs stay for a few minutes."""
    fields = "--format=%i %A %T %N %r"  # no node, no word; a reason may hold any character
    lines = _call("squeue", "--noheader", "--array", "--states=all", fields, *(which or ("--me",)))
    found = (Entry(*line.split(" ", 4)) for line in lines.stdout.splitlines())
    return {entry.job: entry for entry in found}


def entry(job: str) -> Entry | None:
    try:
        found = entries(f"--jobs={job}")
    except RunError as error:
        if "Invalid job id" not in str(error):
            raise
        return None  # forgotten
    return next((e for e in found.values() if job in (e.job, e.number)), None)


def requeue(job: str) -> None:
    _call("scontrol", "requeue", job)


def cancel(job: str, *, save: bool) -> None:
    """End a job: at once, or by asking its batch step, which saves first and does not come back."""
    _call("scancel", *(("--batch", "--signal=TERM") if save else ()), job)


def hosts(nodelist: str) -> list[str]:
    return _call("scontrol", "show", "hostnames", nodelist).stdout.split()


def _call(*command: str) -> "subprocess.CompletedProcess[str]":
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise RunError(f"{command[0]} is not here; this needs SLURM, on a login node") from None
    except subprocess.TimeoutExpired:
        raise RunError(
            f"{command[0]} does not answer; is the controller up? see `scontrol ping`"
        ) from None
    if done.returncode > 0:  # less than 0: killed together with the job that it requeues
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RunError(
            f"{' '.join(command[:2])} failed: {said[-1].removeprefix(f'{command[0]}: ')}"
        )
    return done
