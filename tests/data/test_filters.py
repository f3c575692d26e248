"""Each rule on a text that it must keep and on one that it must drop, and the fast counts against slow ones."""

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.clean import _duplicate_share, _top_share, normalize, reason_to_drop
from pipeline.data.corpus_recipe import (
    C4,
    Filters,
    Normalize,
    Quality,
    Repetition,
    Score,
    load_recipe,
)
from pipeline.errors import ConfigError

PROSE = """The committee met on Tuesday to discuss the new harbour wall, which has been leaking since winter.
Nobody could say with certainty who had approved the original drawings, and the engineer had moved to another county.

"We have to be practical," said the chairwoman, and she asked for two estimates before the end of the month.
A fisherman pointed out that boats could not wait that long; the council promised to clear the northern steps at once.
"""
ALL = Filters(quality=Quality(), repetition=Repetition(), c4=C4())


def test_prose_passes_every_rule() -> None:
    assert reason_to_drop(PROSE, ALL) is None


def test_no_rules_keep_everything() -> None:
    assert reason_to_drop("", Filters()) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Too short to be of use.", "words"),
        (PROSE * 2000, "words"),
        ("a b c d e f the of " * 40, "mean_word_length"),
        ("incomprehensibilities " * 20 + PROSE.replace(" ", ""), "words"),
        (" ".join(["incomprehensibilities", "internationalization"] * 40), "mean_word_length"),
        (
            PROSE.replace(" the ", " # the ").replace(" to ", " ... to ").replace(" a", " # a"),
            "symbol_ratio",
        ),
        ("\n".join(f"- {line}" for line in PROSE.splitlines() if line), "bullet_lines"),
        ("\n".join(line[:-1] + "..." for line in PROSE.splitlines() if line), "ellipsis_lines"),
        ("\n\n".join(f"- {line}" for line in PROSE.splitlines() if line), "bullet_lines"),
        (
            "\n\n \n".join(line[:-1] + "..." for line in PROSE.splitlines()[3:] * 2),
            "ellipsis_lines",
        ),
        ("12345 67890 the of " * 40, "alphabetic_words"),
        ("Gestern wurde beschlossen dass niemand mehr kommen darf " * 12, "stop_words"),
    ],
)
def test_quality_drops(text: str, reason: str) -> None:
    assert reason_to_drop(text, Filters(quality=Quality())) == reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (PROSE + "function () { return 1; }", "brackets"),
        (PROSE + "Lorem Ipsum dolor sit amet.", "phrases"),
        ("Home\nAbout us\nContact\nLog in\n" + PROSE.splitlines()[0], "sentence_lines"),
        ("One line only, and that is all.", "sentences"),
    ],
)
def test_c4_drops(text: str, reason: str) -> None:
    assert reason_to_drop(text, Filters(c4=C4())) == reason
    if reason == "phrases":
        assert reason_to_drop(text, Filters(c4=C4(phrases=("Ipsum DOLOR",)))) == reason


@pytest.mark.parametrize(
    ("text", "reason"),
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
def test_repetition_drops(text: str, reason: str) -> None:
    assert reason_to_drop(text, Filters(repetition=Repetition())) == reason


def test_repeated_paragraphs_drop() -> None:
    text = "\n\n".join([f"para {i % 2}\nline {i}a {i}\nline {i}b {i}" for i in range(2)] * 2)
    only = Repetition(
        duplicate_lines=1, duplicate_line_characters=1, duplicate_paragraph_characters=1
    )
    assert reason_to_drop(text, Filters(repetition=only)) == "duplicate_paragraphs"


words = st.lists(st.sampled_from(["a", "bb", "ccc", "dddd"]), max_size=30)


@settings(max_examples=300, deadline=None)
@given(words, st.integers(2, 6))
def test_ngram_shares_against_plain_loops(parts: list[str], n: int) -> None:
    hashes = np.array([hash(w) for w in parts], np.int64).view(np.uint64)
    lengths = np.array([len(w) for w in parts], np.int64)
    characters = 1 + sum(map(len, parts))
    grams = [tuple(parts[i : i + n]) for i in range(len(parts) - n + 1)]
    counts = Counter(grams)
    top = max(counts.values(), default=0)
    expected_top = (
        max((sum(map(len, g)) * top for g, c in counts.items() if c == top), default=0)
        if top > 1
        else 0
    )
    assert _top_share(hashes, lengths, n, characters) == expected_top / characters
    covered: set[int] = set()
    for i, gram in enumerate(grams):
        if gram in grams[:i]:
            covered.update(range(i, i + n))
    assert (
        _duplicate_share(hashes, lengths, n, characters)
        == sum(len(parts[i]) for i in covered) / characters
    )


def vowels(text: str) -> float:
    return sum(c in "aeiou" for c in text) / max(1, len(text))


def test_a_score_of_ones_own() -> None:
    rules = Filters(score=Score(function="tests.data.test_filters:vowels", least=0.2))
    assert reason_to_drop(PROSE, rules) is None
    assert reason_to_drop("xyz rhythm", rules) == "score"
    with pytest.raises(ConfigError, match="nowhere"):
        reason_to_drop(PROSE, Filters(score=Score(function="nowhere:f", least=0)))


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("seed=-1", "seed=-1: must be greater than or equal to 0"),
        ("limit_bytes=-5", "limit_bytes=-5: must be greater than 0"),
        (
            "filters.repetition.top_ngrams={0=0.1}",
            "filters.repetition.top_ngrams.0='0': must be greater than or equal to 1",
        ),
        (
            "filters.quality.words=[100,5]",
            "filters.quality.words=[100, 5]: nothing lies between them; give the least first",
        ),
        (
            "filters.quality.mean_word_length=[9,2]",
            "filters.quality.mean_word_length=[9, 2]: nothing lies between them",
        ),
        (
            "dedup.near=true",
            "dedup.near=True: has settings of its own; write dedup.near={} for their defaults, or dedup.near.thr",
        ),
        (
            "decontaminate.against='a.txt'",
            "decontaminate.against='a.txt': must be a list; write decontaminate.against=['a.txt']",
        ),
    ],
)
def test_recipes_that_cannot_be(setting: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        load_recipe(None, {"sources": ("python",)}, [setting])
    assert "\n" not in str(caught.value)
    if remedy := re.search(r"write (\S+)", str(caught.value)):
        load_recipe(None, {"sources": ("python",)}, [remedy[1]])


def test_normalise() -> None:
    text = "cafe\u0301\r\nﬁne\r\x07tab\t mail bob.smith+x@mail.example.co.uk from 10.11.12.13 v1.2.3.4.5"
    assert normalize(text, Normalize()) is text
    assert normalize(text, Normalize(unicode="NFC")).startswith("café\r\nﬁne")
    assert normalize(text, Normalize(unicode="NFKC")).startswith("café\r\nfine")
    assert normalize(text, Normalize(newlines=True)).count("\n") == 2
    assert "\x07" not in normalize(text, Normalize(controls=True)) and "\t" in normalize(
        text, Normalize(controls=True)
    )
    assert normalize(text, Normalize(pii=True)).endswith(
        "mail name@example.com from 192.0.2.1 v1.2.3.4.5"
    )
