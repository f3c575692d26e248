"""A run's log as columns that stay small: thinned as they grow, first, last and extremes kept."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.runs.log import Record
from pipeline.scaling.points import Array
from pipeline.track.mlflow_store import STATUS

AXES = ("step", "tokens", "flops", "hours")
STEP = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu", "memory_bytes", "wait_s", "time")
EVAL = ("loss", "bpb", "time")
SLACK = 4  # rows may grow to so many times their limit between two thinnings
WINDOW, SIGMAS = 128, 6.0  # a spike as OLMo 3 counts it: 6σ of a 128-step window
MOST_EVENTS, MOST_LOADS = 500, 64


def thin(x: Array, keep: Sequence[Array], buckets: int) -> list[int]:
    """Rows that draw the same: of each stretch of x (sorted) the lowest and highest of every column to keep."""
    edges = np.linspace(x[0], x[-1], buckets + 1)
    bucket = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, buckets - 1)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    kept = {0, len(x) - 1}
    for begin, end in itertools.pairwise([*map(int, starts), len(x)]):
        for y in keep:
            part = y[begin:end]
            if np.isfinite(part).any():
                kept |= {begin + int(np.nanargmin(part)), begin + int(np.nanargmax(part))}
    return sorted(kept)


class Rows:
    """Records of one kind as rows of what they say, None where they say nothing."""

    def __init__(self, keys: tuple[str, ...], limit: int | None) -> None:
        self.keys, self.limit = (*AXES, *keys), limit
        self.rows: list[tuple[Any, ...]] = []
        self._rest = keys

    def before(self, step: float) -> tuple[Any, ...]:
        """The row before a step; a resume tells steps again, and the newer word counts."""
        while self.rows and self.rows[-1][0] >= step:
            self.rows.pop()
        return self.rows[-1] if self.rows else (0, 0, 0, 0.0)

    def add(self, record: Mapping[str, Any], hours: float) -> None:
        get = record.get
        self.rows.append(
            (record["step"], get("tokens"), get("flops"), hours, *map(get, self._rest))
        )
        if self.limit is not None and len(self.rows) > SLACK * self.limit:
            self.settle()

    def settle(self) -> None:
        """Down to the limit, where there is one."""
        if self.limit is not None and len(self.rows) > self.limit:
            self.rows = [self.rows[i] for i in self._thinned(self.limit, log=True)]

    def column(self, key: str) -> Array:
        at = self.keys.index(key)
        return np.array([number(row[at]) for row in self.rows])

    def columns(self, keys: Sequence[str], limit: int, *, log: bool) -> dict[str, list[float]]:
        """For drawing: at most about `limit` rows."""
        chosen = self._thinned(limit, log=log) if len(self.rows) > limit else range(len(self.rows))
        places = [self.keys.index(key) for key in keys]
        return {
            k: [short(number(self.rows[i][p])) for i in chosen]
            for k, p in zip(keys, places, strict=True)
        }

    def _thinned(self, limit: int, *, log: bool) -> list[int]:
        x = self.column("step")
        extremes = [self.column(key) for key in ("loss", "grad_norm") if key in self.keys]
        return thin(
            np.log(np.maximum(x, 1)) if log else x, extremes, max(1, limit // (2 * len(extremes)))
        )


@dataclass
class Folded:
    """What a run has logged so far; with a limit its memory is bounded however long the run is."""

    limit: int | None = None
    world: int = 1
    hours: float = 0.0  # device-hours spent training, evaluation and waiting left out
    events: list[Record] = field(default_factory=list)
    loads: list[Record] = field(default_factory=list)  # MoE: share of tokens by layer and expert
    hashes: list[tuple[int, str]] = field(
        default_factory=list
    )  # of each step's tokens, where nothing is thinned

    def __post_init__(self) -> None:
        self.steps, self.evals = Rows(STEP, self.limit), Rows(EVAL, self.limit)

    def add(self, record: Record) -> None:
        if not math.isfinite(step := number(record.get("step"))):
            return  # none of ours
        match record.get("kind"):
            case "step":
                _, tokens, _, hours, *_ = self.steps.before(step)
                trained, speed = (
                    number(record.get("tokens")) - number(tokens),
                    number(record.get("tokens_per_s")),
                )
                self.hours = hours + (
                    trained / speed / 3600 * self.world if trained > 0 and speed > 0 else 0
                )
                self.steps.add(record, self.hours)
                if self.limit is None and isinstance(record.get("hash"), str | float):
                    self.hashes.append((int(step), token_hash(record["hash"])))
            case "eval":
                self.evals.before(step)
                self.evals.add(record, self.hours)
            case "moe":
                self.loads.append(record)
                if len(self.loads) > 2 * MOST_LOADS:
                    self.loads = [*self.loads[:-1:2], self.loads[-1]]
            case "event" if isinstance(record.get("event"), str):
                self.world = int(record.get("world") or self.world)
                told = record.get("event") in STATUS  # what the run is doing is never left out
                if told or (record.get("event") != "save" and len(self.events) < MOST_EVENTS):
                    self.events.append(record)

    def spikes(self) -> list[dict[str, float]]:
        """Steps whose loss stands far above the window before them, where every step is here."""
        loss, step = self.steps.column("loss"), self.steps.column("step")
        if len(loss) <= WINDOW or self.limit is not None:
            return []
        before = np.lib.stride_tricks.sliding_window_view(loss[:-1], WINDOW)
        mean, spread = before.mean(axis=1), before.std(axis=1)
        at = WINDOW + np.flatnonzero(loss[WINDOW:] > mean + SIGMAS * spread)
        return [{"step": float(step[i]), "loss": float(loss[i])} for i in at[:MOST_EVENTS]]

    def tokens(self, most: int = 512) -> dict[str, list[Any]]:
        """Hashes at every 2^k-th step: two runs share such steps whatever their lengths."""
        stride = 1
        while sum(step % stride == 0 for step, _ in self.hashes) > most:
            stride *= 2
        chosen = [(step, text) for step, text in self.hashes if step % stride == 0]
        return {"step": [step for step, _ in chosen], "hash": [text for _, text in chosen]}


def token_hash(value: str | float) -> str:
    """The first 52 bits: what MLflow, which keeps numbers alone, can hold exactly."""
    return value[:13] if isinstance(value, str) else f"{int(value):013x}"


def number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def short(value: float) -> float:
    """Six digits: more than a screen shows, half the bytes."""
    return float(f"{value:.6g}")
