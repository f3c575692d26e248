"""Whole runs through the command line: the same numbers in every layout and after every interruption."""

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.conftest import command, environment, flip_bit, launch, records, worlds
from tests.forks import Launched
from tests.track.mlflow_server import until

STEPS = 12
TINY = (
    "--size", "tiny", "--recipe", "adamw", "--steps", STEPS, "--no-track", "--set", "model.seq=64",
    "--set", "train.batch_tokens=1024",
    "--set", "train.save_every=4", "--set", "train.eval_every=6", "--set", "train.eval_batches=2",
    "--set", "optim.lr=0.001", "--set", "optim.clip=0.3",  # every gradient is clipped
)  # fmt: skip
GOLDEN = {
    "loss": [6.257097, 6.223464, 6.202397, 6.153694, 6.103849, 6.042339,
             5.997715, 5.963490, 5.918545, 5.882584, 5.815598, 5.792021],
    "eval": 5.794122,
}  # fmt: skip


def losses(run: Path, kind: str = "step") -> list[float]:
    return [r["loss"] for r in records(run, kind)]


def hashes(run: Path) -> list[str]:
    return [r["hash"] for r in records(run, "step")]


@pytest.fixture(scope="module")
def base(corpus, tmp_path_factory) -> Path:
    """Two processes, ZeRO-1, never interrupted: the run that the others are compared with."""
    out = tmp_path_factory.mktemp("runs") / "base"
    options = ("--data", corpus, "--nproc", 2, "--out", out)
    # Not a fork: what a user runs.
    done = subprocess.run(
        command("pretrain", *TINY, *options), capture_output=True, text=True, env=environment()
    )
    assert f"step {STEPS}/{STEPS}" in done.stdout and "finished at step 12/12" in done.stdout
    return out


def test_the_golden_run(base):
    """These numbers change only on purpose."""
    assert losses(base) == pytest.approx(GOLDEN["loss"], abs=1e-5)
    assert records(base, "eval")[-1]["loss"] == pytest.approx(GOLDEN["eval"], abs=1e-5)


# A CPU without bf16 units emulates them.
FEW = ("--steps", 3, "--set", "train.batch_tokens=128", "--set", "train.eval_batches=1",
       "--set", "model.layers=1")  # fmt: skip
LAYOUTS = {  # processes, options
    "one process": (1, ()),
    "accumulating": (2, ("--set", "train.micro_batch=2")),
    "zero 0": (2, ("--zero", 0)),
    "zero 2, sequences shared": (2, ("--zero", 2, "--sp", 2)),
    "zero 3": (2, ("--zero", 3)),
    "recomputing": (1, ("--set", "train.recompute=true", "--zero", 0)),
    "accelerate, the referee": (2, ("--engine", "accelerate", "--zero", 0)),
    **{dtype: (2, (*FEW, "--dtype", dtype)) for dtype in ("bf16", "fp32")},
}


@pytest.fixture(scope="module")
def layouts(corpus, tmp_path_factory) -> Path:
    """Train a run in each layout."""
    runs = tmp_path_factory.mktemp("layouts")
    train_all(
        runs, {name: ("--nproc", n, *options) for name, (n, options) in LAYOUTS.items()}, corpus
    )
    return runs


def train_all(runs: Path, options: dict[str, tuple], corpus: Path, common: tuple = TINY) -> None:
    """Train one run for each name, in the same process."""
    asked = [
        ("pretrain", *common, "--data", corpus, "--out", runs / name, *more)
        for name, more in options.items()
    ]
    worlds([{"do": "launch", "arguments": each} for each in asked], runs)


