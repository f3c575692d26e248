"""The run's own log: one JSON line per record, appended by one writer, readable at any moment, whatever was killed.

A record is flat. JSON has no NaN: a non-finite number is written as null and named in `nonfinite`
(`{"loss": null, "nonfinite": {"loss": "nan"}}`), so that every JSON reader keeps a numeric column and `read` gets the
number back. Null without the mark means unknown.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from pipeline.atomic import replace
from pipeline.errors import RunError

Record = dict[str, Any]


class Log:
    """Append-only records of one run; a partial last line left by a crash is cut off on opening."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open()

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._end_bytes = _whole_bytes(self.path)
        os.ftruncate(self._file, self._end_bytes)

    def append(self, record: Mapping[str, object]) -> None:
        """Write one whole line with one system call; it survives the death of this process from here on."""
        line = encode(record)
        try:
            written = os.write(self._file, line)
            while written < len(line):  # a nearly full disk or a signal: a short write is legal
                written += os.write(self._file, line[written:])
            if record.get("kind") == "event":
                os.fsync(self._file)  # a checkpoint that survives a power cut keeps its curve
        except OSError as error:
            os.ftruncate(self._file, self._end_bytes)  # a half line would swallow the next one
            raise RunError(
                f"log={self.path} cannot be written ({error.strerror}); mend that and --resume"
            ) from error
        self._end_bytes += len(line)

    def truncate_after(self, step: int) -> int:
        """Drop what was recorded past a checkpoint's step, all or nothing, and say how many records that were."""
        kept, dropped = [], 0
        for line, record in _lines(self.path):
            if record.get("step", 0) > step:
                dropped += 1
            else:
                kept.append(line)
        if dropped:
            replace(self.path, b"".join(kept))
            os.close(self._file)
            self._open()
        return dropped

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read(path: Path) -> Iterator[Record]:
    """Every whole record in order; a partial last line is not one, and a log that is not there has none."""
    return (record for _, record in _lines(path)) if path.exists() else iter(())


def _lines(path: Path) -> Iterator[tuple[bytes, Record]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = decode(line)
            except ValueError:
                raise RunError(
                    f"log={path} line {number} is not a record; restore the file or cut that line"
                ) from None
            yield line, record


def encode(record: Mapping[str, object]) -> bytes:
    flat: dict[str, object] = {}
    nonfinite: dict[str, str] = {}
    for key, value in record.items():
        if isinstance(value, list):  # of finite numbers or of such lists: an expert's load by layer
            json.dumps(value, allow_nan=False)
        elif not isinstance(value, str | int | float | None):
            value = _plain(key, value)
        if isinstance(value, float) and not math.isfinite(value):
            nonfinite[key] = str(value)  # nan, inf, -inf: what float() reads back
            value = None
        flat[key] = value
    if nonfinite:
        flat["nonfinite"] = nonfinite
    return (
        json.dumps(flat, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
        + b"\n"
    )


def decode(line: bytes) -> Record:
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"a record is a JSON object, not {line[:40]!r}")
    nonfinite = record.pop("nonfinite", {})
    if not isinstance(nonfinite, dict):
        raise ValueError(f"nonfinite={nonfinite!r} is not a table")
    for key, value in nonfinite.items():
        record[key] = float(value)
    return record


def _plain(key: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]  # numpy and 0-d torch scalars know how
    except (TypeError, ValueError):
        raise TypeError(
            f"{key}={value!r} is not a number, a string or None; records are flat"
        ) from None


def _whole_bytes(path: Path) -> int:
    """Where the last whole line ends; a power cut may also leave a tail of zero bytes, which holds no newline."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


class Tail:
    """Hands out whole records once each; after a rewrite it starts again from the top and says so."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rewound = False
        self._file: IO[bytes] | None = None

    def take(self, limit: int) -> list[Record]:
        """The next records, at most `limit`; `rewound` tells whether they start at the top."""
        self.rewound = self._follow()
        records: list[Record] = []
        while self._file is not None and len(records) < limit:
            start = self._file.tell()
            line = self._file.readline()
            if not line.endswith(b"\n"):
                self._file.seek(start)  # the writer is in the middle of it, or a crash was
                break
            with suppress(ValueError):  # a rotten line must not hide the good ones behind it
                records.append(decode(line))
        return records

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _follow(self) -> bool:
        try:
            there = self.path.stat()
        except FileNotFoundError:
            return False
        if self._file is not None:
            # Holding the old file open keeps its inode from being reused, so the comparison cannot be fooled.
            here = os.fstat(self._file.fileno())
            if (here.st_dev, here.st_ino) == (
                there.st_dev,
                there.st_ino,
            ) and there.st_size >= self._file.tell():
                return False
            self._file.close()
        self._file = self.path.open("rb")
        return True
