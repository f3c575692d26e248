"""Real runs on a real MLflow server, watched by the real command in a real browser."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.track import mlflow_sync
from tests.conftest import environment
from tests.forks import Launched
from tests.scaling.made_runs import make_run
from tests.track.mlflow_server import Server, until

SMALL = ("--set", "model.seq=64", "--set", "train.batch_tokens=256", "--set", "train.eval_every=15",
         "--set", "train.eval_batches=1", "--set", "train.log_every=1", "--nproc", 1,
         "--set", "model.layers=1", "--experiment", "live")  # fmt: skip
SAYS = "([id, words]) => document.getElementById(id).textContent.includes(words)"
STEPS = "[...iso.runs.values()].map(r => r.row.step)"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def board(server: Server) -> Iterator[Launched]:
    """`launch dashboard` over that server."""
    tracked = environment(MLFLOW_TRACKING_URI=server.uri)
    process = Launched("launch", ["dashboard", "--port", 0, "--json"], tracked)
    yield process
    process.kill()
    process.wait()


@pytest.mark.timeout(900)
def test_runs_appear_train_and_become_a_law(
    opened, server, board, corpus, tmp_path, forecast_json, monkeypatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    page = opened(json.loads(board.stdout.readline())["url"])
    page.context.set_default_timeout(400_000)
    page.wait_for_selector("#empty:not([hidden])")  # for an empty store, the page shows what to do
    page.evaluate("window.mark = 1")

    def train(steps):
        where = ("--data", corpus, "--out", tmp_path / f"s{steps}")
        arguments = ["pretrain", "--size", "tiny", "--steps", steps, *where, *SMALL, "--quiet"]
        return Launched("launch", arguments, environment())

    # A run appears and makes progress without a reload. It is too long to end meanwhile.
    long = train(1_000_000)
    until(lambda: page.evaluate(f"{STEPS}.some(step => step > 0)"), 400)
    before = max(page.evaluate(STEPS))
    until(lambda: page.evaluate(f"Math.max(...{STEPS}) > {before}"), 400)
    long.send_signal(signal.SIGTERM)
    long.wait(400)
    assert [run.wait(400) for run in [train(30), train(150)]] == [0, 0]
    finished = "[...iso.runs.values()].filter(r => r.row.status === 'finished').length === 2"
    until(lambda: page.evaluate(finished), 400)
    page.wait_for_selector("#formula:not(:empty)")  # two finished runs are enough for a law
    page.wait_for_selector("#chart .scatterlayer .trace")
    assert page.evaluate("window.mark") == 1  # without a reload

    log = [json.loads(line) for line in (tmp_path / "s150" / "log.jsonl").read_text().splitlines()]
    final = [record for record in log if record["kind"] == "eval"][-1]
    row = page.evaluate("[...iso.runs.values()].map(r => r.row).find(r => r.steps === 150)")
    assert row["loss"] == pytest.approx(final["loss"]) and row["flops"] == final["flops"]
    assert row["link"].startswith(f"{server.uri}/#/experiments/") and row["hours"] > 0
    C = page.evaluate("iso.law().grid.C[+document.getElementById('compute').value]")
    monkeypatch.chdir(tmp_path)
    printed = forecast_json("--experiment", "live", "--flops", C)
    assert page.locator("#forecast-tiles dd").first.inner_text() == f"{printed['loss']:.4f}"

    page.locator("#table tbody a.name").first.click()  # a run's own page, from MLflow's metrics
    for key in ("loss", "grad_norm", "lr", "tokens_per_s", "memory_bytes", "wait_s"):
        page.wait_for_selector(f"#run-{key}", state="attached")
    page.select_option("#other", index=1)
    until(lambda: page.evaluate(SAYS, ["agreement", "steps compared"]), 400)
    # the load of experts is sent as a file
    about = {"steps": 20, "arch": "moe", "experiment": "live"}
    mixture = make_run(tmp_path / "live", "mixture", 3e5, 6e6, **about)
    shares = [[0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]]
    with (mixture / "log.jsonl").open("a") as log:
        for step in (10, 20):
            record = {"kind": "moe", "time": 1.0, "step": step, "tokens": 0, "load": shares}
            log.write(json.dumps(record) + "\n")
    mlflow_sync.sync(mixture)
    page.get_by_role("link", name="all runs").click()
    page.get_by_role("link", name="mixture", exact=True).click()
    page.wait_for_selector("#moe .heatmaplayer image", state="attached")
    assert page.evaluate("document.getElementById('moe').data[0].z") == [[1.6, 1.6], [1, 1]]
    # On a run's page, the browser would log the 404 of a run that cannot be read any more.
    page.get_by_role("link", name="all runs").click()
    server.kill()  # the store stops: the page reports it and keeps its data
    until(lambda: page.evaluate(SAYS, ["notes", "does not answer"]), 400)
    assert page.locator("#table tbody tr").count() == 4
    page.close()
    board.send_signal(signal.SIGINT)
    # uvicorn raises the signal again, unless it was already closing
    assert board.wait(60) in (0, 130)
