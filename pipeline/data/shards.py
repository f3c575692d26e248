"""Token shards on disk: Megatron's .bin/.idx, and the manifest that says what belongs together.

.bin is the token ids, document after document. .idx is (published in Megatron-LM's indexed_dataset.py):
magic, u64 version, u8 dtype code, u64 sequences, u64 documents + 1, i32 lengths, i64 byte offsets, i64 document ends.
"""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import ValidationError

from pipeline.atomic import digest
from pipeline.config.parts import Frozen
from pipeline.data.files import replacing, save
from pipeline.errors import DataError

MANIFEST = "manifest.json"
_AGAIN = "remove the directory and prepare it again"
VERSION = 1  # of the manifest; raise it whenever older readers would misread

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DType = Literal["uint16", "int32"]
_CODES: dict[DType, int] = {"uint16": 8, "int32": 4}


def dtype_for(vocab: int) -> DType:
    """Megatron's format knows no uint32; int32 has the same bytes for every id below 2**31."""
    return "uint16" if vocab <= 2**16 else "int32"


class Shard(Frozen):
    name: str  # of both files, without suffix
    source: str
    tokens: int  # document ends included
    documents: int
    bytes: int  # of UTF-8 text, document ends not counted
    bin_hash: str  # xxh3_128
    idx_hash: str


class Split(Frozen):
    tokens: int
    documents: int
    bytes: int
    shards: tuple[Shard, ...]

    @classmethod
    def of(cls, shards: Sequence[Shard]) -> Self:
        return cls(
            tokens=sum(s.tokens for s in shards),
            documents=sum(s.documents for s in shards),
            bytes=sum(s.bytes for s in shards),
            shards=tuple(shards),
        )


class TokenizerInfo(Frozen):
    file: str  # relative to the manifest
    fingerprint: str  # xxh3_128 of the model file
    vocab: int
    eod: int  # the id that ends every document
    controls: dict[str, int]  # every id that text can never produce


class SourceShare(Frozen):
    name: str
    documents: int
    bytes: int
    tokens: int
    entropy_nats_per_byte: float | None = None  # where the source knows it exactly
    weight: float | None = None  # share of the training batches, where a mixture sets it
    epochs: float | None = None  # passes over the source within the mixture's budget


class Stage(Frozen):
    """What one stage of the preparation took in, kept and dropped, with the reasons."""

    name: str
    documents_in: int
    bytes_in: int
    documents_kept: int
    bytes_kept: int
    dropped: dict[str, tuple[int, int]]  # reason → documents, bytes
    tokens: int | None = None  # that tokenize made of it, document ends included


class Manifest(Frozen):
    version: int
    hash: str  # of everything else here, and so, through the shards' hashes, of every token
    plan: str  # fingerprint of the inputs and settings that made it
    tokenizer: TokenizerInfo
    dtype: DType
    splits: dict[str, Split]
    sources: tuple[SourceShare, ...]
    stages: tuple[Stage, ...]

    def save(self, directory: Path) -> "Manifest":
        """Write last: a directory without a manifest is not a corpus."""
        sealed = self.model_copy(update={"hash": _content_hash(self.model_dump(mode="json"))})
        save(directory / MANIFEST, sealed.model_dump_json(indent=1).encode() + b"\n")
        return sealed

    @classmethod
    def load(cls, directory: Path) -> "Manifest":
        path = directory / MANIFEST
        try:
            raw = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            remedy = "give the directory it is in" if directory.is_file() else "check the path"
            if directory.is_dir():
                remedy = "finish `launch data prepare` with the same arguments"
                within = (found.parent for found in directory.glob(f"[!.]*/{MANIFEST}"))
                if corpora := sorted(
                    str(each) for each in within if any(each.glob("*.idx"))
                ):  # no checkpoints
                    remedy = f"give {' or '.join(corpora[:3])}"
            raise DataError(f"{directory}: no {MANIFEST} there; {remedy}") from None
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror})") from error
        try:
            manifest = cls.model_validate_json(raw)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"])) or "file"
            raise DataError(
                f"{path}: not a manifest of version {VERSION} ({key}: {first['msg']}); prepare again"
            ) from None
        if manifest.version != VERSION:
            raise DataError(
                f"{path}: version={manifest.version}, this program reads {VERSION}; prepare the data again"
            )
        if manifest.hash != _content_hash(json.loads(raw)):
            raise DataError(
                f"{path}: hash={manifest.hash} does not fit its content: edited or damaged; prepare again"
            )
        return manifest


def _content_hash(table: dict[str, Any]) -> str:
    """Of the table as it stands in the file, so that a field added later does not change older hashes."""
    rest = {key: value for key, value in table.items() if key != "hash"}
    return xxhash.xxh3_128_hexdigest(json.dumps(rest, sort_keys=True).encode())


