"""The log of a run, log.jsonl: one JSON object per line, appended by rank 0 as things happen.

This module is the only reader and writer of that file. A record is flat and has a `kind`
("step", "eval", "moe", "event"), a `step` and a `time`. JSON has no NaN: a number that is not
finite is written as null and named in `nonfinite` (`{"loss": null, "nonfinite": {"loss": "nan"}}`),
and `read` restores it. Null without that mark means unknown.
"""

import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.atomic import open_regular, replace
from pipeline.errors import RunError

FILE = "log.jsonl"
# A record is a few hundred bytes, and a megabyte with the load of every expert. A longer line is
# damage, such as a hole that a crash left in the file.
MAX_LINE_BYTES = 16 << 20
TAIL_BYTES = 64 << 10  # at least the last hundred steps

Record = dict[str, Any]

# Readers calculate with these keys, so text under one of them makes a line invalid.
_NUMBERS = {
    *("time", "tokens", "flops", "loss", "bpb", "grad_norm", "lr", "tokens_per_s", "mfu"),
    *("memory_bytes", "wait_s", "world", "goodput", "start_s", "replay_s", "seconds"),
    *("blocked_s", "saved", "seq"),
}
_SEQUENCE = re.compile(rb'"seq":(\d{1,18})[,}]')


class Log:
    """Append records to a JSON-lines file. Opening it cuts off the partial line a crash left."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._sequence = 0
        self._open()

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._end_bytes = 0
        with self.path.open("rb") as lines:
            for line in lines:
                # A power cut may also leave a tail of zero bytes, which holds no newline.
                if not line.endswith(b"\n"):
                    break
                self._end_bytes += len(line)
                for number in _SEQUENCE.findall(line):
                    self._sequence = max(self._sequence, int(number))
        os.ftruncate(self._file, self._end_bytes)

    def append(self, record: Mapping[str, object]) -> None:
        """Write one line with one system call. It survives the death of this process."""
        is_event = record.get("kind") == "event"
        if is_event:
            # Copies of the log use this number to know which events they have. It is the time in
            # ms, but never goes back with the clock, and a number that a rollback dropped is not
            # used again.
            self._sequence = max(self._sequence + 1, time.time_ns() // 1_000_000)
            record = {**record, "seq": self._sequence}
        line = encode(record)
        try:
            written = os.write(self._file, line)
            while written < len(line):  # a nearly full disk or a signal: short writes are legal
                written += os.write(self._file, line[written:])
            if is_event:
                os.fsync(self._file)  # a checkpoint that survives a power cut keeps its curve
        except OSError as error:
            os.ftruncate(self._file, self._end_bytes)  # half a line would spoil the next one
            raise RunError(
                f"log={self.path} cannot be written ({error.strerror}); fix that and --resume"
            ) from error
        self._end_bytes += len(line)
        if is_event and not os.fstat(self._file).st_nlink:
            raise RunError(f"log={self.path} was deleted; restore a copy, or start a new run")

    def truncate_after(self, step: int) -> int:
        """Drop the records past a checkpoint's step, all or none; return how many there were."""
        kept = []
        dropped = 0
        for line, record in _lines(self.path, log=True):
            if record["step"] > step:
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


def read(path: Path, *, log: bool = True) -> Iterator[Record]:
    """Yield every record in order; a missing log has none, and a partial last line is skipped.

    Any other line that is not a record raises `RunError`, as does a file that cannot be read.
    With `log=False`, for faults.jsonl and the like, any JSON object is a record.
    """
    return (record for _, record in _lines(path, log=log))


def last_records(path: Path) -> list[Record]:
    """Return the newest records of a log that may be large; skip damaged lines."""
    tail = Tail(path, last_bytes=TAIL_BYTES)
    records = tail.take(TAIL_BYTES)
    tail.close()
    return records


