"""What the page receives about a run: its row in the table, its curves, and its own page.

A log is reduced while it is read, so that a run of any length takes a bounded amount of memory.
The files of a run may be damaged or hostile: every value that leaves this module is a finite
number, a short string or None.
"""

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import RunError
from pipeline.runs.history import PHASES, RECIPE_KEYS, Run
from pipeline.runs.log import Record
from pipeline.scaling.points import Array

AXES = ("step", "tokens", "flops", "hours")
STEP_KEYS = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu", "memory_bytes", "wait_s", "time")
EVAL_KEYS = ("loss", "bpb", "time")
MAX_TASK_KEYS = 100  # of one run
SLACK = 4  # rows may grow to this multiple of their limit before they are thinned again
SPIKE_WINDOW_STEPS = 128  # a spike as OLMo 3 defines it: 6σ above the 128 steps before it
SPIKE_SIGMAS = 6.0
MAX_EVENTS = 500
MAX_LOADS = 64  # columns of the heat map of expert loads
MAX_HASHES = 512
MAX_CHARACTERS = 200  # of any text: a name of a megabyte would stop the browser
RECENT_STEPS = 20  # current figures are medians over this many steps
ROUTINE_EVENTS = {"start", "save", "finish", "warning"}  # not worth a mark in the charts


