"""A real server, killed, frozen and restarted under a sidecar: every record arrives once."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from conftest import SECRET
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow_server import Server, event, step_record, until

from pipeline.process import python_module
from pipeline.runs.log import Log, read
from pipeline.track import mlflow_sync
from pipeline.track.sidecar import MODULE, Sidecar
from tests.forks import Fork

# A busy machine may pause; a synchronous call to a dead server takes 4.4 s.
SLOWEST_APPEND_S = 0.5
WAIT_S = 600  # for any state: a sidecar has a low priority, and so little time at high load


@pytest.fixture
def uri(server: Server, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    monkeypatch.setattr(subprocess, "Popen", Fork)  # MLflow is imported already
    return server.uri


def write(log: Log, steps: range, pause_s: float = 0.0) -> None:
    """Append records as the training loop does, and time it."""
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


def wait_for_step(run_dir: Path, step: int) -> None:
    until(lambda: mlflow_sync.load_state(run_dir).sent.get("step") == step, WAIT_S)


def test_everything_arrives(uri: str, run_dir: Path, log: Log) -> None:
    sidecar = Sidecar(run_dir)
    log.append(event(0, "start"))
    write(log, range(1, 251))
    log.append(step_record(251, loss=float("nan"), grad_norm=float("inf"), **{"odd name(%)": 3}))
    log.append({**step_record(251), "kind": "eval", "loss": 3.5, "bpb": 1.25})
    log.append(event(251, "finish"))
    assert sidecar.finish(WAIT_S) == ""

    client = MlflowClient(uri)
    run = the_run(uri, run_dir)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "one")
    began_ms = int(next(read(run_dir / "log.jsonl"))["time"] * 1000)
    assert began_ms == run.info.start_time <= run.info.end_time
    params = run.data.params
    assert params["model.layers"] == "2"
    assert params["run.parameters.total"] == "123"
    assert params["run.figure_149"] == "149"
    assert len(params["model.long"]) == 500
    tags = run.data.tags
    assert tags["convention"] == "6N + attention"
    assert tags["mlflow.source.git.commit"] == "a" * 40
    assert tags["event.finish"].startswith("step 251 at 20")
    assert {"host", "version.torch", "version.mlflow"} <= tags.keys()
    assert run.data.metrics["eval/bpb"] == 1.25
    assert run.data.metrics["train/odd name___"] == 3
    for key, value in {"train/tokens": 7 * 4096, "train/flops": 7 * 4096 * 1_000_000}.items():
        history = client.get_metric_history(run.info.run_id, key)
        assert [metric.step for metric in history] == list(range(1, 252))
        assert history[6].value == value
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert len(losses) == 251
    assert losses[-1].value != losses[-1].value
    artifacts = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert artifacts == {"config.toml", "run.json", "env.json"}

    # MLflow opens it as a machine-learning experiment, with each setting once and no secret.
    experiment = client.get_experiment(run.info.experiment_id)
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    assert "run.vocab" not in params and "run.name" not in params
    assert params["cluster.slurm.env.HF_TOKEN"] == "***"
    for name in artifacts:
        text = Path(client.download_artifacts(run.info.run_id, name)).read_text()
        assert SECRET not in text
        assert "environ" not in text


def test_server_killed_and_restarted(server: Server, uri: str, run_dir: Path, log: Log) -> None:
    sidecar = Sidecar(run_dir)
    log.append(event(0, "start"))
    write(log, range(1, 101))
    wait_for_step(run_dir, 100)
    server.kill()
    write(log, range(101, 401), pause_s=0.005)
    assert sidecar.process.poll() is None
    server.start()
    write(log, range(401, 501))
    log.append(event(500, "finish"))
    assert sidecar.finish(WAIT_S) == ""
    for key in ("train/loss", "train/tokens", "train/flops"):
        assert steps_there(uri, run_dir, key) == list(range(1, 501))
    assert the_run(uri, run_dir).info.status == "FINISHED"


def test_frozen_server(server, uri, run_dir, log, monkeypatch):
    """Requests time out here and are carried out there: sent again, they must not count twice."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    sidecar = Sidecar(run_dir)
    log.append(event(0, "start"))
    write(log, range(1, 51))
    wait_for_step(run_dir, 50)
    server.signal(signal.SIGSTOP)
    try:
        write(log, range(51, 251), pause_s=0.01)
        until(lambda: "records wait" in (run_dir / "mlflow.log").read_text(), WAIT_S)
    finally:
        server.signal(signal.SIGCONT)
    log.append(event(250, "interrupt"))
    assert sidecar.finish(WAIT_S) == ""
    assert steps_there(uri, run_dir) == list(range(1, 251))
    assert the_run(uri, run_dir).info.status == "KILLED"


