"""The points a law is fitted to: one finished run each, with the convention their figures were counted by."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.errors import DataError

Array = npt.NDArray[np.float64]

SIX_ND = "C = 6·N·D"  # what Hoffmann et al. (arXiv 2203.15556) use, and what a file without C must mean


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
        return replace(
            self, N=self.N[index], D=self.D[index], C=self.C[index], loss=self.loss[index],
            run=tuple(self.run[i] for i in index),
            experts=None if self.experts is None else self.experts[index],
            unique=None if self.unique is None else self.unique[index],
        )  # fmt: skip

    def drop_highest(self, count: int) -> "Points":
        """Leave out the `count` largest losses: runs that diverged or hardly trained say nothing about the law."""
        if count <= 0:
            return self
        order = np.argsort(self.loss)
        gone = tuple(f"{self.run[i]}: among the {count} largest losses ({self.loss[i]:.4g})" for i in order[-count:])
        kept = self.take(np.sort(order[:-count]))
        return replace(kept, dropped=self.dropped + gone)


def clean(points: Points) -> Points:
    """Drop rows no law can use (not finite, not positive, repeated), each with its reason."""
    keep: list[int] = []
    dropped: list[str] = []
    seen: set[tuple[float, ...]] = set()
    columns = [points.N, points.D, points.C, points.loss]
    columns += [c for c in (points.experts, points.unique) if c is not None]
    for i, name in enumerate(points.run):
        row = tuple(float(c[i]) for c in columns)
        if not all(np.isfinite(row)):
            dropped.append(f"{name}: a value is not finite")
        elif min(row) <= 0:
            dropped.append(f"{name}: N, D, C and loss must be above zero")
        elif row in seen:
            dropped.append(f"{name}: repeats an earlier row")
        else:
            seen.add(row)
            keep.append(i)
    kept = points.take(np.array(keep, dtype=np.intp))
    return replace(kept, dropped=points.dropped + tuple(dropped))


def read_csv(path: Path) -> Points:
    """Points from a file with columns N, D, loss and, if there, C, run, experts, unique, vocab, convention."""
    rows = read_table(path, ("N", "D", "loss"))
    named = {row["convention"] for row in rows if row.get("convention")}
    if len(named) > 1:
        raise DataError(
            f"{path}: convention={sorted(named)} mixes ways of counting N and C; fit one at a time, or recount"
        )
    vocabularies = {row["vocab"] for row in rows if row.get("vocab")}
    if len(vocabularies) > 1:
        raise DataError(
            f"{path}: vocab={', '.join(sorted(vocabularies))} are mixed; nats per token compare within one vocabulary "
            f"only: fit each apart, or convert to bits per byte"
        )
    N, D, loss = (column(path, rows, key) for key in ("N", "D", "loss"))
    has_compute = bool(rows[0].get("C"))
    C = column(path, rows, "C") if has_compute else 6 * N * D
    run = tuple(row.get("run") or f"row {i}" for i, row in enumerate(rows, 2))
    return clean(
        Points(
            N=N, D=D, C=C, loss=loss, run=run,
            convention=named.pop() if named else ("N, D and C as the file gives them" if has_compute else SIX_ND),
            experts=column(path, rows, "experts") if rows[0].get("experts") else None,
            unique=column(path, rows, "unique") if rows[0].get("unique") else None,
        )
    )  # fmt: skip


def read_table(path: Path, required: Sequence[str]) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
            names = reader.fieldnames or []
    except OSError as error:
        raise DataError(f"points={path} cannot be read ({error.strerror}); give a CSV file") from None
    except (UnicodeDecodeError, csv.Error):
        raise DataError(f"points={path} is not a CSV text file") from None
    if missing := [key for key in required if key not in names]:
        raise DataError(f"{path}: columns {missing} are missing (found {names}); it needs {', '.join(required)}")
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
            raise DataError(f"{path}:{line}: {key}={text!r} is not a number") from None
    return np.array(values)