class ShardWriter:
    """Streams documents of one split into one shard: memory stays small however long the shard."""

    def __init__(self, directory: Path, name: str, source: str, dtype: DType) -> None:
        self._directory, self._name, self._source, self._dtype = directory, name, source, dtype
        self._lengths: list[int] = []
        self._bytes = 0
        self._hash = xxhash.xxh3_128()
        self._context = replacing(directory / f"{name}.bin", flush_name=False)
        self._file = self._context.__enter__()

    def add(self, ids: npt.NDArray[np.integer], text_bytes: int) -> None:
        """Append a document, already closed by its end id."""
        block = np.ascontiguousarray(ids, self._dtype).data
        self._hash.update(block)
        self._file.write(block)
        self._lengths.append(len(ids))
        self._bytes += text_bytes

    def close(self) -> Shard:
        """The files' bytes are on the disk then, and their names once the folder is flushed."""
        self._context.__exit__(None, None, None)
        index = index_bytes(self._lengths, self._dtype)
        save(self._directory / f"{self._name}.idx", index, flush_name=False)
        return Shard(
            name=self._name,
            source=self._source,
            tokens=sum(self._lengths),
            documents=len(self._lengths),
            bytes=self._bytes,
            bin_hash=self._hash.hexdigest(),
            idx_hash=xxhash.xxh3_128_hexdigest(index),
        )

    def abort(self, error: BaseException) -> None:
        """Leave nothing behind."""
        self._context.__exit__(type(error), error, error.__traceback__)


def index_bytes(lengths: Sequence[int], dtype: DType) -> bytes:
    count = len(lengths)
    sizes = np.asarray(lengths, np.int32)
    offsets = np.zeros(count, np.int64)
    np.cumsum(sizes[:-1], dtype=np.int64, out=offsets[1:])
    offsets *= np.dtype(dtype).itemsize
    ends = np.arange(count + 1, dtype=np.int64)
    header = HEADER.pack(MAGIC, 1, _CODES[dtype], count, count + 1)
    return header + sizes.tobytes() + offsets.tobytes() + ends.tobytes()


class Corpus:
    """An opened, checked shard directory."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest

    @classmethod
    def open(cls, path: Path, verify: bool = False) -> "Corpus":
        """Check that every file is there and of the right size; with verify, that every byte is as it was written."""
        corpus = cls(path, Manifest.load(path))
        corpus._check_tokenizer()
        for split in corpus.manifest.splits.values():
            for shard in split.shards:
                corpus._check(shard, verify)
        return corpus

    @property
    def padded_vocab(self) -> int:
        """Of a model: GPUs multiply by multiples of 64 much faster."""
        return -(-self.manifest.tokenizer.vocab // 64) * 64

    def split(self, name: str) -> Split:
        try:
            return self.manifest.splits[name]
        except KeyError:
            known = ", ".join(self.manifest.splits)
            raise DataError(
                f"{self.path}: split={name!r} does not exist; choose one of {known}"
            ) from None

    def check(self, vocab: int, seq: int, *splits: str) -> None:
        """Whether a model of this vocabulary can take windows of this length from the splits."""
        if vocab < self.manifest.tokenizer.vocab:
            raise DataError(
                f"model.vocab={vocab:,} is smaller than the {self.manifest.tokenizer.vocab:,} of the tokenizer in "
                f"{self.path}; leave model.vocab out or prepare the data with that vocabulary"
            )
        for split in splits:
            if self.split(split).tokens <= seq:
                raise self.too_small(split, seq)

    def too_small(self, split: str, seq: int) -> DataError:
        """What to say of a split that holds no window of this length."""
        remedy = "raise --valid-share in" if split == "valid" else "add text to every source in"
        return DataError(
            f"{self.path}: split {split!r} has {self.split(split).tokens:,} tokens, one window of seq={seq} needs "
            f"{seq + 1:,}; {remedy} `launch data prepare`, or lower model.seq"
        )

    def tokens(self, shard: Shard) -> npt.NDArray[np.integer]:
        """The shard's ids, mapped, not read."""
        mapped = np.memmap(
            self.path / f"{shard.name}.bin", self.manifest.dtype, "r", shape=(shard.tokens,)
        )
        return np.asarray(mapped)  # a plain view: slicing the subclass costs several times as much

    def lengths(self, shard: Shard) -> npt.NDArray[np.int32]:
        """Tokens of each document of the shard, its end included."""
        return np.fromfile(
            self.path / f"{shard.name}.idx", np.int32, shard.documents, offset=HEADER.size
        )

    def _check_tokenizer(self) -> None:
        info = self.manifest.tokenizer
        path = self.path / info.file
        if not path.is_file():
            raise DataError(
                f"{path}: the tokenizer of these shards is missing; copy it back, or {_AGAIN}"
            )
        if (found := xxhash.xxh3_128_hexdigest(path.read_bytes())) != info.fingerprint:
            raise DataError(
                f"{path}: fingerprint={found}, the shards were made with {info.fingerprint}; "
                f"copy the right tokenizer back, or {_AGAIN}"
            )

    def _check(self, shard: Shard, verify: bool) -> None:
        itemsize = np.dtype(self.manifest.dtype).itemsize
        index_size = HEADER.size + 20 * shard.documents + 8
        bin_file = ("bin", shard.tokens * itemsize, shard.bin_hash)
        for suffix, size, known in (bin_file, ("idx", index_size, shard.idx_hash)):
            path = self.path / f"{shard.name}.{suffix}"
            found = path.stat().st_size if path.is_file() else -1
            if found != size:
                state = "missing" if found < 0 else f"{found:,} bytes long instead of {size:,}"
                raise DataError(f"{path}: shard file is {state}; copy it back, or {_AGAIN}")
            if verify and (actual := digest(path)) != known:
                raise DataError(
                    f"{path}: xxh3={actual}, the manifest says {known}: damaged; copy it back, or {_AGAIN}"
                )
