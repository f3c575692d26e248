"""Data, then a sweep as one array, then the law: each waits for the one before; what failed is run again, alone."""

import json
import shutil

import pytest

from tests.cluster.test_jobs import step, verdicts
from tests.conftest import launch

SWEEP = """
kind = "ladder"
experiment = "three"
sizes = ["tiny"]
tokens_per_param = [0.02, 0.03, 0.04]
trunk = false
set = ["model.seq=64", "train.batch_tokens=1024", "optim.lr=2e-3", "train.eval_batches=2"]
"""
pytestmark = pytest.mark.timeout(3000)


def test_data_then_sweep_then_fit(slurm, corpus, tmp_path):
    (tmp_path / "sweep.toml").write_text(SWEEP)
    runs = tmp_path / "runs" / "three"
    broken = runs / "tiny-0.03x" / "checkpoints" / "step-00000001"
    broken.mkdir(parents=True)  # a checkpoint that nobody can read: only a person mends that

    where = (f"--chdir={tmp_path}", "--output=/dev/null")
    made = slurm.run("sbatch", "--parsable", *where, "--wrap", f"cp -r {corpus} data")
    call = ("sweep", "run", "sweep.toml", "--data", "data", "--slurm", "--jobs", 2, "--no-track", "--fit", "--json")
    later = json.loads(launch(*call, "--after", made, cwd=tmp_path, **slurm.env).stdout)
    slurm.until(lambda: slurm.field(later["job"], "state") == "COMPLETED")
    assert slurm.field(made, "state") == "COMPLETED"

    first = json.loads((tmp_path / "three-sweep.log").read_text())
    assert len(first["runs"]) == 3
    slurm.until(lambda: slurm.field(first["fit"], "state") == "CANCELLED")  # its runs will never all be there
    states = [slurm.field(f"{first['job']}_{index}", "state") for index in range(3)]
    assert sorted(states) == ["COMPLETED", "COMPLETED", "FAILED"]
    event, reason = verdicts(broken.parents[1])[-1]
    assert event == "stop" and "step-00000001 is damaged" in reason and len(verdicts(broken.parents[1])) == 1
    rows = [json.loads(line) for line in launch("status", runs, "--json", **slurm.env).stdout.splitlines()]
    assert [row["state"] for row in rows] == ["FINISHED", "FAILED", "FINISHED"]

    shutil.rmtree(broken)
    again = json.loads(launch(*call, cwd=tmp_path, **slurm.env).stdout)
    assert again["runs"] == [str(broken.parents[1])]
    busy = launch(*call, cwd=tmp_path, code=2, **slurm.env).stderr
    assert "has finished or is in the queue" in busy
    slurm.until(lambda: slurm.field(again["fit"], "state") not in ("PENDING", "RUNNING"))
    assert step(broken.parents[1]) > 0 and slurm.field(f"{again['job']}_0", "state") == "COMPLETED"
    assert "runs" in (runs / "fit.log").read_text()
