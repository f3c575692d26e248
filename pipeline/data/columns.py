"""Parquet and Arrow: text as a column, read a few rows at a time."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from pipeline.data.piece import MB
from pipeline.data.read import LINE_BYTES
from pipeline.errors import DataError

ROWS, ROWS_BYTES = 256, 128 * MB  # at a time, whichever is less
PAGE_BYTES = 1024 * MB  # that a parquet page takes: pyarrow decodes it whole, and copies a row as long as it thrice


def row_groups(path: Path) -> list[int]:
    """Bytes of each row group."""
    try:
        metadata = pyarrow.parquet.read_metadata(path)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: not a parquet file ({error}); replace or remove it") from error
    return [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]


def parquet_rows(path: str, start: int, stop: int, key: str) -> Iterator[tuple[int, object]]:
    """Row number in the file and value of the text column, for row groups start…stop-1."""
    file = pyarrow.parquet.ParquetFile(path, buffer_size=MB, pre_buffer=False)  # else it reads whole row groups
    _check_column(path, key, file.schema_arrow.names)
    row = sum(file.metadata.row_group(i).num_rows for i in range(start))
    for group in range(start, stop):
        try:
            rows = max(1, min(ROWS, ROWS_BYTES // _largest_page(path, file.metadata.row_group(group), key)))
            for batch in file.iter_batches(rows, row_groups=[group], columns=[key]):
                for value in batch.column(0):
                    yield row, _python(value)
                    row += 1
        except (pyarrow.ArrowInvalid, LookupError) as error:
            raise DataError(f"{path}: row group {group} is damaged ({error}); fetch the file again") from error


def _largest_page(path: str, group: Any, key: str) -> int:
    """Bytes of the column's largest page, which no value exceeds; by the pages' heads, before any is read."""
    column = next(c for c in map(group.column, range(group.num_columns)) if c.path_in_schema.split(".")[0] == key)
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


def record_batches(path: Path) -> list[int]:
    """Bytes of each record batch; mapped, so that only their heads are read."""
    try:
        return [batch.nbytes for batch in _batches(str(path))]
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: not an Arrow file ({error}); replace or remove it") from error


def arrow_rows(path: str, start: int, stop: int, key: str) -> Iterator[tuple[int, object]]:
    """Row number in the file and value of the text column, for record batches start…stop-1."""
    row = 0
    for number, batch in enumerate(_batches(path)):
        if number >= stop:
            return
        if number >= start:
            _check_column(path, key, batch.schema.names)
            for i, value in enumerate(batch.column(key)):
                yield row + i, _python(value)
        row += batch.num_rows


def _batches(path: str) -> Iterator[Any]:
    """Of the file format or of the streaming format, which `datasets` writes."""
    source = pyarrow.memory_map(path)
    try:
        reader = pyarrow.ipc.open_file(source)
    except pyarrow.ArrowInvalid:
        source.seek(0)
        yield from pyarrow.ipc.open_stream(source)
        return
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


def _python(value: Any) -> object:
    """As Python has it; of a text that is too long for the stages no more than shows it."""
    text = isinstance(value, pyarrow.StringScalar | pyarrow.LargeStringScalar)
    if text and value.is_valid and (raw := value.as_buffer()).size > LINE_BYTES:
        return str(raw[: LINE_BYTES + 4], errors="ignore")
    return value.as_py()


def _check_column(path: str, key: str, names: list[str]) -> None:
    if key not in names:
        raise DataError(f"{path}: text-key={key!r} is not a column; choose from {', '.join(names)}")