def test_killed_sidecar_is_started_again(uri: str, run_dir: Path, log: Log) -> None:
    """The sidecar is killed during training, and again after its end."""
    sidecar = Sidecar(run_dir)
    log.append(event(0, "start"))
    write(log, range(1, 41))
    wait_for_step(run_dir, 40)
    first = sidecar.process.pid
    sidecar.process.kill()
    until(lambda: sidecar.process.pid != first, 60, "no sidecar was started")
    write(log, range(41, 61))
    wait_for_step(run_dir, 60)
    sidecar.process.kill()
    write(log, range(61, 65))
    log.append(event(64, "finish"))
    assert sidecar.finish(WAIT_S) == ""
    assert steps_there(uri, run_dir) == list(range(1, 65))
    assert the_run(uri, run_dir).info.status == "FINISHED"


def test_crash_and_resume_is_one_run(uri: str, run_dir: Path, log: Log) -> None:
    process = subprocess.Popen(python_module(MODULE, run_dir), stdin=subprocess.PIPE)
    log.append(event(0, "start"))
    write(log, range(1, 121))
    wait_for_step(run_dir, 120)
    process.kill()  # with its launcher; the last acknowledgement is lost, too
    process.communicate()
    lost = mlflow_sync.load_state(run_dir)
    lost.sent["step"] = 60
    lost.sending = True
    mlflow_sync.save_state(run_dir, lost)
    log.close()

    again = Log(run_dir / "log.jsonl")
    assert again.truncate_after(100) == 20
    sidecar = Sidecar(run_dir)
    again.append(event(100, "resume"))
    write(again, range(101, 131))
    wait_for_step(run_dir, 130)
    assert the_run(uri, run_dir).info.status == "RUNNING"
    again.truncate_after(110)  # again, while a sidecar is alive
    again.append(event(110, "resume"))
    write(again, range(111, 151))
    again.close()
    assert sidecar.finish(WAIT_S) == ""  # no event states how it ended
    run = the_run(uri, run_dir)
    assert steps_there(uri, run_dir) == list(range(1, 151))
    assert run.data.metrics["restarts"] == 2
    assert run.info.status == "FAILED"


def test_events_arrive_when_the_clock_goes_back(uri: str, run_dir: Path, log: Log) -> None:
    """The same with a log without sequence numbers, and with the state of an earlier release."""
    early = [{**event(step, "save"), "time": time.time() - step} for step in range(3)]
    (run_dir / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in early))
    old = Log(run_dir / "log.jsonl")
    mlflow_sync.sync(run_dir)
    assert steps_there(uri, run_dir, "event/save") == [0, 1, 2]

    state = json.loads((run_dir / "mlflow.json").read_text())
    state["sent"] = {"event": time.time() - 1}  # an event has at least the next millisecond
    (run_dir / "mlflow.json").write_text(json.dumps(state))
    old.append({**event(3, "save"), "time": 1000.0})
    mlflow_sync.sync(run_dir)
    old.truncate_after(1)
    old.append({**event(2, "restart"), "time": 900.0})
    mlflow_sync.sync(run_dir)
    old.append({**event(4, "finish"), "time": 800.0})
    old.close()
    mlflow_sync.sync(run_dir)
    assert steps_there(uri, run_dir, "event/save") == [0, 1, 2, 3]
    run = the_run(uri, run_dir)
    assert run.data.metrics["restarts"] == 1
    assert run.info.status == "FINISHED"


