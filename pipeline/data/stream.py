"""Shards as one long row of tokens, cut into windows."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from pipeline.data.permute import Permutation
from pipeline.data.shards import Corpus, Shard

OPEN_SHARDS = 256  # each mapped shard holds a file handle; a usual limit is 1024 per process

Tokens = npt.NDArray[np.integer]


class Stream:
    """Windows of seq + 1 tokens at stride seq over the concatenated documents of some shards."""

    def __init__(self, corpus: Corpus, shards: Sequence[Shard], seq: int) -> None:
        self._seq = seq
        self._starts = list(accumulate((s.tokens for s in shards), initial=0))
        self.windows = max(0, self._starts[-1] - 1) // seq
        self._map = lru_cache(OPEN_SHARDS)(lambda index: corpus.tokens(shards[index]))

    def order(self, index: npt.NDArray[np.int64], seed: int, epoch: int) -> npt.NDArray[np.int64]:
        """Which windows the epoch's index-th draws are."""
        return Permutation(self.windows, seed, epoch)(index)

    def window(self, number: int) -> Tokens:
        """The tokens of a window: a view into its shard, or a copy where it runs over several."""
        start = number * self._seq
        shard = bisect_right(self._starts, start) - 1
        local = start - self._starts[shard]
        view = self._map(shard)[local : local + self._seq + 1]
        if len(view) == self._seq + 1:
            return view
        pieces, missing = [view], self._seq + 1 - len(view)
        while missing > 0:
            shard += 1
            pieces.append(self._map(shard)[:missing])
            missing -= len(pieces[-1])
        return np.concatenate(pieces)
