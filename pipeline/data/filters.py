"""Why a document is dropped, if it is: the rules of Gopher and C4, and a score of one's own."""

import re
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import cast

import numpy as np
import numpy.typing as npt

from pipeline.data.recipe import C4, Filters, Quality, Repetition, Score
from pipeline.errors import ConfigError

STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})  # Gopher's
_BULLETS = ("•", "-", "*", "‣", "◦")
_PARAGRAPHS = re.compile(r"\n{2,}")
_ENDS = (".", "!", "?", '"', "”", "'", "’")


def reason_to_drop(text: str, rules: Filters) -> str | None:
    """The name of the first rule that the text breaks."""
    words = text.split() if rules.quality or rules.repetition else []
    return (
        (rules.quality and _quality(text, words, rules.quality))
        or (rules.c4 and _c4(text, rules.c4))
        or (rules.repetition and _repetition(text, words, rules.repetition))
        or (rules.score and _scored(text, rules.score))
        or None
    )


def _quality(text: str, words: list[str], rule: Quality) -> str | None:
    count = len(words)
    if not rule.words[0] <= count <= rule.words[1]:
        return "words"
    if count == 0:
        return None
    if not rule.mean_word_length[0] <= sum(map(len, words)) / count <= rule.mean_word_length[1]:
        return "mean_word_length"
    if (text.count("#") + text.count("...") + text.count("…")) / count > rule.symbol_ratio:
        return "symbol_ratio"
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    if sum(line.startswith(_BULLETS) for line in lines) / len(lines) > rule.bullet_lines:
        return "bullet_lines"
    if sum(line.endswith(("...", "…")) for line in lines) / len(lines) > rule.ellipsis_lines:
        return "ellipsis_lines"
    if sum(any(map(str.isalpha, word)) for word in words) / count < rule.alphabetic_words:
        return "alphabetic_words"
    if rule.stop_words and len(STOP_WORDS.intersection(map(str.lower, words))) < rule.stop_words:
        return "stop_words"
    return None


def _c4(text: str, rule: C4) -> str | None:
    if rule.brackets and "{" in text:
        return "brackets"
    lower = text.lower()
    if any(phrase.lower() in lower for phrase in rule.phrases):
        return "phrases"
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    if not lines or sum(line.endswith(_ENDS) for line in lines) / len(lines) < rule.sentence_lines:
        return "sentence_lines"
    if rule.sentences and len(re.findall(r"[.!?]+[\"”'’)]*(?:\s|$)", text)) < rule.sentences:
        return "sentences"
    return None


def _repetition(text: str, words: list[str], rule: Repetition) -> str | None:
    for name, parts, share, characters in (
        ("lines", text.split("\n"), rule.duplicate_lines, rule.duplicate_line_characters),
        (
            "paragraphs",
            _PARAGRAPHS.split(text),
            rule.duplicate_paragraphs,
            rule.duplicate_paragraph_characters,
        ),
    ):
        parts = [part for part in map(str.strip, parts) if part]
        repeated = Counter(parts)
        if parts and 1 - len(repeated) / len(parts) > share:
            return f"duplicate_{name}"
        if (
            sum(len(part) * (n - 1) for part, n in repeated.items()) / max(1, len(text))
            > characters
        ):
            return f"duplicate_{name[:-1]}_characters"
    # Python's own hash differs from process to process, but which n-grams are equal does not.
    hashes = np.fromiter(map(hash, words), np.int64, len(words)).view(np.uint64)
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    for n, share in rule.top_ngrams.items():
        if _top_share(hashes, lengths, n, len(text)) > share:
            return f"top_{n}grams"
    for n, share in rule.duplicate_ngrams.items():
        if _duplicate_share(hashes, lengths, n, len(text)) > share:
            return f"duplicate_{n}grams"
    return None


def _ngrams(hashes: npt.NDArray[np.uint64], n: int) -> npt.NDArray[np.uint64]:
    grams = np.zeros(max(0, len(hashes) - n + 1), np.uint64)
    for k in range(n):
        grams = (grams ^ (grams >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15) + hashes[
            k : k + len(grams)
        ]
    return grams


def _top_share(
    hashes: npt.NDArray[np.uint64], lengths: npt.NDArray[np.int64], n: int, characters: int
) -> float:
    """Characters inside the most frequent n-gram, all its occurrences, as a share of the text."""
    grams = _ngrams(hashes, n)
    if not len(grams):
        return 0.0
    _, first, counts = np.unique(grams, return_index=True, return_counts=True)
    top = int(counts.max())
    if top < 2:
        return 0.0
    size = max(int(lengths[i : i + n].sum()) for i in first[counts == top])
    return size * top / characters


def _duplicate_share(
    hashes: npt.NDArray[np.uint64], lengths: npt.NDArray[np.int64], n: int, characters: int
) -> float:
    """Characters of words inside any n-gram that occurred before, each word once, as a share of the text."""
    grams = _ngrams(hashes, n)
    if not len(grams):
        return 0.0
    again = np.ones(len(grams), bool)
    again[np.unique(grams, return_index=True)[1]] = False
    covered = np.zeros(len(hashes) + 1, np.int64)
    np.add.at(covered, np.flatnonzero(again), 1)
    np.add.at(covered, np.flatnonzero(again) + n, -1)
    return float(lengths[np.cumsum(covered[:-1]) > 0].sum()) / characters


def _scored(text: str, rule: Score) -> str | None:
    function = _function(rule.function)
    try:
        return "score" if function(text) < rule.least else None
    except Exception as error:  # it is not ours
        raise ConfigError(
            f"filters.score.function={rule.function!r} fails: {type(error).__name__}: {error}"
        ) from error


@lru_cache
def _function(path: str) -> Callable[[str], float]:
    module, _, name = path.partition(":")
    try:
        return cast("Callable[[str], float]", getattr(import_module(module), name))
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"filters.score.function={path!r}: {error}; give package.module:function"
        ) from error
