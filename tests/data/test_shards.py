"""The files compared with Megatron's published layout, and every way a corpus can be damaged."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from pipeline.data.corpus import Corpus
from pipeline.data.shards import MANIFEST, ShardWriter, dtype_for, save
from tests.conftest import flip_bit
from tests.data.conftest import refused

DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}


def megatron_documents(stem: Path) -> list[list[int]]:
    """A reader written from Megatron-LM's indexed_dataset.py alone."""
    raw = stem.with_suffix(".idx").read_bytes()
    assert raw[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, documents = struct.unpack("<QBQQ", raw[9:34])
    assert version == 1
    lengths = np.frombuffer(raw, np.int32, sequences, 34)
    pointers = np.frombuffer(raw, np.int64, sequences, 34 + lengths.nbytes)
    indices = np.frombuffer(raw, np.int64, documents, 34 + lengths.nbytes + pointers.nbytes)
    assert 34 + lengths.nbytes + pointers.nbytes + indices.nbytes == len(raw)
    assert indices.tolist() == list(range(sequences + 1))
    data = stem.with_suffix(".bin").read_bytes()
    places = zip(lengths, pointers, strict=True)
    return [np.frombuffer(data, DTYPES[code], n, p).tolist() for n, p in places]


def all_documents(corpus: Corpus, split: str) -> list[list[int]]:
    shards = corpus.split(split).shards
    return [ids for shard in shards for ids in megatron_documents(corpus.path / shard.name)]


def test_saved_arrays_are_those_of_np_save(tmp_path):
    numbers = np.arange(6).reshape(2, 3)
    for array in (numbers, numbers.T, numbers[:0]):
        save(tmp_path / "array.npy", array)
        assert np.array_equal(np.load(tmp_path / "array.npy"), array)


def test_shards_contain_every_document_in_order(corpus, tokenizer, texts):
    decoded = {}
    for split in ("train", "valid"):
        found = all_documents(corpus, split)
        assert all(ids[-1] == tokenizer.eod for ids in found)
        decoded[split] = [tokenizer.sentencepiece.decode(ids[:-1]) for ids in found]
    held_out = set(decoded["valid"])
    assert 0.05 < len(held_out) / len(texts) < 0.2
    assert decoded["train"] == [text for text in texts if text not in held_out]
    assert decoded["valid"] == [text for text in texts if text in held_out]
    splits = corpus.manifest.splits.values()
    assert sum(split.documents for split in splits) == len(texts)
    assert sum(split.bytes for split in splits) == sum(len(text.encode()) for text in texts)
    assert sum(s.tokens for s in corpus.manifest.sources) == corpus.split("train").tokens


def test_megatron_reads_them(corpus: Corpus) -> None:
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    stem = corpus.path / corpus.split("train").shards[0].name
    theirs = indexed.IndexedDataset(str(stem))
    assert [theirs[i].tolist() for i in range(len(theirs))] == megatron_documents(stem)


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    assert dtype_for(65536) == "uint16" and dtype_for(65537) == "int32"
    with (tmp_path / "wide.bin").open("wb") as file:
        writer = ShardWriter(file, dtype_for(100_000))
        for ids in ([99_999, 2], [7, 2]):
            writer.add(np.array(ids), 9)
    writer.index(tmp_path / "wide", "s")
    assert megatron_documents(tmp_path / "wide") == [[99_999, 2], [7, 2]]


@pytest.fixture
def copy(corpus: Corpus, tmp_path: Path) -> Path:
    return Path(shutil.copytree(corpus.path, tmp_path / "copy"))


def fails(path: Path, key: str, verify: bool = False) -> None:
    with refused(key):
        Corpus.open(path, verify)


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_missing_truncated_and_flipped_files(copy: Path, suffix: str) -> None:
    path = copy / f"train-00001.{suffix}"
    whole = path.read_bytes()
    flip_bit(path)
    Corpus.open(copy)
    fails(copy, path.name, verify=True)
    path.write_bytes(whole[:-1])
    fails(copy, path.name)
    path.unlink()
    fails(copy, path.name)


def test_manifests_that_are_missing_foreign_or_edited(copy: Path) -> None:
    path = copy / MANIFEST
    good = json.loads(path.read_text())
    for changes, key in (
        ({"version": 99}, "version=99"),
        ({"dtype": "int32"}, "hash="),
        ({"surprise": 1}, "surprise"),
    ):
        path.write_text(json.dumps(good | changes))
        fails(copy, key)
    path.write_text("{")
    fails(copy, MANIFEST)
    path.unlink()
    for folder in (copy, copy / "nowhere", copy / "x" / ("y" * 300)):
        fails(folder, str(folder))


def test_another_tokenizer_is_refused(copy: Path) -> None:
    model = copy / "tokenizer.model"
    model.write_bytes(model.read_bytes() + b"\x00")
    fails(copy, "fingerprint=")
    model.unlink()
    fails(copy, "tokenizer.model")
