"""Read documents from a piece of input. A malformed document is returned with its position."""

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, BinaryIO, assert_never

from pipeline.data import synthetic
from pipeline.data.corpus_recipe import DOCUMENT_BYTES, MB, PAIR, Malformed, Piece
from pipeline.data.shards import read_error
from pipeline.errors import DataError

TEXT_DOCUMENT_BYTES = MB  # a longer .txt file becomes several documents, cut at line ends
SEEK_BYTES = 64 * 1024  # search this far for a line end before cutting between two characters


def read(piece: Piece, keys: Sequence[str]) -> Iterator[str | Malformed]:
    """Read the documents of the piece in order, up to its limit. Every text is valid Unicode.

    With several keys, a document is their texts with PAIR between them."""
    left = piece.limit  # bytes of text
    for found in _documents(piece, keys):
        yield found
        if left is not None:
            left -= found.bytes if isinstance(found, Malformed) else len(found.encode())
            if left <= 0:
                return


def tokens_not_text(piece: Piece) -> DataError:
    return DataError(
        f"source={piece.source!r} contains tokens, not text: it cannot train a tokenizer or be "
        "normalized, filtered, deduplicated or decontaminated; give --tokenizer, and turn those "
        "stages off"
    )


def _documents(piece: Piece, keys: Sequence[str]) -> Iterator[str | Malformed]:
    try:
        match piece.kind:
            case "text":
                yield from _text(piece)
            case "jsonl":
                yield from _jsonl(piece, keys)
            case "parquet" | "arrow" | "hf":
                yield from _columns(piece, keys)
            case "megatron":  # the encode pass reads it directly
                raise tokens_not_text(piece)
            case "synthetic":
                seed = int(piece.path.removeprefix("seed="))
                language = synthetic.LANGUAGES[piece.source]
                for batch in range(piece.start, piece.stop):
                    yield from synthetic.documents(seed, batch, language)
            case _:
                assert_never(piece.kind)
    except DataError:
        raise
    except Exception as error:
        raise read_error(error, piece.path) from error


def _columns(piece: Piece, keys: Sequence[str]) -> Iterator[str | Malformed]:
    from pipeline.data import columns  # pyarrow takes a while to import

    for row in columns.rows(piece, keys):
        found = _join(row.values, piece.path, row.number, keys, row.bytes)
        if isinstance(found, Malformed) and piece.kind == "arrow":
            first = columns.rows_before(piece.path, piece.start)
            found = found._replace(position=first + found.position)
        yield found


def _text(piece: Piece) -> Iterator[str | Malformed]:
    with Path(piece.path).open("rb") as file:
        start = _cut(file, piece.start)
        step = TEXT_DOCUMENT_BYTES
        for target in range(piece.start + step, piece.stop + step, step):
            stop = _cut(file, min(target, piece.stop))
            file.seek(start)
            raw = file.read(stop - start)
            if raw:
                yield _decode(raw, piece.path, start)
            start = stop


def _cut(file: BinaryIO, offset: int) -> int:
    """Find where a document may end at or after the offset: at a near line end or character."""
    if offset == 0:
        return 0
    file.seek(offset - 1)
    near = file.read(SEEK_BYTES)
    line_end = near.find(b"\n")
    if line_end >= 0:
        return offset + line_end
    ahead = 0
    # Skip the continuation bytes of a UTF-8 character; there are at most three.
    while 1 + ahead < len(near) and near[1 + ahead] & 0xC0 == 0x80:
        ahead += 1
    return offset + min(ahead, 3)


def _decode(raw: bytes, path: str, position: int) -> str | Malformed:
    if b"\0" in raw:
        return Malformed(path, position + raw.index(b"\0"), "NUL byte: a binary file", len(raw))
    try:
        # A byte order mark is not part of the text.
        return raw.decode("utf-8" if position else "utf-8-sig")
    except UnicodeDecodeError as error:
        return Malformed(path, position + error.start, "not UTF-8", len(raw))


