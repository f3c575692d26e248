"""Parquet: text as a column, read a few rows at a time."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet

from pipeline.errors import DataError

ROWS = 256  # at a time; a row group may be far larger than memory should hold


def row_groups(path: Path) -> list[int]:
    """Bytes of each row group."""
    try:
        metadata = pyarrow.parquet.read_metadata(path)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path}: not a parquet file ({error}); replace or remove it") from error
    return [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]


def parquet_rows(path: str, start: int, stop: int, key: str) -> Iterator[tuple[int, object]]:
    """Row number in the file and value of the text column, for row groups start…stop-1."""
    file = pyarrow.parquet.ParquetFile(path)
    if key not in file.schema_arrow.names:
        raise DataError(f"{path}: text-key={key!r} is not a column; choose from {', '.join(file.schema_arrow.names)}")
    row = sum(file.metadata.row_group(i).num_rows for i in range(start))
    for batch in file.iter_batches(ROWS, row_groups=range(start, stop), columns=[key]):
        for value in batch.column(0):
            yield row, value.as_py()
            row += 1
