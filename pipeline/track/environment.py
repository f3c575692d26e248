"""What a run ran on, without importing torch and without one environment variable: those hold secrets."""

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

from pipeline.atomic import replace

FILE = "env.json"


def write(run_dir: Path) -> None:
    replace(run_dir / FILE, json.dumps(describe(), indent=1, sort_keys=True).encode() + b"\n")


def describe() -> dict[str, object]:
    packages = {d.metadata["Name"]: d.version for d in distributions() if d.metadata["Name"]}
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "machine": platform.machine(),
        "host": platform.node(),
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "devices": _devices(),
        "commit": commit(),
        "torch": packages.get("torch"),
        "packages": packages,
    }


def commit() -> str | None:
    """The checkout's commit, `-dirty` if edited; None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    return (
        _say(
            "git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"
        )
        or None
    )


def _devices() -> list[str]:
    query = _say(
        "nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
    )
    return query.splitlines()


def _say(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()
