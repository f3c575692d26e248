"""Near-duplicates compared with brute force over every pair, and the whole pass through Ray."""

import gzip
import random
import tracemalloc
import unicodedata
from functools import lru_cache
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest

from pipeline.data import clean
from pipeline.data import dedup as deduplicating
from pipeline.data import sketch as sketching
from pipeline.data.corpus import Corpus
from pipeline.data.corpus_recipe import Near, Recipe
from pipeline.data.dedup import _exact_range, _pairs, deduplicate, join
from pipeline.data.prepare import prepare
from pipeline.data.sketch import BOTTOM, TEXT_BLOCK, band_keys, bottom, shingles, similarity
from pipeline.data.sketch import word_hashes as hash_words
from pipeline.data.sources import plan
from pipeline.data.tokenizer import Tokenizer
from tests.data.conftest import make, recipe_for, refused, some_texts, token_lists, write_jsonl

VOCABULARY = [f"w{i}" for i in range(4000)]
UNSPACED = (
    *("CJK", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "HALFWIDTH KATAKANA"),
    *("THAI", "LAO", "KHMER", "MYANMAR"),
)
NEAR = Near()


def word_hashes(text: str) -> list[int]:
    return hash_words(text.encode()).tolist()


def words_of(text: str) -> list[str]:
    """Split one character at a time, by the names of the characters."""
    spelled = ""
    for character in text.lower():
        word = character == "_" or unicodedata.category(character)[0] in "LMN"
        alone = word and unicodedata.name(character).startswith(UNSPACED)
        spelled += f" {character} " if alone else character if word else " "
    return spelled.split()


@lru_cache(2000)
def ngrams(text: str) -> frozenset[tuple[str, ...]]:
    words = words_of(text)
    return frozenset(tuple(words[i : i + 5]) for i in range(max(1, len(words) - 4)))


def jaccard(a: str, b: str) -> float:
    shared = len(ngrams(a) & ngrams(b))
    return shared / (len(ngrams(a)) + len(ngrams(b)) - shared)


def estimate(a: str, b: str) -> float:
    return similarity(bottom(shingles(a.encode(), 5)), bottom(shingles(b.encode(), 5)))


def near_pairs(texts: list[str]) -> set[tuple[int, int]]:
    """Return the pairs that share a band and are similar."""
    grams = [shingles(text.encode(), NEAR.ngram) for text in texts]
    bottoms = [bottom(g) for g in grams]
    keys = [set(band_keys(g, NEAR).tolist()) for g in grams]
    candidates = [(i, j) for i, j in combinations(range(len(texts)), 2) if keys[i] & keys[j]]
    return {(i, j) for i, j in candidates if similarity(bottoms[i], bottoms[j]) >= NEAR.threshold}


def planted(families: int, seed: int) -> list[str]:
    """Unrelated documents, each with some copies that change a share of the words."""
    source = random.Random(seed)
    texts = []
    for _ in range(families):
        original = source.choices(VOCABULARY, k=source.randrange(60, 900))
        texts.append(" ".join(original))
        for _ in range(source.randrange(4)):
            share = source.choice([0, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15])
            changed = list(original)
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
    found = word_hashes(text)
    expected = words_of(text)
    assert len(found) == len(expected)
    for a, word_a in zip(found, expected, strict=True):
        assert [a == b for b in found] == [word_a == word_b for word_b in expected]
        assert word_hashes(word_a) == [a], "an ASCII word differs beside other characters"


def test_word_hashes_never_change() -> None:
    """Sketches of different files are compared, and earlier corpora must be reproducible."""
    assert word_hashes("The cat, the_CAT 42") == [
        13885077684125539221,
        5002988127863433688,
        997819303216944846,
        14446594871517610841,
    ]


def test_word_hashes_of_a_long_document_are_those_of_its_words() -> None:
    """It is hashed block by block, cut at spaces; only a word longer than a block is cut."""
    words = {word: word_hashes(word)[0] for word in VOCABULARY}
    for separator in (" ", "\n", ", "):
        chosen = random.Random(5).choices(VOCABULARY, k=40_000)
        text = separator.join(chosen)
        assert len(text) > 2 * TEXT_BLOCK
        assert word_hashes(text) == [words[word] for word in chosen]
    assert len(word_hashes("x" * (2 * TEXT_BLOCK + 1))) == 3
    assert len(word_hashes("。東" * TEXT_BLOCK)) == TEXT_BLOCK  # cut between characters
    assert len(shingles(b"", 5)) == 0 and len(shingles(b"one two", 5)) == 1


def test_near_duplicates_of_a_script_without_spaces() -> None:
    source = random.Random(7)
    texts = []
    for _ in range(20):
        text = "".join(chr(source.randrange(0x4E00, 0x5600)) for _ in range(600))
        texts += [text, f"{text[:300]}，新{text[301:]}"]
    assert near_pairs(texts) == {(i, i + 1) for i in range(0, 40, 2)}


