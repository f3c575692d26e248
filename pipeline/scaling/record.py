"""Registered forecasts: written once, before the run, never changed; and scored after it."""

import hashlib
import json
import math
import re
import stat
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.atomic import read_regular
from pipeline.errors import RunError
from pipeline.runs.history import RECIPE_KEYS, Run
from pipeline.scaling.accuracy import TaskForecast
from pipeline.scaling.points import ACCURACY, ONE_KIND, Points
from pipeline.scaling.predict import NEAR, Forecast
from pipeline.scaling.study import Study
from pipeline.units import count, finite

VERSION = 1
ENDED = ("finished", "failed")  # states of a run that will not measure its loss any more


def register(
    folder: Path, made: Sequence[Forecast | TaskForecast], study: dict[str, Any], *, now: float
) -> list[Path]:
    """Write the forecasts, all or none, where no target has one; a digest shows later changes."""
    contents: dict[Path, str] = {}
    for one in made:
        if not (one.N > 0 and one.D > 0):
            raise RunError(
                "--register needs the forecast of one run; give --size, or --params and --tokens"
            )
        if not (math.isfinite(one.low) and math.isfinite(one.high)):
            value = one.accuracy if isinstance(one, TaskForecast) else one.loss
            problem = f"forecast {value:.4g} has no interval to score: too few runs"
            raise RunError(f"{problem}; add a size and fit again")
        # The name is the target: a second forecast of the same run meets the first one's file.
        # A task's name may come from a column of a file, so that it may have any character.
        task = re.sub(r"[^\w.]", "-", f"-{one.task}") if isinstance(one, TaskForecast) else ""
        path = folder / f"N{count(one.N)}-D{count(one.D)}{task}.json"
        if path in contents:
            raise RunError(f"targets: two are {path.stem}, which is one run; leave one of them out")
        # The whole fit goes along, so that a score can be traced to its points and law.
        content = {"version": VERSION, "time": now, "forecast": vars(one), "fit": study}
        contents[path] = json.dumps({**content, "sha256": _digest(content)}, indent=1)
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in contents.items():
            with path.open("x", encoding="utf-8") as file:  # fails where the file exists
                written.append(path)
                file.write(text)
            # Read-only files prevent accidents; the digest reveals deliberate changes.
            path.chmod(stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)
    except BaseException as error:  # also Ctrl-C: all or none
        for path in written:
            path.unlink()
        if isinstance(error, FileExistsError) and folder.is_dir():
            raise RunError(
                f"{error.filename} is already registered; a forecast is made once, and scored with "
                f"`launch score`"
            ) from None
        if isinstance(error, OSError):
            raise RunError(
                f"forecasts={folder} cannot be written: {error.strerror}; choose --forecasts"
            ) from None
        raise
    return written


def _digest(content: dict[str, Any]) -> str:
    # With sorted keys, a file that was parsed and written again has the same digest.
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def registered(folder: Path) -> list[dict[str, Any]]:
    """Every registered forecast, oldest first; a changed or incomplete one is an error."""
    found = []
    seen: dict[str, Path] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(read_regular(path))
            claimed = content.pop("sha256")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise RunError(f"{path} is not a registered forecast; move it away") from None
        if _digest(content) != claimed:
            raise RunError(f"{path} was changed after its registration; restore it or move it away")
        if claimed in seen:  # its run would count twice
            raise RunError(f"{path} is a copy of {seen[claimed].name}; remove one of them")
        seen[claimed] = path
        if content.get("version") != VERSION or not _is_complete(content):
            text = f"{path} is not a complete forecast of version {VERSION}"
            raise RunError(f"{text}; use the release that wrote it, or move it away")
        found.append(content)
    return sorted(found, key=lambda content: float(content["time"]))


def _is_complete(content: dict[str, Any]) -> bool:
    """Whether a forecast has what `score` reads: its numbers and the fit it was made from."""
    match content:
        case {"time": time, "forecast": dict(one), "fit": {"points": {"used": int(used)}}}:
            value = "loss" if one.get("task") is None else "accuracy"
            amounts = [used, *(_number(one.get(key)) for key in ("N", "D", "C", value))]
            low, middle, high = (_number(one.get(key)) for key in ("low", value, "high"))
            in_order = math.isfinite(_number(time)) and 0 <= low <= middle <= high < math.inf
            above_zero = all(0 < amount < math.inf for amount in amounts)
            return above_zero and in_order and isinstance(one.get("task"), str | None)
    return False


def _number(value: object) -> float:
    """Return a value of a file if it is a number, otherwise NaN."""
    try:
        return float(value) if isinstance(value, float | int) else math.nan
    except OverflowError:  # an integer of hundreds of digits
        return math.nan


