"""The history of a run: its facts (run.json), its environment (env.json) and its log.

The status and the goodput of a run follow from its log.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from importlib.metadata import distributions
from pathlib import Path

from pipeline.atomic import locked, read_regular, replace
from pipeline.config.dump import dotted
from pipeline.config.layers import read_toml
from pipeline.errors import ConfigError, RunError
from pipeline.runs.log import FILE, Record, printable, read

RUN_FILE = "run.json"
ENVIRONMENT_FILE = "env.json"
HOST_FILE = "host"
VERSION = 1
STALE_S = 600.0  # a run that has logged nothing for ten minutes is not shown as running
# Keys of a record that config.toml has, and run.json does not.
RECIPE_KEYS = {"recipe": "recipe", "optimizer": "optim.optimizer.kind"}
SEARCH_DEPTH = 4  # runs/EXPERIMENT/NAME, seen from one directory above runs/
# The events that change what a run is doing. Others, such as "save", leave its status alone.
PHASES = {
    "start": "running",
    "resume": "running",
    "restart": "running",
    "finish": "finished",
    "interrupt": "interrupted",
    "fail": "failed",
}


def status_of(records: Sequence[Record], now: float, path: Path | None = None) -> str:
    """Return "new", "running", "stale", "finished", "interrupted" or "failed".

    `records` may be the last part of a log. With the `path` of its directory, a run that looks
    alive but whose processes are gone has failed.
    """
    status = "running"  # also when the event is older than the part of the log we have
    newest = 0.0  # seconds since the epoch
    for record in records:
        status = PHASES.get(record.get("event", ""), status)
        newest = max(newest, record.get("time") or 0.0)
    if status != "running":
        return status
    if path is not None and _died(path):
        return "failed"
    if not records:
        return "new"
    return "running" if now - newest < STALE_S else "stale"


def _died(path: Path) -> bool:
    """Whether the run was started on this machine and neither its launcher nor rank 0 lives."""
    # Runs of older releases have no `host`, and other users' may not be readable.
    with suppress(OSError):
        if read_regular(path / HOST_FILE) == platform.node().encode():
            with locked(path / ".launch") as ended:
                if ended:
                    with locked(path / ".lock") as free:
                        return free
    return False


@dataclass(frozen=True)
class Run:
    """One run: its run.json and its log, as far as it goes."""

    path: Path
    record: Record
    steps: tuple[Record, ...]
    evals: tuple[Record, ...]
    events: tuple[Record, ...]

    @property
    def name(self) -> str:
        return str(self.record["name"])

    @property
    def N(self) -> float:  # noqa: N802  the letter that scaling laws use
        """Parameters without the input embedding, with the head (arXiv 2406.19146)."""
        return float(self.record["params"]["scaling"])

    @property
    def last(self) -> Record:
        """The newest step or evaluation."""
        logged = (*self.steps[-1:], *self.evals[-1:])
        nothing = {"step": 0, "tokens": 0, "flops": 0.0}
        return max(logged, key=lambda record: int(record["step"]), default=nothing)

    def status(self, now: float, path: Path | None = None) -> str:
        # Order does not matter: only events decide, and of the others only the newest time.
        return status_of([*self.steps[-1:], *self.evals[-1:], *self.events], now, path)

    @property
    def final(self) -> Record | None:
        """The evaluation after the last step; None if the run has not finished, or the log lacks
        it or is that of another run."""
        if not (self.finished and self.evals):
            return None
        last = self.evals[-1]
        steps = self.record.get("steps") or 0
        tokens = steps * (self.record.get("batch_tokens") or 0)
        of_another = tokens > 0 and abs((last.get("tokens") or tokens) / tokens - 1) > 0.01
        return None if last["step"] < steps or of_another else last

    @property
    def finished(self) -> bool:
        return self.status(now=0.0) == "finished"  # `now` only distinguishes running from stale


def read_json(path: Path) -> Record:
    """Return the object in a small JSON file of a run directory."""
    try:
        found = json.loads(read_regular(path))
    except OSError as error:
        raise RunError(
            f"{printable(path)} cannot be read ({error.strerror}); is this a run directory?"
        ) from None
    except (ValueError, RecursionError):  # the latter for a file that is nested too deeply
        found = None
    if not isinstance(found, dict):
        raise RunError(f"{printable(path)} is not a JSON object; restore it or train the run again")
    return found


def read_record(path: Path) -> Record:
    """Return run.json, checked: its version, and the types of the keys that readers use."""
    file = path / RUN_FILE
    record = read_json(file)
    version = record.get("version")
    if version != VERSION:
        text = f"{printable(file)}: version={version!r}, this release reads {VERSION}"
        raise RunError(f"{text}; use the release that wrote it")
    params = record.get("params")
    valid = {"params.scaling": isinstance(params, dict) and _positive(params.get("scaling"))}
    for key in ("name", "convention", "tokenizer"):
        valid[key] = isinstance(record.get(key), str)
    for key in ("experiment", "size", "arch", "objective", "data"):
        valid[key] = isinstance(record.get(key), str | None)
    whole = ("steps", "world")
    for key in (*whole, "bytes_per_token", "batch_tokens", "flops_per_token", "vocab", "seq"):
        valid[key] = record.get(key) is None or _positive(record[key])
    for key in whole:
        valid[key] = valid[key] and isinstance(record.get(key), int | None)
    for key, is_valid in valid.items():
        if not is_valid:
            text = f"{printable(file)}: {key} is missing or invalid"
            raise RunError(f"{text}; restore the file or train the run again")
    # Unknown without a config; MLflow has both among the params.
    with suppress(ConfigError):
        config = dict(dotted(read_toml(path / "config.toml")))
        record |= {key: str(config[name]) for key, name in RECIPE_KEYS.items() if name in config}
    return record


def _positive(value: object) -> bool:
    # Not isinstance: True is an int. Larger numbers overflow a double in some calculation.
    return type(value) in (int, float) and 0 < value < 1e300  # type: ignore[operator]


def read_run(path: Path) -> Run:
    """Read one run directory. Steps logged again after a resume replace the earlier ones."""
    record = read_record(path)
    steps: dict[int, Record] = {}
    evals: dict[int, Record] = {}
    events: list[Record] = []
    for entry in read(path / FILE):
        match entry["kind"]:
            case "step":
                steps[entry["step"]] = entry
            case "eval":
                evals[entry["step"]] = entry
            case "event":
                events.append(entry)
    return Run(path, record, _by_step(steps), _by_step(evals), tuple(events))


def _by_step(records: dict[int, Record]) -> tuple[Record, ...]:
    return tuple(records[step] for step in sorted(records))


def is_run(path: Path) -> bool:
    """Whether a directory has a run.json, readable or not."""
    return os.path.lexists(path / RUN_FILE)


def find_runs(root: Path, depth: int = SEARCH_DEPTH) -> list[Path]:
    """Return every run directory in `root`, `root` included, in order.

    Directories that disappear or cannot be opened meanwhile are skipped.
    """
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    except OSError:
        return []
    found = [root] if any(entry.name == RUN_FILE for entry in entries) else []
    # os.path.isdir follows links: a run directory may be a link to another disk.
    for entry in entries if depth else ():
        if entry.name not in ("checkpoints", "logs") and os.path.isdir(entry):  # noqa: PTH112
            found += find_runs(root / entry.name, depth - 1)
    return found


def read_runs(root: Path) -> list[Run]:
    """Read every run in `root`, `root` included, sorted by size and then name."""
    if not root.is_dir():
        remedy = "give one with runs in it; `make demo` makes runs/demo"
        raise RunError(f"runs={root} is not a directory; {remedy}")
    runs = []
    for path in find_runs(root):
        try:
            runs.append(read_run(path))
        except RunError:
            if is_run(path):  # otherwise it was deleted after it was found
                raise
    if not runs:
        raise RunError(
            f"runs={root} contains no run (no run.json below it); train one with `launch pretrain`"
        )
    return sorted(runs, key=lambda run: (run.N, run.name))


def startup_cost(before: list[Record], start: int, *, failed: bool) -> dict[str, float]:
    """Return the seconds that an attempt starting at step `start` has cost before its first step.

    `before` is everything logged by earlier attempts. `start_s` is the time since the last record
    of an attempt that failed, or else since this process started. `replay_s` is the work past the
    checkpoint, which has to be done again.
    """
    import psutil  # only ranks need it, and it costs every command 20 ms

    now = time.time()
    kept = [record for record in before if record["step"] <= start]
    start_s = now - psutil.Process().create_time()
    replay_s = 0.0
    if failed and before:
        start_s = max(0.0, now - before[-1]["time"])  # a clock may be set back
    if kept and (failed or kept != before):
        replay_s = max(0.0, before[-1]["time"] - reduce(_accounted_until, kept, 0.0))
    return {"start_s": start_s, "replay_s": replay_s}


def goodput(records: Iterable[Record]) -> dict[str, float]:
    """Return the share of a run's time that went into steps it kept, and the seconds lost by cause.

    The time between a requested stop and the resume does not count.
    """
    wall_s = 0.0
    last = 0.0  # up to when time is accounted for
    lost = dict.fromkeys(("start_s", "replay_s", "checkpoint_s", "wait_s", "skipped_s"), 0.0)
    for record in records:
        event = record.get("event")
        until = _accounted_until(last, record)
        if event in ("start", "resume", "restart", "rollback"):
            # Of the pause before a start, only these two parts count.
            for key in ("start_s", "replay_s"):
                lost[key] += record.get(key) or 0.0
                wall_s += record.get(key) or 0.0
        else:
            wall_s += max(0.0, until - last)  # a clock may be set back
        last = until
        if event == "save":
            lost["checkpoint_s"] += _blocked_s(record)
        elif event == "skip":
            lost["skipped_s"] += record.get("seconds") or 0.0
        elif record["kind"] == "step":
            lost["wait_s"] += record.get("wait_s") or 0.0
    share = 1 - sum(lost.values()) / wall_s if wall_s else 1.0
    return {"goodput": share, "wall_s": wall_s, **lost}


def _accounted_until(until: float, record: Record) -> float:
    """Return up to when time is accounted for after one more record.

    A save is logged when it is committed, after later steps. Only the time that training waited
    for it counts.
    """
    time_s = float(record["time"])
    if record.get("event") == "save":
        return min(until + _blocked_s(record), time_s)
    return time_s


def _blocked_s(save: Record) -> float:
    return float(save.get("blocked_s", save.get("seconds")) or 0.0)


def remaining_s(steps: Sequence[Record], total: int, now: float | None = None) -> float | None:
    """Return the seconds from `now`, or the last step, to step `total` at the pace of `steps`."""
    if len(steps) < 2:
        return None
    first = steps[0]
    last = steps[-1]
    took_s = last["time"] - first["time"]
    done = last["step"] - first["step"]
    if done <= 0 or took_s <= 0:  # the run went back to a checkpoint, or the clock was set back
        return None
    since_s = 0.0 if now is None else now - last["time"]
    return float(max(0.0, took_s / done * (total - last["step"]) - since_s))


def write_environment(run_dir: Path) -> None:
    """Write env.json. It has no environment variables, which may hold secrets."""
    packages = {d.metadata["Name"]: d.version for d in distributions() if d.metadata["Name"]}
    here = hasattr(os, "sched_getaffinity")  # on Linux: the processors this process may use
    gpus = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    environment = {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "machine": platform.machine(),
        "host": platform.node(),
        "cpus": len(os.sched_getaffinity(0)) if here else os.cpu_count(),
        "devices": _output("nvidia-smi", *gpus).splitlines(),
        "commit": _commit(),
        "torch": packages.get("torch"),
        "packages": packages,
    }
    content = json.dumps(environment, indent=1, sort_keys=True).encode() + b"\n"
    replace(run_dir / ENVIRONMENT_FILE, content)


def _commit() -> str | None:
    """Return the commit of the checkout, with `-dirty` if edited; None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    describe = ("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return _output("git", "-C", str(root), *describe) or None


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