def test_similarity_is_exact_for_short_documents_and_close_for_long() -> None:
    for text in planted(30, seed=1)[:40]:
        other = text.replace("w1", "v1")
        tolerance = 1e-9 if len(ngrams(text)) < BOTTOM - 1 else 0.08
        assert abs(estimate(text, other) - jaccard(text, other)) < tolerance
    # Sketches of documents of different length cover different ranges of hashes.
    text = " ".join(random.Random(6).choices(VOCABULARY, k=6000))
    for share in (0.25, 0.5, 0.8):
        part = text[: int(len(text) * share)]
        assert abs(estimate(text, part) - jaccard(text, part)) < 0.08


def test_recall_and_precision_over_every_pair() -> None:
    texts = planted(120, seed=2)
    pairs = combinations(range(len(texts)), 2)
    truth = {(i, j) for i, j in pairs if jaccard(texts[i], texts[j]) >= 0.8}
    found = near_pairs(texts)
    assert len(truth) > 60
    assert len(found & truth) >= 0.95 * len(truth) and len(found & truth) >= 0.95 * len(found)


def test_union_find_compared_with_plain_sets() -> None:
    """For any block size, only the first of each cluster is its own parent."""
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
    parents = np.arange(2**17)  # a long chain
    for low in range(0, 2**17 - 1, 2**15):
        links = np.arange(low, min(low + 2**15, 2**17 - 1))
        join(parents, np.stack((links, links + 1), axis=1))
    assert (parents < np.arange(2**17))[1:].all()


@pytest.mark.usefixtures("ray_cluster")
def test_joining_takes_the_memory_of_a_block(tmp_path: Path) -> None:
    """The pairs of a large corpus do not fit into the driver's memory."""
    documents = 2**16
    stem = tmp_path / "sketch-00000"
    np.save(stem.with_suffix(".exact.npy"), np.zeros(0))
    pairs = np.sort(np.random.default_rng(0).integers(0, documents, (2**20, 2)), axis=1)
    np.save(tmp_path / "exact-0of1.npy", pairs)
    parents = np.arange(documents)
    starts = np.array([0, documents])
    tracemalloc.start()
    for block in _pairs(_exact_range, "exact", [stem], starts, Recipe(sources=())):
        join(parents, block)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < pairs.nbytes / 2
    assert (parents[1:] < np.arange(1, documents)).mean() > 0.99


@pytest.mark.usefixtures("ray_cluster")
def test_a_sketch_in_parts_is_the_same_sketch(tmp_path, monkeypatch):
    """A compressed file is one task, however long: its sketch is written whenever it has grown."""
    texts = [text for text in planted(1000, seed=5) for _ in range(2)]
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(write_jsonl(tmp_path / "a.jsonl", texts).read_bytes(), 1))
    recipe = Recipe(sources=(str(packed),), dedup={"exact": True, "near": {}})
    [task] = plan(recipe.sources, limit_bytes=None, seed=0)
    monkeypatch.setattr(clean, "BATCH_DOCUMENTS", 32)
    parts, peaks, keeps, counts = [], [], [], []
    for limit in (sketching.PART_BYTES, 100_000):
        monkeypatch.setattr(sketching, "PART_BYTES", limit)
        stem = tmp_path / str(limit) / "sketch-00000"
        stem.parent.mkdir()
        tracemalloc.start()
        record = sketching.sketch(task, stem, recipe)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        counts.append(clean.total([record.stages, deduplicate([stem], [record], recipe)]))
        keeps.append(np.load(stem.with_suffix(".keep.npy")))
        parts.append(record.parts)
    assert parts[0] == 1 and parts[1] > 30 and peaks[1] < peaks[0] / 3
    assert 800 < keeps[0].sum() < len(texts) / 2 and np.array_equal(*keeps)
    assert counts[0] == counts[1]


@pytest.mark.usefixtures("ray_cluster")
def test_a_corpus_with_duplicates_across_files(tmp_path, tokenizer, monkeypatch):
    """Every pass through Ray: the first document of each cluster stays, and the counts add up."""
    monkeypatch.setattr(deduplicating, "RANGE_ROWS", 500)  # several ranges, several blocks
    monkeypatch.setattr(deduplicating, "BLOCK", 16)
    texts = planted(60, seed=3)
    parts = [[*texts[i::3], "short", *texts[:3]] for i in range(3)]
    files = [write_jsonl(tmp_path / f"{i}.jsonl", part) for i, part in enumerate(parts)]
    order = [text for part in parts for text in part if text != "short"]
    kept: list[str] = []
    for text in order:
        if not any(jaccard(text, other) >= 0.8 for other in kept):
            kept.append(text)
    manifest = make(
        files,
        tmp_path / "out",
        tokenizer,
        valid_share=0.2,
        filters={"quality": {"mean_word_length": (1, 10), "stop_words": 0}},
        dedup={"exact": True, "near": {}},
    )
    corpus = Corpus.open(tmp_path / "out", verify=True)
    ids = token_lists(corpus, "train") + token_lists(corpus, "valid")
    found = [tokenizer.decode(document[:-1]) for document in ids]
    assert len(set(found)) == len(found) == manifest.stages[-1].documents_kept
    # Brute force and clusters differ where similarity is not transitive; a pair may be missed.
    assert len(set(found) ^ set(kept)) <= 0.05 * len(kept)
    _read, filtered, dedup, encoded = manifest.stages
    names = [stage.name for stage in manifest.stages]
    assert names == ["read", "filter", "dedup", "tokenize"]
    assert encoded.documents_in == dedup.documents_kept == encoded.documents_kept
    assert encoded.bytes_in == dedup.bytes_kept == encoded.bytes_kept
    assert encoded.tokens == sum(split.tokens for split in manifest.splits.values())
    assert filtered.dropped == {"words": (3, 15)}
    assert filtered.documents_kept == dedup.documents_in == len(order)
    assert dedup.dropped["exact"][0] == len(order) - len(set(order)) >= 6
    assert dedup.documents_in == dedup.documents_kept + sum(n for n, _ in dedup.dropped.values())
    assert dedup.bytes_in == dedup.bytes_kept + sum(b for _, b in dedup.dropped.values())


