"""Batches as a pure function of (manifest, seed, step), for any number of ranks: no state to save.

1. A sample number selects a source and a position within it (order.Schedule).
2. The position selects an epoch and, through the epoch's permutation, a window of a Stream, which
   concatenates documents, or a row of a PackedStream, in which no document crosses a row.
3. A batch is `rows` consecutive samples, cut across ranks, with a hash of its tokens.
"""

import sys
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import accumulate
from math import inf
from typing import Literal, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from pipeline.config.objective import LEAST_WORD_SHARE, Answers, Causal, Masked, Objective, Pairs
from pipeline.config.spans import Mixture
from pipeline.data.corpus import Corpus
from pipeline.data.order import BLOCK, SHARDS_TOGETHER, Permutation, Schedule, ShardRows
from pipeline.data.pairs import PairRows, PairStream
from pipeline.data.shards import Shard
from pipeline.objective.batch import Batch
from pipeline.objective.draws import F32, I64, Draws
from pipeline.objective.example import IGNORE, Example, Noise, Text

OPEN_SHARDS = 256  # mapped at once; each has a file handle, and the usual limit is 1024
AHEAD = 2  # batches that are prepared while one is trained on
SWITCH_SECONDS = 1e-4  # how long a thread may keep the interpreter's lock while another waits
HELD_OUT_SEED = 2**63  # for the noise of held-out text; no run has such a seed


class Row(NamedTuple):
    tokens: npt.NDArray[np.integer]
    targets: npt.NDArray[np.integer]
    documents: I64 | None  # document of each token, if the stream keeps documents apart
    raw: memoryview  # the bytes that the hash of a batch covers


class Stream:
    """Windows of seq + 1 tokens, seq apart, over the concatenated documents of some shards."""

    def __init__(self, corpus: Corpus, shards: Sequence[Shard], seq: int) -> None:
        self._seq = seq
        self._starts = list(accumulate((s.tokens for s in shards), initial=0))
        self.windows = max(0, self._starts[-1] - 1) // seq
        self._map = lru_cache(OPEN_SHARDS)(lambda index: corpus.tokens(shards[index]))

    def order(self, index: I64, seed: int, epoch: int) -> I64:
        """Return the windows at these positions of the epoch's order."""
        return Permutation(self.windows, seed, epoch)(index)

    def read(self, number: int) -> Row:
        """Return views of a window in its shard, or of a copy if the window crosses shards."""
        start = number * self._seq
        shard = bisect_right(self._starts, start) - 1
        local = start - self._starts[shard]
        window = self._map(shard)[local : local + self._seq + 1]
        while len(window) <= self._seq:
            shard += 1
            missing = self._seq + 1 - len(window)
            window = np.concatenate((window, self._map(shard)[:missing]))
        return Row(window[:-1], window[1:], None, window.data)


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
            if not open_bins[space]:  # no other bin has as much free space
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
            # After it receives an item, a bin is the fullest one with space for the next.
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


