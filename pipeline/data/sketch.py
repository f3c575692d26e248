"""First pass of dedup, one task: judge every document and leave a small sketch of those that pass.

A sketch is a few arrays, sorted by key, so that a later step reads only its own range of keys. It comes in parts: a
compressed file, which is one task however long it is, takes no more memory than another.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.atomic import sync_directory
from pipeline.config.parts import Frozen
from pipeline.data.files import save
from pipeline.data.permute import U64, mix
from pipeline.data.piece import MB, Task
from pipeline.data.recipe import Near, Recipe
from pipeline.data.shards import Stage
from pipeline.data.shingles import shingles
from pipeline.data.stages import Document, Ledger, Position, before_dedup, unique

BOTTOM = 512  # smallest shingle hashes kept per document: exact Jaccard up to that many shingles, ±0.02 beyond
PART_BYTES = 128 * MB  # of sketches in memory; as much again while they are sorted
OBJECT_BYTES = 128  # beside the numbers of an array, or of a digest
BLOCK = 2048  # shingles hashed at once: long documents take no more memory than short ones

EXACT = np.dtype([("key", "u8"), ("check", "u8"), ("document", "u4")])
BAND = np.dtype([("key", "u8"), ("document", "u4")])


class Sketched(Frozen):
    """The record of a finished sketch."""

    stages: tuple[Stage, ...]
    malformed: Position | None
    parts: int


def part_of(stem: Path, number: int) -> Path:
    return stem.with_name(f"{stem.name}-{number}")


def sketch(task: Task, stem: Path, recipe: Recipe) -> Sketched:
    """Write the parts of the sketch, then the record."""
    ledger, near, held, parts = Ledger(), recipe.dedup.near, _Part(), 0
    for batch in before_dedup(task, recipe, ledger):
        if held.bytes > PART_BYTES:
            held.save(part_of(stem, parts))
            held, parts = _Part(), parts + 1
        for document in unique(batch, held.digests, ledger) if recipe.dedup.exact else batch:
            held.add(document, near)
    held.save(part_of(stem, parts))
    sync_directory(stem.parent)
    record = Sketched(stages=ledger.stages(), malformed=ledger.malformed, parts=parts + 1)
    save(stem.with_suffix(".done.json"), record.model_dump_json().encode(), flush_name=False)
    return record


class _Part:
    """Sketches of documents that follow each other, until they go to the disk."""

    def __init__(self) -> None:
        self.digests: dict[bytes, None] = {}  # empty where exact dedup is off
        self.bytes = 0
        self._items: list[int] = []
        self._sizes: list[int] = []
        self._bands: list[U64] = []
        self._bottoms: list[npt.NDArray[np.uint32]] = []

    def add(self, document: Document, near: Near | None) -> None:
        self._items.append(document.item)
        self._sizes.append(len(document.raw))
        self.bytes += OBJECT_BYTES
        if near:
            grams = shingles(document.raw, near.ngram)
            self._bands.append(band_keys(grams, near))
            self._bottoms.append(bottom(grams))
            self.bytes += 2 * OBJECT_BYTES + self._bands[-1].nbytes + self._bottoms[-1].nbytes

    def save(self, stem: Path) -> None:
        """As STEM.items, .sizes, .exact, .bands, .bottom and .ends."""
        exact = np.zeros(len(self.digests), EXACT)
        pairs = np.frombuffer(b"".join(self.digests), "<u8").reshape(-1, 2)
        exact["key"], exact["check"], exact["document"] = (
            pairs[:, 0],
            pairs[:, 1],
            np.arange(len(exact)),
        )
        banded = np.zeros(sum(map(len, self._bands)), BAND)
        if len(banded):
            banded["key"] = np.concatenate(self._bands)
            banded["document"] = np.repeat(
                np.arange(len(self._items)), [len(b) for b in self._bands]
            )
        arrays: dict[str, npt.NDArray[Any]] = {
            "items": np.array(self._items, np.uint32),
            "sizes": np.array(self._sizes, np.uint64),
            "exact": np.sort(exact, order=["key", "check", "document"]),
            "bands": np.sort(banded, order=["key", "document"]),
            "bottom": np.concatenate([*self._bottoms, np.zeros(0, np.uint32)]),
            "ends": np.cumsum([0, *(len(b) for b in self._bottoms)], dtype=np.int64),
        }
        for suffix, array in arrays.items():
            save(stem.with_suffix(f".{suffix}.npy"), array, flush_name=False)


def band_keys(grams: U64, near: Near) -> U64:
    """One key per band of the MinHash signature (Broder 1997; banding as in Leskovec, Rajaraman & Ullman, ch. 3)."""
    if len(grams) == 0:
        return grams
    factor, offset, salt = _constants(near.bands, near.rows)
    smallest = np.full(len(factor), 2**64 - 1, np.uint64)
    for start in range(0, len(grams), BLOCK):
        hashed = np.multiply.outer(grams[start : start + BLOCK], factor)
        hashed += offset
        np.minimum(smallest, hashed.min(axis=0), out=smallest)
    # The low bits of a product modulo 2**64 are the weak ones: the high half decides.
    rows = (smallest >> np.uint64(32)).reshape(near.bands, near.rows)
    return mix((rows * factor[: near.rows]).sum(axis=1, dtype=np.uint64) + salt)


@lru_cache(4)
def _constants(bands: int, rows: int) -> tuple[U64, U64, U64]:
    size = bands * rows
    factor, offset = mix(np.arange(1, 2 * size + 1, dtype=np.uint64)).reshape(2, size)
    return (
        factor | np.uint64(1),
        offset,
        mix(np.arange(bands, dtype=np.uint64) + np.uint64(2 * size)),
    )


def bottom(grams: U64) -> npt.NDArray[np.uint32]:
    """The smallest distinct hashes, 32 bits of each; grams are sorted."""
    low = (grams[:BOTTOM] >> np.uint64(32)).astype(np.uint32)
    fresh = np.ones(len(low), bool)
    np.not_equal(low[1:], low[:-1], out=fresh[1:])
    return low[fresh]


def similarity(a: npt.NDArray[np.uint32], b: npt.NDArray[np.uint32]) -> float:
    """Jaccard similarity from two bottom sketches, over the range of hashes that both cover."""
    reach = min(int(x[-1]) if len(x) >= BOTTOM - 1 else 2**32 for x in (a, b))
    a, b = a[a <= reach], b[b <= reach]
    shared = len(np.intersect1d(a, b, assume_unique=True))
    return shared / max(1, len(a) + len(b) - shared)
