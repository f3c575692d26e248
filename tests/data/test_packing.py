"""Packed rows compared with the documents they came from, and the fit with first principles."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.objective import Causal, Masked, Objective, Replaced
from pipeline.data import loader as packing
from pipeline.data import order
from pipeline.data.corpus import Corpus
from pipeline.data.loader import IGNORE, Loader, PackedStream, best_fit, count_bins, pack
from pipeline.objective.noise import Vocabulary, make_noise
from tests.data.conftest import token_lists

SEQ, ROWS = 64, 14


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=60))
def test_best_fit_holds_everything_once_and_tightly(sizes: list[int]) -> None:
    bins = best_fit(sizes, 50)
    assert sorted(i for group in bins for i in group) == list(range(len(sizes)))
    filled = [sum(sizes[i] for i in group) for group in bins]
    assert all(total <= 50 for total in filled)
    # No two bins fit into one: the later one's first item would have gone into the earlier.
    assert all(a + b > 50 for i, a in enumerate(filled) for b in filled[:i])
    assert count_bins(np.bincount(sizes), 50) == len(bins)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 16))
def test_every_target_occurs_once(lengths: list[int], seq: int) -> None:
    parts, ends = pack(np.array(lengths, np.int32), seq)
    rows = [parts[a:b].tolist() for a, b in pairwise(ends)]
    inputs = [place for row in rows for start, n in row for place in range(start, start + n)]
    starts = np.cumsum([0, *lengths])
    targets = set(range(starts[-1])) - set(starts[:-1].tolist())
    assert sorted(place + 1 for place in inputs) == sorted(targets)
    assert all(sum(count for _, count in row) <= seq for row in rows)


def test_rows_are_whole_documents(corpus: Corpus) -> None:
    loader = Loader(corpus, "train", seq=SEQ, rows=ROWS, seed=1, packing="best-fit")
    expected = set()
    for ids in token_lists(corpus, "train"):
        for i in range(0, len(ids) - 1, SEQ):
            targets = tuple(ids[i + 1 : i + SEQ + 1])
            expected.add((tuple(ids[i : i + len(targets)]), targets))
    found = set()
    padding = 0
    for step in range(-(-loader.windows // ROWS)):
        batch = loader.batch(step)
        assert batch.documents_BS is not None
        columns = (batch.tokens_BS.tolist(), batch.targets_BS.tolist(), batch.documents_BS.tolist())
        for tokens, targets, numbers in zip(*columns, strict=True):
            assert numbers == sorted(numbers)
            for number in set(numbers):
                part = [i for i, n in enumerate(numbers) if n == number]
                inputs = tuple(tokens[i] for i in part)
                aims = tuple(targets[i] for i in part)
                if aims[0] == IGNORE:
                    assert set(aims) == {IGNORE}
                    assert set(inputs) == {corpus.manifest.tokenizer.eod}
                    padding += len(part)
                else:
                    found.add((inputs, aims))
    assert found == expected
    assert padding / (loader.windows * SEQ) < 0.02


@pytest.mark.parametrize(
    ("objective", "packing"),
    [
        *((each, "best-fit") for each in (Causal(), Masked(rate=0.4), Replaced())),
        (Masked(rate=0.999), "concatenate"),  # rows may have too few words
    ],
)
def test_every_token_of_a_batch_counts_the_same(
    corpus: Corpus, objective: Objective, packing: str
) -> None:
    """Each rank knows the mean number of targets of all rows, which have different ones."""
    info = corpus.manifest.tokenizer
    noise = make_noise(objective, Vocabulary(info.vocab, info.eod))
    options = {"rows": ROWS, "seed": 1, "packing": packing, "objective": objective}
    loader = Loader(corpus, "train", seq=SEQ, noise=noise, **options)
    short = 0
    for step in range(60):
        counts = (loader.batch(step).targets_BS >= 0).sum(1)
        short += int((counts < counts.max()).any())
        part = loader.batch(step, 1, 2)
        assert part.counts_B is not None and len(part.counts_B) == ROWS // 2
        assert (part.counts_B == counts.float().mean()).all()
    assert short


def test_shards_are_packed_late_and_a_few_at_a_time(corpus, monkeypatch):
    """An epoch draws every row once and packs every shard once, with only two packings cached."""
    for module in (packing, order):
        monkeypatch.setattr(module, "SHARDS_TOGETHER", 2)
    packed: list[int] = []
    monkeypatch.setattr(
        packing, "pack", lambda lengths, seq: packed.append(len(lengths)) or pack(lengths, seq)
    )
    shards = (corpus.split("train").shards + corpus.split("valid").shards) * 3
    stream = PackedStream(corpus, shards, 8 * SEQ)
    assert not packed and len(shards) > 6
    orders = []
    for epoch in range(2):
        orders.append(stream.order(np.arange(stream.windows), 7, epoch))
        assert sorted(orders[-1].tolist()) == list(range(stream.windows))
        assert np.array_equal(stream.order(np.arange(100, 300), 7, epoch), orders[-1][100:300])
        packed.clear()
        for window in orders[-1].tolist():
            stream.read(window)
        assert len(shards) - 2 <= len(packed) <= len(shards)
    assert not np.array_equal(*orders)
