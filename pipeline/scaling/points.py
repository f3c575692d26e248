"""The points that a law is fitted to: one per finished run, with how N and C were counted."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.errors import DataError
from pipeline.runs.history import RECIPE_KEYS, Run
from pipeline.runs.log import Record
from pipeline.scaling.csv_table import (
    LINE,
    OPTIONAL,
    is_number,
    listed,
    read_columns,
    read_table,
    unread_columns,
)
from pipeline.units import count, parse_count, power

Array = npt.NDArray[np.float64]

# The convention of Hoffmann et al. (arXiv 2203.15556), and of any file without a column C.
SIX_ND = "C = 6·N·D"
FIGURES = ("N", "D", "loss", *OPTIONAL, "accuracy")  # the numeric columns
# A difference in one of these changes the loss or N for reasons that a law does not describe.
ONE_KIND = {
    "convention": "they count N and C in different ways; recount, or fit each separately",
    "vocab": "nats per token are comparable within one vocabulary only; fit each separately",
    "tokenizer": "nats per token are comparable within one tokenizer only; fit each separately",
    "arch": "a law describes one architecture; fit each separately",
    "objective": "losses of different objectives are not comparable; fit each separately",
    "recipe": "a law describes one recipe; fit each separately",
    "optimizer": "a law describes one optimizer; fit each separately",
}
LONGEST_VOCAB = 10_000_000  # the digest of a tokenizer, read as a number, is larger
LOSSES = (1e-6, 1e6)  # anything else is not a loss, and would overflow the fit
EXTREME = 1e40  # no column has this or its inverse in any unit, and products would overflow


@dataclass(frozen=True)
class Points:
    """Columns of equal length: parameters N, tokens D, FLOPs C, held-out loss (nats per token)."""

    N: Array
    D: Array
    C: Array
    loss: Array
    run: tuple[str, ...]  # rows of one run share its name; the bootstrap resamples runs, not rows
    convention: str
    experts: Array | None = None
    unique: Array | None = None  # distinct tokens in the corpus, for the data-constrained law
    # Of a task; the loss is then the bits per byte of its right answers (scaling/accuracy.py).
    accuracy: Array | None = None
    vocab: int | None = None  # a loss above its logarithm is worse than guessing
    arch: str | None = None
    kinds: Record = field(default_factory=dict)  # known values of ONE_KIND; targets have to agree
    dropped: tuple[str, ...] = field(default=())
    warnings: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.loss)

    @property
    def columns(self) -> dict[str, Array]:
        """The columns that these points have."""
        found = {key: getattr(self, key) for key in FIGURES}
        return {key: values for key, values in found.items() if values is not None}

    def take(self, rows: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> "Points":
        # Positions, from a mask or from indices, because `run` is a tuple.
        index = np.arange(len(self))[rows]
        kept: dict[str, Any] = {key: values[index] for key, values in self.columns.items()}
        return replace(self, run=tuple(self.run[i] for i in index), **kept)

    def thinned(self, number: int) -> npt.NDArray[np.intp]:
        """Return about `number` rows, evenly spaced by compute; all if fewer than twice that."""
        if len(self) <= 2 * number:
            return np.arange(len(self))
        return np.asarray(np.argsort(self.C)[:: len(self) // number])

    def drop_highest(self, number: int) -> "Points":
        """Leave out the largest losses: runs that diverged or hardly trained."""
        if number <= 0:
            return self
        if number >= len(self) > 0:
            raise DataError(f"drop_highest={number} leaves none of {len(self)} points; lower it")
        order = np.argsort(self.loss)
        gone = tuple(
            f"{self.run[i]}: among the {number} largest losses ({self.loss[i]:.4g})"
            for i in order[-number:]
        )
        kept = self.take(np.sort(order[:-number]))
        return replace(kept, dropped=self.dropped + gone)


def clean(points: Points) -> Points:
    """Drop rows that no law can use, each with its reason: not positive, or repeated."""
    keep: list[int] = []
    dropped: list[str] = []
    seen: set[tuple[float, ...]] = set()
    for i, name in enumerate(points.run):
        # NaN fails the comparison, so an empty cell or a loss that was not finite is dropped too.
        row = {key: float(values[i]) for key, values in points.columns.items()}
        accuracy = row.get("accuracy", 0.5)
        amounts = {key: value for key, value in row.items() if key != "accuracy"}
        wrong = [key for key, value in amounts.items() if not 0 < value < np.inf]
        extreme = [key for key, value in amounts.items() if not 1 / EXTREME < value < EXTREME]
        if wrong:
            dropped.append(f"{name}: {wrong[0]}={row[wrong[0]]:g} is not a number above zero")
        elif not LOSSES[0] < row["loss"] < LOSSES[1]:
            dropped.append(f"{name}: loss={row['loss']:g} is not a loss in nats per token")
        elif extreme:
            value = row[extreme[0]]
            dropped.append(f"{name}: {extreme[0]}={value:g} is not a possible value")
        elif row.get("experts", 1.0) % 1:
            dropped.append(f"{name}: experts={row['experts']:g} is not a whole number")
        elif not 0 <= accuracy <= 1:
            # Percentages are the usual mistake.
            remedy = "divide percent by 100" if accuracy > 1 else "give one from 0 to 1"
            dropped.append(f"{name}: accuracy={accuracy:g} is not a share; {remedy}")
        # A repeated row adds no information, but would make the intervals too narrow.
        elif tuple(row.values()) in seen:
            dropped.append(f"{name}: repeats an earlier row")
        else:
            seen.add(tuple(row.values()))
            keep.append(i)
    kept = points.take(np.array(keep, dtype=np.intp))
    warnings = points.warnings
    if dropped:
        # `launch fit` lists every reason. A forecast shows this line alone.
        more = f", and {len(dropped) - 1} more" if len(dropped) > 1 else ""
        warnings += (f"{len(dropped)} of {len(points)} rows left out: {dropped[0]}{more}.",)
    return replace(kept, dropped=points.dropped + tuple(dropped), warnings=warnings)


def read_csv(path: Path, task: str | None = None) -> Points:
    """Read columns N, D, loss and, if present, C, run, experts, unique and those of ONE_KIND.

    With a task, its columns TASK/accuracy and TASK/bpb become the accuracy and the loss.
    """
    required: tuple[str, ...] = ("N", "D", "loss")
    rows = read_table(path, required if task is None else ("N", "D"))
    if task is not None:
        rows = [_scored(row, task) for row in rows]
        if "task_accuracy" not in rows[0]:
            raise unknown_task(task, f"{path} has no column", rows[0])
        if "loss" not in rows[0]:
            raise DataError(f"{path}: column {task}{BITS} is missing, and so is loss; add either")
        required = (*required, "task_accuracy")
    _refuse_mixed(rows, f"{path}: ")
    found: dict[str, Any] = {**read_columns(path, rows, required)}
    vocab = rows[0].get("vocab") or ""
    check_vocab(str(path), vocab)
    size = float(vocab) if is_number(vocab) else None  # tables may have 4096 as 4096.0
    if size is not None and not _is_digest(vocab):
        if not 2 <= size < np.inf:  # also NaN
            raise DataError(f"{path}: vocab={vocab} is not a vocabulary; give its number of tokens")
        found["vocab"] = int(size)
    found["arch"] = rows[0].get("arch") or None
    found["kinds"] = kinds_of(rows, scored=task is not None)
    convention = rows[0].get("convention")
    if not convention:
        convention = "N, D and C as the file gives them" if "C" in found else SIX_ND
    with np.errstate(over="ignore"):  # such rows are left out later
        found.setdefault("C", 6 * found["N"] * found["D"])
    if task is not None:
        found["accuracy"] = found.pop("task_accuracy")
    run = tuple(row.get("run") or f"row {row[LINE]}" for row in rows)
    warnings = (*_unread_columns(rows), *_curve_warnings(run, found["N"], found["D"]))
    return clean(Points(run=run, convention=convention, warnings=warnings, **found))


def _refuse_mixed(records: Sequence[Record], where: str = "", more: str = "") -> None:
    """Refuse runs or rows that differ in what one law cannot describe."""
    for key, remedy in ONE_KIND.items():
        kinds = {str(record.get(key) or "none given") for record in records}
        if key in RECIPE_KEYS:  # unknown where a config is missing or damaged
            kinds.discard("none given")
        if len(kinds) > 1:
            raise DataError(f"{where}{key}={listed(sorted(kinds))} are mixed; {remedy}{more}")


def _is_digest(vocab: str) -> bool:
    """Whether `vocab` is the tokenizer's digest, as in our own points.csv, and not a size."""
    return not is_number(vocab) or LONGEST_VOCAB <= float(vocab) < np.inf


