"""Options and texts that several commands share."""


def examples(*lines: str) -> str:
    """Return an epilog with one example per line; typer joins lines that no blank line separates."""
    return "Examples:\n\n" + "\n\n".join(lines)
