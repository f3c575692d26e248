"""Second pass of dedup: find equal keys over all sketches, cluster, and say what each task keeps.

Keys are cut into ranges; each range is one Ray task that reads only its own stretch of every sorted sketch and leaves
the pairs it finds in a file. The driver joins them block by block in a mapped array: no step's memory grows with the
corpus. A document's number is its place in the plan; of every cluster the first stays.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.atomic import sync_directory
from pipeline.data.cluster import run
from pipeline.data.files import save
from pipeline.data.recipe import Recipe
from pipeline.data.shards import Stage
from pipeline.data.sketch import Sketched, part_of, similarity
from pipeline.data.stages import Ledger

RANGE_ROWS = 4_000_000  # keys per range: some hundred megabytes while a range is worked on
BLOCK = 2**16  # documents or pairs at once
SAME = "same"  # the file that says which documents are copies

I64 = npt.NDArray[np.int64]


def deduplicate(
    stems: Sequence[Path], sketched: Sequence[Sketched], recipe: Recipe
) -> tuple[Stage, ...]:
    """Write STEM.keep.npy for every task: for each item read, whether it stays. Returns the stage's books."""
    folder = stems[0].parent
    parts = [
        part_of(stem, i)
        for stem, record in zip(stems, sketched, strict=True)
        for i in range(record.parts)
    ]
    starts = np.cumsum([0, *(_length(part, "items") for part in parts)])
    size = int(starts[-1])
    parents = np.asarray(np.memmap(folder / "parents", np.int64, "w+", shape=(size + 1,)))
    same = np.memmap(folder / SAME, bool, "w+", shape=(size + 1,))
    for low in range(0, size, BLOCK):
        parents[low : low + BLOCK] = np.arange(low, low + len(parents[low : low + BLOCK]))
    if recipe.dedup.exact:
        for pairs in _pairs(_exact_range, "exact", parts, starts, recipe):
            join(parents, pairs)
            same[pairs[:, 1]] = True
        same.flush()  # other nodes read it
    if recipe.dedup.near:
        for pairs in _pairs(_near_range, "bands", parts, starts, recipe):
            join(parents, pairs)
    ledger, stretches = Ledger(), zip(starts, starts[1:], parts, strict=False)
    for stem, record in zip(stems, sketched, strict=True):
        keep = np.zeros(record.stages[0].documents_in if record.stages else 0, bool)
        for low, high, part in islice(stretches, record.parts):
            items, sizes = (
                np.load(part.with_suffix(f".{suffix}.npy")) for suffix in ("items", "sizes")
            )
            stays = parents[low:high] == np.arange(low, high)
            for reason, gone in (("exact", same[low:high]), ("near", ~stays & ~same[low:high])):
                if gone.any():
                    ledger.drop("dedup", reason, int(gone.sum()), int(sizes[gone].sum()))
            left = int(sizes[stays].sum())
            ledger.keep("dedup", int(stays.sum()), left, left)
            keep[items[stays]] = True
        save(stem.with_suffix(".keep.npy"), keep, flush_name=False)
    sync_directory(folder)
    return ledger.stages()


def join(parents: I64, pairs: I64) -> None:
    """Union-find, many pairs at once: a parent is an earlier document, so the first of a cluster is its root."""
    while len(pairs):
        roots = pairs
        while not np.array_equal(up := parents[roots], roots):
            parents[roots] = roots = parents[up]  # every path walked is halved
        pairs = roots[roots[:, 0] != roots[:, 1]]
        np.minimum.at(parents, pairs.max(axis=1), pairs.min(axis=1))


