"""The exact lines that the console prints."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config.layers import load
from pipeline.planner.check import resolve
from pipeline.track.console import Console, format_record, header, run_warnings

ROOT = Path(__file__).parents[2]
STEP = {
    "kind": "step",
    "time": 1000.0,
    "step": 1200,
    "tokens": 1,
    "flops": 1,
    "loss": 3.14123,
    "grad_norm": 0.4211,
    "lr": 2.9e-4,
    "tokens_per_s": 412_345.0,
    "mfu": 0.4131,
}


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (
            STEP,
            "step  1200/19073 │ loss 3.1412 │ gnorm 0.42 │ lr 2.9e-4 │  412k tok/s │ mfu 41.3% │ "
            "eta 3h12",
        ),
        (
            {"kind": "eval", "step": 1200, "loss": 3.2, "bpb": 1.04321},
            "eval  1200/19073 │ loss 3.2000 │ bpb 1.0432",
        ),
        (
            {"kind": "event", "time": 1.0, "step": 1200, "event": "save", "saved": 1200}
            | {"seconds": 1.5, "blocked_s": 0.0},
            "note  1200/19073 │ save │ saved 1200 │ took 1.5 s",
        ),
        (
            {"kind": "event", "step": 1200, "event": "resume", "world": 2, "start_s": 8.321},
            "note  1200/19073 │ resume │ ranks 2 │ startup 8.32 s",
        ),
    ],
)
def test_a_line_of_each_kind(record: dict[str, object], line: str) -> None:
    assert format_record(record, 19073, eta_s=3 * 3600 + 12 * 60) == line


@pytest.mark.parametrize(
    "odd",
    [
        {"loss": 10.39721, "grad_norm": 12.345, "lr": 0.0, "tokens_per_s": 83.0},
        {"loss": float("nan"), "grad_norm": float("inf"), "tokens_per_s": 9_960.0, "mfu": 0.05},
        {"loss": 123.456, "grad_norm": 1234.5, "lr": 1.0, "tokens_per_s": 999_600.0, "mfu": None},
        {"loss": None, "grad_norm": None, "lr": None, "tokens_per_s": None},
        {"loss": 9.999996, "tokens_per_s": 9_940.0},
    ],
)
def test_columns_stay(odd: dict[str, object]) -> None:
    usual, line = (format_record(record, 19073) for record in (STEP, STEP | odd))
    edges = [[i for i, c in enumerate(text) if c == "│"] for text in (usual, line)]
    assert edges[0] == edges[1], line


def test_expert_figures_are_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(40)
    console.record({"kind": "moe", "step": 3, "load": [[0.5, 0.5]], "worst_imbalance": 2.667})
    console.record(STEP | {"step": 3})
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("step  3/40 │") and "│ imbalance 2.67 │ eta" in line


def test_header_and_warnings() -> None:
    config = load(size="tiny", arch="moe", sets=["train.steps=100", "train.batch_tokens=4096"])
    config = resolve(config, ranks=2, gpu=False)
    lines = list(
        header(config, 2, train_tokens=40_960, device="CPU", tracked="MLflow at sqlite:///x.db")
    )
    topics = ["model", "data", "recipe", "layout", "time", "tracked"]
    assert [line.split()[0] for line in lines] == topics
    assert "tiny moe" in lines[0] and "active" in lines[0]
    assert "410k tokens │ 10 epochs over 41k" in lines[1]
    assert lines[5].endswith("sqlite:///x.db")
    assert all(len(line) <= 100 for line in lines)
    assert [line.split()[0] for line in run_warnings(config, 40_960, 99_999)] == ["warning:"] * 2
    assert list(run_warnings(config, 102_400, 100_000)) == []
    assert "--valid-share" in next(run_warnings(config, 5_000_000, 57_196))
    for sets, noted in ((["model.seq=64"], 1), (["model.seq=64", "model.generator=0.5"], 0)):
        spec = load(size="tiny", arch="electra", sets=["train.steps=9", *sets])
        notes = run_warnings(resolve(spec, ranks=1, gpu=False), 10**9, 10**9)
        assert ["model.generator" in note for note in notes] == [True] * noted


@pytest.mark.parametrize(
    ("per_step_s", "eta"), [(0.01, "1s"), (1, "1m40"), (100, "2h46"), (2000, "2d07")]
)
def test_eta_is_a_moving_average(capsys, per_step_s, eta):
    """A long compilation after the first step soon has no effect; with quiet nothing is printed."""
    for quiet in (False, True):
        console = Console(200, quiet=quiet)
        console.record(STEP | {"step": 1, "time": 0.0})
        for step in range(2, 101):
            console.record(STEP | {"step": step, "time": 10_000 + step * per_step_s})
        console.close()
        lines = capsys.readouterr().out.splitlines()
        if quiet:
            assert lines == []
        else:
            assert lines[0].endswith("eta –") and lines[-1].endswith(f"eta {eta}")


def test_a_terminal_shows_a_bar_below_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    console = Console(19073)
    console.record(STEP)
    console.close()
    shown = terminal.getvalue()
    assert format_record(STEP, 19073) in shown  # the whole line, although the terminal is narrower
    assert "1200/19073" in shown.split("eta –")[1]


def test_without_rich_mlflow_and_unicode() -> None:
    """Neither library is needed, training imports no MLflow, and an ASCII terminal gets ASCII."""
    code = (
        "import sys\n"
        "for name in ('rich', 'rich.progress', 'mlflow'): sys.modules[name] = None\n"
        "sys.stdout.isatty = lambda: True\n"
        "from pipeline.track.console import Console\n"
        "import pipeline.track.sidecar\n"
        "console = Console(100)\n"
        "console.record({'kind': 'step', 'step': 7, 'loss': 1.0}); console.close()\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("step   7/100 | loss 1.0000 | gnorm    - |")
