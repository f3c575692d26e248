"""Follow a log that another process appends to, and that a resume may rewrite underneath."""

import os
from contextlib import suppress
from pathlib import Path
from typing import IO

from pipeline.runs.log import Record, decode


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
