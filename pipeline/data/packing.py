"""Shards as numbered windows of tokens: documents one after the other, or packed into rows.

Stream concatenates documents. PackedStream fills rows so that no document crosses a row (best-fit
decreasing; Ding et al. 2024, arXiv 2404.10830). A document of n tokens fills n - 1 places: each
token but the last is an input, each but the first a target. A document longer than a row is cut
into full rows and a rest; only rests share rows. A shard is packed when one of its rows is first
read; its number of rows is counted without packing. An epoch visits a few shards at a time, in an
order of its own, so that each shard is packed once per epoch and memory stays constant.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import inf

import numpy as np
import numpy.typing as npt

from pipeline.data.corpus import Corpus
from pipeline.data.permute import Permutation
from pipeline.data.shards import Shard

IGNORE = -100  # target of a place that predicts nothing, as in torch's cross-entropy
OPEN_SHARDS = 256  # mapped at once; each has a file handle, and the usual limit is 1024
PACKED_SHARDS = 8  # shuffled together, and cached packings

I64 = npt.NDArray[np.int64]


class Stream:
    """Windows of seq + 1 tokens, seq apart, over the concatenated documents of some shards."""

    def __init__(self, corpus: Corpus, shards: Sequence[Shard], seq: int) -> None:
        self._seq = seq
        self._starts = list(accumulate((s.tokens for s in shards), initial=0))
        self.windows = max(0, self._starts[-1] - 1) // seq
        self._map = lru_cache(OPEN_SHARDS)(lambda index: corpus.tokens(shards[index]))

    def order(self, index: I64, seed: int, epoch: int) -> I64:
        """Return the windows that the epoch draws at these positions."""
        return Permutation(self.windows, seed, epoch)(index)

    def window(self, number: int) -> npt.NDArray[np.integer]:
        """Return a view into the shard, or a copy if the window crosses shards."""
        start = number * self._seq
        shard = bisect_right(self._starts, start) - 1
        local = start - self._starts[shard]
        view = self._map(shard)[local : local + self._seq + 1]
        if len(view) == self._seq + 1:
            return view
        parts = [view]
        missing = self._seq + 1 - len(view)
        while missing > 0:
            shard += 1
            parts.append(self._map(shard)[:missing])
            missing -= len(parts[-1])
        return np.concatenate(parts)


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the indices in each bin: largest first, each into the fullest bin that has space."""
    bins: list[list[int]] = []
    open_bins: dict[int, list[int]] = {}  # by free space
    spaces: list[int] = []  # the sorted keys of open_bins
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        at = bisect_left(spaces, sizes[index])
        if at == len(spaces):
            number = len(bins)
            space = capacity
            bins.append([])
        else:
            space = spaces[at]
            number = open_bins[space].pop()
            if not open_bins[space]:  # its last bin
                del open_bins[space], spaces[at]
        bins[number].append(index)
        left = space - sizes[index]
        if left:
            if left not in open_bins:
                open_bins[left] = []
                insort(spaces, left)
            open_bins[left].append(number)
    return bins


def count_bins(counts: I64, capacity: int) -> int:
    """Count the bins that best_fit fills with counts[n] items of size n, many items at a time."""
    opened = 0  # bins in use
    spaces = [capacity]
    free: dict[int, float] = {capacity: inf}  # bins by free space
    for size in np.flatnonzero(counts)[::-1].tolist():
        items = int(counts[size])
        while items:
            at = bisect_left(spaces, size)
            space = spaces[at]
            # A bin that has received an item is the fullest with space for the next.
            each = min(items, space // size)
            bins = int(min(items // each, free[space]))
            items -= bins * each
            opened += bins if space == capacity else 0
            free[space] -= bins
            if not free[space]:
                del free[space], spaces[at]
            left = space - each * size
            if left:
                if left not in free:
                    insort(spaces, left)
                free[left] = free.get(left, 0) + bins
    return opened


def pack(lengths: npt.NDArray[np.int32], seq: int) -> tuple[I64, I64]:
    """Pack the documents of a shard; return the parts of all rows, and where each row's parts end.

    A part (start, places) has the inputs start … start+places-1 and the targets one further.
    """
    starts = np.cumsum(lengths) - lengths
    full, rest = np.divmod(lengths.astype(np.int64) - 1, seq)
    row_in_document = np.arange(full.sum()) - np.repeat(np.cumsum(full) - full, full)
    whole = np.repeat(starts, full) + seq * row_in_document
    # The last, partial row of each document: (start, places).
    rests = np.stack((starts + full * seq, rest), axis=1)[rest > 0]
    bins = best_fit(rests[:, 1].tolist(), seq)
    shared = rests[[i for group in bins for i in sorted(group)]]
    parts = np.concatenate((np.stack((whole, np.full_like(whole, seq)), axis=1), shared))
    return parts, np.cumsum([0, *[1] * len(whole), *map(len, bins)])


class PackedStream:
    """Packed rows, numbered like the windows of a Stream."""

    def __init__(self, corpus: Corpus, shards: Sequence[Shard], seq: int) -> None:
        self._eod = corpus.manifest.tokenizer.eod
        self._seq = seq
        self._pack = lru_cache(PACKED_SHARDS)(lambda i: pack(corpus.lengths(shards[i]), seq))
        self._map = lru_cache(PACKED_SHARDS)(lambda i: corpus.tokens(shards[i]))
        self._rows = np.array([self._count(corpus.lengths(shard)) for shard in shards], np.int64)
        self._starts = np.cumsum([0, *self._rows.tolist()])
        self.windows = int(self._starts[-1])

    def _count(self, lengths: npt.NDArray[np.int32]) -> int:
        rests = np.bincount((lengths - 1) % self._seq)
        rests[0] = 0  # documents that fill whole rows have no rest
        return int(((lengths - 1) // self._seq).sum()) + count_bins(rests, self._seq)

    def order(self, index: I64, seed: int, epoch: int) -> I64:
        """Return the rows that the epoch draws at these positions.

        Shards come in a new order each epoch and are shuffled together a few at a time.
        """
        count = len(self._rows)
        shards = Permutation(count, seed, epoch)(np.arange(count))
        ends = np.cumsum(self._rows[shards])  # in the order of this epoch
        last_shards = np.minimum(np.arange(0, count, PACKED_SHARDS) + PACKED_SHARDS, count) - 1
        group_ends = ends[last_shards]
        groups = np.searchsorted(group_ends, index, "right")
        found = np.empty_like(index)
        for group in np.unique(groups).tolist():
            low = int(group_ends[group - 1]) if group else 0
            mine = groups == group
            shuffle = Permutation(int(group_ends[group]) - low, seed + group, epoch)
            place = low + shuffle(index[mine] - low)
            at = np.searchsorted(ends, place, "right")
            shard = shards[at]
            found[mine] = self._starts[shard] + place - (ends[at] - self._rows[shard])
        return found

    def read(self, window: int, tokens: I64, targets: I64, documents: I64) -> None:
        """Fill one row. Padding at its end is a document of its own that predicts nothing."""
        shard = int(np.searchsorted(self._starts, window, "right")) - 1
        data = self._map(shard)
        parts, ends = self._pack(shard)
        row = window - self._starts[shard]
        at = 0  # next free place of the row
        number = 0  # of the document in the row
        for start, places in parts[ends[row] : ends[row + 1]].tolist():
            here = slice(at, at + places)
            tokens[here] = data[start : start + places]
            targets[here] = data[start + 1 : start + places + 1]
            documents[here] = number
            at += places
            number += 1
        tokens[at:] = self._eod
        targets[at:] = IGNORE
        documents[at:] = number
