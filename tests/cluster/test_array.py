"""Data, then a sweep as arrays, then the law: each job waits for the one before, and only failed runs are repeated."""

import json

import pytest

from tests.cluster.test_jobs import step, verdicts
from tests.conftest import launch
from tests.train.test_run import hashes

SWEEP = """
kind = "ladder"
experiment = "three"
sizes = ["tiny"]
tokens_per_param = [0.02, 0.03, 0.04]
set = ["recipe=adamw", "model.seq=64", "train.batch_tokens=1024", "optim.lr=2e-3", "train.eval_batches=2"]
"""
pytestmark = pytest.mark.timeout(3000)


def test_data_then_sweep_then_fit(slurm, corpus, tmp_path):
    """The longest run comes first, because the others branch off it."""
    here = tmp_path / 'it\'s\n#SBATCH "$(touch pwned)"'
    here.mkdir()
    (here / "sweep.toml").write_text(SWEEP)
    runs = here / "runs" / "three"
    broken = runs / "tiny-0.03x"
    (broken / ".lock").mkdir(parents=True)  # the run cannot be locked, which only a person can fix

    copy = ("--output=/dev/null", "--wrap", f"cp -r {corpus} data")
    made = slurm.run("sbatch", "--parsable", f"--chdir={here}", *copy)
    call = ["sweep", "run", "sweep.toml", "--data", "data", "--slurm", "--jobs", "2", "--no-track"]
    call += ["--fit", "--json"]
    later = json.loads(launch(*call, "--after", made, cwd=here, **slurm.env).stdout)
    slurm.ends(later["job"])
    assert slurm.field(made, "state") == "COMPLETED"

    def answers() -> list[dict]:
        """Return the JSON documents that the submitting jobs have printed."""
        text = (here / "three-sweep.log").read_text()
        return [json.loads(part + "}") for part in text.split("}\n")[:-1]]

    slurm.until(lambda: len(answers()) == 2)
    trunk, rest = answers()
    assert (trunk["runs"], trunk["later"]) == ([str(runs / "tiny-0.04x")], 2)
    assert trunk["fit"] is None
    assert slurm.field(f"{trunk['job']}_0", "state") == "COMPLETED"
    assert rest["runs"] == [str(runs / "tiny-0.02x"), str(broken)] and rest["later"] == 0
    slurm.ends(rest["fit"], "CANCELLED")  # some of its runs will never finish
    states = [slurm.field(f"{rest['job']}_{index}", "state") for index in range(2)]
    assert states == ["COMPLETED", "FAILED"]
    ((event, reason),) = verdicts(broken)
    assert event == "stop" and "Is a directory" in reason
    assert hashes(runs / "tiny-0.02x") == hashes(runs / "tiny-0.04x")[: step(runs / "tiny-0.02x")]
    lines = launch("status", runs, "--json", **slurm.env).stdout.splitlines()
    assert [json.loads(line)["state"] for line in lines] == ["FINISHED", "FAILED", "FINISHED"]

    (broken / ".lock").rmdir()
    again = json.loads(launch(*call, cwd=here, **slurm.env).stdout)
    assert again["runs"] == [str(broken)]
    busy = launch(*call, cwd=here, code=2, **slurm.env).stderr
    assert "has finished or is in the queue" in busy
    slurm.until(lambda: slurm.field(again["fit"], "state") not in ("PENDING", "RUNNING"))
    assert step(broken) > 0 and slurm.field(f"{again['job']}_0", "state") == "COMPLETED"
    assert "runs" in (runs / "fit.log").read_text() and not list(tmp_path.rglob("pwned"))
