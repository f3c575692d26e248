"""Shards and records appear whole or not at all, and what the disk says against it is a DataError."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from pipeline import atomic as files
from pipeline.errors import DataError

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def replacing(path: Path, flush_name: bool = True) -> Iterator[BinaryIO]:
    """Open a file that takes its name only when the block ends well."""
    try:
        with files.replacing(path, flush_name) as file:
            yield file
    except OSError as error:
        raise as_data_error(error, path) from error


def save(path: Path, content: bytes | npt.NDArray[Any], flush_name: bool = True) -> None:
    with replacing(path, flush_name) as file:
        if isinstance(content, bytes):
            file.write(content)
        else:
            np.save(file, content)


def nameable(path: Path) -> bool:
    """Whether its name is UTF-8: no record could hold another."""
    return not any("\ud800" <= character <= "\udfff" for character in str(path))


def unreadable(error: Exception, path: str | Path) -> DataError:
    """Whatever a damaged file makes its reader say; should it be a fault of ours, ISOFLOP_TRACEBACK=1 shows where."""
    if isinstance(error, OSError):
        return DataError(f"{path}: cannot be read ({error.strerror or error})")
    first = (str(error).strip().splitlines() or [""])[0]
    return DataError(
        f"{path}: cannot be read ({type(error).__name__}: {first}); fetch the file again"
    )


def as_data_error(error: OSError, path: Path) -> DataError:
    if error.errno in _NO_ROOM:
        return DataError(
            f"{path}: no room left while writing ({error.strerror}); free space or choose another --out"
        )
    return DataError(
        f"{path}: cannot be written ({error.strerror or error}); choose an --out you may write to"
    )
