"""From what the user names to pieces of work: which stretch of which input each task reads."""

import glob
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.data import hub, synthetic
from pipeline.data.files import nameable, unreadable
from pipeline.data.piece import MB, Kind, Piece, Task
from pipeline.data.shards import MANIFEST
from pipeline.errors import DataError

BUILT_IN_BYTES = 32 * MB  # of a built-in corpus unless asked for more: about ten million tokens
TEXT_DOCUMENT_BYTES = MB  # a longer .txt file becomes several documents, cut at line ends
SMALLEST_TASK_BYTES, LARGEST_TASK_BYTES, TASKS = (
    4 * MB,
    256 * MB,
    64,
)  # depend on the input alone, never on the workers

SUFFIXES: dict[str, Kind] = {
    ".txt": "text",
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".jsonl.zst": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".idx": "megatron",
}


def plan(
    sources: Sequence[str],
    *,
    limit_bytes: int | None,
    seed: int,
    out: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Task]:
    """Cut every source into tasks; the same inputs give the same tasks. What lies in `out` is none."""
    whole: dict[str, list[Piece]] = {}
    owner: dict[str, str] = {}
    for source in sources:
        if source in whole:
            raise DataError(
                f"source={source!r} is given twice; name it once (a mixture weight repeats it)"
            )
        whole[source] = list(
            _limited(_inputs(source, limit_bytes, seed, out, say), source, limit_bytes)
        )
        named = {p.path for p in whole[source] if p.kind not in ("hf", "synthetic")}
        for path in sorted(named) or (hub.files(source) if source.startswith("hf:") else ()):
            real = os.path.realpath(path)
            if real in owner:
                raise DataError(
                    f"{path}: reached twice, by source={owner[real]!r} and {source!r}; name it once"
                )
            owner[real] = source
    total = sum(piece.bytes for pieces in whole.values() for piece in pieces)
    task_bytes = max(SMALLEST_TASK_BYTES, min(LARGEST_TASK_BYTES, total // TASKS)) // MB * MB
    return [task for pieces in whole.values() for task in _group(pieces, task_bytes)]


def _limited(pieces: Iterator[Piece], source: str, limit_bytes: int | None) -> Iterator[Piece]:
    """Pieces up to the limit, the last one cut: a file of lines at the line it falls into, others at the document."""
    left = BUILT_IN_BYTES if limit_bytes is None and source == "python" else limit_bytes
    for piece in pieces:
        if (
            left is not None and piece.kind != "synthetic"
        ):  # its batches are made whole, as many as it takes
            if left <= 0:
                return
            if piece.kind in ("text", "jsonl") and piece.stop > 0:
                piece = replace(piece, stop=min(piece.stop, left), bytes=min(piece.bytes, left))
            else:  # how much text is in it shows only when it is read
                piece = replace(piece, limit=left)
            left -= piece.bytes
        yield piece


def _inputs(
    source: str, limit_bytes: int | None, seed: int, out: Path | None, say: Callable[[str], None]
) -> Iterator[Piece]:
    if source == "python":
        yield from _python(source)
    elif language := synthetic.LANGUAGES.get(source):
        size = synthetic.batch_bytes(language)
        for batch in range(-(-(limit_bytes or BUILT_IN_BYTES) // size)):
            yield Piece(source, "synthetic", f"seed={seed}", batch, batch + 1, size)
    elif source.startswith("hf:"):
        if (
            out
            and hub.folder(source).is_dir()
            and out.resolve().is_relative_to(hub.folder(source).resolve())
        ):
            raise DataError(
                f"out={out} lies in source={source!r}, which would read it; choose another --out"
            )
        yield from hub.pieces(source)
    else:
        for path in _files(source, out, say):
            yield from _file(source, path)


def _python(source: str) -> Iterator[Piece]:
    """The text of the interpreter's library, then of the installed packages, in a fixed order."""
    library, packages = (sysconfig.get_paths()[k] for k in ("stdlib", "purelib"))
    for root in (library, packages):
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = sorted(
                d for d in subfolders if d not in ("site-packages", "dist-packages", "__pycache__")
            )
            for path in (Path(folder, name) for name in sorted(names)):
                if (
                    path.suffix == ".py" and not path.is_symlink() and (size := path.stat().st_size)
                ):  # Debian has links
                    yield Piece(source, "text", str(path), 0, size, size, path.stat().st_mtime_ns)


def _files(source: str, out: Path | None, say: Callable[[str], None]) -> list[Path]:
    """A file, all known files below a directory, or a glob; of the rest it is said how much there is."""
    path = Path(source)
    if path.is_dir() and source:
        ours = (path / MANIFEST).exists()  # of it only the shards: its malformed.jsonl is no text
        every = sorted(p for p in _below(path) if not ours or p.suffix == ".idx")
        found = [p for p in every if _kind(p) and p.is_file()]
        if not found:
            raise DataError(
                f"source={source!r}: no {', '.join(SUFFIXES)} files below it; check the path"
            )
    else:
        every = [path] if path.is_file() else sorted(map(Path, glob.glob(source, recursive=True)))  # noqa: PTH207  # absolute too
        found = [p for p in every if p.is_file()]
        if not found:
            raise DataError(
                f"source={source!r}: no such file, directory or glob, nor a built-in (python, synthetic, "
                "synthetic:small); for the Hugging Face hub write hf:NAME[:split]"
            )
    if out:
        inside = out.resolve()
        every, found = (
            [p for p in paths if inside not in p.resolve().parents] for paths in (every, found)
        )
        if not found:
            raise DataError(f"source={source!r} lies in out={out}; choose another --out")
    taken = {
        *found,
        *(p.with_suffix(p.suffix.replace("idx", "bin").replace("IDX", "BIN")) for p in found),
    }
    left = [p for p in every if p not in taken]
    for what, some in (
        ("files of another kind", [p for p in left if p.is_file()]),
        ("links to nothing", [p for p in left if not p.exists()]),
    ):
        if some:
            say(f"source={source!r}: {len(some):,} {what} not taken, the first {some[0]}")
    return found


def _below(root: Path) -> Iterator[Path]:
    """Every file below a directory, links followed, each directory once. What is hidden is none, as for a glob: .work
    among it, where shards are half made."""
    seen = set()
    for folder, subfolders, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        subfolders[:] = sorted(
            name for name in subfolders if not name.startswith(".") and real not in seen
        )
        yield from (
            Path(folder, name) for name in names if not name.startswith(".") and real not in seen
        )
        seen.add(real)


def _kind(path: Path) -> Kind | None:
    return next(
        (kind for suffix, kind in SUFFIXES.items() if path.name.lower().endswith(suffix)), None
    )


def _file(source: str, path: Path) -> Iterator[Piece]:
    kind = _kind(path)
    if kind is None:
        raise DataError(f"{path}: unknown suffix {path.suffix!r}; known: {', '.join(SUFFIXES)}")
    if not nameable(path):
        raise DataError(f"{str(path)!r}: a name that is not UTF-8; rename it")
    try:
        size, stamp = path.stat().st_size, path.stat().st_mtime_ns
        if kind == "parquet" or kind == "arrow":
            from pipeline.data import columns  # pyarrow only where it is needed

            groups = columns.row_groups(path) if kind == "parquet" else columns.record_batches(path)
            for i, group_bytes in enumerate(groups):
                yield Piece(source, kind, str(path), i, i + 1, group_bytes, stamp)
        elif kind == "megatron":
            from pipeline.data import megatron

            yield from megatron.pieces(source, path)
        elif path.suffix.lower() in (".gz", ".zst"):
            yield Piece(
                source, kind, str(path), 0, -1, size * 4, stamp
            )  # one stream; text packs about fourfold
        elif size:
            yield Piece(source, kind, str(path), 0, size, size, stamp)
    except DataError:
        raise
    except Exception as error:
        raise unreadable(error, path) from error


def _group(pieces: Sequence[Piece], task_bytes: int) -> Iterator[Task]:
    """Small pieces together, large files in stretches, about task_bytes each."""
    group: list[Piece] = []
    for piece in (part for whole in pieces for part in _split(whole, task_bytes)):
        if group and sum(p.bytes for p in group) + piece.bytes > task_bytes:
            yield tuple(group)
            group = []
        group.append(piece)
    if group:
        yield tuple(group)


def _split(piece: Piece, task_bytes: int) -> Iterator[Piece]:
    count = (
        round(piece.bytes / task_bytes) if piece.kind in ("text", "jsonl") and piece.stop > 0 else 1
    )
    if count <= 1:
        yield piece
        return
    step = (
        -(-piece.stop // count // MB) * MB
    )  # whole documents of a long .txt, and no scrap at the end
    for start in range(0, piece.stop, step):
        stop = min(start + step, piece.stop)
        yield replace(piece, start=start, stop=stop, bytes=stop - start)
