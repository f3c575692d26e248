"""A real server, killed, frozen and restarted under a feed: the writer never waits, each record arrives once."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow_server import Server, event, step_record, until

from pipeline.runs.log import Log, read
from pipeline.track import mlflow_sync

SLOWEST_APPEND_S = 0.5  # a busy machine's hiccup; a synchronous call to a dead server takes 4.4 s


def write(log: Log, steps: range, pause_s: float = 0.0) -> None:
    """The training loop's part: nothing but appending, timed."""
    for step in steps:
        began = time.perf_counter()
        log.append(step_record(step))
        assert time.perf_counter() - began < SLOWEST_APPEND_S
        time.sleep(pause_s)


def the_run(uri: str, run_dir: Path) -> Run:
    """The only run of its experiment."""
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(run_dir.parents[1].name)
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return run


def steps_there(uri: str, run_dir: Path, key: str = "train/loss") -> list[int]:
    history = MlflowClient(uri).get_metric_history(the_run(uri, run_dir).info.run_id, key)
    return sorted(metric.step for metric in history)


def log_began(run_dir: Path) -> int:
    return int(next(read(run_dir / "log.jsonl"))["time"] * 1000)


def sent(run_dir: Path) -> float:
    return mlflow_sync.load_state(run_dir).sent.get("step", 0)


def test_everything_arrives(
    server: Server, run_dir: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    sidecar = mlflow_sync.start(run_dir)
    log.append(event(0, "start"))
    write(log, range(1, 251))
    log.append(step_record(251, loss=float("nan"), grad_norm=float("inf"), **{"odd name(%)": 3}))
    log.append(
        {
            "kind": "eval",
            "time": time.time(),
            "step": 251,
            "tokens": 5,
            "flops": 7,
            "loss": 3.5,
            "bpb": 1.25,
        }
    )
    log.append(event(251, "finish"))
    assert mlflow_sync.finish(sidecar, wait_s=120) == ""

    run = the_run(server.uri, run_dir)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "one")
    assert log_began(run_dir) == run.info.start_time <= run.info.end_time
    assert run.data.params["model.layers"] == "2"
    assert run.data.params["run.parameters.total"] == "123"
    assert run.data.params["run.figure_149"] == "149"
    assert len(run.data.params["model.long"]) == 500
    assert run.data.tags["convention"] == "6N + attention"
    assert run.data.tags["event.finish"].startswith("step 251 at 20")
    assert {"host", "version.torch", "version.mlflow"} <= run.data.tags.keys()
    assert run.data.metrics["eval/bpb"] == 1.25
    assert run.data.metrics["train/odd name___"] == 3

    client = MlflowClient(server.uri)
    for key, value in {"train/tokens": 7 * 4096, "train/flops": 7 * 4096 * 1_000_000}.items():
        history = client.get_metric_history(run.info.run_id, key)
        assert [metric.step for metric in history] == list(range(1, 252))
        assert history[6].value == value
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert len(losses) == 251
    assert losses[-1].value != losses[-1].value
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {
        "config.toml",
        "run.json",
        "env.json",
    }
    assert "environ" not in (run_dir / "env.json").read_text()


