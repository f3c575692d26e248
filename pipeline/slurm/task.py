"""The edge of a task that srun started: SLURM's variables become torch's, once, and the worker takes its place."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from pipeline.config.layers import reload
from pipeline.config.schema import RunConfig
from pipeline.errors import RunError
from pipeline.process import end_with_parent
from pipeline.runs.directory import RunDir
from pipeline.runs.faults import HangError
from pipeline.train.supervisor import WORKER, attend, listening

# MASTER_ADDR and MASTER_PORT come from the batch step
_RANK = {
    "RANK": "PROCID",
    "WORLD_SIZE": "NTASKS",
    "LOCAL_RANK": "LOCALID",
    "LOCAL_WORLD_SIZE": "NTASKS_PER_NODE",
}
# a signal to the step reaches torchrun too, which would die of it before its workers have saved
_AGENT = (
    "import runpy, signal; signal.signal(signal.SIGUSR1, lambda *_: None); "
    "runpy.run_module('torch.distributed.run', run_name='__main__')"
)


def torchrun(env: Mapping[str, str]) -> list[str]:
    """One agent per node, which starts its processes and sets their variables."""
    meet = ["--rdzv_backend=c10d", f"--rdzv_endpoint={env['MASTER_ADDR']}:{env['MASTER_PORT']}"]
    many = [f"--nnodes={env['SLURM_NNODES']}", f"--nproc_per_node={env['ISOFLOP_TASKS']}"]
    which = [f"--rdzv_id={env['SLURM_JOB_ID']}.{env.get('SLURM_RESTART_COUNT', 0)}"]
    return ["-c", _AGENT, *many, *meet, *which, "-m", WORKER]


def stage(config: RunConfig, scratch: Path, env: Mapping[str, str]) -> Path:
    """The shards on this node's own disk: the first task copies them, the others wait."""
    there = scratch / f"isoflop-{config.data.hash}"
    if env["SLURM_LOCALID"] == "0" and not there.exists():
        aside = there.with_name(f"{there.name}.{env['SLURM_JOB_ID']}.{env['SLURMD_NODENAME']}")
        shutil.rmtree(aside, ignore_errors=True)  # of an earlier start
        try:
            shutil.copytree(config.data.dir or ".", aside)
            aside.rename(there)
        except OSError as error:
            if not there.exists():  # else another job on this node was faster
                raise RunError(
                    f"cluster.slurm.scratch={scratch}: {str(error)[-200:]}; make room, or leave it out"
                ) from None
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    while not there.exists():
        time.sleep(0.2)
    return there


def main(arguments: list[str]) -> int:
    run = RunDir(Path(arguments[0]))
    config = reload(run.config)
    site, env = config.cluster.slurm, dict(os.environ)
    try:
        near = stage(config, Path(site.scratch), env) if site.scratch else None
    except RunError as error:
        run.fail(error)
        return 2
    worker = [str(run.path), *(("--data", str(near)) if near else ())]
    if site.launcher == "srun":
        env |= {ours: env[f"SLURM_{srun}"] for ours, srun in _RANK.items()}
        command = [sys.executable, "-m", WORKER, *worker]
    else:
        command = [sys.executable, *torchrun(env), *worker, "--to-file"]
    with listening(once=True) as wishes:  # SLURM itself ends what takes too long to save
        agent = subprocess.Popen(
            command, env=env, start_new_session=True, preexec_fn=end_with_parent
        )
        code = attend(run, agent, wishes)
    if code < 0 and (run.fault() or {}).get("kind") != HangError.__name__:
        os.kill(os.getpid(), -code)  # srun says how it died
    return abs(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
