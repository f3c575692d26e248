"""A run against a real MLflow server that dies and comes back while it trains."""

import json

import pytest
from mlflow import MlflowClient
from mlflow_server import Server

from tests.conftest import environment, launch, records
from tests.forks import Launched


@pytest.mark.timeout(400)
def test_a_run_does_not_notice_its_server_dying(server: Server, corpus, tmp_path):
    out = tmp_path / "run"
    tracked = {"MLFLOW_TRACKING_URI": server.uri}
    arguments = (
        "pretrain", "--size", "tiny", "--steps", 120, "--data", corpus, "--nproc", 1, "--out", out,
        "--experiment", "outage", "--set", "model.seq=64", "--set", "model.layers=1", "--set", "train.batch_tokens=256",
        "--set", "train.eval_every=30", "--set", "train.eval_batches=1",
        "--set", "train.hang_s=300",  # a step on a busy machine once took 29 s
    )  # fmt: skip
    process = Launched("launch", arguments, environment(**tracked))
    for line in process.stdout:
        if line.startswith("step  20/"):
            server.kill()
        if line.startswith("step  60/"):
            break
    assert line.startswith("step  60/")  # forty steps without a server
    # The run continues. If its rest is too short, `launch sync` sends the remaining records.
    server.start()
    process.stdout.read()
    assert process.wait(120) == 0
    launch("sync", out, **tracked)

    steps = {r["step"]: r for r in records(out, "step")}
    assert sorted(steps) == list(range(1, 121))

    client = MlflowClient(server.uri)
    run = client.get_run(json.loads((out / "mlflow.json").read_text())["run_id"])
    assert client.get_experiment(run.info.experiment_id).name == "outage"
    assert run.info.status == "FINISHED"

    def history(name: str) -> dict[int, float]:
        found = client.get_metric_history(run.info.run_id, name)
        values = {metric.step: metric.value for metric in found}
        assert len(values) == len(found)  # each step once
        return values

    for key in ("loss", "grad_norm", "tokens"):
        assert history(f"train/{key}") == pytest.approx({s: r[key] for s, r in steps.items()})
    evals = {r["step"]: r["bpb"] for r in records(out, "eval")}
    assert history("eval/bpb") == pytest.approx(evals)
    assert run.data.params["model.width"] == "64" and "run.params.total" in run.data.params
    artifacts = {a.path for a in client.list_artifacts(run.info.run_id)}
    assert {"config.toml", "run.json", "env.json"} <= artifacts
