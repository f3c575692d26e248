"""Documents packed into rows that none of them crosses (best-fit decreasing; Ding et al. 2024, arXiv 2404.10830).

A document of n tokens fills n - 1 places: each token but the last is an input, each but the first a target. A document
longer than a row is cut into full rows and a rest; only rests share rows. A shard is packed when one of its rows is
first asked for; how many rows it will have is counted without packing. An epoch goes through a few shards at a time, in
an order of its own, so that a packing serves all its rows before it is forgotten: memory is constant in the corpus.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import lru_cache
from math import inf

import numpy as np
import numpy.typing as npt

from pipeline.data.permute import Permutation
from pipeline.data.shards import Corpus, Shard

IGNORE = -100  # target of a place that predicts nothing, as torch's cross-entropy names it
PACKED_SHARDS = 8  # whose rows are drawn in turn, and whose packings are kept at hand

I64 = npt.NDArray[np.int64]


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices per bin: the largest first, each into the fullest bin that still holds it."""
    bins: list[list[int]] = []
    open_bins: dict[int, list[int]] = {}  # by the space left
    spaces: list[int] = []  # the sorted keys of open_bins
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        at = bisect_left(spaces, sizes[index])
        if at == len(spaces):
            number, space = len(bins), capacity
            bins.append([])
        else:
            space = spaces[at]
            number = open_bins[space].pop()
            if not open_bins[space]:
                del open_bins[space], spaces[at]
        bins[number].append(index)
        if left := space - sizes[index]:
            if left not in open_bins:
                open_bins[left] = []
                insort(spaces, left)
            open_bins[left].append(number)
    return bins


def count_bins(counts: I64, capacity: int) -> int:
    """How many bins best_fit fills with counts[n] items of size n: equal items fill equal bins in equal ways."""
    opened, spaces = 0, [capacity]
    free: dict[int, float] = {capacity: inf}  # bins by the space left
    for size in np.flatnonzero(counts)[::-1].tolist():
        items = int(counts[size])
        while items:
            space = spaces[at := bisect_left(spaces, size)]
            each = min(
                items, space // size
            )  # a bin that has taken one is the fullest that holds another
            bins = int(min(items // each, free[space]))
            items -= bins * each
            opened += bins if space == capacity else 0
            free[space] -= bins
            if not free[space]:
                del free[space], spaces[at]
            if left := space - each * size:
                if left not in free:
                    insort(spaces, left)
                free[left] = free.get(left, 0) + bins
    return opened


def pack(lengths: npt.NDArray[np.int32], seq: int) -> tuple[I64, I64]:
    """The parts of all rows of a shard whose documents have these lengths, and where each row's parts end.

    A part is the inputs start…start+places-1, the targets one further.
    """
    starts = np.cumsum(lengths) - lengths
    full, rest = np.divmod(lengths.astype(np.int64) - 1, seq)
    whole = np.repeat(starts, full) + seq * (
        np.arange(full.sum()) - np.repeat(np.cumsum(full) - full, full)
    )
    rests = np.stack((starts + full * seq, rest), axis=1)[rest > 0]
    bins = best_fit(rests[:, 1].tolist(), seq)
    shared = rests[[i for group in bins for i in sorted(group)]]
    parts = np.concatenate((np.stack((whole, np.full_like(whole, seq)), axis=1), shared))
    return parts, np.cumsum([0, *[1] * len(whole), *map(len, bins)])


class PackedStream:
    """Rows instead of windows, the same numbering for the loader."""

    def __init__(self, corpus: Corpus, shards: Sequence[Shard], seq: int) -> None:
        self._eod = corpus.manifest.tokenizer.eod
        self._seq = seq
        self._packed = lru_cache(PACKED_SHARDS)(
            lambda index: pack(corpus.lengths(shards[index]), seq)
        )
        self._map = lru_cache(PACKED_SHARDS)(lambda index: corpus.tokens(shards[index]))
        self._rows = np.array([self._count(corpus.lengths(shard)) for shard in shards], np.int64)
        self._starts = np.cumsum([0, *self._rows.tolist()])
        self.windows = int(self._starts[-1])

    def _count(self, lengths: npt.NDArray[np.int32]) -> int:
        rests = np.bincount((lengths - 1) % self._seq)
        rests[0] = 0
        return int(((lengths - 1) // self._seq).sum()) + count_bins(rests, self._seq)

    def order(self, index: I64, seed: int, epoch: int) -> I64:
        """Which rows the epoch's index-th draws are: shards in a new order, shuffled together a few at a time."""
        count = len(self._rows)
        shards = Permutation(count, seed, epoch)(np.arange(count))
        ends = np.cumsum(self._rows[shards])
        group_ends = ends[np.minimum(np.arange(0, count, PACKED_SHARDS) + PACKED_SHARDS, count) - 1]
        groups, found = np.searchsorted(group_ends, index, "right"), np.empty_like(index)
        for group in np.unique(groups).tolist():
            low = int(group_ends[group - 1]) if group else 0
            mine = groups == group
            place = low + Permutation(int(group_ends[group]) - low, seed + group, epoch)(
                index[mine] - low
            )
            shard = shards[at := np.searchsorted(ends, place, "right")]
            found[mine] = self._starts[shard] + place - (ends[at] - self._rows[shard])
        return found

    def read(self, window: int, tokens: I64, targets: I64, documents: I64) -> None:
        """Fill one row; what is left at its end is padding, a document of its own that predicts nothing."""
        shard = int(np.searchsorted(self._starts, window, "right")) - 1
        data, at, number = self._map(shard), 0, 0
        parts, ends = self._packed(shard)
        first = window - self._starts[shard]
        for number, (start, places) in enumerate(parts[ends[first] : ends[first + 1]].tolist(), 1):
            row = slice(at, at := at + places)
            tokens[row] = data[start : start + places]
            targets[row] = data[start + 1 : start + places + 1]
            documents[row] = number - 1
        tokens[at:], targets[at:], documents[at:] = self._eod, IGNORE, number
