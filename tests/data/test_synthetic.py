"""The stated entropy against an independent estimate, and the chain against its definition."""

import math
from collections import Counter
from functools import lru_cache
from itertools import pairwise

import numpy as np
import pytest

from pipeline.data import synthetic


@lru_cache
def documents(batch: int, language: synthetic.Language) -> list[str]:
    return synthetic.documents(0, batch, language)


def test_same_seed_same_text() -> None:
    first = documents(0, synthetic.FULL)
    assert synthetic.documents(0, 0) == first
    assert first != documents(1, synthetic.FULL) != synthetic.documents(1, 1)


def test_bytes_and_document_lengths() -> None:
    texts = documents(0, synthetic.FULL)
    words = [text.split() for text in texts]
    count = sum(map(len, words))
    assert abs(sum(map(len, texts)) / count - synthetic.bytes_per_word()) < 0.02
    assert abs(count / len(texts) / synthetic.WORDS - 1) < 0.1
    assert len({w for ws in words for w in ws}) <= sum(synthetic.FULL.classes)


def test_shuffles_are_bijections() -> None:
    for size in synthetic.FULL.classes:
        for key in np.random.default_rng(0).integers(0, 2**63, 40, dtype=np.uint64):
            ranks = np.arange(size, dtype=np.uint64)
            shuffled = synthetic._shuffle(
                ranks, np.full(size, size, np.uint64), np.full(size, key, np.uint64)
            )
            assert sorted(shuffled.tolist()) == ranks.tolist()


@pytest.mark.parametrize("language", synthetic.LANGUAGES.values(), ids=synthetic.LANGUAGES)
def test_entropy_of_what_follows_frequent_words(language: synthetic.Language) -> None:
    """Counted from the text alone: after a frequent word, the next word of the first class is as stated."""
    spelling = {word: i for i, word in enumerate(synthetic._spelling(0, language))}
    edges = np.cumsum(language.classes)
    follow: dict[str, Counter[int]] = {}
    for batch in range(3):
        for text in documents(batch, language):
            words = text.split()
            for before, word in pairwise(words):
                if (
                    spelling[word] < edges[0]
                ):  # the first class: its permutation depends on the previous word alone
                    follow.setdefault(before, Counter())[spelling[word]] += 1
    zipf = synthetic._zipf(language.classes[0])
    truth = -float(zipf @ np.log(zipf))
    for counts in sorted(follow.values(), key=Counter.total)[-5:]:
        share = np.array(list(counts.values())) / counts.total()
        assert abs(-float(share @ np.log(share)) - truth) < 0.03


def test_entropy_is_below_what_counting_words_gives() -> None:
    words = Counter(
        w for batch in range(2) for text in documents(batch, synthetic.FULL) for w in text.split()
    )
    unigram = (
        -sum(c / words.total() * math.log(c / words.total()) for c in words.values())
        / synthetic.bytes_per_word()
    )
    assert 0.6 * unigram < synthetic.entropy_nats_per_byte() < 0.8 * unigram
