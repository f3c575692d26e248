"""The local log survives whatever the process that writes it does not."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import RunError
from pipeline.runs.log import Log, Tail, decode, encode, read
from pipeline.track.console import Fan, LocalLog


def write(path: Path, steps: range) -> None:
    log = Log(path)
    for step in steps:
        log.append({"kind": "step", "step": step})
    log.close()


def steps(path: Path) -> list[int]:
    return [record["step"] for record in read(path)]


@given(
    st.dictionaries(
        st.text(max_size=9).filter(lambda key: key != "nonfinite"),
        st.floats() | st.none() | st.text(),
    )
)
def test_any_record_comes_back(record: dict[str, object]) -> None:
    line = encode(record)
    assert line.count(b"\n") == 1
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert repr(decode(line)) == repr(record)  # repr: NaN equals nothing


def test_nonfinite_is_null_and_named(tmp_path: Path) -> None:
    line = json.loads(encode({"loss": math.nan, "grad_norm": math.inf, "mfu": None}))
    assert line == {
        "loss": None,
        "grad_norm": None,
        "mfu": None,
        "nonfinite": {"loss": "nan", "grad_norm": "inf"},
    }


def test_scalars_of_other_libraries() -> None:
    numpy = pytest.importorskip("numpy")
    assert decode(encode({"loss": numpy.float32(0.5), "step": numpy.int64(3)})) == {
        "loss": 0.5,
        "step": 3,
    }
    with pytest.raises(TypeError, match="experts="):
        encode({"experts": {"1": 2}})


@pytest.mark.parametrize("tail", [b'{"kind":"st', b'{"kind":"step","step":4}', b"\0" * 70000])
def test_partial_last_line(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "log.jsonl"
    write(path, range(3))
    with path.open("ab") as file:
        file.write(tail)
    assert steps(path) == [0, 1, 2]
    write(path, range(3, 5))
    assert steps(path) == [0, 1, 2, 3, 4]


def test_killed_writer_leaves_whole_records(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    loop = (
        "import sys, pathlib; from pipeline.runs.log import Log; log = Log(pathlib.Path(sys.argv[1]))\n"
        "for step in range(10**9): log.append({'kind': 'step', 'step': step, 'pad': 'x' * 500})\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", loop, str(path)], cwd=Path(__file__).parents[2]
    )
    while not path.exists() or path.stat().st_size < 100_000:
        assert writer.poll() is None
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    found = steps(path)
    write(path, range(len(found), len(found) + 1))
    assert steps(path) == list(range(len(found) + 1))


def test_truncate_after(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write(path, range(10))
    log = Log(path)
    assert log.truncate_after(6) == 3
    assert log.truncate_after(6) == 0
    log.append({"kind": "step", "step": 7})
    assert steps(path) == list(range(8))
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]


def test_truncation_that_cannot_finish_leaves_the_old_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.jsonl"
    write(path, range(10))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    log = Log(path)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        log.truncate_after(2)
    assert steps(path) == list(range(10))
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]


def test_full_disk_names_the_log_and_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.jsonl"
    log = Log(path)
    log.append({"kind": "step", "step": 1})
    whole, calls = os.write, []

    def half(file: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return whole(file, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        with pytest.raises(RunError, match=r"log\.jsonl.*No space"):
            log.append({"kind": "step", "step": 2})
    log.append({"kind": "step", "step": 3})
    assert steps(path) == [1, 3]


def test_damage_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"kind":"x","step":1}\n{"st\xff\n{"kind":"x","step":3}\n')
    with pytest.raises(RunError, match="line 2"):
        steps(path)
    assert [record["step"] for record in Tail(path).take(10)] == [1, 3]


def test_tail_follows_appends_and_rewrites(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    tail = Tail(path)
    assert tail.take(9) == []
    write(path, range(4))
    assert [record["step"] for record in tail.take(3)] == [0, 1, 2]
    assert tail.rewound
    assert [record["step"] for record in tail.take(3)] == [3]
    assert not tail.rewound
    with path.open("ab") as file:
        file.write(b'{"kind":"st')
    assert tail.take(9) == []
    log = Log(path)  # cuts the partial line
    log.append({"kind": "step", "step": 4})
    assert [record["step"] for record in tail.take(9)] == [4]
    log.truncate_after(1)
    for step in range(2, 9):  # longer than before, so that size alone would not tell
        log.append({"kind": "step", "step": step})
    assert [record["step"] for record in tail.take(99)] == list(range(9))
    assert tail.rewound


def test_fan_and_local_log(tmp_path: Path) -> None:
    one, two = LocalLog(Log(tmp_path / "one.jsonl")), LocalLog(Log(tmp_path / "two.jsonl"))
    fan = Fan([one, two])
    fan.record({"kind": "step", "step": 1})
    fan.close()
    assert all(next(read(tmp_path / name))["time"] > 0 for name in ("one.jsonl", "two.jsonl"))
