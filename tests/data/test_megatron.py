"""Tokenized corpora of others: their ids go through our shards unchanged."""

import shutil
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from pipeline.data import megatron
from pipeline.data.corpus import Corpus
from pipeline.data.corpus_recipe import Malformed
from pipeline.data.prepare import prepare
from pipeline.data.shards import index_bytes
from pipeline.data.tokenizer import Tokenizer, train
from tests.data.conftest import make, pieces_of, recipe_for, refused, some_texts
from tests.data.test_shards import all_documents

pytestmark = pytest.mark.usefixtures("ray_cluster")


def write_megatron(
    stem: Path, documents: list[list[list[int]]], code: int = 4, dtype: str = "<i4"
) -> Path:
    """Write the published layout, with documents of several sequences, as Megatron can."""
    stem.parent.mkdir(exist_ok=True)
    sequences = [sequence for document in documents for sequence in document]
    lengths = np.array([len(s) for s in sequences], np.int32)
    offsets = np.concatenate(
        ([0], np.cumsum(lengths[:-1], dtype=np.int64) * np.dtype(dtype).itemsize)
    )
    ends = np.cumsum([0] + [len(d) for d in documents], dtype=np.int64)
    stem.with_suffix(".bin").write_bytes(
        np.concatenate([np.array(s, dtype) for s in sequences]).tobytes()
    )
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(ends))
    stem.with_suffix(".idx").write_bytes(
        head + lengths.tobytes() + offsets.astype(np.int64).tobytes() + ends.tobytes()
    )
    return stem.with_suffix(".idx")


@pytest.mark.parametrize(("code", "dtype"), [(4, "<i4"), (8, "<u2"), (5, "<i8")])
def test_ids_pass_through(tmp_path: Path, tokenizer: Tokenizer, code: int, dtype: str) -> None:
    texts = some_texts(40)
    encoded = [tokenizer.encode(text).tolist() for text in texts]
    documents = [
        [ids[:5], [*ids[5:], tokenizer.eod]] if i % 2 else [ids] for i, ids in enumerate(encoded)
    ]
    source = write_megatron(tmp_path / "in" / "theirs", documents, code, dtype)
    if code == 8:
        source = source.rename(source.with_suffix(".IDX"))
        source.with_suffix(".bin").rename(source.with_suffix(".BIN"))
    warnings: list[str] = []
    recipe = recipe_for([source.parent], tokenizer, valid_share=0.2)
    out = tmp_path / "out"
    manifest, _ = prepare(recipe, out, model=tokenizer.model, warn=warnings.append)
    assert not warnings
    corpus = Corpus.open(out, verify=True)
    found = all_documents(corpus, "train") + all_documents(corpus, "valid")
    assert sorted(found) == sorted([*ids, tokenizer.eod] for ids in encoded)
    assert sum(s.bytes for s in manifest.splits.values()) == sum(len(t.encode()) for t in texts)
    assert 0 < manifest.splits["valid"].documents < 20


