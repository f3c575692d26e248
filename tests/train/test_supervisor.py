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
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import torch
import torch.distributed as dist

from pipeline.dashboard.source import Directories
from pipeline.parallel.world import World, _network_store
from pipeline.process import STORE, StopRequest, share
from pipeline.slurm.queue import statuses
from pipeline.train import preload, supervisor
from pipeline.train.request import Devices, Request, plan_run
from tests.conftest import command, environment
from tests.track.mlflow_server import until
from tests.train.test_run import TINY, hashes, losses, pretrain, processes, records
from tests.train.test_survive import ranks

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


def test_hostile_surroundings(corpus, tmp_path, request):
    """Python files in the working directory, an attacker at every port, a terminal that nobody
    reads, a supervisor that is suspended: the run goes on, and SIGTERM still saves and stops it."""
    out = tmp_path / "run"
    for name in ("random", "http", "queue"):
        (tmp_path / f"{name}.py").write_text(f"open('imported-{name}', 'w')\n")
    options = ("--steps", 100_000, "--data", corpus, "--nproc", 2, "--out", out)
    launcher = [Path(sys.executable).with_name("launch"), *command(*BRIEF, *options)[3:]]
    launcher.insert(1, "pretrain")
    # The interface that the user has named for gloo, which fails if it looks for this one.
    env = environment(GLOO_SOCKET_IFNAME="absent")
    process = subprocess.Popen(
        launcher, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env
    )
    request.addfinalizer(process.kill)  # even if the test fails; the ranks end with it
    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)  # space for about 50 steps
    until(lambda: steps(out) > 100 or process.poll() is not None, 300, "the ranks do not train")
    assert process.poll() is None and not restarts(out)
    family = psutil.Process(process.pid)
    children = family.children(recursive=True)  # these may include the preloader
    ports = [
        connection.laddr
        for p in (family, *children)
        for connection in p.net_connections()
        if connection.status == psutil.CONN_LISTEN
    ]
    assert ports and {address.ip for address in ports} == {"127.0.0.1"}
    marker = tmp_path / "executed"
    payload = base64.b64encode(pickle.dumps(Payload(marker)))
    store = Path(ranks(out)["0"].environ()[STORE])
    assert stat.S_IMODE(store.parent.stat().st_mode) == 0o700
    dist.FileStore(str(store), 3).set("torch.rendezvous.none", payload.decode())
    for address in ports:
        with socket.create_connection(address) as connection:
            connection.sendall(payload)
    assert not list(tmp_path.glob("imported-*"))

    process.send_signal(signal.SIGSTOP)
    before = steps(out)
    until(lambda: steps(out) > before + 20, 60, "the ranks wait for the supervisor")
    process.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGTERM)
    until(lambda: not any(map(psutil.Process.is_running, children)), 90, "SIGTERM is ignored")
    assert process.wait(60) == 75  # although its last lines do not fit into the pipe
    process.stdout.close()
    assert records(out, "event")[-1]["event"] == "interrupt"
    assert not marker.exists()


def test_the_store_of_several_nodes_listens_on_the_address_of_the_job_only():
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    store = _network_store(World(0, 1, torch.device("cpu")), "127.0.0.1", port)
    ports = [each.laddr for each in psutil.Process().net_connections()]
    assert {address.ip for address in ports if address.port == port} == {"127.0.0.1"}
    del store


def test_forks_of_the_preloader_replace_a_group(corpus, tmp_path):
    """A rank is killed while the preloader is absent, dead and stopped. The new ranks are forks,
    except after the last kill. The curve is that of an undisturbed run bit for bit."""
    common = (*BRIEF, "--steps", 300, "--set", "train.save_every=20", "--data", corpus)
    curves = []
    for name, faults in (("disturbed", (None, signal.SIGKILL, signal.SIGSTOP)), ("base", ())):
        out = tmp_path / name
        process = pretrain(*common, "--nproc", 2, "--out", out, "--quiet")
        for number, fault in enumerate(faults, 1):
            disturb(process.pid, out, number, fault)
        output = process.stdout.read()
        assert process.wait(120) == 0, output
        assert not processes(f"pipeline.train.worker {out}"), "orphans"
        curves.append((losses(out), hashes(out)))
    assert curves[0] == curves[1] and len(curves[0][0]) == 300
    assert statuses([tmp_path / "disturbed"])[0].restarts == 3
    unused = "the preloader was not used: it does not answer"
    assert [event["notes"] for event in restarts(tmp_path / "disturbed")] == ["", "", unused]
    reasons = [event["reason"] for event in restarts(tmp_path / "disturbed")]
    assert reasons == [f"ChildProcessError: rank {n} was killed by SIGKILL" for n in (1, 0, 1)]


