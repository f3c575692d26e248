"""Batches as a pure function of (manifest, seed, step): nothing to save, nothing to restore, any number of ranks."""

import queue
import threading
from collections.abc import Generator
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from pipeline.data.mixture import BLOCK, Schedule
from pipeline.data.permute import Permutation
from pipeline.data.shards import Corpus
from pipeline.data.stream import Stream
from pipeline.errors import DataError
from pipeline.objective.batch import Batch


class Loader:
    """Windows of seq + 1 tokens, shuffled anew each epoch; drawn from the sources by weight where a mixture says so."""

    def __init__(self, corpus: Corpus, split: str, *, seq: int, rows: int, seed: int) -> None:
        self.seq, self.rows, self.seed = seq, rows, seed
        self._dtype = np.dtype(corpus.manifest.dtype)
        shards = corpus.split(split).shards
        sources = [source for source in corpus.manifest.sources if source.weight is not None and split == "train"]
        if sources:
            self._streams = [Stream(corpus, [s for s in shards if s.source == source.name], seq) for source in sources]
            self._schedule = Schedule([source.weight or 0 for source in sources], seed)
        else:
            self._streams = [Stream(corpus, shards, seq)]
            self._schedule = Schedule([1.0], seed)
        for stream in self._streams:
            if stream.windows == 0:
                raise DataError(_too_small(corpus, split, seq))
        self.windows = sum(stream.windows for stream in self._streams)
        self.steps_per_epoch = max(1, self.windows // rows)
        # Caches only, of what is computed block by block: they change the speed, never the batch.
        self._places = lru_cache(2)(self._block)
        self._order = lru_cache(4 * len(self._streams))(self._order_block)

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        first, last = rank * self.rows // world, (rank + 1) * self.rows // world
        window_BS = np.empty((last - first, self.seq + 1), self._dtype)
        digest = 0
        for i, row in enumerate(range(first, last)):
            stream, window = self._place(step * self.rows + row)
            self._streams[stream].read(window, window_BS[i])
            digest += xxhash.xxh3_64_intdigest(window_BS[i], row)
        return Batch(
            tokens_BS=torch.from_numpy(window_BS[:, :-1].astype(np.int64)),
            targets_BS=torch.from_numpy(window_BS[:, 1:].astype(np.int64)),
            hash=digest % 2**64,
        )

    def _place(self, sample: int) -> tuple[int, int]:
        """Which window of which stream the sample-th draw is."""
        block, offset = divmod(sample, BLOCK)
        streams, numbers = self._places(block)
        epoch, index = divmod(numbers[offset], self._streams[streams[offset]].windows)
        block, offset_in_order = divmod(index, BLOCK)
        return streams[offset], self._order(streams[offset], epoch, block)[offset_in_order]

    def _block(self, number: int) -> tuple[list[int], list[int]]:
        if len(self._streams) == 1:
            return [0] * BLOCK, list(range(number * BLOCK, (number + 1) * BLOCK))
        streams, numbers = self._schedule.block(number)
        return streams.tolist(), numbers.tolist()

    def _order_block(self, stream: int, epoch: int, block: int) -> list[int]:
        windows, start = self._streams[stream].windows, block * BLOCK
        index: npt.NDArray[np.int64] = np.arange(start, min(start + BLOCK, windows))
        order: list[int] = Permutation(windows, self.seed + stream, epoch)(index).tolist()
        return order


def _too_small(corpus: Corpus, split: str, seq: int) -> str:
    tokens = corpus.split(split).tokens
    remedy = "raise --valid-share in" if split == "valid" else "add text to every source in"
    return (
        f"{corpus.path}: split {split!r} has {tokens:,} tokens, one window of seq={seq} needs {seq + 1:,}; "
        f"{remedy} `launch data prepare`, or lower seq"
    )


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
