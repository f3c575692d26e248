"""The log survives the death of the process that writes it."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import RunError
from pipeline.runs.log import Log, Tail, decode, encode, last_records, read
from pipeline.track.console import Tracker


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


def write(path: Path, steps: range) -> None:
    log = Log(path)
    for step in steps:
        log.append({"kind": "step", "step": step})
    log.close()


def steps(path: Path) -> list[int]:
    return [record["step"] for record in read(path)]


KEYS = st.text(max_size=9).filter(lambda key: key != "nonfinite")


@given(st.dictionaries(KEYS, st.floats() | st.none() | st.text()))
def test_any_record_comes_back(record: dict[str, object]) -> None:
    line = encode(record)
    assert line.count(b"\n") == 1
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert repr(decode(line)) == repr(record)  # repr, because NaN is not equal to itself


def test_values_of_a_record() -> None:
    line = json.loads(encode({"loss": math.nan, "grad_norm": math.inf, "mfu": None}))
    assert line.pop("nonfinite") == {"loss": "nan", "grad_norm": "inf"}
    assert line == {"loss": None, "grad_norm": None, "mfu": None}
    assert decode(encode({"loss": np.float32(0.5), "step": np.int64(3)})) == {
        "loss": 0.5,
        "step": 3,
    }
    with pytest.raises(TypeError, match="experts="):
        encode({"experts": {"1": 2}})


@pytest.mark.parametrize("tail", [b'{"kind":"st', b'{"kind":"step","step":4}', b"\0" * 70000])
def test_partial_last_line(path: Path, tail: bytes) -> None:
    write(path, range(3))
    with path.open("ab") as file:
        file.write(tail)
    assert steps(path) == [0, 1, 2]
    write(path, range(3, 5))
    assert steps(path) == [0, 1, 2, 3, 4]


def test_killed_writer_leaves_whole_records(path: Path) -> None:
    loop = (
        "import sys, pathlib\n"
        "from pipeline.runs.log import Log\n"
        "log = Log(pathlib.Path(sys.argv[1]))\n"
        "for step in range(10**9):\n"
        "    log.append({'kind': 'step', 'step': step, 'pad': 'x' * 500})\n"
    )
    root = Path(__file__).parents[2]
    writer = subprocess.Popen([sys.executable, "-c", loop, str(path)], cwd=root)
    while not path.exists() or path.stat().st_size < 100_000:
        assert writer.poll() is None
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    found = steps(path)
    write(path, range(len(found), len(found) + 1))
    assert steps(path) == list(range(len(found) + 1))


def test_truncate_after(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk is full, the old log stays unchanged."""
    write(path, range(10))
    log = Log(path)
    assert log.truncate_after(6) == 3
    assert log.truncate_after(6) == 0
    log.append({"kind": "step", "step": 7})
    assert steps(path) == list(range(8))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        log.truncate_after(2)
    assert steps(path) == list(range(8))
    assert [p.name for p in path.parent.iterdir()] == ["log.jsonl"]


def test_events_are_numbered_even_if_the_clock_goes_back(path: Path) -> None:
    """No number is used twice, even after its event was dropped."""
    for round_ in range(2):
        log = Log(path)
        log.append({"kind": "event", "event": "save", "step": 1, "seq": 0})
        log._sequence += 10**12  # the clock was ahead
        log.append({"kind": "event", "event": "save", "step": 2 + round_})
        log.truncate_after(1)
        log.append({"kind": "event", "event": "rollback", "step": 1})
        log.close()
    numbers = [record["seq"] for record in read(path)]
    assert numbers == sorted(set(numbers)) and numbers[1] > numbers[0] + 10**12


def test_full_disk_or_deletion_names_the_log_and_leaves_no_half_line(path, monkeypatch):
    log = Log(path)
    log.append({"kind": "step", "step": 1})
    whole = os.write
    calls = []

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
    path.unlink()  # deleted with the run's directory while the run trains
    with pytest.raises(RunError, match=r"log\.jsonl was deleted"):
        log.append({"kind": "event", "event": "save", "step": 4})


def test_damage_in_the_middle_is_named(path: Path) -> None:
    path.write_bytes(b'{"kind":"x","step":1}\n{"st\xff\n{"kind":"x","step":3}\n')
    with pytest.raises(RunError, match=r"log\.jsonl line 2"):
        steps(path)
    assert [record["step"] for record in Tail(path).take(10)] == [1, 3]


def test_tail_follows_appends_and_rewrites(path: Path) -> None:
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
    log = Log(path)  # cuts off the partial line
    log.append({"kind": "step", "step": 4})
    assert [record["step"] for record in tail.take(9)] == [4]
    log.truncate_after(1)
    for step in range(2, 9):  # longer than before, so the size alone does not reveal the rewrite
        log.append({"kind": "step", "step": step})
    assert [record["step"] for record in tail.take(99)] == list(range(9))
    assert tail.rewound


def test_the_end_of_a_large_log(path: Path) -> None:
    write(path, range(3000))
    with path.open("ab") as file:
        file.write(b'rotten\n{"kind":"st')
    records = last_records(path)
    assert [record["step"] for record in records] == list(range(3000 - len(records), 3000))
    assert 100 < len(records) < 3000
    assert last_records(path.with_name("none.jsonl")) == []


def test_a_tracker_adds_the_time(path: Path) -> None:
    tracker = Tracker(Log(path))
    tracker.record({"kind": "step", "step": 1})
    tracker.close()
    assert next(read(path))["time"] > 0
    Tracker().record({"kind": "step", "step": 1})  # ranks other than 0
