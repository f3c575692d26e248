"""Files appear whole or not at all: a temporary name, fsync, rename, and the folder's entry flushed too."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from pipeline.errors import RunError

TEMPORARY = ".part"  # what a killed writer leaves behind; never read


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes its name only when the block ends well, its bytes on the disk before the name is."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def replace(path: Path, content: bytes) -> None:
    """The small file whose content is at hand."""
    with replacing(path) as file:
        file.write(content)


@contextmanager
def appearing(directory: Path, option: str) -> Iterator[Path]:
    """A folder to fill, which takes its name when the block ends well; whatever is there already is refused."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise RunError(f"{option} {directory} is not empty; give another directory")
    aside = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        aside.mkdir(parents=True)
        yield aside
        if directory.exists():
            directory.rmdir()
        aside.rename(directory)
    except OSError as error:
        what = error.strerror or error
        raise RunError(f"{option} {directory} cannot be written: {what}; choose another place") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def sync_directory(path: Path) -> None:
    """What was renamed in a folder stays renamed after a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