class Tail:
    """Follow a log that another process writes. A rollback may rewrite the file meanwhile."""

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        self.path = path
        self.rewound = False
        self._last_bytes = last_bytes  # how much to read of a file that already exists
        self._file: BinaryIO | None = None

    def take(self, limit: int) -> list[Record]:
        """Return up to `limit` new records; `rewound` is true if they start at the top again."""
        self.rewound = self._follow()
        records: list[Record] = []
        while self._file is not None and len(records) < limit:
            start = self._file.tell()
            line = self._file.readline(MAX_LINE_BYTES)
            if not line.endswith(b"\n"):
                self._file.seek(start)  # the writer is in the middle of it, or died there
                break
            with suppress(ValueError):  # a damaged line must not hide the good ones after it
                records.append(checked(decode(line)))
        return records

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _follow(self) -> bool:
        """Open the file again if it was replaced or truncated; return whether it was."""
        if self._file is not None:
            try:
                there = self.path.stat()
            except OSError:
                return False
            # The old file stays open, so its inode cannot be reused for the new one.
            here = os.fstat(self._file.fileno())
            same_file = (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
            if same_file and there.st_size >= self._file.tell():
                return False
            self.close()
        self._file = _open_log(self.path)
        if self._file is not None and self._last_bytes is not None:
            size = self._file.seek(0, os.SEEK_END)
            if self._file.seek(max(0, size - self._last_bytes)):
                self._file.readline()  # the beginning of this line is missing
        return self._file is not None


def _open_log(path: Path) -> BinaryIO | None:
    """Open a log for reading; None if there is none."""
    try:
        return open_regular(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(
            f"log={printable(path)} cannot be read ({error.strerror}); fix that or move it away"
        ) from None


def _lines(path: Path, *, log: bool) -> Iterator[tuple[bytes, Record]]:
    file = _open_log(path)
    if file is None:
        return
    with file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES):
            number += 1
            if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                return
            try:
                record = decode(line)
                yield line, checked(record) if log else record
            except ValueError as error:
                text = f"log={printable(path)} line {number} is not a record ({error})"
                raise RunError(f"{text}; restore the file or cut that line") from None


def encode(record: Mapping[str, object]) -> bytes:
    flat: dict[str, object] = {}
    nonfinite: dict[str, str] = {}
    for key, value in record.items():
        # Lists hold finite numbers, or lists of them: the load of each expert by layer.
        if not isinstance(value, str | int | float | list | None):
            try:
                value = float(value)  # type: ignore[arg-type]  # numpy and 0-d torch scalars
            except (TypeError, ValueError):
                raise TypeError(f"{key}={value!r} is not a number; records are flat") from None
        if isinstance(value, float) and not math.isfinite(value):
            nonfinite[key] = str(value)  # nan, inf, -inf: what float() reads back
            value = None
        flat[key] = value
    if nonfinite:
        flat["nonfinite"] = nonfinite
    text = json.dumps(flat, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def decode(line: bytes) -> Record:
    """Parse one line; raise `ValueError` if it is not a JSON object."""
    try:
        record = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object: {line[:40]!r}")
    nonfinite = record.pop("nonfinite", {})
    if not isinstance(nonfinite, dict):
        raise ValueError(f"nonfinite={nonfinite!r} is not a table")
    for key, value in nonfinite.items():
        try:
            record[key] = float(value)
        except TypeError:
            raise ValueError(f"nonfinite.{key} is not text") from None
    return record


def checked(record: Record) -> Record:
    """Return a log record whose types every reader can rely on; raise `ValueError` otherwise."""
    record.setdefault("time", 0.0)
    step = record.get("step")
    valid = {
        "step": type(step) is int and 0 <= step < 2**53,
        "kind": isinstance(record.get("kind"), str),
        "event": record.get("kind") != "event" or isinstance(record.get("event"), str),
        "world": isinstance(record.get("world"), int | None),
    }
    for key, value in record.items():
        if isinstance(value, dict) or (key in _NUMBERS and not _is_number(value)):
            valid[key] = False
    seconds = record["time"]
    if valid.setdefault("time", seconds is not None):
        valid["time"] = math.isfinite(seconds)
    for key, is_valid in valid.items():
        if not is_valid:
            raise ValueError(f"{key} is missing or invalid")
    return record


def _is_number(value: object) -> bool:
    """Whether a JSON value is null or a number that fits into a double."""
    if isinstance(value, int):
        return abs(value) < 10**300
    return value is None or isinstance(value, float)


def printable(path: Path) -> str:
    """Return a path as text that any terminal and JSON accepts: a name may not be UTF-8."""
    return os.fsencode(path).decode(errors="replace")
