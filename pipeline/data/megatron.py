"""Tokenized corpora in Megatron's .bin/.idx format: their ids go into our shards unchanged."""

import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.atomic import open_regular
from pipeline.data.corpus_recipe import DOCUMENT_BYTES, MB, Malformed, Piece
from pipeline.data.shards import HEADER, MAGIC, MANIFEST, Manifest, TokenizerInfo
from pipeline.errors import DataError
from pipeline.objective.draws import I64

# Megatron's dtype codes; its float types cannot be token ids.
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}

PIECE_BYTES = 4 * MB
DOCUMENTS = 2**18  # documents of an index read at once, ...
SEQUENCES = 2**20  # ... and sequences: some tens of megabytes
DOCUMENT_TOKENS = DOCUMENT_BYTES  # a longer document is malformed, like a text of more bytes


class Index:
    """An opened .idx with its .bin: where each document is, read a stretch at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = path.with_suffix(".BIN" if path.suffix.isupper() else ".bin")
        try:
            with open_regular(path) as file:
                raw = file.read(HEADER.size)
            index_stat = path.stat()
            data_stat = self.data.stat()
        except OSError as error:
            text = f"{error.filename}: cannot be read ({error.strerror})"
            raise DataError(f"{text}; a Megatron corpus is a .bin and an .idx file") from error
        self.size = data_stat.st_size  # bytes
        # Changes when either file does. Part of the fingerprint of a corpus.
        self.stamp = index_stat.st_mtime_ns + data_stat.st_mtime_ns + self.size
        if not raw.startswith(MAGIC):
            raise DataError(f"{path}: not a Megatron index; it should begin with MMIDIDX")
        if len(raw) < HEADER.size:
            raise DataError(f"{path}: {len(raw):,} bytes are too few for an index; copy it again")
        _, version, code, self.sequences, boundaries = HEADER.unpack(raw)
        if version != 1 or code not in _DTYPES:
            text = f"{path}: version={version}, dtype code={code}"
            raise DataError(f"{text}; supported: version 1 with integer ids")
        # One i32 length and one i64 offset per sequence, one i64 end per document.
        if index_stat.st_size < HEADER.size + 12 * self.sequences + 8 * boundaries:
            raise DataError(
                f"{path}: {index_stat.st_size:,} bytes are too few for {self.sequences:,} "
                "sequences; copy it again"
            )
        self.dtype = np.dtype(_DTYPES[code])
        self.documents = boundaries - 1  # the first boundary is 0
        if boundaries == 0:
            raise self._damaged()
        first_end = self.ends(0, 0)[0]
        last_end = self.ends(self.documents, self.documents)[0]
        if first_end != 0 or last_end != self.sequences:
            raise self._damaged()

    def ends(self, start: int, stop: int) -> I64:
        """Read where document `start` begins and where documents start to stop - 1 end.

        The unit is sequences: a document consists of one or several.
        """
        ends: I64 = self._column("<i8", 12 * self.sequences, start, stop + 1)
        if ends[0] < 0 or ends[-1] > self.sequences or (np.diff(ends) < 0).any():
            raise self._damaged()
        return ends

    def places(self, ends: I64) -> tuple[I64, I64]:
        """Return each document's tokens and its first byte, -1 if it has no sequence."""
        first = int(ends[0])
        last = int(ends[-1])
        lengths = self._column("<i4", 0, first, last).astype(np.int64)
        offsets = self._column("<i8", 4 * self.sequences, first, last)
        sizes = lengths * self.dtype.itemsize
        if (lengths < 0).any() or (offsets < 0).any() or (offsets % self.dtype.itemsize).any():
            raise self._damaged()
        if (offsets > self.size - sizes).any():
            raise DataError(f"{self.data}: shorter than its index requires; copy it again")
        has_sequences = ends[1:] > ends[:-1]
        starts = ends[:-1][has_sequences] - first
        contiguous = np.ones(len(offsets), bool)
        np.equal(np.diff(offsets), sizes[:-1], out=contiguous[1:])
        contiguous[starts] = True  # a document may begin anywhere
        if not contiguous.all():
            text = f"{self.path}: the sequences of a document are not contiguous: damaged"
            raise DataError(f"{text}; copy it again")
        tokens = np.concatenate(([0], np.cumsum(lengths)))[ends - first]
        begins = np.full(len(has_sequences), -1)  # stays for documents without sequences
        begins[has_sequences] = offsets[starts]
        return np.diff(tokens), begins

    def _column(self, kind: str, at: int, start: int, stop: int) -> npt.NDArray[Any]:
        offset = HEADER.size + at + start * np.dtype(kind).itemsize
        return np.fromfile(self.path, kind, stop - start, offset=offset)

    def _damaged(self) -> DataError:
        return DataError(
            f"{self.path}: impossible lengths, offsets or document ends: damaged; copy it again"
        )


