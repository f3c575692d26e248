"""The command line: parse, call pipeline, print."""

import os
import signal
from types import FrameType


def _interrupt(_number: int, frame: FrameType | None) -> None:
    """End the process at once if Ctrl-C arrives during an import.

    Python's own handler raises an exception. The first imports end with a traceback, and some
    libraries ignore it, so that the command continues. Ending here leaves no damaged file, because
    a file gets its name when it is complete."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os.write(2, b"interrupted\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's `&` ignores SIGINT
    signal.signal(signal.SIGINT, _interrupt)
