"""Replace a small file so that a reader, or a crash, meets the old one or the new one and nothing between."""

import os
from pathlib import Path


def replace(path: Path, content: bytes) -> None:
    """Write beside, flush to disk, rename, and flush the folder's entry too."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
