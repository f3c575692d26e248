"""Kill the processes of a private Ray session once its driver is gone, even by SIGKILL.

A program of its own, because it must outlive the driver: `python ray_guard.py SESSION_DIR`, with a
pipe from the driver as stdin. Ray's servers die with the driver, but its agents first try to reach
them for a minute.
"""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path


def belongs(process: Path, session: str) -> bool:
    """Whether Ray renamed the process to ray::… and it has a file of the session open."""
    # Others may read these files too, for example a person who looks at the logs.
    if not (process / "cmdline").read_bytes().startswith(b"ray::"):
        return False
    return any(str(handle.readlink()).startswith(session) for handle in (process / "fd").iterdir())


def main(session: str) -> None:
    sys.stdin.read()  # blocks until the driver, which has the only other end, is gone
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or is another user's
            if belongs(process, session):
                os.kill(int(process.name), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
