"""What a sweep has shown, as files beside its runs and artifacts of its parent run: made from run directories alone."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path

from pipeline.atomic import replace
from pipeline.errors import DataError, RunError
from pipeline.runs.history import Run, read_runs
from pipeline.scaling.figures import finite
from pipeline.scaling.points import points_of
from pipeline.scaling.study import study
from pipeline.sweep.plan import Sweep
from pipeline.track import mlflow_store
from pipeline.track.mlflow_runs import FORECASTS, keep

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
    about = mlflow_store.read_sweep(root)
    forecasts = sorted((root / FORECASTS).glob("*.json"))
    return keep(
        str(about["experiment"]), [root / mlflow_store.SWEEP_FILE, *files], forecasts, sweep=about
    )


def record(root: Path, sweep: Sweep) -> None:
    """sweep.json: what was asked for, and the mark by which runs beside it become children of one parent."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        replace(
            root / mlflow_store.SWEEP_FILE,
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
