"""Tokenized corpora in Megatron's .bin/.idx, taken as they are: their ids go into our shards untouched."""

import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.data.piece import MB, Piece
from pipeline.data.read import LINE_BYTES, Malformed
from pipeline.data.shards import HEADER, MAGIC, MANIFEST, Manifest, TokenizerInfo
from pipeline.data.tokenizer import META, Tokenizer
from pipeline.errors import DataError

_DTYPES = {
    1: "u1",
    2: "i1",
    3: "<i2",
    4: "<i4",
    5: "<i8",
    8: "<u2",
}  # Megatron's codes; the floats are no token ids

PIECE_BYTES = 4 * MB
DOCUMENTS, SEQUENCES = (
    2**18,
    2**20,
)  # of an index that are looked at together: some tens of megabytes
BLOCK = 2**16  # ids that are Python's own at once
TOKENS = LINE_BYTES  # a longer document is set aside, as a text is

I64 = npt.NDArray[np.int64]


class Index:
    """An opened .idx with its .bin: where each document lies, read a stretch at a time."""

    def __init__(self, path: Path) -> None:
        self.path, self.data = path, path.with_suffix(".BIN" if path.suffix.isupper() else ".bin")
        try:
            with path.open("rb") as file:
                raw = file.read(HEADER.size)
            found, self.size = path.stat().st_size, self.data.stat().st_size
            self.stamp = path.stat().st_mtime_ns + self.data.stat().st_mtime_ns + self.size
        except OSError as error:
            raise DataError(
                f"{error.filename}: cannot be read ({error.strerror}); a corpus is a .bin and an .idx"
            ) from error
        if not raw.startswith(MAGIC):
            raise DataError(f"{path}: not an index of Megatron's; it should begin with MMIDIDX")
        if len(raw) < HEADER.size:
            raise DataError(f"{path}: {len(raw):,} bytes are too few for an index; copy it again")
        _, version, code, self.sequences, boundaries = HEADER.unpack(raw)
        if version != 1 or code not in _DTYPES:
            raise DataError(
                f"{path}: version={version}, dtype code={code}; readable: version 1 with integer ids"
            )
        if found < HEADER.size + 12 * self.sequences + 8 * boundaries:
            raise DataError(
                f"{path}: {found:,} bytes are too few for {self.sequences:,} sequences; copy it again"
            )
        self.dtype = np.dtype(_DTYPES[code])
        self.documents = boundaries - 1
        if (
            boundaries == 0
            or self.ends(0, 0)[0] != 0
            or self.ends(boundaries - 1, boundaries - 1)[0] != self.sequences
        ):
            raise self._damaged()

    def ends(self, start: int, stop: int) -> I64:
        """Where document start begins, then where those before stop end; a document is one sequence or several."""
        ends: I64 = self._column("<i8", 12 * self.sequences, start, stop + 1)
        if ends[0] < 0 or ends[-1] > self.sequences or (np.diff(ends) < 0).any():
            raise self._damaged()
        return ends

    def places(self, ends: I64) -> tuple[I64, I64]:
        """Tokens of each document between these ends, and the byte it begins at: -1 where it has no sequence."""
        first, last = int(ends[0]), int(ends[-1])
        if last - first > SEQUENCES:
            raise DataError(
                f"{self.path}: a document of more than {SEQUENCES:,} sequences; end documents, write it anew"
            )
        lengths = self._column("<i4", 0, first, last).astype(np.int64)
        offsets = self._column("<i8", 4 * self.sequences, first, last)
        sizes = lengths * self.dtype.itemsize
        if (lengths < 0).any() or (offsets < 0).any() or (offsets % self.dtype.itemsize).any():
            raise self._damaged()
        if (offsets > self.size - sizes).any():
            raise DataError(
                f"{self.data}: {self.size:,} bytes are fewer than its index says; copy it again"
            )
        some = ends[1:] > ends[:-1]
        starts = ends[:-1][some] - first
        follows = np.ones(len(offsets), bool)
        np.equal(np.diff(offsets), sizes[:-1], out=follows[1:])
        follows[starts] = True
        if not follows.all():
            raise DataError(
                f"{self.path}: the sequences of a document do not follow each other: damaged; copy it again"
            )
        tokens = np.concatenate(([0], np.cumsum(lengths)))[ends - first]
        begins = np.full(len(some), -1)
        begins[some] = offsets[starts]
        return np.diff(tokens), begins

    def _column(self, kind: str, at: int, start: int, stop: int) -> npt.NDArray[Any]:
        size = np.dtype(kind).itemsize
        return np.fromfile(self.path, kind, stop - start, offset=HEADER.size + at + start * size)

    def _damaged(self) -> DataError:
        return DataError(
            f"{self.path}: lengths, offsets or document ends that cannot be: damaged; copy it again"
        )


