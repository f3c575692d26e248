"""Run the missing runs of a sweep on this machine, and publish the results."""

import contextlib
import csv
import io
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from pipeline.atomic import replace
from pipeline.errors import ConfigError, DataError, RunError
from pipeline.process import SIGNALS, end_with_parent, python_module
from pipeline.runs.directory import RunDir
from pipeline.runs.history import Run, read_run, read_runs
from pipeline.runs.log import last_records
from pipeline.scaling.points import points_of
from pipeline.scaling.study import RESAMPLES, study
from pipeline.sweep.grid import Planned, Sweep
from pipeline.track.mlflow_runs import FORECASTS, SWEEP_FILE, keep, read_sweep
from pipeline.units import finite

POLL_S = 0.3
COUNTS = ("total", "active", "non_embedding")  # the other ways to count N, in points.csv


@dataclass(frozen=True)
class Member:
    """One run of a sweep as a command, which is the same on this machine and on a cluster."""

    name: str
    argv: tuple[str, ...]  # of `launch`; with --resume, it starts, continues or keeps a run
    out: Path
    steps: int
    after: str | None = None  # its trunk: the member that must finish first

    @property
    def finished(self) -> bool:
        return (self.out / "run.json").exists() and read_run(self.out).finished

    @property
    def step(self) -> int:
        """The last step in its log."""
        try:
            records = last_records(RunDir(self.out).log)
        except RunError:
            return 0
        return int(records[-1]["step"]) if records else 0


def members(sweep: Sweep, runs: Sequence[Planned], root: Path) -> list[Member]:
    """Return every run as a command that contains all planned values."""
    if sweep.data is None:
        raise ConfigError(
            "data is missing in the sweep; give --data DIR, made by `launch data prepare`"
        )
    found = []
    for run in runs:
        out = root / run.name
        argv = ["pretrain", "--size", run.size, "--arch", sweep.arch, "--data", sweep.data]
        argv += ["--out", str(out), "--experiment", sweep.experiment]
        argv += ["--nproc", str(sweep.nproc), "--steps", str(run.steps), "--resume"]
        if sweep.cluster:
            argv += ["--cluster", sweep.cluster]
        if run.trunk:
            argv += ["--branch", str(root / run.trunk)]
        sets = [
            *sweep.set,
            f"optim.lr={run.lr}",
            f"optim.schedule.warmup_steps={run.warmup_steps}",
            f"train.batch_tokens={run.batch_tokens}",
        ]
        # The trunk keeps a checkpoint at each step where a shorter run branches off.
        branches = sorted(other.begins for other in runs if other.trunk == run.name)
        if branches:
            sets.append(f"train.keep_at={branches}")
        for text in sets:
            argv += ["--set", text]
        found.append(Member(run.name, tuple(argv), out, run.steps, run.trunk))
    return found


@dataclass
class Progress:
    """The state of a sweep, for display."""

    waiting: list[Member]
    running: dict[str, Member] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # name → reason, one line
    stopping: bool = False


@contextlib.contextmanager
def claimed(root: Path, sweep: Sweep) -> Iterator[None]:
    """Lock a sweep's directory and write sweep.json.

    Two sweeps in one directory would start the same runs, and each would report those of the other
    as failed. sweep.json also makes the runs beside it children of one parent in MLflow.
    """
    held = RunDir(root).lock(".sweep")
    try:
        text = sweep.model_dump_json(indent=1, exclude_none=True)
        replace(root / SWEEP_FILE, text.encode() + b"\n")
        yield
    finally:
        held.release()


def run(
    todo: Sequence[Member],
    jobs: int,
    show: Callable[[Progress], None],
    *,
    track: bool = True,
) -> Progress:
    """Run every member, `jobs` at a time.

    A member that fails is reported, and the others continue. After Ctrl-C or SIGTERM the running
    members save; call `run` again to continue them. `show` is called at every poll.
    """
    state = Progress(list(todo))
    known = {member.name for member in todo}
    processes: dict[str, tuple[subprocess.Popen[bytes], IO[str]]] = {}  # with their output

    received: list[int] = []

    def stop(number: int, _frame: object) -> None:
        # The loop forwards the signal, so that a member that is just being started gets it too.
        state.stopping = True
        received.append(number)

    old = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        while processes or (state.waiting and not state.stopping):
            while len(processes) < jobs and not state.stopping:
                member = _next(state, known)
                if member is None:
                    break
                processes[member.name] = _start(member, jobs, track)
                state.running[member.name] = member
            show(state)
            time.sleep(POLL_S if processes else 0)
            while received:
                number = received.pop(0)
                for process, _ in processes.values():  # a second signal makes them end at once
                    process.send_signal(number)
            for name, (process, _) in list(processes.items()):
                if process.poll() is not None:
                    _end(state, state.running.pop(name), *processes.pop(name))
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    show(state)
    return state


