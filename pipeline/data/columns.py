"""Parquet and Arrow: text as a column, read a few rows at a time."""

import os
import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from pipeline.data.piece import MB
from pipeline.data.read import LINE_BYTES
from pipeline.errors import DataError

ROWS, ROWS_BYTES = 256, 128 * MB  # at a time, whichever is less
PAGE_BYTES = (
    1024 * MB
)  # that a parquet page takes: pyarrow decodes it whole, and copies a row as long as it thrice


def row_groups(path: Path) -> list[int]:
    """Bytes of each row group."""
    try:
        metadata = pyarrow.parquet.read_metadata(path)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: not a parquet file ({error}); replace or remove it") from error
    return [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]


def parquet_rows(path: str, start: int, stop: int, key: str) -> Iterator[tuple[int, object, int]]:
    """Row number in the file, value of the text column and its bytes, for row groups start…stop-1."""
    file = pyarrow.parquet.ParquetFile(
        path, buffer_size=MB, pre_buffer=False
    )  # else it reads whole row groups
    _check_column(path, key, file.schema_arrow.names)
    row = sum(file.metadata.row_group(i).num_rows for i in range(start))
    for group in range(start, stop):
        try:
            rows = max(
                1, min(ROWS, ROWS_BYTES // _largest_page(path, file.metadata.row_group(group), key))
            )
            for batch in file.iter_batches(rows, row_groups=[group], columns=[key]):
                for value in batch.column(key):
                    yield row, *_python(value)
                    row += 1
        except (pyarrow.ArrowInvalid, LookupError) as error:
            raise DataError(
                f"{path}: row group {group} is damaged ({error}); fetch the file again"
            ) from error


def _largest_page(path: str, group: Any, key: str) -> int:
    """Bytes of the column's largest page, which no value exceeds; by the pages' heads, before any is read."""
    columns = (
        c
        for c in map(group.column, range(group.num_columns))
        if f"{c.path_in_schema}.".startswith(f"{key}.")
    )
    column = min(
        columns, key=lambda c: len(c.path_in_schema)
    )  # a name may have a dot in it, as a list's has behind it
    at = column.dictionary_page_offset or column.data_page_offset
    end, largest = at + column.total_compressed_size, 1
    with Path(path).open("rb") as file:
        while at < end:
            try:
                sizes, length = _thrift(os.pread(file.fileno(), 4096, at))
            except IndexError:  # it quotes long values
                sizes, length = _thrift(os.pread(file.fileno(), 16 * MB, at))
            unpacked, packed = sizes[2], sizes[3]
            if 4 * unpacked + packed > PAGE_BYTES:
                rows = max(1, group.num_rows * 128 * MB // column.total_uncompressed_size)
                raise DataError(
                    f"{path}: a page of {unpacked // MB:,} MiB ({packed // MB:,} packed) at byte {at:,} does not fit a "
                    f"worker's memory; write the file anew with smaller row groups (row_group_size={rows})"
                )
            largest, at = max(largest, unpacked), at + length + packed
    return largest


def _thrift(raw: bytes, at: int = 0) -> tuple[dict[int, int], int]:
    """The whole numbers of a struct in Thrift's compact protocol, and where it ends; IndexError where the bytes do."""
    numbers: dict[int, int] = {}
    field = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            value |= (raw[at] & 127) << shift
            shift, at = shift + 7, at + 1
            if raw[at - 1] < 128:
                return value

    while head := raw[at]:
        step, kind = divmod(head, 16)
        at += 1
        field = field + step if step else varint() >> 1
        if kind in (4, 5, 6):  # zigzag; none of ours is negative
            numbers[field] = varint() >> 1
        elif kind == 8:  # bytes
            at = varint() + at  # in this order: it moves at
        elif kind == 12:
            at = _thrift(raw, at)[1]
        else:  # a byte; true and false have none
            at += kind == 3
    return numbers, at + 1


class Head(NamedTuple):
    """What an Arrow file says of a record batch ahead of it."""

    rows: int
    bytes: int
    packed: bool


def record_batches(path: Path) -> list[int]:
    """Bytes of each record batch, none of them read."""
    try:
        return [head.bytes for head in _heads(str(path))]
    except (pyarrow.ArrowInvalid, OSError, struct.error) as error:
        raise DataError(f"{path}: not an Arrow file ({error}); replace or remove it") from error


def arrow_rows(path: str, start: int, stop: int, key: str) -> Iterator[tuple[int, object, int]]:
    """Row number in the file, value of the text column and its bytes, for record batches start…stop-1."""
    heads = list(_heads(path))
    row = sum(head.rows for head in heads[:start])
    for head in heads[start:stop]:
        if head.packed and 4 * head.bytes > PAGE_BYTES:  # text packs about threefold
            raise DataError(
                f"{path}: a compressed record batch of {head.bytes // MB:,} MiB does not fit a worker's memory; "
                f"write the file anew in smaller ones (max_chunksize={max(1, head.rows * 64 * MB // head.bytes)})"
            )
    for batch in _batches(path, start, stop):
        _check_column(path, key, batch.schema.names)
        _check_offsets(batch.column(key))
        for value in batch.column(key):
            yield row, *_python(value)
            row += 1


def _batches(path: str, start: int, stop: int) -> Iterator[Any]:
    """Of the file format or of the streaming format, which `datasets` writes."""
    source = pyarrow.memory_map(path)
    try:
        reader = pyarrow.ipc.open_file(source)
    except pyarrow.ArrowInvalid:
        source.seek(0)
        yield from islice(pyarrow.ipc.open_stream(source), start, stop)
        return
    yield from map(reader.get_batch, range(start, stop))


def _heads(path: str) -> Iterator[Head]:
    """Both formats are the same messages, their heads flatbuffers (Schema.fbs and Message.fbs of Arrow's format)."""
    source = pyarrow.memory_map(path)
    source.seek(8 if source.read(6) == b"ARROW1" else 0)
    for message in pyarrow.ipc.MessageReader.open_stream(source):
        if message.type == "record batch":
            raw = message.metadata.to_pybytes()
            batch = _field(raw, _unsigned("I", raw, 0), 2)
            assert batch is not None
            batch += _unsigned("I", raw, batch)
            rows = _field(raw, batch, 0)
            count = 0 if rows is None else _unsigned("Q", raw, rows)
            yield Head(count, message.body.size, packed=_field(raw, batch, 3) is not None)


def _field(raw: bytes, table: int, number: int) -> int | None:
    """Where a flatbuffer's table has its field, if it has."""
    fields = table - struct.unpack_from("<i", raw, table)[0]
    place = 4 + 2 * number
    offset = _unsigned("H", raw, fields + place) if place < _unsigned("H", raw, fields) else 0
    return table + offset if offset else None


def _unsigned(kind: str, raw: bytes, at: int) -> int:
    return int(struct.unpack_from(f"<{kind}", raw, at)[0])


def _python(value: Any) -> tuple[object, int]:
    """As Python has it, and the bytes of a text; of one that is too long for the stages no more than shows it."""
    if isinstance(value, pyarrow.DictionaryScalar):
        value = value.value
    if not isinstance(value, pyarrow.BinaryScalar) or not value.is_valid:
        return value.as_py(), 0
    raw = value.as_buffer()
    if raw.size > LINE_BYTES:
        return str(raw[: LINE_BYTES + 4], errors="ignore"), raw.size
    try:
        return value.as_py(), raw.size
    except UnicodeDecodeError:
        return b"", raw.size


def _check_offsets(column: Any) -> None:
    """Arrow takes them as they are in the file, and a wrong one ends the process."""
    try:
        column.validate(full=True)
    except pyarrow.ArrowInvalid as error:
        if "UTF8" not in str(error):  # looked at last, and set aside row by row
            raise


def _check_column(path: str, key: str, names: list[str]) -> None:
    if key not in names:
        raise DataError(f"{path}: text-key={key!r} is not a column; choose from {', '.join(names)}")