@pytest.mark.parametrize("name", [*LAYOUTS][:-2])
def test_every_layout_trains_the_same_run(base, layouts, name):
    run = layouts / name
    assert hashes(run) == hashes(base)
    assert losses(run) == pytest.approx(losses(base), abs=1e-5)
    norms, want = ([r["grad_norm"] for r in records(path, "step")] for path in (run, base))
    assert norms == pytest.approx(want, rel=1e-4)
    for mine, theirs in zip(records(run, "eval"), records(base, "eval"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert mine["bpb"] == pytest.approx(theirs["bpb"], abs=1e-5)


def test_bf16_stays_near_fp32(layouts):
    near, exact = losses(layouts / "bf16"), losses(layouts / "fp32")
    assert near == pytest.approx(exact, abs=2e-2) and near != exact and len(near) == 3


def test_resumed_runs_continue_bit_for_bit(base, layouts, corpus, tmp_path):
    """After a scheduler's signal to one worker, after Ctrl-C at the launcher, and after damage to
    the newest checkpoint."""
    stopped = tmp_path / "stopped"
    start = (*TINY, "--data", corpus, "--nproc", 2, "--out", stopped, "--zero", 3)
    start += ("--set", "train.max_restarts=0")  # without a preloader
    resume = ("--resume", "--out", stopped, "--no-track")
    interrupt(start, lambda launcher: launcher.children()[0].send_signal(signal.SIGUSR1), code=75)
    interrupt(resume, lambda launcher: launcher.send_signal(signal.SIGINT), code=130)
    assert 2 <= len(losses(stopped)) < STEPS

    damaged = Path(shutil.copytree(base, tmp_path / "damaged"))
    newest = sorted((damaged / "checkpoints").glob("step-*"))[-1]
    victim = max(newest.rglob("*.bin"), key=lambda p: p.stat().st_size)
    flip_bit(victim)
    log = damaged / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if '"finish"' not in line))

    again = [("pretrain", "--resume", "--out", run, "--no-track") for run in (stopped, damaged)]
    worlds([{"do": "launch", "arguments": each} for each in again], tmp_path)
    for run, whole in ((stopped, layouts / "zero 3"), (damaged, base)):
        assert losses(run) == losses(whole) and hashes(run) == hashes(whole)
        assert losses(run, "eval") == losses(whole, "eval")
    resumed = [r for r in records(damaged, "event") if r["event"] == "resume"]
    assert resumed[-1]["step"] == 8 and "checksum differs" in resumed[-1]["notes"]


def pretrain(*options: object) -> Launched:
    return Launched("launch", ["pretrain", *options], environment())


def interrupt(arguments: tuple, send: Callable[[psutil.Process], object], *, code: int) -> None:
    """Stop a run at its first step. It does not exit with 0, so that a script does not continue."""
    process = pretrain(*arguments)
    for line in process.stdout:
        if line.startswith("step "):
            send(psutil.Process(process.pid))
            break
    rest = process.stdout.read()
    assert process.wait(120) == code, rest
    assert "interrupt" in rest and "continue with: launch pretrain --resume --out " in rest


def processes(pattern: str) -> list[int]:
    found = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True).stdout
    return [int(pid) for pid in found.split()]


def test_ctrl_c_during_the_start_stops_the_run(corpus, tmp_path):
    out = tmp_path / "run"
    process = pretrain(*TINY, "--steps", 5000, "--data", corpus, "--nproc", 2, "--out", out)
    until(lambda: len(processes(f"pipeline.train.worker {out}")) == 2)
    process.send_signal(signal.SIGINT)
    output = process.stdout.read()
    assert process.stderr.read().count("stopping: ") == 1
    assert process.wait(60) == 130 and "continue with: launch pretrain --resume" in output
    assert output.startswith("model   tiny dense │") and "\ntracked in the run" in output
    assert "warning: the run repeats its" in output and "warning: the held-out split has" in output


def test_resuming_a_finished_run_prints_a_message(base, tmp_path):
    before = (base / "log.jsonl").read_bytes()
    began = time.monotonic()
    (base / "checkpoints").rename(tmp_path / "elsewhere")
    done = launch("pretrain", "--resume", "--out", base, "--nproc", 2, "--no-track")
    (tmp_path / "elsewhere").rename(base / "checkpoints")
    assert done.stderr.startswith(f"{base}/checkpoints is empty")
    assert "finished at step 12/12" in done.stdout and time.monotonic() - began < 60
    assert (base / "log.jsonl").read_bytes() == before


def test_evaluate_prints_the_loss_of_training(base, inside):
    logged = records(base, "eval")[-1]
    found = json.loads(inside("evaluate", "--run", base, "--json"))
    assert found["loss"] == pytest.approx(logged["loss"], abs=1e-5)
    assert found["bpb"] == pytest.approx(logged["bpb"], abs=1e-5)