def check_vocab(where: str, vocab: str) -> None:
    """Refuse a rounded or separated number, which would pass for a tokenizer's digest."""
    digits = vocab.replace(",", "").replace(" ", "")
    if parse_count(vocab) or (digits != vocab and digits.isdigit()):
        raise DataError(f"{where}: vocab={vocab} is not a number; write all digits, such as 32768")


def kinds_of(records: Sequence[Record], *, scored: bool = False) -> Record:
    """Return the known values of ONE_KIND, joined by commas. A digest in `vocab` is a tokenizer.
    The bits per byte of a task, `scored`, do not depend on either."""
    found = {key: {str(row[key]) for row in records if row.get(key)} for key in ONE_KIND}
    digests = set(filter(_is_digest, found["vocab"]))
    found["tokenizer"] |= digests
    # A table may write 4096 as 4096.0.
    found["vocab"] = {f"{float(size):.0f}" for size in found["vocab"] - digests}
    if scored:
        found["vocab"] = found["tokenizer"] = set()
    return {key: listed(sorted(kinds)) for key, kinds in found.items() if kinds}


ACCURACY = "/accuracy"
BITS = "/bpb"


def _scored(entry: Any, task: str) -> dict[str, Any]:
    """Return a row or an evaluation with the task's bits per byte, if it has them, as the loss."""
    found = dict(entry)
    for key, source in (("loss", task + BITS), ("task_accuracy", task + ACCURACY)):
        if source in entry:
            found[key] = entry[source]
    return found


