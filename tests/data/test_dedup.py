"""Near-duplicates against brute force over every pair, and the whole pass through Ray."""

import gzip
import random
import tracemalloc
import unicodedata
from functools import lru_cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from pipeline.data import clean
from pipeline.data import dedup as deduplicating
from pipeline.data import sketch as sketching
from pipeline.data.corpus import Corpus
from pipeline.data.corpus_recipe import (
    Decontaminate,
    Dedup,
    Filters,
    Near,
    Normalize,
    Quality,
    Recipe,
)
from pipeline.data.dedup import _exact_range, _pairs, deduplicate, join
from pipeline.data.prepare import prepare
from pipeline.data.sketch import (
    BOTTOM,
    TEXT_BLOCK,
    band_keys,
    bottom,
    shingles,
    similarity,
    word_hashes,
)
from pipeline.data.sources import plan
from pipeline.data.tokenizer import Tokenizer
from pipeline.errors import DataError
from tests.data.conftest import some_texts, write_jsonl

VOCABULARY = [f"w{i}" for i in range(4000)]


UNSPACED = (
    "CJK",
    "IDEOGRAPHIC",
    "HIRAGANA",
    "KATAKANA",
    "HALFWIDTH KATAKANA",
    "THAI",
    "LAO",
    "KHMER",
    "MYANMAR",
)


def words_of(text: str) -> list[str]:
    """By the characters' names, one after the other."""
    spelt = ""
    for character in text.lower():
        word = character == "_" or unicodedata.category(character)[0] in "LMN"
        alone = word and unicodedata.name(character).startswith(UNSPACED)
        spelt += f" {character} " if alone else character if word else " "
    return spelt.split()


@lru_cache(2000)
def ngrams(text: str) -> frozenset[tuple[str, ...]]:
    words = words_of(text)
    return frozenset(tuple(words[i : i + 5]) for i in range(max(1, len(words) - 4)))


def jaccard(a: str, b: str) -> float:
    """By definition, on sets of tuples."""
    shared = len(ngrams(a) & ngrams(b))
    return shared / (len(ngrams(a)) + len(ngrams(b)) - shared)


def planted(families: int, seed: int) -> list[str]:
    """Unrelated documents, each with a few copies that change a share of the words: similarities all over 0.3…1."""
    source = random.Random(seed)
    texts = []
    for _ in range(families):
        original = source.choices(VOCABULARY, k=source.randrange(60, 900))
        texts.append(" ".join(original))
        for _ in range(source.randrange(4)):
            changed, share = list(original), source.choice([0, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15])
            for i in range(len(changed)):
                if source.random() < share:
                    changed[i] = source.choice(VOCABULARY)
            texts.append(" ".join(changed))
    source.shuffle(texts)
    return texts


@pytest.mark.parametrize(
    "text",
    [
        "The cat, the CAT; Überall  foo_bar\n\n42 42nd don't",
        "The cat — the “CAT” … ÜBERALL überall\u00a0foo_bar！ΑΘΗΝΑ αθηνα «cat»\u2028cat²",
        "東京、東 京。「GPT-3は東京タワー」ｶﾅカナ㐀𠀀𠀁 𠀀々cat東",
        "한국어는 띄어 쓴다, 한국어는 हिन्दी में, हिन्दी",
        "ภาษาไทย ไทย, ພາສາລາວ ភាសាខ្មែរ မြန်မာ",
        "😀 😀cat",
    ],
)
def test_word_hashes_are_equal_exactly_where_words_are(text: str) -> None:
    found, expected = word_hashes(text.encode()).tolist(), words_of(text)
    assert len(found) == len(expected)
    assert [[a == b for b in found] for a in found] == [
        [a == b for b in expected] for a in expected
    ]
    for word, code in zip(expected, found, strict=True):
        assert word_hashes(word.encode()).tolist() == [code], (
            "a word of ASCII differs beside other characters"
        )


def test_word_hashes_of_ascii_are_those_they_were() -> None:
    """Sketches of different files are compared, and a corpus that was made stays what it is."""
    assert word_hashes(b"The cat, the_CAT 42").tolist() == [
        13885077684125539221,
        5002988127863433688,
        997819303216944846,
        14446594871517610841,
    ]


def test_shingles_depend_on_no_place() -> None:
    assert word_hashes(b"a b")[1] == word_hashes(b"xxxxxxxxxx b")[1], (
        "a word's hash depends on its place"
    )
    assert len(shingles(b"", 5)) == 0 and len(shingles(b"one two", 5)) == 1


