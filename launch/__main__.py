"""`launch`: one typer app. Each command imports its own parts, so that --help answers at once."""

import errno
import os
import sys
from collections.abc import Iterable
from importlib import import_module
from inspect import cleandoc
from typing import Annotated

import typer

from pipeline.errors import UserError

# Every module registers its commands with the app. --help lists them in this order, the order of a
# user's work, each below the title of its panel.
MODULES = {
    "doctor": "Prepare", "data": "Prepare", "show": "Prepare", "bench": "Prepare",
    "verify": "Prepare", "pretrain": "Train", "finetune": "Train", "sweep": "Train",
    "jobs": "Watch", "dashboard": "Watch", "law": "Forecast", "forecast": "Forecast",
    "trained": "Use a model", "generate": "Use a model",
}  # fmt: skip
GROUPS = ("data", "bench", "sweep")
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
    from importlib.metadata import version

    if asked:
        print(f"isoflop {version('isoflop')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_version)
    ] = False,
) -> None: ...


def mount(names: Iterable[str] = MODULES) -> None:
    """Add the commands of modules to the app."""
    for name in names:
        commands = import_module(f"launch.{name}").app
        for command in commands.registered_commands:
            # typer prints the epilog below the options, which fill a screen. Examples come first.
            command.help = f"{cleandoc(command.callback.__doc__)}\n\n{command.epilog}"
            command.epilog = None
            command.rich_help_panel = None if name in GROUPS else MODULES[name]
        # Only a group of commands, such as `launch data prepare`, has a name.
        group = name if name in GROUPS else None
        app.add_typer(commands, name=group, rich_help_panel=MODULES[name])


def describe(error: Exception) -> tuple[str, int]:
    """Return an error as one line, and the exit code."""
    if isinstance(error, UserError):  # its message already names key, value and remedy
        return " ".join(str(error).splitlines()), 2  # it may quote a name with a line break
    if isinstance(error, typer.TyperException):
        return _shorten(_usage(error)), 2
    if isinstance(error, OSError) and error.filename is not None:
        # The system refuses a path: it is missing, not permitted, too long, on a full disk, …
        path = _shorten(error.filename)
        return f"{path}: {error.strerror}; check the path and its permissions", 2
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # while printing the output
        return f"the output cannot be written: {error.strerror}; make space on its disk", 2
    # A bug of ours, not a wrong setting. Exit code 1 lets scripts distinguish the two.
    what = _shorten(f"{type(error).__name__}: {error}")
    return f"unexpected {what}; set ISOFLOP_TRACEBACK=1 to see the traceback", 1


def _usage(error: typer.TyperException) -> str:
    """Return a usage error as one line that names the command's help; empty if that was printed."""
    from pydantic import ValidationError

    text = error.format_message().rstrip(".").replace("Input should be", "must be")
    if not text:  # a group without a command has printed its help
        return ""
    if isinstance(error.__cause__, ValidationError):  # it has the refused value
        value = error.__cause__.errors()[0]["input"]
        name, _, problem = text.removeprefix("Invalid value for '").partition("': ")
        text = f"{name}={value}: {problem}"
    context = getattr(error, "ctx", None)
    command = context.command_path if context else app.info.name
    return f"{text}; see `{command} --help`"


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
        # If a module has the name of the command, no other one is imported.
        first = sys.argv[1:2]
        mount(first if set(first) & set(MODULES) else MODULES)
        # Not standalone: typer returns exit codes and lets its own errors pass.
        code = app(standalone_mode=False, prog_name=app.info.name)
        if code == 130:  # typer's exit code for Ctrl-C
            _interrupted()
        sys.exit(code if isinstance(code, int) else 0)
    except KeyboardInterrupt:
        _interrupted()
    except Exception as error:
        if os.environ.get("ISOFLOP_TRACEBACK"):
            raise
        message, code = describe(error)
        if message:
            print(f"error: {message}", file=sys.stderr)
        sys.exit(code)


def _interrupted() -> None:
    print("interrupted", file=sys.stderr)
    sys.exit(130)


if __name__ == "__main__":
    main()
