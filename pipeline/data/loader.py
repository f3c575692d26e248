"""Batches as a pure function of (manifest, seed, step): nothing to save, nothing to restore, any number of ranks."""

import queue
import threading
from collections.abc import Generator
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from pipeline.data.mixture import BLOCK, Schedule
from pipeline.data.packing import PackedStream
from pipeline.data.shards import Corpus
from pipeline.data.stream import Stream
from pipeline.objective.batch import Batch


class Loader:
    """Windows of seq + 1 tokens, shuffled anew each epoch; drawn from the sources by weight where a mixture says so.

    Concatenated documents by default; packing="best-fit" gives rows that no document crosses. With boundaries (always
    when packed) a batch says which document each token is of, so that attention and positions can start anew there.
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
        self.seq, self.rows, self.seed = seq, rows, seed
        self._eod, self._boundaries = corpus.manifest.tokenizer.eod, boundaries
        shards = corpus.split(split).shards
        weighted = [
            source
            for source in corpus.manifest.sources
            if source.weight is not None and split == "train"
        ]
        groups = [[s for s in shards if s.source == source.name] for source in weighted] or [
            list(shards)
        ]
        self._schedule = Schedule([source.weight or 0 for source in weighted] or [1.0], seed)
        packed = packing == "best-fit"
        self._streams = [] if packed else [Stream(corpus, group, seq) for group in groups]
        self._packed_streams = (
            [PackedStream(corpus, group, seq) for group in groups] if packed else []
        )
        both: list[Stream | PackedStream] = [*self._streams, *self._packed_streams]
        self._windows, self._orders = [s.windows for s in both], [s.order for s in both]
        if 0 in self._windows:
            raise corpus.too_small(split, seq)
        self.windows = sum(self._windows)
        self.steps_per_epoch = max(1, self.windows // rows)
        # Caches only, of what is computed block by block: they change the speed, never the batch.
        self._places = lru_cache(2)(self._block)
        self._order = lru_cache(4 * len(groups))(self._order_block)

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        rows = range(rank * self.rows // world, (rank + 1) * self.rows // world)
        places = [(row, *self._place(step * self.rows + row)) for row in rows]
        if self._packed_streams:
            return self._packed(places)
        # Tokens and targets lie apart, each contiguous; a window is read once, while it is in the cache.
        both_2BS = np.empty((2, len(rows), self.seq), np.int64)
        tokens_BS, targets_BS = both_2BS
        digest = 0
        for i, (row, stream, number) in enumerate(places):
            window = self._streams[stream].window(number)
            tokens_BS[i], targets_BS[i] = window[:-1], window[1:]
            digest += xxhash.xxh3_64_intdigest(window.data, row)
        return Batch(
            tokens_BS=torch.from_numpy(tokens_BS),
            targets_BS=torch.from_numpy(targets_BS),
            hash=digest % 2**64,
            documents_BS=self._documents(tokens_BS) if self._boundaries else None,
        )

    def _documents(self, tokens_BS: npt.NDArray[np.int64]) -> torch.Tensor:
        """How many ends came before: an end still belongs to the document that it ends."""
        documents_BS = np.zeros_like(tokens_BS)
        np.cumsum(tokens_BS[:, :-1] == self._eod, axis=1, out=documents_BS[:, 1:])
        return torch.from_numpy(documents_BS)

    def _packed(self, places: list[tuple[int, int, int]]) -> Batch:
        # One block of memory per row, so that one hash covers all that training sees of it.
        row_B3S = np.empty((len(places), 3, self.seq), np.int64)
        digest = 0
        for out, (row, stream, window) in zip(row_B3S, places, strict=True):
            self._packed_streams[stream].read(window, *out)
            digest += xxhash.xxh3_64_intdigest(out.tobytes(), row)
        tokens_BS, targets_BS, documents_BS = (
            torch.from_numpy(row_B3S[:, i].copy()) for i in range(3)
        )
        return Batch(
            tokens_BS=tokens_BS,
            targets_BS=targets_BS,
            hash=digest % 2**64,
            documents_BS=documents_BS,
        )

    def _place(self, sample: int) -> tuple[int, int]:
        """Which window of which stream the sample-th draw is."""
        block, offset = divmod(sample, BLOCK)
        streams, numbers = self._places(block)
        epoch, index = divmod(numbers[offset], self._windows[streams[offset]])
        block, offset_in_order = divmod(index, BLOCK)
        return streams[offset], self._order(streams[offset], epoch, block)[offset_in_order]

    def _block(self, number: int) -> tuple[list[int], list[int]]:
        if len(self._windows) == 1:
            return [0] * BLOCK, list(range(number * BLOCK, (number + 1) * BLOCK))
        streams, numbers = self._schedule.block(number)
        return streams.tolist(), numbers.tolist()

    def _order_block(self, stream: int, epoch: int, block: int) -> list[int]:
        index: npt.NDArray[np.int64] = np.arange(
            block * BLOCK, min((block + 1) * BLOCK, self._windows[stream])
        )
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
    """Batches of steps start…stop-1, made ahead by a thread, with `pin` in memory that a GPU copies from at once; its
    errors are raised here, and closing ends it."""
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
                batch = loader.batch(step, rank, world)
                if not put((step, batch.pinned() if pin else batch)):
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
