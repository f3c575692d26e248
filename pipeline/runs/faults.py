"""How a run's attempts failed, kept beside it; from this it follows whether another one is worth it."""

import time
from collections.abc import Sequence

from pipeline.config.layers import reload
from pipeline.planner.check import smaller_micro_batch
from pipeline.runs.directory import RunDir, list_checkpoints
from pipeline.runs.log import Log, Record, read


class HangError(RuntimeError):
    """A rank that lives and does not go on."""


def note(run: RunDir, code: int, said: str = "", ranks: int | None = None) -> Record:
    """Write down how the attempt that just ended failed, and where; the reason it left makes room for the next."""
    unknown = f"it ended with code {code}: {said or 'no reason was given'}"
    reason = run.fault() or {"kind": "exit", "message": unknown, "user": False}
    records = list(read(run.log))
    fault = {
        "time": time.time(),
        **reason,
        "step": max((r["step"] for r in records if r["kind"] == "step"), default=0),
        "saved": max(list_checkpoints(run.checkpoints), default=0),
    }
    if no_room(fault["kind"], fault["message"]) and (
        lower := smaller_micro_batch(reload(run.config), ranks or run.world or 1)
    ):
        to = f"train.micro_batch is lowered to {lower.train.micro_batch}"
        fault |= {"lowered": True, "message": f"{fault['message'].splitlines()[0]}; {to}"}
        run.continue_with(lower)
    log = Log(run.faults)
    log.append(fault)
    log.close()
    run.forget_fault()
    return fault


def history(run: RunDir) -> list[Record]:
    return list(read(run.faults))


def unheard(run: RunDir, records: Sequence[Record]) -> Record | None:
    """The fault after which nothing was recorded any more."""
    last = history(run)[-1:]
    return last[0] if last and last[0]["time"] > (records[-1]["time"] if records else 0.0) else None


def verdict(faults: Sequence[Record], max_restarts: int) -> str | None:
    """Why the run is not to be tried again, or None; restarts count until a new checkpoint is written."""
    last = faults[-1]
    if last.get("lowered"):
        return None
    in_vain = sum(fault["saved"] == last["saved"] for fault in faults)
    twice = len(faults) > 1 and all(faults[-2][key] == last[key] for key in ("kind", "step"))
    if last["user"]:
        return str(last["message"])
    if max_restarts and twice:
        return f"failed twice at step {last['step']}: {line(last)}"
    if in_vain > max_restarts:
        return f"failed {f'{in_vain} times ' if max_restarts else ''}after step {last['saved']} was saved: {line(last)}"
    return None


def no_room(kind: str, message: str) -> bool:
    """torch has a type for its own allocator on a device alone: not for a CPU's, nor for what libraries allocate."""
    words = (
        "DefaultCPUAllocator",
        "CUDA error: out of memory",
        "[CUDA]: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
    )
    return kind == "OutOfMemoryError" or any(word in message for word in words)


def line(fault: Record) -> str:
    return f"{fault['kind']}: {str(fault['message']).splitlines()[0][:300]}"
