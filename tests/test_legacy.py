"""A corpus, runs, checkpoints and an MLflow store from before the redesign still work."""

import gzip
import json
import shutil
import sqlite3
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.restore import newest
from pipeline.config.layers import load
from pipeline.data.corpus import Corpus
from tests.checkpoint.test_layouts import tensors
from tests.conftest import launch, records

LEGACY = Path(__file__).parent / "fixtures" / "legacy"
MADE_ON = "Intel(R) Xeon(R) Processor @ 2.50GHz"  # another CPU may round differently


@pytest.fixture
def legacy(tmp_path, monkeypatch):
    """A copy to work on: its paths point into the copy, and the MLflow store is a database again."""
    copy = tmp_path / "legacy"
    shutil.copytree(LEGACY, copy)
    dump = gzip.decompress((copy / "mlflow.sql.gz").read_bytes()).decode()
    with sqlite3.connect(copy / "mlflow.db") as database:
        database.executescript(dump.replace("/tmp/legacy", str(copy)))
    database.close()
    for path in copy.rglob("mlflow.json"):
        path.write_text(path.read_text().replace("/tmp/legacy", str(copy)))
    monkeypatch.chdir(copy)  # the configs name their corpus by a relative path
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{copy / 'mlflow.db'}")
    return copy


def steps(run):
    return {r["step"]: (r["loss"], r["hash"]) for r in records(run, "step")}


def test_a_legacy_run_resumes_and_keeps_its_mlflow_run(legacy):
    run = legacy / "runs" / "dense"
    expected_steps = steps(run)
    expected = tensors(newest(run))
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    log = run / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if '"finish"' not in line))

    launch("pretrain", "--resume", "--out", run)

    found = tensors(newest(run))
    assert found.keys() == expected.keys()
    for step, (loss, tokens) in steps(run).items():
        assert tokens == expected_steps[step][1]
        assert loss == pytest.approx(expected_steps[step][0], rel=1e-6)
    same_cpu = MADE_ON in Path("/proc/cpuinfo").read_text()
    for key, want in expected.items():
        torch.testing.assert_close(found[key], want, rtol=1e-5, atol=1e-8)
        assert not same_cpu or torch.equal(found[key], want), key
    state = json.loads((run / "mlflow.json").read_text())
    before = json.loads((LEGACY / "runs" / "dense" / "mlflow.json").read_text())
    assert state["run_id"] == before["run_id"] and state["status"] == "FINISHED"


@pytest.mark.parametrize("run", ["runs/dense", "moe/run"])
def test_a_legacy_checkpoint_evaluates(legacy, inside, run):
    (logged,) = records(legacy / run, "eval")
    found = json.loads(inside("evaluate", "--run", legacy / run, "--json"))
    assert found["loss"] == pytest.approx(logged["loss"], rel=1e-5)


def test_an_old_name_of_a_setting_is_read():
    old, new = (f"model.ffn.{name}=false" for name in ("normalise", "normalize"))
    assert load(size="tiny", arch="moe", sets=[old]).model.ffn.normalize is False
    for last in (old, new):  # the last one counts, under either name
        sets = [old.replace("false", "true"), new.replace("false", "true"), last]
        assert load(size="tiny", arch="moe", sets=sets).model.ffn.normalize is False


def test_a_legacy_corpus_opens(legacy):
    corpus = Corpus.open(legacy / "corpus")
    corpus.check(load(size="27k", sets=["model.vocab=384", "model.seq=32"]), "train")
    assert corpus.split("train").tokens == 29_410


def test_legacy_runs_fit_from_disk_and_from_mlflow(legacy, inside):
    from_disk = json.loads(inside("fit", "--runs", "runs", "--bootstrap", 0, "--json"))
    shutil.rmtree(legacy / "runs")
    from_mlflow = json.loads(inside("fit", "--experiment", "legacy", "--bootstrap", 0, "--json"))
    assert from_disk == from_mlflow
