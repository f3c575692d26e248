"""`launch`: one typer app; every command's own imports wait until it runs, so that --help and show answer at once."""

import os
import signal
import sys
from typing import Annotated

import typer

from pipeline.errors import UserError

app = typer.Typer(
    name="launch",
    help="Pretraining with the scaling law built in.",
    epilog="Start with:  launch doctor  ·  launch show --size 1b  ·  make demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"isoflop {version('isoflop')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print it.", is_eager=True, callback=_version)
    ] = False,
) -> None: ...


def _mount() -> None:
    from launch import (
        bench,
        convert,
        dashboard,
        data,
        doctor,
        evaluate,
        generate,
        law,
        pretrain,
        show,
        slurm,
        sync,
        verify,
    )

    app.add_typer(data.app, name="data")
    app.add_typer(bench.app, name="bench")
    for module in (
        show,
        pretrain,
        verify,
        evaluate,
        generate,
        convert,
        slurm,
        law,
        dashboard,
        sync,
        doctor,
    ):
        module.register(app)


def main() -> None:
    """Exit codes: 0 done, 2 something the user can mend (one line), 75 saved as a signal asked, with more to do, 130
    interrupted, 1 a fault of ours."""
    try:
        _mount()
        app()
    except UserError as error:
        if os.environ.get("ISOFLOP_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except (KeyboardInterrupt, SystemExit) as ended:
        if isinstance(ended, SystemExit) and ended.code != 130:  # typer's word for an interrupt
            raise
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `launch show | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


if __name__ == "__main__":
    main()
