"""Run directories with odd values and names, and those that are deleted while they are read."""

import os
import shutil
from pathlib import Path

import pytest

from launch.jobs import _read_from
from pipeline.errors import RunError
from pipeline.runs.history import find_runs, read_run, read_runs
from pipeline.slurm.queue import statuses
from tests.scaling.made_runs import make_run


def test_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    bad = Path(os.fsdecode(bytes(tmp_path) + b"/\xff\xfe"))
    shutil.copytree(make_run(tmp_path, "good", 1e5, 1e6), bad)
    assert len(read_runs(tmp_path)) == 2
    (bad / "log.jsonl").write_text("damaged\n")
    with pytest.raises(RunError) as fault:
        read_run(bad)
    str(fault.value).encode()
    assert [status.state for status in statuses([tmp_path])].count("FINISHED") == 1


def test_runs_that_are_deleted_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are found, and then deleted before they are read."""
    make_run(tmp_path, "good", 1e5, 1e6)
    gone = make_run(tmp_path, "gone", 1e5, 1e6)
    found = find_runs(tmp_path)
    shutil.rmtree(gone)
    for module in ("pipeline.runs.history", "pipeline.slurm.queue"):
        monkeypatch.setattr(f"{module}.find_runs", lambda _: found)
    assert [run.name for run in read_runs(tmp_path)] == ["good"]
    assert [Path(status.run).name for status in statuses([tmp_path])] == ["good"]
    assert _read_from(gone / "logs" / "rank-0.log", 0) is None
