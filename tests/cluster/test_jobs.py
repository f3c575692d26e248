"""Training on a real SLURM: jobs are submitted and disturbed in every way, and the curve stays the same."""

import json
import os
import shutil
import signal
import sqlite3
import sys
from pathlib import Path

import pytest

from pipeline.runs.directory import RunDir
from tests.cluster.slurm import Slurm
from tests.conftest import launch
from tests.train.test_run import GOLDEN, TINY, hashes, losses, records

STEPS = 160  # enough for five disturbances on a fast machine
LONG = (*TINY, "--steps", STEPS, "--set", "train.save_every=15", "--set", "train.eval_every=80", "--set", "model.layers=2")  # fmt: skip
pytestmark = pytest.mark.timeout(3000)  # for a busy machine; a quiet one needs a tenth


def submit(slurm: Slurm, *arguments: object, **env: str) -> str:
    cpus = ("--slurm", "--gpus-per-node", 0, "--json")
    return json.loads(launch("pretrain", *cpus, *arguments, **slurm.env, **env).stdout)["job"]


def step(run: Path) -> int:
    try:
        return records(run, "step")[-1]["step"]
    except (OSError, IndexError):
        return 0


def beginnings(run: Path) -> list[int]:
    """The steps at which training began."""
    try:
        begin = ("start", "resume", "restart")
        return [r["step"] for r in records(run, "event") if r["event"] in begin]
    except OSError:
        return []


def attempts(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]


def verdicts(run: Path) -> list[tuple[str, str]]:
    return [(a["event"], a["reason"]) for a in attempts(run) if a["event"] != "begin"]


@pytest.fixture(scope="module")
def runs(site, corpus, tmp_path_factory) -> Path:
    """Three jobs side by side on two nodes of one host: one wide, one long, and one that cannot work."""
    runs = tmp_path_factory.mktemp("cluster")
    wrong = ("--set", 'cluster.slurm.env={GLOO_SOCKET_IFNAME="nowhere"}')
    shapes = {
        "doomed": (*TINY, "--nproc", 1, *wrong),
        "whole": (*LONG, "--nodes", 2, "--nproc", 1),  # the other curves are compared with this one
        "wide": (*TINY, "--nodes", 2, "--nproc", 2),
    }
    jobs = [
        submit(site, *shape, "--data", corpus, "--out", runs / name)
        for name, shape in shapes.items()
    ]
    for job, state in zip(jobs, ("FAILED", "COMPLETED", "COMPLETED"), strict=True):
        site.ends(job, state)
    return runs


def test_the_curve_survives_every_event(slurm, runs, corpus, tmp_path):
    """USR1, kill -9 of a rank, preemption, a hang, a power cycle: one job, one curve, bit for bit."""
    run, whole = tmp_path / "run", runs / "whole"
    job = submit(slurm, *LONG, "--data", corpus, "--nodes", 2, "--nproc", 1, "--out", run)

    def training(starts: int) -> None:
        """Wait until the job has started this many times and has made a few steps since."""
        slurm.until(lambda: len(beginnings(run)) == starts and step(run) >= beginnings(run)[-1] + 4)

    # the ports of a job on two nodes are open on its own network only
    training(1)
    ranks = [slurm.inside(node, f"pipeline.train.worker {run}")[0] for node in ("node1", "node2")]
    listening = {address for pid in ranks for address in slurm.listening(pid)}
    assert listening == {slurm.address("node1"), slurm.address("node2")}

    # before the time limit SLURM sends USR1 to the batch step
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    training(2)
    assert verdicts(run)[-1][0] == "requeue" and "as asked" in verdicts(run)[-1][1]

    # a rank dies
    os.kill(slurm.inside("node2", f"pipeline.train.worker {run}")[0], signal.SIGKILL)
    training(3)
    assert verdicts(run)[-1][0] == "requeue" and "rank 1 on node2: Killed" in verdicts(run)[-1][1]

    # a job with higher priority preempts it
    job_of_guest = "sbatch --parsable -p high -N2 --exclusive -o/dev/null --wrap true"
    guest = slurm.run(*job_of_guest.split())
    training(4)
    assert slurm.field(guest, "state") == "COMPLETED"
    assert verdicts(run)[-1][0] == "requeue" and "as asked" in verdicts(run)[-1][1]

    # a rank hangs: for SLURM the job is running
    os.kill(slurm.inside("node2", f"pipeline.train.worker {run}")[0], signal.SIGSTOP)
    training(5)
    action, reason = verdicts(run)[-1]
    assert action == "requeue" and "HangError: rank 1" in reason

    # a node restarts before SLURM notices: for SLURM the job is still running there
    hung = RunDir(run).past_faults()[-1]["step"]
    slurm.until(lambda: step(run) > hung + 1)  # the same fault at the same step would end the job
    slurm.power_off("node2")
    slurm.power_on("node2")
    assert slurm.field(job, "state") == "RUNNING"
    training(6)
    assert verdicts(run)[-1][0] == "requeue"

    slurm.ends(job)
    assert slurm.field(job, "restartcnt") == "5" and verdicts(run)[-1][0] == "done"
    assert hashes(run) == hashes(whole) and losses(run) == losses(whole)
    assert [r["loss"] for r in records(run, "eval")] == [r["loss"] for r in records(whole, "eval")]


