"""`launch sync` sends a run to MLflow that was made without a server."""

import json
from pathlib import Path

import pytest
from conftest import SECRET
from mlflow import MlflowClient
from mlflow_server import event, step_record

from pipeline.atomic import locked
from pipeline.errors import RunError
from pipeline.runs.log import Log
from pipeline.track import mlflow_sync
from tests.scaling.made_runs import make_ladder


def test_replay_is_complete_and_happens_once(inside, server, run_dir, log, monkeypatch):
    log.append(event(0, "start"))
    for step in range(1, 301):
        log.append(step_record(step))
    log.append(event(300, "finish"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert "127.0.0.1:9" in inside("sync", run_dir, "--wait", 1, code=2)

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    data = json.loads(inside("sync", run_dir, "--json"))
    assert (data["records"], data["uri"]) == (302, server.uri)
    history = MlflowClient(server.uri).get_metric_history(data["run_id"], "train/loss")
    assert sorted(metric.step for metric in history) == list(range(1, 301))

    monkeypatch.delenv("MLFLOW_TRACKING_URI")  # the run records where it was sent
    assert f"0 records sent │ run {data['run_id']}" in inside("sync", run_dir)
    assert inside("sync", run_dir, "--quiet") == ""


def test_a_sweep_comes_back_with_its_forecasts(inside, server, tmp_path, monkeypatch):
    """A run and a forecast made without a server reach MLflow from their directories alone."""
    root = make_ladder(tmp_path / "rebuilt")
    about = {"experiment": root.name, "kind": "ladder"}
    secret = f"cluster.slurm.env.HF_TOKEN={SECRET}"
    (root / "sweep.json").write_text(json.dumps({**about, "set": ["seed=3", secret]}))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    target = ("--params", 7e6, "--tokens", 1.4e8, "--register")
    data = json.loads(inside("forecast", "--runs", root, *target, "--json"))
    assert "MLflow has no copy" in data["warnings"][-1]

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    inside("sync", root)
    client = MlflowClient(server.uri)
    runs = client.search_runs([client.get_experiment_by_name(root.name).experiment_id])
    (parent,) = (run.info.run_id for run in runs if run.info.run_name == "sweep")
    assert len(runs) == 4
    (kept,) = client.list_artifacts(parent, "forecasts")
    copy = Path(client.download_artifacts(parent, kept.path))
    assert copy.read_bytes() == Path(data["registered"][0]).read_bytes()
    files = {file.path for file in client.list_artifacts(parent)}
    assert {"fit.json", "points.csv", "dashboard.html"} <= files
    params = client.get_run(parent).data.params
    assert "seed=3" in params["sweep.set"] and SECRET not in params["sweep.set"]
    assert SECRET not in Path(client.download_artifacts(parent, "sweep.json")).read_text()


def test_not_a_run(inside, tmp_path: Path) -> None:
    assert "log.jsonl" in inside("sync", tmp_path, code=2)
    file = tmp_path / "run"
    file.touch()
    assert f"{file} is not a directory" in inside("sync", file, code=2)


def test_one_feeder_at_a_time(run_dir: Path, log: Log) -> None:
    log.append(step_record(1))
    with locked(run_dir / "mlflow.lock", wait_s=0) as alone:
        assert alone
        with pytest.raises(RunError, match="right now"):
            mlflow_sync.sync(run_dir)