def test_word_hashes_of_a_long_document_are_those_of_its_words() -> None:
    """It is hashed block by block, cut at spaces; only a word longer than a block is cut."""
    for separator in (" ", "\n", ", "):
        text = separator.join(random.Random(5).choices(VOCABULARY, k=40_000))
        assert len(text) > 2 * TEXT_BLOCK
        words = {word: int(word_hashes(word.encode())[0]) for word in VOCABULARY}
        assert word_hashes(text.encode()).tolist() == [
            words[word] for word in text.split(separator)
        ]
    assert len(word_hashes(b"x" * (2 * TEXT_BLOCK + 1))) == 3
    assert len(word_hashes("。東".encode() * TEXT_BLOCK)) == TEXT_BLOCK  # cut between characters


def test_near_duplicates_of_a_script_without_spaces() -> None:
    source, near = random.Random(7), Near()
    texts = ["".join(chr(source.randrange(0x4E00, 0x5600)) for _ in range(600)) for _ in range(20)]
    grams = [
        shingles(t.encode(), near.ngram)
        for text in texts
        for t in (text, f"{text[:300]}，新{text[301:]}")
    ]
    keys = [set(band_keys(g, near).tolist()) for g in grams]
    for i, j in combinations(range(len(grams)), 2):
        alike = (
            bool(keys[i] & keys[j])
            and similarity(bottom(grams[i]), bottom(grams[j])) >= near.threshold
        )
        assert alike == (i // 2 == j // 2)


def test_similarity_is_exact_for_short_documents_and_close_for_long() -> None:
    for text in planted(30, seed=1)[:40]:
        other = text.replace("w1", "v1")
        a, b = (bottom(shingles(t.encode(), 5)) for t in (text, other))
        tolerance = 1e-9 if max(len(a), len(b)) < BOTTOM - 1 else 0.08
        assert abs(similarity(a, b) - jaccard(text, other)) < tolerance


def test_similarity_of_long_documents_of_different_length() -> None:
    """Their sketches reach to different hashes; only what both cover may count."""
    text = " ".join(random.Random(6).choices(VOCABULARY, k=6000))
    for share in (0.25, 0.5, 0.8):
        part = text[: int(len(text) * share)]
        estimate = similarity(
            bottom(shingles(text.encode(), 5)), bottom(shingles(part.encode(), 5))
        )
        assert abs(estimate - jaccard(text, part)) < 0.08


def test_recall_and_precision_against_every_pair() -> None:
    near = Near()
    texts = planted(120, seed=2)
    truth = {
        (i, j) for i, j in combinations(range(len(texts)), 2) if jaccard(texts[i], texts[j]) >= 0.8
    }
    grams = [shingles(t.encode(), near.ngram) for t in texts]
    bottoms = [bottom(g) for g in grams]
    keys = [set(band_keys(g, near).tolist()) for g in grams]
    candidates = {(i, j) for i, j in combinations(range(len(texts)), 2) if keys[i] & keys[j]}
    found = {(i, j) for i, j in candidates if similarity(bottoms[i], bottoms[j]) >= near.threshold}
    assert len(truth) > 60
    assert len(found & truth) / len(truth) >= 0.95
    assert len(found & truth) / len(found) >= 0.95


def test_union_find_against_plain_sets() -> None:
    """Whatever the blocks the pairs come in: only the first of each cluster is its own parent."""
    source = random.Random(4)
    for block in range(1, 51):
        edges = [tuple(sorted(source.sample(range(40), 2))) for _ in range(source.randrange(1, 40))]
        parents = np.arange(40)
        for low in range(0, len(edges), block):
            join(parents, np.array(edges[low : low + block]))
        clusters: list[set[int]] = []
        for a, b in edges:
            joined = [c for c in clusters if a in c or b in c]
            clusters = [c for c in clusters if c not in joined] + [set().union({a, b}, *joined)]
        expected = sorted(n for c in clusters for n in c - {min(c)})
        assert np.flatnonzero(parents != np.arange(40)).tolist() == expected


def test_a_long_chain_is_joined_in_few_steps() -> None:
    parents = np.arange(2**17)
    for low in range(0, 2**17 - 1, 2**15):
        links = np.arange(low, min(low + 2**15, 2**17 - 1))
        join(parents, np.stack((links, links + 1), axis=1))
    assert (parents < np.arange(2**17))[1:].all()


@pytest.mark.usefixtures("ray_cluster")
def test_joining_takes_the_memory_of_a_block(tmp_path: Path) -> None:
    """The pairs of a corpus are many times the driver's memory."""
    documents, stem = 2**16, tmp_path / "sketch-00000"
    np.save(stem.with_suffix(".exact.npy"), np.zeros(0))
    pairs = np.sort(np.random.default_rng(0).integers(0, documents, (2**20, 2)), axis=1)
    np.save(tmp_path / "exact-0of1.npy", pairs)
    parents = np.arange(documents)
    tracemalloc.start()
    for block in _pairs(
        _exact_range, "exact", [stem], np.array([0, documents]), Recipe(sources=())
    ):
        join(parents, block)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < pairs.nbytes / 2
    assert (parents[1:] < np.arange(1, documents)).mean() > 0.99


@pytest.mark.usefixtures("ray_cluster")
def test_a_sketch_in_parts_is_the_same_sketch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compressed file is one task however long it is: its sketch goes to the disk when it has grown."""
    texts = [text for text in planted(1000, seed=5) for _ in range(2)]
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(write_jsonl(tmp_path / "a.jsonl", texts).read_bytes(), 1))
    recipe = Recipe(sources=(str(packed),), dedup=Dedup(exact=True, near=Near()))
    [task] = plan(recipe.sources, limit_bytes=None, seed=0)
    monkeypatch.setattr(clean, "BATCH_DOCUMENTS", 32)  # in a batch
    seen = []
    for limit in (sketching.PART_BYTES, 100_000):
        monkeypatch.setattr(sketching, "PART_BYTES", limit)
        stem = tmp_path / str(limit) / "sketch-00000"
        stem.parent.mkdir()
        tracemalloc.start()
        record = sketching.sketch(task, stem, recipe)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        books = deduplicate([stem], [record], recipe)
        seen.append(
            (
                record.parts,
                peak,
                np.load(stem.with_suffix(".keep.npy")),
                clean.total([record.stages, books]),
            )
        )
    (whole, all_of_it, keep, counted), (parts, most, keep_again, counted_again) = seen
    assert whole == 1 and parts > 30 and most < all_of_it / 3
    assert 800 < keep.sum() < len(texts) / 2 and np.array_equal(keep, keep_again)
    assert counted == counted_again


@pytest.mark.usefixtures("ray_cluster")
def test_a_corpus_with_duplicates_across_files(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pass through Ray: what stays is one document per cluster, the first, and the books add up."""
    monkeypatch.setattr(deduplicating, "RANGE_ROWS", 500)  # several ranges, several blocks
    monkeypatch.setattr(deduplicating, "BLOCK", 16)
    texts = planted(60, seed=3)
    files = [
        write_jsonl(tmp_path / f"{i}.jsonl", [*texts[i::3], "short", *texts[:3]]) for i in range(3)
    ]
    order = [t for i in range(3) for t in [*texts[i::3], "short", *texts[:3]]]
    kept: list[str] = []
    for text in order:
        if text != "short" and not any(jaccard(text, other) >= 0.8 for other in kept):
            kept.append(text)
    recipe = Recipe(
        sources=tuple(map(str, files)),
        vocab_size=tokenizer.vocab,
        tokenizer=tokenizer.fingerprint,
        valid_share=0.2,
        filters=Filters(quality=Quality(mean_word_length=(1, 10), stop_words=0)),
        dedup=Dedup(exact=True, near=Near()),
    )
    manifest, _ = prepare(recipe, tmp_path / "out", model=tokenizer.model)
    corpus = Corpus.open(tmp_path / "out", verify=True)
    found = []
    for split in ("train", "valid"):
        for shard in corpus.split(split).shards:
            ends = np.cumsum(corpus.lengths(shard))
            found += [tokenizer.decode(d[:-1]) for d in np.split(corpus.tokens(shard), ends[:-1])]
    assert len(set(found)) == len(found) == manifest.stages[-1].documents_kept
    # Greedy brute force and clusters differ only where similarity is not transitive, and a pair may be missed.
    assert len(set(found) ^ set(kept)) <= 0.05 * len(kept)
    read, filtered, dedup, encoded = manifest.stages
    assert (read.name, filtered.name, dedup.name, encoded.name) == (
        "read",
        "filter",
        "dedup",
        "tokenize",
    )
    assert encoded.documents_in == dedup.documents_kept == encoded.documents_kept
    assert encoded.bytes_in == dedup.bytes_kept == encoded.bytes_kept
    assert encoded.tokens == sum(split.tokens for split in manifest.splits.values())
    assert filtered.dropped == {"words": (3, 15)}
    assert filtered.documents_kept == dedup.documents_in == len(order) - 3
    copies = len(order) - 3 - len({t for t in order if t != "short"})
    assert dedup.dropped["exact"][0] == copies >= 6
    assert dedup.documents_in == dedup.documents_kept + sum(n for n, _ in dedup.dropped.values())
    assert dedup.bytes_in == dedup.bytes_kept + sum(b for _, b in dedup.dropped.values())


@pytest.mark.usefixtures("ray_cluster")
def test_decontamination(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = some_texts(60)
    secret = " ".join(f"q{i}" for i in range(30))
    texts[7] += f"\nAnswer: {secret.upper()}!"
    texts[9] += " ".join(
        secret.split()[:12]
    )  # twelve words in common are below the limit of thirteen
    (tmp_path / "eval.txt").write_text(f"Question one.\n{secret}\n")
    recipe = Recipe(
        sources=(str(write_jsonl(tmp_path / "a.jsonl", texts)),),
        vocab_size=tokenizer.vocab,
        tokenizer=tokenizer.fingerprint,
        decontaminate=Decontaminate(against=(str(tmp_path / "eval.txt"),)),
        valid_share=0,
    )
    manifest, _ = prepare(recipe, tmp_path / "out", model=tokenizer.model)
    assert manifest.stages[-2].dropped == {"overlap": (1, len(texts[7].encode()))}

    # Shorter held-out texts by all their words, down to eight; a script without spaces by its characters.
    asked = [
        "Which ten words are all that this question has got?",
        "一九八四年春，我在北京的胡同里遇见了他。",
        "Yes, it is.",
    ]
    tainted = [
        f"{texts[1]} {asked[0].upper()} Seven.",
        f"他说：{asked[1]}后来呢？",
        f"{texts[2]} yes it is",
        asked[0][:-8],
    ]
    said: list[str] = []
    short = recipe.model_copy(
        update={
            "sources": (str(write_jsonl(tmp_path / "c.jsonl", tainted)),),
            "decontaminate": Decontaminate(
                against=(str(write_jsonl(tmp_path / "asked.jsonl", asked)),)
            ),
        }
    )
    manifest, _ = prepare(short, tmp_path / "short", model=tokenizer.model, warn=said.append)
    assert manifest.stages[-2].dropped == {
        "overlap": (2, sum(len(t.encode()) for t in tainted[:2]))
    }
    assert len(said) == 1 and "1 of 3 texts have fewer than 8 words" in said[0]
    write_jsonl(tmp_path / "asked.jsonl", asked[2:])
    with pytest.raises(
        DataError, match="1 of 1 texts have fewer than 8 words: nothing is left to look for"
    ):
        prepare(short, tmp_path / "none", model=tokenizer.model)

    # Behind dedup: of a tainted text and its copies one comes so far, and every stage counts what it drops itself.
    composed = " ".join(
        f"é{i}" for i in range(30)
    )  # and decomposed in the held-out file: both are normalised
    copies = [texts[7], texts[7], texts[0], f"{texts[7]} nearly", "\a\a", "two words", composed]
    (tmp_path / "more.txt").write_text(unicodedata.normalize("NFD", composed))
    again = recipe.model_copy(
        update={
            "sources": (*recipe.sources, str(write_jsonl(tmp_path / "b.jsonl", copies))),
            "normalise": Normalize(controls=True, unicode="NFC"),
            "filters": Filters(
                quality=Quality(
                    words=(3, 10**6), mean_word_length=(0, 99), alphabetic_words=0, stop_words=0
                )
            ),
            "dedup": Dedup(exact=True, near=Near()),
            "decontaminate": Decontaminate(
                against=(str(tmp_path / "eval.txt"), str(tmp_path / "more.txt"))
            ),
        }
    )
    books = prepare(again, tmp_path / "again", model=tokenizer.model)[0].stages
    assert [stage.name for stage in books] == [
        "read",
        "normalise",
        "filter",
        "dedup",
        "decontaminate",
        "tokenize",
    ]
    assert [before.documents_kept for before in books[:-1]] == [
        after.documents_in for after in books[1:]
    ]
    assert [before.bytes_kept for before in books[:-1]] == [after.bytes_in for after in books[1:]]
    dropped = [
        {reason: documents for reason, (documents, _) in stage.dropped.items()} for stage in books
    ]
    assert dropped == [{}, {"empty": 1}, {"words": 1}, {"exact": 3, "near": 1}, {"overlap": 2}, {}]
    assert (
        Corpus.open(tmp_path / "again", verify=True).split("train").documents
        == books[-1].documents_kept
    )
