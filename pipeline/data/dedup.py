"""The second pass of dedup: find equal keys over all sketches, cluster, and decide what to keep.

The keys are cut into ranges. Each range is one Ray task, which reads only its own stretch of every
sorted sketch and writes the pairs it finds. The driver joins the pairs block by block in a mapped
array: no step's memory grows with the corpus. Documents are numbered in the order of the plan; the
first of every cluster is kept.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.atomic import sync_directory
from pipeline.data.clean import Ledger
from pipeline.data.corpus_recipe import Recipe
from pipeline.data.ray_pool import run
from pipeline.data.shards import Stage, replacing, save
from pipeline.data.sketch import Sketched, part_of, similarity
from pipeline.objective.draws import I64

RANGE_ROWS = 4_000_000  # keys per range: a task takes some hundred megabytes
BLOCK = 2**16  # documents or pairs processed at once
NPY_HEADER_BYTES = 128  # of every one-dimensional array of plain numbers that np.save writes
COPIES = "same"  # file with a flag per document: whether it is an exact copy of an earlier one


def deduplicate(
    stems: Sequence[Path], sketched: Sequence[Sketched], recipe: Recipe
) -> tuple[Stage, ...]:
    """Write STEM.keep.npy for every task, one flag per item read, and return the stage's counts."""
    folder = stems[0].parent
    records = list(zip(stems, sketched, strict=True))
    parts = [part_of(stem, i) for stem, record in records for i in range(record.parts)]
    starts = np.cumsum([0, *(_length(part, "items") for part in parts)])
    size = int(starts[-1])
    # Union-find over all documents, on disk. One element more, as an empty file cannot be mapped.
    parents = np.asarray(_mapped(folder / "parents", np.arange, size + 1))
    copies = _mapped(folder / COPIES, lambda low, high: np.zeros(high - low, bool), size + 1)
    if recipe.dedup.exact:
        for pairs in _pairs(_exact_range, "exact", parts, starts, recipe):
            join(parents, pairs)
            copies[pairs[:, 1]] = True
        copies.flush()  # workers on other nodes read the file
    if recipe.dedup.near:
        for pairs in _pairs(_near_range, "bands", parts, starts, recipe):
            join(parents, pairs)
    ledger = Ledger()
    stretches = zip(starts, starts[1:], parts, strict=False)  # used up record by record
    for stem, record in records:
        keep = np.zeros(record.stages[0].documents_in if record.stages else 0, bool)
        for low, high, part in islice(stretches, record.parts):
            items = np.load(part.with_suffix(".items.npy"))
            sizes = np.load(part.with_suffix(".sizes.npy"))
            kept = parents[low:high] == np.arange(low, high)  # the root of its cluster
            exact = copies[low:high]
            for reason, dropped in (("exact", exact), ("near", ~kept & ~exact)):
                if dropped.any():
                    ledger.drop("dedup", reason, int(dropped.sum()), int(sizes[dropped].sum()))
            kept_bytes = int(sizes[kept].sum())
            ledger.keep("dedup", int(kept.sum()), kept_bytes, kept_bytes)
            keep[items[kept]] = True
        save(stem.with_suffix(".keep.npy"), keep, flush_name=False)
    sync_directory(folder)
    return ledger.stages()


def _mapped(
    path: Path, values: Callable[[int, int], npt.NDArray[Any]], size: int
) -> "np.memmap[Any, Any]":
    """Write an array block by block and map its file; values(low, high) returns one block."""
    # A new file that is only mapped has no blocks yet: on a full disk, the first change of a page
    # would kill the process.
    with replacing(path, flush_name=False) as file:
        for low in range(0, size, BLOCK):
            file.write(values(low, min(low + BLOCK, size)).data)
    return np.memmap(path, values(0, 0).dtype, "r+")


def join(parents: I64, pairs: I64) -> None:
    """Union-find on many pairs at once.

    A parent is always an earlier document, so the first document of a cluster is its root.
    """
    while len(pairs):
        roots = pairs
        while not np.array_equal(up := parents[roots], roots):
            grandparents = parents[up]
            parents[roots] = grandparents  # path halving
            roots = grandparents
        pairs = roots[roots[:, 0] != roots[:, 1]]
        np.minimum.at(parents, pairs.max(axis=1), pairs.min(axis=1))