def unknown_task(task: str, missing: str, keys: Iterable[str]) -> DataError:
    """Return the error for a task without a score; `keys` are those of the rows or evaluations."""
    known = sorted({key.removesuffix(ACCURACY) for key in keys if key.endswith(ACCURACY)})
    return DataError(
        f"task={task}: {missing} {task}{ACCURACY} (tasks there: {', '.join(known) or 'none'}); "
        f"train with --set 'eval.tasks=[\"{task}.jsonl\"]'"
    )


def scored_runs(runs: Sequence[Run], task: str) -> list[Run]:
    """Return the runs with their evaluations on a task, whose bits per byte become the loss."""
    found = []
    for run in runs:
        # A damaged log may have text there.
        evals = [
            _scored(entry, task)
            for entry in run.evals
            if isinstance(entry.get(task + ACCURACY), int | float)
            and isinstance(entry.get(task + BITS, 1.0), int | float)
        ]
        found.append(replace(run, evals=tuple(evals)))
    if not any(run.evals for run in found):
        keys = {key for run in runs for entry in run.evals for key in entry}
        raise unknown_task(task, f"none of {len(runs)} runs logged", keys)
    return found


def _unread_columns(rows: Sequence[dict[str, str]]) -> tuple[str, ...]:
    """Warn about columns that are not read but have a name like one that is, or divide the rows."""
    known = {*OPTIONAL, *ONE_KIND, "run"}
    warnings = unread_columns(rows, known | set(FIGURES))
    for name in rows[0].keys() - known - set(FIGURES):
        kinds = {row[name] for row in rows}
        # Words that several rows share name groups of runs; numbers may be settings of each run.
        words = not any(is_number(kind) for kind in kinds)
        if words and 1 < len(kinds) < len(rows):
            warnings.append(
                f"The rows differ in `{name}` ({listed(sorted(kinds))}), which is not read: one "
                f"law for all of them mixes unlike runs. Fit each group separately."
            )
    return tuple(warnings)


