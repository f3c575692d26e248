"""The files against Megatron's published layout, and every way a shard can be wrong."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from pipeline.data.corpus import Corpus
from pipeline.data.shards import MANIFEST, ShardWriter, dtype_for
from pipeline.data.tokenizer import Tokenizer
from pipeline.errors import DataError


def megatron_documents(stem: Path) -> list[list[int]]:
    """A reader from the layout in Megatron-LM's indexed_dataset.py alone; nothing of ours."""
    raw = stem.with_suffix(".idx").read_bytes()
    assert raw[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, documents = struct.unpack("<QBQQ", raw[9:34])
    assert version == 1
    dtype = {
        1: np.uint8,
        2: np.int8,
        3: np.int16,
        4: np.int32,
        5: np.int64,
        6: np.float64,
        7: np.float32,
        8: np.uint16,
    }[code]
    lengths = np.frombuffer(raw, np.int32, sequences, 34)
    pointers = np.frombuffer(raw, np.int64, sequences, 34 + lengths.nbytes)
    indices = np.frombuffer(raw, np.int64, documents, 34 + lengths.nbytes + pointers.nbytes)
    assert 34 + lengths.nbytes + pointers.nbytes + indices.nbytes == len(raw)
    assert indices.tolist() == list(range(sequences + 1))
    data = stem.with_suffix(".bin").read_bytes()
    return [
        np.frombuffer(data, dtype, n, p).tolist() for n, p in zip(lengths, pointers, strict=True)
    ]


def test_shards_hold_every_document_in_order(
    corpus: Corpus, tokenizer: Tokenizer, texts: list[str]
) -> None:
    found = {
        split: [
            d for s in corpus.split(split).shards for d in megatron_documents(corpus.path / s.name)
        ]
        for split in ("train", "valid")
    }
    assert all(d[-1] == tokenizer.eod for ds in found.values() for d in ds)
    decoded = {
        split: [tokenizer.sentencepiece.decode(d[:-1]) for d in ds] for split, ds in found.items()
    }
    held = set(decoded["valid"])
    assert 0.05 < len(held) / len(texts) < 0.2
    assert decoded["train"] == [t for t in texts if t not in held]
    assert decoded["valid"] == [t for t in texts if t in held]


def test_megatron_reads_them(corpus: Corpus) -> None:
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    shard = corpus.split("train").shards[0]
    theirs = indexed.IndexedDataset(str(corpus.path / shard.name))
    assert [theirs[i].tolist() for i in range(len(theirs))] == megatron_documents(
        corpus.path / shard.name
    )


def test_manifest_counts(corpus: Corpus, texts: list[str]) -> None:
    splits = corpus.manifest.splits.values()
    assert sum(s.documents for s in splits) == len(texts)
    assert sum(s.bytes for s in splits) == sum(len(t.encode()) for t in texts)
    assert sum(s.tokens for s in corpus.manifest.sources) == corpus.split("train").tokens


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    assert dtype_for(65536) == "uint16" and dtype_for(65537) == "int32"
    writer = ShardWriter(tmp_path, "wide", "s", dtype_for(100_000))
    for ids in ([99_999, 2], [7, 2]):
        writer.add(np.array(ids), 9)
    writer.close()
    assert megatron_documents(tmp_path / "wide") == [[99_999, 2], [7, 2]]


@pytest.fixture
def copy(corpus: Corpus, tmp_path: Path) -> Path:
    return Path(shutil.copytree(corpus.path, tmp_path / "copy"))


def fails(path: Path, says: str, verify: bool = False) -> None:
    with pytest.raises(DataError, match=says) as caught:
        Corpus.open(path, verify)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_missing_cut_and_flipped(copy: Path, suffix: str) -> None:
    path = copy / f"train-00001.{suffix}"
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    path.write_bytes(flipped)
    Corpus.open(copy)
    fails(copy, "damaged", verify=True)
    path.write_bytes(whole[:-1])
    fails(copy, "bytes long instead of")
    path.unlink()
    fails(copy, "missing")


def test_manifest_missing_foreign_edited(copy: Path) -> None:
    path = copy / MANIFEST
    good = json.loads(path.read_text())
    path.write_text(json.dumps(good | {"version": 99}))
    fails(copy, "version=99")
    path.write_text(json.dumps(good | {"dtype": "int32"}))
    fails(copy, "edited or damaged")
    path.write_text(json.dumps(good | {"surprise": 1}))
    fails(copy, "surprise")
    path.write_text("{")
    fails(copy, "not a manifest")
    path.unlink()
    fails(copy, "no manifest.json")
    fails(copy / "nowhere", "check the path")
    fails(copy.parent, "finish `launch data prepare`")
    path.write_text(json.dumps(good))
    fails(copy.parent, f"no manifest.json there; give {copy}$")
    for shard in copy.glob("*.idx"):
        shard.unlink()
    fails(copy.parent, "finish `launch data prepare`")  # a checkpoint has a manifest too


def test_another_tokenizer_is_refused(copy: Path) -> None:
    model = copy / "tokenizer.model"
    model.write_bytes(model.read_bytes() + b"\x00")
    fails(copy, "fingerprint=")
    model.unlink()
    fails(copy, "tokenizer of these shards is missing")