def _pairs(
    function: Callable[..., None], suffix: str, stems: Sequence[Path], starts: I64, recipe: Recipe
) -> Iterator[I64]:
    """Yield the pairs (earlier, later) that the function finds in each range, block by block."""
    rows = sum(_length(stem, suffix) for stem in stems)
    ranges = max(1, -(-rows // RANGE_ROWS))
    outs = [stems[0].parent / f"{suffix}-{part}of{ranges}.npy" for part in range(ranges)]
    # An earlier call may have finished some ranges.
    missing = [part for part, out in enumerate(outs) if not out.exists()]
    run(function, [(outs[part], part, ranges, list(stems), starts, recipe) for part in missing])
    for out in outs:
        found = np.load(out, mmap_mode="r")
        for low in range(0, len(found), BLOCK):
            yield np.array(found[low : low + BLOCK])


def _exact_range(
    out: Path, part: int, ranges: int, stems: list[Path], starts: I64, recipe: Recipe
) -> None:
    rows, numbers = _rows("exact", part, ranges, stems, starts)
    order = np.lexsort((numbers, rows["check"], rows["key"]))
    first, later, _ = _groups(rows[["key", "check"]][order], numbers[order])
    save(out, np.stack((first, later), axis=1))


def _near_range(
    out: Path, part: int, ranges: int, stems: list[Path], starts: I64, recipe: Recipe
) -> None:
    """Compare each document with the first of its bucket (equal band) and with the one before."""
    near = recipe.dedup.near
    assert near is not None
    # Leave out exact copies, which would only make the buckets larger.
    rows, numbers = _rows("bands", part, ranges, stems, starts, copies=False)
    order = np.lexsort((numbers, rows["key"]))
    first, later, previous = _groups(rows["key"][order], numbers[order])
    candidates = np.concatenate((np.stack((first, later), 1), np.stack((previous, later), 1)))
    pairs = np.unique(candidates, axis=0)

    @lru_cache(4096)
    def bottom(number: int) -> npt.NDArray[Any]:
        at = int(np.searchsorted(starts, number, "right")) - 1
        document = number - int(starts[at])
        start, stop = _slice(stems[at], "ends", np.int64, document, document + 2).tolist()
        return _slice(stems[at], "bottom", np.uint32, start, stop)

    close = np.zeros(len(pairs), bool)
    for low in range(0, len(pairs), BLOCK):
        block = pairs[low : low + BLOCK].tolist()
        similarities = (similarity(bottom(a), bottom(b)) for a, b in block)
        close[low : low + BLOCK] = [value >= near.threshold for value in similarities]
    save(out, pairs[close])


def _groups(keys: npt.NDArray[np.generic], numbers: I64) -> tuple[I64, I64, I64]:
    """Group numbers by sorted keys. For all but the first of each group, return three arrays:

    the first number of the group, the number itself, and the number before it.
    """
    begins = np.ones(len(keys), bool)  # whether a group begins here
    begins[1:] = keys[1:] != keys[:-1]
    first = numbers[np.flatnonzero(begins)[np.cumsum(begins) - 1]]
    return first[~begins], numbers[~begins], np.roll(numbers, 1)[~begins]


def _rows(
    suffix: str, part: int, ranges: int, stems: list[Path], starts: I64, copies: bool = True
) -> tuple[npt.NDArray[np.void], I64]:
    """Read the rows of every sketch whose keys are in this range, and the documents' numbers."""
    low = part * 2**64 // ranges
    high = (part + 1) * 2**64 // ranges
    found = []
    numbers = []
    for begin, end, stem in zip(starts, starts[1:], stems, strict=False):
        rows = np.load(stem.with_suffix(f".{suffix}.npy"), mmap_mode="r")
        start = int(np.searchsorted(rows["key"], np.uint64(low)))
        stop = len(rows) if high == 2**64 else int(np.searchsorted(rows["key"], np.uint64(high)))
        mine = np.array(rows[start:stop])  # a copy, so that the mapped pages can go
        if not copies:
            is_copy = np.fromfile(stem.parent / COPIES, bool, end - begin, offset=begin)
            mine = mine[~is_copy[mine["document"]]]
        found.append(mine)
        numbers.append(begin + mine["document"])
    return np.concatenate(found), np.concatenate(numbers)


def _length(stem: Path, suffix: str) -> int:
    return len(np.load(stem.with_suffix(f".{suffix}.npy"), mmap_mode="r"))


def _slice(
    stem: Path, suffix: str, dtype: npt.DTypeLike, start: int, stop: int
) -> npt.NDArray[Any]:
    """Read a few elements of an array: the pages of a mapped one would count as memory."""
    offset = NPY_HEADER_BYTES + start * np.dtype(dtype).itemsize
    return np.fromfile(stem.with_suffix(f".{suffix}.npy"), dtype, stop - start, offset=offset)
