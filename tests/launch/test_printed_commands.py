"""Every `launch …` command that we print must exist, with its options, in the real app."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.text import Text

from launch import __main__ as command_line

ROOT = Path(__file__).parents[2]
TEXTS = [
    ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "slurm").glob("*")),
    *sorted((ROOT / "configs").rglob("*.toml")),
]  # fmt: skip
INLINE = re.compile(r"`(?:[A-Z_]+=\S+ )*launch ([^`]+)`")
LINE = re.compile(r"^[#\s+$]*(?:[A-Z_]+=\S+ )*launch (\S.*)$", re.MULTILINE)


@pytest.fixture(scope="module")
def app() -> Any:
    if not command_line.app.registered_groups:
        command_line.mount()
    return typer.main.get_command(command_line.app)


def resolve(app: Any, words: list[str]) -> tuple[Any, list[str]]:
    """Follow the names of groups and commands; return the command and the words after it."""
    command = app
    while hasattr(command, "commands"):
        assert words and words[0] in command.commands, f"no command {words[:1]}"
        command = command.commands[words[0]]
        words = words[1:]
    return command, words


def parse(app: Any, line: str) -> None:
    """Parse a complete command without running it."""
    line = re.split(r"\s#|\s──|;? → ", line)[0]
    for part in re.split(r"; launch ", line):
        command, rest = resolve(app, shlex.split(part))
        command.make_context(command.name, rest)


def check_options(app: Any, line: str) -> None:
    """Check a command in running text, which may be incomplete: its name and its options."""
    words = [word.partition("=")[0] for word in re.split(r"[\s,]+", line)]
    if len(words) > 1 and words[1] == "|":
        return  # `launch fit | forecast`: a list of commands
    command, rest = resolve(app, words)
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    unknown = {word for word in rest if word.startswith("--")} - known - {"--help"}
    assert not unknown, f"no option {unknown}"


def complain(check: Any, app: Any, line: str) -> str:
    try:
        check(app, line)
    except Exception as error:
        return f"launch {line}: {error}"
    return ""


def blocks(text: str) -> Iterator[str]:
    """Yield code blocks, or all of a file that is not Markdown."""
    yield from re.findall(r"```[a-z]*\n(.*?)```", text, re.DOTALL) if "```" in text else [text]


def test_commands_in_texts(app) -> None:
    complaints = []
    count = 0
    for path in TEXTS:
        text = path.read_text()
        for block in blocks(text):
            for line in LINE.findall(block.replace("\\\n", " ")):
                count += 1
                complaints.append(complain(parse, app, line))
        for line in INLINE.findall(text):
            count += 1
            complaints.append(complain(check_options, app, line))
    assert count > 80
    assert not (found := [line for line in complaints if line]), "\n".join(found)


def test_the_readme_shows_the_commands_of_the_demo() -> None:
    readme = " ".join((ROOT / "README.md").read_text().replace("\\\n", " ").split())
    recipe = (ROOT / "Makefile").read_text().partition("\ndemo:")[2].partition("\npicture:")[0]
    for name, value in (("DATA", "data/demo"), ("RUNS", "runs/demo"), ("LARGER", "500k")):
        recipe = recipe.replace(f"$({name})", value)
    shown = re.findall(r"\$\(LAUNCH\) (.+?)(?= --json|$)", recipe, re.MULTILINE)
    added = re.findall(r"\[.command.\]\)'\) (.*)", recipe)
    assert (len(shown), len(added)) == (6, 1)
    assert [command for command in (*shown, *added) if command not in readme] == []


def commands(command: Any) -> Iterator[Any]:
    yield command
    for each in getattr(command, "commands", {}).values():
        yield from commands(each)


def test_commands_in_help(app) -> None:
    lines = LINE.findall("\n".join(command.help or "" for command in commands(app)))
    assert len(lines) > 25
    assert [wrong for line in lines if (wrong := complain(parse, app, line))] == []


def test_help_texts_are_shown_completely(app) -> None:
    """typer treats [text] in a help as markup and does not print it."""
    helps = [getattr(each, "help", None) or "" for c in commands(app) for each in c.params]
    assert [text for text in helps if Text.from_markup(text).plain != text] == []
