"""The stages before tokenizing, each a plain function from a batch of documents to those that go on, books kept.

read → normalise → filter → dedup → decontaminate. None knows what runs it: sketch.py and tokenize.py chain them in one
task, dedup.py says between the two which documents stay.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import BinaryIO, NamedTuple

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
from pipeline.data.shingles import ngrams, word_hashes

DOCUMENTS = 1024  # in a batch at most, and about a megabyte of text


class Document(NamedTuple):
    item: int  # its place among all that its task reads, malformed ones included
    text: str
    raw: bytes


Batch = list[Document]
Position = tuple[str, int, str]  # path, byte or row, what is malformed there


class Ledger:
    """Documents and bytes into a stage, kept and dropped, with the reasons; what is malformed is listed in a file."""

    def __init__(self, aside: BinaryIO | None = None) -> None:
        self._books: dict[
            str, dict[str, list[int]]
        ] = {}  # stage → reason ("": kept) → documents, bytes in, bytes on
        self._aside = aside
        self.malformed: Position | None = None  # the first

    def keep(self, stage: str, documents: int, bytes_in: int, bytes_kept: int) -> None:
        self._add(stage, "", documents, bytes_in, bytes_kept)

    def drop(self, stage: str, reason: str, documents: int, size: int) -> None:
        self._add(stage, "", 0, 0, 0)
        self._add(stage, reason, documents, size, 0)

    def set_aside(self, found: Malformed) -> None:
        self.drop("read", "malformed", 1, found.bytes)
        place = {"path": found.path, "position": found.position, "reason": found.reason}
        self.malformed = self.malformed or (found.path, found.position, found.reason)
        if self._aside:
            self._aside.write(json.dumps(place).encode() + b"\n")

    def _add(self, stage: str, reason: str, *counts: int) -> None:
        found = self._books.setdefault(stage, {}).setdefault(reason, [0, 0, 0])
        found[:] = (a + b for a, b in zip(found, counts, strict=True))

    def sift(self, stage: str, batch: Batch, reason: Callable[[Document], str | None]) -> Batch:
        """Those that there is no reason to drop."""
        kept = []
        for document in batch:
            if why := reason(document):
                self.drop(stage, why, 1, len(document.raw))
            else:
                kept.append(document)
        self.keep(stage, len(kept), size_of(kept), size_of(kept))
        return kept

    def stages(self) -> tuple[Stage, ...]:
        return tuple(
            Stage(
                name=name,
                documents_in=sum(documents for documents, _, _ in book.values()),
                bytes_in=sum(size for _, size, _ in book.values()),
                documents_kept=book[""][0],
                bytes_kept=book[""][2],
                dropped={
                    reason: (count[0], count[1]) for reason, count in sorted(book.items()) if reason
                },
            )
            for name, book in self._books.items()
        )


def total(parts: Iterable[tuple[Stage, ...]]) -> tuple[Stage, ...]:
    """Many tasks' books as one."""
    ledger = Ledger()
    for stage in (stage for part in parts for stage in part):
        gone = sum(size for _, size in stage.dropped.values())
        ledger.keep(stage.name, stage.documents_kept, stage.bytes_in - gone, stage.bytes_kept)
        for reason, (documents, size) in stage.dropped.items():
            ledger.drop(stage.name, reason, documents, size)
    return ledger.stages()


def size_of(batch: Batch) -> int:
    return sum(len(document.raw) for document in batch)


def before_dedup(task: Task, recipe: Recipe, ledger: Ledger) -> Iterator[Batch]:
    for batch in batches(task, recipe.text_key, ledger):
        yield filtered(normalised(batch, recipe.normalise, ledger), recipe.filters, ledger)


def after_dedup(
    task: Task, recipe: Recipe, keep: npt.NDArray[np.bool_], ledger: Ledger
) -> Iterator[Batch]:
    """The documents that an earlier pass, which judged and counted them, has left."""
    for batch in batches(task, recipe.text_key, ledger):
        yield normalised(
            [document for document in batch if keep[document.item]], recipe.normalise, ledger
        )


def batches(task: Task, key: str, ledger: Ledger) -> Iterator[Batch]:
    batch: Batch = []
    size = 0
    for item, found in enumerate(found for piece in task for found in read(piece, key)):
        if isinstance(found, Malformed):
            ledger.set_aside(found)
            continue
        raw = found.encode()
        if not found or found.isspace():
            ledger.drop("read", "empty", 1, len(raw))
            continue
        batch.append(Document(item, found, raw))
        size += len(raw)
        if size >= MB or len(batch) == DOCUMENTS:
            ledger.keep("read", len(batch), size, size)
            yield batch
            batch, size = [], 0
    if batch:
        ledger.keep("read", len(batch), size, size)
        yield batch


def normalised(batch: Batch, rules: Normalise, ledger: Ledger) -> Batch:
    if rules == Normalise():
        return batch
    found = []
    for document in batch:
        text = normalise(document.text, rules)
        if text and not text.isspace():
            found.append(Document(document.item, text, text.encode()))
            ledger.keep("normalise", 1, len(document.raw), len(found[-1].raw))
        else:
            ledger.drop("normalise", "empty", 1, len(document.raw))
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
            ledger.drop("dedup", "exact", 1, len(document.raw))
        else:
            seen[digest] = None
            fresh.append(document)
    return fresh


def decontaminated(batch: Batch, held_out: Mapping[int, U64], ledger: Ledger) -> Batch:
    return ledger.sift(
        "decontaminate", batch, lambda d: "overlap" if shares_ngram(d.raw, held_out) else None
    )


def shares_ngram(raw: bytes, held_out: Mapping[int, U64]) -> bool:
    """Whether any n consecutive words also stand in the held-out text; held_out has them by n, sorted."""
    words = word_hashes(raw)
    for n, known in held_out.items():
        grams = ngrams(words, n)
        at = np.searchsorted(known, grams)
        at[at == len(known)] = 0
        if (known[at] == grams).any():
            return True
    return False