def test_jobs_side_by_side(slurm, runs):
    """Jobs on the same nodes at the same time connect only to their own ranks."""
    whole, wide = runs / "whole", runs / "wide"
    assert losses(wide) == pytest.approx(GOLDEN["loss"], abs=1e-5)
    assert records(wide, "eval")[-1]["loss"] == pytest.approx(GOLDEN["eval"], abs=1e-5)
    assert step(whole) == STEPS and hashes(whole)[:12] == hashes(wide)
    spans = [(a[0]["time"], a[-1]["time"]) for a in map(attempts, (whole, wide))]
    assert max(began for began, _ in spans) < min(ended for _, ended in spans)
    assert {a["nodes"] for a in attempts(wide)[:1]} == {"node[1-2]"}
    printed = launch("status", whole, wide, "--json", **slurm.env).stdout
    rows = list(map(json.loads, printed.splitlines()))
    assert [(r["state"], r["step"], r["steps"], r["restarts"]) for r in rows] == [
        ("FINISHED", STEPS, STEPS, 0),
        ("FINISHED", 12, 12, 0),
    ]
    assert "step 12/12" in launch("logs", wide, **slurm.env).stdout
    assert "step 12/12" not in launch("logs", wide, "--rank", 3, **slurm.env).stdout


def test_the_same_failure_twice_is_not_retried(slurm, runs):
    """A wrong network variable: the job was requeued once, then stopped with the reason."""
    run = runs / "doomed"
    assert [event for event, _ in verdicts(run)] == ["requeue", "stop"]
    reason = verdicts(run)[-1][1]
    again = f"launch pretrain --resume --slurm --out {run}"
    assert "failed twice at step 0" in reason and again in reason
    assert reason in (run / "logs" / "job.log").read_text()
    row = json.loads(launch("status", run, "--json", **slurm.env).stdout)
    assert (row["state"], row["restarts"], row["note"]) == ("FAILED", 1, reason)


APPTAINER = """#!/bin/bash
# apptainer exec --nv --bind=… IMAGE COMMAND…
echo "$@" >> "$(dirname "$0")/called"
while [ "$1" != ubuntu.sif ]; do shift; done
exec "${@:2}"
"""

SRUN = f"""#!/bin/bash
# once as SLURM has it where a node does not answer
[ -e "$0.late" ] && exec {shutil.which("srun")} "$@"
touch "$0.late"
echo 'srun: error: Application launch failed: Communication connection failure' >&2
exit 1
"""


