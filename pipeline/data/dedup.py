"""Second pass of dedup: find equal keys over all sketches, cluster, and say what each task keeps.

Keys are cut into ranges; each range is one Ray task that maps only its own stretch of every sorted sketch, so memory is
bounded by the range, not by the corpus. Of every cluster the document that comes first in the plan stays.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.data.cluster import run
from pipeline.data.files import replacing
from pipeline.data.intake import Ledger
from pipeline.data.recipe import Recipe
from pipeline.data.shards import Stage
from pipeline.data.sketch import Sketched, similarity

RANGE_ROWS = 4_000_000  # keys per range: some hundred megabytes while a range is worked on
TASK_BITS = np.uint64(32)  # a document's number: its task above, its place in the sketch below

U64 = npt.NDArray[np.uint64]
Edges = npt.NDArray[np.uint64]  # pairs of documents (first, later)


def deduplicate(stems: Sequence[Path], sketched: Sequence[Sketched], recipe: Recipe) -> tuple[Stage, ...]:
    """Write STEM.keep.npy for every task: for each item read, whether it stays. Returns the stage's books."""
    exact = _edges(_exact_range, "exact", stems, recipe) if recipe.dedup.exact else np.zeros((0, 2), np.uint64)
    near = _edges(_near_range, "bands", stems, recipe) if recipe.dedup.near else np.zeros((0, 2), np.uint64)
    same = np.unique(exact[:, 1])
    close = np.setdiff1d(later_ones(np.concatenate((exact, near))), same)
    ledger = Ledger()
    for number, (stem, record) in enumerate(zip(stems, sketched, strict=True)):
        items, sizes = np.load(stem.with_suffix(".items.npy")), np.load(stem.with_suffix(".sizes.npy"))
        stays = np.ones(len(items), bool)
        for reason, dropped in (("exact", same), ("near", close)):
            low, high = np.searchsorted(dropped, np.array([number, number + 1], np.uint64) << TASK_BITS)
            mine = (dropped[low:high] & np.uint64(2**32 - 1)).astype(np.int64)
            stays[mine] = False
            if len(mine):
                ledger.drop("dedup", reason, int(sizes[mine].sum()), len(mine))
        left = int(sizes[stays].sum())
        ledger.keep("dedup", left, left, int(stays.sum()))
        keep = np.zeros(record.items, bool)
        keep[items[stays]] = True
        with replacing(stem.with_suffix(".keep.npy")) as file:
            np.save(file, keep)
    return ledger.stages()


def _edges(function, suffix: str, stems: Sequence[Path], recipe: Recipe) -> Edges:  # type: ignore[no-untyped-def]
    rows = sum(len(np.load(stem.with_suffix(f".{suffix}.npy"), mmap_mode="r")) for stem in stems)
    ranges = max(1, -(-rows // RANGE_ROWS))
    found = run(function, [(part, ranges, list(stems), recipe) for part in range(ranges)])
    return np.unique(np.concatenate(found), axis=0)


def _exact_range(part: int, ranges: int, stems: list[Path], recipe: Recipe) -> Edges:
    rows, numbers = _rows("exact", part, ranges, stems)
    order = np.lexsort((numbers, rows["check"], rows["key"]))
    rows, numbers = rows[order], numbers[order]
    starts = np.flatnonzero(
        np.r_[True, (rows["key"][1:] != rows["key"][:-1]) | (rows["check"][1:] != rows["check"][:-1])]
    )
    first = np.repeat(numbers[starts], np.diff(np.r_[starts, len(rows)])) if len(rows) else numbers
    again = first != numbers
    return np.stack((first[again], numbers[again]), axis=1)


def _near_range(part: int, ranges: int, stems: list[Path], recipe: Recipe) -> Edges:
    """Candidates share a band; each is compared with the first of its bucket and with its neighbour."""
    near = recipe.dedup.near
    assert near is not None
    rows, numbers = _rows("bands", part, ranges, stems)
    order = np.lexsort((numbers, rows["key"]))
    key, numbers = rows["key"][order], numbers[order]
    fresh = np.r_[True, key[1:] != key[:-1]] if len(key) else np.zeros(0, bool)
    starts = np.flatnonzero(fresh)
    first = np.repeat(numbers[starts], np.diff(np.r_[starts, len(key)])) if len(key) else numbers
    star = np.stack((first[~fresh], numbers[~fresh]), axis=1)
    chain = np.stack((np.roll(numbers, 1)[~fresh], numbers[~fresh]), axis=1)
    pairs = np.unique(np.concatenate((star, chain)), axis=0)
    bottom = lru_cache(4096)(lambda number: _bottom(stems, number))
    close = [similarity(bottom(a), bottom(b)) >= near.threshold for a, b in pairs.tolist()]
    verified: Edges = pairs[np.array(close, bool)]
    return verified


def _rows(suffix: str, part: int, ranges: int, stems: list[Path]) -> tuple[npt.NDArray[np.void], U64]:
    """The stretch of every sketch whose keys lie in this range, and the documents' numbers."""
    low, high = part * 2**64 // ranges, (part + 1) * 2**64 // ranges
    found, numbers = [], []
    for task, stem in enumerate(stems):
        rows = np.load(stem.with_suffix(f".{suffix}.npy"), mmap_mode="r")
        start = int(np.searchsorted(rows["key"], np.uint64(low)))
        stop = len(rows) if high == 2**64 else int(np.searchsorted(rows["key"], np.uint64(high)))
        found.append(np.array(rows[start:stop]))
        numbers.append((np.uint64(task) << TASK_BITS) + found[-1]["document"].astype(np.uint64))
    return np.concatenate(found), np.concatenate(numbers)


def _bottom(stems: list[Path], number: int) -> npt.NDArray[np.uint32]:
    task, document = number >> 32, number & (2**32 - 1)
    ends = _mapped(stems[task].with_suffix(".ends.npy"))
    start = int(ends[document - 1]) if document else 0
    return np.array(_mapped(stems[task].with_suffix(".bottom.npy"))[start : int(ends[document])])


@lru_cache(256)
def _mapped(path: Path) -> npt.NDArray[np.integer]:
    return np.load(path, mmap_mode="r")  # type: ignore[no-any-return]


def later_ones(edges: Edges) -> U64:
    """All documents that a chain of edges joins to an earlier one: union-find, the first of each cluster stays."""
    if not len(edges):
        return np.zeros(0, np.uint64)
    numbers, ends = np.unique(edges, return_inverse=True)
    ends = ends.reshape(-1, 2)
    parent = np.arange(len(numbers))
    while True:
        roots = parent[ends]
        low, high = roots.min(axis=1), roots.max(axis=1)
        if (low == high).all():
            later: U64 = numbers[parent != np.arange(len(numbers))]
            return later
        np.minimum.at(parent, high, low)
        while not np.array_equal(parent, shorter := parent[parent]):
            parent = shorter