def disturb(launcher: int, out: Path, number: int, fault: signal.Signals | None) -> None:
    """Send a signal to the preloader, kill a rank, and wait until others train."""
    before = steps(out)
    until(lambda: steps(out) > before + 25)  # by then there is a new checkpoint
    old = {p.pid for p in ranks(out).values()}
    if fault:
        (preloader,) = preloaders(out)
        preloader.send_signal(fault)
    ranks(out)[str(number % 2)].kill()
    until(lambda: len({p.pid for p in ranks(out).values()} - old) == 2, 120, "no new ranks")
    new = ranks(out).values()
    assert {p.ppid() for p in new} == {launcher}
    assert {os.getsid(p.pid) for p in new} == {p.pid for p in new}
    forked = {"--preload" in " ".join(p.cmdline()) for p in new}
    assert forked == {fault != signal.SIGSTOP}
    until(lambda: len(restarts(out)) == number)


def restarts(out: Path) -> list[dict]:
    return [event for event in records(out, "event") if event["event"] == "restart"]


def preloaders(out: Path) -> list[psutil.Process]:
    there = map(psutil.Process, processes(f"pipeline.train.worker {out}.*--preload"))
    return [p for p in there if Path(f"/proc/{p.pid}/fd/2").readlink().stem == "preload"]


def test_a_process_that_cannot_fork_ranks_says_so_and_is_not_used(tmp_path):
    event = threading.Event()
    thread = threading.Thread(target=event.wait)
    thread.start()
    assert "threads are running" in preload._fork_obstacle()
    event.set()
    thread.join()
    log = tmp_path / "log"
    preloader = preload.Preloader([sys.executable, "-c", "raise SystemExit('why')"], {}, log)
    assert not preloader.ready(lambda: False) and preloader.fork({}, 1, 2) is None
    preloader.close()
    preloader.start()  # does nothing, because it would fail again
    assert preloader._process is None and preloader.obstacle == "why"


def test_a_preloader_that_dies_between_two_forks(corpus, tmp_path, monkeypatch):
    """Rank 0 gets the reason and logs it. Forks and other ranks have the user's own variables."""
    request = Request("7k", "dense", corpus, tmp_path / "run", 2, sets=["model.seq=64"])
    run = plan_run(request, Devices(0, 2**30, "CPU")).commit().run
    monkeypatch.setenv("TORCH_WARM_POOL", "own")
    shown = "import os\nprint(*map(os.environ.get, ('TORCH_WARM_POOL', 'ISOFLOP_NOT_FORKED')))"
    monkeypatch.setattr(supervisor, "python_module", lambda *_: [sys.executable, "-c", shown])
    serve = [sys.executable, "-c", f"from pipeline.train import preload\npreload.serve()\n{shown}"]
    preloader = preload.Preloader(serve, dict(os.environ), tmp_path / "log")
    preloader.start()
    fork, process = preloader.fork, preloader._process
    monkeypatch.setattr(preloader, "fork", lambda *fds: (fork(*fds), process.kill())[0])
    group = supervisor.Group(run, [{"RANK": "0"}, {"RANK": "1"}], preloader=preloader)
    assert set(group.wait(StopRequest()).values()) == {0}
    assert [group.last_line(n) for n in (0, 1)] == ["own it does not answer", "own None"]
    preloader.close()


def test_a_rank_that_dies_during_a_stop(corpus, tmp_path, monkeypatch):
    """A rank that starts may die of the stop request. Any other signal is the cause of the fault."""
    request = Request("7k", "dense", corpus, tmp_path / "run", 2, sets=["model.seq=64"])
    run = plan_run(request, Devices(0, 2**30, "CPU")).commit().run
    groups = SimpleNamespace(new=lambda _: supervisor.Group(run, []), prepare=None)
    for number in (signal.SIGINT, signal.SIGKILL):
        run.fail(RuntimeError("connection lost"))  # rank 0 reports this
        codes = {0: 1, 1: -number}
        monkeypatch.setattr(supervisor.Group, "wait", lambda *_, codes=codes: codes)
        stop = SimpleNamespace(signal=signal.SIGINT)
        stopped = supervisor._attempt(run, groups, stop, 2)
        assert stopped == (number == signal.SIGINT) and run.fault() is None
    assert [fault["message"] for fault in run.past_faults()] == ["rank 1 was killed by SIGKILL"]