def number(value: object) -> float:
    """Return a value as a float, NaN if it is not a number or too large for one."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # JSON integers have no limit
        return math.nan


def known(value: object) -> float | None:
    """Return a finite number, or None."""
    found = number(value)
    return found if math.isfinite(found) else None


def text(value: object) -> str:
    """Return a scalar as a short string; anything nested is unknown."""
    return str(value)[:MAX_CHARACTERS] if isinstance(value, str | int | float) and value else "?"


def short(value: float) -> float:
    """Round to six digits: more than a screen can show, in half the bytes."""
    return float(f"{value:.6g}")


def thin(x: Array, keep: Sequence[Array], buckets: int) -> list[int]:
    """Choose rows that look the same when drawn: per bucket of x, the extremes of each column."""
    edges = np.linspace(x[0], x[-1], buckets + 1)
    bucket = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, buckets - 1)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    kept = {0, len(x) - 1}  # a curve keeps its ends
    for begin, end in itertools.pairwise([*map(int, starts), len(x)]):
        for y in keep:
            part = y[begin:end]
            # nanargmin raises an error if there is nothing but NaN.
            if np.isfinite(part).any():
                kept |= {begin + int(np.nanargmin(part)), begin + int(np.nanargmax(part))}
    return sorted(kept)


class Series:
    """Records of one kind as rows of numbers, NaN where a record lacks a key."""

    def __init__(self, keys: tuple[str, ...], limit: int | None) -> None:
        self.keys = (*AXES, *keys)
        self.limit = limit  # rows after thinning; None keeps all of them
        self.rows: list[tuple[float, ...]] = []

    def rewind(self, step: float) -> None:
        """Drop rows from `step` on: a resumed run logs those steps again, and the newest count."""
        while self.rows and self.rows[-1][0] >= step:
            self.rows.pop()

    def admit(self, keys: Sequence[str]) -> None:
        """Add columns; earlier rows have no value in them."""
        self.keys = (*self.keys, *keys)
        self.rows = [(*row, *(math.nan for _ in keys)) for row in self.rows]

    def add(self, record: Record, hours: float) -> None:
        values = (hours if key == "hours" else number(record.get(key)) for key in self.keys)
        self.rows.append(tuple(values))
        if self.limit is not None and len(self.rows) > SLACK * self.limit:
            self.reduce()

    def reduce(self) -> None:
        """Thin the rows to the limit, if there is one."""
        if self.limit is not None and len(self.rows) > self.limit:
            self.rows = [self.rows[i] for i in self._thinned(self.limit, log=True)]

    def column(self, key: str) -> Array:
        place = self.keys.index(key)
        return np.array([row[place] for row in self.rows])

    def columns(self, keys: Sequence[str], limit: int, *, log: bool) -> dict[str, list[float]]:
        """Return columns for drawing, with about `limit` rows at most."""
        chosen: Sequence[int] = range(len(self.rows))
        if len(self.rows) > limit:
            chosen = self._thinned(limit, log=log)
        places = [self.keys.index(key) for key in keys]
        return {
            key: [short(self.rows[i][place]) for i in chosen]
            for key, place in zip(keys, places, strict=True)
        }

    def records(self, last: int = 0) -> tuple[Record, ...]:
        """Return the last rows, or with 0 all of them, as records with whole steps."""
        found = [dict(zip(self.keys, row, strict=True)) for row in self.rows[-last:]]
        return tuple({**record, "step": int(record["step"])} for record in found)

    def _thinned(self, limit: int, *, log: bool) -> list[int]:
        x = self.column("step")
        extremes = [self.column(key) for key in ("loss", "grad_norm") if key in self.keys]
        # Each bucket keeps a minimum and a maximum of every column.
        buckets = max(1, limit // (2 * len(extremes)))
        # The overview has a log axis: there, early steps need as many points as late ones.
        return thin(np.log(np.maximum(x, 1)) if log else x, extremes, buckets)


class RunLog:
    """A run's log, reduced to `limit` rows. Without a limit it has every step and token hash."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.world = 1
        self.hours = 0.0  # device-hours spent in training steps, without evaluation and waiting
        self.steps = Series(STEP_KEYS, limit)
        self.evals = Series(EVAL_KEYS, limit)
        self.events: list[Record] = []
        # MoE: step, load by layer and expert
        self.loads: list[tuple[float, list[list[float]]]] = []
        self.hashes: list[tuple[int, str]] = []  # step, hash of its tokens

    def add(self, record: Record) -> None:
        """Add one record, which `runs.log` has checked; ignore kinds that are not ours."""
        step = float(record["step"])
        match record["kind"]:
            case "step":
                self._add_step(step, record)
            case "eval":
                self.evals.rewind(step)
                # Scores of tasks, such as blimp/accuracy.
                if new := [key for key in record if "/" in key and key not in self.evals.keys]:
                    self.evals.admit(new[: max(0, MAX_TASK_KEYS - len(self.evals.keys))])
                self.evals.add(record, self.hours)
            case "moe":
                self._add_load(step, record.get("load"))
            case "event":
                self._add_event(step, record)

    def _add_step(self, step: float, record: Record) -> None:
        self.steps.rewind(step)
        _, tokens, _, hours = self.steps.rows[-1][: len(AXES)] if self.steps.rows else (0.0,) * 4
        trained_tokens = number(record.get("tokens")) - tokens
        speed = number(record.get("tokens_per_s"))
        # tokens_per_s counts all ranks, so the time is the same on each of them.
        spent = trained_tokens / speed / 3600 * self.world if speed > 0 else 0.0
        self.hours = hours + (spent if 0 < spent < math.inf else 0.0)
        self.steps.add(record, self.hours)
        found = record.get("hash")
        # The first 52 bits: MLflow stores numbers only, and a double holds no more.
        if self.limit is None and isinstance(found, str):
            self.hashes.append((int(step), found[:13]))
        elif self.limit is None and known(found) is not None:
            self.hashes.append((int(step), f"{int(number(found)):013x}"))

    def _add_load(self, step: float, load: object) -> None:
        """Keep each expert's share of its layer's tokens, relative to an even share."""
        if not isinstance(load, list) or not all(isinstance(x, list) and x for x in load):
            return
        even = [[round(number(share) * len(layer), 3) for share in layer] for layer in load]
        if self.loads and [*map(len, even)] != [*map(len, self.loads[0][1])]:
            return  # another shape than before: not the same model
        self.loads.append((step, even))
        if len(self.loads) > 2 * MAX_LOADS:
            # Every other one, and the newest.
            self.loads = [*self.loads[:-1:2], self.loads[-1]]

    def _add_event(self, step: float, record: Record) -> None:
        world = known(record.get("world"))
        self.world = max(1, int(world)) if world else self.world
        event = record["event"][:MAX_CHARACTERS]
        # Events that decide the status are never left out.
        decides = event in PHASES
        if decides or (event != "save" and len(self.events) < MAX_EVENTS):
            time_s = known(record.get("time")) or 0.0
            self.events.append({"step": step, "time": time_s, "event": event})

    def spikes(self) -> list[dict[str, float]]:
        """Find steps whose loss is far above the window before them; needs every step."""
        loss = self.steps.column("loss")
        step = self.steps.column("step")
        if len(loss) <= SPIKE_WINDOW_STEPS or self.limit is not None:
            return []
        before = np.lib.stride_tricks.sliding_window_view(loss[:-1], SPIKE_WINDOW_STEPS)
        bound = before.mean(axis=1) + SPIKE_SIGMAS * before.std(axis=1)
        at = SPIKE_WINDOW_STEPS + np.flatnonzero(loss[SPIKE_WINDOW_STEPS:] > bound)
        return [{"step": float(step[i]), "loss": float(loss[i])} for i in at[:MAX_EVENTS]]

    def token_hashes(self) -> dict[str, list[Any]]:
        """Sample the hashes at every 2^k-th step: runs of any length have such steps in common."""
        stride = 1
        while sum(step % stride == 0 for step, _ in self.hashes) > MAX_HASHES:
            stride *= 2
        chosen = [(step, value) for step, value in self.hashes if step % stride == 0]
        return {"step": [step for step, _ in chosen], "hash": [value for _, value in chosen]}

    def recent(self, key: str) -> float | None:
        step = self.steps.column("step")  # not every step is logged
        recent = self.steps.column(key)[step > step.max(initial=0) - RECENT_STEPS]
        values = recent[np.isfinite(recent)]
        return float(np.median(values)) if len(values) else None


