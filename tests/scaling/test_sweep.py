"""A sweep through the command line: interrupted, continued, with a member that cannot run."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import command, environment, launch

SWEEP = """
kind = "ladder"
experiment = "short"
sizes = ["tiny", "175b"]
tokens_per_param = [0.3]
set = ["model.seq=64", "train.batch_tokens=1024", "optim.lr=2e-3", "train.eval_batches=2", "train.save_every=20"]
"""


@pytest.mark.timeout(600)
def test_a_sweep_is_continued_and_a_failed_run_stops_no_other(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text(SWEEP)
    call = ("sweep", "run", "sweep.toml", "--data", corpus, "--no-track")
    first = subprocess.Popen(
        command(*call), cwd=tmp_path, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    log = tmp_path / "runs" / "short" / "tiny-0.3x" / "log.jsonl"
    until = time.monotonic() + 200
    while not (log.exists() and b'"kind":"step"' in log.read_bytes()) and time.monotonic() < until:
        time.sleep(0.1)
    first.send_signal(signal.SIGINT)
    said, wrong = first.communicate(timeout=200)
    assert first.returncode == 130, said + wrong
    assert "0 of 2 runs in runs/short have finished" in said
    assert [json.loads(line).get("event") for line in log.read_text().splitlines()][-1] == "interrupt"

    done = launch(*call, "--json", code=2, cwd=tmp_path)
    told = json.loads(done.stdout)
    assert told["finished"] == ["tiny-0.3x"] and told["missing"] == []
    assert "needs about" in told["failed"]["175b-0.3x"]
    assert done.stderr.splitlines()[-1].startswith("error: 1 of 2 runs failed: 175b-0.3x")
    events = [r for r in map(json.loads, log.read_text().splitlines()) if r["kind"] == "event"]
    assert {"start", "interrupt", "resume", "finish"} <= {r["event"] for r in events}
