"""What is submitted to SLURM, and what is refused before."""

import json
import shlex
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from pipeline.config.dump import differences, to_toml
from pipeline.config.layers import load, validate
from pipeline.config.schema import RunConfig
from pipeline.planner.check import resolve
from pipeline.runs.directory import RunDir
from pipeline.runs.directory import fault_line as line
from pipeline.slurm.job import Allocation, Ending, attribute, decide, usable
from pipeline.slurm.submit import TEMPLATES
from tests.cluster.test_jobs import submit, verdicts
from tests.conftest import environment, launch
from tests.train.test_run import TINY

HELD = ("--set", 'cluster.slurm.sbatch=["--hold"]')


def test_dry_run_shows_the_job_and_asks_slurm(slurm, corpus, tmp_path):
    out = tmp_path / "50% done"
    site = tmp_path / "site.toml"
    site.write_text(
        '[cluster]\nname = "ours"\ngpus_per_node = 2\n[cluster.slurm]\npartition = "high"\ntime = "1:00:00"\n'
        'modules = ["cuda/12.8"]\nenv = { NCCL_DEBUG = "WARN; touch pwned" }\ncpus_per_task = 3\n'
        '[cluster.slurm.container]\nkind = "pyxis"\nimage = "/images/a.sqsh"\nmounts = ["/home:/home", "/data:/data"]\n'
    )
    options = ("--out", out, "--cluster", site, "--slurm", "--nodes", 2)
    asked = ("pretrain", *TINY, "--data", corpus, *options, "--dry-run")
    output = launch(*asked, **slurm.env).stdout
    wanted = "partition=high nodes=2 gpus-per-node=2 ntasks-per-node=2 time=1:00:00"
    assert all(f"--{option}" in output for option in wanted.split())
    assert "50%% done/logs/job.log" in output and "NCCL_DEBUG=**********" in output
    assert (TEMPLATES / "pretrain.sbatch").read_text() in output
    around = "--container-image=/images/a.sqsh --container-mounts=/home:/home,/data:/data"
    inner = f"--cpus-per-task=3 {around} python3 -P -m pipeline.slurm.task"
    assert f"50%% done/logs/rank-%t.log' {inner}" in output
    assert "to start at" in output.splitlines()[-1]  # sbatch --test-only
    assert not out.exists()
    bare = launch(*asked, PATH=str(tmp_path))  # a machine without SLURM
    assert "not validated" in bare.stdout.splitlines()[-1]
    # Only the client is installed. Without this file it would wait a minute.
    silent = launch(*asked, SLURM_CONF="/dev/null").stdout
    assert "not validated: sbatch is installed, but cannot reach" in silent.splitlines()[-1]
    assert "[cluster.slurm.env], hidden because it may be a secret" in output
    refused = launch(*asked[:-1], code=2, PATH=str(tmp_path))
    assert "--slurm needs sbatch" in refused.stderr and not out.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--nodes 4", ("--nodes=4", "node configuration is not available")),
        ("--nodes 2 --set cluster.slurm.partition=gpu", ("--partition=gpu", "Invalid partition")),
        ("--nodes 4-2", ("--nodes '4-2'",)),
        ("--nodes 2 --time soon", ("cluster.slurm.time='soon'",)),
        ("--nodes 2 --time 0-0:06", ("time=0-0:06 (360 s)", "grace_s=300", "grace_s=150")),
        ("--nodes 1 --set 'name=a\ntouch pwned'", ("name='a\\ntouch pwned'",)),
        ("""--nodes 1 --set 'cluster.slurm.account="a\\nb"'""", ("cluster.slurm.account='a\\nb'",)),
        ("--nodes 1 --size 7b --cluster a100 --gpus-per-node 1", ("size=7b", "this A100")),
    ],
)
def test_refused_in_one_line(slurm, corpus, tmp_path, monkeypatch, inside, arguments, words):
    out = tmp_path / "run"
    monkeypatch.setenv("SLURM_CONF", slurm.env["SLURM_CONF"])
    job = ("--data", corpus, "--out", out, "--slurm", "--gpus-per-node", 0)
    output = inside("pretrain", *TINY, *job, *shlex.split(arguments), code=2)
    assert all(word in output for word in words), output
    assert not out.exists()


def test_the_example_cluster_file_is_valid():
    config = resolve(load(size="tiny", cluster="example"), ranks=8, gpu=True)
    again = validate(RunConfig, tomllib.loads(to_toml(config)))
    assert differences(config, again) == {}
    site = config.cluster.slurm
    assert site.container is not None and site.environment({})["NCCL_IB_HCA"] == "mlx5"


def test_nothing_of_a_name_is_executed(slurm, corpus, tmp_path):
    """A path with line ends and SLURM's own words in it: the script in the queue is the template, byte for byte."""
    out = tmp_path / "a\n#SBATCH --nodes=2\ntouch pwned; $(touch pwned)\n"
    job = submit(slurm, *TINY, "--data", corpus, "--out", out, "--nproc", 1, *HELD)
    assert (out / "slurm.json").exists()
    slurm.run("scontrol", "write", "batch_script", job, tmp_path / "script")
    assert (tmp_path / "script").read_bytes().rstrip(b"\0") == (
        TEMPLATES / "pretrain.sbatch"
    ).read_bytes()
    assert slurm.field(job, "numnodes") == "1"
    again = launch(
        "pretrain", "--resume", "--slurm", "--out", out, "--gpus-per-node", 0, code=2, **slurm.env
    )
    assert f"in the queue as job {job} (PENDING)" in again.stderr
    assert "cancelled" in launch("cancel", out, **slurm.env).stdout
    assert slurm.field(job, "state") == "CANCELLED"
    assert "squeue is not installed" in launch("cancel", out, code=2, PATH=str(tmp_path)).stderr

    # SLURM itself restarts a job after a lost node; that is limited too
    there = {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "node1", "SLURM_JOB_NUM_NODES": "1"}
    batch = [sys.executable, "-m", "pipeline.slurm.job", str(out)]
    env = environment(**slurm.env, **there, SLURM_RESTART_COUNT="101")
    assert subprocess.run(batch, env=env).returncode == 2
    assert [event for event, _ in verdicts(out)] == ["stop"] and "max_restarts=100" in verdicts(
        out
    )[0][1]
    assert verdicts(out)[0][1] in launch("logs", out).stdout
    assert not list(tmp_path.rglob("pwned"))


