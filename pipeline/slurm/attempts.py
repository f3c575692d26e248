"""What became of each start of a job, and whether there should be another: `attempts.jsonl` in the run directory."""

import re
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Literal

from pipeline.runs import faults
from pipeline.runs.directory import RunDir
from pipeline.runs.log import Record, read, read_lines
from pipeline.train.supervisor import STOPPED

FILE = "attempts.jsonl"
_DIED = re.compile(
    r"^srun: error: (\S+): tasks? ([\d,-]+): (.+)$", re.MULTILINE
)  # the first to end is the cause


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended, as the batch step saw it."""

    step: int  # the last one recorded
    finished: bool
    saved: bool  # as a signal asked for it
    asked: str | None  # the signal that reached the batch step
    fault: Record | None
    hopeless: str | None  # why another start would end like this one


@dataclass(frozen=True, slots=True)
class Verdict:
    action: Literal["done", "requeue", "stop"]
    reason: str
    code: int = 0  # with which the job ends


def decide(end: Ending, *, restarts: int, most: int, run: Path) -> Verdict:
    """Come back for what may go better, stop for what will not."""
    again = f"launch pretrain --resume --slurm --out {quote(str(run))}"
    if end.finished:
        return Verdict("done", f"finished at step {end.step}")
    if (
        end.asked == "SIGTERM"
    ):  # by `launch cancel`, scancel or SLURM itself: whoever sent it has decided
        return Verdict(
            "stop", f"told to end; {'saved' if end.saved else 'was'} at step {end.step}", STOPPED
        )
    if end.fault is not None and end.hopeless is not None:
        return Verdict(
            "stop", f"{end.hopeless}; see {run}/logs, then {again}", 2 if end.fault["user"] else 1
        )
    if end.fault is not None:
        reason = f"{faults.line(end.fault)} at step {end.step}"
    else:  # or asked before it could listen: nothing is wrong
        reason = (
            f"saved at step {end.step} as asked"
            if end.saved
            else f"asked to stop at step {end.step}"
        )
    if restarts >= most:
        return Verdict(
            "stop",
            f"{reason}; restarts={restarts} reach cluster.slurm.max_restarts={most}; {again}",
            1,
        )
    return Verdict("requeue", reason, STOPPED)


def past(run: Path) -> list[Record]:
    return list(read_lines(run / FILE))


def ending(
    run: RunDir, job: str, began: float, code: int, asked: str | None, said: str, max_restarts: int
) -> Ending:
    """From the run's log, its faults since the job began, and what srun said."""
    records = list(read(run.log))
    step = max((int(r["step"]) for r in records if r.get("kind") == "step"), default=0)
    last = next((r for r in reversed(records) if r.get("kind") == "event"), {})
    finished = last.get("event") == "finish"
    saved = last.get("event") == "interrupt" and float(last["time"]) >= began
    if finished or saved or (asked is not None and run.fault() is None):
        return Ending(step, finished, saved, asked, None, None)
    died, known = _DIED.search(said), run.fault()
    if died and (known is None or not (died[3].startswith("Exited") or known["user"])):
        run.forget_fault()  # the others only complain that it is gone
        run.fail(ChildProcessError(f"rank {died[2]} on {died[1]}: {died[3]}"))
    fault = faults.note(run, code)
    since = min((float(r["time"]) for r in past(run.path) if r["job"] == job), default=began)
    mine = [f for f in faults.history(run) if float(f["time"]) >= since]
    return Ending(step, finished, saved, asked, fault, faults.verdict(mine, max_restarts))
