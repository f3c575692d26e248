"""Files appear whole or not at all: temporary name, fsync, rename."""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from pipeline.errors import DataError

TEMPORARY = ".part"  # what a killed writer leaves behind; never read, removed by the next run
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


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
        _sync_directory(path.parent)
    except OSError as error:
        raise as_data_error(error, path) from error
    finally:
        temporary.unlink(missing_ok=True)


def as_data_error(error: OSError, path: Path) -> DataError:
    if error.errno in _NO_ROOM:
        return DataError(f"{path}: no room left while writing ({error.strerror}); free space or choose another --out")
    if error.errno in {errno.EACCES, errno.EROFS, errno.EPERM}:
        return DataError(f"{path}: cannot be written ({error.strerror}); choose an --out you may write to")
    return DataError(f"{path}: {error.strerror or error}")


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
