"""A run as the page shows it: a row of the table with its curve, and its own page."""

import hashlib
from typing import Any

import numpy as np

from pipeline.dashboard.curve import AXES, MOST_LOADS, Folded
from pipeline.dashboard.source import Seen

RECENT = 20  # records whose speed counts as now
UNMARKED = {"start", "save", "finish"}


def row(key: str, seen: Seen, now: float) -> dict[str, Any]:
    """What the table says; unknown is null."""
    run, record, folded = seen.run, seen.record, seen.folded
    last, status = run.last, run.status(now)
    final = run.evals[-1] if run.evals else {}
    speed, steps = recent(folded, "tokens_per_s"), record.get("steps")
    left = (
        (steps - last["step"]) * last["tokens"] / last["step"] if steps and last["step"] else None
    )
    happened = [event.get("event") for event in folded.events]
    return {
        "id": key, "name": run.name, "group": group(seen), "status": status, "link": seen.link,
        **{k: str(record.get(k) or "?") for k in ("experiment", "size", "arch")},
        "N": run.N, "bytes_per_token": record.get("bytes_per_token"), "step": last["step"], "steps": steps,
        "tokens": last.get("tokens"), "flops": last.get("flops"), "hours": folded.hours,
        "tokens_per_parameter": float(last.get("tokens") or 0) / run.N,
        "eta_s": left / speed if left and speed and status == "running" else None,
        "loss": final.get("loss"), "bpb": final.get("bpb"), "train_loss": recent(folded, "loss"),
        "tokens_per_s": speed, "mfu": recent(folded, "mfu"),
        "restarts": happened.count("resume") + happened.count("restart"), "skips": happened.count("skip"),
    }  # fmt: skip


def group(seen: Seen) -> str:
    """Runs that one law may describe share it."""
    parts = [str(seen.record.get(key)) for key in ("experiment", "arch", "tokenizer", "convention")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def curves(seen: Seen, limit: int) -> dict[str, Any]:
    keys = (*AXES, "loss")
    folded = seen.folded
    return {
        "train": folded.steps.columns(keys, limit, log=True),
        "held_out": folded.evals.columns(keys, max(20, limit // 2), log=True),
    }


def page(key: str, seen: Seen, now: float, limit: int) -> dict[str, Any]:
    """Everything about one run; `seen` holds every record."""
    folded = seen.folded
    return {
        "id": key, "row": row(key, seen, now),
        "about": {k: v for k, v in seen.record.items() if isinstance(v, str | int | float)},
        "steps": folded.steps.columns(folded.steps.keys, limit, log=False),
        "evals": folded.evals.columns(folded.evals.keys, limit, log=False),
        "events": [
            {"step": event.get("step"), "time": event.get("time"), "event": str(event.get("event"))}
            for event in folded.events
            if event.get("event") not in UNMARKED
        ],
        "spikes": folded.spikes(), "tokens": folded.tokens(), "moe": loads(folded),
    }  # fmt: skip


def loads(folded: Folded) -> dict[str, Any] | None:
    """Each expert's share of its layer's tokens over the even share, by step, layer and expert."""
    kept = folded.loads[:: max(1, -(-len(folded.loads) // MOST_LOADS))]
    even = [
        [[round(s * len(layer), 3) for s in layer] for layer in load["load"]]
        for load in kept
        if load.get("load")
    ]
    return (
        {"step": [load["step"] for load in kept if load.get("load")], "load": even}
        if even
        else None
    )


def recent(folded: Folded, key: str) -> float | None:
    values = [v for v in folded.steps.column(key)[-RECENT:] if np.isfinite(v)]
    return float(np.median(values)) if values else None
