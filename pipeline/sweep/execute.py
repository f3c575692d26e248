"""Run what is missing of a sweep on this machine, and publish its results."""

import contextlib
import csv
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.atomic import replace
from pipeline.errors import ConfigError, DataError, RunError
from pipeline.process import end_with_parent, python_module
from pipeline.runs.directory import RunDir
from pipeline.runs.history import Run, read_run, read_runs
from pipeline.runs.log import last_records
from pipeline.scaling.points import points_of
from pipeline.scaling.study import study
from pipeline.sweep.grid import Planned, Sweep
from pipeline.track.mlflow_runs import FORECASTS, SWEEP_FILE, keep, read_sweep
from pipeline.units import finite

POLL_S = 0.3


@dataclass(frozen=True)
class Member:
    """One run of a sweep as a command; whoever starts it, here or on a cluster, it is the same one."""

    name: str
    argv: tuple[
        str, ...
    ]  # of `launch`; --resume is among them, so the same command begins, continues and passes over
    out: Path
    steps: int
    after: str | None = None  # the member that must have finished first

    @property
    def finished(self) -> bool:
        return (self.out / "run.json").exists() and read_run(self.out).finished

    @property
    def step(self) -> int:
        """How far it has got, from the end of its log."""
        try:
            records = last_records(RunDir(self.out).log)
        except RunError:
            return 0
        return int(records[-1]["step"]) if records else 0


def members(sweep: Sweep, runs: Sequence[Planned], root: Path) -> list[Member]:
    """Every run with what was planned for it spelled out: its recipe must not depend on where it is started."""
    if sweep.data is None:
        raise ConfigError(
            "data is missing in the sweep; give --data DIR, made by `launch data prepare`"
        )
    found = []
    for run in runs:
        sets = (
            *sweep.set, f"optim.lr={run.lr}", f"optim.schedule.warmup_steps={run.warmup_steps}",
            f"train.batch_tokens={run.batch_tokens}",
        )  # fmt: skip
        if branches := [other.begins for other in runs if other.trunk == run.name]:
            sets = (*sets, f"train.keep_at={sorted(branches)}")
        out = root / run.name
        argv = [
            "pretrain", "--size", run.size, "--arch", sweep.arch, "--data", sweep.data, "--out", str(out),
            "--experiment", sweep.experiment, "--nproc", str(sweep.nproc), "--steps", str(run.steps), "--resume",
            *(["--cluster", sweep.cluster] if sweep.cluster else []),
            *(["--branch", str(root / run.trunk)] if run.trunk else []), *(part for s in sets for part in ("--set", s)),
        ]  # fmt: skip
        found.append(Member(run.name, tuple(argv), out, run.steps, run.trunk))
    return found


@dataclass
class Progress:
    """Where a sweep stands, for whoever shows it."""

    waiting: list[Member]
    running: dict[str, Member] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # name → one line
    stopping: bool = False


def run(
    todo: Sequence[Member],
    jobs: int,
    show: Callable[[Progress], None],
    *,
    track: bool = True,
    poll_s: float = POLL_S,
) -> Progress:
    """Every member in its turn, `jobs` at a time. One that fails is told of and the others go on; Ctrl-C or SIGTERM
    lets the running ones save, and the same call continues them. `show` is called whenever something may have changed.
    """
    at = Progress(list(todo))
    known = {member.name for member in todo}
    processes: dict[str, subprocess.Popen[str]] = {}

    def stop(number: int, _frame: object) -> None:
        at.stopping = True
        for (
            process
        ) in processes.values():  # a second wish reaches them as a second one: they end at once
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    old = {
        number: signal.signal(number, stop)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    }
    try:
        while processes or (at.waiting and not at.stopping):
            while (
                len(processes) < jobs
                and not at.stopping
                and (member := _next(at, known)) is not None
            ):
                processes[member.name] = _start(member, jobs, track)
                at.running[member.name] = member
            show(at)
            time.sleep(poll_s if processes else 0)
            for name, process in list(processes.items()):
                if process.poll() is not None:
                    _end(at, at.running.pop(name), processes.pop(name))
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    show(at)
    return at


def _next(at: Progress, known: set[str]) -> Member | None:
    """The next member whose beginning is there; one whose beginning has failed fails with it."""
    for member in list(at.waiting):
        if member.after in at.failed:
            at.waiting.remove(member)
            at.failed[member.name] = f"begins where {member.after} stands, which failed"
        elif member.after is None or member.after in at.finished or member.after not in known:
            at.waiting.remove(member)
            return member
    return None


def _start(member: Member, jobs: int, track: bool) -> subprocess.Popen[str]:
    nproc = int(member.argv[member.argv.index("--nproc") + 1])
    threads = max(1, (os.cpu_count() or 1) // (jobs * nproc))
    return subprocess.Popen(
        python_module("launch", *member.argv, "--quiet", *([] if track else ["--no-track"])),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={"OMP_NUM_THREADS": str(threads), **os.environ},
        start_new_session=True,  # Ctrl-C is ours to hand on, once
        preexec_fn=end_with_parent,
    )  # fmt: skip


def _end(at: Progress, member: Member, process: subprocess.Popen[str]) -> None:
    said = [line for line in process.communicate()[1].splitlines() if line.strip()]
    if process.returncode == 0 and member.finished:
        at.finished.append(member.name)
    elif at.stopping:
        at.waiting.insert(0, member)
    else:
        reason = (
            said[-1]
            if said
            else f"ended with code {process.returncode} and no reason; see {member.out}/logs"
        )
        at.failed[member.name] = reason.removeprefix("error: ")


COUNTS = ("total", "active", "non_embedding")


def write(root: Path) -> list[Path]:
    """points.csv and fit.json."""
    runs = read_runs(root)
    try:
        fitted = study(points_of(runs), resamples=1000).to_json()
    except DataError as error:
        fitted = {"law": None, "warnings": [f"No law yet: {error}"]}
    _points(root / "points.csv", runs)
    replace(
        root / "fit.json", json.dumps(finite(fitted), indent=1, ensure_ascii=False).encode() + b"\n"
    )
    return [root / name for name in ("points.csv", "fit.json")]


def publish(root: Path, files: Sequence[Path]) -> str | None:
    """Bring the parent run up to date; a line to show where MLflow did not take it."""
    about = read_sweep(root)
    forecasts = sorted((root / FORECASTS).glob("*.json"))
    return keep(str(about["experiment"]), [root / SWEEP_FILE, *files], forecasts, sweep=about)


def record(root: Path, sweep: Sweep) -> None:
    """sweep.json: what was asked for, and the mark by which runs beside it become children of one parent."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        replace(
            root / SWEEP_FILE,
            sweep.model_dump_json(indent=1, exclude_none=True).encode() + b"\n",
        )
    except OSError as error:
        raise RunError(
            f"--out {root} cannot be written: {error.strerror}; choose another directory"
        ) from None


def _points(path: Path, runs: Sequence[Run]) -> None:
    """A row for each finished run: what `launch fit --points` reads, and each way to count N."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["run", "N", "D", "C", "loss", *COUNTS, "vocab", "convention"])
        for run in runs:
            if run.finished and run.evals:
                last, record = run.evals[-1], run.record
                figures = [run.name, run.N, last["tokens"], last["flops"], last["loss"]]
                counts = [record["params"].get(key) for key in COUNTS]
                rows.writerow([*figures, *counts, record["tokenizer"], record["convention"]])
