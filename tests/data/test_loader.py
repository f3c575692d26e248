"""The same tokens in the same order on any world, after any restart."""

import threading
from itertools import islice

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.corpus import Corpus
from pipeline.data.loader import Loader, prefetch
from pipeline.data.permute import Permutation
from pipeline.errors import DataError

SEQ, ROWS = 64, 28


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


def test_permutation_any_slice_of_a_huge_one() -> None:
    order = Permutation(10**13, 1)
    index = np.arange(10**12, 10**12 + 1000)
    assert np.array_equal(order(index)[500:], order(index[500:]))
    assert len(np.unique(order(index))) == 1000 and order(index).max() < 10**13


def test_permutation_looks_random() -> None:
    """Neighbours land far apart, places are even, and epochs and seeds differ."""
    n = 10_000
    first, other_epoch, other_seed = (
        Permutation(n, s, e)(np.arange(n)) for s, e in ((1, 0), (1, 1), (2, 0))
    )
    for order in (first, other_epoch, other_seed):
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
        assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.05
    assert (first == other_epoch).mean() < 0.01 and (first == other_seed).mean() < 0.01


def test_an_epoch_is_every_window_once(loader: Loader, stream: np.ndarray) -> None:
    expected = sorted(
        tuple(stream[i * SEQ : i * SEQ + SEQ + 1].tolist()) for i in range(loader.windows)
    )
    rows = []
    for step in range(-(-loader.windows // ROWS)):
        batch = loader.batch(step)
        assert torch.equal(batch.tokens_BS[:, 1:], batch.targets_BS[:, :-1])
        rows += torch.cat([batch.tokens_BS, batch.targets_BS[:, -1:]], 1).tolist()
    assert loader.windows == (len(stream) - 1) // SEQ
    assert sorted(map(tuple, rows[: loader.windows])) == expected


@pytest.mark.parametrize("world", [2, 4, 7])
def test_ranks_cut_the_same_batch(corpus: Corpus, loader: Loader, world: int) -> None:
    for step in (0, 1, loader.steps_per_epoch, 10**6):
        whole = loader.batch(step)
        fresh = Loader(corpus, "train", seq=SEQ, rows=ROWS, seed=3)  # a restart: no history
        parts = [fresh.batch(step, rank, world) for rank in range(world)]
        assert torch.equal(torch.cat([p.tokens_BS for p in parts]), whole.tokens_BS)
        assert torch.equal(torch.cat([p.targets_BS for p in parts]), whole.targets_BS)
        assert sum(p.hash for p in parts) % 2**64 == whole.hash


def test_hash_is_what_it_says(loader: Loader) -> None:
    batch = loader.batch(5)
    windows = torch.cat([batch.tokens_BS, batch.targets_BS[:, -1:]], 1).numpy().astype(np.uint16)
    expected = (
        sum(xxhash.xxh3_64_intdigest(row.tobytes(), seed=i) for i, row in enumerate(windows))
        % 2**64
    )
    assert batch.hash == expected
    assert batch.hash != loader.batch(6).hash
    assert batch.tokens_BS.dtype == batch.targets_BS.dtype == torch.int64


def test_seeds_and_epochs_shuffle_anew(corpus: Corpus, loader: Loader) -> None:
    other = Loader(corpus, "train", seq=SEQ, rows=ROWS, seed=4)
    assert not torch.equal(other.batch(0).tokens_BS, loader.batch(0).tokens_BS)
    first = {loader._place(i) for i in range(200)}
    again = {loader._place(loader.windows + i) for i in range(200)}
    assert first != again


def test_windows_cross_shards(corpus: Corpus, stream: np.ndarray) -> None:
    """One window as long as the corpus: every shard border lies inside it."""
    long = Loader(corpus, "train", seq=len(stream) - 1, rows=1, seed=0)
    assert long.windows == 1
    assert np.array_equal(long.batch(0).tokens_BS[0].numpy(), stream[:-1])


def test_too_small_a_split_is_named(corpus: Corpus) -> None:
    with pytest.raises(DataError, match=r"split 'valid' has .* --valid-share"):
        Loader(corpus, "valid", seq=10**7, rows=1, seed=0)
    with pytest.raises(DataError, match="split='test'"):
        Loader(corpus, "test", seq=8, rows=1, seed=0)


def test_prefetch_gives_the_same_and_closes(loader: Loader) -> None:
    before = threading.active_count()
    steps = list(prefetch(loader, 3, 8, 1, 2))
    assert [s for s, _ in steps] == [3, 4, 5, 6, 7]
    assert all(torch.equal(b.tokens_BS, loader.batch(s, 1, 2).tokens_BS) for s, b in steps)
    endless = prefetch(loader, 0, 10**9, 0, 1)
    assert len(list(islice(endless, 3))) == 3
    endless.close()
    assert threading.active_count() == before


def test_prefetch_raises_here_what_went_wrong_there(corpus: Corpus) -> None:
    broken = Loader(corpus, "train", seq=SEQ, rows=ROWS, seed=0)
    broken._streams[0]._map = lambda index: (_ for _ in ()).throw(OSError("disk gone"))  # type: ignore[assignment]
    with pytest.raises(OSError, match="disk gone"):
        next(prefetch(broken, 0, 5, 0, 1))
