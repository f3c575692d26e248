"""The edge of a training process, started by torchrun or srun:
`python -m pipeline.train.worker RUN_DIR [--quiet] [--data COPY] [--to-file] [--wait]`."""

import os
import sys
import traceback
from pathlib import Path

import torch.distributed as dist

from pipeline.config.layers import reload
from pipeline.errors import UserError
from pipeline.parallel.world import World
from pipeline.process import end_with_parent, redirect_output
from pipeline.runs.directory import RunDir
from pipeline.train.run import run
from pipeline.train.stop import STOPPED, Stop


def main(arguments: list[str]) -> int:
    """0: finished; 75: saved because a signal asked for it, and not finished; 2: a person can mend it, so that no
    scheduler should try again; 1: a fault of ours or of the machine."""
    path = Path(arguments[0])
    if (
        os.environ["RANK"] != "0"
    ):  # who keeps the terminal; what the others print goes where their errors go
        os.dup2(2, 1)
    if (
        "--wait" in arguments
    ):  # with all of it imported, until a byte comes: perhaps for the death of another group
        import pipeline.parallel.zero  # noqa: F401

        if reload(RunDir(path).config).train.compile:
            import torch._dynamo  # noqa: F401
        if not os.read(sys.stdin.fileno(), 1):
            return 1
    stop = Stop()
    if "--to-file" in arguments:  # torchrun's own files are by its numbers of a node
        redirect_output(path / "logs" / f"rank-{os.environ['RANK']}.log")
    copy = Path(arguments[arguments.index("--data") + 1]) if "--data" in arguments else None
    end_with_parent()
    try:
        finished = run(
            path, World.from_environment(os.environ), stop, quiet="--quiet" in arguments, data=copy
        )
    except UserError as error:
        RunDir(path).fail(error)
        return 2
    except BaseException as error:
        traceback.print_exc()
        RunDir(path).fail(error)
        return 1
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0 if finished else STOPPED


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # threads of gloo or NCCL that wait for a dead peer would keep a failed process from ending
    os._exit(code)
