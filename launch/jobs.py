"""Look after runs: `launch status`, `logs` and `cancel`, and `launch sync` for MLflow."""

import json
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from typer import Argument, Option

from launch.options import Quiet, examples
from pipeline.errors import RunError

JsonLines = Annotated[bool, Option("--json", help="One JSON object per run.")]
RunArgument = Annotated[Path, Argument(metavar="RUN", help="A run directory.")]


app = typer.Typer()


@app.command(epilog=examples("launch status", "launch status runs/1b --json"))
def status(
    paths: Annotated[
        list[Path] | None, Argument(metavar="[RUN…]", help="Runs, or directories of runs.")
    ] = None,
    as_json: JsonLines = False,
) -> None:
    """Print the queue state, step, loss, ETA and restarts of every run."""
    from pipeline.slurm.queue import statuses
    from pipeline.units import span

    rows = statuses(paths or [Path("runs")])
    if as_json:
        for row in rows:
            # JSON lines, which `jq` and `grep` read one run at a time.
            print(json.dumps(asdict(row)))
        return
    table = [["run", "job", "state", "step", "loss", "eta", "restarts", "note"]]
    for row in rows:
        state = f"{row.state} {row.nodes}".strip()
        loss = "–" if row.loss is None else f"{row.loss:.4f}"
        progress = [f"{row.step}/{row.steps}", loss, span(row.eta_s), str(row.restarts)]
        table.append([row.run, row.job or "–", state, *progress, row.note])
    # Columns without borders, so that the output can be piped into grep or awk.
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())


@app.command(epilog=examples("launch logs runs/1b --follow", "launch logs runs/1b --rank 3"))
def logs(
    run: RunArgument,
    rank: Annotated[
        int | None, Option(help="Rank whose log to print (default: the job and rank 0).", min=0)
    ] = None,
    follow: Annotated[bool, Option("--follow", "-f", help="Print new lines until Ctrl-C.")] = False,
) -> None:
    """Print the logs of a run's processes."""
    folder = run / "logs"
    if not folder.is_dir():
        problem = "has no logs" if (run / "run.json").exists() else "is not a run directory"
        raise RunError(f"{run} {problem}; `launch status` lists the runs below runs/")
    printed: dict[Path, int] = {}  # bytes of each file so far
    last: Path | None = None  # the file printed last; a change prints a heading, as `tail` does
    while True:
        # Listed again in every round, because a restart may add files.
        for path in _log_files(folder, rank):
            text = _read_from(path, printed.get(path, 0))
            if text is None:
                continue
            if text and path != last:
                print(f"==> {path} <==")
                last = path
            # A read may end inside a character, which then shows as U+FFFD.
            print(text.decode(errors="replace"), end="", flush=True)
            printed[path] = printed.get(path, 0) + len(text)
        if not follow:
            break
        time.sleep(0.5)
    if not printed:
        which = "any process" if rank is None else f"rank {rank}"
        missing = f"{folder} has no log of {which} yet"
        raise RunError(f"{missing}; `launch status {quote(str(run))}` shows whether it runs")


def _log_files(folder: Path, rank: int | None) -> list[Path]:
    # job.log has the output of the batch script. A local run has none.
    files = [folder / "job.log"] if rank is None else []
    files.append(folder / f"rank-{rank or 0}.log")
    with suppress(FileNotFoundError):  # the run is being deleted
        # Until November 2026 torchrun wrote the logs of local runs, in a directory per start.
        files += sorted(folder.glob(f"*/attempt_*/{rank or 0}/std*.log"))
    return files


def _read_from(path: Path, start: int) -> bytes | None:
    from pipeline.atomic import open_regular

    try:
        # Not open(): a FIFO in the run directory would block this command forever.
        with open_regular(path) as file:
            file.seek(start)
            return file.read()
    except FileNotFoundError:  # it may also be deleted while we look
        return None


@app.command(epilog=examples("launch cancel runs/1b", "launch cancel runs/1b --now"))
def cancel(
    run: RunArgument,
    now: Annotated[bool, Option("--now", help="Cancel at once, without saving.")] = False,
) -> None:
    """End a run's job. It saves first and is not requeued; --resume --slurm continues it."""
    from pipeline.slurm import queue
    from pipeline.slurm.submit import job_of

    job = job_of(run)
    entry = queue.entry(job) if job else None
    if job is None or entry is None or not entry.alive:
        raise RunError(f"run {run} has no job in the queue; `launch status` lists runs and jobs")
    # A pending job has nothing to save, and no batch step that could receive the signal.
    save = entry.state == "RUNNING" and not now
    queue.cancel(job, save=save)
    print(f"job {job} of {run}: {'asked to save and end' if save else 'cancelled'}")


@app.command(
    epilog=examples(
        "launch sync runs/tiny",
        "launch sync runs/ladder",
        "MLFLOW_TRACKING_URI=http://HOST:5000 launch sync runs/*",
    )
)
def sync(
    run_dirs: Annotated[
        list[Path],
        Argument(metavar="RUN_DIR…", help="Run directories, such as runs/demo/*, or a sweep's."),
    ],
    wait: Annotated[
        float, Option(help="Seconds to keep trying a server that does not answer.")
    ] = 20.0,
    as_json: JsonLines = False,
    quiet: Quiet = False,
) -> None:
    """Send missing records to MLflow: after an outage, or for runs made without a server."""
    from pipeline.runs.history import find_runs
    from pipeline.track import mlflow_sync
    from pipeline.track.mlflow_runs import read_sweep

    for folder in run_dirs:
        if not folder.is_dir():
            raise RunError(f"run_dir={folder} is not a directory; give a run, such as runs/demo/1m")
        # The directory of a sweep has a sweep.json, and its runs are the directories inside.
        sweep = bool(read_sweep(folder))
        for run_dir in find_runs(folder, depth=1) if sweep else [folder]:
            # MLflow is a copy of the local log. Repeating this sends nothing twice.
            fed = mlflow_sync.sync(run_dir, wait)
            state = fed.state
            if as_json:
                sent = {"run_dir": str(run_dir), "records": fed.records_sent}
                print(json.dumps(sent | {"uri": state.uri, "run_id": state.run_id}))
            elif not quiet:
                sent_text = f"{fed.records_sent:,} records sent"
                print(f"{run_dir} │ {sent_text} │ run {state.run_id} at {state.uri}")
        if sweep:
            # The parent run in MLflow gets the points, the fit and the dashboard of all runs.
            from launch.sweep import show_all

            if fault := show_all(folder):
                raise RunError(f"sweep={folder}: {fault}")