def _curve_warnings(run: Sequence[str], N: Array, D: Array) -> list[str]:
    """Warn if one run and size has several lengths: losses from before its rate decayed."""
    lengths: dict[tuple[str, float], set[float]] = {}
    for name, size, length in zip(run, N, D, strict=True):
        lengths.setdefault((name, size), set()).add(length)
    (name, _), most = max(lengths.items(), key=lambda item: len(item[1]))
    if len(most) < 2:
        return []
    return [
        f"run={name} has losses at {len(most)} lengths. If they come from one training run, only "
        f"--law envelope uses them as they are; for other laws keep the last, because the rate had "
        f"not decayed at the others. Otherwise give every run its own name."
    ]


def points_of(runs: Sequence[Run], *, curves: bool = False) -> Points:
    """Return the final held-out loss of each finished run, or with `curves` every held-out loss.

    Earlier losses are not points of a law, because the learning rate had not decayed yet.
    """
    dropped: list[str] = []
    damaged: list[str] = []
    used: list[tuple[Run, Record]] = []
    for run in runs:
        if curves:
            used += [(run, entry) for entry in run.evals if entry.get("loss") is not None]
        elif not run.finished:
            steps = run.record.get("steps", "?")
            dropped.append(f"{run.name}: not finished (step {run.last['step']} of {steps})")
        elif run.final is None:
            without = "a held-out loss of its last step, or without the task"
            damaged.append(f"{run.name}: finished without {without}; is its log damaged?")
        else:
            used.append((run, run.final))  # after the learning rate has decayed
    if not used:
        missing = "finished with a held-out loss; let them finish, then fit"
        if curves:
            missing = "logged a held-out loss; set train.eval_every and train again"
        raise DataError(f"none of {len(runs)} runs has {missing}")
    records = [run.record for run, _ in used]
    _refuse_mixed(records, more=", with its own --runs")

    # Of runs from `scored_runs`; their bits per byte do not depend on the vocabulary.
    scored = all("task_accuracy" in entry for _, entry in used)
    vocab = records[0].get("vocab")

    def figures(key: str) -> Array:
        # A loss that was not finite is logged as null, and becomes NaN here.
        return np.array([entry.get(key) for _, entry in used], dtype=float)

    return clean(
        Points(
            N=np.array([run.N for run, _ in used]),
            D=figures("tokens"),
            C=figures("flops"),
            loss=figures("loss"),
            run=tuple(run.name for run, _ in used),
            convention=str(records[0]["convention"]),
            vocab=int(vocab) if vocab and not scored else None,
            arch=records[0].get("arch"),
            # A causal run does not name its objective.
            kinds=kinds_of([{"objective": "causal", **one} for one in records], scored=scored),
            accuracy=figures("task_accuracy") if scored else None,
            dropped=(*dropped, *damaged),
            warnings=(*_roughly_comparable(records), *damaged),
        )
    )


def _roughly_comparable(records: Sequence[Record]) -> tuple[str, ...]:
    """Warnings about differences that are no reason to refuse the runs."""
    warnings = []
    # A longer corpus of the same source has another hash too.
    corpora = len({record.get("data") for record in records})
    if corpora > 1:
        text = f"The runs have held-out data of {corpora} corpora"
        warnings.append(f"{text}: their losses are only roughly comparable.")
    lengths = sorted({int(record["seq"]) for record in records if record.get("seq")})
    if len(lengths) > 1:
        warnings.append(
            f"The runs have sequences of {lengths[0]} to {lengths[-1]} tokens: a longer context "
            f"alone lowers the loss."
        )
    return tuple(warnings)


def runs_across(points: Points) -> str:
    """Suggest runs that would separate the effects of N and D: equal compute, split differently."""
    if not len(points):
        return "three sizes at 20 tokens per parameter"
    middle = int(np.argsort(points.C)[len(points) // 2])
    N = points.N[middle]
    D = points.D[middle]
    return (
        f"for C ≈ {power(points.C[middle])} FLOPs N = {count(N / 2)} on {count(D * 2)} tokens and "
        f"N = {count(N * 2)} on {count(D / 2)}, and the same around a smaller and a larger run"
    )