def pieces(source: str, path: Path) -> Iterator[Piece]:
    """Cut the corpus into pieces and check every number of the index, a stretch at a time."""
    index = Index(path)
    first = 0
    while first < index.documents:
        ends = index.ends(first, min(first + DOCUMENTS, index.documents))
        most = int(np.searchsorted(ends, ends[0] + SEQUENCES, side="right"))
        ends = ends[: max(2, most)]  # at least one document
        sizes = np.cumsum(index.places(ends)[0]) * index.dtype.itemsize
        start = 0  # first document of the next piece
        before = 0  # bytes before it
        while start < len(sizes):
            stop = max(start + 1, int(np.searchsorted(sizes, before + PIECE_BYTES, side="right")))
            end = int(sizes[stop - 1])
            documents = (first + start, first + stop)
            yield Piece(source, "megatron", str(path), *documents, end - before, index.stamp)
            start = stop
            before = end
        first += len(sizes)


def documents(
    piece: Piece, tokenizer: TokenizerInfo
) -> Iterator[npt.NDArray[np.uint32] | Malformed]:
    """Read the ids of each document and append its end where the corpus has none."""
    index = Index(Path(piece.path))
    _check_tokenizer(index, piece, tokenizer)
    lengths, begins = index.places(index.ends(piece.start, piece.stop))
    left = piece.limit
    with index.data.open("rb", buffering=0) as file:
        places = zip(lengths.tolist(), begins.tolist(), strict=True)
        for number, (tokens, begin) in enumerate(places, piece.start):
            if begin < 0 or (left is not None and left <= 0):
                continue
            size = tokens * index.dtype.itemsize
            left = None if left is None else left - size
            # Checked before the read: the index may claim gigabytes.
            if tokens > DOCUMENT_TOKENS:
                reason = f"document longer than {DOCUMENT_TOKENS:,} tokens"
                yield Malformed(str(index.data), number, reason, size)
                continue
            ids = np.frombuffer(os.pread(file.fileno(), size, begin), index.dtype)
            if len(ids) and (ids.min() < 0 or ids.max() >= tokenizer.vocab):
                wrong = int(ids.min() if ids.min() < 0 else ids.max())
                raise DataError(
                    f"{index.data}: document {number:,} has id {wrong}, but the ids of this "
                    f"tokenizer are 0 to {tokenizer.vocab - 1:,}; give the tokenizer that made "
                    "these shards with --tokenizer"
                )
            ids = ids.astype(np.uint32)
            if not len(ids) or ids[-1] != tokenizer.eod:
                ids = np.append(ids, np.uint32(tokenizer.eod))
            yield ids


def _check_tokenizer(index: Index, piece: Piece, tokenizer: TokenizerInfo) -> None:
    # Only corpora of `launch data prepare` name their tokenizer.
    folder = index.path.parent
    if not (folder / MANIFEST).exists():
        return
    made_with = _tokenizer_of(folder, piece.stamp)
    if made_with.fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"{index.data}: made with the tokenizer {made_with.fingerprint}, not with the given "
            f"{tokenizer.fingerprint}; give --tokenizer {folder / made_with.file}"
        )


@lru_cache(1)
def _tokenizer_of(folder: Path, stamp: int) -> TokenizerInfo:
    # Cached for the pieces of a task. The stamp is part of the key because files change.
    return Manifest.load(folder).tokenizer
