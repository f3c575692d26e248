"""One server for all tests, and a run directory and log for each."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow_server import Server

from pipeline.runs.log import Log

PYTHON_PATH = str(Path(__file__).parents[2])
SECRET = "hf_5ecret"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all, since starting takes seconds; each test has its own experiment and run."""
    server = Server(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    config = f"""
        name = "one"
        size = "tiny"
        [model]
        layers = 2
        vocab = 4096
        long = "{"x" * 7000}"
        [cluster.slurm.env]
        HF_TOKEN = "{SECRET}"
    """
    (run / "config.toml").write_text(config)
    about = {
        "experiment": tmp_path.name,
        "name": "one",
        "vocab": 4096,
        "convention": "6N + attention",
        "git_commit": "a" * 40 + "-dirty",
        "flops_per_token": 1_000_000,
        "parameters": {"total": 123, "active": 45},
    }
    many = {f"figure_{i}": i for i in range(150)}
    (run / "run.json").write_text(json.dumps(about | many))
    return run


@pytest.fixture
def log(run_dir: Path) -> Iterator[Log]:
    log = Log(run_dir / "log.jsonl")
    yield log
    log.close()
