"""Killed at any moment, the next call finishes what is missing, and every byte is as if nothing had happened."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

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
    return [
        *sources,
        "--tokenizer",
        str(folder / "t.model"),
        "--set",
        "dedup.exact=true",
        "--set",
        "dedup.near={}",
    ]


@pytest.fixture(scope="module")
def address(ray_cluster: None) -> Iterator[None]:
    """Drivers of their own on the session's Ray, as on a cluster."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
        yield


def start(arguments: list[str], out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "launch", "data", "prepare", "--out", str(out), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture(scope="module")
def undisturbed(
    address: None, arguments: list[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    done = CliRunner().invoke(
        app, ["prepare", "--out", str(out), *arguments], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    return contents(out)


class TooLateError(Exception):
    """The driver had ended before it could be disturbed."""


def wait_for(condition: Callable[[], object], driver: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300  # a busy box
    while not condition():
        if driver.poll() == 0:
            raise TooLateError
        assert driver.poll() is None, driver.communicate()[0]
        assert time.monotonic() < deadline, "never got there"
        time.sleep(0.005)


def workers(function: str) -> list[int]:
    """Processes of this session's Ray that are running the function right now, by the name Ray gives them."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cmdline").read_bytes().startswith(f"ray::{function}".encode()) and ours(
                int(entry.name)
            ):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def ours(pid: int) -> bool:
    """Whether the process descends from this one: another Ray on the machine is none of our business."""
    while pid > 1 and pid != os.getpid():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == os.getpid()


def disturb(arguments: list[str], out: Path) -> None:
    """Kill drivers and workers in every stage, call after call into one directory."""

    def records(pattern: str) -> int:
        return len(list(out.glob(f".work/*/{pattern}")))

    def killed(function: str, driver: subprocess.Popen[str]) -> None:
        wait_for(lambda: workers(function), driver)
        for pid in workers(function):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    driver = start(arguments, out)  # Ctrl-C among the sketches
    wait_for(lambda: records("sketch-*.json"), driver)
    driver.send_signal(signal.SIGINT)
    assert driver.stdout
    if "interrupted" not in driver.stdout.read():
        raise TooLateError
    driver.wait()
    before = records("sketch-*.json")
    driver = start(arguments, out)  # workers lost there, the driver lost among the shards
    killed("sketch", driver)
    wait_for(lambda: records("0*.json"), driver)
    driver.kill()
    driver.wait()
    if (out / "manifest.json").exists() or not before < records("sketch-*.json"):
        raise TooLateError
    driver = start(arguments, out)  # workers lost among the shards
    killed("tokenize", driver)
    said = driver.communicate()[0]
    assert driver.returncode == 0, said


def test_drivers_and_workers_are_killed(
    arguments: list[str], undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    for attempt in range(5):
        with suppress(TooLateError):
            disturb(arguments, out := tmp_path / str(attempt))
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
    print("node removed", flush=True)

threading.Thread(target=pull_the_plug).start()
sys.argv = ["launch", "data", "prepare", "--out", str(out), *arguments]
try:
    main()
finally:
    ray.shutdown()
    cluster.shutdown()
"""


def test_a_node_is_lost(
    arguments: list[str], undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    """A real two-node cluster of Ray, one node gone in the middle."""
    alone = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    run = subprocess.run(
        [sys.executable, "-c", NODE_LOSS, tmp_path / "out", *arguments],
        env=alone,
        capture_output=True,
        text=True,
    )
    assert "node removed" in run.stdout, run.stderr
    assert contents(tmp_path / "out") == undisturbed


SESSIONS = """
from contextlib import suppress
from pipeline.data.ray_pool import cluster
for number in range(2):
    with suppress(ZeroDivisionError), cluster(1):
        1 / number
"""


def test_of_a_session_of_our_own_nothing_stays_unless_it_failed() -> None:
    alone = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    with tempfile.TemporaryDirectory() as place:  # a short path: Ray keeps sockets in it
        subprocess.run(
            [sys.executable, "-c", SESSIONS], env={**alone, "RAY_TMPDIR": place}, check=True
        )
        (session,) = Path(place, "ray").glob("session_*")
        assert (session / "logs").is_dir()


class Swallows:
    """What is raised while an object goes is printed and forgotten, as where Ray frees its own."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_is_heard_also_where_it_is_swallowed(ray_cluster: None) -> None:
    def noted(index: int, _: int) -> None:
        done.append(index)
        Swallows()

    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        run(abs_of, [(number,) for number in range(50)], noted)
    assert done == [done[0]]


def test_a_fault_of_ours_shows_where_it_was(ray_cluster: None) -> None:
    with pytest.raises(TypeError) as caught:
        run(abs_of, [("a",)])
    assert "in abs_of" in str(caught.value.__cause__)


def abs_of(number: int) -> int:
    time.sleep(0.5)
    return abs(number)
