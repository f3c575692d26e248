"""First pass of dedup, one task: judge every document and leave a small sketch of those that pass.

A sketch is a few arrays, sorted by key, so that a later step maps only its own range of keys into memory.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.config.frozen import Frozen
from pipeline.data.files import save
from pipeline.data.permute import U64, mix
from pipeline.data.piece import Task
from pipeline.data.recipe import Near, Recipe
from pipeline.data.shards import Stage
from pipeline.data.shingles import shingles
from pipeline.data.stages import Ledger, Position, before_dedup, unique
from pipeline.files import sync_directory

BOTTOM = 512  # smallest shingle hashes kept per document: exact Jaccard up to that many shingles, ±0.02 beyond
BLOCK = 2048  # shingles hashed at once: long documents take no more memory than short ones

EXACT = np.dtype([("key", "u8"), ("check", "u8"), ("document", "u4")])
BAND = np.dtype([("key", "u8"), ("document", "u4")])


class Sketched(Frozen):
    """The record of a finished sketch."""

    stages: tuple[Stage, ...]
    malformed: Position | None


def sketch(task: Task, stem: Path, recipe: Recipe) -> Sketched:
    """Write STEM.items, .sizes, .exact, .bands, .bottom and .ends, then the record."""
    ledger, near = Ledger(), recipe.dedup.near
    items: list[int] = []
    sizes: list[int] = []
    digests: dict[bytes, None] = {}  # empty where exact dedup is off
    bands: list[U64] = []
    bottoms: list[npt.NDArray[np.uint32]] = []
    for batch in before_dedup(task, recipe, ledger):
        for document in unique(batch, digests, ledger) if recipe.dedup.exact else batch:
            items.append(document.item)
            sizes.append(len(document.raw))
            if near:
                grams = shingles(document.raw, near.ngram)
                bands.append(band_keys(grams, near))
                bottoms.append(bottom(grams))
    exact = np.zeros(len(digests), EXACT)
    pairs = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)
    exact["key"], exact["check"], exact["document"] = pairs[:, 0], pairs[:, 1], np.arange(len(digests))
    banded = np.zeros(sum(map(len, bands)), BAND)
    if len(banded):
        banded["key"] = np.concatenate(bands)
        banded["document"] = np.repeat(np.arange(len(items)), [len(b) for b in bands])
    arrays: dict[str, npt.NDArray[Any]] = {
        "items": np.array(items, np.uint32),
        "sizes": np.array(sizes, np.uint64),
        "exact": np.sort(exact, order=["key", "check", "document"]),
        "bands": np.sort(banded, order=["key", "document"]),
        "bottom": np.concatenate(bottoms) if bottoms else np.zeros(0, np.uint32),
        "ends": np.cumsum([len(b) for b in bottoms], dtype=np.int64),
    }
    for suffix, array in arrays.items():
        save(stem.with_suffix(f".{suffix}.npy"), array, flush_name=False)
    sync_directory(stem.parent)
    record = Sketched(stages=ledger.stages(), malformed=ledger.malformed)
    save(stem.with_suffix(".done.json"), record.model_dump_json().encode(), flush_name=False)
    return record


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
    return factor | np.uint64(1), offset, mix(np.arange(bands, dtype=np.uint64) + np.uint64(2 * size))


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
