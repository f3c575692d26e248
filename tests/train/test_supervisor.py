"""The supervisor: its processes are closed to others and survive disturbances."""

import base64
import fcntl
import os
import pickle
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import torch.distributed as dist

from pipeline.process import STORE
from pipeline.train import supervisor
from tests.conftest import command, environment
from tests.train.test_run import TINY, processes, records, until

# Steps of milliseconds: these tests are about processes.
BRIEF = (*TINY, "--set", "model.layers=1", "--set", "train.batch_tokens=128",
         "--set", "train.eval_every=100000", "--set", "train.save_every=1000")  # fmt: skip


def steps(run: Path) -> int:
    log = run / "log.jsonl"
    return log.read_bytes().count(b'"kind":"step"') if log.exists() else 0


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.marker),)


def test_hostile_surroundings(corpus, tmp_path):
    """Python files in the working directory, an attacker at every port, a terminal that nobody
    reads, a supervisor that is suspended: the run goes on, and SIGTERM still saves and stops it."""
    out = tmp_path / "run"
    for name in ("random", "http", "queue"):
        (tmp_path / f"{name}.py").write_text(f"open('imported-{name}', 'w')\n")
    options = ("--steps", 100_000, "--data", corpus, "--nproc", 2, "--out", out)
    launcher = [Path(sys.executable).with_name("launch"), *command(*BRIEF, *options)[3:]]
    launcher.insert(1, "pretrain")
    process = subprocess.Popen(
        launcher, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment()
    )
    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)  # about 50 steps
    until(lambda: steps(out) > 100)
    family = psutil.Process(process.pid)
    children = family.children(recursive=True)  # a spare group may be among them
    ranks = sorted(children, key=psutil.Process.create_time)[:2]
    ports = [
        connection.laddr
        for p in (family, *children)
        for connection in p.net_connections()
        if connection.status == psutil.CONN_LISTEN
    ]
    assert ports and {address.ip for address in ports} == {"127.0.0.1"}
    marker = tmp_path / "executed"
    payload = base64.b64encode(pickle.dumps(Payload(marker)))
    store = Path(ranks[0].environ()[STORE])
    assert stat.S_IMODE(store.parent.stat().st_mode) == 0o700
    dist.FileStore(str(store), 3).set("torch.rendezvous.none", payload.decode())
    for address in ports:
        with socket.create_connection(address) as connection:
            connection.sendall(payload)
    assert not list(tmp_path.glob("imported-*"))

    process.send_signal(signal.SIGSTOP)
    before = steps(out)
    until(lambda: steps(out) > before + 20)
    process.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGTERM)
    until(lambda: not any(map(psutil.Process.is_running, children)))
    output = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 75 and "continue with: launch pretrain --resume" in output
    assert records(out, "event")[-1]["event"] == "interrupt"
    assert not marker.exists()


def test_the_spare_group_takes_over(corpus, tmp_path, monkeypatch, inside):
    monkeypatch.setattr(supervisor, "_SPARE_AFTER_S", 0.0)
    out, take = tmp_path / "run", supervisor._Groups.take
    taken: list[tuple[supervisor._Groups, supervisor.Group | None, supervisor.Group]] = []

    def watched(groups: supervisor._Groups) -> supervisor.Group:
        spare = groups._spare
        group = take(groups)
        taken.append((groups, spare, group))
        return group

    monkeypatch.setattr(supervisor._Groups, "take", watched)

    def fault() -> None:
        until(lambda: taken and taken[0][0]._spare is not None and steps(out))
        os.kill(taken[0][2]._ranks[0].pid, signal.SIGKILL)

    threading.Thread(target=fault, daemon=True).start()
    inside(
        "pretrain", *BRIEF, "--steps", 100, "--data", corpus, "--nproc", 2, "--out", out, "--quiet"
    )
    (_, none, _), (_, spare, second) = taken
    assert none is None and spare is second
    events = [r["event"] for r in records(out, "event") if r["event"] != "save"]
    assert events == ["start", "restart", "finish"]
    assert not processes(f"pipeline.train.worker {out}"), "orphans"


def test_a_worker_that_cannot_start_is_a_fault_not_a_stop(corpus, tmp_path, monkeypatch, inside):
    monkeypatch.setattr(supervisor, "WORKER", "pipeline.train.nothing")
    never = ("--nproc", 1, "--set", "train.max_restarts=0")
    output = inside("pretrain", *BRIEF, *never, "--data", corpus, "--out", tmp_path / "run", code=2)
    assert "No module named pipeline.train.nothing" in output


def test_every_child_starts_with_a_safe_path():
    root = Path(supervisor.__file__).parents[2]
    for path in (*root.glob("pipeline/**/*.py"), *root.glob("launch/**/*.py")):
        for line in path.read_text().splitlines():
            assert not re.search(r"sys\.executable, \"-[mc]", line), f"{path}: {line}"
    for path in root.glob("slurm/*.sbatch"):
        assert " -m " not in path.read_text().replace(" -P -m ", ""), path