def _pairs(
    function: Callable[..., None], suffix: str, stems: Sequence[Path], starts: I64, recipe: Recipe
) -> Iterator[I64]:
    """Pairs (earlier, later) that the function finds in each range of keys, block by block."""
    rows = sum(_length(stem, suffix) for stem in stems)
    ranges = max(1, -(-rows // RANGE_ROWS))
    outs = [stems[0].parent / f"{suffix}-{part}of{ranges}.npy" for part in range(ranges)]
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
    first, again, _ = _groups(rows[["key", "check"]][order], numbers[order])
    save(out, np.stack((first, again), axis=1))


def _near_range(
    out: Path, part: int, ranges: int, stems: list[Path], starts: I64, recipe: Recipe
) -> None:
    """Candidates share a band; each is compared with the first of its bucket and with its neighbour."""
    near = recipe.dedup.near
    assert near is not None
    rows, numbers = _rows(
        "bands", part, ranges, stems, starts, copies=False
    )  # they would only swell the buckets
    order = np.lexsort((numbers, rows["key"]))
    first, again, before = _groups(rows["key"][order], numbers[order])
    pairs = np.unique(
        np.concatenate((np.stack((first, again), 1), np.stack((before, again), 1))), axis=0
    )
    stretches = lru_cache(256)(Stretches)

    @lru_cache(4096)
    def bottom(number: int) -> npt.NDArray[Any]:
        at = int(np.searchsorted(starts, number, "right")) - 1
        document = number - int(starts[at])
        start, stop = stretches(stems[at].with_suffix(".ends.npy"))[
            document : document + 2
        ].tolist()
        return stretches(stems[at].with_suffix(".bottom.npy"))[start:stop]

    close = np.zeros(len(pairs), bool)
    for low in range(0, len(pairs), BLOCK):
        block = pairs[low : low + BLOCK].tolist()
        close[low : low + BLOCK] = [
            similarity(bottom(a), bottom(b)) >= near.threshold for a, b in block
        ]
    save(out, pairs[close])


def _groups(keys: npt.NDArray[np.generic], numbers: I64) -> tuple[I64, I64, I64]:
    """Of sorted keys: every number that does not open its group, with the group's first and the one before it."""
    fresh = np.ones(len(keys), bool)
    fresh[1:] = keys[1:] != keys[:-1]
    first = numbers[np.flatnonzero(fresh)[np.cumsum(fresh) - 1]]
    return first[~fresh], numbers[~fresh], np.roll(numbers, 1)[~fresh]


def _rows(
    suffix: str, part: int, ranges: int, stems: list[Path], starts: I64, copies: bool = True
) -> tuple[npt.NDArray[np.void], I64]:
    """The stretch of every sketch whose keys lie in this range, and the documents' numbers."""
    low, high = part * 2**64 // ranges, (part + 1) * 2**64 // ranges
    found, numbers = [], []
    for begin, end, stem in zip(starts, starts[1:], stems, strict=False):
        rows = np.load(stem.with_suffix(f".{suffix}.npy"), mmap_mode="r")
        start = int(np.searchsorted(rows["key"], np.uint64(low)))
        stop = len(rows) if high == 2**64 else int(np.searchsorted(rows["key"], np.uint64(high)))
        mine = np.array(rows[start:stop])
        if not copies:
            mine = mine[
                ~np.fromfile(stem.parent / SAME, bool, end - begin, offset=begin)[mine["document"]]
            ]
        found.append(mine)
        numbers.append(begin + mine["document"])
    return np.concatenate(found), np.concatenate(numbers)


def _length(stem: Path, suffix: str) -> int:
    return len(np.load(stem.with_suffix(f".{suffix}.npy"), mmap_mode="r"))


class Stretches:
    """A saved array that is read from the file at every asking: pages of a mapped one would count as memory."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        np.lib.format.read_magic(self._file)
        _, _, self._dtype = np.lib.format.read_array_header_1_0(self._file)
        self._start = self._file.tell()

    def __getitem__(self, at: slice) -> npt.NDArray[Any]:
        size = self._dtype.itemsize
        raw = os.pread(
            self._file.fileno(), (at.stop - at.start) * size, self._start + at.start * size
        )
        return np.frombuffer(raw, self._dtype)
