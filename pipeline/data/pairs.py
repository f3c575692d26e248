"""Rows of translation pairs, from documents whose parts are the same text in several languages.

1. The parts of a shard's documents are found by the id that ends each part.
2. Its pairs are all documents in the first direction (from the first language to the second), then
   all in the next one. A pair that is too long for a row of either side is left out and counted.
3. Each row gets the next pairs while both of its sides have space. No pair crosses a row, and no
   token attends to another pair (objective/noise.py).
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import permutations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.config.objective import Pairs
from pipeline.config.schema import RunSpec
from pipeline.data.corpus import Corpus
from pipeline.data.order import SHARDS_TOGETHER, ShardRows
from pipeline.data.shards import Shard
from pipeline.errors import DataError
from pipeline.objective.draws import I64
from pipeline.objective.example import Example, Vocabulary
from pipeline.objective.noise import Pair, join_pairs


class PairRows(NamedTuple):
    """How pairs fill rows."""

    seq: int  # length of a row of the decoder
    source_seq: int  # length of a row of the encoder
    objective: Pairs

    @classmethod
    def of(cls, config: RunSpec) -> "PairRows | None":
        """Return the shape of a run's rows; None if its objective is not pairs."""
        if not isinstance(config.objective, Pairs):
            return None
        model = config.model
        return cls(model.seq, model.source_seq or model.seq, config.objective)

    @property
    def directions(self) -> list[tuple[int, int]]:
        """Columns of source and target."""
        if self.objective.directions == "first":
            return [(0, 1)]
        return list(permutations(range(len(self.objective.languages)), 2))


def check_pairs(corpus: Corpus, config: RunSpec) -> None:
    """Refuse data that the objective of a run cannot read, or with no pair that fits a row."""
    corpus.check_pairs(config.objective)
    rows = PairRows.of(config)
    if rows is not None:
        for split in ("train", "valid"):
            PairStream(corpus, corpus.split(split).shards, rows, split)


class Packed(NamedTuple):
    """The rows of a shard. Parts are numbered across all documents."""

    starts_P: I64  # where a part starts in the shard
    ends_P: I64  # after the id that ends it
    sources_N: I64  # part of each pair, in the order of the rows
    targets_N: I64
    rows: I64  # the first pair of each row, and the end
    left_out: int  # pairs that do not fit a row


def pack_pairs(tokens: npt.NDArray[np.integer], eod: int, rows: PairRows) -> Packed:
    languages = len(rows.objective.languages)
    ends_P = np.flatnonzero(tokens == eod) + 1
    starts_P = np.concatenate(([0], ends_P[:-1]))
    lengths_P = ends_P - starts_P  # with the end
    first = np.arange(0, len(ends_P), languages)  # part of each document
    sources_N = np.concatenate([first + source for source, _ in rows.directions])
    targets_N = np.concatenate([first + target for _, target in rows.directions])
    # An empty part has only its end: the document is not in this language.
    present = (lengths_P[sources_N] > 1) & (lengths_P[targets_N] > 1)
    # A source begins with the token of its language. The token of the target's language replaces
    # the usual first token of the decoder, so it needs no extra space.
    source_lengths = lengths_P[sources_N] + rows.objective.tagged
    fits = (source_lengths <= rows.source_seq) & (lengths_P[targets_N] <= rows.seq)
    kept = present & fits
    sources_N = sources_N[kept]
    targets_N = targets_N[kept]
    firsts = _fill(source_lengths[kept], lengths_P[targets_N], capacity=(rows.source_seq, rows.seq))
    left_out = int((present & ~fits).sum())
    return Packed(starts_P, ends_P, sources_N, targets_N, firsts, left_out)


def _fill(sources_N: I64, targets_N: I64, capacity: tuple[int, int]) -> I64:
    """Return the first pair of each row, and the end: a row ends where either side is full."""
    sums = [np.concatenate(([0], np.cumsum(lengths))) for lengths in (sources_N, targets_N)]
    firsts = [0]
    while firsts[-1] < len(sources_N):
        at = firsts[-1]
        # Bisect for the last pair whose sum is within the capacity, on either side.
        ends = [
            int(np.searchsorted(total, total[at] + most, "right")) - 1
            for total, most in zip(sums, capacity, strict=True)
        ]
        firsts.append(min(ends))
    return np.array(firsts)


class PairStream(ShardRows):
    """Rows of pairs, numbered like the windows of a Stream."""

    def __init__(
        self, corpus: Corpus, shards: Sequence[Shard], rows: PairRows, split: str = "train"
    ) -> None:
        info = corpus.manifest.tokenizer
        self._vocabulary = Vocabulary(info.vocab, info.eod)
        self._shape = rows
        self._map = lru_cache(SHARDS_TOGETHER)(lambda i: corpus.tokens(shards[i]))
        self._pack = lru_cache(SHARDS_TOGETHER)(lambda i: pack_pairs(self._map(i), info.eod, rows))
        self.pairs = 0
        self.left_out = 0
        counts = []
        for shard in range(len(shards)):
            packed = self._pack(shard)
            counts.append(len(packed.rows) - 1)
            self.pairs += len(packed.sources_N)
            self.left_out += packed.left_out
        super().__init__(counts)
        if not self.windows:
            raise DataError(
                f"{corpus.path}: split {split!r} has {self.left_out:,} pairs, none within "
                f"model.source_seq={rows.source_seq} and model.seq={rows.seq}; raise these, or "
                "--valid-share in `launch data prepare`"
            )

    def __str__(self) -> str:
        """One line for the user."""
        share = self.pairs / self.windows
        line = f"{self.pairs:,} pairs in {self.windows:,} rows, {share:.1f} in each"
        if not self.left_out:
            return line
        limits = f"model.source_seq={self._shape.source_seq} or model.seq={self._shape.seq}"
        return f"{line} │ {self.left_out:,} longer than {limits} are left out"

    def _find(self, window: int) -> tuple[int, Packed, range]:
        """Return the shard of a row, the rows of this shard, and the row's pairs."""
        shard, row = self.place(window)
        packed = self._pack(shard)
        return shard, packed, range(*packed.rows[row : row + 2].tolist())

    def targets(self, window: int) -> int:
        """Number of tokens that a row predicts."""
        _, packed, pairs = self._find(window)
        written = packed.targets_N[pairs.start : pairs.stop]
        return int((packed.ends_P[written] - packed.starts_P[written]).sum())

    def read(self, window: int) -> Example:
        shard, packed, numbers = self._find(window)
        tokens = self._map(shard)
        objective = self._shape.objective
        languages = len(objective.languages)
        pieces, eod = self._vocabulary
        pairs = []
        for number in numbers:
            source = int(packed.sources_N[number])
            target = int(packed.targets_N[number])
            text = tokens[packed.starts_P[source] : packed.ends_P[source]]
            start = eod
            if objective.tagged:
                text = np.append(pieces + source % languages, text)
                start = pieces + target % languages
            written = tokens[packed.starts_P[target] : packed.ends_P[target]]
            pairs.append(Pair(text, start, written))
        return join_pairs(pairs, self._shape.seq, self._shape.source_seq, eod)
