"""Packed rows against the documents they came from, and the fit against first principles."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data import packing
from pipeline.data.corpus import Corpus
from pipeline.data.loader import Loader
from pipeline.data.packing import IGNORE, PackedStream, best_fit, count_bins, pack

SEQ, ROWS = 64, 14


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=60))
def test_best_fit_holds_everything_once_and_tightly(sizes: list[int]) -> None:
    bins = best_fit(sizes, 50)
    assert sorted(i for group in bins for i in group) == list(range(len(sizes)))
    filled = [sum(sizes[i] for i in group) for group in bins]
    assert all(total <= 50 for total in filled)
    # No two bins could be one: the later one's first item would have gone into the earlier.
    assert all(a + b > 50 for i, a in enumerate(filled) for b in filled[:i])
    assert count_bins(np.bincount(sizes), 50) == len(bins)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 16))
def test_every_target_is_there_once(lengths: list[int], seq: int) -> None:
    parts, ends = pack(np.array(lengths, np.int32), seq)
    rows = [parts[a:b].tolist() for a, b in pairwise(ends)]
    predicted = sorted(
        place + 1 for row in rows for start, count in row for place in range(start, start + count)
    )
    starts = np.cumsum([0, *lengths])
    assert predicted == sorted(set(range(starts[-1])) - set(starts[:-1].tolist()))
    assert all(sum(count for _, count in row) <= seq for row in rows)


def test_rows_are_whole_documents(corpus: Corpus) -> None:
    loader = Loader(corpus, "train", seq=SEQ, rows=ROWS, seed=1, packing="best-fit")
    eod = corpus.manifest.tokenizer.eod
    documents = set()
    for shard in corpus.split("train").shards:
        for document in np.split(corpus.tokens(shard), np.cumsum(corpus.lengths(shard))[:-1]):
            ids = document.tolist()
            documents |= {
                (tuple(ids[i : i + SEQ][: len(ids) - 1 - i]), tuple(ids[i + 1 : i + SEQ + 1]))
                for i in range(0, len(ids) - 1, SEQ)
            }
    seen, padding = set(), 0
    for step in range(-(-loader.windows // ROWS)):
        batch = loader.batch(step)
        assert batch.documents_BS is not None
        for tokens, targets, numbers in zip(
            batch.tokens_BS.tolist(),
            batch.targets_BS.tolist(),
            batch.documents_BS.tolist(),
            strict=True,
        ):
            assert numbers == sorted(numbers)
            for number in set(numbers):
                part = [i for i, n in enumerate(numbers) if n == number]
                aim = tuple(targets[i] for i in part)
                if aim[0] == IGNORE:
                    assert set(aim) == {IGNORE} and {tokens[i] for i in part} == {eod}
                    padding += len(part)
                else:
                    seen.add((tuple(tokens[i] for i in part), aim))
    assert seen == documents
    assert padding / (loader.windows * SEQ) < 0.02


def test_shards_are_packed_late_and_a_few_at_a_time(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch draws every row once and packs every shard once, though only two packings are ever at hand."""
    monkeypatch.setattr(packing, "PACKED_SHARDS", 2)
    packed: list[int] = []
    monkeypatch.setattr(
        packing, "pack", lambda lengths, seq: packed.append(len(lengths)) or pack(lengths, seq)
    )
    shards = (corpus.split("train").shards + corpus.split("valid").shards) * 3
    stream = PackedStream(corpus, shards, 8 * SEQ)
    assert not packed and len(shards) > 6
    row = np.empty((3, 8 * SEQ), np.int64)
    orders = []
    for epoch in range(2):
        orders.append(stream.order(np.arange(stream.windows), 7, epoch))
        assert sorted(orders[-1].tolist()) == list(range(stream.windows))
        assert np.array_equal(stream.order(np.arange(100, 300), 7, epoch), orders[-1][100:300])
        packed.clear()
        for window in orders[-1].tolist():
            stream.read(window, *row)
        assert len(shards) - 2 <= len(packed) <= len(shards)
    assert not np.array_equal(*orders)


def test_packed_batches_are_the_same_on_any_world(corpus: Corpus) -> None:
    for world in (2, 4, 7):
        for step in (0, 5, 10**5):
            whole = Loader(corpus, "train", seq=SEQ, rows=ROWS, seed=1, packing="best-fit").batch(
                step
            )
            fresh = Loader(corpus, "train", seq=SEQ, rows=ROWS, seed=1, packing="best-fit")
            parts = [fresh.batch(step, rank, world) for rank in range(world)]
            for name in ("tokens_BS", "targets_BS", "documents_BS"):
                assert torch.equal(
                    torch.cat([getattr(p, name) for p in parts]), getattr(whole, name)
                )
            assert sum(p.hash for p in parts) % 2**64 == whole.hash


def test_boundaries_of_concatenated_documents(corpus: Corpus) -> None:
    loader = Loader(corpus, "train", seq=SEQ, rows=ROWS, seed=1, boundaries=True)
    batch = loader.batch(0)
    assert batch.documents_BS is not None and loader.batch(0).hash == batch.hash
    for tokens, numbers in zip(batch.tokens_BS.tolist(), batch.documents_BS.tolist(), strict=True):
        assert numbers == [tokens[:i].count(corpus.manifest.tokenizer.eod) for i in range(SEQ)]
    assert Loader(corpus, "train", seq=SEQ, rows=ROWS, seed=1).batch(0).documents_BS is None
