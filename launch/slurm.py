"""`launch status`, `logs` and `cancel`: runs in the queue and out of it."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from launch.options import examples
from pipeline.errors import RunError

RUN = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]


def register(app: typer.Typer) -> None:
    app.command(epilog=examples("launch status", "launch status runs/1b --json"))(status)
    app.command(epilog=examples("launch logs runs/1b --follow", "launch logs runs/1b --rank 3"))(
        logs
    )
    app.command(epilog=examples("launch cancel runs/1b", "launch cancel runs/1b --now"))(cancel)


def status(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN…]", help="Runs or folders of them.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per run.")] = False,
) -> None:
    """Queue state, step, loss, ETA and restarts of every run."""
    from pipeline.slurm.status import statuses
    from pipeline.track.console import span

    rows = statuses(paths or [Path("runs")])
    if as_json:
        for row in rows:
            print(json.dumps(asdict(row)))
        return
    table = [("run", "job", "state", "step", "loss", "eta", "restarts", "note")]
    for row in rows:
        loss = "–" if row.loss is None else f"{row.loss:.4f}"
        place = f"{row.state} {row.nodes}".strip()
        steps = f"{row.step}/{row.steps}"
        table.append(
            (
                row.run,
                row.job or "–",
                place,
                steps,
                loss,
                span(row.eta_s),
                str(row.restarts),
                row.note,
            )
        )
    widths = [max(len(row[i]) for row in table) for i in range(7)]
    for line in table:
        print(
            "  ".join(
                cell.ljust(width) for cell, width in zip(line, [*widths, 0], strict=True)
            ).rstrip()
        )


def logs(
    run: RUN,
    rank: Annotated[
        int | None, typer.Option(help="Of one process; left out, the job's and rank 0's.", min=0)
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
) -> None:
    """What the processes of a run have written."""
    folder, who = run / "logs", rank or 0
    if not folder.is_dir():
        raise RunError(f"{run} holds no run; `launch status` shows those below runs/")
    read: dict[Path, int] = {}
    spoken: Path | None = None
    while True:
        # of a job, or of torchrun, which keeps a folder for every start
        files = [folder / "job.log"] if rank is None else []
        files += [folder / f"rank-{who}.log", *sorted(folder.glob(f"*/attempt_*/{who}/std*.log"))]
        for path in [path for path in files if path.exists()]:
            with path.open("rb") as file:
                file.seek(read.get(path, 0))
                text = file.read()
            if text and path != spoken:
                print(f"==> {path} <==")
                spoken = path
            print(text.decode(errors="replace"), end="", flush=True)
            read[path] = read.get(path, 0) + len(text)
        if not follow:
            break
        time.sleep(0.5)
    if not read:
        said = "any process" if rank is None else f"rank {rank}"
        raise RunError(
            f"{folder} has nothing of {said} yet; `launch status {run}` says whether it has started"
        )


def cancel(
    run: RUN,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for it to save.")] = False,
) -> None:
    """End a run's job: it saves first and does not come back; --resume --slurm continues it."""
    from pipeline.slurm import queue
    from pipeline.slurm.submit import job_of

    job = job_of(run)
    entry = queue.entry(job) if job else None
    if job is None or entry is None or not entry.living:
        raise RunError(
            f"run {run} has no job in the queue; `launch status {run}` says how it stands"
        )
    queue.cancel(job, save=entry.state == "RUNNING" and not now)
    print(
        f"job {job} of {run}: {'asked to save and end' if entry.state == 'RUNNING' and not now else 'cancelled'}"
    )
