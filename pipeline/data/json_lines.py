"""Files of JSON lines that a person writes: examples, questions and prompts.

An error names the file and the line as an editor counts them, blank lines included. `readers.py`
reads files that are too large for memory, and counts what is malformed instead.
"""

import gzip
import io
import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.atomic import read_regular
from pipeline.errors import DataError

_MAX_BYTES = 2**30  # of a file, compressed and not
_SHOWN = 80  # characters of a value in a message


class Line(NamedTuple):
    fields: dict[str, Any]
    where: str  # file and line
    forms: str  # the keys that a line may have, for messages

    def text(self, key: str, *, empty: bool = False) -> str:
        return self.check(key, self.fields.get(key), empty=empty)

    def check(self, key: str, value: object, *, empty: bool = False) -> str:
        """Return the value if it is a text; `empty` allows one without characters."""
        if not isinstance(value, str) or not (value or empty):
            raise self.error(f"{key}={shown(value)} is not a text")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.error(f"{key}={shown(value)} has half of a surrogate pair") from None
        return value

    def error(self, problem: str) -> DataError:
        return DataError(f"{self.where}: {problem}; a line has {self.forms}")


def shown(value: object) -> str:
    """Return the repr of a value for a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def read_lines(path: Path, forms: str) -> list[Line]:
    """Return the objects of a file, which may be compressed with gzip; blank lines are skipped."""
    try:
        data = read_regular(path, _MAX_BYTES)
        if path.suffix.lower() == ".gz":
            data = gzip.GzipFile(fileobj=io.BytesIO(data)).read(_MAX_BYTES + 1)
            if len(data) > _MAX_BYTES:
                raise OSError(f"it unpacks to more than {_MAX_BYTES:,} bytes")
        # A byte order mark is not part of the first line.
        text = data.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error  # without the path a second time
        raise DataError(f"{path} cannot be read: {reason}; give a file of JSON lines") from None
    found = []
    # str.splitlines would also split at U+2028 and the like, which a JSON string may contain.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        found.append(Line(fields, f"{path}:{number}", forms))
        if not isinstance(fields, dict):
            raise found[-1].error("not a JSON object")
    if not found:
        raise DataError(f"{path} has no lines; a line has {forms}")
    return found