@dataclass(frozen=True)
class Score:
    """A forecast and its run; the fields after `task` are None until the run has finished.

    A run that failed or diverged, or was not scored on the task, has a name and no measurement.
    """

    N: float
    D: float
    C: float
    forecast: float
    low: float
    high: float
    task: str | None = None  # of an accuracy; None: the forecast is of the loss
    run: str | None = None
    measured: float | None = None
    error: float | None = None  # relative for a loss; a difference for an accuracy
    inside: bool | None = None
    counts: bool | None = None  # registered before the run began
    law: str | None = None  # with which the forecast was made
    points: int | None = None  # number of points that this law was fitted to


def score(forecasts: Sequence[dict[str, Any]], runs: Sequence[Run]) -> list[Score]:
    """Each forecast with the finished run that it predicted."""
    scores = []
    for content in forecasts:
        f = content["forecast"]
        task = f.get("task")
        key = "loss" if task is None else task + ACCURACY
        value = f["loss" if task is None else "accuracy"]
        landed: dict[str, Any] = {}
        for run in runs:
            if not (_same(run, f["N"], f["D"]) and _of_kind(run, content["fit"])):
                continue
            measured = math.nan if run.final is None else _number(run.final.get(key))
            if not math.isfinite(measured):  # not scored on the task, or diverged
                # With its path, because a run that was killed has not logged its end.
                if run.status(now=0.0, path=run.path) in ENDED:
                    landed = landed or {"run": run.name}
                continue
            # Only a forecast that is older than its run counts.
            # Without its first event, a run has no known start, and the forecast does not count.
            starts = [float(e.get("time", 0)) for e in run.events if e.get("event") == "start"]
            began = min(starts, default=0.0)
            landed = {
                "run": run.name,
                "measured": measured,
                "error": measured / value - 1 if task is None else measured - value,
                "inside": f["low"] <= measured <= f["high"],
                "counts": float(content["time"]) < began,
            }
            break  # a repetition of the run is not a second test
        place = (f["N"], f["D"], f["C"])
        fitted = content["fit"]
        landed |= {"law": fitted.get("law"), "points": fitted["points"]["used"]}
        scores.append(Score(*place, value, f["low"], f["high"], task, **landed))
    return scores


def about_targets(scores: Sequence[Score], used: Collection[str]) -> list[str]:
    """Describe the scored forecasts of losses, and whether their runs are among those `used`."""
    return [
        f"{one.run} is the run of a registered forecast, which {one.law} made from {one.points} "
        f"points. That forecast does not change. The law here is fitted to {len(used)} points"
        f"{', and this run is one of them' if one.run in used else ' without this run'}."
        for one in scores
        if one.measured is not None and one.task is None
    ]


def _same(run: Run, N: float, D: float) -> bool:
    tokens = _number(run.record.get("steps")) * _number(run.record.get("batch_tokens"))
    if run.final is not None:
        tokens = run.final.get("tokens") or 0.0  # a damaged log may have none
    return abs(run.N / N - 1) < NEAR and abs(float(tokens) / D - 1) < NEAR


def fit_of(done: Study, points: Points, runs: Sequence[Run]) -> Any:
    """Return what a registered forecast says about its law and the fitted runs."""
    return finite({**done.to_json(), "kind": kind_of(points, runs)})


def kind_of(points: Points, runs: Sequence[Run]) -> dict[str, Any]:
    """Return what the run of a forecast must have in common with the fitted runs or rows."""
    if not runs:  # a CSV file may name these two
        named = {"arch": points.arch, "vocab": points.vocab}
        return {key: value for key, value in named.items() if value is not None}
    # Runs that did not finish are not fitted, and may be of another kind.
    fitted = next((run for run in runs if run.final is not None), runs[0])
    known = fitted.record
    return {key: known.get(key) for key in ONE_KIND if key in known or key not in RECIPE_KEYS}


def _of_kind(run: Run, fitted: dict[str, Any]) -> bool:
    """Whether a run has the tokenizer, architecture, … of the runs that the forecast is from."""
    kind = fitted.get("kind")  # earlier releases did not write it
    known = kind.items() if isinstance(kind, dict) else ()
    # None is a value: a causal run names no objective. Numbers may be text in MLflow.
    return all(
        str(run.record.get(key)) == str(value)
        or (key in RECIPE_KEYS and key not in run.record)  # unknown
        for key, value in known
    )


def calibration(scores: Sequence[Score]) -> dict[str, Any]:
    """Summarize the errors of the forecasts that count."""
    counted = [s for s in scores if s.counts]
    errors = [abs(s.error) for s in counted if s.error is not None and s.task is None]
    points = [abs(s.error) for s in counted if s.error is not None and s.task is not None]
    return {
        "registered": len(scores),
        "landed": sum(s.measured is not None for s in scores),
        "counted": len(counted),
        "inside": sum(bool(s.inside) for s in counted),
        "nominal": 0.95,  # the share of runs that 95% intervals should contain
        "mean_absolute_error": sum(errors) / len(errors) if errors else None,  # of losses, relative
        "mean_accuracy_error": sum(points) / len(points) if points else None,
    }
