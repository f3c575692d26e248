"""Draws compared with their weights, epochs with counting, caps with arithmetic."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.corpus import Corpus
from pipeline.data.corpus_recipe import Mixture
from pipeline.data.loader import Loader
from pipeline.data.order import BLOCK, Schedule, capped, mixed, places
from pipeline.data.shards import SourceShare
from pipeline.data.tokenizer import Tokenizer
from pipeline.errors import ConfigError
from tests.data.conftest import make, refused, some_texts, write_jsonl
from tests.data.test_loader import check_ranks


def source(name: str, tokens: int) -> SourceShare:
    return SourceShare(name=name, documents=1, bytes=tokens, tokens=tokens)


def test_gpt3s_table() -> None:
    """Tokens, weights and epochs for 300B tokens, from the paper."""
    table = {
        "crawl": (410, 0.60, 0.44),
        "webtext": (19, 0.22, 2.9),
        "books1": (12, 0.08, 1.9),
        "books2": (55, 0.08, 0.43),
        "wikipedia": (3, 0.03, 3.4),
    }
    weights = {name: weight for name, (_, weight, _) in table.items()}
    result = mixed(
        [source(n, b * 10**9) for n, (b, _, _) in table.items()],
        Mixture(weights=weights, tokens=300 * 10**9),
    )
    for share in result:
        # The paper rounds, and its weights sum to 1.01.
        assert share.epochs == pytest.approx(table[share.name][2], rel=0.2)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=12))
def test_places_fill_the_block(weights: list[float]) -> None:
    share = np.array(weights) / sum(weights)
    counts = places(share, np.full(len(share), BLOCK))
    assert counts.sum() == BLOCK and (counts > 0).all()
    assert np.abs(counts / BLOCK - share).max() <= len(weights) / BLOCK + 1e-9


def test_schedule_numbers_every_draw_of_a_source() -> None:
    schedule = Schedule([0.75, 0.125, 0.125], seed=3)
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for block in range(3):
        for stream, number in zip(*(a.tolist() for a in schedule.block(block)), strict=True):
            seen[stream].append(number)
    for numbers in seen.values():
        assert numbers == list(range(len(numbers)))
    assert len(seen[0]) == 3 * BLOCK * 3 // 4
    assert not np.array_equal(schedule.block(0)[0], schedule.block(1)[0])


def test_capped_sources_give_their_share_to_the_others() -> None:
    weights = np.array([0.5, 0.3, 0.2])
    assert capped(weights, np.array([0.1, 9, 9])) == pytest.approx([0.1, 0.54, 0.36])
    assert capped(weights, np.array([0.1, 0.5, 9])) == pytest.approx([0.1, 0.5, 0.4])
    sources = [source("a", 143_500), source("b", 9_000_000)]
    few = mixed(sources, Mixture(weights={"a": 0.3, "b": 0.7}, tokens=3_000_000, most_epochs=4))
    assert few[0].epochs is not None and 3.99 < few[0].epochs <= 4
    assert sum(share.weight or 0 for share in few) == 1
    tiny = [source("a", 10**10), source("b", 10**5)]
    with refused("819,200,000", ConfigError):  # the remedy names these mixture.tokens
        mixed(tiny, Mixture(weights={"a": 0.5, "b": 0.5}, tokens=10**10, most_epochs=2))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 10**12), st.floats(0.001, 1)), min_size=1, max_size=6),
    st.integers(10**3, 10**12),
    st.floats(0.1, 50),
)
def test_no_source_passes_the_cap_and_remedies_are_accepted(given, tokens, epochs):
    sources = [source(str(i), size) for i, (size, _) in enumerate(given)]
    weights = {str(i): weight for i, (_, weight) in enumerate(given)}
    for _ in range(3):
        try:
            result = mixed(sources, Mixture(weights=weights, tokens=tokens, most_epochs=epochs))
        except ConfigError as error:
            found = re.search(r"lower (?:it|mixture.tokens=[\d,]+) to ([\d,]+)", str(error))
            assert found and "\n" not in str(error)
            tokens = int(found[1].replace(",", ""))
            if tokens == 0:
                return
        else:
            break
    assert sum(share.weight or 0 for share in result) == 1
    for share in result:
        assert 0 < (share.weight or 0) * tokens <= share.tokens * epochs * (1 + 1e-9)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"weights": {"a": 1}}, "b"),
        ({"weights": {"a": 1, "b": 1, "c": 1}}, "c"),
        ({"weights": {"a": 1, "b": 1}, "most_epochs": 2}, "mixture.tokens"),
        ({"weights": {"a": 1, "b": 1e-9}}, "source='b'"),
        ({"weights": {"a": 1, "b": 1}, "most_epochs": 2, "tokens": 100}, "mixture.tokens=100"),
    ],
)
def test_impossible_mixtures(settings: dict[str, object], key: str) -> None:
    with refused(key, ConfigError):
        mixed([source("a", 10), source("b", 10)], Mixture.model_validate(settings))


@pytest.mark.usefixtures("ray_cluster")
def test_a_mixed_corpus_through_the_loader(tmp_path: Path, tokenizer: Tokenizer) -> None:
    a = write_jsonl(tmp_path / "a.jsonl", ["alpha " * 300] * 60)
    b = write_jsonl(tmp_path / "b.jsonl", some_texts(300))
    mixture = {"weights": {str(a): 3, str(b): 1}, "tokens": 1_000_000}
    manifest = make([a, b], tmp_path / "out", tokenizer, mixture=mixture)
    first, second = manifest.sources
    assert [first.weight, second.weight] == pytest.approx([0.75, 0.25], abs=1e-3)
    assert first.epochs == pytest.approx(750_000 / first.tokens, rel=1e-2)
    corpus = Corpus.open(tmp_path / "out")
    loader = Loader(corpus, "train", seq=32, rows=64, seed=0)
    counts = Counter(loader._place(sample)[0] for sample in range(2 * BLOCK))
    assert first.weight is not None and counts[0] == round(first.weight * BLOCK) * 2
    alpha = set(tokenizer.encode("alpha " * 3).tolist()) | {tokenizer.eod}
    for step in (0, 70):
        whole = loader.batch(step)
        from_a = [set(row) <= alpha for row in whole.tokens_BS.tolist()]
        assert from_a == [loader._place(step * 64 + i)[0] == 0 for i in range(64)]
    check_ranks(lambda: Loader(corpus, "train", seq=32, rows=64, seed=0), 7, (0, 70))
