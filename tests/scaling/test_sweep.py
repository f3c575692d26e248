"""A sweep through the command line: interrupted, continued, branched off its trunk, with a member that cannot run."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from pipeline.sweep import execute
from tests.conftest import environment, launch, records
from tests.forks import Launched
from tests.track.mlflow_server import Server, until

SETS = (
    "recipe=adamw", "model.seq=64", "train.batch_tokens=1024", "optim.lr=2e-3", "train.eval_batches=2",
    "train.save_every=20", "train.keep_last=1",
)  # fmt: skip
SWEEP = f"""
kind = "ladder"
experiment = "short"
sizes = ["tiny", "175b"]
tokens = [51200, 81920]
set = {list(SETS)}
"""


@pytest.mark.timeout(1500)
def test_a_sweep_from_its_first_interruption_to_mlflow(corpus: Path, tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.start()
    tracked = {"MLFLOW_TRACKING_URI": server.uri}
    (tmp_path / "sweep.toml").write_text(SWEEP)
    root = tmp_path / "runs" / "short"
    trunk, branch = root / "tiny-81.9k", root / "tiny-51.2k"
    call = ("sweep", "run", "sweep.toml", "--data", corpus)
    process = Launched("launch", call, environment(**tracked), tmp_path)
    log = trunk / "log.jsonl"  # which is empty at first
    until(lambda: log.exists() and any(r["step"] > 2 for r in records(trunk)), 250)
    process.send_signal(signal.SIGINT)
    output = process.stdout.read()
    assert process.wait(250) == 130, output + process.stderr.read()
    assert "0 of 4 runs in runs/short have finished" in output
    assert records(trunk)[-1]["event"] == "interrupt"

    done = launch(*call, "--json", code=2, cwd=tmp_path, timeout=800, **tracked)
    data = json.loads(done.stdout)
    assert sorted(data["finished"]) == ["tiny-51.2k", "tiny-81.9k"] and data["missing"] == []
    assert "needs about" in data["failed"]["175b-81.9k"]
    assert "which failed" in data["failed"]["175b-51.2k"]  # the reason is its trunk
    assert done.stderr.splitlines()[-1].startswith(
        "error: 2 of 4 runs failed: 175b-81.9k, 175b-51.2k"
    )
    assert {"interrupt", "resume", "finish"} <= {r.get("event") for r in records(trunk)}
    _holds_the_branch(branch, corpus, tmp_path)

    _holds_mlflow(server.uri, root)
    server.kill()
    (tmp_path / "server.db").unlink()  # send all runs again, from the directories alone
    for run in (trunk, branch):
        (run / "mlflow.json").unlink()
    shutil.rmtree(tmp_path / "artifacts")
    for file in ("points.csv", "fit.json", "dashboard.html"):
        (root / file).unlink()
    server.start()
    launch("sync", root, **tracked)
    _holds_mlflow(server.uri, root)
    server.kill()


def _holds_the_branch(branch: Path, corpus: Path, tmp_path: Path) -> None:
    """A branch equals the separate run, and costs only its decay."""
    sets = [part for s in (*SETS, "optim.schedule.warmup_steps=8") for part in ("--set", s)]
    call = ("pretrain", "--size", "tiny", "--steps", 50, "--data", corpus, "--nproc", 1)
    call += ("--no-track", "--quiet")
    launch(*call, "--out", tmp_path / "whole", *sets)
    for key in ("step", "loss", "lr", "hash", "flops"):
        whole, branched = (
            [r[key] for r in records(run) if r["kind"] == "step"]
            for run in (tmp_path / "whole", branch)
        )
        assert branched == whole  # to the last bit
    began = next(r for r in reversed(records(branch)) if r.get("event") == "start")
    assert began["step"] == 40 == json.loads((branch / "run.json").read_text())["branch"]["step"]
    other = ("--branch", tmp_path / "whole", "--out", tmp_path / "no", "--seed", 5)
    line = launch(*call, *sets, *other, code=2).stderr
    assert "seed is 1234 there and 5 in this run" in line


def _holds_mlflow(uri: str, root: Path) -> None:
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("short")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert sorted(runs) == ["sweep", "tiny-51.2k", "tiny-81.9k"]
    parent = runs.pop("sweep")
    for name, run in runs.items():
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        record = json.loads((root / name / "run.json").read_text())
        for key in ("total", "active", "non_embedding", "scaling"):
            assert int(run.data.params[f"run.params.{key}"]) == record["params"][key]
        assert int(run.data.params["run.tokens"]) == record["batch_tokens"] * record["steps"]
        assert int(run.data.params["run.flops"]) == record["flops_per_token"] * record["tokens"]
        assert run.data.metrics["eval/flops"] == record["flops"]
        assert run.data.metrics["eval/loss"] == pytest.approx(
            [r for r in records(root / name) if r["kind"] == "eval"][-1]["loss"]
        )
    assert parent.info.status == "FINISHED" and parent.data.params["sweep.kind"] == "ladder"
    there = {artifact.path for artifact in client.list_artifacts(parent.info.run_id)}
    assert there >= {"sweep.json", "points.csv", "fit.json", "dashboard.html"}
    fitted = json.loads(Path(client.download_artifacts(parent.info.run_id, "fit.json")).read_text())
    assert fitted["law"] == "power" and fitted["points"]["used"] == 2


def test_a_signal_stops_a_member_that_is_just_starting(corpus: Path, tmp_path: Path) -> None:
    armed = [True]

    def interrupt(event: str, _arguments: object) -> None:
        if event == "subprocess.Popen" and armed:
            armed.clear()  # once only, because a hook cannot be removed
            os.kill(os.getpid(), signal.SIGINT)

    out = tmp_path / "run"
    options = f"pretrain --size 7k --data {corpus} --out {out} --nproc 1 --steps 5 --resume"
    options += " --set model.seq=64 --set train.batch_tokens=1024"
    member = execute.Member("run", tuple(options.split()), out, 5)
    sys.addaudithook(interrupt)
    state = execute.run([member], 1, lambda _state: None, track=False)
    assert state.stopping and state.waiting == [member] and not state.finished


@pytest.mark.timeout(120)
def test_a_member_may_print_more_than_a_pipe_holds(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONVERBOSE", "1")  # every import prints a line to stderr
    member = execute.Member("run", ("no-such-command", "--nproc", "1"), tmp_path / "run", 5)
    assert "run" in execute.run([member], 1, lambda state: None, track=False).failed
