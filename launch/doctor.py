"""`launch doctor`: is this machine ready, and if not, what mends it."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from launch.options import examples

PACKAGES = (
    "torch",
    "deepspeed",
    "accelerate",
    "datasets",
    "sentencepiece",
    "gigatoken",
    "ray",
    "mlflow",
)


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    state: Literal["ok", "missing", "broken", "note"]
    found: str
    remedy: str = ""


def register(app: typer.Typer) -> None:
    app.command(epilog=examples("launch doctor", "launch doctor --json"))(doctor)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Check Python, packages, devices, Ray, MLflow, SLURM, disk and memory; exit 1 if training cannot work."""
    findings = []
    for finding in _findings():
        findings.append(finding)
        if not as_json:
            _print(finding)
    if as_json:
        print(json.dumps([asdict(f) for f in findings], indent=1))
    if any(f.state in ("missing", "broken") for f in findings):
        raise typer.Exit(1)


def _findings() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding(
        "python",
        "ok" if sys.version_info >= (3, 11) else "broken",
        version,
        "install Python 3.11 or newer",
    )
    # each in a process of its own: a package that crashes on import must not take the doctor with it
    with ThreadPoolExecutor() as pool:
        yield from (
            done.result()
            for done in as_completed([pool.submit(_package, name) for name in PACKAGES])
        )
    yield _gpus()
    yield _tracking()
    yield _slurm()
    yield _memory()
    disk = shutil.disk_usage(Path.cwd())
    low = disk.free < 10 * 2**30
    yield Finding(
        "disk",
        "note" if low else "ok",
        f"{disk.free / 2**30:.0f} GiB free here",
        "make room for checkpoints" if low else "",
    )


def _package(name: str) -> Finding:
    remedy = f"pip install -c constraints.txt {name}"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "missing", "not installed", remedy)
    env = {
        **os.environ,
        "DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    probe = subprocess.run(
        [sys.executable, "-P", "-c", f"import {name}"],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    if probe.returncode:
        reason = (probe.stderr.strip().splitlines() or ["import failed"])[-1]
        return Finding(name, "broken", f"{version}: {reason}", f"{remedy} --force-reinstall")
    return Finding(name, "ok", version)


def _gpus() -> Finding:
    code = "import torch; print([torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())])"
    probe = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False
    )
    names = probe.stdout.strip()
    if probe.returncode or names == "[]":
        return Finding(
            "devices",
            "note",
            f"no GPU, {os.cpu_count()} CPU cores",
            "small sizes train on CPU; for GPUs install a driver",
        )
    return Finding("devices", "ok", names)


def _tracking() -> Finding:
    from pipeline.track.mlflow_store import public

    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None:
        return Finding("tracking", "ok", "local store mlflow.db", "")
    if not uri.startswith("http"):
        return Finding("tracking", "ok", public(uri))
    import urllib.request

    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=3) as answer:
            return Finding("tracking", "ok", f"{public(uri)} answers {answer.status}")
    except (OSError, ValueError) as error:
        return Finding(
            "tracking",
            "note",
            f"{public(uri)}: {error}",
            "start the server; runs train without it and `launch sync` replays",
        )


def _slurm() -> Finding:
    if shutil.which("sbatch") is None:
        return Finding("slurm", "note", "no sbatch here", "only needed for cluster jobs")
    probe = subprocess.run(
        ["sinfo", "--noheader", "-o", "%P %a %D"],
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    if probe.returncode:
        return Finding(
            "slurm",
            "note",
            "sbatch is here, the controller does not answer",
            "check SLURM_CONF and slurmctld",
        )
    return Finding("slurm", "ok", "; ".join(probe.stdout.split("\n")[:3]).strip("; "))


def _memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    low = memory.available < 4 * 2**30
    found = f"{memory.available / 2**30:.0f} of {memory.total / 2**30:.0f} GiB available"
    return Finding(
        "memory",
        "note" if low else "ok",
        found,
        "close other programs: the demo wants 8 GiB" if low else "",
    )


def _print(f: Finding) -> None:
    """One line at once: imports take a while."""
    from rich.console import Console
    from rich.markup import escape

    marks = {
        "ok": "[green]✓[/]",
        "note": "[yellow]•[/]",
        "missing": "[red]✗[/]",
        "broken": "[red]✗[/]",
    }
    said = escape(f.found if f.state == "ok" else f"{f.found}; {f.remedy}")
    Console().print(f"{marks[f.state]} {f.what:<13} {said}", highlight=False, soft_wrap=True)
