"""The files of a corpus: token shards in Megatron's .bin/.idx format, and the manifest.

A .bin file holds token ids, document after document. An .idx file (Megatron-LM's
indexed_dataset.py) holds: magic, u64 version, u8 dtype code, u64 sequences, u64 documents + 1,
i32 sequence lengths, i64 byte offsets, i64 document ends.
"""

import errno
import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import ValidationError

from pipeline import atomic
from pipeline.atomic import read_regular
from pipeline.config.parts import Frozen
from pipeline.errors import DataError, first_line

MANIFEST = "manifest.json"
VERSION = 1  # of the manifest; raise it whenever older readers would misread a newer manifest

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DType = Literal["uint16", "int32"]
_DTYPE_CODES: dict[DType, int] = {"uint16": 8, "int32": 4}  # Megatron's
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def dtype_for(vocab: int) -> DType:
    """Megatron's format has no uint32; int32 has the same bytes for every id below 2**31."""
    return "uint16" if vocab <= 2**16 else "int32"


# Records


class Shard(Frozen):
    name: str  # of both files, without suffix
    source: str
    tokens: int  # document ends included
    documents: int
    bytes: int  # of UTF-8 text, without the document ends
    bin_hash: str  # xxh3_128
    idx_hash: str


class Split(Frozen):
    tokens: int  # sums over the shards
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
    controls: dict[str, int]  # ids that text can never produce


class SourceShare(Frozen):
    name: str  # as the user wrote it
    documents: int  # for training, like all counts here; held-out ones are not included
    bytes: int
    tokens: int
    entropy_nats_per_byte: float | None = None  # exact, for the synthetic sources
    weight: float | None = None  # share of the training batches, if a mixture sets it
    epochs: float | None = None  # passes over the source within the mixture's token budget


class Stage(Frozen):
    """Counts of one stage of the preparation: what it read, kept and dropped, and why."""

    name: str  # read, normalise, filter, dedup, decontaminate or tokenize
    documents_in: int
    bytes_in: int
    documents_kept: int
    bytes_kept: int  # after normalization, if the stage changes the text
    dropped: dict[str, tuple[int, int]]  # reason → documents, bytes
    tokens: int | None = None  # written by the tokenize stage, document ends included


class Manifest(Frozen):
    version: int
    hash: str  # of all other fields, and so, through the shards' hashes, of every token
    plan: str  # fingerprint of the inputs and settings
    tokenizer: TokenizerInfo
    dtype: DType
    splits: dict[str, Split]  # train and valid
    sources: tuple[SourceShare, ...]
    stages: tuple[Stage, ...]  # in order; each reads what the one before kept
    # Columns of a corpus of pairs. A document then has a part for each, which may be empty, and
    # every part ends like a document: text never contains that id.
    pairs: tuple[str, ...] = ()

    def save(self, directory: Path) -> "Manifest":
        """Write the manifest last: a directory without a manifest is not a corpus."""
        # A corpus without pairs has the same hash as before this field existed.
        absent = None if self.pairs else {"pairs"}
        table = self.model_dump(mode="json", exclude=absent)
        sealed = self.model_copy(update={"hash": _content_hash(table)})
        text = sealed.model_dump_json(indent=1, exclude=absent)
        save(directory / MANIFEST, text.encode() + b"\n")
        return sealed

    @classmethod
    def load(cls, directory: Path) -> "Manifest":
        path = directory / MANIFEST
        try:
            raw = read_regular(path)
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(
                f"{directory}: no {MANIFEST} there; give a directory made by "
                "`launch data prepare`, or run it again to finish this one"
            ) from None
        except OSError as error:
            raise read_error(error, path) from error
        try:
            manifest = cls.model_validate_json(raw)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"])) or "file"
            text = f"{path}: not a manifest of version {VERSION} ({key}: {first['msg']})"
            raise DataError(f"{text}; prepare the data again") from None
        if manifest.version != VERSION:
            text = f"{path}: version={manifest.version}, this program reads version {VERSION}"
            raise DataError(f"{text}; prepare the data again")
        if manifest.hash != _content_hash(json.loads(raw)):
            text = f"{path}: hash={manifest.hash} does not match the content: edited or damaged"
            raise DataError(f"{text}; prepare the data again")
        return manifest


