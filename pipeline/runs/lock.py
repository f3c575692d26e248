"""One process at a time, for as long as it lives: the kernel drops the lock with its holder."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def hold(path: Path, wait_s: float) -> Iterator[bool]:
    """Lock a folder, or a file made for it; yields False if another holder outlasted the wait."""
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    handle = os.open(path, flags, 0o644)
    try:
        yield _acquire(handle, wait_s)
    finally:
        os.close(handle)


def _acquire(handle: int, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.1)
        except OSError:
            return True  # a filesystem without locks: going on unguarded beats not tracking
        else:
            return True
