"""The page: loss against compute, the law and the runs, as one HTML file that opens offline.

`page_data` is everything the page shows, as JSON; `render` puts it into the page. A server can hand out the same
page and the same JSON.
"""

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np

from pipeline.errors import DataError
from pipeline.scaling.figures import power
from pipeline.scaling.points import Array
from pipeline.scaling.register import Score
from pipeline.scaling.runs import Record, Run, points_of
from pipeline.scaling.study import Study, study

CURVE_POINTS = 600  # per run; more than a screen has pixels to tell apart
AHEAD = 10.0  # how far beyond the largest run the law is drawn


def page_data(
    runs: Sequence[Run], *, title: str, now: float, law: str = "auto", forecasts: Sequence[Score] = ()
) -> dict[str, Any]:
    """What the page shows; a law that cannot be fitted becomes a sentence, not a failure."""
    try:
        fitted: dict[str, Any] = law_data(study(points_of(runs), law))
    except DataError as error:
        fitted = {"law": None, "warnings": [f"No law yet: {error}"]}
    return {
        "version": 1,
        "title": title,
        "time": now,
        "convention": next((run.record["convention"] for run in runs), ""),
        "runs": [run_data(run, now) for run in runs],
        "fit": fitted,
        "forecasts": [score.to_json() for score in forecasts],
    }


def run_data(run: Run, now: float) -> dict[str, Any]:
    last, record = run.last, run.record
    final = run.evals[-1] if run.evals else {}
    speeds = [float(step["tokens_per_s"]) for step in run.steps if step.get("tokens_per_s")]
    return {
        "name": run.name,
        "size": str(record.get("size", "?")),
        "arch": str(record.get("arch", "?")),
        "N": run.N,
        "total": record["params"].get("total"),
        "tokens": last.get("tokens"),
        "flops": last.get("flops"),
        "step": last["step"],
        "steps": record.get("steps"),
        "loss": final.get("loss"),
        "bpb": final.get("bpb"),
        "bytes_per_token": record.get("bytes_per_token"),
        "tokens_per_s": float(np.median(speeds)) if speeds else None,
        "tokens_per_parameter": float(last.get("tokens") or 0) / run.N,
        "status": run.status(now),
        "train": curve(run.steps),
        "held_out": curve(run.evals),
    }


def curve(records: Sequence[Record]) -> dict[str, list[float]]:
    """Columns for drawing, thinned in log compute with each stretch's lowest and highest loss kept."""
    seen = [r for r in records if math.isfinite(r.get("loss") or math.nan) and r["flops"] > 0]
    if len(seen) > CURVE_POINTS:
        seen = [seen[i] for i in thin(np.array([r["flops"] for r in seen]), np.array([r["loss"] for r in seen]))]
    return {key: [r[key] for r in seen] for key in ("step", "tokens", "flops", "loss")}


def thin(x: Array, y: Array, buckets: int = CURVE_POINTS // 2) -> list[int]:
    edges = np.geomspace(x[0], x[-1] * (1 + 1e-9), buckets + 1)
    bucket = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, buckets - 1)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    kept: set[int] = {0, len(x) - 1}
    for begin, end in itertools.pairwise([*map(int, starts), len(x)]):
        kept |= {begin + int(np.argmin(y[begin:end])), begin + int(np.argmax(y[begin:end]))}
    return sorted(kept)


def law_data(done: Study) -> dict[str, Any]:
    points = done.fit.points
    line = done.band(np.geomspace(points.C.min() / 2, points.C.max() * AHEAD, 120))
    return {
        **done.to_json(),
        "plain": in_words(done),
        "line": {key: [float(value) for value in values] for key, values in line.items()},
        "largest": float(points.C.max()),
        "marks": [
            {"run": name, "C": float(c), "loss": float(loss)}
            for name, c, loss in zip(points.run, points.C, points.loss, strict=True)
        ],
    }


def in_words(done: Study) -> str:
    """The law as one sentence."""
    top = float(done.fit.points.C.max())
    band = done.band(np.array([top / 10, top, top * 10]))
    below, here, beyond = (float(v) for v in band["loss"])
    said = (
        f"Up to the largest run ({power(top)} FLOPs) each tenfold of compute lowers the held-out loss by about "
        f"{1 - here / below:.1%}. Ten times more compute would give {beyond:.3f}"
    )
    low, high = (float(band[key][2]) for key in ("low", "high"))
    if not math.isfinite(high):
        return said + "; these runs leave nothing over to say how far off that may be."
    return said + f" (95% interval {low:.3f} to {high:.3f})."


def render(data: Mapping[str, Any]) -> str:
    """One self-contained page. Its content policy forbids every request, so offline is not a promise but a fact."""
    from plotly.offline import get_plotlyjs

    page = resources.files("pipeline.scaling") / "page"
    parts = {
        "style": (page / "page.css").read_text(encoding="utf-8"),
        "script": (page / "page.js").read_text(encoding="utf-8"),
        "plotly": str(get_plotlyjs()),
        "data": embed(data),
    }
    template = (page / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)  # one pass: no part is read as template


def embed(data: Mapping[str, Any]) -> str:
    """JSON that cannot end the script element it sits in; what is not finite becomes null."""
    text = json.dumps(finite(data), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: finite(item) for key, item in value.items()}
        case list() | tuple():
            return [finite(item) for item in value]
        case _:
            return value