def test_mlflow_json_lost(uri: str, run_dir: Path, log: Log) -> None:
    """The answer to a run's creation was lost, or the store was wiped: its id finds it again."""
    write(log, range(1, 11))
    first = mlflow_sync.sync(run_dir).state
    mlflow_sync.save_state(run_dir, mlflow_sync.State(id=first.id))
    again = mlflow_sync.sync(run_dir)
    assert (again.state.run_id, again.records_sent) == (first.run_id, 0)
    wiped = mlflow_sync.State(id="another", uri=uri, run_id="0" * 32, sent={"step": 10})
    mlflow_sync.save_state(run_dir, wiped)
    assert mlflow_sync.sync(run_dir).records_sent == 10
    MlflowClient(uri).delete_run(mlflow_sync.load_state(run_dir).run_id)
    with pytest.raises(Exception, match=r"run_id=.*mlflow\.json"):
        mlflow_sync.sync(run_dir)


def test_dead_server_is_given_up(run_dir: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """User and password of the address are not written anywhere, either."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://somebody:secret@127.0.0.1:9")
    write(log, range(1, 11))
    command = python_module(MODULE, run_dir)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0
    (line,) = done.stdout.splitlines()
    assert "http://127.0.0.1:9" in line and f"launch sync {run_dir}" in line
    assert "secret" not in done.stdout + done.stderr
    (run_dir / "config.toml").unlink()
    assert not any("secret" in file.read_text() for file in run_dir.iterdir())


@pytest.mark.parametrize("uri", ["htp://host:5000", "localhost:5000", "http//host", "file:///x"])
def test_addresses_that_cannot_work(run_dir, log, monkeypatch, uri):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    write(log, range(1, 3))
    with pytest.raises(Exception, match=f"MLFLOW_TRACKING_URI={uri}"):
        mlflow_sync.sync(run_dir)


def test_without_mlflow(run_dir: Path, log: Log) -> None:
    write(log, range(1, 3))
    code = (
        "import sys; sys.modules['mlflow'] = None; from pipeline.track import sidecar;"
        f"sys.exit(sidecar.main([{str(run_dir)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0
    (line,) = done.stdout.splitlines()
    assert "pip install mlflow" in line


def test_default_store_and_two_sidecars_at_once(run_dir: Path, log: Log) -> None:
    """Both find a database that does not exist yet."""
    other = run_dir.with_name("two")
    other.mkdir()
    (other / "run.json").write_text(json.dumps({"experiment": "two"}))
    second = Log(other / "log.jsonl")
    sidecars = [Sidecar(run_dir), Sidecar(other)]
    for records in (log, second):
        records.append(event(0, "start"))
        write(records, range(1, 31))
        records.append(event(30, "finish"))
    assert [sidecar.finish(WAIT_S) for sidecar in sidecars] == ["", ""]
    second.close()
    uri = f"sqlite:///{Path.cwd() / 'mlflow.db'}"
    assert steps_there(uri, run_dir) == list(range(1, 31))
    assert mlflow_sync.load_state(other).uri == uri
    assert list(Path("mlruns").rglob("config.toml"))
    files = Counter(path.name for path in Path.cwd().iterdir())
    assert files == Counter(["runs", "mlflow.db", ".mlflow.lock", "mlruns"])


def test_the_sidecar_outlives_a_preemption_signal(run_dir: Path, log: Log) -> None:
    """SLURM's SIGTERM reaches the sidecar too, while training still saves."""
    log.append(event(0, "start"))
    mlflow_sync.sync(run_dir)  # creates the store
    sidecar = Sidecar(run_dir)
    process = sidecar.process
    until((run_dir / "env.json").exists, WAIT_S)  # by now it handles signals
    process.send_signal(signal.SIGTERM)
    write(log, range(1, 11))
    wait_for_step(run_dir, 10)  # it continues after the signal
    log.append(event(10, "interrupt"))
    until(lambda: process.poll() is not None, WAIT_S, "it waits for more than the end")
    assert process.returncode in (0, 1)  # 1: on a busy machine it asks to be started again
    assert sidecar.finish(WAIT_S) == ""
    assert mlflow_sync.load_state(run_dir).status == "KILLED"