def test_server_killed_and_restarted(
    server: Server, run_dir: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    sidecar = mlflow_sync.start(run_dir)
    log.append(event(0, "start"))
    write(log, range(1, 101))
    until(lambda: sent(run_dir) == 100, 30)
    server.kill()
    write(log, range(101, 401), pause_s=0.005)
    assert sidecar.poll() is None
    server.start()
    write(log, range(401, 501))
    log.append(event(500, "finish"))
    assert mlflow_sync.finish(sidecar, wait_s=120) == ""
    for key in ("train/loss", "train/tokens", "train/flops"):
        assert steps_there(server.uri, run_dir, key) == list(range(1, 501))
    assert the_run(server.uri, run_dir).info.status == "FINISHED"


def test_frozen_server(
    server: Server, run_dir: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests time out here and are carried out there: resent, they must not count twice."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    sidecar = mlflow_sync.start(run_dir)
    log.append(event(0, "start"))
    write(log, range(1, 51))
    until(lambda: sent(run_dir) == 50, 30)
    server.signal(signal.SIGSTOP)
    try:
        write(log, range(51, 251), pause_s=0.01)
        time.sleep(3)
    finally:
        server.signal(signal.SIGCONT)
    log.append(event(250, "interrupt"))
    assert mlflow_sync.finish(sidecar, wait_s=120) == ""
    assert steps_there(server.uri, run_dir) == list(range(1, 251))
    assert the_run(server.uri, run_dir).info.status == "KILLED"


def test_crash_and_resume_is_one_run(
    server: Server, run_dir: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    sidecar = mlflow_sync.start(run_dir)
    log.append(event(0, "start"))
    write(log, range(1, 121))
    until(lambda: sent(run_dir) == 120, 30)
    sidecar.kill()  # all at once, and as if the last acknowledgement had been lost
    sidecar.communicate()
    lost = mlflow_sync.load_state(run_dir)
    lost.sent["step"], lost.sending = 60, True
    mlflow_sync.save_state(run_dir, lost)
    log.close()

    again = Log(run_dir / "log.jsonl")
    assert again.truncate_after(100) == 20
    sidecar = mlflow_sync.start(run_dir)
    again.append(event(100, "resume"))
    write(again, range(101, 131))
    until(lambda: sent(run_dir) == 130, 30)
    assert the_run(server.uri, run_dir).info.status == "RUNNING"
    again.truncate_after(110)  # and once more under a live sidecar
    again.append(event(110, "resume"))
    write(again, range(111, 151))
    again.close()
    assert mlflow_sync.finish(sidecar, wait_s=120) == ""  # without a word from training
    run = the_run(server.uri, run_dir)
    assert steps_there(server.uri, run_dir) == list(range(1, 151))
    assert run.data.metrics["restarts"] == 2
    assert run.info.status == "FAILED"


def test_mlflow_json_lost(
    server: Server, run_dir: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run created there whose answer was lost, or a store that was wiped: the run's identity finds it again."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    write(log, range(1, 11))
    first = mlflow_sync.sync(run_dir).state
    mlflow_sync.save_state(run_dir, mlflow_sync.State(id=first.id))
    again = mlflow_sync.sync(run_dir)
    assert (again.state.run_id, again.records_sent) == (first.run_id, 0)
    mlflow_sync.save_state(
        run_dir, mlflow_sync.State(id="another", uri=server.uri, run_id="0" * 32, sent={"step": 10})
    )
    assert mlflow_sync.sync(run_dir).records_sent == 10
    MlflowClient(server.uri).delete_run(mlflow_sync.load_state(run_dir).run_id)
    with pytest.raises(Exception, match=r"deleted in MLflow.*mlflow\.json"):
        mlflow_sync.sync(run_dir)


def test_dead_server_is_given_up(run_dir: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also: user and password of the address are written nowhere."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://somebody:secret@127.0.0.1:9")
    write(log, range(1, 11))
    command = [sys.executable, "-m", "pipeline.track.mlflow_sync", str(run_dir), "--wait", "2"]
    began = time.monotonic()
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0
    assert time.monotonic() - began < 20
    assert f"(http://127.0.0.1:9 does not answer); launch sync {run_dir} replays" in done.stdout
    assert len(done.stdout.splitlines()) == 1
    assert "secret" not in done.stdout + done.stderr
    assert not any("secret" in file.read_text() for file in run_dir.iterdir())


@pytest.mark.parametrize(
    ("uri", "word"),
    [
        ("htp://host:5000", "htp://host"),
        ("localhost:5000", "no kind"),
        ("http//host", "names a folder"),
        ("file:///x", "names"),
    ],
)
def test_addresses_that_cannot_work(
    run_dir: Path, log: Log, monkeypatch: pytest.MonkeyPatch, uri: str, word: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    write(log, range(1, 3))
    with pytest.raises(Exception, match=r"MLFLOW_TRACKING_URI=.*; try http://") as fault:
        mlflow_sync.sync(run_dir)
    assert word in str(fault.value)


def test_without_mlflow(run_dir: Path, log: Log) -> None:
    write(log, range(1, 3))
    code = (
        "import sys; sys.modules['mlflow'] = None; from pipeline.track import mlflow_sync;"
        f"sys.exit(mlflow_sync.main([{str(run_dir)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "MLflow is not installed" in done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_default_store_and_two_sidecars_at_once(run_dir: Path, log: Log) -> None:
    """Both meet a database that does not exist yet."""
    other = run_dir.with_name("two")
    other.mkdir()
    (other / "run.json").write_text(json.dumps({"experiment": "two"}))
    second = Log(other / "log.jsonl")
    sidecars = [mlflow_sync.start(run_dir), mlflow_sync.start(other)]
    for records in (log, second):
        records.append(event(0, "start"))
        write(records, range(1, 31))
        records.append(event(30, "finish"))
    assert [mlflow_sync.finish(sidecar, wait_s=120) for sidecar in sidecars] == [
        "",
        "",
    ]  # two imports of mlflow on a busy box
    second.close()
    uri = f"sqlite:///{Path.cwd() / 'mlflow.db'}"
    assert steps_there(uri, run_dir) == list(range(1, 31))
    assert mlflow_sync.load_state(other).uri == uri
    assert list(Path("mlruns").rglob("config.toml"))
    assert Counter(path.name for path in Path.cwd().iterdir()) == Counter(
        ["runs", "mlflow.db", ".mlflow.lock", "mlruns"]
    )


def test_preemption_signal_waits_for_the_last_word(run_dir: Path, log: Log) -> None:
    """SLURM's SIGTERM reaches the sidecar too, while training still saves."""
    sidecar = mlflow_sync.start(run_dir)
    log.append(event(0, "start"))
    write(log, range(1, 6))
    until(lambda: sent(run_dir) == 5, 30)
    os.kill(sidecar.pid, signal.SIGTERM)
    time.sleep(1.5)
    log.append(event(5, "interrupt"))
    sidecar.wait(timeout=15)
    assert mlflow_sync.load_state(run_dir).status == "KILLED"
    assert mlflow_sync.finish(sidecar, wait_s=120) == ""
