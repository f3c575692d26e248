"""Parquet and Arrow: text as a column, read a few rows at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from pipeline.data.piece import MB
from pipeline.errors import DataError

ROWS, ROWS_BYTES = 256, 16 * MB  # at a time, whichever is less; a row group may be far larger than memory should hold


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
        metadata = file.metadata.row_group(group)
        rows = max(1, min(ROWS, ROWS_BYTES * metadata.num_rows // max(1, metadata.total_byte_size)))
        for batch in file.iter_batches(rows, row_groups=[group], columns=[key]):
            for value in batch.column(0):
                yield row, value.as_py()
                row += 1


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
                yield row + i, value.as_py()
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


def _check_column(path: str, key: str, names: list[str]) -> None:
    if key not in names:
        raise DataError(f"{path}: text-key={key!r} is not a column; choose from {', '.join(names)}")
