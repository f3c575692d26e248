"""From sources to tasks: which worker reads which stretch of which input."""

import glob
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from pipeline.data import synthetic
from pipeline.data.corpus_recipe import MB, Kind, Piece, Task
from pipeline.data.shards import MANIFEST, has_utf8_name, read_error
from pipeline.errors import DataError

BUILT_IN_BYTES = 32 * MB  # of a built-in corpus by default: about ten million tokens
COMPRESSION = 4  # assumed: text compresses about fourfold

# The size of a task depends on the input alone, never on the number of workers.
SMALLEST_TASK_BYTES = 4 * MB
LARGEST_TASK_BYTES = 256 * MB
SMALLEST_SHARE_BYTES = 64 * 1024  # smallest part of a limit that a file gets: several documents
TASKS = 64

SUFFIXES: dict[str, Kind] = {
    ".txt": "text",
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".jsonl.zst": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".idx": "megatron",
}

Warn = Callable[[str], None]


def plan(
    sources: Sequence[str],
    *,
    limit_bytes: int | None,
    seed: int,
    out: Path | None = None,
    warn: Warn = lambda line: None,
) -> list[Task]:
    """Cut every source into tasks; the same inputs give the same tasks. Files in `out` are skipped.

    `limit_bytes` applies to each source: the files of a directory or glob share it by their sizes.
    """
    pieces: dict[str, list[Piece]] = {}
    owner: dict[str, str] = {}  # real path → source, to find files that two sources contain
    for source in sources:
        if source in pieces:
            raise DataError(f"source={source!r} is given twice; name it once")
        try:
            pieces[source] = _source_pieces(source, limit_bytes, seed, out, warn)
            paths = _paths(source, pieces[source])
        except OSError as error:
            raise read_error(error, f"source={source!r}") from error
        for path in paths:
            real = os.path.realpath(path)
            if real in owner:
                text = f"{path}: source={owner[real]!r} and source={source!r} both contain it"
                raise DataError(f"{text}; name it once")
            owner[real] = source
    total = sum(piece.bytes for found in pieces.values() for piece in found)
    task_bytes = max(SMALLEST_TASK_BYTES, min(LARGEST_TASK_BYTES, total // TASKS)) // MB * MB
    return [task for found in pieces.values() for task in _group(found, task_bytes)]


def _source_pieces(
    source: str, limit_bytes: int | None, seed: int, out: Path | None, warn: Warn
) -> list[Piece]:
    if source == "python":
        return list(_limited(_python_pieces(), limit_bytes or BUILT_IN_BYTES))
    if source in synthetic.LANGUAGES:
        size = synthetic.batch_bytes(synthetic.LANGUAGES[source])
        batches = -(-(limit_bytes or BUILT_IN_BYTES) // size)
        path = f"seed={seed}"
        return [Piece(source, "synthetic", path, i, i + 1, size) for i in range(batches)]
    if source.startswith("hf:"):
        from pipeline.data import columns  # pyarrow takes a while to import

        folder = columns.hub_folder(source)
        if out and folder.is_dir() and _is_below(out / MANIFEST, folder):
            raise DataError(f"out={out} is inside source={source!r}; choose another --out")
        return list(_limited(columns.hub_pieces(source), limit_bytes))
    files = [list(_file_pieces(source, path)) for path in _files(source, out, warn)]
    pieces = _shared(files, limit_bytes)
    unread = sum(map(bool, files)) - len({piece.path for piece in pieces})
    if limit_bytes is not None and unread:
        warn(
            f"source={source!r}: limit-bytes={limit_bytes:,} is the limit of all files together; "
            f"{unread:,} of {len(files):,} files are not read"
        )
    return pieces


def _shared(files: list[list[Piece]], limit_bytes: int | None) -> list[Piece]:
    """Limit the pieces of several files together. Each file has a share in proportion to its size.

    Shares below the smallest useful size add up until they suffice for the next file. So of many
    small files, some are read as a whole, at regular distances.
    """
    sizes = [sum(piece.bytes for piece in pieces) for pieces in files]
    total = sum(sizes)
    if limit_bytes is None or len(files) == 1 or total <= limit_bytes:
        return list(_limited(chain.from_iterable(files), limit_bytes))
    smallest = min(SMALLEST_SHARE_BYTES, limit_bytes / 8)
    chosen: list[Piece] = []
    owed = 0.0
    for pieces, size in zip(files, sizes, strict=True):
        owed += limit_bytes * size / total
        least = min(size, smallest)
        if owed >= least / 2:
            found = list(_limited(pieces, round(max(owed, least))))
            # A row group or a compressed file is read up to its limit.
            owed -= sum(min(piece.bytes, piece.limit or piece.bytes) for piece in found)
            chosen += found
    return chosen


def _limited(pieces: Iterable[Piece], limit_bytes: int | None) -> Iterator[Piece]:
    """Yield pieces up to the limit; the last one ends at the line or document that reaches it."""
    left = limit_bytes
    for piece in pieces:
        if left is None:
            yield piece
            continue
        if left <= 0:
            return
        if piece.kind in ("text", "jsonl") and piece.stop > 0:
            piece = replace(piece, stop=min(piece.stop, left), bytes=min(piece.bytes, left))
        else:
            # The amount of text in such a piece is known only when it is read.
            piece = replace(piece, limit=left)
        left -= piece.bytes
        yield piece


def _paths(source: str, pieces: Sequence[Piece]) -> list[str]:
    if source.startswith("hf:"):
        from pipeline.data import columns

        return columns.hub_files(source)
    return sorted({piece.path for piece in pieces if piece.kind != "synthetic"})


def _python_pieces() -> Iterator[Piece]:
    """Yield the interpreter's library, then the installed packages, in a fixed order."""
    skipped = ("site-packages", "dist-packages", "__pycache__")
    for root in ("stdlib", "purelib"):
        for folder, subfolders, names in os.walk(sysconfig.get_paths()[root]):
            subfolders[:] = sorted(name for name in subfolders if name not in skipped)
            for path in (Path(folder, name) for name in sorted(names)):
                # Debian's library has links to its own files.
                if path.suffix != ".py" or path.is_symlink():
                    continue
                stat = path.stat()
                if stat.st_size:
                    size = stat.st_size
                    yield Piece("python", "text", str(path), 0, size, size, stat.st_mtime_ns)


def _files(source: str, out: Path | None, warn: Warn) -> list[Path]:
    """List the files of a path, directory or glob, and warn about those that are skipped."""
    path = Path(source)
    if source and path.is_dir():
        candidates = sorted(_walk(path))
        # The only text of a finished corpus is its shards; malformed.jsonl is a report.
        if (path / MANIFEST).exists():
            candidates = [p for p in candidates if p.suffix == ".idx"]
        chosen = [p for p in candidates if _kind(p) and p.is_file()]
        problem = f"no {', '.join(SUFFIXES)} files below it; check the path"
    else:
        found = glob.glob(source, recursive=True)  # noqa: PTH207  # Path.glob: relative only
        candidates = [path] if path.is_file() else sorted(map(Path, found))
        chosen = [p for p in candidates if p.is_file()]
        problem = (
            "no such file, directory or glob, nor a built-in corpus (python, synthetic, "
            "synthetic:small); for the Hugging Face hub write hf:NAME[:split]"
        )
    if not chosen:
        raise DataError(f"source={source!r}: {problem}")
    if out is not None:
        candidates = [p for p in candidates if not _is_below(p, out)]
        chosen = [p for p in chosen if not _is_below(p, out)]
        if not chosen:
            raise DataError(f"source={source!r} is inside out={out}; choose another --out")
    _warn_skipped(source, candidates, chosen, warn)
    return chosen


def _is_below(path: Path, folder: Path) -> bool:
    # Unlike Path.resolve, realpath does not fail on a loop of links.
    return Path(os.path.realpath(folder)) in Path(os.path.realpath(path)).parents


def _warn_skipped(source: str, candidates: list[Path], chosen: list[Path], warn: Warn) -> None:
    used = set(chosen)  # the .bin of a Megatron corpus is used through its .idx
    used |= {p.with_suffix(p.suffix.replace("idx", "bin").replace("IDX", "BIN")) for p in chosen}
    skipped = [p for p in candidates if p not in used]
    others = [p for p in skipped if p.is_file()]
    broken = [p for p in skipped if not p.exists()]
    for what, paths in (("files of other kinds", others), ("broken links", broken)):
        if paths:
            warn(f"source={source!r}: skipped {len(paths):,} {what}, the first is {paths[0]}")


def _walk(root: Path) -> Iterator[Path]:
    """Yield every file below a directory, links followed, each directory once.

    Hidden files are skipped, as in a glob. Among them is .work with unfinished shards.
    """
    seen = set()
    for folder, subfolders, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _kind(path: Path) -> Kind | None:
    name = path.name.lower()
    return next((kind for suffix, kind in SUFFIXES.items() if name.endswith(suffix)), None)


def _file_pieces(source: str, path: Path) -> Iterator[Piece]:
    kind = _kind(path)
    if kind is None:
        raise DataError(f"{path}: unknown suffix {path.suffix!r}; known: {', '.join(SUFFIXES)}")
    if not has_utf8_name(path):
        raise DataError(f"{str(path)!r}: the name is not UTF-8; rename the file")
    try:
        size = path.stat().st_size
        stamp = path.stat().st_mtime_ns
        if kind == "parquet" or kind == "arrow":
            from pipeline.data import columns

            sizes = columns.row_group_bytes if kind == "parquet" else columns.record_batch_bytes
            for i, group_bytes in enumerate(sizes(path)):
                yield Piece(source, kind, str(path), i, i + 1, group_bytes, stamp)
        elif kind == "megatron":
            from pipeline.data import megatron

            yield from megatron.pieces(source, path)
        elif path.suffix.lower() in (".gz", ".zst"):
            # One stream, which only one worker can read. -1: to its end.
            yield Piece(source, kind, str(path), 0, -1, size * COMPRESSION, stamp)
        elif size:
            yield Piece(source, kind, str(path), 0, size, size, stamp)
    except DataError:
        raise
    except Exception as error:
        raise read_error(error, path) from error


def _group(pieces: Sequence[Piece], task_bytes: int) -> Iterator[Task]:
    """Combine small pieces and cut large files, to about task_bytes per task."""
    group: list[Piece] = []
    size = 0
    for piece in chain.from_iterable(_split(whole, task_bytes) for whole in pieces):
        if group and size + piece.bytes > task_bytes:
            yield tuple(group)
            group = []
            size = 0
        group.append(piece)
        size += piece.bytes
    if group:
        yield tuple(group)


def _split(piece: Piece, task_bytes: int) -> Iterator[Piece]:
    can_split = piece.kind in ("text", "jsonl") and piece.stop > 0
    count = round(piece.bytes / task_bytes) if can_split else 1
    if count <= 1:
        yield piece
        return
    # Whole megabytes, so that a long .txt file is cut into the same documents.
    step = -(-piece.stop // count // MB) * MB
    for start in range(0, piece.stop, step):
        stop = min(start + step, piece.stop)
        yield replace(piece, start=start, stop=stop, bytes=stop - start)
