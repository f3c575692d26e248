"""Batches as a pure function of (manifest, seed, step): nothing to save, nothing to restore, any number of ranks."""

import queue
import threading
from bisect import bisect_right
from collections.abc import Generator
from functools import lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from pipeline.data.permute import Permutation
from pipeline.data.shards import Corpus
from pipeline.errors import DataError
from pipeline.objective.batch import Batch

OPEN_SHARDS = 256  # each mapped shard holds a file handle; a usual limit is 1024 per process
ORDER_BLOCK = 4096  # samples whose shuffled places are computed at once: numpy's cost per call disappears


class Loader:
    """Windows of seq + 1 tokens at stride seq over the concatenated documents, shuffled anew each epoch."""

    def __init__(self, corpus: Corpus, split: str, *, seq: int, rows: int, seed: int) -> None:
        self._shards = corpus.split(split).shards
        tokens = corpus.split(split).tokens
        self.seq, self.rows, self.seed = seq, rows, seed
        self.windows = max(0, tokens - 1) // seq
        if self.windows == 0:
            share = "raise --valid-share in" if split == "valid" else "add text in"
            raise DataError(
                f"{corpus.path}: split {split!r} has {tokens:,} tokens, one window of seq={seq} needs "
                f"{seq + 1:,}; {share} `launch data prepare`, or lower seq"
            )
        self.steps_per_epoch = max(1, self.windows // rows)
        self._starts = list(accumulate((s.tokens for s in self._shards), initial=0))
        self._dtype = np.dtype(corpus.manifest.dtype)
        # Caches only: they change the speed, never the batch.
        self._map = lru_cache(OPEN_SHARDS)(lambda index: corpus.tokens(self._shards[index]))
        self._order = lru_cache(4)(self._order_block)

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        first, last = rank * self.rows // world, (rank + 1) * self.rows // world
        window_BS = np.empty((last - first, self.seq + 1), self._dtype)
        digest = 0
        for i, row in enumerate(range(first, last)):
            self._read(self._place(step * self.rows + row) * self.seq, window_BS[i])
            digest += xxhash.xxh3_64_intdigest(window_BS[i], row)
        return Batch(
            tokens_BS=torch.from_numpy(window_BS[:, :-1].astype(np.int64)),
            targets_BS=torch.from_numpy(window_BS[:, 1:].astype(np.int64)),
            hash=digest % 2**64,
        )

    def _place(self, sample: int) -> int:
        """Which window the sample-th draw is."""
        epoch, index = divmod(sample, self.windows)
        block, offset = divmod(index, ORDER_BLOCK)
        return int(self._order(epoch, block)[offset])

    def _order_block(self, epoch: int, block: int) -> npt.NDArray[np.int64]:
        start = block * ORDER_BLOCK
        return Permutation(self.windows, self.seed, epoch)(np.arange(start, min(start + ORDER_BLOCK, self.windows)))

    def _read(self, start: int, out: npt.NDArray[np.integer]) -> None:
        """Copy the stream from start on into out, across as many shards as it takes."""
        shard = bisect_right(self._starts, start) - 1
        done = 0
        while done < len(out):
            local = start + done - self._starts[shard]
            piece = self._map(shard)[local : local + len(out) - done]
            out[done : done + len(piece)] = piece
            done += len(piece)
            shard += 1


def prefetch(
    loader: Loader, start: int, stop: int, rank: int, world: int, depth: int = 2
) -> Generator[tuple[int, Batch], None, None]:
    """Batches of steps start…stop-1, made ahead by a thread; its errors are raised here, and closing ends it."""
    ready: queue.Queue[tuple[int, Batch] | BaseException | None] = queue.Queue(depth)
    closed = threading.Event()

    def put(item: tuple[int, Batch] | BaseException | None) -> bool:
        while not closed.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for step in range(start, stop):
                if not put((step, loader.batch(step, rank, world))):
                    return
            put(None)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
        thread.join()
