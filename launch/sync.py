"""`launch sync`: bring MLflow up to date with what run directories recorded."""

import json
from pathlib import Path
from typing import Annotated

import typer

from launch.options import examples
from pipeline.errors import RunError
from pipeline.runs.history import find_runs
from pipeline.track import mlflow_sync
from pipeline.track.mlflow_runs import read_sweep


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
        float, typer.Option(help="Seconds to go on trying a server that does not answer.")
    ] = mlflow_sync.WAIT_S,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per run.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Replay to MLflow what it has not got: after an outage, or for runs made without a server."""
    for folder in run_dirs:
        if not folder.is_dir():
            raise RunError(f"run_dir={folder} is not a directory; give a run, such as runs/demo/1m")
        sweep = bool(read_sweep(folder))
        for run_dir in find_runs(folder, depth=1) if sweep else [folder]:
            fed = mlflow_sync.sync(run_dir, wait)
            if as_json:
                facts = {"run_dir": str(run_dir), "records": fed.records_sent}
                print(json.dumps(facts | {"uri": fed.state.uri, "run_id": fed.state.run_id}))
            elif not quiet:
                print(
                    f"{run_dir} │ {fed.records_sent:,} records sent │ run {fed.state.run_id} at {fed.state.uri}"
                )
        if sweep:
            from launch.sweep import show_all

            if fault := show_all(folder):
                raise RunError(f"sweep={folder}: {fault}")
