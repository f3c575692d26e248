"""Shards as one long row of tokens, cut into windows."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt

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

    def read(self, window: int, out: Tokens) -> None:
        """Copy a window into out, across as many shards as it takes."""
        start = window * self._seq
        shard = bisect_right(self._starts, start) - 1
        done = 0
        while done < len(out):
            local = start + done - self._starts[shard]
            piece = self._map(shard)[local : local + len(out) - done]
            out[done : done + len(piece)] = piece
            done += len(piece)
            shard += 1
