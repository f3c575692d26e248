"""Tokenized corpora of others: through our shards and back, the ids unchanged."""

import shutil
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from pipeline.data import megatron
from pipeline.data import tokenizer as tokenizing
from pipeline.data.corpus import Corpus
from pipeline.data.corpus_recipe import Recipe
from pipeline.data.piece import Malformed
from pipeline.data.prepare import prepare
from pipeline.data.shards import index_bytes
from pipeline.data.sources import plan
from pipeline.data.tokenizer import Tokenizer, train
from pipeline.errors import DataError
from tests.data.conftest import some_texts
from tests.data.test_shards import megatron_documents

pytestmark = pytest.mark.usefixtures("ray_cluster")


def write_megatron(
    stem: Path, documents: list[list[list[int]]], code: int = 4, dtype: str = "<i4"
) -> Path:
    """By the published layout, with documents of several sequences, as Megatron's own writer allows."""
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


def recipe(source: Path, tokenizer: Tokenizer, **settings: object) -> Recipe:
    given = {
        "sources": (str(source),),
        "vocab_size": tokenizer.vocab,
        "tokenizer": tokenizer.fingerprint,
    }
    return Recipe.model_validate(given | settings)


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
    said: list[str] = []
    made = recipe(source.parent, tokenizer, valid_share=0.2)
    manifest, _ = prepare(made, tmp_path / "out", model=tokenizer.model, warn=said.append)
    assert not said
    corpus = Corpus.open(tmp_path / "out", verify=True)
    found = [
        d
        for split in ("train", "valid")
        for s in corpus.split(split).shards
        for d in megatron_documents(corpus.path / s.name)
    ]
    assert sorted(found) == sorted([*ids, tokenizer.eod] for ids in encoded)
    assert sum(s.bytes for s in manifest.splits.values()) == sum(len(t.encode()) for t in texts)
    assert 0 < manifest.splits["valid"].documents < 20


def test_the_split_is_stable_when_tokens_are_added(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """By the hash of a document's text, however its ids are stored and whether or not its end was among them."""
    encoded = [tokenizer.encode(text).tolist() for text in some_texts(60)]
    few = write_megatron(tmp_path / "few", [[ids] for ids in encoded[:30]])
    many = write_megatron(tmp_path / "many", [[[*ids, tokenizer.eod]] for ids in encoded], 8, "<u2")
    held = {}
    for source in (few, many):
        out = tmp_path / f"out-{source.stem}"
        prepare(recipe(source, tokenizer, valid_share=0.3), out, model=tokenizer.model)
        held[source] = [
            d
            for s in Corpus.open(out).split("valid").shards
            for d in megatron_documents(out / s.name)
        ]
    added = [[*ids, tokenizer.eod] for ids in encoded[30:]]
    assert held[few] == [ids for ids in held[many] if ids not in added]
    assert 0 < len(held[few]) < len(held[many]) < 40


@pytest.mark.parametrize(
    ("documents", "sequences", "most"), [(1, 3, 40), (3, 4, 8), (7, 100, 2**20)]
)
def test_an_index_in_stretches(
    tmp_path: Path,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    documents: int,
    sequences: int,
    most: int,
) -> None:
    """Whatever is looked at together, every document comes once; one without a sequence is none."""
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
    monkeypatch.setattr(megatron, "SEQUENCES", 2)
    with pytest.raises(DataError, match="a document of more than 2 sequences"):
        list(megatron.pieces("s", source))


def test_a_long_index_is_never_read_whole(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_our_own_shards_go_in_again(corpus: Corpus, tmp_path: Path, tokenizer: Tokenizer) -> None:
    shutil.copytree(corpus.path, tmp_path / "ours")
    (tmp_path / "ours" / "malformed.jsonl").write_text("{}\n")  # is no text of it
    assert len(plan([str(tmp_path / "ours")], limit_bytes=None, seed=0)[0]) == 6
    again, _ = prepare(
        recipe(corpus.path, tokenizer, valid_share=0), tmp_path / "out", model=tokenizer.model
    )
    splits = corpus.manifest.splits.values()
    assert again.splits["train"].tokens == sum(s.tokens for s in splits)
    assert again.splits["train"].bytes == sum(s.bytes for s in splits)
    # Split as they were: no document that was held out is trained on.
    prepare(
        recipe(corpus.path, tokenizer, valid_share=0.1), tmp_path / "split", model=tokenizer.model
    )
    before, after = (
        sorted(d for s in c.split("valid").shards for d in megatron_documents(c.path / s.name))
        for c in (corpus, Corpus.open(tmp_path / "split"))
    )
    assert before == after and len(before) > 50
    other = Tokenizer(train(some_texts(200, seed=9), tokenizer.vocab))
    with pytest.raises(DataError, match=f"made with the tokenizer {tokenizer.fingerprint}"):
        prepare(recipe(corpus.path, other), tmp_path / "other", model=other.model)


def test_text_behind_ids(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "DECODE_IDS", 50)
    for text in some_texts(20, seed=8):
        assert (
            tokenizer.text_bytes(np.append(tokenizer.encode(text), np.uint32(tokenizer.eod)))
            == text.encode()
        )


def test_wrong_tokenizer_and_broken_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    def fails(
        says: str, source: Path, model: bytes | None = tokenizer.model, **settings: object
    ) -> None:
        with pytest.raises(DataError, match=says):
            prepare(recipe(source, tokenizer, **settings), tmp_path / "out", model=model)
        assert not (tmp_path / "out" / "manifest.json").exists()

    fails(
        f"has id {tokenizer.vocab}, but", write_megatron(tmp_path / "big", [[[5, tokenizer.vocab]]])
    )
    fails("has id -6, but .* 0 to 511; give", write_megatron(tmp_path / "below", [[[5, -6, 7]]]))
    good = write_megatron(tmp_path / "good", [[[5, 6, 7]], [[8, 9]]])
    fails("holds tokens, not text", good, model=None)
    for stage in (
        {"dedup": {"exact": True}},
        {"normalise": {"pii": True}},
        {"filters": {"quality": {}}},
    ):
        fails("holds tokens, not text", good, **stage)
    # Each number of the index in turn: lengths 3 2 1 at 34, offsets 0 12 20 at 46, ends 0 2 3 at 70.
    three = write_megatron(tmp_path / "three", [[[5, 6, 7], [8, 9]], [[4]]])
    whole = three.read_bytes()
    for at, code, number, says in (
        (34, "<i", -1, "damaged"),
        (42, "<i", 2, "three.bin: 24 bytes are fewer"),
        (62, "<q", -4, "damaged"),
        (62, "<q", 18, "damaged"),
        (46, "<q", 2**62, "three.bin: 24 bytes are fewer"),
        (54, "<q", 8, "do not follow"),
        (70, "<q", 1, "damaged"),
        (78, "<q", 9, "damaged"),
        (78, "<q", -1, "damaged"),
        (86, "<q", 2, "damaged"),
        (86, "<q", 2**40, "damaged"),
    ):
        broken = bytearray(whole)
        struct.pack_into(code, broken, at, number)
        three.write_bytes(broken)
        fails(says, three)
    data, before = good.with_suffix(".bin"), plan([str(good)], limit_bytes=None, seed=0)
    data.write_bytes(data.read_bytes()[::-1])
    assert plan([str(good)], limit_bytes=None, seed=0) != before
    data.write_bytes(data.read_bytes()[:-1])
    fails("fewer than its index says", good)
    good.write_bytes(good.read_bytes()[:40])
    fails("too few for 2 sequences", good)
    good.write_bytes(b"something else altogether, and long enough")
    fails("not an index", good)
