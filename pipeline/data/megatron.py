"""Tokenized corpora in Megatron's .bin/.idx, taken as they are: their ids go into our shards untouched."""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.data.piece import MB, Piece
from pipeline.data.shards import HEADER, MAGIC, MANIFEST, Manifest
from pipeline.data.tokenizer import META, Tokenizer
from pipeline.errors import DataError

_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # Megatron's codes; the floats are no token ids

PIECE_BYTES = 4 * MB


class Index:
    """An opened .idx with its .bin: where each document lies."""

    def __init__(self, path: Path) -> None:
        try:
            raw = path.read_bytes()
            data = path.with_suffix(".bin")
            size = data.stat().st_size
            self.stamp = path.stat().st_mtime_ns + data.stat().st_mtime_ns + size
        except OSError as error:
            raise DataError(
                f"{error.filename}: cannot be read ({error.strerror}); a corpus is a .bin and an .idx"
            ) from error
        if not raw.startswith(MAGIC):
            raise DataError(f"{path}: not an index of Megatron's; it should begin with MMIDIDX")
        if len(raw) < HEADER.size:
            raise DataError(f"{path}: {len(raw):,} bytes are too few for an index; copy it again")
        _, version, code, sequences, boundaries = HEADER.unpack_from(raw)
        if version != 1 or code not in _DTYPES:
            raise DataError(f"{path}: version={version}, dtype code={code}; readable: version 1 with integer ids")
        if len(raw) < HEADER.size + 12 * sequences + 8 * boundaries:
            raise DataError(f"{path}: {len(raw):,} bytes are too few for {sequences:,} sequences; copy it again")
        self.dtype = np.dtype(_DTYPES[code])
        self.path = data
        lengths = np.frombuffer(raw, np.int32, sequences, HEADER.size).astype(np.int64)
        offsets = np.frombuffer(raw, np.int64, sequences, HEADER.size + 4 * sequences)
        # A document is one sequence or several; boundaries count sequences.
        ends = np.frombuffer(raw, np.int64, boundaries, HEADER.size + 12 * sequences)
        sizes = lengths * self.dtype.itemsize
        whole = boundaries > 0 and ends[0] == 0 and ends[-1] == sequences and (np.diff(ends) >= 0).all()
        if not whole or (lengths < 0).any() or (offsets < 0).any() or (offsets % self.dtype.itemsize).any():
            raise DataError(f"{path}: lengths, offsets or document ends that cannot be: damaged; copy it again")
        if (offsets > size - sizes).any():
            raise DataError(f"{data}: {size:,} bytes are fewer than its index says; copy it again")
        starts = ends[:-1][ends[1:] > ends[:-1]]
        if np.setdiff1d(np.flatnonzero(np.diff(offsets) != sizes[:-1]) + 1, starts).size:
            raise DataError(f"{path}: the sequences of a document do not follow each other: damaged; copy it again")
        self.lengths = np.add.reduceat(lengths, starts) if len(starts) else lengths[:0]
        self.offsets = offsets[starts]


def pieces(source: str, path: Path) -> Iterator[Piece]:
    index = Index(path)
    sizes = np.cumsum(index.lengths) * index.dtype.itemsize
    start = 0
    while start < len(sizes):
        before = int(sizes[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(sizes, before + PIECE_BYTES, side="right")))
        yield Piece(source, "megatron", str(path), start, stop, int(sizes[stop - 1]) - before, index.stamp)
        start = stop


def documents(piece: Piece, tokenizer: Tokenizer) -> Iterator[npt.NDArray[np.uint32]]:
    """Ids of each document, its end included whether the corpus had one or not."""
    index, folder = Index(Path(piece.path)), Path(piece.path).parent
    if (folder / MANIFEST).exists() and (info := Manifest.load(folder).tokenizer).fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"{index.path}: made with the tokenizer {info.fingerprint}, and {tokenizer.name} is "
            f"{tokenizer.fingerprint}; give --tokenizer {folder / info.file}"
        )
    data = np.memmap(index.path, index.dtype, "r")
    left = piece.limit
    for number in range(piece.start, piece.stop):
        start = int(index.offsets[number]) // index.dtype.itemsize
        ids = np.asarray(data[start : start + int(index.lengths[number])])
        if len(ids) and (ids.min() < 0 or ids.max() >= tokenizer.vocab):
            raise DataError(
                f"{index.path}: document {number:,} has id {int(ids.max())}, but {tokenizer.name} has only "
                f"{tokenizer.vocab:,}; give the tokenizer that made these shards with --tokenizer"
            )
        left = None if left is None else left - ids.nbytes
        ids = ids.astype(np.uint32)
        yield ids if len(ids) and ids[-1] == tokenizer.eod else np.append(ids, np.uint32(tokenizer.eod))
        if left is not None and left <= 0:
            return


def text_bytes(ids: npt.NDArray[np.uint32], tokenizer: Tokenizer) -> int:
    """Bytes of the text behind the ids, without decoding it."""
    return int(_piece_bytes(tokenizer)[ids].sum())


@lru_cache(1)
def _piece_bytes(tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    model = tokenizer.sentencepiece
    silent = set(tokenizer.controls.values())
    sizes = [
        0 if i in silent else 1 if model.is_byte(i) else len(model.id_to_piece(i).replace(META, " ").encode())
        for i in range(tokenizer.vocab)
    ]
    return np.array(sizes, np.int64)
