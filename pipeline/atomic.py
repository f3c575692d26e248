"""Atomic files and directories, checksums, locks, and reading only regular files.

Every function raises `OSError` with the path in `filename`; the caller turns it into its own error.
"""

import errno
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import xxhash

if TYPE_CHECKING:
    from filelock import BaseFileLock

# Suffix of unfinished files. Only a killed process leaves one behind, and nothing reads it.
TEMPORARY = ".part"
# A run.json, config.json or manifest is a few KB; a larger one is damaged or hostile.
MAX_RECORD_BYTES = 64 << 20


def temporary_name(path: Path) -> Path:
    """Return an unused name in the directory of `path`, so that a rename stays on one disk."""
    if not path.name:  # "", "." or "/"
        raise IsADirectoryError(errno.EISDIR, "not a file name", str(path))
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY}")


@contextmanager
def replacing(path: Path, flush_name: bool = True) -> Iterator[BinaryIO]:
    """Open a file that gets its name only when the block succeeds, after its bytes are on disk.

    When writing many files into one directory, pass `flush_name=False` and call
    `sync_directory` once at the end.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        # A rename would replace the device itself: as root, /dev/null would become a file.
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    temporary = temporary_name(path)
    try:
        with temporary.open("wb") as file:
            yield file
            # The bytes must be on disk before the name is, or a power cut leaves an empty file.
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        if flush_name:
            sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def replace(path: Path, content: bytes) -> None:
    """Write a small file atomically."""
    with replacing(path) as file:
        file.write(content)


@contextmanager
def directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory that is renamed to `path` when the block succeeds.

    An existing empty directory is replaced. Anything else at `path` raises `FileExistsError`,
    before the block runs. If the block fails, nothing is left.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(errno.EEXIST, "not an empty directory", str(path))
    temporary = temporary_name(path)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if path.exists():
            path.rmdir()  # fails if someone has filled it meanwhile
        temporary.rename(path)
        sync_directory(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sync_directory(path: Path) -> None:
    """Flush a directory's entries, so that renames in it survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; refuse FIFOs, devices and directories, which could block."""
    if "\0" in str(path):  # os.open raises a ValueError
        raise OSError(errno.EINVAL, "the name has a NUL character")
    # O_NONBLOCK: a plain open() of a FIFO waits for a writer. It has no effect on regular files.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(handle, "rb")


def read_regular(path: Path, max_bytes: int = MAX_RECORD_BYTES) -> bytes:
    """Read a whole file that must be regular and at most `max_bytes` long."""
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)  # one more, to notice that it is too long
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes:,} bytes", str(path))
    return content


def digest(path: Path) -> str:
    """Return the xxh3-128 checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def lock(path: Path, wait_s: float = 0.0) -> "BaseFileLock | None":
    """Lock a file and return the lock, or None if another process still holds it after `wait_s`.

    Keep the returned object: the lock ends with its `release()`, with the object, or with the
    process, however it dies.
    """
    from filelock import FileLock, Timeout  # 30 ms, which `launch show` need not wait for

    # Not thread-local: the thread that releases the lock may not be the one that took it.
    held = FileLock(path, timeout=wait_s, thread_local=False, poll_interval=0.1)
    try:
        held.acquire()
    except Timeout:
        return None
    return held


@contextmanager
def locked(path: Path, wait_s: float = 0.0) -> Iterator[bool]:
    """Hold a lock for the block; yield False if another process still has it after `wait_s`."""
    held = lock(path, wait_s)
    try:
        yield held is not None
    finally:
        if held is not None:
            held.release()
