"""How every command prints: one table style for people, one JSON form for programs."""

import json
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

PIPED_COLUMNS = 120  # rich assumes 80 where there is no terminal, which wraps our tables


def print_json(data: Any) -> None:
    """Print data as JSON; numbers that are not finite become null."""
    from pipeline.units import finite

    # Python would write NaN, which is not JSON, so other parsers refuse it.
    typer.echo(json.dumps(finite(data), indent=2, ensure_ascii=False))


def new_console() -> "Console":
    """Return a console for tables: as wide as the terminal, or 120 columns in a pipe or file."""
    from rich.console import Console

    # rich would color every number.
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=PIPED_COLUMNS, highlight=False)


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence["str | Text"]],
    texts: Collection[str] = (),
) -> "Table":
    """Return a table with its first column and `texts` aligned left, and numbers aligned right."""
    from rich.table import Table
    from rich.text import Text

    # As Text, so that brackets in names of runs and tasks are not read as markup.
    found = Table(title=Text(title, "bold"), title_justify="left")
    for index, name in enumerate(columns):
        found.add_column(name, justify="right" if index and name not in texts else "left")
    for row in rows:
        found.add_row(*map(Text.assemble, row))
    return found


def print_warnings(console: "Console", warnings: Iterable[str]) -> None:
    for warning in warnings:
        console.print(f"! {warning}", markup=False, style="bold yellow")
