"""Any error in a command ends in one line and an exit code."""

import os
import signal
import subprocess
import sys

import pytest
import typer.main

from launch import __main__ as command_line
from tests.conftest import command, environment


def run(monkeypatch: pytest.MonkeyPatch, error: BaseException, **env: str) -> int:
    """Run a command that raises `error`; return the exit code."""

    def fail() -> None:
        raise error

    monkeypatch.setattr(command_line, "mount", lambda _: command_line.app.command("fail")(fail))
    monkeypatch.setattr(sys, "argv", ["launch", "fail"])
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    return ended.value.code


@pytest.fixture(autouse=True)
def no_extra_commands(monkeypatch):
    monkeypatch.setattr(typer.main, "get_command", typer.main.get_command.__wrapped__)
    kept = list(command_line.app.registered_commands)
    monkeypatch.setattr(command_line.app, "registered_commands", kept)


@pytest.mark.parametrize(
    ("error", "names"),
    [
        (ZeroDivisionError("division by zero"), "ZeroDivisionError"),
        (ValueError("two\nlines"), "ValueError: two lines"),
        (RecursionError("a" * 100_000 + "\n" * 50), "RecursionError"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_an_unexpected_error_is_one_line(monkeypatch, capsys, error, names) -> None:
    assert run(monkeypatch, error) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and names in line and "ISOFLOP_TRACEBACK=1" in line
    assert len(line) < 600


def test_a_path_that_the_system_refuses_is_named(monkeypatch, capsys) -> None:
    assert run(monkeypatch, OSError(36, "File name too long", "/some/" + "a" * 1000)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: /some/") and "File name too long" in line and len(line) < 600
    assert run(monkeypatch, OSError(28, "No space left on device")) == 2  # while it prints
    assert "output cannot be written" in capsys.readouterr().err


def test_the_traceback_is_shown_on_request(monkeypatch) -> None:
    with pytest.raises(ZeroDivisionError):
        run(monkeypatch, ZeroDivisionError(), ISOFLOP_TRACEBACK="1")


def test_an_interrupt_is_one_word(monkeypatch, capsys) -> None:
    assert run(monkeypatch, KeyboardInterrupt()) == 130
    assert capsys.readouterr().err.strip().endswith("interrupted")


def test_an_interrupt_during_an_import_is_not_ignored(tmp_path) -> None:
    """Python ignores exceptions in destructors, including that of Ctrl-C."""
    (tmp_path / "heavy.py").write_text(
        "import os, signal\n"
        "class Dropped:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        pass\n"
        "Dropped()\n"
        "print('went on')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", "import launch, heavy"],
        env=environment(PYTHONPATH=str(tmp_path)),
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells ignore it after &
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_closed_pipe_is_silent() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command("show", "--sizes"), stdout=writer, stderr=subprocess.PIPE, env=environment()
    )
    os.close(writer)
    assert done.returncode == 1 and done.stderr == b""
