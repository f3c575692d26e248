"""What a run lives through: a rank that stands still."""

import re
import signal
import subprocess
import time

import psutil

from tests.conftest import command, environment
from tests.train.test_run import TINY, processes


def test_a_stopped_rank_is_found_and_named(corpus, tmp_path):
    """SIGSTOP leaves a process that is alive, holds its sockets, and never answers."""
    out = tmp_path / "run"
    options = ("--steps", 100_000, "--set", "train.save_every=100000", "--data", corpus, "--nproc", 2, "--out", out)
    process = subprocess.Popen(
        command("pretrain", *TINY, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(),
    )  # fmt: skip
    for line in process.stdout:
        if re.match(r"step +20/", line):
            break
    victim = next(p for p in map(psutil.Process, processes(f"pipeline.train.worker {out}")) if rank(p) == "1")
    victim.send_signal(signal.SIGSTOP)
    process.stdout.read()
    said = process.stderr.read()
    assert process.wait(60) == 2
    assert re.search(r"HangError: step \d+ did not end within [\d.]+ s.*: rank 1 stands still", said), said
    stacks = (out / "logs" / "stacks-rank-0.txt").read_text()
    assert "loop.py" in stacks and "all_reduce" in stacks.partition("last collectives")[2]
    assert not (out / "logs" / "stacks-rank-1.txt").exists()
    deadline = time.monotonic() + 20  # SIGTERM alone would take torchrun half a minute
    while victim.is_running() and victim.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the stopped rank is still there"
        time.sleep(0.2)


def rank(process: psutil.Process) -> str:
    return process.environ().get("RANK", "")  # torchrun itself has none