def _content_hash(table: dict[str, Any]) -> str:
    # The table as it is in the file, so that a new field does not change the hash of older files.
    rest = {key: value for key, value in table.items() if key != "hash"}
    return xxhash.xxh3_128_hexdigest(json.dumps(rest, sort_keys=True).encode())


# Files


class ShardWriter:
    """Stream the documents of one split into an open .bin file; only the lengths stay in memory."""

    def __init__(self, file: BinaryIO, dtype: DType) -> None:
        self._file = file
        self._dtype: DType = dtype
        self._lengths: list[int] = []  # in tokens, for the index
        self._bytes = 0  # of text
        self._hash = xxhash.xxh3_128()

    def add(self, ids: npt.NDArray[np.integer], text_bytes: int) -> None:
        """Append a document; its last id is the document end."""
        block = np.ascontiguousarray(ids, self._dtype).data
        self._hash.update(block)
        self._file.write(block)
        self._lengths.append(len(ids))
        self._bytes += text_bytes

    def index(self, stem: Path, source: str) -> Shard:
        """Write STEM.idx. Its name is durable once the caller syncs the folder."""
        index = index_bytes(self._lengths, self._dtype)
        save(stem.with_suffix(".idx"), index, flush_name=False)
        return Shard(
            name=stem.name,
            source=source,
            tokens=sum(self._lengths),
            documents=len(self._lengths),
            bytes=self._bytes,
            bin_hash=self._hash.hexdigest(),
            idx_hash=xxhash.xxh3_128_hexdigest(index),
        )


def index_bytes(lengths: Sequence[int], dtype: DType) -> bytes:
    count = len(lengths)
    sizes = np.asarray(lengths, np.int32)
    offsets = np.zeros(count, np.int64)
    np.cumsum(sizes[:-1], dtype=np.int64, out=offsets[1:])
    offsets *= np.dtype(dtype).itemsize
    ends = np.arange(count + 1, dtype=np.int64)  # every document is one sequence
    header = HEADER.pack(MAGIC, 1, _DTYPE_CODES[dtype], count, count + 1)
    return header + sizes.tobytes() + offsets.tobytes() + ends.tobytes()


@contextmanager
def replacing(path: Path, flush_name: bool = True) -> Iterator[BinaryIO]:
    """Like atomic.replacing; errors of the disk become DataErrors."""
    try:
        with atomic.replacing(path, flush_name) as file:
            yield file
    except OSError as error:
        raise write_error(error, path) from error


def save(path: Path, content: bytes | npt.NDArray[Any], flush_name: bool = True) -> None:
    with replacing(path, flush_name) as file:
        if isinstance(content, bytes):
            file.write(content)
        else:  # like np.save, whose error on a full disk has no number
            rows_first = np.ascontiguousarray(content)  # the header names the order
            header = np.lib.format.header_data_from_array_1_0(rows_first)
            np.lib.format.write_array_header_1_0(file, header)
            file.write(rows_first.data)


def has_utf8_name(path: Path) -> bool:
    """JSON records cannot hold a path with undecodable bytes, which Python maps to surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in str(path))


def read_error(error: Exception, path: str | Path) -> DataError:
    """Wrap an exception of a reader, usually about a damaged file, in an error with a remedy."""
    if isinstance(error, OSError) and error.strerror:
        return DataError(f"{path}: cannot be read ({error.strerror}); check the path")
    reason = f"{type(error).__name__}: {first_line(error)}"
    return DataError(f"{path}: cannot be read ({reason}); download the file again")


def write_error(error: OSError, path: Path) -> DataError:
    reason = error.strerror or str(error)
    if error.errno in _NO_SPACE:
        return DataError(f"{path}: disk full ({reason}); free space or choose another --out")
    return DataError(f"{path}: cannot be written ({reason}); choose another --out")
