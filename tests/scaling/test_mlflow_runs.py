"""The same runs, read from a directory and from the MLflow store that they were replayed to."""

import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.config.dump import to_toml
from pipeline.config.layers import load
from pipeline.errors import RunError
from pipeline.planner.check import resolve
from pipeline.runs.history import read_runs
from pipeline.scaling.ladder import ladder_of
from pipeline.scaling.points import points_of
from pipeline.track.mlflow_runs import read_experiment, record_of
from tests.scaling.made_runs import make_run

mlflow = pytest.importorskip("mlflow")


@pytest.fixture
def stored(ladder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    return store_runs(ladder, monkeypatch, tmp_path)


def store_runs(ladder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    from pipeline.track import mlflow_runs
    from pipeline.track.mlflow_store import Store

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.chdir(tmp_path)
    store = Store(uri)
    for folder in sorted(ladder.iterdir()):
        run_id, _ = store.open("demo", folder.name, folder.name, 1000)
        store.describe(run_id, mlflow_runs.params(folder), mlflow_runs.tags(folder))
        rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        found = ((r, *pair) for r in rows for pair in mlflow_runs.metrics(r).items())
        store.send(run_id, [(k, v, int(r["time"] * 1000), r["step"]) for r, k, v in found], {})
        store.set_status(run_id, "FINISHED", 500_000)
    return ladder


def test_both_give_the_same_points(stored: Path, launch) -> None:
    here, there = points_of(read_runs(stored)), points_of(read_experiment("demo"))
    assert there.run == here.run
    assert there.convention == here.convention
    for column in ("N", "D", "C", "loss"):
        assert getattr(there, column) == pytest.approx(getattr(here, column))
    # This directory has no runs/demo, so the name means the store.
    data = json.loads(launch("fit", "--experiment", "demo", "--json"))
    assert data["points"]["used"] == 3
    with pytest.raises(RunError, match="it has demo"):
        read_experiment("dmeo")


def test_both_give_the_same_forecast_of_a_task(monkeypatch, launch, tmp_path: Path) -> None:
    """Chance comes from the file of questions, which the config names."""
    ladder = tmp_path / "ladder"
    questions = tmp_path / "pairs.jsonl"
    questions.write_text('{"good": "a", "bad": "b"}\n')
    config = load(size="27k", sets=[f'eval.tasks=["{questions}"]', "train.steps=9"])
    for number, (N, ratio) in enumerate(product((2e5, 6e5, 2e6), (10, 40))):
        path = make_run(ladder, f"run-{number}", N, ratio * N, seed=number, questions=500)
        (path / "config.toml").write_text(to_toml(resolve(config, ranks=1, gpu=False)))
    store_runs(ladder, monkeypatch, tmp_path)
    asked = "forecast --task pairs --params 7e6 --tokens 1.4e8 --json"
    here, there = (
        json.loads(launch(f"{asked} {source}"), parse_float=lambda text: f"{float(text):.7g}")
        for source in (f"--runs {ladder}", "--experiment demo")
    )
    assert there == here


def test_the_dashboard_draws_both_the_same(stored: Path) -> None:
    from pipeline.dashboard.source import Directories, open_source

    drawn = []
    for source in (Directories(stored), open_source(None, "demo")):
        seen = [source.read(key, whole=True) for key in source.scan()]
        values = {
            one.run.name: (one.curves(100), one.row("", 0.0)["status"], one.log.token_hashes())
            for one in seen
        }
        drawn.append(dict(sorted(values.items())))
    assert drawn[0] == drawn[1] and len(drawn[0]) == 3


def test_a_registered_forecast_is_kept_there_too(stored: Path, launch) -> None:
    call = "forecast --params 7e6 --tokens 1.4e8 --register --json --runs"
    data = json.loads(launch(call, stored))
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("demo")
    (kept,) = [
        r for r in client.search_runs([experiment.experiment_id]) if r.info.run_name == "sweep"
    ]
    (there,) = client.list_artifacts(kept.info.run_id, "forecasts")
    assert Path(there.path).name == Path(data["registered"][0]).name
    assert len(read_experiment("demo")) == 3  # the forecast does not count as a run


def test_a_forecast_has_the_recipe_of_the_runs(stored: Path, launch) -> None:
    asked = "forecast --experiment demo --size 3m --json"
    command = json.loads(launch(asked, "--register"))["recipe"]["command"]
    assert "recipe=adamw" in command  # the old default
    assert command.endswith("--experiment demo") and "--out runs/demo-3m-" in command
    assert "not yet" in launch("score --experiment demo")  # runs/demo has only the forecast
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("demo")
    for run in client.search_runs([experiment.experiment_id]):
        client.log_param(run.info.run_id, "recipe", "muon")
    assert "recipe=muon" in json.loads(launch(asked))["recipe"]["command"]
    for run in client.search_runs([experiment.experiment_id]):
        client.log_param(run.info.run_id, "model.source_seq", "512")
    assert ladder_of(read_experiment("demo")).settings["model.source_seq"] == 512


def test_no_store_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(RunError, match="no MLflow store"):
        read_experiment("demo")


@pytest.mark.parametrize("text", ["9" * 400, "nan", "x"])
def test_a_bad_number_is_named(text: str) -> None:
    data = SimpleNamespace(params={"run.params.scaling": "1", "run.steps": text}, tags={})
    with pytest.raises(RunError, match=r"run\.steps="):
        record_of(SimpleNamespace(info=SimpleNamespace(run_id="x", run_name="y"), data=data))
