"""Ray inside an allocation: slurm/data.sbatch makes what one machine makes."""

import sys
from pathlib import Path

import pytest

from pipeline.slurm.submit import TEMPLATES
from tests.conftest import launch
from tests.data.conftest import contents, some_texts, write_jsonl

pytestmark = pytest.mark.timeout(900)
NODES = ("node1", "node2")
DRIVER = f"""#!/bin/bash
# Python, when it may begin
until [ -e "$(dirname "$0")/begin" ]; do sleep 0.1; done
exec {sys.executable} "$@"
"""


def test_two_nodes_make_the_same_bytes(slurm, corpus, tmp_path):
    """Six short tasks on two nodes give the same files as without SLURM. The first waits until both nodes are there."""
    driver = tmp_path / "bin" / "driver"
    driver.parent.mkdir()
    driver.write_text(DRIVER)
    driver.chmod(0o755)
    driver.with_name("ray").symlink_to(Path(sys.executable).with_name("ray"))
    files = [write_jsonl(tmp_path / f"{i}.jsonl", some_texts(200, seed=i)) for i in range(6)]
    asked = [part for file in files for part in ("--source", file)]
    asked += ["--tokenizer", corpus / "tokenizer.model", "--set", "dedup.near={}", "--quiet"]
    log = tmp_path / "log"
    submit = (
        "sbatch",
        "--parsable",
        "--nodes=2",
        f"--output={log}",
        f"--export=ALL,ISOFLOP_PYTHON={driver}",
    )
    job = slurm.run(*submit, TEMPLATES / "data.sbatch", *asked, "--out", tmp_path / "cluster")

    def ended() -> bool:
        return slurm.field(job, "state") not in ("PENDING", "RUNNING", "COMPLETING")

    def both_run(pattern: str) -> bool:
        found = all(slurm.inside(node, pattern) for node in NODES)
        assert found or not ended(), log.read_text()[-3000:]
        return found

    slurm.until(lambda: both_run("raylet/raylet"), seconds=300)
    driver.with_name("begin").touch()
    slurm.until(lambda: both_run("ray::"), seconds=300)
    launch("data", "prepare", *asked, "--out", tmp_path / "local")
    slurm.until(ended, seconds=300)
    assert slurm.field(job, "state") == "COMPLETED", log.read_text()[-3000:]
    assert contents(tmp_path / "cluster") == contents(tmp_path / "local")