def _jsonl(piece: Piece, keys: Sequence[str]) -> Iterator[str | Malformed]:
    with _open(piece) as file:
        position = piece.start
        if position > 0:
            # A line that starts before this piece belongs to the piece before.
            file.seek(position - 1)
            position += _skip_line(file, piece.stop - position + 1) - 1
        while piece.stop < 0 or position < piece.stop:
            try:
                line = file.readline(DOCUMENT_BYTES + 1)
            except OSError as error:
                what = f"{piece.path}: broken stream ({error})"
                raise DataError(f"{what}; download it again") from error
            if not line:
                return
            if len(line) > DOCUMENT_BYTES:
                # Skip the rest of the line without keeping it in memory.
                size = len(line) + (0 if line.endswith(b"\n") else _skip_line(file))
                reason = f"line longer than {DOCUMENT_BYTES // MB} MB"
                yield Malformed(piece.path, position, reason, size)
                position += size
                continue
            if not line.isspace():
                yield _parse(line, piece.path, position, keys)
            position += len(line)


def _open(piece: Piece) -> BinaryIO:
    packed = {".gz": "gzip", ".zst": "zstd"}.get(Path(piece.path).suffix.lower())
    if packed is None:
        return Path(piece.path).open("rb", buffering=MB)
    # Unlike zstandard's own reader, pyarrow reports a truncated file.
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(piece.path, compression=packed), MB)


def _skip_line(file: IO[bytes], most: int = 2**63) -> int:
    skipped = 0
    while block := file.readline(min(MB, most - skipped)):
        skipped += len(block)
        if block.endswith(b"\n"):
            break
    return skipped


def _parse(line: bytes, path: str, position: int, keys: Sequence[str]) -> str | Malformed:
    try:
        record = json.loads(line.decode("utf-8-sig"))  # drops a byte order mark
    except UnicodeDecodeError as error:
        return Malformed(path, position + error.start, "not UTF-8", len(line))
    except (ValueError, RecursionError) as error:
        return Malformed(path, position, f"not JSON: {error}", len(line))
    if isinstance(record, dict) and sum(key in record for key in keys) >= min(len(keys), 2):
        return _join([record.get(key) for key in keys], path, position, keys, len(line))
    found = type(record).__name__
    if isinstance(record, dict):
        found = f"keys {', '.join(map(repr, list(record)[:9]))}"
    option = "--text-key" if len(keys) == 1 else "--pairs"
    wanted = ", ".join(map(repr, keys))
    return Malformed(path, position, f"no text under {wanted} ({option}), found {found}", len(line))


def _join(
    values: Sequence[object], path: str, position: int, keys: Sequence[str], size: int
) -> str | Malformed:
    """Return the text of a document: one value, or one for each part of a pair."""
    if len(keys) == 1:
        return _check(values[0], path, position, keys[0], size)
    parts = []
    for key, value in zip(keys, values, strict=True):
        # A row may have text in some of the languages only.
        part = "" if value is None else _check(value, path, position, key, size)
        if isinstance(part, Malformed):
            return part
        if PAIR in part:
            return Malformed(path, position, f"U+FDD0, which separates pairs, under {key!r}", size)
        parts.append(part if part.strip() else "")
    return PAIR.join(parts)


def _check(text: object, path: str, position: int, key: str, size: int) -> str | Malformed:
    if not isinstance(text, str):
        reason = "bytes, not UTF-8 text," if isinstance(text, bytes) else "no text"
        return Malformed(path, position, f"{reason} under {key!r}", size)
    try:
        length = len(text) if text.isascii() else len(text.encode())  # UTF-8 bytes
    except UnicodeEncodeError:
        return Malformed(path, position, "half of a surrogate pair", size)
    if length > DOCUMENT_BYTES:
        return Malformed(path, position, f"text longer than {DOCUMENT_BYTES // MB} MB", size)
    return text