def test_a_cancelled_job_saves_and_is_continued_elsewhere(slurm, runs, corpus, tmp_path):
    """In a container, by torchrun, from shards on the nodes' own disk, of which one is lost; then by srun, which fails
    at first, without all that, when both are there again."""
    tool, scratch, run = tmp_path / "bin" / "apptainer", tmp_path / "scratch", tmp_path / "run"
    whole = runs / "whole"
    tool.parent.mkdir()
    for name, text in (("apptainer", APPTAINER), ("late", SRUN)):
        (tool.parent / name).write_text(text)
        (tool.parent / name).chmod(0o755)
    site = tmp_path / "site.toml"
    site.write_text(
        f'[cluster]\nname = "ours"\n[cluster.slurm]\nlauncher = "torchrun"\nscratch = "{scratch}"\n'
        f'[cluster.slurm.container]\nkind = "apptainer"\nimage = "ubuntu.sif"\npython = "{sys.executable}"\n'
        f'mounts = ["{tmp_path}"]\n'
    )
    tracked = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    env = {**tracked, "PATH": f"{tool.parent}:{os.environ['PATH']}"}
    where = ("--data", corpus, "--nodes", "1-2", "--nproc", 1, "--out", run, "--cluster", site)
    # SLURM itself must notice: it kills a job that asks for a requeue while its node is being given up
    patient = ("--set", "train.hang_s=100")
    job = submit(slurm, *LONG, *where, "--track", *patient, **env)
    slurm.until(lambda: step(run) >= 4)
    printed = [launch("logs", run, "--rank", rank).stdout for rank in range(2)]
    assert ["4/160 │ loss" in words for words in printed] == [True, False] and "torch" in printed[1]
    slurm.power_off("node2")  # for good, so SLURM requeues the job, which continues with one node
    slurm.until(lambda: len(beginnings(run)) == 2 and step(run) >= beginnings(run)[-1] + 4)
    slurm.power_on("node2")
    assert "asked to save" in launch("cancel", run, **slurm.env).stdout
    slurm.ends(job, "FAILED")
    assert verdicts(run)[-1] == ("stop", f"asked to end; saved at step {step(run)}")
    assert slurm.field(job, "restartcnt") == "1"
    assert json.loads(launch("status", run, "--json", **slurm.env).stdout)["state"] == "STOPPED"
    called = (tool.parent / "called").read_text()
    assert f"--nv --bind={tmp_path} ubuntu.sif {sys.executable}" in called
    data = json.loads((run / "run.json").read_text())["data"]
    assert [path.name for path in scratch.iterdir()] == [f"isoflop-{data}"]

    site.write_text('[cluster]\nname = "ours"\n[cluster.slurm]\nlauncher = "srun"\n')
    (tool.parent / "late").rename(tool.parent / "srun")
    both = ("--nodes", 2, "--nproc", 1, "--cluster", site)
    job = submit(slurm, "--resume", "--out", run, *both, **env)
    row = json.loads(launch("status", run, "--json", **slurm.env).stdout)
    assert row["job"] == job and row["state"] in ("PENDING", "RUNNING") and row["step"] >= 4
    slurm.ends(job)
    worlds = [a["world"] for a in attempts(run) if a["event"] == "begin"]
    printed = (run / "logs" / "job.log").read_text()
    assert worlds == [2, 1, 2] and "Application launch failed" in printed
    assert hashes(run) == hashes(whole) and losses(run) == pytest.approx(losses(whole), abs=1e-3)
    launch("sync", run, **tracked)  # send the records that a busy machine has not sent yet
    steps_of = "SELECT step FROM metrics WHERE key = 'train/loss' ORDER BY step"
    with sqlite3.connect(tmp_path / "mlflow.db") as store:  # there is one run with each step once
        runs_there = store.execute("SELECT COUNT(*), MAX(status) FROM runs").fetchall()
        steps = store.execute(steps_of).fetchall()
    assert runs_there == [(1, "FINISHED")]
    assert [step for (step,) in steps] == list(range(1, STEPS + 1))
