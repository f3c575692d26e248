"""The stages before tokenizing, each a plain function from a batch of documents to those that go on, books kept.

read → normalise → filter → dedup → decontaminate. None knows what runs it: sketch.py and tokenize.py chain them in one
task, dedup.py says between the two which documents stay.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from pipeline.data.filters import reason_to_drop
from pipeline.data.normalise import normalise
from pipeline.data.permute import U64
from pipeline.data.piece import MB, Task
from pipeline.data.read import Malformed, read
from pipeline.data.recipe import Filters, Normalise, Recipe
from pipeline.data.shards import Stage
from pipeline.data.shingles import shingles

POSITIONS = 100  # malformed documents a task names one by one; all are counted


class Document(NamedTuple):
    item: int  # its place among all that its task reads, malformed ones included
    text: str
    raw: bytes


Batch = list[Document]  # about a megabyte of text, or one document


class Ledger:
    """Documents and bytes into a stage, kept and dropped, with the reasons."""

    def __init__(self) -> None:
        self._kept: dict[str, list[int]] = {}  # by stage: documents, bytes that came in, bytes that go on
        self._dropped: dict[str, dict[str, tuple[int, int]]] = {}
        self.malformed: list[tuple[str, int, str]] = []  # path, position, reason

    def keep(self, stage: str, bytes_in: int, bytes_kept: int, documents: int) -> None:
        count = self._kept.setdefault(stage, [0, 0, 0])
        count[:] = count[0] + documents, count[1] + bytes_in, count[2] + bytes_kept

    def drop(self, stage: str, reason: str, size: int, documents: int = 1) -> None:
        self.keep(stage, 0, 0, 0)
        before = self._dropped.setdefault(stage, {}).get(reason, (0, 0))
        self._dropped[stage][reason] = (before[0] + documents, before[1] + size)

    def sift(self, stage: str, batch: Batch, reason: Callable[[Document], str | None]) -> Batch:
        """Those that there is no reason to drop."""
        kept = []
        for document in batch:
            if why := reason(document):
                self.drop(stage, why, len(document.raw))
            else:
                kept.append(document)
        self.keep(stage, size_of(kept), size_of(kept), len(kept))
        return kept

    def stages(self) -> tuple[Stage, ...]:
        found = []
        for name, (documents, bytes_in, bytes_kept) in self._kept.items():
            dropped = dict(sorted(self._dropped.get(name, {}).items()))
            found.append(
                Stage(
                    name=name,
                    documents_in=documents + sum(n for n, _ in dropped.values()),
                    bytes_in=bytes_in + sum(size for _, size in dropped.values()),
                    documents_kept=documents,
                    bytes_kept=bytes_kept,
                    dropped=dropped,
                )
            )
        return tuple(found)


def total(parts: Iterable[tuple[Stage, ...]]) -> tuple[Stage, ...]:
    """Many tasks' books as one."""
    ledger = Ledger()
    for stage in (stage for part in parts for stage in part):
        gone = sum(size for _, size in stage.dropped.values())
        ledger.keep(stage.name, stage.bytes_in - gone, stage.bytes_kept, stage.documents_kept)
        for reason, (documents, size) in stage.dropped.items():
            ledger.drop(stage.name, reason, size, documents)
    return ledger.stages()


def size_of(batch: Batch) -> int:
    return sum(len(document.raw) for document in batch)


def before_dedup(task: Task, recipe: Recipe, ledger: Ledger) -> Iterator[Batch]:
    for batch in batches(task, recipe.text_key, ledger):
        yield filtered(normalised(batch, recipe.normalise, ledger), recipe.filters, ledger)


def after_dedup(task: Task, recipe: Recipe, keep: npt.NDArray[np.bool_], ledger: Ledger) -> Iterator[Batch]:
    """The documents that an earlier pass, which judged and counted them, has left."""
    for batch in batches(task, recipe.text_key, ledger):
        yield normalised([document for document in batch if keep[document.item]], recipe.normalise, ledger)


def batches(task: Task, key: str, ledger: Ledger) -> Iterator[Batch]:
    batch: Batch = []
    size = 0
    for item, found in enumerate(found for piece in task for found in read(piece, key)):
        if isinstance(found, Malformed):
            ledger.drop("read", "malformed", found.bytes)
            if len(ledger.malformed) < POSITIONS:
                ledger.malformed.append((found.path, found.position, found.reason))
            continue
        raw = found.encode()
        if not found or found.isspace():
            ledger.drop("read", "empty", len(raw))
            continue
        batch.append(Document(item, found, raw))
        size += len(raw)
        if size >= MB:
            ledger.keep("read", size, size, len(batch))
            yield batch
            batch, size = [], 0
    if batch:
        ledger.keep("read", size, size, len(batch))
        yield batch


def normalised(batch: Batch, rules: Normalise, ledger: Ledger) -> Batch:
    if rules == Normalise():
        return batch
    found = []
    for document in batch:
        text = normalise(document.text, rules)
        if text and not text.isspace():
            found.append(Document(document.item, text, text.encode()))
            ledger.keep("normalise", len(document.raw), len(found[-1].raw), 1)
        else:
            ledger.drop("normalise", "empty", len(document.raw))
    return found


def filtered(batch: Batch, rules: Filters, ledger: Ledger) -> Batch:
    if rules == Filters():
        return batch
    return ledger.sift("filter", batch, lambda document: reason_to_drop(document.text, rules))


def unique(batch: Batch, seen: dict[bytes, None], ledger: Ledger) -> Batch:
    """Without the copies of what the task has seen, so that a text of a million copies is no bucket of a million rows;
    what is left is counted when all tasks are compared."""
    fresh = []
    for document in batch:
        if (digest := xxhash.xxh3_128_digest(document.raw)) in seen:
            ledger.drop("dedup", "exact", len(document.raw))
        else:
            seen[digest] = None
            fresh.append(document)
    return fresh


def decontaminated(batch: Batch, n: int, held_out: U64, ledger: Ledger) -> Batch:
    return ledger.sift("decontaminate", batch, lambda d: "overlap" if shares_ngram(d.raw, n, held_out) else None)


def shares_ngram(raw: bytes, n: int, held_out: U64) -> bool:
    """Whether any n consecutive words also stand in the held-out text; held_out is sorted."""
    grams = shingles(raw, n)
    at = np.searchsorted(held_out, grams)
    at[at == len(held_out)] = 0
    return bool(len(held_out) and (held_out[at] == grams).any())
