"""An output directory belongs to one set of arguments once it is finished, and to one process while it is written.

Until then all is under .work, by the fingerprint of the arguments: others start beside it, and nothing is lost.
"""

import fcntl
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.atomic import TEMPORARY
from pipeline.data.files import as_data_error, nameable, save
from pipeline.data.shards import MANIFEST
from pipeline.errors import DataError, UserError

RECIPE = "recipe.json"
WORK = ".work"  # what is finished of an unfinished corpus


def finished(out: Path, arguments: dict[str, Any]) -> bool:
    """Whether a corpus is there, of these arguments; of others it is an error."""
    if not (out / MANIFEST).exists():
        return False
    try:
        before = json.loads((out / RECIPE).read_text())
        old, new = dict(before["recipe"]), json.loads(json.dumps(arguments["recipe"]))
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(
            f"{out / RECIPE}: damaged; choose another --out or remove this one"
        ) from None
    for key in sorted(new, key=lambda key: key != "tokenizer"):  # the rest follows from it
        if old.get(key) != new[key]:
            raise DataError(
                f"out={out}: made with {key}={old.get(key)!r}, now {new[key]!r}; "
                "choose another --out or remove this one"
            )
    if before.get("inputs") != arguments["inputs"]:
        raise DataError(
            f"out={out}: its input files have changed since; choose another --out or remove this one"
        )
    return True


@contextmanager
def claimed(out: Path, fingerprint: str, say: Callable[[str], None]) -> Iterator[Path]:
    """Take the directory, or say in one line why not; gives the folder of what these arguments have finished."""
    work = out / WORK
    if not nameable(out):
        raise DataError(f"out={str(out)!r}: a name that is not UTF-8; choose another --out")
    try:
        if out.is_dir() and not work.exists() and any(out.iterdir()):
            raise DataError(
                f"out={out}: not empty and not made by `launch data prepare`; choose another directory"
            )
        if out.exists() and not out.is_dir():
            raise DataError(f"out={out}: a file, and shards need a directory; choose another --out")
        made = not out.exists()
        work.mkdir(parents=True, exist_ok=True)
        with (work / "lock").open("ab") as lock:  # for writing: NFS locks no other
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(
                    f"out={out}: another `launch data prepare` is writing there; wait for it"
                ) from None
            mine = work / fingerprint
            mine.mkdir(exist_ok=True)
            for other in work.iterdir():
                if other.is_dir() and other != mine:
                    say(
                        f"{other}: unfinished work of other arguments or inputs; it goes when this corpus is finished"
                    )
            for left in work.rglob(f"*{TEMPORARY}"):  # by killed writers
                left.unlink(missing_ok=True)
            try:
                yield mine
            except UserError:
                if not [*mine.glob("*.idx"), *mine.glob("*.items.npy")]:  # nothing worth keeping
                    shutil.rmtree(mine, ignore_errors=True)
                if not any(entry.is_dir() for entry in work.iterdir()):
                    shutil.rmtree(work)
                    if made:
                        out.rmdir()
                raise
    except OSError as error:
        raise as_data_error(error, Path(error.filename or out)) from error


def publish(work: Path, out: Path, names: Sequence[str], arguments: dict[str, Any]) -> None:
    """Move the files to where they belong; killed in the middle, the next call moves the rest."""
    for other in work.parent.iterdir():
        if other.is_dir() and other != work:
            shutil.rmtree(other)
    for left in (path for kind in ("bin", "idx", "jsonl") for path in out.glob(f"*.{kind}")):
        if left.name not in names:  # of other arguments, which were killed here
            left.unlink()
    for name in names:
        if (work / name).exists():
            (work / name).rename(out / name)
    save(out / RECIPE, json.dumps(arguments, indent=1).encode())  # flushes the other names too