@dataclass(frozen=True)
class RunView:
    """What is known about a run now."""

    record: Record
    log: RunLog
    link: str | None  # the run's address in MLflow's own pages
    path: Path | None = None  # None if MLflow is read

    @property
    def run(self) -> Run:
        """The run in the form that fits read."""
        steps = self.log.steps.records(1)
        return Run(Path(), self.record, steps, self.log.evals.records(), tuple(self.log.events))

    @property
    def curve(self) -> Run:
        """The same with all steps of the log, for losses before the decay."""
        return replace(self.run, steps=self.log.steps.records())

    @property
    def group(self) -> str:
        """Runs that one law can describe share a group."""
        keys = ("arch", "objective", "tokenizer", "convention", *RECIPE_KEYS)
        # A group is within one directory, like `launch fit --runs`, or one experiment of MLflow.
        place = self.record.get("experiment") if self.path is None else str(self.path.parent)
        parts = [str(place), *(text(self.record.get(key)) for key in keys)]
        return hashlib.sha256("\n".join(parts).encode("utf-8", "replace")).hexdigest()[:8]

    def row(self, key: str, now: float) -> dict[str, Any]:
        """Return the run's row of the table; unknown values are None."""
        run = self.run
        if not 1 <= run.N < math.inf:  # N divides below, and the page takes its logarithm
            raise RunError(f"params.scaling={run.N} in run.json is not a number of parameters")
        status = run.status(now, self.path)
        step = run.last["step"]
        tokens = known(run.last.get("tokens")) or 0.0
        final = run.evals[-1] if run.evals else {}
        speed = self.log.recent("tokens_per_s")
        steps = known(self.record.get("steps"))
        eta_s = None
        if status == "running" and steps and step and speed:
            # Tokens per step are taken from the run so far: the batch may have grown.
            eta_s = (steps - step) * tokens / step / speed
        happened = [event["event"] for event in self.log.events]
        # The log of a branch begins with its trunk's, whose restarts are not the branch's.
        starts = [index for index, name in enumerate(happened) if name == "start"]
        own = happened[starts[-1] :] if starts else happened
        return {
            "id": key,
            "name": text(run.name),
            "group": self.group,
            "status": status,
            "link": self.link,
            **{name: text(self.record.get(name)) for name in ("experiment", "size", "arch")},
            "N": run.N,
            "bytes_per_token": known(self.record.get("bytes_per_token")),
            "step": step,
            "steps": steps,
            "tokens": tokens,
            "flops": known(run.last.get("flops")),
            "hours": self.log.hours,
            "tokens_per_parameter": tokens / run.N,
            "eta_s": eta_s,
            "loss": final.get("loss"),
            "bpb": final.get("bpb"),
            "train_loss": self.log.recent("loss"),
            "tokens_per_s": speed,
            "mfu": self.log.recent("mfu"),
            "restarts": own.count("resume") + own.count("restart"),
            "skips": happened.count("skip"),
        }

    def curves(self, limit: int) -> dict[str, Any]:
        """Return the curves of the overview."""
        keys = (*AXES, "loss")
        scores = ["tokens", "flops", *(key for key in self.log.evals.keys if "/" in key)]
        return {
            "train": self.log.steps.columns(keys, limit, log=True),
            "held_out": self.log.evals.columns(keys, max(20, limit // 2), log=True),
            "tasks": self.log.evals.columns(scores, max(20, limit // 2), log=True),
        }

    def page(self, key: str, now: float, limit: int) -> dict[str, Any]:
        """Return everything about the run; its log must have been read without a limit."""
        log = self.log
        loads = log.loads[:: max(1, -(-len(log.loads) // MAX_LOADS))]
        return {
            "id": key,
            "row": self.row(key, now),
            "about": {k: known(self.record.get(k)) for k in ("batch_tokens", "seq", "vocab")},
            "steps": log.steps.columns(log.steps.keys, limit, log=False),
            "evals": log.evals.columns(log.evals.keys, limit, log=False),
            "events": [event for event in log.events if event["event"] not in ROUTINE_EVENTS],
            "spikes": log.spikes(),
            "tokens": log.token_hashes(),
            "moe": {"step": [s for s, _ in loads], "load": [x for _, x in loads]}
            if loads
            else None,
        }
