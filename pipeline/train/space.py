"""Check the path of a run, and that disks and memory have space for it, before it starts."""

import os
import shutil
from pathlib import Path

from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError, RunError
from pipeline.planner.memory import Layout, checkpoint_bytes, disk_bytes, offloaded
from pipeline.runs.directory import RunDir, list_checkpoints
from pipeline.units import byte_size


def check_path(out: Path) -> None:
    """Refuse a file, a name that is too long or a directory that may not be read."""
    try:
        os.scandir(out).close()
    except FileNotFoundError:
        return
    except OSError as error:
        name = str(out) if len(str(out)) <= 100 else f"{str(out)[:100]}…"
        raise RunError(f"--out {name}: {error.strerror}; choose another directory") from None


def check_offload(config: RunConfig, ranks: int, host_bytes: int | None) -> None:
    """Check for enough space for offloaded states and for the copy behind each checkpoint."""
    offload = config.parallel.offload
    layout = Layout.of(config, ranks)
    copy = checkpoint_bytes(config)
    if offload.path is not None and offload.nvme:
        key = f"parallel.offload.path={offload.path}"
        folder = Path(offload.path)
        if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            raise ConfigError(f"{key} is not a writable directory; give one on a local disk")
        need = offloaded(config, layout, "nvme") + copy
        free = shutil.disk_usage(folder).free
        if need > free:
            space = f"{byte_size(free)} free, the run needs {byte_size(need)} there"
            raise RunError(f"{key} has {space}; use another disk")
        copy = 0
    held = offloaded(config, layout, "cpu")
    if held and host_bytes is not None and held + copy > host_bytes:
        raise ConfigError(
            f"parallel.offload to the CPU needs about {byte_size(held + copy)} of memory and "
            f"{byte_size(host_bytes)} are free; offload to nvme (docs/TRAINING.md), or use a "
            f"smaller --size"
        )


def check_disk(config: RunConfig, path: Path, ranks: int) -> None:
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    # One more than is kept: the next is complete before the oldest is deleted. A run that continues
    # has some already.
    count = max(1, config.train.keep_last + 1 - len(list_checkpoints(RunDir(path).checkpoints)))
    need = count * disk_bytes(config, ranks)
    free = shutil.disk_usage(there).free
    if need > free:
        space = f"{count} checkpoints need {byte_size(need)} and {byte_size(free)} are free"
        remedy = "free some space, choose another disk, or --set train.keep_last=1"
        raise RunError(f"--out {path}: {space}; {remedy}")
