"""`python -m tests.train.limited BYTES ARGUMENT…`: `launch` with a limit on the memory of a process.

At exit it prints whether the process group was left."""

import atexit
import resource
import runpy
import sys

import torch.distributed as dist

atexit.register(
    lambda: print("group", "open" if dist.is_initialized() else "left", file=sys.stderr)
)
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
runpy.run_module("launch", run_name="__main__", alter_sys=True)
