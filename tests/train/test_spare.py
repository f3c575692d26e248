"""While a group of ranks trains, another has imported everything and takes its place when one of them dies."""

import threading
import time
from pathlib import Path
from typing import Any

import psutil

from pipeline.train import supervisor as start
from tests.train.test_run import TINY, processes, records


def test_the_group_that_stands_ready_takes_over(corpus, tmp_path: Path, monkeypatch, inside):
    monkeypatch.setattr(start, "_SPARE_AFTER_S", 0.0)
    out, take = tmp_path / "run", start._Groups.take
    taken: list[
        tuple[start._Groups, int, int]
    ] = []  # by whom, which one stood ready, and which one began

    def watched(groups: start._Groups) -> Any:
        ready, (agent, noise) = groups.spare_pid, take(groups)
        taken.append((groups, ready, agent.pid))
        return agent, noise

    monkeypatch.setattr(start._Groups, "take", watched)

    def fault() -> None:
        while not (
            taken
            and taken[0][0].spare_pid > 0
            and '"kind":"step"' in (out / "log.jsonl").read_text()
        ):
            time.sleep(0.05)
        psutil.Process(taken[0][2]).children()[0].kill()

    thread = threading.Thread(target=fault, daemon=True)
    thread.start()
    inside(
        "pretrain", *TINY, "--steps", 30, "--data", corpus, "--nproc", 2, "--out", out, "--quiet"
    )
    (_, none, _), (_, ready, second) = taken
    assert none < 0 < ready == second
    assert [r["event"] for r in records(out, "event") if r["event"] != "save"] == [
        "start",
        "restart",
        "finish",
    ]
    assert not processes(f"pipeline.train.worker.*{out}"), "orphans"
