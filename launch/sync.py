"""`launch sync`: send MLflow what it does not have of some runs."""

import json
from pathlib import Path
from typing import Annotated

import typer

from launch.options import examples
from pipeline.errors import RunError


def register(app: typer.Typer) -> None:
    app.command(
        epilog=examples(
            "launch sync runs/tiny",
            "launch sync runs/ladder",
            "MLFLOW_TRACKING_URI=http://HOST:5000 launch sync runs/*",
        )
    )(sync)


def sync(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_DIR…", help="Run directories, such as runs/demo/*, or a sweep's."
        ),
    ],
    wait: Annotated[
        float, typer.Option(help="Seconds to keep trying a server that does not answer.")
    ] = 20.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per run.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Send MLflow what is missing: after an outage, or for runs made without a server."""
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
