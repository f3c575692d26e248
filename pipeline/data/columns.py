"""Text in a column: Parquet, Arrow, and Hugging Face `datasets` (hf:NAME[:split]).

An hf: source is a hub name, a directory of data files, or a dataset saved by `save_to_disk`.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import xxhash

from pipeline.data.corpus_recipe import DOCUMENT_BYTES, MB, Piece
from pipeline.errors import DataError, first_line

BATCH_ROWS = 256  # rows read at once from a parquet file ...
BATCH_BYTES = 8 * MB  # ... fewer if the rows of a group are long on average
HUB_ROWS = 10_000  # rows of a saved dataset per piece
HUB_SHARD_BYTES = 64 * MB  # assumed: the size of a streamed shard is unknown


class Row(NamedTuple):
    number: int  # in the file, in the batch of an Arrow file, in the shard of a streamed dataset
    values: tuple[object, ...]  # of the text columns; None where there is none
    bytes: int


def row_group_bytes(path: Path) -> list[int]:
    metadata = pyarrow.parquet.read_metadata(path)
    return [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]


def rows(piece: Piece, keys: Sequence[str]) -> Iterator[Row]:
    """Read the text columns of a piece."""
    read = {"parquet": _parquet_rows, "arrow": _arrow_rows, "hf": _hub_rows}[piece.kind]
    return read(piece, keys)


def _parquet_rows(piece: Piece, keys: Sequence[str]) -> Iterator[Row]:
    """Read one row group, a few rows at a time."""
    # Without these options pyarrow loads whole row groups into memory.
    file = pyarrow.parquet.ParquetFile(piece.path, buffer_size=MB, pre_buffer=False)
    present = _check_columns(piece.path, keys, file.schema_arrow.names)
    number = sum(file.metadata.row_group(i).num_rows for i in range(piece.start))
    group = file.metadata.row_group(piece.start)
    row_bytes = group.total_byte_size // max(1, group.num_rows)
    count = min(BATCH_ROWS, max(1, BATCH_BYTES // max(1, row_bytes)))
    for batch in file.iter_batches(count, row_groups=[piece.start], columns=present):
        yield from _rows(batch, keys, present, number)
        number += batch.num_rows


def record_batch_bytes(path: Path) -> list[int]:
    """Return the size of each record batch; no batch is read."""
    source = pyarrow.memory_map(str(path))
    # The file format is the streaming format between a magic number and a footer.
    source.seek(8 if source.read(6) == b"ARROW1" else 0)
    messages = pyarrow.ipc.MessageReader.open_stream(source)
    return [message.body.size for message in messages if message.type == "record batch"]


def _arrow_rows(piece: Piece, keys: Sequence[str]) -> Iterator[Row]:
    """Read one record batch, whose first row has number 0."""
    [batch] = _read_batches(piece.path, piece.start, piece.start + 1)
    present = _check_columns(piece.path, keys, batch.schema.names)
    for key in present:
        _check_offsets(batch.column(key))
    yield from _rows(batch, keys, present, 0)


@lru_cache(1)
def rows_before(path: str, batch: int) -> int:
    """Count the rows before a record batch. pyarrow has to decompress them for that."""
    return sum(earlier.num_rows for earlier in _read_batches(path, 0, batch))


def _read_batches(path: str, start: int, stop: int) -> Iterator[Any]:
    """Read the file format, or else the streaming format, which `datasets` writes."""
    source = pyarrow.memory_map(path)  # uncompressed batches are views of it
    try:
        reader = pyarrow.ipc.open_file(source)
    except pyarrow.ArrowInvalid:
        source.seek(0)
        yield from islice(pyarrow.ipc.open_stream(source), start, stop)
        return
    yield from map(reader.get_batch, range(start, stop))


def _rows(batch: Any, keys: Sequence[str], present: Sequence[str], first: int) -> Iterator[Row]:
    columns = [batch.column(key) if key in present else [None] * batch.num_rows for key in keys]
    for number, values in enumerate(zip(*columns, strict=True), first):
        found = [_value(value) for value in values]
        yield Row(number, tuple(value for value, _ in found), sum(size for _, size in found))


def _value(value: Any) -> tuple[object, int]:
    """Return a value in Python and its size; a text that is too long is cut above the limit."""
    if value is None:
        return None, 0
    if isinstance(value, pyarrow.DictionaryScalar):
        value = value.value
    if not isinstance(value, pyarrow.BinaryScalar) or not value.is_valid:
        return value.as_py(), 0
    raw = value.as_buffer()  # a view, so that a text of gigabytes is not decoded
    if raw.size > DOCUMENT_BYTES:
        return str(raw[: DOCUMENT_BYTES + 4], errors="ignore"), raw.size
    try:
        return value.as_py(), raw.size
    except UnicodeDecodeError:
        return b"", raw.size


def _check_offsets(column: Any) -> None:
    # Arrow trusts the offsets of a file, and a wrong one crashes the process.
    try:
        column.validate(full=True)
    except pyarrow.ArrowInvalid as error:
        # Arrow checks UTF-8 last. Invalid text is reported row by row.
        if "UTF8" not in str(error):
            raise


def _check_columns(path: str, keys: Sequence[str], names: list[str]) -> list[str]:
    """Return the columns that exist. A text needs its column; pairs need at least two of theirs."""
    present = [key for key in keys if key in names]
    known = f"choose from {', '.join(names)}"
    if len(keys) == 1 and not present:
        raise DataError(f"{path}: text-key={keys[0]!r} is not a column; {known}")
    if len(keys) > 1 and len(present) < 2:
        raise DataError(f"{path}: pairs={','.join(keys)} are not two columns; {known}")
    return present


# Hugging Face datasets


def hub_pieces(source: str) -> Iterator[Piece]:
    dataset, paths = _open_dataset(source)
    stamp = _stamp(dataset, paths)
    if _is_saved(source):
        rows = len(dataset)
        row_bytes = max(1, dataset.data.nbytes // max(1, rows))
        for start in range(0, rows, HUB_ROWS):
            stop = min(start + HUB_ROWS, rows)
            yield Piece(source, "hf", source, start, stop, (stop - start) * row_bytes, stamp)
    else:
        for shard in range(dataset.num_shards):
            path = f"{source} shard {shard} of {dataset.num_shards}"
            yield Piece(source, "hf", path, shard, shard + 1, HUB_SHARD_BYTES, stamp)


def hub_files(source: str) -> list[str]:
    """List the files and URLs that the dataset reads."""
    return _open_dataset(source)[1]


def hub_folder(source: str) -> Path:
    """Return where the dataset is if it is on this machine."""
    return Path(_name_and_split(source)[0])


def _hub_rows(piece: Piece, keys: Sequence[str]) -> Iterator[Row]:
    dataset, _ = _open_dataset(piece.source)
    if dataset.column_names is not None:
        _check_columns(piece.source, keys, dataset.column_names)
    records: Iterable[Any] = map(dataset.__getitem__, range(piece.start, piece.stop))
    first = piece.start
    if not _is_saved(piece.source):
        records = dataset.shard(dataset.num_shards, piece.start)
        first = 0
    for number, record in enumerate(records, first):
        values = tuple(record.get(key) for key in keys)
        texts = [value for value in values if isinstance(value, str)]
        yield Row(number, values, sum(len(t.encode(errors="surrogatepass")) for t in texts))


def _stamp(dataset: Any, paths: list[str]) -> int:
    # Sizes and times of local files; a hub's URL contains the revision.
    stats = [
        path if "://" in path else (Path(path).stat().st_size, Path(path).stat().st_mtime_ns)
        for path in paths
    ]
    return xxhash.xxh3_64_intdigest(repr((getattr(dataset, "_fingerprint", None), stats)).encode())


def _is_saved(source: str) -> bool:
    folder = hub_folder(source)
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _name_and_split(source: str) -> tuple[str, str]:
    name, _, split = source.removeprefix("hf:").partition(":")
    return name, split or "train"


def _open_dataset(source: str) -> tuple[Any, list[str]]:
    """Return the dataset, and the files and URLs that it reads."""
    import datasets

    datasets.disable_progress_bars()
    name, split = _name_and_split(source)
    try:
        if not _is_saved(source):
            builder = datasets.load_dataset_builder(name)
            files = (builder.config.data_files or {}).get(split, ())
            return builder.as_streaming_dataset(split), list(files)
        saved = datasets.load_from_disk(name)
        splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
        if split not in splits:
            raise LookupError(f"no split {split!r}, there are {', '.join(splits)}")
        return splits[split], [file["filename"] for file in splits[split].cache_files]
    # datasets raises a dozen unrelated types for "not found", "no network", "no such split".
    except Exception as error:
        reason = first_line(error)
        raise DataError(f"source={source!r}: {reason}; check name, split and network") from error
