"""Fixtures that several suites share: the command line as a user calls it, and one small corpus."""

import functools
import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer.main
from filelock import FileLock

from tests import forks

# Before torch is imported: `make test` runs several workers side by side.
os.environ.setdefault("OMP_NUM_THREADS", "1")
gc.disable()  # off until all tests are collected: it would take a fifth of each worker's start
# Building all commands takes longer than most of those that tests run in this process.
typer.main.get_command = functools.cache(typer.main.get_command)
Launch = Callable[..., "subprocess.CompletedProcess[str]"]

# These take a minute or more each. They start first, then other slow files, then quick ones, so
# that no worker is left with a long file at the end. Those that mostly wait alternate with those
# that compute, so that the four workers of `make test` share two cores well.
LONGEST = (
    "cluster/test_jobs.py",
    "train/test_bench.py",
    "train/test_survive.py",
    "checkpoint/test_layouts.py",
    "train/test_supervisor.py",
    "train/test_verify.py",
    "train/test_guard.py",
    "train/test_finetune.py",
    "track/test_mlflow.py",
    "browser/test_dashboard.py",
    "train/test_objectives.py",
    "data/test_resume.py",
    "attack/test_run_directories.py",
    "tasks/test_tasks.py",
    "train/test_run.py",
    "train/test_pairs.py",
    "scaling/test_sweep.py",
)
# Tests that start training processes or take more than two seconds of CPU time.
SLOW_FIXTURES = {"corpus", "ray_cluster", "server", "begun", "small_disk"}
SLOW = (
    "attack/",
    "checkpoint/test_layouts.py",
    "checkpoint/test_store.py::test_a_broken_file_is_a_damaged_checkpoint[sparse-manifest",
    "data/test_read.py::test_jsonl_in_any_pieces",
    "data/test_synthetic.py",
    "data/test_tokenizer.py::test_ids_are_sentencepieces",
    "hub/",
    "model/test_account.py::test_any_architecture",
    "model/test_mixtures.py",
    "model/test_mup.py::test_activations_change_equally",
    "objective/test_noise.py::test_spans_are_as_likely",
    "optim/test_muon.py::test_a_step_is_that_of_torch_bit_for_bit[mla-moe",
    "parallel/",
    "scaling/test_accuracy.py::test_the_forecast_of_a_real_ladder",
    "scaling/test_annealing.py::test_curves_on_the_command_line",
    "scaling/test_annealing.py::test_one_length_per_size",
    "scaling/test_decide.py::test_costs_are_printed",
    "scaling/test_decide.py::test_on_the_command_line",
    "scaling/test_design.py::test_more_noise",
    "scaling/test_fit.py::test_standard_errors",
    "scaling/test_fit.py::test_the_ladder_of_the_docs",
    "scaling/test_fit.py::test_the_scatter_interval",
    "scaling/test_forecast.py::test_a_ladder_of_one_gpu",
    "scaling/test_forecast.py::test_a_size_has_the_architecture",
    "scaling/test_forecast.py::test_an_error_is_quoted",
    "scaling/test_forecast.py::test_by_size",
    "scaling/test_forecast.py::test_the_forecast_is_the_printed_law",
    "scaling/test_forecast.py::test_the_interval_covers",
    "scaling/test_malformed.py",
    "scaling/test_mlflow_runs.py",
    "tasks/",
    "test_legacy.py",
    "track/test_mlflow.py",
    "track/test_tracked.py",
    "train/",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without slow tests, skip files that have no others, because importing them is expensive."""
    if "not slow" not in config.option.markexpr:
        return None
    within = collection_path.relative_to(Path(__file__).parent).as_posix()
    whole = tuple(each for each in SLOW if each.endswith(("/", ".py")))
    return f"{within}/".startswith(whole) or within in whole or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by what they use, and put the longest files first."""
    here = Path(__file__).parent
    slow_files = set()
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        file = str(item.path.relative_to(here))
        if "slurm" in fixtures:
            item.add_marker(pytest.mark.slurm)
        if "browser" in fixtures:
            item.add_marker(pytest.mark.browser)
        if f"{file}::{item.name}".startswith(SLOW) or fixtures & SLOW_FIXTURES:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow"):
            slow_files.add(item.path)

    def place(item: pytest.Item) -> int:
        file = str(item.path.relative_to(here))
        return (
            LONGEST.index(file) if file in LONGEST else len(LONGEST) + (item.path not in slow_files)
        )

    items.sort(key=place)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "launch", *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "NO_COLOR": "1", "COLUMNS": "200", **more}


def launch(
    *arguments: object, code: int = 0, cwd: Path | None = None, timeout: float = 800, **env: str
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end, in a fork of a process that has imported it; check its exit code."""
    done = forks.run("launch", arguments, environment(**env), cwd, timeout)
    assert done.returncode == code, (
        f"exit {done.returncode}, wanted {code}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    )
    return done


def worlds(jobs: list[dict], tmp_path: Path) -> None:
    """Run jobs in forked ranks, one after the other: many runs for one import (tests/worlds.py)."""
    plan = tmp_path / "jobs.json"
    plan.write_text(json.dumps(jobs, default=str))
    done = forks.run("tests.worlds", [plan], environment(DS_ACCELERATOR="cpu"))
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"


@pytest.fixture
def inside(capsys, monkeypatch) -> Callable[..., str]:
    """Run a command in this process, where importing torch again would take longer than the command.

    Return what it printed, or the one line of an error.
    """
    from launch import __main__ as command_line

    if not command_line.app.registered_groups:
        command_line.mount()
    monkeypatch.setattr(command_line, "mount", lambda _: None)

    def call(*arguments: object, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["launch", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            command_line.main()
        out = capsys.readouterr()
        assert done.value.code == code, out.err
        if code:
            errors = [line for line in out.err.splitlines() if not line.startswith("warning: ")]
            assert len(errors) == 1 and errors[0].startswith("error: "), out.err
        return out.err if code else out.out

    return call


def flip_bit(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def records(run: Path, *kinds: str) -> list[dict]:
    """Return the records of a run's log, all of them or those of some kinds."""
    lines = (run / "log.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if not kinds or r["kind"] in kinds]


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Make a directory once for all workers of pytest-xdist: the first one makes it."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    path = root / name
    with FileLock(root / f"{name}.lock"):
        if not path.exists():
            partial = root / f"{name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            make(partial)
            partial.rename(path)
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of the synthetic source: the same bytes, and so the same losses, on every machine."""
    source = ("--source", "synthetic", "--seed", 1, "--limit-bytes", 1_000_000)
    options = (*source, "--vocab-size", 512, "--valid-share", 0.1, "--quiet")
    return made_once(
        tmp_path_factory, "corpus", lambda out: launch("data", "prepare", *options, "--out", out)
    )
