"""`launch doctor`: check whether this machine is ready, and print how to fix each problem."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import typer

from launch.options import AsJson, examples

# Each name is that of the distribution and of the module, because `_package` uses both.
PACKAGES = (
    "torch", "deepspeed", "accelerate", "datasets", "sentencepiece", "gigatoken", "ray", "mlflow",
)  # fmt: skip
GIB = 2**30
# With less than this the demo may run out of memory, or checkpoints out of disk space.
LOW_MEMORY_BYTES = 4 * GIB
LOW_DISK_BYTES = 10 * GIB
LIST_GPUS = (
    "import torch\nprint([torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())])"
)
# The start of a rich tag and the mark; `_print` adds the opening bracket and the closing tag.
MARKS = {"ok": "green]✓", "note": "yellow]•", "missing": "red]✗", "broken": "red]✗"}

app = typer.Typer()


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    state: Literal["ok", "missing", "broken", "note"]  # a note does not fail the command
    found: str
    remedy: str = ""


@app.command(epilog=examples("launch doctor", "launch doctor --json"))
def doctor(as_json: AsJson = False) -> None:
    """Check Python, packages, GPUs, tracking, SLURM, memory and disk; exit 1 if one is broken."""
    # On stderr, also in a pipe, because nothing else is printed for up to half a minute.
    typer.echo(f"importing {len(PACKAGES)} packages: up to half a minute", err=True)
    findings = []
    for finding in _findings():
        findings.append(finding)
        if not as_json:
            _print(finding)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    if any(finding.state in ("missing", "broken") for finding in findings):
        raise typer.Exit(1)


def _findings() -> Iterator[Finding]:
    yield Finding(
        "python",
        "ok" if sys.version_info >= (3, 11) else "broken",
        ".".join(map(str, sys.version_info[:3])),
        "install Python 3.11 or newer",
    )
    # Each import takes seconds, so they run in parallel, and each is printed when it is done.
    with ThreadPoolExecutor() as pool:
        checks = [pool.submit(_package, name) for name in PACKAGES]
        for done in as_completed(checks):
            yield done.result()
    yield _gpus()
    yield _tracking()
    yield _slurm()
    yield _memory()
    yield _disk()


def _run(*command: str, **env: str) -> "subprocess.CompletedProcess[str]":
    merged = {**os.environ, **env}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=merged)


def _package(name: str) -> Finding:
    """Import a package in its own process: one that crashes must not end the doctor.

    `-P` keeps Python files in the working directory from being imported.
    """
    remedy = f"pip install -c constraints.txt {name}"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "missing", "not installed", remedy)
    accelerator = os.environ.get("DS_ACCELERATOR", "cpu")  # DeepSpeed looks for a GPU otherwise
    probe = _run(
        sys.executable, "-P", "-c", f"import {name}",
        DS_ACCELERATOR=accelerator, MLFLOW_DISABLE_TELEMETRY="true",
    )  # fmt: skip
    if probe.returncode:
        # The last line of a traceback is the exception.
        reason = (probe.stderr.strip().splitlines() or ["import failed"])[-1]
        return Finding(name, "broken", f"{version}: {reason}", f"{remedy} --force-reinstall")
    return Finding(name, "ok", version)


def _gpus() -> Finding:
    # In its own process, because CUDA takes hundreds of MB of memory.
    probe = _run(sys.executable, "-P", "-c", LIST_GPUS)
    names = probe.stdout.strip()
    if probe.returncode or names == "[]":
        found = f"no GPU, {os.cpu_count()} CPU cores"
        return Finding(
            "devices", "note", found, "small sizes train on CPUs; for GPUs install a driver"
        )
    return Finding("devices", "ok", names)


def _tracking() -> Finding:
    from pipeline.track.mlflow_store import public

    # Only `public(uri)` is printed: the address may contain a password.
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None:
        return Finding("tracking", "ok", "local store mlflow.db")
    # A database or a directory. There is no server to ask; the first run opens it.
    if not uri.startswith("http"):
        return Finding("tracking", "ok", public(uri))
    try:
        # /health is MLflow's own endpoint and needs no login.
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=3) as answer:
            return Finding("tracking", "ok", f"{public(uri)} answers {answer.status}")
    except (OSError, ValueError) as error:
        remedy = "start the server; runs train without it, and `launch sync` sends them later"
        return Finding("tracking", "note", f"{public(uri)}: {error}", remedy)


def _slurm() -> Finding:
    if shutil.which("sbatch") is None:
        return Finding("slurm", "note", "no sbatch here", "only needed for cluster jobs")
    # A controller that does not answer would keep sinfo waiting for minutes.
    probe = _run("timeout", "20", "sinfo", "--noheader", "-o", "%P %a %D")
    if probe.returncode:
        found = "sbatch is here, but the controller does not answer"
        return Finding("slurm", "note", found, "check SLURM_CONF and slurmctld")
    return Finding("slurm", "ok", "; ".join(probe.stdout.split("\n")[:3]).strip("; "))


def _memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    # Available, not free: the system can reclaim its page cache.
    found = f"{memory.available / GIB:.0f} of {memory.total / GIB:.0f} GiB available"
    if memory.available < LOW_MEMORY_BYTES:
        return Finding("memory", "note", found, "close other programs; the demo needs 1.3 GB")
    return Finding("memory", "ok", found)


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    found = f"{free / GIB:.0f} GiB free here"
    if free < LOW_DISK_BYTES:
        return Finding("disk", "note", found, "free disk space for checkpoints")
    return Finding("disk", "ok", found)


def _print(finding: Finding) -> None:
    """Print a finding at once, because the next check may take seconds."""
    from rich.console import Console
    from rich.markup import escape

    message = finding.found if finding.state == "ok" else f"{finding.found}; {finding.remedy}"
    line = f"[{MARKS[finding.state]}[/] {finding.what:<13} {escape(message)}"
    Console().print(line, highlight=False, soft_wrap=True)
