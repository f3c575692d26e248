"""How the attempts of a run failed (faults.jsonl), and whether another attempt is worth it."""

import time
from collections.abc import Sequence

from pipeline.config.layers import reload
from pipeline.planner.check import smaller_micro_batch
from pipeline.runs.directory import RunDir, list_checkpoints
from pipeline.runs.log import Log, Record, read

# torch has an exception type only for its own device allocator, not for the CPU's or a library's.
_OUT_OF_MEMORY = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "[CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


class HangError(RuntimeError):
    """A rank is alive and makes no progress."""


def note(run: RunDir, code: int, said: str = "", ranks: int | None = None) -> Record:
    """Record how the attempt that just ended failed, and clear its reason for the next one.

    If memory ran out and a smaller micro-batch is possible, the run's config gets that one.
    """
    unknown = f"it ended with code {code}: {said or 'no reason was given'}"
    # A process that was killed leaves no reason; `said` is what its launcher knows.
    reason = run.fault() or {"kind": "exit", "message": unknown, "user": False}
    steps = (record["step"] for record in read(run.log) if record["kind"] == "step")
    fault = {
        "time": time.time(),
        **reason,
        "step": max(steps, default=0),
        "saved": max(list_checkpoints(run.checkpoints), default=0),
    }
    if out_of_memory(fault["kind"], fault["message"]):
        lower = smaller_micro_batch(reload(run.config), ranks or run.world or 1)
        if lower is not None:
            first_line = fault["message"].splitlines()[0]
            fault["lowered"] = True
            fault["message"] = (
                f"{first_line}; train.micro_batch is lowered to {lower.train.micro_batch}"
            )
            run.continue_with(lower)
    log = Log(run.faults)
    log.append(fault)
    log.close()
    run.forget_fault()
    return fault


def history(run: RunDir) -> list[Record]:
    return list(read(run.faults, log=False))


def unlogged(run: RunDir, records: Sequence[Record]) -> Record | None:
    """Return the last fault if nothing was logged after it."""
    faults = history(run)
    logged_until = records[-1]["time"] if records else 0.0
    return faults[-1] if faults and faults[-1]["time"] > logged_until else None


def verdict(faults: Sequence[Record], max_restarts: int) -> str | None:
    """Return why the run should not be restarted, or None. A new checkpoint resets the count."""
    last = faults[-1]
    if last.get("lowered"):
        return None  # the next attempt is not like this one
    if last["user"]:  # only a person can fix it
        return str(last["message"])
    # The same fault at the same step again: another attempt would end there as well.
    same_place = [(fault["kind"], fault["step"]) for fault in faults[-2:]]
    if max_restarts and len(same_place) == 2 and same_place[0] == same_place[1]:
        return f"failed twice at step {last['step']}: {line(last)}"
    attempts = sum(fault["saved"] == last["saved"] for fault in faults)
    if attempts > max_restarts:
        times = f"{attempts} times " if max_restarts else ""
        return f"failed {times}after step {last['saved']} was saved: {line(last)}"
    return None


def out_of_memory(kind: str, message: str) -> bool:
    return kind == "OutOfMemoryError" or any(words in message for words in _OUT_OF_MEMORY)


def line(fault: Record) -> str:
    return f"{fault['kind']}: {str(fault['message']).splitlines()[0][:300]}"