class PackedStream(ShardRows):
    """Packed rows, numbered like the windows of a Stream.

    Rows are filled by best-fit decreasing (Ding et al. 2024, arXiv 2404.10830). A document of n
    tokens fills n - 1 places: each token but the last is an input, each but the first a target. A
    document longer than a row is cut into full rows and a rest; only rests share rows. The rows of
    a shard are counted without packing.
    """

    def __init__(self, corpus: Corpus, shards: Sequence[Shard], seq: int) -> None:
        self._eod = corpus.manifest.tokenizer.eod
        self._seq = seq
        self._pack = lru_cache(SHARDS_TOGETHER)(lambda i: pack(corpus.lengths(shards[i]), seq))
        self._map = lru_cache(SHARDS_TOGETHER)(lambda i: corpus.tokens(shards[i]))
        super().__init__([self._count(corpus.lengths(shard)) for shard in shards])

    def _count(self, lengths: npt.NDArray[np.int32]) -> int:
        rests = np.bincount((lengths - 1) % self._seq, minlength=1)
        rests[0] = 0  # documents that fill whole rows have no rest
        return int(((lengths - 1) // self._seq).sum()) + count_bins(rests, self._seq)

    def parts(self, window: int) -> tuple[int, I64]:
        """Return the shard of a row, and its parts (start, places)."""
        shard, row = self.place(window)
        parts, ends = self._pack(shard)
        return shard, parts[ends[row] : ends[row + 1]]

    def read(self, window: int) -> Row:
        """Return one row. Padding at its end counts as another document, without targets."""
        shard, parts = self.parts(window)
        data = self._map(shard)
        # One block of memory, so that one hash covers tokens, targets and documents.
        rows_3S = np.empty((3, self._seq), np.int64)
        tokens, targets, documents = rows_3S
        at = 0  # next free place of the row
        number = 0  # of the document in the row
        for start, places in parts.tolist():
            here = slice(at, at + places)
            tokens[here] = data[start : start + places]
            targets[here] = data[start + 1 : start + places + 1]
            documents[here] = number
            at += places
            number += 1
        tokens[at:] = self._eod
        targets[at:] = IGNORE
        documents[at:] = number
        return Row(tokens, targets, documents, rows_3S.data)


# Batches


class Loader:
    """Windows of seq + 1 tokens in a new order each epoch, drawn by weight if there is a mixture.

    Documents are concatenated by default; with packing="best-fit", no document crosses a row. With
    boundaries (always if packed), a batch has the document of each token, so that attention and
    positions can restart there. With noise (objective/noise.py), a row is made of seq tokens of
    text. With pairs (data/pairs.py), a row has whole pairs of a source and a target.
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
        noise: Noise | None = None,
        objective: Objective | None = None,
        pairs: PairRows | None = None,
    ) -> None:
        self.seq = seq  # tokens of text per row
        self.rows = rows  # rows of a batch, over all ranks
        self.seed = seed
        self._eod = corpus.manifest.tokenizer.eod
        self._packed = packing == "best-fit"
        self._boundaries = boundaries or self._packed
        self._noise = noise
        self._objective = objective or Causal()
        # Whether rows predict different numbers of tokens; a packed row may have padding.
        self._uneven = self._packed or isinstance(objective, Answers | Mixture | Pairs)
        if isinstance(objective, Masked) and objective.rate > LEAST_WORD_SHARE:
            self._uneven = True
        self._held_out = split != "train"
        shards = corpus.split(split).shards
        # Held-out data is read without a mixture, so that its loss is comparable between runs.
        weighted = [s for s in corpus.manifest.sources if s.weight is not None and split == "train"]
        groups = [[s for s in shards if s.source == source.name] for source in weighted]
        if not weighted:
            groups = [list(shards)]
        self._schedule = Schedule([source.weight or 0 for source in weighted] or [1.0], seed)
        self._streams: list[Stream | PackedStream | PairStream]
        if pairs is not None:
            self._streams = [PairStream(corpus, group, pairs, split) for group in groups]
        else:
            kind = PackedStream if self._packed else Stream
            self._streams = [kind(corpus, group, seq) for group in groups]
        self._windows = [stream.windows for stream in self._streams]
        if 0 in self._windows:
            raise corpus.too_small(split, seq)
        self.windows = sum(self._windows)
        self.steps_per_epoch = max(1, self.windows // rows)
        # These caches change the speed, never the batch.
        self._cached_block = lru_cache(2)(self._block)
        self._cached_order = lru_cache(4 * len(groups))(self._order_block)

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        rows = range(rank * self.rows // world, (rank + 1) * self.rows // world)
        counts = self._mean_targets(step) if self._uneven else None
        if self._noise is not None:
            samples = range(step * self.rows + rows.start, step * self.rows + rows.stop)
            return Batch.stack(self._examples(samples, self._noise), rows, counts)
        # Tokens, targets and documents are separate and contiguous; each row is read once.
        tokens_BS, targets_BS, documents_BS = np.zeros((3, len(rows), self.seq), np.int64)
        digest = 0  # a sum, so that the hashes of the ranks add up to that of the batch
        for i, number in enumerate(rows):
            stream, window = self._place(step * self.rows + number)
            row = self._streams[stream].read(window)
            tokens_BS[i] = row.tokens
            targets_BS[i] = row.targets
            if row.documents is not None:
                documents_BS[i] = row.documents
            digest += xxhash.xxh3_64_intdigest(row.raw, number)
        if self._boundaries and not self._packed:
            # Count the document ends before each token: an end belongs to the document it ends.
            np.cumsum(tokens_BS[:, :-1] == self._eod, axis=1, out=documents_BS[:, 1:])
        return Batch(
            tokens_BS=torch.from_numpy(tokens_BS),
            targets_BS=torch.from_numpy(targets_BS),
            hash=digest % 2**64,
            documents_BS=torch.from_numpy(documents_BS) if self._boundaries else None,
            counts_B=None if counts is None else torch.from_numpy(counts.repeat(len(rows))),
        )

    def _mean_targets(self, step: int) -> F32:
        """Return the mean number of targets per row of the global batch. Rows of answers, which are
        short, have to be read; every rank reads them all."""
        total = 0
        for sample in range(step * self.rows, (step + 1) * self.rows):
            number, window = self._place(sample)
            stream = self._streams[number]
            if isinstance(stream, PairStream):
                total += stream.targets(window)
            elif isinstance(stream, PackedStream):  # no input is an end, so all can be masked
                length = int(stream.parts(window)[1][:, 1].sum())
                total += self._objective.most_targets(length) or length
            elif isinstance(self._objective, Masked):
                words = int((stream.read(window).tokens != self._eod).sum())
                total += min(self._objective.most_targets(self.seq) or words, words)
            elif isinstance(self._objective, Mixture):
                row = window if self._held_out else sample
                total += self._objective.row_targets(row, self.seq)
            elif self._noise is not None:
                (example,) = self._examples(range(sample, sample + 1), self._noise)
                total += int((example.targets != IGNORE).sum())
        return np.array([total / self.rows], np.float32)

    def _examples(self, samples: range, noise: Noise) -> list[Example]:
        texts = []
        draws = []
        pairs = []  # a PairStream returns complete rows, without noise
        for sample in samples:
            number, window = self._place(sample)
            stream = self._streams[number]
            if isinstance(stream, PairStream):
                pairs.append(stream.read(window))
                continue
            texts.append(self._text(stream, window))
            # Held-out text has the same noise in every evaluation of every run. Training text has
            # new noise each time it is read.
            key = (HELD_OUT_SEED, window) if self._held_out else (self.seed, sample)
            draws.append(Draws(*key))
        return pairs or noise(texts, draws)

    def _text(self, stream: Stream | PackedStream, window: int) -> Text:
        def another(draws: Draws) -> I64:
            number = int(draws.below(stream.windows, 1)[0])
            return stream.read(number).tokens.astype(np.int64)

        row = stream.read(window)
        tokens = row.tokens.astype(np.int64)
        documents = row.documents
        if self._boundaries and documents is None:
            documents = np.cumsum(np.append(0, tokens[:-1] == self._eod))
        return Text(tokens, documents, int((row.targets != IGNORE).sum()), another)

    def _place(self, sample: int) -> tuple[int, int]:
        """Return the stream and the window of a sample."""
        block, offset = divmod(sample, BLOCK)
        streams, numbers = self._cached_block(block)
        stream = streams[offset]
        epoch, index = divmod(numbers[offset], self._windows[stream])
        order_block, order_offset = divmod(index, BLOCK)
        return stream, self._cached_order(stream, epoch, order_block)[order_offset]

    def _block(self, number: int) -> tuple[list[int], list[int]]:
        streams, numbers = self._schedule.block(number)
        return streams.tolist(), numbers.tolist()

    def _order_block(self, stream: int, epoch: int, block: int) -> list[int]:
        stop = min((block + 1) * BLOCK, self._windows[stream])
        index: I64 = np.arange(block * BLOCK, stop)
        order = self._streams[stream].order(index, self.seed + stream, epoch)
        return cast("list[int]", order.tolist())


class Batches(Protocol):
    """Anything with batches by step, such as a `Loader`."""

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch: ...


def prefetch(
    loader: Batches, start: int, stop: int, rank: int, world: int, *, pin: bool = False
) -> Generator[tuple[int, Batch], None, None]:
    """Yield the batches of steps start to stop - 1, which a thread prepares ahead of time.

    With `pin`, they are in page-locked memory, from which a GPU copies asynchronously. An error in
    the thread is raised here. Closing the generator ends the thread.
    """

    def make(step: int) -> Batch:
        batch = loader.batch(step, rank, world)
        return batch.pinned() if pin else batch

    ahead: deque[Future[Batch]] = deque()
    if pin:
        # After each wait for the GPU, the training thread also waits for the interpreter's lock.
        # With Python's default of 5 ms, that was a quarter of a step with objectives that make
        # noise. CPUs keep the default: with more threads than cores, each switch takes long.
        sys.setswitchinterval(SWITCH_SECONDS)
    thread = ThreadPoolExecutor(1, "prefetch")
    try:
        for step in range(start, stop + AHEAD):
            if step < stop:
                ahead.append(thread.submit(make, step))
            if step >= start + AHEAD:
                yield step - AHEAD, ahead.popleft().result()
    finally:
        thread.shutdown(cancel_futures=True)
