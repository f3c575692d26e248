"""The same tokens in the same order for any number of ranks, after any restart."""

import threading
from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.layers import load
from pipeline.config.objective import Masked, Prefix, Spans
from pipeline.data.corpus import Corpus
from pipeline.data.loader import Loader, prefetch
from pipeline.data.order import Permutation
from pipeline.errors import DataError
from pipeline.objective.noise import Vocabulary, make_noise
from tests.data.conftest import refused

SEQ, ROWS = 64, 28


def check_ranks(make: Callable[[], Loader], world: int, steps: Sequence[int]) -> None:
    """The ranks split the batches of one process, also with loaders that have no history."""
    whole = make()
    for step in steps:
        batch = whole.batch(step)
        loader = make()  # as it is after a restart
        parts = [loader.batch(step, rank, world) for rank in range(world)]
        assert sum(part.hash for part in parts) % 2**64 == batch.hash
        for name, tensor in batch.inputs.items():
            assert torch.equal(torch.cat([part.inputs[name] for part in parts]), tensor)


@pytest.fixture(scope="module")
def loader(corpus: Corpus) -> Loader:
    return Loader(corpus, "train", seq=SEQ, rows=ROWS, seed=3)


@pytest.fixture(scope="module")
def stream(corpus: Corpus) -> np.ndarray:
    return np.concatenate([corpus.tokens(s) for s in corpus.split("train").shards])


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 5))
def test_permutation_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    assert sorted(Permutation(n, seed, epoch)(np.arange(n)).tolist()) == list(range(n))


def test_any_slice_of_a_huge_permutation() -> None:
    order = Permutation(10**13, 1)
    index = np.arange(10**12, 10**12 + 1000)
    assert np.array_equal(order(index)[500:], order(index[500:]))
    assert len(np.unique(order(index))) == 1000 and order(index).max() < 10**13


def test_permutation_looks_random() -> None:
    """Neighbors land far apart, and epochs and seeds differ."""
    n = 10_000
    orders = [Permutation(n, s, e)(np.arange(n)) for s, e in ((1, 0), (1, 1), (2, 0))]
    for order in orders:
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
        assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.05
    for other in orders[1:]:
        assert (orders[0] == other).mean() < 0.01