@pytest.mark.usefixtures("ray_cluster")
def test_decontamination(tmp_path: Path, tokenizer: Tokenizer) -> None:
    def against(*texts: str) -> dict[str, object]:
        return {"against": [str(write_jsonl(tmp_path / "held_out.jsonl", list(texts)))]}

    texts = some_texts(60)
    secret = " ".join(f"q{i}" for i in range(30))
    texts[7] += f"\nAnswer: {secret.upper()}!"
    texts[9] += " ".join(secret.split()[:12])  # twelve common words: below the limit of thirteen
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    held_out = f"Question one.\n{secret}\n"
    manifest = make([source], tmp_path / "out", tokenizer, decontaminate=against(held_out))
    assert manifest.stages[-2].dropped == {"overlap": (1, len(texts[7].encode()))}

    # Held-out texts of 8 to 12 words match as a whole; texts without spaces, by characters.
    short = ["Which ten words are all that this question has got?", "Yes, it is."]
    short.append("一九八四年春，我在北京的胡同里遇见了他。")
    tainted = [f"{texts[1]} {short[0].upper()} Seven.", f"他说：{short[2]}后来呢？"]
    clean_texts = [f"{texts[2]} yes it is", short[0][:-8]]
    source = write_jsonl(tmp_path / "c.jsonl", tainted + clean_texts)
    warnings: list[str] = []
    recipe = recipe_for([source], tokenizer, decontaminate=against(*short))
    model = tokenizer.model
    manifest, _ = prepare(recipe, tmp_path / "short", model=model, warn=warnings.append)
    overlap = (2, sum(len(text.encode()) for text in tainted))
    assert manifest.stages[-2].dropped == {"overlap": overlap}
    assert len(warnings) == 1 and "1 of 3 texts" in warnings[0]
    with refused("decontaminate.against"):
        make([source], tmp_path / "none", tokenizer, decontaminate=against(short[1]))


@pytest.mark.usefixtures("ray_cluster")
def test_every_stage_counts_what_it_drops(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = some_texts(60)
    secret = " ".join(f"q{i}" for i in range(30))
    tainted = f"{texts[7]} {secret}"
    # Composed here and decomposed in the held-out file: both are normalized.
    composed = " ".join(f"é{i}" for i in range(30))
    copies = [tainted, tainted, texts[0], f"{tainted} nearly", "\a\a", "two words", composed]
    (tmp_path / "held_out.txt").write_text(secret)
    (tmp_path / "more.txt").write_text(unicodedata.normalize("NFD", composed))
    quality = {"words": (3, 10**6), "mean_word_length": (0, 99)}
    quality |= {"alphabetic_words": 0, "stop_words": 0}
    manifest = make(
        [
            write_jsonl(tmp_path / "a.jsonl", [*texts[:7], tainted, *texts[8:]]),
            write_jsonl(tmp_path / "b.jsonl", copies),
        ],
        tmp_path / "out",
        tokenizer,
        valid_share=0,
        normalise={"controls": True, "unicode": "NFC"},
        filters={"quality": quality},
        dedup={"exact": True, "near": {}},
        decontaminate={"against": [f"{tmp_path}/held_out.txt", f"{tmp_path}/more.txt"]},
    )
    stages = manifest.stages
    dropped = {
        stage.name: {reason: count for reason, (count, _) in stage.dropped.items()}
        for stage in stages
    }
    assert dropped == {
        "read": {},
        "normalise": {"empty": 1},
        "filter": {"words": 1},
        "dedup": {"exact": 3, "near": 1},
        "decontaminate": {"overlap": 2},
        "tokenize": {},
    }
    for before, after in pairwise(stages):
        assert before.documents_kept == after.documents_in
        assert before.bytes_kept == after.bytes_in
    corpus = Corpus.open(tmp_path / "out", verify=True)
    assert corpus.split("train").documents == stages[-1].documents_kept
