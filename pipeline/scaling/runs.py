"""Read run directories: what each run is (run.json) and what it has logged so far (log.jsonl)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import DataError, RunError
from pipeline.scaling.points import Array, Points, clean

VERSION = 1
STALE_S = 600.0  # a run that has said nothing for ten minutes is not shown as running
END = {"finish": "finished", "interrupt": "interrupted", "fail": "failed"}
Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run: its record and its log, read as far as it goes."""

    path: Path
    record: Record
    steps: tuple[Record, ...]
    evals: tuple[Record, ...]
    events: tuple[Record, ...]

    @property
    def name(self) -> str:
        return str(self.record["name"])

    @property
    def N(self) -> float:  # noqa: N802  the law's own letter
        """Parameters without the input embedding, with the head (arXiv 2406.19146)."""
        return float(self.record["params"]["scaling"])

    @property
    def last(self) -> Record:
        """The newest figures of any kind."""
        logged = (*self.steps[-1:], *self.evals[-1:])
        return max(
            logged, key=lambda r: int(r["step"]), default={"step": 0, "tokens": 0, "flops": 0.0}
        )

    def status(self, now: float) -> str:
        """finished, interrupted, failed, running or stale."""
        told = [
            END.get(e["event"], "")
            for e in self.events
            if e["event"] in (*END, "start", "resume", "restart")
        ]
        if told and told[-1]:
            return told[-1]
        newest = (*self.steps[-1:], *self.evals[-1:], *self.events[-1:])
        heard = max((float(record.get("time", 0)) for record in newest), default=0.0)
        return "running" if now - heard < STALE_S else "stale"

    @property
    def finished(self) -> bool:
        return self.status(now=0.0) == "finished"


def read_record(path: Path) -> Record:
    """What the run is: run.json, of a version and with the keys that everything here reads."""
    try:
        record = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(
            f"run={path}: run.json cannot be read ({error.strerror}); is this a run directory?"
        ) from None
    except ValueError:
        raise RunError(
            f"run={path}: run.json is not JSON; copy it again or train the run again"
        ) from None
    if not isinstance(record, dict) or record.get("version") != VERSION:
        found = record.get("version") if isinstance(record, dict) else None
        raise RunError(
            f"{path}/run.json: version={found!r}, this release reads {VERSION}; use the one that wrote it"
        )
    for key in ("name", "params", "convention", "tokenizer"):
        if key not in record:
            raise RunError(
                f"{path}/run.json: {key} is missing; train the run again with this release"
            )
    return record


def read_run(path: Path) -> Run:
    """One run directory; records past a resume replace what they repeat, a torn last line is left out."""
    record = read_record(path)
    kinds: dict[str, dict[int, Record]] = {"step": {}, "eval": {}}
    events: list[Record] = []
    log = path / "log.jsonl"
    lines = log.read_bytes().split(b"\n") if log.exists() else []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            kind, step = entry["kind"], int(entry["step"])
        except (ValueError, KeyError, TypeError):
            if number == len(lines):
                continue  # the run was cut off while writing it
            raise RunError(
                f"{log}:{number} is not a log record; move the file away and resume the run"
            ) from None
        if kind == "event":
            events.append(entry)
        elif kind in kinds:
            kinds[kind][step] = entry
    steps, evals = (tuple(kinds[kind][s] for s in sorted(kinds[kind])) for kind in ("step", "eval"))
    return Run(path, record, steps, evals, tuple(events))


def run_paths(root: Path) -> list[Path]:
    """Every run directory in `root`, itself included."""
    return [
        file.parent
        for pattern in ("run.json", "*/run.json", "*/*/run.json")
        for file in root.glob(pattern)
    ]


def read_runs(root: Path) -> list[Run]:
    """Every run in `root`, itself included, by size and then name."""
    if not root.is_dir():
        raise RunError(
            f"runs={root} is not a directory; give one that holds runs, such as runs/demo"
        )
    found = run_paths(root)
    if not found:
        raise RunError(
            f"runs={root} holds no run (no run.json below it); train one with `launch pretrain`"
        )
    return sorted((read_run(path) for path in found), key=lambda run: (run.N, run.name))


def points_of(runs: Sequence[Run], *, curves: bool = False) -> Points:
    """A finished run's final held-out loss is a point; earlier ones were not annealed and are only `curves`."""
    dropped: list[str] = []
    used: list[tuple[Run, Record]] = []
    for run in runs:
        if curves:
            used += [(run, entry) for entry in run.evals if entry.get("loss") is not None]
        elif not run.finished:
            dropped.append(
                f"{run.name}: not finished (step {run.last['step']} of {run.record.get('steps', '?')})"
            )
        elif not run.evals:
            dropped.append(f"{run.name}: finished without a held-out loss")
        else:
            used.append((run, run.evals[-1]))
    if not used:
        lacking = "logged a held-out loss; set train.eval_every and train again"
        finishing = "finished with a held-out loss; let them finish, then fit"
        raise DataError(f"none of {len(runs)} runs has {lacking if curves else finishing}")
    for key, remedy in (
        ("convention", "recount them alike"),
        ("tokenizer", "nats per token compare within one vocabulary only; fit each apart"),
        ("arch", "a law describes one architecture; put each in a directory of its own"),
    ):
        kinds = sorted({str(run.record.get(key)) for run, _ in used})
        if len(kinds) > 1:
            raise DataError(
                f"{key}={', '.join(kinds)}: the runs mix {len(kinds)} of them; {remedy}"
            )
    corpora = len({run.record.get("data") for run, _ in used})
    mixed = (
        f"The runs were held out on {corpora} different corpora: their losses compare only roughly."
    )

    def figures(key: str) -> Array:
        return np.array(
            [entry.get(key) for _, entry in used], dtype=float
        )  # not a number where it was not finite

    return clean(
        Points(
            N=np.array([run.N for run, _ in used]), D=figures("tokens"), C=figures("flops"), loss=figures("loss"),
            run=tuple(run.name for run, _ in used), convention=str(used[0][0].record["convention"]),
            dropped=tuple(dropped), warnings=() if corpora == 1 else (mixed,),
        )
    )  # fmt: skip
