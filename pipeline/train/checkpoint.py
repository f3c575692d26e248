"""Checkpoints that are whole or absent: written aside by every rank, checksummed, committed by one rename.

DeepSpeed names its newest checkpoint before the other ranks have written theirs and unpickles whatever it finds; so
its own marker is never used, and no file is opened before its checksum has been held against our manifest.
"""

import errno
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import xxhash

from pipeline.account import checkpoint_bytes
from pipeline.config.schema import RunConfig
from pipeline.errors import RunError
from pipeline.files import replace, sync_directory
from pipeline.parallel.engine import Engine
from pipeline.parallel.world import World

_MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    step: int
    world: int
    files: dict[str, str]  # relative name → xxh3 of its bytes


def save(engine: Engine, config: RunConfig, root: Path, step: int, world: World) -> Path:
    final, aside = root / f"step-{step:08d}", root / f".step-{step:08d}.tmp"
    _check_space(config, root, step, world)
    if world.first:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    world.barrier()
    try:
        engine.save(aside)
        world.barrier()
        names = sorted(str(p.relative_to(aside)) for p in aside.rglob("*") if p.is_file())
        sums = {name: _digest(aside / name, sync=True) for name in names[world.rank :: world.size]}
        gathered = world.gather(sums)
        if world.first:
            files = {k: v for part in gathered if isinstance(part, dict) for k, v in part.items()}
            _commit(aside, final, {"version": 1, "step": step, "world": world.size, "files": files})
            _prune(root, config.train.keep_last)
        world.barrier()
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        fault = _save_error(error, root, step)  # first: it looks how full the disk is
        shutil.rmtree(aside, ignore_errors=True)
        raise fault from error
    return final


def _commit(aside: Path, final: Path, manifest: dict[str, object]) -> None:
    replace(aside / _MANIFEST, json.dumps({**manifest, "seal": _seal(manifest)}, indent=1).encode())
    shutil.rmtree(final, ignore_errors=True)  # of a run that was rolled back past it
    aside.rename(final)
    sync_directory(final.parent)


def _prune(root: Path, keep: int) -> None:
    for old in _steps(root)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def find(root: Path, world: World) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint whose every byte is as written, and a line for each newer one that is not."""
    if world.first:
        for leftover in root.glob(".step-*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
    world.barrier()
    damaged: list[str] = []
    for path in reversed(_steps(root)):
        fault = _fault(path, world)
        if fault is None:
            manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
            return Checkpoint(path, manifest["step"], manifest["world"], manifest["files"]), damaged
        damaged.append(f"checkpoint {path.name} is damaged ({fault})")
    if damaged:
        raise RunError(f"{damaged[0]} and no older one in {root} is whole; restore it or take a new --out")
    return None, []


def load(engine: Engine, checkpoint: Checkpoint, world: World) -> None:
    if checkpoint.world != world.size:
        raise RunError(
            f"checkpoint {checkpoint.path.name} was written by {checkpoint.world} processes and this run has "
            f"{world.size}; resume with --nproc {checkpoint.world}"
        )
    engine.load(checkpoint.path)


def _fault(path: Path, world: World) -> str | None:
    """What is wrong with a checkpoint, the same answer on every rank; ranks share the reading."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, str] = manifest["files"]
        if manifest.pop("seal") != _seal(manifest) or path.name != f"step-{manifest['step']:08d}":
            raise ValueError("not as it was written")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        files, mine = {}, f"manifest: {error}"
    else:
        mine = ""
        for name in sorted(files)[world.rank :: world.size]:
            try:
                if _digest(path / name) != files[name]:
                    mine = f"{name}: checksum differs"
            except OSError as error:
                mine = f"{name}: {error.strerror}"
    return next((str(fault) for fault in world.gather(mine) if fault), None)


def _seal(manifest: dict[str, object]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode())


def _steps(root: Path) -> list[Path]:
    return sorted(p for p in root.glob("step-*") if p.is_dir())


def _digest(path: Path, *, sync: bool = False) -> str:
    hasher = xxhash.xxh3_128()
    with path.open("rb+" if sync else "rb") as file:
        while block := file.read(1 << 22):
            hasher.update(block)
        if sync:
            os.fsync(file.fileno())
    return hasher.hexdigest()


def _check_space(config: RunConfig, root: Path, step: int, world: World) -> None:
    assert config.train.dtype != "auto", "resolve the recipe first"
    need, free = checkpoint_bytes(config.model, config.train.dtype), shutil.disk_usage(root).free
    if world.agree(free < need):
        raise _save_error(OSError(errno.ENOSPC, f"{need:,} bytes needed, {free:,} free"), root, step)


def _save_error(error: Exception, root: Path, step: int) -> RunError:
    full = getattr(error, "errno", None) == errno.ENOSPC or shutil.disk_usage(root).free < 1 << 20
    held = _steps(root)
    last = f"{held[-1].name} is intact" if held else "there is no earlier one"
    what = "disk full" if full else f"{type(error).__name__}: {str(error).splitlines()[0]}"
    detail = f" ({error.args[1]})" if isinstance(error, OSError) and len(error.args) > 1 else ""
    return RunError(f"saving step {step} to {root} failed: {what}{detail}; {last}; make room and --resume")