def pieces(source: str, path: Path) -> Iterator[Piece]:
    """Every number of the index is checked here, once; a task reads its own part of it."""
    index, first = Index(path), 0
    while first < index.documents:
        ends = index.ends(first, min(first + DOCUMENTS, index.documents))
        ends = ends[: max(2, int(np.searchsorted(ends, ends[0] + SEQUENCES, side="right")))]
        sizes = np.cumsum(index.places(ends)[0]) * index.dtype.itemsize
        start = before = 0
        while start < len(sizes):
            stop = max(start + 1, int(np.searchsorted(sizes, before + PIECE_BYTES, side="right")))
            size = int(sizes[stop - 1]) - before
            yield Piece(
                source, "megatron", str(path), first + start, first + stop, size, index.stamp
            )
            start, before = stop, int(sizes[stop - 1])
        first += len(sizes)


def documents(piece: Piece, tokenizer: Tokenizer) -> Iterator[npt.NDArray[np.uint32] | Malformed]:
    """Ids of each document, its end included whether the corpus had one or not."""
    index, folder = Index(Path(piece.path)), Path(piece.path).parent
    if (folder / MANIFEST).exists() and (
        info := _made_with(folder, piece.stamp)
    ).fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"{index.data}: made with the tokenizer {info.fingerprint}, and the one given is "
            f"{tokenizer.fingerprint}; give --tokenizer {folder / info.file}"
        )
    lengths, begins = index.places(index.ends(piece.start, piece.stop))
    left = piece.limit
    with index.data.open("rb", buffering=0) as file:
        for number, tokens, at in zip(
            range(piece.start, piece.stop), lengths.tolist(), begins.tolist(), strict=True
        ):
            if at < 0 or (left is not None and left <= 0):
                continue
            size = tokens * index.dtype.itemsize
            left = None if left is None else left - size
            if tokens > TOKENS:
                yield Malformed(
                    str(index.data), number, f"document longer than {TOKENS:,} tokens", size
                )
                continue
            ids = np.frombuffer(os.pread(file.fileno(), size, at), index.dtype)
            if len(ids) and (ids.min() < 0 or ids.max() >= tokenizer.vocab):
                wrong = int(ids.min() if ids.min() < 0 else ids.max())
                raise DataError(
                    f"{index.data}: document {number:,} has id {wrong}, but those of the tokenizer given are 0 to "
                    f"{tokenizer.vocab - 1:,}; give the tokenizer that made these shards with --tokenizer"
                )
            ids = ids.astype(np.uint32)
            yield (
                ids
                if len(ids) and ids[-1] == tokenizer.eod
                else np.append(ids, np.uint32(tokenizer.eod))
            )


@lru_cache(1)
def _made_with(folder: Path, stamp: int) -> TokenizerInfo:
    return Manifest.load(folder).tokenizer


def text_of(ids: npt.NDArray[np.uint32], tokenizer: Tokenizer) -> bytes:
    """The text behind the ids: byte for byte that which a lossless tokenizer encoded."""
    texts = _piece_texts(tokenizer)
    blocks = (ids[start : start + BLOCK].tolist() for start in range(0, len(ids), BLOCK))
    return b"".join(b"".join(map(texts.__getitem__, block)) for block in blocks)


@lru_cache(1)
def _piece_texts(tokenizer: Tokenizer) -> list[bytes]:
    model, silent = tokenizer.sentencepiece, set(tokenizer.controls.values())
    return [
        b""
        if i in silent
        else bytes.fromhex(piece[3:5])
        if model.is_byte(i)
        else piece.replace(META, " ").encode()
        for i, piece in enumerate(map(model.id_to_piece, range(tokenizer.vocab)))
    ]
