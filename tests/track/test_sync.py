"""`launch sync` replays a run that was made with no server in sight."""

import json
from pathlib import Path

import pytest
import typer
from conftest import SECRET
from mlflow import MlflowClient
from mlflow_server import event, step_record
from typer.testing import CliRunner

from launch import jobs, law
from pipeline.atomic import locked
from pipeline.errors import RunError
from pipeline.runs.log import Log
from pipeline.track import mlflow_sync
from tests.scaling.made_runs import make_ladder


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.callback()(lambda: None)  # several commands, as in the real one
    app.add_typer(jobs.app)
    return app


def test_replay_is_complete_and_happens_once(app, server, run_dir, log, monkeypatch):
    log.append(event(0, "start"))
    for step in range(1, 301):
        log.append(step_record(step))
    log.append(event(300, "finish"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    failed = CliRunner().invoke(app, ["sync", str(run_dir), "--wait", "1"])
    assert isinstance(failed.exception, RunError)
    assert "127.0.0.1:9" in str(failed.exception)

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    result = CliRunner().invoke(app, ["sync", str(run_dir), "--json"])
    assert result.exit_code == 0, result.exception
    data = json.loads(result.stdout)
    assert (data["records"], data["uri"]) == (302, server.uri)
    history = MlflowClient(server.uri).get_metric_history(data["run_id"], "train/loss")
    assert sorted(metric.step for metric in history) == list(range(1, 301))

    monkeypatch.delenv("MLFLOW_TRACKING_URI")  # the run remembers where it went
    again = CliRunner().invoke(app, ["sync", str(run_dir)])
    assert f"0 records sent │ run {data['run_id']}" in again.stdout
    assert CliRunner().invoke(app, ["sync", str(run_dir), "--quiet"]).stdout == ""


def test_a_sweep_comes_back_with_its_forecasts(app, server, tmp_path, monkeypatch):
    """Made and registered with no server in sight; then all of it from the directories alone."""
    root = make_ladder(tmp_path / "rebuilt")
    about = {"experiment": root.name, "kind": "ladder"}
    secret = f"cluster.slurm.env.HF_TOKEN={SECRET}"
    (root / "sweep.json").write_text(json.dumps({**about, "set": ["seed=3", secret]}))
    law.register(app)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    call = ["forecast", "--runs", str(root), "--params", "7e6", "--tokens", "1.4e8"]
    call += ["--register", "--json"]
    data = json.loads(CliRunner().invoke(app, call).stdout)
    assert "MLflow has no copy" in data["warnings"][-1]

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    result = CliRunner().invoke(app, ["sync", str(root)])
    assert result.exit_code == 0, result.exception
    client = MlflowClient(server.uri)
    runs = client.search_runs([client.get_experiment_by_name(root.name).experiment_id])
    (parent,) = (run.info.run_id for run in runs if run.info.run_name == "sweep")
    assert len(runs) == 4
    (kept,) = client.list_artifacts(parent, "forecasts")
    assert (
        Path(client.download_artifacts(parent, kept.path)).read_bytes()
        == Path(data["registered"][0]).read_bytes()
    )
    files = {file.path for file in client.list_artifacts(parent)}
    assert {"fit.json", "points.csv", "dashboard.html"} <= files
    params = client.get_run(parent).data.params
    assert "seed=3" in params["sweep.set"] and SECRET not in params["sweep.set"]
    assert SECRET not in Path(client.download_artifacts(parent, "sweep.json")).read_text()


def test_not_a_run(app: typer.Typer, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["sync", str(tmp_path)])
    assert isinstance(result.exception, RunError)
    assert "log.jsonl" in str(result.exception)


def test_one_feeder_at_a_time(run_dir: Path, log: Log) -> None:
    log.append(step_record(1))
    with locked(run_dir / "mlflow.lock", wait_s=0) as alone:
        assert alone
        with pytest.raises(RunError, match="right now"):
            mlflow_sync.sync(run_dir)
