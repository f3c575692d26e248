"""A directory that appears whole or not at all."""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.atomic import TEMPORARY
from pipeline.errors import RunError


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
        raise RunError(
            f"{option} {directory} cannot be written: {what}; choose another place"
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
