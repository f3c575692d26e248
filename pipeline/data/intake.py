"""The stages before tokenizing: read → normalise → filter → decontaminate, document by document, books kept."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.data.filters import reason_to_drop
from pipeline.data.normalise import normalise
from pipeline.data.permute import U64
from pipeline.data.piece import Task
from pipeline.data.read import Malformed, read
from pipeline.data.recipe import Filters, Normalise, Recipe
from pipeline.data.shards import Stage
from pipeline.data.shingles import shingles

POSITIONS = 100  # malformed documents a task names one by one; all are counted


class Document(NamedTuple):
    item: int  # its place among all that was read, malformed ones included
    text: str
    raw: bytes


class Ledger:
    """Documents and bytes into a stage, kept and dropped, with the reasons."""

    def __init__(self) -> None:
        self._kept: dict[str, list[int]] = {}  # by stage: documents, bytes that came in, bytes that go on
        self._dropped: dict[str, dict[str, tuple[int, int]]] = {}

    def keep(self, stage: str, bytes_in: int, bytes_kept: int, documents: int = 1) -> None:
        count = self._kept.setdefault(stage, [0, 0, 0])
        count[:] = count[0] + documents, count[1] + bytes_in, count[2] + bytes_kept

    def drop(self, stage: str, reason: str, size: int, documents: int = 1) -> None:
        self.keep(stage, 0, 0, 0)
        before = self._dropped.setdefault(stage, {}).get(reason, (0, 0))
        self._dropped[stage][reason] = (before[0] + documents, before[1] + size)

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


class Intake:
    """What a task takes in; every document comes out that no stage drops."""

    def __init__(self, task: Task, recipe: Recipe, held_out: U64 | None = None) -> None:
        self._task, self._recipe, self._held_out = task, recipe, held_out
        self.ledger = Ledger()
        self.malformed: list[tuple[str, int, str]] = []  # path, position, reason
        self.items = 0

    def __iter__(self) -> Iterator[Document]:
        rules = self._recipe
        normalises, filters = rules.normalise != Normalise(), rules.filters != Filters()
        for item in self._read():
            text, raw = item.text, item.raw
            if normalises:
                text = normalise(item.text, rules.normalise)
                raw = text.encode()
                self.ledger.keep("normalise", len(item.raw), len(raw))
            if filters:
                if reason := reason_to_drop(text, rules.filters):
                    self.ledger.drop("filter", reason, len(raw))
                    continue
                self.ledger.keep("filter", len(raw), len(raw))
            if rules.decontaminate is not None and self._held_out is not None:
                if shares_ngram(raw, rules.decontaminate.ngram, self._held_out):
                    self.ledger.drop("decontaminate", "overlap", len(raw))
                    continue
                self.ledger.keep("decontaminate", len(raw), len(raw))
            yield Document(item.item, text, raw)

    def only(self, keep: npt.NDArray[np.bool_]) -> Iterator[Document]:
        """The documents that an earlier pass has already judged worth keeping."""
        for item in self._read():
            if keep[item.item]:
                text = normalise(item.text, self._recipe.normalise)
                yield Document(item.item, text, text.encode())

    def _read(self) -> Iterator[Document]:
        for found in (found for piece in self._task for found in read(piece, self._recipe.text_key)):
            item = self.items
            self.items += 1
            if isinstance(found, Malformed):
                self.ledger.drop("read", "malformed", found.bytes)
                if len(self.malformed) < POSITIONS:
                    self.malformed.append((found.path, found.position, found.reason))
                continue
            raw = found.encode()
            if not found or found.isspace():
                self.ledger.drop("read", "empty", len(raw))
                continue
            self.ledger.keep("read", len(raw), len(raw))
            yield Document(item, found, raw)


def shares_ngram(raw: bytes, n: int, held_out: U64) -> bool:
    """Whether any n consecutive words also stand in the held-out text; held_out is sorted."""
    grams = shingles(raw, n)
    at = np.searchsorted(held_out, grams)
    at[at == len(held_out)] = 0
    return bool(len(held_out) and (held_out[at] == grams).any())
