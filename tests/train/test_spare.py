"""While a group of ranks trains, another has imported everything and takes its place when one of them dies."""

import threading
import time
from pathlib import Path

import psutil

from pipeline.train import start
from tests.train.test_run import TINY, processes, records


def agents() -> list[psutil.Process]:
    return sorted(psutil.Process().children(), key=lambda child: child.create_time())


def test_the_group_that_stands_ready_takes_over(corpus, tmp_path: Path, monkeypatch, inside):
    monkeypatch.setattr(start, "_SPARE_AFTER_S", 0.0)
    out, seen = tmp_path / "run", {}

    def until(what: str) -> None:
        while not ((out / "log.jsonl").exists() and what in (out / "log.jsonl").read_text()):
            time.sleep(0.05)

    def fault() -> None:
        until('"kind":"step"')
        while len(agents()) < 2:
            time.sleep(0.05)
        first, seen["spare"] = agents()
        first.children()[0].kill()
        until('"restart"')
        seen["second"] = agents()[0]

    thread = threading.Thread(target=fault, daemon=True)
    thread.start()
    inside("pretrain", *TINY, "--steps", 80, "--data", corpus, "--nproc", 2, "--out", out, "--quiet")
    thread.join(1)
    assert seen["second"] == seen["spare"]
    assert [r["event"] for r in records(out, "event") if r["event"] != "save"] == ["start", "restart", "finish"]
    assert not processes(f"pipeline.train.worker.*{out}"), "orphans"
