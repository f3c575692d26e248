"""A damaged run directory is refused in one line that names the file; the others are still read."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.jobs import _read_from
from pipeline.errors import RunError
from pipeline.runs.directory import RunDir
from pipeline.runs.history import find_runs, read_run, read_runs
from pipeline.slurm.queue import statuses
from pipeline.track.mlflow_runs import params
from pipeline.track.mlflow_sync import load_state
from tests.scaling.made_runs import make_run

DEEP = b"[" * 100_000 + b"]" * 100_000


def content(data: bytes) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        file.write_bytes(data)

    return write


def link(target: str) -> Callable[[Path], None]:
    return lambda file: file.symlink_to(target)


def changed(**keys: object) -> Callable[[Path], None]:
    """The good run.json with other values."""

    def write(file: Path) -> None:
        good = json.loads((file.parent / "run.json.old").read_text())
        file.write_text(json.dumps(good | keys))

    return write


FILES = {
    "fifo": os.mkfifo,
    "zero": link("/dev/zero"),
    "loop": link("run.json"),
    "directory": Path.mkdir,
    "deep": content(DEEP + b"\n"),
    "list": content(b"[1, 2]\n"),
    "bytes": content(b"\xff\xfe\x00\n"),
}
RUN_JSON = FILES | {
    "missing": lambda file: None,
    "empty": content(b""),
    "version": changed(version=99),
    "name": changed(name=["a"]),
    "params": changed(params=[1, 2]),
    "nested": changed(params={"scaling": {"of": 1}}),
    "zero parameters": changed(params={"scaling": 0}),
    "infinite": changed(params={"scaling": float("inf")}),
    "huge": changed(steps=10**400),
    "steps": changed(steps="abc"),
    "arch": changed(arch={"kind": "moe"}),
}
LOG = FILES | {
    "loop": link("log.jsonl"),
    "no step": content(b'{"kind":"step","time":1}\n'),
    "text step": content(b'{"kind":"step","time":1,"step":"3"}\n'),
    "negative step": content(b'{"kind":"step","time":1,"step":-3}\n'),
    "huge step": content(b'{"kind":"step","time":1,"step":1' + b"0" * 400 + b"}\n"),
    "no kind": content(b'{"time":1,"step":1}\n'),
    "no event": content(b'{"kind":"event","time":1,"step":1}\n'),
    "world": content(b'{"kind":"event","event":"start","time":1,"step":1,"world":"abc"}\n'),
    "text loss": content(b'{"kind":"eval","time":1,"step":1,"loss":"low"}\n'),
    "nested loss": content(b'{"kind":"eval","time":1,"step":1,"loss":{"a":1}}\n'),
    "text time": content(b'{"kind":"eval","time":"now","step":1}\n'),
    "nonfinite": content(b'{"kind":"eval","time":1,"step":1,"nonfinite":{"loss":[]}}\n'),
    "long line": content(b'{"kind":"' + b"x" * (17 << 20)),
}


@pytest.mark.parametrize(
    ("file", "kind"),
    [("run.json", kind) for kind in RUN_JSON] + [("log.jsonl", kind) for kind in LOG],
)
def test_damage_is_named_and_the_rest_is_shown(tmp_path: Path, file: str, kind: str) -> None:
    make_run(tmp_path, "good", 1e5, 1e6)
    bad = make_run(tmp_path, "bad", 1e5, 1e6)
    (bad / file).rename(bad / f"{file}.old")
    (RUN_JSON if file == "run.json" else LOG)[kind](bad / file)
    with pytest.raises(RunError, match=file):
        read_run(bad)
    load_state(bad)
    params(bad)  # what MLflow gets of it: anything but an exception
    if kind == "missing":
        assert find_runs(tmp_path) == [tmp_path / "good"]
        return
    with pytest.raises(RunError, match=file):
        read_runs(tmp_path)
    shown = {status.run: status for status in statuses([tmp_path])}
    assert shown[str(tmp_path / "good")].state == "FINISHED"
    assert str(bad) in shown


@pytest.mark.parametrize("world", ["abc", [2], {"a": 1}])
def test_a_world_that_is_not_a_number(tmp_path: Path, world: object) -> None:
    run = make_run(tmp_path, "bad", 1e5, 1e6, world=world)
    with pytest.raises(RunError, match="world"):
        _ = RunDir(run).world


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
    """Found, and gone before they are read."""
    make_run(tmp_path, "good", 1e5, 1e6)
    gone = make_run(tmp_path, "gone", 1e5, 1e6)
    found = find_runs(tmp_path)
    shutil.rmtree(gone)
    for module in ("pipeline.runs.history", "pipeline.slurm.queue"):
        monkeypatch.setattr(f"{module}.find_runs", lambda _: found)
    assert [run.name for run in read_runs(tmp_path)] == ["good"]
    assert [Path(status.run).name for status in statuses([tmp_path])] == ["good"]
    assert _read_from(gone / "logs" / "rank-0.log", 0) is None
