"""A corpus whose entropy is known exactly, to compare a fitted irreducible loss with the truth.

A document is a chain of words. Each next word is drawn in two independent steps: a frequency class,
then a rank within the class by Zipf's law. A permutation of the class, keyed by the previous word
(and, in every other class, by the class of the word before it), turns the rank into a word. Given
the past, rank → word is one to one, so the entropy of a word is that of (class, rank) whatever the
past was: a closed form, no simulation. What a model has to learn is the permutations, one per
context. Contexts are as frequent as words, that is, Zipfian, so the loss falls smoothly with size
and data.

All words of a class have one length, so bytes per word are a closed form too. A document ends after
each word with probability 1/WORDS. Text and word chain determine each other (words are distinct and
contain no space), hence

    nats per byte = (H(class) + Σ p(class)·H(rank | class) + H(end))
                    / (Σ p(class)·length(class) + 1 for the separator)

to be compared with held-out loss × tokens / bytes, where tokens include the document ends.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pipeline.objective.draws import F64, GOLDEN, I64, U64, mix


@dataclass(frozen=True)
class Language:
    # Words per class: powers of two, because permutations work modulo 2**k.
    classes: tuple[int, ...]
    lengths: tuple[int, ...]  # bytes per word: frequent words are short
    weights: tuple[float, ...]  # a word of class c is 3–5 times as frequent as one of class c + 1
    farther: bool = True  # every other class also depends on the class of the word before the last


LANGUAGES = {
    "synthetic": Language(
        (16, 64, 256, 1024, 4096), (2, 4, 4, 6, 6), (0.32, 0.24, 0.18, 0.14, 0.12)
    ),
    # Few enough words that minutes on a CPU approach the entropy and a ladder of runs can find it.
    # Looking farther back is worth 0.13 nats per token and is learned late: such a ladder would
    # show little else (docs/LOG.md).
    "synthetic:small": Language((8, 32, 128), (2, 4, 4), (0.5, 0.3, 0.2), farther=False),
}
FULL = LANGUAGES["synthetic"]
SKEW = 1.3  # Zipf's exponent within a class; decides how much knowing the context is worth
WORDS = 256  # mean words per document
DOCUMENTS = 2048  # per batch; about 2.5 MB of text


def entropy_nats_per_byte(language: Language = FULL) -> float:
    """Return the exact entropy, from the definition above."""
    end = 1 / WORDS
    nats = -(end * math.log(end) + (1 - end) * math.log(1 - end))
    for size, weight in zip(language.classes, language.weights, strict=True):
        rank = _zipf(size)
        nats += -weight * math.log(weight) - weight * float(rank @ np.log(rank))
    return nats / bytes_per_word(language)


def bytes_per_word(language: Language = FULL) -> float:
    """Include the separator: a space between words, a newline at the end of a document."""
    return sum(w * n for w, n in zip(language.weights, language.lengths, strict=True)) + 1


def batch_bytes(language: Language = FULL) -> int:
    return round(DOCUMENTS * WORDS * bytes_per_word(language))


def documents(seed: int, batch: int, language: Language = FULL) -> list[str]:
    """Return one batch of documents of the corpus: a pure function of seed and number."""
    random = np.random.Generator(np.random.Philox(key=[seed, batch]))
    # Only uniform draws, inverted here: numpy keeps only their stream stable across releases.
    ends = np.log1p(-random.random(DOCUMENTS)) / math.log1p(-1 / WORDS)
    lengths = 1 + np.floor(ends).astype(np.int64)
    class_edges = np.cumsum(language.weights)[:-1]
    drawn_class = np.searchsorted(class_edges, random.random(int(lengths.sum())), side="right")
    uniform = random.random(len(drawn_class))
    drawn_rank = np.empty(len(drawn_class), np.uint64)
    for c, size in enumerate(language.classes):
        here = drawn_class == c
        drawn_rank[here] = np.searchsorted(np.cumsum(_zipf(size))[:-1], uniform[here], side="right")
    words = _chain(seed, language, lengths, drawn_class, drawn_rank)
    spelling = _spelling(seed, language)
    rows = zip(words.tolist(), lengths.tolist(), strict=True)
    return [" ".join([spelling[word] for word in row[:length]]) + "\n" for row, length in rows]


def _chain(seed: int, language: Language, lengths: I64, drawn_class: I64, drawn_rank: U64) -> I64:
    """Turn ranks into words, one position at a time in all documents that reach it."""
    sizes = np.array(language.classes, np.uint64)
    first = np.concatenate(([0], np.cumsum(language.classes)[:-1])).astype(np.uint64)
    words = np.zeros((len(lengths), int(lengths.max())), np.int64)
    rows = np.argsort(-lengths, kind="stable")
    # The start of a document is a separate context.
    previous = np.full(len(rows), sum(language.classes), np.uint64)
    before = np.zeros(len(rows), np.uint64)
    salt = np.uint64(seed * GOLDEN % 2**64)
    done = 0
    for t in range(words.shape[1]):
        rows = rows[lengths[rows] > t]
        draws = slice(done, done + len(rows))
        done += len(rows)
        c = drawn_class[draws].astype(np.uint64)
        looks_farther = language.farther & (c % 2 == 1)
        context = previous[: len(rows)] * np.uint64(16)
        context += np.where(looks_farther, before[: len(rows)], np.uint64(0))
        key = mix((context << np.uint64(8)) + c + salt)
        previous = first[c] + _shuffle(drawn_rank[draws], sizes[c], key)
        before = c
        words[rows, t] = previous
    return words


def _shuffle(rank: U64, size: U64, key: U64) -> U64:
    """A keyed bijection of 0 … size-1.

    Odd factors, additions and right-shift xors are each invertible modulo 2**k.
    """
    mask = size - np.uint64(1)
    x = rank
    for shift in (np.uint64(0), np.uint64(20), np.uint64(40)):
        x = (x * ((key >> shift) | np.uint64(1)) + (key >> (shift + np.uint64(3)))) & mask
        x ^= x >> np.uint64(2)
    return x


@lru_cache(8)
def _zipf(size: int) -> F64:
    weight: F64 = np.arange(1, size + 1, dtype=np.float64) ** -SKEW
    return weight / float(weight.sum())


@lru_cache(2)
def _spelling(seed: int, language: Language) -> tuple[str, ...]:
    """Return distinct pronounceable words with the length of their class."""
    random = np.random.Generator(np.random.Philox(key=[seed, 2**63]))
    syllables = [c + v for c in "bdfghjklmnprstvz" for v in "aeiou"]
    words: dict[str, None] = {}  # an ordered set
    for size, length in zip(language.classes, language.lengths, strict=True):
        target = len(words) + size
        while len(words) < target:
            chosen = random.integers(0, len(syllables), length // 2)
            words["".join(syllables[i] for i in chosen)] = None
    return tuple(words)
