"""A task that srun started: it sets torch's variables from SLURM's and starts the ranks."""

import os
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from pipeline.config.layers import reload
from pipeline.config.schema import RunConfig
from pipeline.errors import RunError
from pipeline.process import STOPPED, StopRequest, rank_variables
from pipeline.runs.directory import HangError, RunDir
from pipeline.train.supervisor import Group, record_death


def environments(env: Mapping[str, str], *, per_node: bool) -> list[dict[str, str]]:
    """Return the environment of each rank that this task starts: one rank, or all of its node.

    MASTER_ADDR, MASTER_PORT and ISOFLOP_TASKS come from the batch step.
    """
    tasks = int(env["SLURM_NTASKS"])
    number = int(env["SLURM_PROCID"])
    count = int(env["ISOFLOP_TASKS"])
    if not per_node:
        return [{**env, **rank_variables(number, int(env["SLURM_LOCALID"]), tasks, count)}]
    first = number * count
    ranks = [rank_variables(first + i, i, tasks * count, count) for i in range(count)]
    return [{**env, **variables} for variables in ranks]


def stage(config: RunConfig, scratch: Path, env: Mapping[str, str]) -> Path:
    """Copy the shards to this node's own disk: the first task copies them, the others wait."""
    copy = scratch / f"isoflop-{config.data.hash}"
    if env["SLURM_LOCALID"] == "0" and not copy.exists():
        partial = copy.with_name(f"{copy.name}.{env['SLURM_JOB_ID']}.{env['SLURMD_NODENAME']}")
        shutil.rmtree(partial, ignore_errors=True)  # left by an earlier start
        try:
            shutil.copytree(config.data.dir or ".", partial)
            partial.rename(copy)
        except OSError as error:
            if not copy.exists():  # otherwise another job on this node was faster
                text = f"cluster.slurm.scratch={scratch}: {str(error)[-200:]}"
                raise RunError(f"{text}; free some space there, or leave it out") from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    while not copy.exists():
        time.sleep(0.2)
    return copy


def main(arguments: list[str]) -> int:
    run = RunDir(Path(arguments[0]))
    run.note_host(here=False)
    config = reload(run.config)
    site = config.cluster.slurm
    try:
        copy = stage(config, Path(site.scratch), os.environ) if site.scratch else None
    except RunError as error:
        run.fail(error)
        return 2
    per_node = site.launcher == "torchrun"
    ranks = environments(os.environ, per_node=per_node)
    options = ("--data", str(copy)) if copy else ()
    # SLURM itself ends a job that takes too long to save, so only the first signal counts.
    with (
        closing(StopRequest(first_only=True)) as stop,
        closing(Group(run, ranks, *options)) as group,
    ):
        codes = group.wait(stop)
    death = group.death(codes)
    if death and per_node:
        record_death(run, death)
    elif death and (run.fault() or {}).get("kind") != HangError.__name__:
        os.kill(os.getpid(), death.signal)  # srun reports which task died, and how
    failed = [abs(code) for code in codes.values() if code not in (0, STOPPED)]
    return failed[0] if failed else max(codes.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
