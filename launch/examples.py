"""How every command shows its examples."""


def examples(*lines: str) -> str:
    """An epilog with one example a line; typer folds single line ends."""
    return "Examples:\n\n" + "\n\n".join(lines)
