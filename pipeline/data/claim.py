"""An output directory belongs to one set of arguments and, while it is written, to one process."""

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.data.files import as_data_error, replacing
from pipeline.data.recipe import Recipe
from pipeline.data.shards import MANIFEST
from pipeline.errors import DataError
from pipeline.files import TEMPORARY

MODEL = "tokenizer.model"
RECIPE = "recipe.json"
WORK = ".work"  # what is finished of an unfinished corpus


@contextmanager
def claimed(out: Path, recipe: Recipe, inputs: str) -> Iterator[None]:
    """Take the directory, or say in one line why not."""
    now = {"recipe": recipe.model_dump(mode="json"), "inputs": inputs}
    try:
        if out.is_dir() and not (out / RECIPE).exists() and any(out.iterdir()):
            raise DataError(f"out={out}: not empty and not made by `launch data prepare`; choose another directory")
        out.mkdir(parents=True, exist_ok=True)
        if not (out / RECIPE).exists():
            with replacing(out / RECIPE) as file:
                file.write(json.dumps(now, indent=1).encode())
        _same_arguments(out, now)
        with (out / RECIPE).open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(f"out={out}: another `launch data prepare` is writing there; wait for it") from None
            clear(out)
            try:
                yield
            except DataError:
                _leave(out)
                raise
    except OSError as error:
        raise as_data_error(error, out) from error


def clear(out: Path) -> None:
    """What killed writers left, of this call or an earlier one."""
    for left in out.rglob(f"*{TEMPORARY}"):
        left.unlink(missing_ok=True)


def _leave(out: Path) -> None:
    """Nothing worth keeping, nothing left: the next call may come with other arguments."""
    made = [*out.glob(MANIFEST), *out.glob("*.idx"), *out.glob(f"{WORK}/*/*.items.npy")]
    if not made:
        shutil.rmtree(out / WORK, ignore_errors=True)
        for name in (MODEL, RECIPE):
            (out / name).unlink(missing_ok=True)


def _same_arguments(out: Path, now: dict[str, Any]) -> None:
    try:
        before = json.loads((out / RECIPE).read_text())
        old, new = before["recipe"], json.loads(json.dumps(now["recipe"]))
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{out / RECIPE}: damaged; choose another --out or remove this one") from None
    for key in sorted(new, key=lambda key: key != "tokenizer"):  # the rest follows from it
        if old.get(key) != new[key]:
            raise DataError(
                f"out={out}: made with {key}={old.get(key)!r}, now {new[key]!r}; "
                "choose another --out or remove this one"
            )
    if before.get("inputs") != now["inputs"]:
        raise DataError(f"out={out}: its input files have changed since; choose another --out or remove this one")
