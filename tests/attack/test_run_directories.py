"""Damaged run directories: the fault is named in one line, and the other runs are still shown."""

import json
import math
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from pipeline.dashboard.live import Watcher
from pipeline.dashboard.source import Directories
from pipeline.errors import RunError
from pipeline.runs.history import find_runs, read_run, read_runs
from pipeline.runs.log import printable
from pipeline.slurm.queue import statuses
from tests.attack.harness import DEEP, LEGACY, NODES, expect_none, fault
from tests.scaling.made_runs import make_ladder

HUGE = 10**400

FILES = ("run.json", "log.jsonl", "mlflow.json", "config.toml")
# Values of run.json's keys.
BAD_VALUES = {
    "version": (2, None, "1"),
    "name": ([], None),
    "params": ([], {}, *({"scaling": bad} for bad in (0, "x", HUGE, 1e308, math.inf, {"of": 1}))),
    "steps": ("x", 0, -5, 9.5, HUGE),
    "world": ("x", 0.5, [2], {"a": 1}),
    "bytes_per_token": ("x", 0),
    "convention": ([],),
    "experiment": ({"a": {}},),
    "arch": ({"kind": "moe"},),
}
ODD_VALUES = {"name": ("x" * 1_000_000, "\ud800")}
# Lines of log.jsonl after the good ones.
BAD_LINES = (
    '{"kind": "step"}', '{"kind": "step", "step": "x"}', f'{{"kind": "step", "step": {HUGE}}}',
    '{"kind": "step", "step": -1, "time": 1}', '{"kind": "step", "step": 3, "time": "x"}',
    '{"kind": "step", "step": 3, "loss": "low", "tokens": [], "time": 1}', '{"time": 1, "step": 1}',
    '{"kind": "eval", "step": 3, "loss": {"a": 1}, "time": 1}',
    '{"kind": "event", "step": 3, "time": 1, "event": "resume", "world": "abc"}',
    f'{{"kind": "event", "step": 3, "time": 1, "event": "resume", "world": {HUGE}}}',
    '{"kind": "event", "step": 3, "time": 1, "event": ["x"]}', '{"kind": "event", "event": "finish"}',
    '{"kind": "event", "step": 3, "time": 1}', '{"kind": 7, "step": 1}', '{"step": 1, "nonfinite": 5}',
    '{"kind": "step", "step": 3, "nonfinite": {"loss": "abc"}}', '{"kind": "step", "step": 3, "nonfinite": {"loss": []}}',
    "[]", '"text"', DEEP, "\x00" * 4096, "x" * 20_000_000,
)  # fmt: skip
ODD_LINES = (
    '{"kind": "step", "step": 3, "loss": 1e308, "tokens": 1e308, "flops": 1e308, "time": 1}',
    '{"kind": "step", "step": 3, "tokens": 9e9, "tokens_per_s": 1e-308, "time": 1}',
    '{"kind": "step", "step": 3, "tokens": 9e9, "tokens_per_s": 0, "time": 1}',
    '{"kind": "eval", "step": 3, "loss": null, "time": 1}', '{"kind": "eval", "step": 3, "loss": 0, "time": 1}',
    '{"kind": "moe", "step": 3, "time": 1, "load": "x"}', '{"kind": "moe", "step": 3, "time": 1, "load": [[], [1]]}',
    '{"kind": "moe", "step": 3, "time": 1, "load": [["a"], [1, 2]]}',
)  # fmt: skip
NO_RECORDS = ("missing", "dangling", "empty", "deep")  # a log that ends within its first line
NAMES = (b"\xff\xfe", b"new\nline", b"n" * 250, b"<b>&amp;")


def put(node: Callable[[Path], object], file: str, run: Path) -> None:
    (run / file).unlink(missing_ok=True)
    node(run / file)


def edit(key: str, value: object, run: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, key: value}))


def append(line: str, run: Path) -> None:
    with (run / "log.jsonl").open("a") as log:
        log.write(line + "\n")


# What makes the run unreadable, by the file that has to be named, and what does not.
UNREADABLE: list[tuple[str, Callable[[Path], object]]] = [
    *(("run.json", partial(put, node, "run.json")) for node in NODES.values()),
    *(("run.json", partial(edit, key, bad)) for key in BAD_VALUES for bad in BAD_VALUES[key]),
    *(
        ("log.jsonl", partial(put, node, "log.jsonl"))
        for name, node in NODES.items()
        if name not in NO_RECORDS
    ),
    *(("log.jsonl", partial(append, line)) for line in BAD_LINES),
]
READABLE: list[Callable[[Path], object]] = [
    *(partial(put, node, file) for file in FILES[2:] for node in NODES.values()),
    *(partial(put, NODES[name], "log.jsonl") for name in NO_RECORDS),
    *(partial(edit, key, value) for key, values in ODD_VALUES.items() for value in values),
    *(partial(append, line) for line in ODD_LINES),
]


@pytest.fixture(scope="module")
def damaged(tmp_path_factory) -> Path:
    """Copies of one real run, each damaged in another way, and a ladder of good ones."""
    root = tmp_path_factory.mktemp("damaged")
    whole = LEGACY / "runs" / "dense"
    for number, (_, damage) in enumerate(UNREADABLE):
        damage(shutil.copytree(whole, root / f"unreadable{number}"))
    for number, damage in enumerate(READABLE):
        damage(shutil.copytree(whole, root / f"readable{number}"))
    for name in NAMES:
        shutil.copytree(whole, os.fsdecode(os.fsencode(root) + b"/" + name))
    make_ladder(root / "good", 3)
    return root


def test_a_run_that_cannot_be_read_names_its_file(damaged: Path) -> None:
    for number, (file, _) in enumerate(UNREADABLE):
        with pytest.raises(RunError, match=rf"{file}\b"):
            read_run(damaged / f"unreadable{number}")
    for number in range(len(READABLE)):
        read_run(damaged / f"readable{number}")
    with pytest.raises(RunError, match=r"run\.json|log\.jsonl"):
        read_runs(damaged)
    states = {status.run: status.state for status in statuses([damaged])}
    assert list(states) == [printable(path) for path in find_runs(damaged)]
    assert {states[str(path)] for path in (damaged / "good").iterdir()} == {"FINISHED"}


def test_the_dashboard_shows_the_rest_and_names_the_bad_ones(damaged: Path) -> None:
    watcher = Watcher(Directories(damaged))
    began = time.monotonic()
    watcher.refresh()
    assert time.monotonic() - began < 120
    answer = json.loads(watcher.runs())
    rows = [run["row"] for run in answer["runs"]]
    assert {row["name"] for row in rows} >= {path.name for path in (damaged / "good").iterdir()}
    for row in rows:
        assert json.loads(watcher.page(row["id"]))["row"]["id"] == row["id"]
        # The page calls number methods on these.
        assert isinstance(row["hours"], float) and isinstance(row["tokens_per_parameter"], float)
    found = len(watcher.source.scan())
    assert found > 90 and len(rows) + len(watcher.snapshot.notes) == found
    assert json.loads(watcher.snapshot.laws)


@pytest.mark.parametrize("command", ["fit --runs", "status", "logs", "sync", "evaluate --run"])
def test_commands_end_in_one_line(command, damaged, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlruns").mkdir()  # MLflow's own directory
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path.parent / 'attack.db'}")
    more = {"evaluate --run": ("--data", LEGACY / "corpus", "--batches", 1), "sync": ("--wait", 1)}
    runs = sorted(path for path in damaged.iterdir() if path.name != "good")
    expect_none(fault([*command.split(), run, *more.get(command, ())]) for run in runs)