def test_the_split_is_stable_when_tokens_are_added(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Only the text decides, not the type of its ids nor whether they include its end."""
    encoded = [tokenizer.encode(text).tolist() for text in some_texts(60)]
    few = write_megatron(tmp_path / "few", [[ids] for ids in encoded[:30]])
    many = write_megatron(tmp_path / "many", [[[*ids, tokenizer.eod]] for ids in encoded], 8, "<u2")
    held_out = []
    for source in (few, many):
        make([source], tmp_path / f"out-{source.stem}", tokenizer, valid_share=0.3)
        held_out.append(all_documents(Corpus.open(tmp_path / f"out-{source.stem}"), "valid"))
    added = [[*ids, tokenizer.eod] for ids in encoded[30:]]
    assert held_out[0] == [ids for ids in held_out[1] if ids not in added]
    assert 0 < len(held_out[0]) < len(held_out[1]) < 40


@pytest.mark.parametrize(
    ("documents", "sequences", "most"), [(1, 3, 40), (3, 4, 8), (7, 100, 2**20)]
)
def test_an_index_is_read_in_stretches(
    tmp_path, tokenizer, monkeypatch, documents, sequences, most
):
    """For any stretch length, each document with a sequence occurs exactly once."""
    given: list[list[list[int]]] = [
        [[5, 6], [7]],
        [],
        [[8]],
        [[]],
        [],
        [[9] * 4, [3], [4]],
        *[[[10 + i]] for i in range(20)],
        [],
    ]
    source = write_megatron(tmp_path / "theirs", given)
    monkeypatch.setattr(megatron, "DOCUMENTS", documents)
    monkeypatch.setattr(megatron, "SEQUENCES", sequences)
    monkeypatch.setattr(megatron, "PIECE_BYTES", most)
    cut = list(megatron.pieces("s", source))
    assert [(0, *(p.stop for p in cut))] == [(*(p.start for p in cut), len(given))] and len(cut) > 3
    assert sum(p.bytes for p in cut) == 4 * sum(len(s) for d in given for s in d)
    found = [
        np.asarray(ids).tolist() for p in cut for ids in megatron.documents(p, tokenizer.info(""))
    ]
    assert found == [[*(i for s in d for i in s), tokenizer.eod] for d in given if d]


def test_a_long_index_is_never_read_whole(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(megatron, "DOCUMENTS", 2**12)
    lengths = [7] * 10**6 + [100]
    (tmp_path / "a.idx").write_bytes(index_bytes(lengths, "uint16"))
    with (tmp_path / "a.bin").open("wb") as file:
        file.truncate(2 * sum(lengths))
    tracemalloc.start()
    cut = list(megatron.pieces("s", tmp_path / "a.idx"))
    *_, last = megatron.documents(cut[-1], tokenizer.info(""))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert cut[-1].stop == len(lengths) and not isinstance(last, Malformed) and len(last) == 101
    assert peak < (tmp_path / "a.idx").stat().st_size / 10
    monkeypatch.setattr(megatron, "DOCUMENT_TOKENS", 99)
    *_, last = megatron.documents(cut[-1], tokenizer.info(""))
    assert last == Malformed(str(tmp_path / "a.bin"), 10**6, "document longer than 99 tokens", 200)


def test_our_own_shards_as_a_source(corpus: Corpus, tmp_path: Path, tokenizer: Tokenizer) -> None:
    shutil.copytree(corpus.path, tmp_path / "ours")
    (tmp_path / "ours" / "malformed.jsonl").write_text("{}\n")  # a report, not text
    assert len(pieces_of(tmp_path / "ours")) == 6
    again = make([corpus.path], tmp_path / "out", tokenizer, valid_share=0)
    splits = corpus.manifest.splits.values()
    assert again.splits["train"].tokens == sum(s.tokens for s in splits)
    assert again.splits["train"].bytes == sum(s.bytes for s in splits)
    # The same share gives the same split: no held-out document becomes training data.
    make([corpus.path], tmp_path / "split", tokenizer, valid_share=0.1)
    before = sorted(all_documents(corpus, "valid"))
    assert before == sorted(all_documents(Corpus.open(tmp_path / "split"), "valid"))
    assert len(before) > 50
    with refused(tokenizer.fingerprint):
        other = Tokenizer(train(some_texts(200, seed=9), tokenizer.vocab))
        make([corpus.path], tmp_path / "other", other)


def test_wrong_tokenizer_and_broken_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    def fails(key: str, source: Path, **settings: object) -> None:
        with refused(key):
            make([source], tmp_path / "out", tokenizer, **settings)
        assert not (tmp_path / "out" / "manifest.json").exists()

    fails(f"id {tokenizer.vocab}", write_megatron(tmp_path / "big", [[[5, tokenizer.vocab]]]))
    fails("id -6", write_megatron(tmp_path / "below", [[[5, -6, 7]]]))
    good = write_megatron(tmp_path / "good", [[[5, 6, 7]], [[8, 9]]])
    with refused("--tokenizer"):
        prepare(recipe_for([good], tokenizer), tmp_path / "out")
    fails("--tokenizer", good, dedup={"exact": True})
    fails("--tokenizer", good, normalise={"pii": True})
    fails("--tokenizer", good, filters={"quality": {}})
    # Each number is damaged in turn: lengths 3 2 1 at byte 34, offsets 0 12 20 at 46, ends 0 2 3 at 70.
    three = write_megatron(tmp_path / "three", [[[5, 6, 7], [8, 9]], [[4]]])
    whole = three.read_bytes()
    for at, code, number, name in (
        (34, "<i", -1, "three.idx"),
        (42, "<i", 2, "three.bin"),
        (62, "<q", -4, "three.idx"),
        (62, "<q", 18, "three.idx"),
        (46, "<q", 2**62, "three.bin"),
        (54, "<q", 8, "three.idx"),
        (70, "<q", 1, "three.idx"),
        (78, "<q", 9, "three.idx"),
        (78, "<q", -1, "three.idx"),
        (86, "<q", 2, "three.idx"),
        (86, "<q", 2**40, "three.idx"),
    ):
        broken = bytearray(whole)
        struct.pack_into(code, broken, at, number)
        three.write_bytes(broken)
        fails(name, three)
    data = good.with_suffix(".bin")
    before = pieces_of(good)
    data.write_bytes(data.read_bytes()[::-1])
    assert pieces_of(good) != before
    data.write_bytes(data.read_bytes()[:-1])
    fails("good.bin", good)
    for content in (good.read_bytes()[:40], b"something else altogether, and long enough"):
        good.write_bytes(content)
        fails("good.idx", good)
