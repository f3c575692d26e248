"""What a run ran on: env.json in the run directory."""

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

from pipeline.atomic import replace

# No environment variables: they hold secrets. No torch: the sidecar does not import it.
FILE = "env.json"


def write(run_dir: Path) -> None:
    replace(run_dir / FILE, json.dumps(describe(), indent=1, sort_keys=True).encode() + b"\n")


def describe() -> dict[str, object]:
    packages = {d.metadata["Name"]: d.version for d in distributions() if d.metadata["Name"]}
    here = hasattr(os, "sched_getaffinity")  # on Linux: the processors this process may use
    gpus = ("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "machine": platform.machine(),
        "host": platform.node(),
        "cpus": len(os.sched_getaffinity(0)) if here else os.cpu_count(),
        "devices": _output("nvidia-smi", *gpus).splitlines(),
        "commit": commit(),
        "torch": packages.get("torch"),
        "packages": packages,
    }


def commit() -> str | None:
    """Return the commit of the checkout, with `-dirty` if edited; None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    describe = ("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return _output("git", "-C", str(root), *describe) or None


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
