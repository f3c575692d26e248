"""The lines a person reads, to the letter."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config.layers import load
from pipeline.planner.recipe import resolve
from pipeline.track.console import Console, data_warnings, format_record, header

STEP = {
    "kind": "step",
    "time": 1000.0,
    "step": 1200,
    "tokens": 1,
    "flops": 1,
    "loss": 3.14123,
    "grad_norm": 0.4211,
}
STEP |= {"lr": 2.9e-4, "tokens_per_s": 412_345.0, "mfu": 0.4131, "hash": "0123456789abcdef"}


def test_the_line_of_the_style_guide() -> None:
    line = "step  1200/19073 │ loss 3.1412 │ gnorm 0.42 │ lr 2.9e-4 │ 412k tok/s │ mfu 41.3% │ eta 3h12"
    assert format_record(STEP, 19073, eta_s=3 * 3600 + 12 * 60) == line
    assert "│ mfu     – │" in format_record(STEP | {"mfu": None}, 19073)


@pytest.mark.parametrize(
    "odd",
    [
        {"loss": 10.39721, "grad_norm": 12.345, "lr": 0.0, "tokens_per_s": 83.0},
        {
            "loss": float("nan"),
            "grad_norm": float("inf"),
            "lr": 1e-10,
            "tokens_per_s": 9_960.0,
            "mfu": 0.05,
        },
        {"loss": 123.456, "grad_norm": 1234.5, "lr": 1.0, "tokens_per_s": 999_600.0, "mfu": None},
        {"loss": None, "grad_norm": None, "lr": None, "tokens_per_s": None, "mfu": 1.0},
        {"loss": 9.999996, "tokens_per_s": 9_940.0},
    ],
)
def test_columns_stay(odd: dict[str, object]) -> None:
    usual = format_record(STEP, 19073)
    line = format_record(STEP | odd, 19073)
    if odd.get("lr") != 1e-10 and odd.get("mfu") != 1.0:  # these two alone are one character wider
        assert [i for i, c in enumerate(line) if c == "│"] == [
            i for i, c in enumerate(usual) if c == "│"
        ], line


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
    assert [line.split()[0] for line in lines] == [
        *("model", "data", "recipe", "layout", "time", "tracked")
    ]
    assert "tiny moe" in lines[0] and "active" in lines[0]
    assert "410k tokens │ 10 epochs over 41k" in lines[1]
    assert lines[5].endswith("sqlite:///x.db")
    assert all(len(line) <= 100 for line in lines)
    assert [line.split()[0] for line in data_warnings(config, 40_960, 99_999)] == ["warning:"] * 2
    assert list(data_warnings(config, 102_400, 100_000)) == []


def test_eval_and_event_lines() -> None:
    assert (
        format_record({"kind": "eval", "step": 1200, "loss": 3.2, "bpb": 1.04321}, 19073)
        == "eval  1200/19073 │ loss 3.2000 │ bpb 1.0432"
    )
    assert (
        format_record(
            {"kind": "event", "time": 1.0, "step": 1200, "event": "save", "seconds": 1.5}, 19073
        )
        == "note  1200/19073 │ save │ seconds 1.5"
    )


@pytest.mark.parametrize(
    ("per_step_s", "eta"), [(0.01, "1s"), (1, "1m40"), (100, "2h46"), (2000, "2d07")]
)
def test_eta_is_a_moving_average(
    capsys: pytest.CaptureFixture[str], per_step_s: float, eta: str
) -> None:
    console = Console(total_steps=200)
    console.record(
        STEP | {"step": 1, "time": 0.0}
    )  # then a long compilation that must be forgotten
    for step in range(2, 101):
        console.record(STEP | {"step": step, "time": 10_000 + step * per_step_s})
    console.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("eta –")
    assert lines[-1].endswith(f"eta {eta}")


def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(10, quiet=True)
    console.record(STEP)
    console.close()
    assert capsys.readouterr().out == ""


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
    assert format_record(STEP, 19073) in shown  # whole, though the terminal is narrower
    assert "1200/19073" in shown.split("eta –")[1]


def test_without_rich_and_mlflow_and_unicode() -> None:
    """Neither library is needed, an ASCII terminal gets ASCII, and a closed pipe is no error."""
    code = (
        "import sys; sys.modules['rich'] = sys.modules['mlflow'] = None; sys.modules['rich.progress'] = None\n"
        "sys.stdout.isatty = lambda: True\n"
        "from pipeline.track.console import Console\n"
        "import pipeline.track.sidecar\n"
        "console = Console(100)\n"
        "console.record({'kind': 'step', 'step': 7, 'loss': 1.0}); console.close()\n"
    )
    root = Path(__file__).parents[2]
    shown = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env={"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("step   7/100 | loss 1.0000 | gnorm    - |")


def test_training_side_imports_no_mlflow() -> None:
    modules = "pipeline.track.console, pipeline.track.sidecar"
    code = f"import sys, {modules}; assert 'mlflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)