def _next(state: Progress, known: set[str]) -> Member | None:
    """Return the next member whose trunk has finished; if its trunk failed, it fails too."""
    for member in list(state.waiting):
        if member.after in state.failed:
            state.waiting.remove(member)
            state.failed[member.name] = f"branches off {member.after}, which failed"
        # A trunk that is not in this call finished in an earlier one.
        elif member.after is None or member.after in state.finished or member.after not in known:
            state.waiting.remove(member)
            return member
    return None


def _start(member: Member, jobs: int, track: bool) -> tuple[subprocess.Popen[bytes], IO[str]]:
    """Start a member; return its process and a file with its errors and warnings.

    A pipe would block a member that fills it, because we read only at the end."""
    nproc = int(member.argv[member.argv.index("--nproc") + 1])
    # Several runs share this machine's cores; by default torch uses all of them in each.
    threads = max(1, (os.cpu_count() or 1) // (jobs * nproc))
    argv = [*member.argv, "--quiet"]
    if not track:
        argv.append("--no-track")
    errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed by `_end`)
    process = subprocess.Popen(
        python_module("launch", *argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        env={"OMP_NUM_THREADS": str(threads), **os.environ},  # the user's own value has priority
        start_new_session=True,  # Ctrl-C reaches it through `run`, once
        preexec_fn=end_with_parent,
    )
    return process, errors


def _end(
    state: Progress, member: Member, process: subprocess.Popen[bytes], errors: IO[str]
) -> None:
    with errors:
        errors.seek(0)
        # A command that fails prints its reason as its last line.
        printed = [line for line in errors if line.strip()]
    if process.returncode == 0 and member.finished:
        state.finished.append(member.name)
    elif state.stopping:  # it has saved; the next call continues it
        state.waiting.insert(0, member)
    else:
        reason = f"exit code {process.returncode} without a reason; see {member.out}/logs"
        if printed:
            reason = printed[-1].strip().removeprefix("error: ")
        state.failed[member.name] = reason


# The results of a sweep, which depend only on its run directories


def write(root: Path) -> list[Path]:
    """Write points.csv and fit.json."""
    runs = read_runs(root)
    try:
        fitted = study(points_of(runs), resamples=RESAMPLES).to_json()
    except DataError as error:
        fitted = {"law": None, "warnings": [f"No law yet: {error}"]}
    text = json.dumps(finite(fitted), indent=1, ensure_ascii=False)
    replace(root / "fit.json", text.encode() + b"\n")
    _write_points(root / "points.csv", runs)
    return [root / "points.csv", root / "fit.json"]


def publish(root: Path, files: Sequence[Path]) -> str | None:
    """Update the sweep's parent run in MLflow; return a line to print if that fails."""
    about = read_sweep(root)
    forecasts = sorted((root / FORECASTS).glob("*.json"))
    return keep(str(about["experiment"]), [root / SWEEP_FILE, *files], forecasts, sweep=about)


def _write_points(path: Path, runs: Sequence[Run]) -> None:
    """Write a row per finished run, as `launch fit --points` reads it, with other counts of N."""
    text = io.StringIO(newline="")
    rows = csv.writer(text)
    rows.writerow(["run", "N", "D", "C", "loss", *COUNTS, "vocab", "convention"])
    for run in runs:
        last = run.final
        if last is not None:
            record = run.record
            figures = [run.name, run.N, *(last.get(key) for key in ("tokens", "flops", "loss"))]
            counts = [record["params"].get(key) for key in COUNTS]
            # `vocab` identifies the tokenizer: losses are comparable only with the same one.
            rows.writerow([*figures, *counts, record["tokenizer"], record["convention"]])
    replace(path, text.getvalue().encode())
