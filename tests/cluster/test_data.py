"""Ray inside an allocation: slurm/data.sbatch makes what one machine makes."""

import sys

import pytest

from pipeline.slurm.submit import TEMPLATES
from tests.conftest import launch
from tests.data.conftest import some_texts, write_jsonl
from tests.data.test_prepare import contents

pytestmark = pytest.mark.timeout(900)


def test_two_nodes_make_the_same_bytes(slurm, corpus, tmp_path):
    """Six tasks, and Ray on both nodes; here beside it the same without SLURM."""
    files = [write_jsonl(tmp_path / f"{i}.jsonl", some_texts(200, seed=i)) for i in range(6)]
    asked = [part for file in files for part in ("--source", file)]
    asked += ["--tokenizer", corpus / "tokenizer.model", "--set", "dedup.near={}", "--quiet"]
    log = tmp_path / "log"
    submit = ("sbatch", "--parsable", "--nodes=2", f"--output={log}", f"--export=ALL,ISOFLOP_PYTHON={sys.executable}")
    job = slurm.run(*submit, TEMPLATES / "data.sbatch", *asked, "--out", tmp_path / "cluster")

    def ended() -> bool:
        return slurm.field(job, "state") not in ("PENDING", "RUNNING", "COMPLETING")

    slurm.until(lambda: ended() or all(slurm.inside(node, "ray::") for node in ("node1", "node2")), seconds=300)
    assert not ended(), log.read_text()[-3000:]
    launch("data", "prepare", *asked, "--out", tmp_path / "local")
    slurm.until(ended, seconds=300)
    assert slurm.field(job, "state") == "COMPLETED", log.read_text()[-3000:]
    assert contents(tmp_path / "cluster") == contents(tmp_path / "local")
