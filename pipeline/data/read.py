"""Documents out of a piece of input. What is malformed comes out as such, with its position; the rest goes on."""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, assert_never

from pipeline.data import hub, synthetic
from pipeline.data.files import unreadable
from pipeline.data.piece import MB, Piece
from pipeline.data.sources import TEXT_DOCUMENT_BYTES
from pipeline.errors import DataError

LINE_BYTES = (
    16 * MB
)  # a longer line or row is set aside: what stages make of it would not fit a worker's memory
SEEK_BYTES = 64 * 1024  # how far a cut looks for a line end before it settles for a character


@dataclass(frozen=True, slots=True)
class Malformed:
    path: str
    position: int  # a byte of a text or jsonl file, otherwise a row
    reason: str
    bytes: int


def read(piece: Piece, key: str) -> Iterator[str | Malformed]:
    """Every document of the piece in order, up to its limit; a text that is yielded is valid Unicode."""
    left = piece.limit
    for found in _documents(piece, key):
        yield found
        if left is not None:
            left -= found.bytes if isinstance(found, Malformed) else len(found.encode())
            if left <= 0:
                return


def tokens_not_text(piece: Piece) -> DataError:
    return DataError(
        f"source={piece.source!r} holds tokens, not text: it trains no tokenizer and passes no normalising, filter, "
        "dedup or decontamination; give --tokenizer, and switch those stages off"
    )


def _documents(piece: Piece, key: str) -> Iterator[str | Malformed]:
    try:
        match piece.kind:
            case "text":
                yield from _text(piece)
            case "jsonl":
                yield from _jsonl(piece, key)
            case "parquet" | "arrow":
                from pipeline.data import columns

                rows = columns.parquet_rows if piece.kind == "parquet" else columns.arrow_rows
                yield from _values(piece, rows(piece.path, piece.start, piece.stop, key), key)
            case "megatron":
                raise tokens_not_text(piece)
            case "hf":
                yield from _values(piece, hub.rows(piece, key), key)
            case "synthetic":
                for batch in range(piece.start, piece.stop):
                    seed, language = (
                        int(piece.path.removeprefix("seed=")),
                        synthetic.LANGUAGES[piece.source],
                    )
                    yield from synthetic.documents(seed, batch, language)
            case _:
                assert_never(piece.kind)
    except DataError:
        raise
    except Exception as error:
        raise unreadable(error, piece.path) from error


def _text(piece: Piece) -> Iterator[str | Malformed]:
    with Path(piece.path).open("rb") as file:
        start = _cut(file, piece.start)
        for target in range(
            piece.start + TEXT_DOCUMENT_BYTES, piece.stop + TEXT_DOCUMENT_BYTES, TEXT_DOCUMENT_BYTES
        ):
            stop = _cut(file, min(target, piece.stop))
            file.seek(start)
            if raw := file.read(stop - start):
                yield _decode(raw, piece.path, start)
            start = stop


def _cut(file: BinaryIO, offset: int) -> int:
    """Where a document may end at or after the offset: behind a near line end, else between two characters."""
    if offset == 0:
        return 0
    file.seek(offset - 1)
    near = file.read(SEEK_BYTES)
    if (line := near.find(b"\n")) >= 0:
        return offset + line
    ahead = 0
    while (
        1 + ahead < len(near) and near[1 + ahead] & 0xC0 == 0x80
    ):  # a byte inside a UTF-8 character
        ahead += 1
    return offset + min(ahead, 3)


def _decode(raw: bytes, path: str, position: int) -> str | Malformed:
    if b"\0" in raw:
        return Malformed(path, position + raw.index(b"\0"), "NUL byte: a binary file", len(raw))
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        return Malformed(path, position + error.start, "not UTF-8", len(raw))


def _jsonl(piece: Piece, key: str) -> Iterator[str | Malformed]:
    with _open(piece) as file:
        position = piece.start
        if position > 0:  # the line that runs into this stretch belongs to the one before
            file.seek(position - 1)
            position += _skip_line(file, piece.stop - position + 1) - 1
        while piece.stop < 0 or position < piece.stop:
            line = _read_line(file, piece)
            if not line:
                return
            if len(line) > LINE_BYTES:
                size = len(line) + (0 if line.endswith(b"\n") else _skip_line(file))
                yield Malformed(
                    piece.path, position, f"line longer than {LINE_BYTES // MB} MB", size
                )
                position += size
                continue
            if not line.isspace():
                yield _parse(line, piece.path, position, key)
            position += len(line)


def _open(piece: Piece) -> BinaryIO:
    if packed := {".gz": "gzip", ".zst": "zstd"}.get(Path(piece.path).suffix.lower()):
        import pyarrow  # unlike zstandard's own reader it does not take a truncated file for a whole one

        return io.BufferedReader(pyarrow.input_stream(piece.path, compression=packed), MB)
    return Path(piece.path).open("rb", buffering=MB)


def _read_line(file: IO[bytes], piece: Piece) -> bytes:
    try:
        return file.readline(LINE_BYTES + 1)
    except OSError as error:
        raise DataError(
            f"{piece.path}: the compressed stream is broken ({error}); fetch the file again"
        ) from error


def _skip_line(file: IO[bytes], most: int = 2**63) -> int:
    skipped = 0
    while block := file.readline(min(MB, most - skipped)):
        skipped += len(block)
        if block.endswith(b"\n"):
            break
    return skipped


def _parse(line: bytes, path: str, position: int, key: str) -> str | Malformed:
    try:
        record = json.loads(line.decode("utf-8-sig"))  # a mark at its start is no part of it
    except UnicodeDecodeError as error:
        return Malformed(path, position + error.start, "not UTF-8", len(line))
    except (ValueError, RecursionError) as error:
        return Malformed(path, position, f"not JSON: {error}", len(line))
    if not isinstance(record, dict) or key not in record:
        found = (
            f"keys {', '.join(map(repr, list(record)[:9]))}"
            if isinstance(record, dict)
            else type(record).__name__
        )
        return Malformed(
            path, position, f"no text under {key!r} (--text-key), found {found}", len(line)
        )
    return _check(record[key], path, position, key, len(line))


def _values(
    piece: Piece, values: Iterator[tuple[int, object, int]], key: str
) -> Iterator[str | Malformed]:
    for row, value, size in values:
        yield _check(value, piece.path, row, key, size)


def _check(text: object, path: str, position: int, key: str, size: int) -> str | Malformed:
    if not isinstance(text, str):
        reason = "bytes, not UTF-8 text," if isinstance(text, bytes) else "no text"
        return Malformed(path, position, f"{reason} under {key!r}", size)
    try:
        if (len(text) if text.isascii() else len(text.encode())) > LINE_BYTES:
            return Malformed(path, position, f"text longer than {LINE_BYTES // MB} MB", size)
    except UnicodeEncodeError:
        return Malformed(path, position, "half of a surrogate pair", size)
    return text
