"""Files appear whole or not at all: a temporary name, fsync, rename, and the folder's entry flushed too."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import xxhash

TEMPORARY = ".part"  # what a killed writer leaves behind; never read


@contextmanager
def replacing(path: Path, flush_name: bool = True) -> Iterator[BinaryIO]:
    """Open a file that takes its name only when the block ends well, its bytes on the disk before the name is.

    Of many files in one folder, one `sync_directory` at the end does for all their names.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        if flush_name:
            sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def replace(path: Path, content: bytes) -> None:
    """The small file whose content is at hand."""
    with replacing(path) as file:
        file.write(content)


def digest(path: Path) -> str:
    """xxh3 of a file's bytes."""
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            hasher.update(block)
    return hasher.hexdigest()


def sync_directory(path: Path) -> None:
    """What was renamed in a folder stays renamed after a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
