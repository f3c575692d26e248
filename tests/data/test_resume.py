"""Killed at any moment, the next call finishes what is missing, with the same bytes."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from launch.data import app
from pipeline.data.ray_pool import run
from pipeline.data.tokenizer import Tokenizer
from tests.data.conftest import contents, some_texts, write_jsonl


@pytest.fixture(scope="module")
def arguments(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Twelve sources, and so at least twelve tasks, of some tenths of a second each."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "t.model").write_bytes(tokenizer.model)
    files = [write_jsonl(folder / f"{i}.jsonl", some_texts(400, seed=i)) for i in range(12)]
    sources = [part for file in files for part in ("--source", str(file))]
    dedup = ["--set", "dedup.exact=true", "--set", "dedup.near={}"]
    return [*sources, "--tokenizer", str(folder / "t.model"), *dedup]


@pytest.fixture(scope="module")
def address(ray_cluster: None) -> Iterator[None]:
    """Drivers join the Ray of the test session, as on a cluster."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
        yield


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each driver starts its own Ray."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture(scope="module")
def undisturbed(address, arguments, tmp_path_factory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    command = ["prepare", "--out", str(out), *arguments]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return contents(out)


class TooLateError(Exception):
    """The driver had ended before it could be disturbed."""


def start(arguments: list[str], out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "launch", "data", "prepare", "--out", str(out), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(condition: Callable[[], object], driver: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300  # on a busy machine
    while not condition():
        if driver.poll() == 0:
            raise TooLateError
        assert driver.poll() is None, driver.communicate()[0]
        assert time.monotonic() < deadline, "never got there"
        time.sleep(0.005)


def workers(function: str) -> list[psutil.Process]:
    """Descendants of this process that run the function now, by the name that Ray gives them."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if "".join(process.cmdline()).startswith(f"ray::{function}"):
                found.append(process)
    return found


def disturb(arguments: list[str], out: Path) -> None:
    """Kill drivers and workers in every stage, call after call into one directory."""

    def records(pattern: str) -> int:
        return len(list(out.glob(f".work/*/{pattern}")))

    def kill_workers(function: str, driver: subprocess.Popen[str]) -> None:
        wait_for(lambda: workers(function), driver)
        for process in workers(function):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    driver = start(arguments, out)  # Ctrl-C during the sketches
    wait_for(lambda: records("sketch-*.json"), driver)
    driver.send_signal(signal.SIGINT)
    assert driver.stdout
    if "interrupted" not in driver.stdout.read():
        raise TooLateError
    driver.wait()
    before = records("sketch-*.json")
    driver = start(arguments, out)  # kill workers there, and the driver while it writes shards
    kill_workers("sketch", driver)
    wait_for(lambda: records("0*.json"), driver)
    driver.kill()
    driver.wait()
    if (out / "manifest.json").exists() or not before < records("sketch-*.json"):
        raise TooLateError
    driver = start(arguments, out)  # kill workers while they write shards
    kill_workers("tokenize", driver)
    output = driver.communicate()[0]
    assert driver.returncode == 0, output


def test_drivers_and_workers_are_killed(arguments, undisturbed, tmp_path):
    for attempt in range(5):
        out = tmp_path / str(attempt)
        with suppress(TooLateError):
            disturb(arguments, out)
            assert contents(out) == undisturbed
            return
    pytest.fail("every driver had ended before it could be disturbed")


NODE_LOSS = """
import os, sys, threading, time
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from launch.__main__ import main

out, arguments = Path(sys.argv[1]), sys.argv[2:]
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
second = cluster.add_node(num_cpus=1)
os.environ["RAY_ADDRESS"] = cluster.address

def pull_the_plug():
    while not list(out.glob(".work/*/sketch-*.json")):
        time.sleep(0.005)
    cluster.remove_node(second, allow_graceful=False)
    print("node removed", file=sys.__stdout__, flush=True)

threading.Thread(target=pull_the_plug).start()
sys.argv = ["launch", "data", "prepare", "--out", str(out), *arguments]
try:
    main()
finally:
    ray.shutdown()
    cluster.shutdown()
"""


def test_a_node_is_lost(undisturbed, alone, arguments, tmp_path):
    """A real Ray cluster of two nodes; one disappears midway."""
    command = [sys.executable, "-c", NODE_LOSS, tmp_path / "out", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "node removed" in done.stdout, done.stderr
    assert "raylet" not in done.stdout and "raylet" in done.stderr  # Ray's own message
    assert contents(tmp_path / "out") == undisturbed


SESSIONS = """
import sys
from contextlib import suppress
from pipeline.data.ray_pool import cluster, run
for ending in (ZeroDivisionError, KeyboardInterrupt, None):
    with suppress(ZeroDivisionError, KeyboardInterrupt), cluster(1):
        if ending:
            raise ending
with cluster(1):
    run(abs, [(1,)])
    import ray
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
"""


def using(folder: str) -> list[psutil.Process]:
    """Processes that Ray renamed and that have a file below the folder open."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            handles = Path(f"/proc/{process.pid}/fd").iterdir()
            renamed = "".join(process.cmdline()).startswith("ray::")
            if renamed and any(str(h.readlink()).startswith(folder) for h in handles):
                found.append(process)
    return found


@pytest.mark.slow
def test_a_private_ray_session_is_closed_and_leaves_logs_of_failures_but_no_process() -> None:
    with tempfile.TemporaryDirectory() as folder:  # a short path: Ray has sockets in it
        env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        driver = subprocess.Popen(
            [sys.executable, "-c", SESSIONS],
            env=env | {"RAY_TMPDIR": folder, "HOME": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert driver.stdout
        # Ray listens on every interface. Without the driver's token, nobody can run code there.
        join = f"import ray; ray.init({driver.stdout.readline().strip()!r})"
        stranger = subprocess.run([sys.executable, "-c", join], env=env, capture_output=True)
        assert stranger.returncode == 1 and b"InvalidAuthToken" in stranger.stderr
        assert not Path(folder, ".ray").exists()  # where Ray itself would write a token
        sessions = [path for path in Path(folder, "ray").glob("session_2*") if path.is_dir()]
        assert len(sessions) == 2  # the failed driver, and the running one
        assert all((session / "logs").is_dir() for session in sessions)
        agents = using(folder)
        assert len(agents) >= 2
        driver.kill()
        driver.wait()
        # Ray's agents alone would wait for a minute.
        assert not psutil.wait_procs(agents, timeout=30)[1] and not using(folder)


class Swallows:
    """Python prints and drops what is raised in __del__, as where Ray frees its objects."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_is_swallowed_still_counts(ray_cluster: None) -> None:
    def on_done(index: int, _: int) -> None:
        done.append(index)
        Swallows()

    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        run(slow_abs, [(number,) for number in range(50)], on_done)
    assert done == [done[0]]


def test_an_error_in_a_worker_has_its_traceback(ray_cluster: None) -> None:
    with pytest.raises(TypeError) as caught:
        run(slow_abs, [("a",)])
    assert "in slow_abs" in str(caught.value.__cause__)


def slow_abs(number: int) -> int:
    time.sleep(0.5)
    return abs(number)
