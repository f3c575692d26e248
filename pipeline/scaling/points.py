"""The points a law is fitted to: one finished run each, with the convention their figures were counted by."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.errors import DataError
from pipeline.runs.history import Run
from pipeline.runs.log import Record
from pipeline.units import count, power

Array = npt.NDArray[np.float64]

SIX_ND = (
    "C = 6·N·D"  # what Hoffmann et al. (arXiv 2203.15556) use, and what a file without C must mean
)
FIGURES = ("N", "D", "C", "loss", "experts", "unique")
UNLIKE = 10.0  # attention and the head make a small model's C / (N·D) some times a large one's, not ten times


@dataclass(frozen=True)
class Points:
    """Columns of equal length: parameters N, tokens D, compute C (FLOPs) and held-out loss (nats per token)."""

    N: Array
    D: Array
    C: Array
    loss: Array
    run: tuple[str, ...]  # rows of one run share its name: the bootstrap resamples runs, not rows
    convention: str
    experts: Array | None = None
    unique: Array | None = None  # distinct tokens in the corpus, for the data-constrained law
    dropped: tuple[str, ...] = field(default=())
    warnings: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.loss)

    def take(self, rows: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> "Points":
        index = np.arange(len(self))[rows]
        columns = {
            key: values[index] for key in FIGURES if (values := getattr(self, key)) is not None
        }
        return replace(self, run=tuple(self.run[i] for i in index), **columns)

    def drop_highest(self, count: int) -> "Points":
        """Leave out the `count` largest losses: runs that diverged or hardly trained say nothing about the law."""
        if count <= 0:
            return self
        order = np.argsort(self.loss)
        gone = tuple(
            f"{self.run[i]}: among the {count} largest losses ({self.loss[i]:.4g})"
            for i in order[-count:]
        )
        kept = self.take(np.sort(order[:-count]))
        return replace(kept, dropped=self.dropped + gone)


def clean(points: Points) -> Points:
    """Drop rows no law can use (a value that is not a number above zero, a row repeated), each with its reason."""
    keep: list[int] = []
    dropped: list[str] = []
    seen: set[tuple[float, ...]] = set()
    columns = {key: values for key in FIGURES if (values := getattr(points, key)) is not None}
    for i, name in enumerate(points.run):
        row = {key: float(values[i]) for key, values in columns.items()}
        if wrong := [f"{key}={value:g}" for key, value in row.items() if not 0 < value < np.inf]:
            dropped.append(f"{name}: {wrong[0]} is not a number above zero")
        elif tuple(row.values()) in seen:
            dropped.append(f"{name}: repeats an earlier row")
        else:
            seen.add(tuple(row.values()))
            keep.append(i)
    kept = points.take(np.array(keep, dtype=np.intp))
    return replace(kept, dropped=points.dropped + tuple(dropped))


def read_csv(path: Path) -> Points:
    """Points from a file with columns N, D, loss and, if there, C, run, experts, unique, vocab, convention."""
    rows = read_table(path, ("N", "D", "loss"))
    for key, remedy in (
        ("convention", "they count N and C in different ways; fit one at a time, or recount"),
        (
            "vocab",
            "nats per token compare within one vocabulary only: fit each apart, or convert to bits per byte",
        ),
    ):
        if len(kinds := sorted({row.get(key) or "none given" for row in rows})) > 1:
            raise DataError(f"{path}: {key}={', '.join(kinds)} are mixed; {remedy}")
    found = {key: column(path, rows, key) for key in FIGURES if any(row.get(key) for row in rows)}
    counted = rows[0].get("convention") or (
        "N, D and C as the file gives them" if "C" in found else SIX_ND
    )
    found.setdefault("C", 6 * found["N"] * found["D"])
    run = tuple(row.get("run") or f"row {i}" for i, row in enumerate(rows, 2))
    N, D, C, loss = (found[key] for key in FIGURES[:4])
    points = clean(Points(N, D, C, loss, run, counted, found.get("experts"), found.get("unique")))
    each = points.C / (points.N * points.D)
    if len(points) and each.max() > UNLIKE * each.min():
        said = (
            f"C / (N·D) runs from {each.min():.3g} ({points.run[int(each.argmin())]}) to {each.max():.3g} "
            f"({points.run[int(each.argmax())]}): do all rows count N and C alike? If not, N* and D* mean nothing."
        )
        points = replace(points, warnings=(*points.warnings, said))
    return points


def read_table(path: Path, required: Sequence[str]) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            names = [name.strip() for name in next(csv.reader(file), [])]
            rows = [
                {key: (text or "").strip() for key, text in row.items() if key is not None}
                for row in csv.DictReader(file, names)
            ]
    except OSError as error:
        raise DataError(
            f"points={path} cannot be read ({error.strerror}); give a CSV file"
        ) from None
    except (UnicodeDecodeError, csv.Error):
        raise DataError(f"points={path} is not a CSV text file") from None
    if missing := [key for key in required if key not in names]:
        raise DataError(
            f"{path}: columns {missing} are missing (found {names}); it needs {', '.join(required)}, between commas"
        )
    if twice := sorted({name for name in names if name and names.count(name) > 1}):
        raise DataError(f"{path}: column {', '.join(twice)} is there twice; keep one of them")
    if not rows:
        raise DataError(f"{path} has a header and no rows; add one row per finished run")
    return rows


def column(path: Path, rows: Sequence[dict[str, str]], key: str) -> Array:
    values: list[float] = []
    for line, row in enumerate(rows, 2):
        text = row.get(key) or "nan"  # an empty cell is dropped later, with its reason
        try:
            values.append(float(text))
        except ValueError:
            raise DataError(
                f"{path}:{line}: {key}={text!r} is not a number; write it as 1e6 or 1000000"
            ) from None
    return np.array(values)


def points_of(runs: Sequence[Run], *, curves: bool = False) -> Points:
    """A finished run's final held-out loss is a point; earlier ones were not annealed and are only `curves`."""
    dropped: list[str] = []
    used: list[tuple[Run, Record]] = []
    for run in runs:
        if curves:
            used += [(run, entry) for entry in run.evals if entry.get("loss") is not None]
        elif not run.finished:
            dropped.append(
                f"{run.name}: not finished (step {run.last['step']} of {run.record.get('steps', '?')})"
            )
        elif not run.evals:
            dropped.append(f"{run.name}: finished without a held-out loss")
        else:
            used.append((run, run.evals[-1]))
    if not used:
        lacking = "logged a held-out loss; set train.eval_every and train again"
        finishing = "finished with a held-out loss; let them finish, then fit"
        raise DataError(f"none of {len(runs)} runs has {lacking if curves else finishing}")
    for key, remedy in (
        ("convention", "recount them alike"),
        ("tokenizer", "nats per token compare within one vocabulary only; fit each apart"),
        ("arch", "a law describes one architecture; put each in a directory of its own"),
    ):
        kinds = sorted({str(run.record.get(key)) for run, _ in used})
        if len(kinds) > 1:
            raise DataError(
                f"{key}={', '.join(kinds)}: the runs mix {len(kinds)} of them; {remedy}"
            )
    corpora = len({run.record.get("data") for run, _ in used})
    mixed = (
        f"The runs were held out on {corpora} different corpora: their losses compare only roughly."
    )

    def figures(key: str) -> Array:
        return np.array(
            [entry.get(key) for _, entry in used], dtype=float
        )  # not a number where it was not finite

    return clean(
        Points(
            N=np.array([run.N for run, _ in used]), D=figures("tokens"), C=figures("flops"), loss=figures("loss"),
            run=tuple(run.name for run, _ in used), convention=str(used[0][0].record["convention"]),
            dropped=tuple(dropped), warnings=() if corpora == 1 else (mixed,),
        )
    )  # fmt: skip


def runs_across(points: Points) -> str:
    """Runs that tell what N does from what D does: about one that is there, its compute split otherwise."""
    if not len(points):
        return "three sizes at 20 tokens per parameter"
    middle = int(np.argsort(points.C)[len(points) // 2])
    N, D, C = points.N[middle], points.D[middle], points.C[middle]
    return (
        f"for C ≈ {power(C)} FLOPs N = {count(N / 2)} on {count(D * 2)} tokens and N = {count(N * 2)} on "
        f"{count(D / 2)}, and the same about a smaller and a larger run"
    )
