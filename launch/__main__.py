"""`launch`: one typer app. Each command imports its own parts, so that --help answers at once."""

import os
import sys
from importlib import import_module
from importlib.metadata import version
from typing import Annotated

import typer

from pipeline.errors import UserError

# Every module registers its commands with the app, in the order in which --help lists them.
MODULES = (
    "data", "bench", "show", "pretrain", "finetune", "verify", "trained", "generate", "jobs", "law",
    "dashboard", "doctor",
)  # fmt: skip
MAX_MESSAGE = 400  # characters; some exceptions quote whole files

app = typer.Typer(
    name="launch",
    help="Pretraining with the scaling law built in.",
    epilog="Start with:  launch doctor  ·  launch show --size 1b  ·  make demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # main() prints errors itself, in one line
    context_settings={"help_option_names": ["-h", "--help"]},
)


# The option is eager: it answers before typer complains about a missing command.
def _version(asked: bool) -> None:
    if asked:
        print(f"isoflop {version('isoflop')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_version)
    ] = False,
) -> None: ...


def mount() -> None:
    """Add the commands of every module to the app."""
    for name in MODULES:
        module = import_module(f"launch.{name}")
        if hasattr(module, "register"):
            commands = typer.Typer()
            module.register(commands)
        else:
            commands = module.app
        # Only a group of commands, such as `launch data prepare`, has a name.
        app.add_typer(commands, name=name if name in ("data", "bench") else None)


def describe(error: Exception) -> tuple[str, int]:
    """Return an error as one line, and the exit code."""
    if isinstance(error, UserError):  # its message already names key, value and remedy
        return str(error), 2
    if isinstance(error, OSError) and error.filename is not None:
        # The system refuses a path: it is missing, not permitted, too long, on a full disk, …
        path = _shorten(error.filename)
        return f"{path}: {error.strerror}; check the path and its permissions", 2
    # A bug of ours, not a wrong setting. Exit code 1 lets scripts distinguish the two.
    what = _shorten(f"{type(error).__name__}: {error}")
    return f"unexpected {what}; set ISOFLOP_TRACEBACK=1 to see the traceback", 1


def _shorten(value: object) -> str:
    line = " ".join(str(value).split())  # without line breaks: an error is one line
    return line if len(line) <= MAX_MESSAGE else line[:MAX_MESSAGE] + "…"


def main() -> None:
    """Run a command and turn every ending into an exit code.

    0: success. 1: an unexpected error. 2: an error that the user can fix, in one line.
    75: training stopped on request with steps left. 130: interrupted.
    Typer itself ends a command whose output pipe is closed (`launch show | head`), with 1.
    """
    try:
        mount()
        app()
    except KeyboardInterrupt:
        _interrupted()
    except SystemExit as ended:
        if ended.code == 130:  # typer's exit code for Ctrl-C
            _interrupted()
        raise
    except Exception as error:
        if os.environ.get("ISOFLOP_TRACEBACK"):
            raise
        message, code = describe(error)
        print(f"error: {message}", file=sys.stderr)
        sys.exit(code)


def _interrupted() -> None:
    print("interrupted", file=sys.stderr)
    sys.exit(130)


if __name__ == "__main__":
    main()
