"""Hugging Face `datasets` as a source, hf:NAME[:split]: a hub name, a directory of data files, or a saved dataset."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from pipeline.data.piece import MB, Piece
from pipeline.errors import DataError

ROWS = 10_000  # of a saved dataset per piece


def pieces(source: str) -> Iterator[Piece]:
    dataset, paths = _open(source)
    stamp = _stamp(dataset, paths)
    if _saved(source):
        rows = len(dataset)
        row_bytes = max(1, dataset.data.nbytes // max(1, rows))
        for start in range(0, rows, ROWS):
            stop = min(start + ROWS, rows)
            yield Piece(source, "hf", source, start, stop, (stop - start) * row_bytes, stamp)
    else:
        for shard in range(dataset.num_shards):
            path = f"{source} shard {shard} of {dataset.num_shards}"
            yield Piece(source, "hf", path, shard, shard + 1, 64 * MB, stamp)  # size unknown


def files(source: str) -> list[str]:
    return _open(source)[1]


def _stamp(dataset: Any, paths: list[str]) -> int:
    """Of local files their sizes and times; a hub's address has the revision in it."""
    stats = [
        path if "://" in path else (Path(path).stat().st_size, Path(path).stat().st_mtime_ns)
        for path in paths
    ]
    return xxhash.xxh3_64_intdigest(repr((getattr(dataset, "_fingerprint", None), stats)).encode())


def rows(piece: Piece, key: str) -> Iterator[tuple[int, object, int]]:
    """Row number, value of the text column and its bytes."""
    dataset, _ = _open(piece.source)
    names = dataset.column_names
    if names is not None and key not in names:
        raise DataError(
            f"{piece.source}: text-key={key!r} is not a column; choose from {', '.join(names)}"
        )
    if _saved(piece.source):
        for row in range(piece.start, piece.stop):
            yield row, (value := dataset[row][key]), _bytes(value)
    else:
        for row, record in enumerate(dataset.shard(dataset.num_shards, piece.start)):
            yield row, (value := record.get(key)), _bytes(value)


def folder(source: str) -> Path:
    """Where it is, if it is on this machine."""
    return Path(_parts(source)[0])


def _bytes(value: object) -> int:
    return len(value.encode(errors="surrogatepass")) if isinstance(value, str) else 0


def _saved(source: str) -> bool:
    return any((folder(source) / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _parts(source: str) -> tuple[str, str]:
    name, _, split = source.removeprefix("hf:").partition(":")
    return name, split or "train"


def _open(source: str) -> tuple[Any, list[str]]:
    """The dataset, and the files and addresses that it reads."""
    import datasets

    datasets.disable_progress_bars()
    name, split = _parts(source)
    try:
        if not _saved(source):
            builder = datasets.load_dataset_builder(name)
            return builder.as_streaming_dataset(split), list(
                (builder.config.data_files or {}).get(split, ())
            )
        saved = datasets.load_from_disk(name)
        splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
        if split not in splits:
            raise LookupError(f"no split {split!r}, there are {', '.join(splits)}")
        return splits[split], [file["filename"] for file in splits[split].cache_files]
    except (
        Exception
    ) as error:  # a dozen unrelated types for "not there", "no network", "no such split"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"source={source!r}: {reason}; check name, split and network") from error