def test_ctrl_c_ends_a_rank_in_an_import_that_ignores_exceptions(tmp_path):
    (tmp_path / "torch.py").write_text(
        "import time\ntry:\n    print(flush=True)\n    time.sleep(60)\nexcept:\n    pass\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    rank = subprocess.Popen(
        supervisor.python_module(supervisor.WORKER, tmp_path),
        stdout=subprocess.PIPE,
        env=environment(PYTHONPATH=path),
    )
    rank.stdout.read(1)
    rank.send_signal(signal.SIGINT)
    assert rank.wait(60) == -signal.SIGINT
    rank.stdout.close()


def test_a_worker_that_cannot_start_is_a_fault_not_a_stop(corpus, tmp_path, monkeypatch, inside):
    monkeypatch.setattr(supervisor, "WORKER", "pipeline.train.nothing")
    never = ("--nproc", 1, "--set", "train.max_restarts=0")
    output = inside("pretrain", *BRIEF, *never, "--data", corpus, "--out", tmp_path / "run", code=2)
    assert "No module named pipeline.train.nothing" in output


def test_a_fault_is_that_of_the_rank_which_failed_by_itself(corpus, tmp_path, monkeypatch):
    """Rank 0 waits for it and is ended afterwards, so its report does not count. Signals may have no name."""
    request = Request("7k", "dense", corpus, tmp_path / "run", 2, sets=["model.seq=64"])
    run = plan_run(request, Devices(0, 2**30, "CPU")).commit().run
    monkeypatch.setattr(supervisor, "_GRACE_S", 0.1)
    for end, name in {"sys.exit('why')": None, "os.kill(os.getpid(), 36)": "signal 36"}.items():
        program = f"import os, sys, time\ntime.sleep(60) if os.environ['RANK'] == '0' else {end}"
        command = [sys.executable, "-c", program]
        monkeypatch.setattr(supervisor, "python_module", lambda *_, command=command: command)
        group = supervisor.Group(run, [{"RANK": "0"}, {"RANK": "1"}])
        codes = group.wait(StopRequest(), lambda: None)
        death = group.death(codes)
        assert codes[0] < 0 and group.first_failed(codes) == 1
        assert (death and death.name) == name and group.last_line(1) == "why"


def test_a_run_whose_processes_were_killed_is_not_shown_as_running(corpus, tmp_path):
    out = tmp_path / "run"
    options = ("--steps", 100_000, "--data", corpus, "--nproc", 1, "--out", out, "--quiet")
    process = pretrain(*BRIEF, *options)
    until(lambda: steps(out) > 3)
    assert [status.state for status in statuses([out])] == ["RUNNING"]
    rank = ranks(out)["0"]
    for number in (signal.SIGSTOP, signal.SIGKILL):  # a rank saves if its launcher dies
        process.send_signal(number)
        rank.send_signal(number)
    assert process.wait(60) == -signal.SIGKILL
    # A process that ends loses its command line first, and its locks later.
    until(lambda: statuses([out])[0].state == "FAILED", 60, "still shown as running")
    assert "--resume" in statuses([out])[0].note
    shown = Directories(tmp_path)
    assert [shown.read(key).row(key, time.time())["status"] for key in shown.scan()] == ["failed"]
    (out / "host").write_text("another")  # this host cannot see processes of another
    assert [status.state for status in statuses([out])] == ["RUNNING"]


def test_directories_of_killed_launchers_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    unused, used, young, other = (tmp_path / f"isoflop-ranks-{n}" for n in ("a", "b", "c", "d"))
    for path in (unused, used, young, tmp_path / "file"):
        path.mkdir()
        (path / "store-1").touch()
    other.symlink_to(tmp_path / "file")
    for path in (unused, used, tmp_path / "file"):
        os.utime(path, (0, 0))
    handle = share(used)  # like a rank that is still saving
    supervisor.remove_unused()
    assert {*tmp_path.iterdir()} == {used, young, other, tmp_path / "file"}
    os.close(handle)
    supervisor.remove_unused()
    assert {*tmp_path.iterdir()} == {young, other, tmp_path / "file"}


def test_every_child_starts_with_a_safe_path():
    root = Path(supervisor.__file__).parents[2]
    for path in (*root.glob("pipeline/**/*.py"), *root.glob("launch/**/*.py")):
        for line in path.read_text().splitlines():
            assert not re.search(r"sys\.executable, \"-[mc]", line), f"{path}: {line}"
    for path in root.glob("slurm/*.sbatch"):
        assert " -m " not in path.read_text().replace(" -P -m ", ""), path