def test_a_job_may_wait_for_nodes_that_are_down(slurm, corpus, tmp_path):
    """`sbatch --test-only` refuses such a job, although sbatch itself queues it."""
    out = tmp_path / "run"
    asked = ("pretrain", *TINY, "--data", corpus, "--out", out, "--slurm", "--gpus-per-node", 0)
    try:
        slurm.run("scontrol", "update", "nodename=node[1-2]", "state=drain", "reason=maintenance")
        assert "waits for 2 nodes that are down" in launch(*asked, "--dry-run", **slurm.env).stdout
        job = submit(slurm, *TINY, "--data", corpus, "--out", out, "--nproc", 1)
        assert slurm.field(job, "state") == "PENDING"
    finally:
        slurm.run("scontrol", "update", "nodename=node[1-2]", "state=resume")
    slurm.ends(job)
    assert (out / "checkpoints").exists()


def test_fifty_at_once_are_fifty_runs(slurm, corpus, tmp_path):
    """Without --out each job gets its own directory, even if they are submitted at the same time."""
    job = ("--slurm", "--gpus-per-node", 0, "--nproc", 1, "--json", *HELD)
    wanted = ["launch", "pretrain", *TINY, "--data", corpus, *job]
    program = textwrap.dedent(
        """
        import os, sys
        from launch import pretrain
        from launch.__main__ import main
        from pipeline.slurm import queue, submit
        from pipeline.train import request as plan
        children = []
        for number in range(50):  # forked: one import for all of them
            if (child := os.fork()) == 0:
                sys.stdout = open(f"{number}.json", "w")
                main()
            children.append(child)
        sys.exit(max(os.waitpid(child, 0)[1] for child in children))
        """
    )
    program = f"import sys; sys.argv = {list(map(str, wanted))!r}\n{program}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path, env=environment(**slurm.env), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    submitted = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(50)]
    assert len({t["job"] for t in submitted}) == len({t["run"] for t in submitted}) == 50
    for one in submitted:
        run = Path(one["run"])
        assert json.loads((run / "slurm.json").read_text())["job"] == one["job"]
        assert json.loads((run / "run.json").read_text())["name"] == run.name
    assert len(launch("status", tmp_path / "runs", "--json", **slurm.env).stdout.splitlines()) == 50
    slurm.run("scancel", *(t["job"] for t in submitted))


@pytest.mark.parametrize(("nodes", "used"), [(1, 1), (2, 2), (3, 2), (7, 4)])
def test_a_job_uses_as_many_nodes_as_divide_its_batch(nodes, used):
    """A batch has 16 sequences, a node two processes, and a micro-batch two sequences."""
    sets = ("model.seq=64", "train.batch_tokens=1024", "train.micro_batch=2")
    config = resolve(load(size="tiny", sets=sets), ranks=8, gpu=False)
    assert usable(Allocation("1", 0, "node[1-7]", nodes, 2, 0, None), config).nodes == used


FAULT = {"kind": "RuntimeError", "message": "out of luck", "user": False}


@pytest.mark.parametrize(
    ("change", "action", "words"),
    [
        ({"finished": True}, "done", "finished at step 7"),
        ({"saved": True}, "requeue", "saved at step 7"),
        ({"saved": True, "restarts": 100}, "stop", "max_restarts=100"),
        ({"asked": "SIGUSR1"}, "requeue", "asked to stop at step 7"),  # without a handler
        ({"saved": True, "asked": "SIGTERM"}, "stop", "asked to end; saved at step 7"),
        ({"fault": FAULT}, "requeue", "RuntimeError: out of luck at step 7"),
        ({"fault": FAULT, "restarts": 100}, "stop", "max_restarts=100"),
        ({"fault": FAULT, "hopeless": "failed twice"}, "stop", "failed twice; see runs/x/logs"),
        ({"fault": {**FAULT, "user": True}, "hopeless": "full"}, "stop", "full; see runs/x/logs"),
    ],
)
def test_decision_to_requeue(change, action, words):
    restarts = change.pop("restarts", 0)
    none = dict.fromkeys(("asked", "fault", "hopeless"))
    plain = {"step": 7, "finished": False, "saved": False, **none}
    verdict = decide(Ending(**plain | change), restarts=restarts, most=100, run=Path("runs/x"))
    assert verdict.action == action and words in verdict.reason
    assert (verdict.code == 0) == (action == "done")


@pytest.mark.parametrize(
    ("known", "reason"),
    [
        # it ended before it could record a reason
        (None, "ChildProcessError: rank 1 on node2: Exited with exit code 1"),
        (ValueError("why"), "ValueError: why"),
    ],
)
def test_the_first_to_end_is_the_cause(tmp_path, known, reason):
    run = RunDir(tmp_path)
    if known:
        run.fail(known)
    output = (
        "srun: error: node2: task 1: Exited with exit code 1\nsrun: error: node1: task 0: Killed\n"
    )
    assert line(attribute(run, 137, output)) == reason