def test_an_epoch_has_every_window_once(loader: Loader, stream: np.ndarray) -> None:
    starts = range(0, loader.windows * SEQ, SEQ)
    expected = sorted(tuple(stream[start : start + SEQ + 1].tolist()) for start in starts)
    rows = []
    for step in range(-(-loader.windows // ROWS)):
        batch = loader.batch(step)
        assert torch.equal(batch.tokens_BS[:, 1:], batch.targets_BS[:, :-1])
        rows += torch.cat([batch.tokens_BS, batch.targets_BS[:, -1:]], 1).tolist()
    assert loader.windows == (len(stream) - 1) // SEQ
    assert sorted(map(tuple, rows[: loader.windows])) == expected


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
@pytest.mark.parametrize("world", [2, 4, 7])
def test_ranks_split_the_same_batch(corpus: Corpus, world: int, packing: str) -> None:
    def make() -> Loader:
        return Loader(corpus, "train", seq=SEQ, rows=ROWS, seed=3, packing=packing, boundaries=True)

    assert {"tokens_BS", "targets_BS", "documents_BS"} <= make().batch(0).inputs.keys()
    check_ranks(make, world, (0, 1, make().steps_per_epoch, 10**6))


@pytest.mark.parametrize(
    ("objective", "packing"),
    [(Masked(), "concatenate"), (Masked(), "best-fit"), (Prefix(), "concatenate"),
     (Spans(), "concatenate")],
)  # fmt: skip
def test_noise_is_the_same_on_any_number_of_ranks(corpus, objective, packing):
    tokenizer = corpus.manifest.tokenizer

    def fresh(seed: int = 3, split: str = "train") -> Loader:
        noise = make_noise(objective, Vocabulary(tokenizer.vocab, tokenizer.eod))
        seq = objective.text_length(SEQ)
        return Loader(corpus, split, seq=seq, rows=ROWS, seed=seed, packing=packing, noise=noise)

    check_ranks(fresh, 4, (0, 7, 10**6))
    # Held-out text has the same noise in every run and in any order.
    found = []
    for seed in (3, 4):
        loader = fresh(seed, "valid")
        batches = [loader.batch(step) for step in range(-(-loader.windows // ROWS))]
        # `counts_B` belongs to a batch, the others to a row.
        names = [name for name in batches[0].inputs if name != "counts_B"]
        columns = [torch.cat([b.inputs[name] for b in batches]) for name in names]
        rows = torch.cat([c.reshape(len(c), -1) for c in columns], 1)
        found.append(sorted(map(str, rows[: loader.windows].tolist())))
    assert found[0] == found[1]


def test_the_hash_covers_the_noise(corpus: Corpus) -> None:
    tokenizer = corpus.manifest.tokenizer
    noise = make_noise(Masked(), Vocabulary(tokenizer.vocab, tokenizer.eod))
    batch = Loader(corpus, "train", seq=SEQ, rows=ROWS, seed=3, noise=noise).batch(5)
    both = torch.cat([batch.tokens_BS, batch.targets_BS], 1).numpy()
    hashes = [xxhash.xxh3_64_intdigest(row.tobytes(), seed=i) for i, row in enumerate(both)]
    assert batch.hash == sum(hashes) % 2**64
    assert ((batch.targets_BS >= 0).sum(1) == round(0.15 * SEQ)).all()
    assert (batch.tokens_BS == tokenizer.vocab).any()  # the mask: the first special id


def test_sentences_end_with_marks_or_their_bytes(corpus: Corpus) -> None:
    ends = corpus.sentence_ends()
    assert all(corpus.tokenizer.encode(f"x{mark}")[-1] in ends for mark in ".!?\n")
    pieces = corpus.manifest.tokenizer.vocab
    sets = (f"objective.stops=[{pieces}]", f"model.vocab={2 * pieces}")
    with pytest.raises(DataError, match=rf"objective.stops={pieces} .* leave it out"):
        corpus.check(load(size="27k", arch="bart", sets=sets))


def test_the_hash_covers_the_windows(loader: Loader) -> None:
    batch = loader.batch(5)
    windows = torch.cat([batch.tokens_BS, batch.targets_BS[:, -1:]], 1).numpy().astype(np.uint16)
    hashes = [xxhash.xxh3_64_intdigest(row.tobytes(), seed=i) for i, row in enumerate(windows)]
    assert batch.hash == sum(hashes) % 2**64 != loader.batch(6).hash
    assert batch.tokens_BS.dtype == batch.targets_BS.dtype == torch.int64


def test_seeds_and_epochs_change_the_order(corpus: Corpus, loader: Loader) -> None:
    other = Loader(corpus, "train", seq=SEQ, rows=ROWS, seed=4)
    assert not torch.equal(other.batch(0).tokens_BS, loader.batch(0).tokens_BS)
    first = {loader._place(i) for i in range(200)}
    second = {loader._place(loader.windows + i) for i in range(200)}
    assert first != second


def test_windows_cross_shards(corpus: Corpus, stream: np.ndarray) -> None:
    """One window is as long as the corpus, so every border of shards is inside it."""
    long = Loader(corpus, "train", seq=len(stream) - 1, rows=1, seed=0)
    assert long.windows == 1
    assert np.array_equal(long.batch(0).tokens_BS[0].numpy(), stream[:-1])


def test_boundaries_of_concatenated_documents(corpus: Corpus) -> None:
    batch = Loader(corpus, "train", seq=SEQ, rows=ROWS, seed=1, boundaries=True).batch(0)
    plain = Loader(corpus, "train", seq=SEQ, rows=ROWS, seed=1).batch(0)
    assert batch.documents_BS is not None and plain.documents_BS is None
    assert plain.hash == batch.hash
    for tokens, numbers in zip(batch.tokens_BS.tolist(), batch.documents_BS.tolist(), strict=True):
        assert numbers == [tokens[:i].count(corpus.manifest.tokenizer.eod) for i in range(SEQ)]


def test_a_split_that_is_too_small_or_missing(corpus: Corpus) -> None:
    with refused("'valid'"):
        Loader(corpus, "valid", seq=10**7, rows=1, seed=0)
    with refused("split='test'"):
        Loader(corpus, "test", seq=8, rows=1, seed=0)


def test_prefetch_yields_the_same_and_closes(loader: Loader) -> None:
    before = threading.active_count()
    steps = list(prefetch(loader, 3, 8, 1, 2))
    assert [s for s, _ in steps] == [3, 4, 5, 6, 7]
    assert all(torch.equal(b.tokens_BS, loader.batch(s, 1, 2).tokens_BS) for s, b in steps)
    endless = prefetch(loader, 0, 10**9, 0, 1)
    assert len(list(islice(endless, 3))) == 3
    endless.close()
    assert threading.active_count() == before


def test_prefetch_raises_the_error_of_its_thread(corpus: Corpus) -> None:
    broken = Loader(corpus, "train", seq=SEQ, rows=ROWS, seed=0)
    broken._streams[0]._map = lambda index: (_ for _ in ()).throw(OSError("disk gone"))  # type: ignore[assignment]
    with pytest.raises(OSError, match="disk gone"):
        next(prefetch(broken, 0, 5, 0, 1))
