"""Each rule on a text that it must keep and on one that it must drop."""

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.clean import _duplicate_share, _top_share, normalize, reason_to_drop
from pipeline.data.corpus_recipe import Filters, Normalize, Repetition, load_recipe
from pipeline.errors import ConfigError
from tests.data.conftest import refused

PROSE = """The committee met on Tuesday to discuss the new harbour wall, which has been leaking since winter.
Nobody could say with certainty who had approved the original drawings, and the engineer had moved to another county.

"We have to be practical," said the chairwoman, and she asked for two estimates before the end of the month.
A fisherman pointed out that boats could not wait that long; the council promised to clear the northern steps at once.
"""
LINES = [line for line in PROSE.splitlines() if line]
PARAGRAPHS = [f"para {i % 2}\nline {i}a {i}\nline {i}b {i}" for i in range(2)]


def reason(text: str, **rules: dict[str, object]) -> str | None:
    return reason_to_drop(text, Filters.model_validate(rules))


def test_prose_passes_every_rule() -> None:
    assert reason(PROSE, quality={}, repetition={}, c4={}) is None
    assert reason("") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Too short to be of use.", "words"),
        (PROSE * 2000, "words"),
        ("a b c d e f the of " * 40, "mean_word_length"),
        (" ".join(["incomprehensibilities", "internationalization"] * 40), "mean_word_length"),
        (re.sub(" (the|to|a)", r" # \1", PROSE), "symbol_ratio"),
        ("\n".join(f"- {line}" for line in LINES), "bullet_lines"),
        ("\n\n".join(f"- {line}" for line in LINES), "bullet_lines"),
        ("\n".join(line[:-1] + "..." for line in LINES), "ellipsis_lines"),
        ("\n\n \n".join(line[:-1] + "..." for line in LINES[2:] * 2), "ellipsis_lines"),
        ("12345 67890 the of " * 40, "alphabetic_words"),
        ("Gestern wurde beschlossen dass niemand mehr kommen darf " * 12, "stop_words"),
    ],
)
def test_quality(text: str, expected: str) -> None:
    assert reason(text, quality={}) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PROSE + "function () { return 1; }", "brackets"),
        (PROSE + "Lorem Ipsum dolor sit amet.", "phrases"),
        ("Home\nAbout us\nContact\nLog in\n" + LINES[0], "sentence_lines"),
        ("One line only, and that is all.", "sentences"),
    ],
)
def test_c4(text: str, expected: str) -> None:
    assert reason(text, c4={}) == expected
    if expected == "phrases":
        assert reason(text, c4={"phrases": ["Ipsum DOLOR"]}) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("same line\n" * 5 + PROSE, "duplicate_lines"),
        (
            "\n".join(f"line {i}" for i in range(40)) + "\n" + ("x" * 300 + "\n") * 3,
            "duplicate_line_characters",
        ),
        (("a paragraph of its own\n\n" * 4 + PROSE).replace("\n\n", "\n \n\n"), "duplicate_lines"),
        ("buy now " * 30 + PROSE, "top_2grams"),
        (PROSE.replace("\n", " ") * 2, "duplicate_5grams"),
    ],
)
def test_repetition(text: str, expected: str) -> None:
    assert reason_to_drop(text, Filters(repetition=Repetition())) == expected


def test_repeated_paragraphs() -> None:
    rules: dict[str, object] = {"duplicate_lines": 1, "duplicate_line_characters": 1}
    rules["duplicate_paragraph_characters"] = 1
    assert reason("\n\n".join(PARAGRAPHS * 2), repetition=rules) == "duplicate_paragraphs"


words = st.lists(st.sampled_from(["a", "bb", "ccc", "dddd"]), max_size=30)


@settings(max_examples=300, deadline=None)
@given(words, st.integers(2, 6))
def test_ngram_shares_compared_with_plain_loops(parts: list[str], n: int) -> None:
    hashes = np.array([hash(w) for w in parts], np.int64).view(np.uint64)
    lengths = np.array([len(w) for w in parts], np.int64)
    characters = 1 + sum(map(len, parts))
    grams = [tuple(parts[i : i + n]) for i in range(len(parts) - n + 1)]
    counts = Counter(grams)
    top = max(counts.values(), default=0)
    sizes = [sum(map(len, gram)) * top for gram, count in counts.items() if count == top > 1]
    assert _top_share(hashes, lengths, n, characters) == max(sizes, default=0) / characters
    covered: set[int] = set()
    for i, gram in enumerate(grams):
        if gram in grams[:i]:
            covered.update(range(i, i + n))
    share = sum(len(parts[i]) for i in covered) / characters
    assert _duplicate_share(hashes, lengths, n, characters) == share


def vowels(text: str) -> float:
    return sum(c in "aeiou" for c in text) / max(1, len(text))


def test_a_score_function_of_the_user() -> None:
    score = {"function": "tests.data.test_filters:vowels", "least": 0.2}
    assert reason(PROSE, score=score) is None
    assert reason("xyz rhythm", score=score) == "score"
    with refused("nowhere", ConfigError):
        reason(PROSE, score={"function": "nowhere:f", "least": 0})


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("seed=-1", "seed=-1"),
        ("limit_bytes=-5", "limit_bytes=-5"),
        ("filters.repetition.top_ngrams={0=0.1}", "filters.repetition.top_ngrams.0"),
        ("filters.quality.words=[100,5]", "filters.quality.words=[100, 5]"),
        ("filters.quality.mean_word_length=[9,2]", "filters.quality.mean_word_length=[9, 2]"),
        ("dedup.near=true", "dedup.near=True"),
        ("decontaminate.against='a.txt'", "decontaminate.against=['a.txt']"),
    ],
)
def test_impossible_recipes(setting: str, key: str) -> None:
    with refused(key, ConfigError):
        load_recipe(None, {"sources": ("python",)}, [setting])


@pytest.mark.parametrize("remedy", ["dedup.near={}", "decontaminate.against=['a.txt']"])
def test_the_remedies_above_are_accepted(remedy: str) -> None:
    load_recipe(None, {"sources": ("python",)}, [remedy])


def test_normalize() -> None:
    text = "cafe\u0301\r\nﬁne\r\x07tab\t mail bob.smith+x@mail.example.co.uk from 10.11.12.13 "
    text += "v1.2.3.4.5"
    assert normalize(text, Normalize()) is text
    assert normalize(text, Normalize(unicode="NFC")).startswith("café\r\nﬁne")
    assert normalize(text, Normalize(unicode="NFKC")).startswith("café\r\nfine")
    assert normalize(text, Normalize(newlines=True)).count("\n") == 2
    without_controls = normalize(text, Normalize(controls=True))
    assert "\x07" not in without_controls and "\t" in without_controls
    expected = "mail name@example.com from 192.0.2.1 v1.2.3.4.5"
    assert normalize(text, Normalize(pii=True)).endswith(expected)
