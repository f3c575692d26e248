"""Documents packed into rows that none of them crosses (best-fit decreasing; Ding et al. 2024, arXiv 2404.10830).

A document of n tokens fills n - 1 places: each token but the last is an input, each but the first a target. A document
longer than a row is cut into full rows and a rest; only rests share rows. Shards are packed one by one, so that memory
does not grow with the corpus, and a packing is a pure function of the shard and the row length.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.data.shards import Corpus, Shard

IGNORE = -100  # target of a place that predicts nothing, as torch's cross-entropy names it
PACKED_SHARDS = 8  # whose packings are kept at hand

I64 = npt.NDArray[np.int64]


class Part(NamedTuple):
    """A stretch of a shard: the inputs start…start+places-1, the targets one further."""

    start: int
    places: int


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


def pack(lengths: npt.NDArray[np.int32], seq: int) -> list[list[Part]]:
    """Rows of a shard whose documents have these lengths."""
    rows: list[list[Part]] = []
    rests: list[Part] = []
    start = 0
    for length in lengths.tolist():
        for offset in range(0, length - 1, seq):
            part = Part(start + offset, min(seq, length - 1 - offset))
            if part.places == seq:
                rows.append([part])
            else:
                rests.append(part)
        start += length
    rows += [[rests[i] for i in sorted(group)] for group in best_fit([p.places for p in rests], seq)]
    return rows


class PackedStream:
    """Rows instead of windows, the same numbering for the loader."""

    def __init__(self, corpus: Corpus, shards: Sequence[Shard], seq: int) -> None:
        self._eod = corpus.manifest.tokenizer.eod
        self._rows = lru_cache(PACKED_SHARDS)(lambda index: pack(corpus.lengths(shards[index]), seq))
        self._map = lru_cache(PACKED_SHARDS)(lambda index: corpus.tokens(shards[index]))
        self._starts = list(accumulate((len(self._rows(i)) for i in range(len(shards))), initial=0))
        self.windows = self._starts[-1]

    def read(self, window: int, tokens: I64, targets: I64, documents: I64) -> None:
        """Fill one row; what is left at its end is padding, a document of its own that predicts nothing."""
        shard = bisect_right(self._starts, window) - 1
        data, at, number = self._map(shard), 0, 0
        for number, part in enumerate(self._rows(shard)[window - self._starts[shard]], 1):
            row = slice(at, at := at + part.places)
            tokens[row] = data[part.start : part.start + part.places]
            targets[row] = data[part.start + 1 : part.start + part.places + 1]
            documents[row] = number - 1
        tokens[at:], targets[at:], documents[at:] = self._eod, IGNORE, number
