"""`python -m tests.train.limited BYTES ARGUMENT…`: `launch` with a limit on the memory of a process."""

import resource
import runpy
import sys

limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
runpy.run_module("launch", run_name="__main__", alter_sys=True)
