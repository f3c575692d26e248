"""The edge of a task that srun started: SLURM's variables become torch's, once, and the worker takes its place."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from pipeline.config.load import reload
from pipeline.config.schema import RunConfig
from pipeline.process import end_with_parent
from pipeline.train.rundir import RunDir
from pipeline.train.start import attend, listening

_WORKER = "pipeline.train.worker"
# a signal to the step reaches torchrun too, which would die of it before its workers have saved
_AGENT = (
    "import runpy, signal; signal.signal(signal.SIGUSR1, lambda *_: None); "
    "runpy.run_module('torch.distributed.run', run_name='__main__')"
)


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """One process per task: rank and world from srun; MASTER_ADDR and MASTER_PORT came from the batch step."""
    return {
        **env,
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": env["SLURM_NTASKS"],
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": env["SLURM_NTASKS_PER_NODE"],
    }


def torchrun(run: Path, env: Mapping[str, str]) -> list[str]:
    """One agent per node, which starts its processes and sets their variables."""
    meet = ["--rdzv_backend=c10d", f"--rdzv_endpoint={env['MASTER_ADDR']}:{env['MASTER_PORT']}"]
    many = [f"--nnodes={env['SLURM_NNODES']}", f"--nproc_per_node={env['ISOFLOP_TASKS']}"]
    which = [f"--rdzv_id={env['SLURM_JOB_ID']}.{env.get('SLURM_RESTART_COUNT', 0)}"]
    where = [f"--log_dir={run}/logs/{env['SLURMD_NODENAME']}", "--redirects=3", "--tee=3"]
    return ["-c", _AGENT, *many, *meet, *which, *where, "-m", _WORKER]


def stage(config: RunConfig, scratch: Path, *, first: bool) -> Path:
    """The shards on this node's own disk: the first task copies them, the others wait."""
    source = Path(config.data.dir or ".")
    there = scratch / f"isoflop-{config.data.hash}"
    if first and not there.exists():
        aside = there.with_name(f"{there.name}.{os.getpid()}")
        shutil.copytree(source, aside)
        try:
            aside.rename(there)
        except OSError:  # another job on this node was faster
            shutil.rmtree(aside)
    while not there.exists():
        time.sleep(0.2)
    return there


def main(arguments: list[str]) -> int:
    run = RunDir(Path(arguments[0]))
    config = reload(run.config)
    site, env = config.cluster.slurm, dict(os.environ)
    near = stage(config, Path(site.scratch), first=env["SLURM_LOCALID"] == "0") if site.scratch else None
    worker = [str(run.path), *(("--data", str(near)) if near else ())]
    if site.launcher == "srun":
        os.execve(sys.executable, [sys.executable, "-m", _WORKER, *worker], environment(env))
    command = [sys.executable, *torchrun(run.path, env), *worker]
    with listening() as wishes:  # torchrun itself would give its workers half a minute to save
        return attend(run, subprocess.Popen(command, start_new_session=True, preexec_fn=end_with_parent), wishes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
