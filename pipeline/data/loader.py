"""Batches as a pure function of (manifest, seed, step), for any number of ranks: no state to save.

1. A sample number selects a source and a position within it (mixture.Schedule).
2. The position selects an epoch and, through the epoch's permutation, a window (packing.Stream) or
   a packed row (packing.PackedStream).
3. A batch is `rows` consecutive samples, cut across ranks, with a hash of its tokens.
"""

import queue
import threading
from collections.abc import Generator
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from pipeline.data.corpus import Corpus
from pipeline.data.mixture import BLOCK, Schedule
from pipeline.data.packing import PackedStream, Stream
from pipeline.objective.batch import Batch


class Loader:
    """Windows of seq + 1 tokens in a new order each epoch, drawn by weight if there is a mixture.

    Documents are concatenated by default; with packing="best-fit", no document crosses a row. With
    boundaries (always if packed), a batch has the document of each token, so that attention and
    positions can restart there.
    """

    def __init__(
        self,
        corpus: Corpus,
        split: str,
        *,
        seq: int,
        rows: int,
        seed: int,
        packing: Literal["concatenate", "best-fit"] = "concatenate",
        boundaries: bool = False,
    ) -> None:
        self.seq = seq  # tokens per row
        self.rows = rows  # of a batch, over all ranks
        self.seed = seed
        self._eod = corpus.manifest.tokenizer.eod
        self._boundaries = boundaries
        shards = corpus.split(split).shards
        # Held-out data is read without a mixture, so that its loss is comparable between runs.
        weighted = [s for s in corpus.manifest.sources if s.weight is not None and split == "train"]
        groups = [[s for s in shards if s.source == source.name] for source in weighted]
        if not weighted:
            groups = [list(shards)]
        self._schedule = Schedule([source.weight or 0 for source in weighted] or [1.0], seed)
        self._streams: list[Stream] = []
        self._packed_streams: list[PackedStream] = []
        if packing == "best-fit":
            self._packed_streams = [PackedStream(corpus, group, seq) for group in groups]
        else:
            self._streams = [Stream(corpus, group, seq) for group in groups]
        both: list[Stream | PackedStream] = [*self._streams, *self._packed_streams]
        self._windows = [stream.windows for stream in both]
        self._orders = [stream.order for stream in both]
        if 0 in self._windows:
            raise corpus.too_small(split, seq)
        self.windows = sum(self._windows)
        self.steps_per_epoch = max(1, self.windows // rows)
        # These caches change the speed, never the batch.
        self._cached_block = lru_cache(2)(self._block)
        self._cached_order = lru_cache(4 * len(groups))(self._order_block)

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        rows = range(rank * self.rows // world, (rank + 1) * self.rows // world)
        places = [(row, *self._place(step * self.rows + row)) for row in rows]
        if self._packed_streams:
            return self._packed_batch(places)
        # Tokens and targets are separate and contiguous; each window is read once.
        both_2BS = np.empty((2, len(rows), self.seq), np.int64)
        tokens_BS, targets_BS = both_2BS
        digest = 0  # a sum, so that the hashes of the ranks add up to that of the batch
        for i, (row, stream, number) in enumerate(places):
            window = self._streams[stream].window(number)
            tokens_BS[i] = window[:-1]
            targets_BS[i] = window[1:]
            digest += xxhash.xxh3_64_intdigest(window.data, row)
        return Batch(
            tokens_BS=torch.from_numpy(tokens_BS),
            targets_BS=torch.from_numpy(targets_BS),
            hash=digest % 2**64,
            documents_BS=self._documents(tokens_BS) if self._boundaries else None,
        )

    def _documents(self, tokens_BS: npt.NDArray[np.int64]) -> torch.Tensor:
        # Count the document ends before each token: an end belongs to the document it ends.
        documents_BS = np.zeros_like(tokens_BS)
        np.cumsum(tokens_BS[:, :-1] == self._eod, axis=1, out=documents_BS[:, 1:])
        return torch.from_numpy(documents_BS)

    def _packed_batch(self, places: list[tuple[int, int, int]]) -> Batch:
        # One block of memory per row, so that one hash covers tokens, targets and documents.
        rows_B3S = np.empty((len(places), 3, self.seq), np.int64)
        digest = 0
        for out, (row, stream, window) in zip(rows_B3S, places, strict=True):
            self._packed_streams[stream].read(window, *out)
            digest += xxhash.xxh3_64_intdigest(out.tobytes(), row)
        return Batch(
            tokens_BS=torch.from_numpy(rows_B3S[:, 0].copy()),
            targets_BS=torch.from_numpy(rows_B3S[:, 1].copy()),
            hash=digest % 2**64,
            documents_BS=torch.from_numpy(rows_B3S[:, 2].copy()),
        )

    def _place(self, sample: int) -> tuple[int, int]:
        """Return the stream and the window that a sample number draws."""
        block, offset = divmod(sample, BLOCK)
        streams, numbers = self._cached_block(block)
        stream = streams[offset]
        epoch, index = divmod(numbers[offset], self._windows[stream])
        order_block, order_offset = divmod(index, BLOCK)
        return stream, self._cached_order(stream, epoch, order_block)[order_offset]

    def _block(self, number: int) -> tuple[list[int], list[int]]:
        if len(self._windows) == 1:  # without a mixture, sample n is window n of its epoch
            return [0] * BLOCK, list(range(number * BLOCK, (number + 1) * BLOCK))
        streams, numbers = self._schedule.block(number)
        return streams.tolist(), numbers.tolist()

    def _order_block(self, stream: int, epoch: int, block: int) -> list[int]:
        stop = min((block + 1) * BLOCK, self._windows[stream])
        index: npt.NDArray[np.int64] = np.arange(block * BLOCK, stop)
        order: list[int] = self._orders[stream](index, self.seed + stream, epoch).tolist()
        return order


def prefetch(
    loader: Loader,
    start: int,
    stop: int,
    rank: int,
    world: int,
    *,
    depth: int = 2,
    pin: bool = False,
) -> Generator[tuple[int, Batch], None, None]:
    """Yield the batches of steps start to stop - 1, which a thread prepares ahead of time.

    With `pin`, they are in page-locked memory, from which a GPU copies asynchronously. An error of
    the thread is raised here. Closing the generator ends the thread.
    """
    ready: queue.Queue[tuple[int, Batch] | BaseException | None] = queue.Queue(depth)
    closed = threading.Event()

    def put(item: tuple[int, Batch] | BaseException | None) -> bool:
        while not closed.is_set():
            try:
                ready.put(item, timeout=0.1)  # wakes up to see whether it is closed
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for step in range(start, stop):
                batch = loader.batch(step, rank, world)
                if not put((step, batch.pinned() if pin else batch)):
                    return
            put(None)
        except BaseException as error:  # raised by the consumer
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
