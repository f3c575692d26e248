"""A checkpoint is a directory with a sealed manifest: which files belong to it, their checksums, what is in them.

step-00000100/manifest.json    step, world, Adam's step count, where each tensor's numbers are, the files' checksums
              config.toml      the run's settings: enough to build the model anywhere
              __0_0.distcp …   the numbers, one file per rank
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from pipeline.atomic import digest, replace, sync_directory
from pipeline.checkpoint.store import Index
from pipeline.config.dump import to_toml
from pipeline.config.schema import RunConfig
from pipeline.errors import RunError
from pipeline.runs.directory import checkpoint_path, list_checkpoints

VERSION = 2
CONFIG = "config.toml"
_NAME = "manifest.json"


@dataclass(frozen=True, slots=True)
class Manifest:
    version: int
    step: int  # how many updates are in it: the loader goes on from here
    adam_steps: int
    world: int
    shapes: dict[str, list[int]]  # of each global tensor
    tensors: Index
    files: dict[str, str]  # name → xxh3 of its bytes


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step


def commit(aside: Path, config: RunConfig, manifest: Manifest) -> None:
    """One rename makes the checkpoint exist, when all of it is on the disk."""
    final = checkpoint_path(aside.parent, manifest.step)
    replace(aside / CONFIG, to_toml(config).encode())
    manifest.files[CONFIG] = digest(aside / CONFIG)
    content = asdict(manifest)
    replace(aside / _NAME, json.dumps({**content, "seal": _seal(content)}).encode())
    if final.exists():  # of a run that was rolled back past it
        remove(final)
    aside.rename(final)
    sync_directory(final.parent)


def read(path: Path) -> Checkpoint:
    """A complete checkpoint, its manifest as it was written; raises ValueError where it is not."""
    try:
        content: dict[str, Any] = json.loads((path / _NAME).read_text(encoding="utf-8"))
        if content.get("version") != VERSION:
            raise ValueError(f"version {content.get('version')}, this reads {VERSION}")
        if content.pop("seal") != _seal(content) or path != checkpoint_path(
            path.parent, content["step"]
        ):
            raise ValueError("not as it was written")
        manifest = Manifest(**content)
        stored = {chunk[2] for tensor in manifest.tensors.values() for chunk in tensor["chunks"]}
        if (
            any(Path(name).name != name for name in manifest.files)
            or not stored <= manifest.files.keys()
        ):
            raise ValueError("names files that are not its own")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"manifest: {error}") from None
    return Checkpoint(path, manifest)


def fault(checkpoint: Checkpoint, names: list[str]) -> str:
    """What is wrong with some of its files; empty if nothing."""
    for name in names:
        try:
            if digest(checkpoint.path / name) != checkpoint.manifest.files[name]:
                return f"{name}: checksum differs"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return ""


def prune(
    root: Path, step: int, keep_last: int, keep_every: int | None, keep_at: Sequence[int] = ()
) -> None:
    """The newest few up to a step stay, every one whose step is a multiple, and those where branches begin; what is
    later than the step was rolled back."""
    by_step = list_checkpoints(root)
    stay = {*[each for each in by_step if each <= step][-keep_last:], *keep_at}
    for each, path in by_step.items():
        if each > step or (each not in stay and (not keep_every or each % keep_every)):
            remove(path)


def remove(path: Path) -> None:
    """Under another name first: a checkpoint that is half gone is not one."""
    gone = path.with_name(f".{path.name}.gone")
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def sweep(root: Path) -> None:
    """What a killed process left of a save or a removal."""
    for leftover in root.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def newest(path: Path) -> Checkpoint:
    """The checkpoint at a path, which is one, a run directory or its `checkpoints`; every file held to its checksum."""
    for root in (path / "checkpoints", path):
        if found := list_checkpoints(root):
            path = found[max(found)]
            break
    try:
        checkpoint = read(path)
    except ValueError as error:
        raise RunError(
            f"no checkpoint to read at {path}: {error}; give a run directory or a step of one"
        ) from None
    if wrong := fault(checkpoint, sorted(checkpoint.manifest.files)):
        raise RunError(f"checkpoint {path} is damaged ({wrong}); restore it or give an older one")
    return checkpoint


def _seal(content: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
