"""A checkpoint on disk: raw numbers, and a sealed manifest that locates every tensor in them.

step-00000100/manifest.json    step, world size, Adam's step count, tensors, checksums of all files
              config.toml      the run's settings: enough to build the model anywhere
              rank-00000.bin   the numbers that one rank wrote, little-endian

Every tensor is stored flat, as runs of consecutive numbers, because ZeRO cuts parameters at any
number. A reader maps the files into memory and copies the runs that overlap with what it needs,
so any layout reads what any other layout wrote. Nothing is unpickled.

Checkpoints of version 2, which earlier releases wrote through torch.distributed.checkpoint, still
load: there a run is a tensor in the form of `torch.save`.
"""

import io
import json
import os
from bisect import bisect_right
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
import xxhash
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from pipeline.atomic import digest, open_regular, read_regular
from pipeline.errors import RunError
from pipeline.parallel.fragments import Fragment
from pipeline.runs.directory import checkpoint_path

CONFIG = "config.toml"
MANIFEST = "manifest.json"
VERSION = 3
_LEGACY = 2
ALIGN = 64  # bytes: runs start at a multiple, so that a mapped file can be viewed as any dtype
# One entry takes about 150 bytes, and a model of 700B parameters has 10^5 tensors.
_MAX_MANIFEST_BYTES = 1 << 30

Count = Annotated[int, Field(ge=0)]


class DamagedError(Exception):
    """A checkpoint is damaged; the message names the place."""


class Run(NamedTuple):
    """Consecutive numbers of a tensor, and the bytes of a file that hold them."""

    offset: Count  # place of the first number in the flattened tensor
    numel: Annotated[int, Field(ge=1)]
    file: str
    start: Count  # first byte in the file
    length: Count  # bytes


class Stored(BaseModel):
    """One tensor: its runs, ordered by offset, cover it exactly once."""

    model_config = ConfigDict(strict=True, extra="forbid")
    dtype: Literal["float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool"]
    shape: list[Count]
    runs: list[Run]

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def numel(self) -> int:
        return sum(run.numel for run in self.runs)


class Manifest(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    version: int = VERSION
    step: Count  # optimizer steps in the state; the loader continues with this batch
    adam_steps: Count
    world: Annotated[int, Field(ge=1)]
    tensors: dict[str, Stored]
    files: dict[str, str]  # name → xxh3-128


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step


# --- writing


def write_numbers(path: Path, fragments: Iterable[Fragment]) -> tuple[dict[str, Stored], str]:
    """Write one rank's fragments to a file; return where they are, and the file's checksum."""
    tensors: dict[str, Stored] = {}
    hasher = xxhash.xxh3_128()
    with path.open("wb") as file:
        for fragment in fragments:
            if not len(fragment.data):
                continue
            padding = bytes(-file.tell() % ALIGN)
            numbers = fragment.data.view(torch.uint8).numpy().data
            for part in (padding, numbers):
                file.write(part)
                hasher.update(part)
            start = file.tell() - numbers.nbytes
            run = Run(fragment.offset, len(fragment.data), path.name, start, numbers.nbytes)
            dtype: Any = str(fragment.data.dtype).removeprefix("torch.")
            stored = Stored(dtype=dtype, shape=list(fragment.shape), runs=[])
            tensors.setdefault(fragment.key, stored).runs.append(run)
        file.flush()
        os.fsync(file.fileno())
    return tensors, hasher.hexdigest()


def merge_tensors(parts: Sequence[dict[str, Stored]]) -> dict[str, Stored]:
    """Combine the tensors that the ranks wrote."""
    merged: dict[str, Stored] = {}
    for part in parts:
        for key, stored in part.items():
            empty = stored.model_copy(update={"runs": []})
            merged.setdefault(key, empty).runs.extend(stored.runs)
    for stored in merged.values():
        stored.runs.sort()
    return merged


def seal(manifest: Manifest) -> bytes:
    """Return the content of manifest.json: the manifest and a checksum of it."""
    content = manifest.model_dump()
    return json.dumps({**content, "seal": _checksum(content)}).encode()


def _checksum(content: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


# --- reading


def read_manifest(path: Path) -> Checkpoint:
    """Open a checkpoint and check everything but the bytes of its files (see `check_files`)."""
    try:
        content = json.loads(read_regular(path / MANIFEST, _MAX_MANIFEST_BYTES))
        if content.pop("seal") != _checksum(content):
            raise DamagedError(f"{MANIFEST}: its checksum differs")
        version = content["version"]
        if version == _LEGACY:
            content = _from_legacy(content)
        elif version != VERSION:
            raise DamagedError(f"{MANIFEST}: version {version}, this release reads {VERSION}")
        manifest = Manifest.model_validate(content)
        # The path may be "." or a link.
        if checkpoint_path(path, manifest.step).name not in (path.name, path.resolve().name):
            raise DamagedError(f"{MANIFEST}: belongs to step {manifest.step}")
        _check_places(path, manifest)
    except OSError as error:
        name = Path(error.filename or MANIFEST).name
        raise DamagedError(f"{name}: {error.strerror}") from None
    # Hostile JSON can have any type anywhere; pydantic's ValidationError is a ValueError.
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        detail = " ".join(str(error).split())[:200]
        raise DamagedError(f"{MANIFEST}: {type(error).__name__}: {detail}") from None
    return Checkpoint(path, manifest)


def _from_legacy(content: dict[str, Any]) -> dict[str, Any]:
    shapes = content.pop("shapes")
    content["tensors"] = {
        key: {"dtype": old["dtype"], "shape": shapes[key], "runs": sorted(old["chunks"])}
        for key, old in content["tensors"].items()
    }
    return content


def _check_places(path: Path, manifest: Manifest) -> None:
    """Check that bytes of the manifest's files, all regular, cover every tensor exactly once."""
    sizes: dict[str, int] = {}
    for name in manifest.files:
        if Path(name).name != name:
            raise DamagedError(f"file {name} is not in the checkpoint")
        with open_regular(path / name) as file:
            sizes[name] = os.fstat(file.fileno()).st_size
    for key, stored in manifest.tensors.items():
        item_bytes = stored.torch_dtype.itemsize
        position = 0
        for run in stored.runs:
            if run.offset != position:
                raise DamagedError(f"{key} has a gap or an overlap at number {position:,}")
            position += run.numel
            if run.start + run.length > sizes.get(run.file, -1):
                raise DamagedError(f"{key} is not within {run.file}")
            raw = run.length == run.numel * item_bytes and run.start % item_bytes == 0
            if not raw and manifest.version != _LEGACY:
                raise DamagedError(f"{key} does not have {item_bytes} bytes per number")
        if position != int(np.prod(stored.shape, dtype=object)):
            raise DamagedError(f"{key} has {position:,} numbers, but the shape {stored.shape}")


def check_files(checkpoint: Checkpoint, names: Sequence[str]) -> None:
    """Compare files with their checksums; raise DamagedError at the first difference."""
    manifest = checkpoint.manifest
    for name in names:
        try:
            if digest(checkpoint.path / name) != manifest.files[name]:
                raise DamagedError(f"{name}: checksum differs")
        except OSError as error:
            raise DamagedError(f"{name}: {error.strerror}") from None
    if manifest.version == _LEGACY:
        reader = Reader(checkpoint)
        for stored in manifest.tensors.values():
            for run in stored.runs:
                if run.file in names:
                    reader.numbers(stored, run)


class Reader:
    """Fills fragments of any layout from a checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._maps: dict[str, Tensor] = {}  # file → its bytes

    def fill(self, fragments: Iterable[Fragment], *, grown: Container[str] = ()) -> None:
        """Write the stored numbers into the fragments. The tensors `grown` may have more rows than
        the stored ones; these rows keep their values."""
        for fragment in fragments:
            stored = self._checkpoint.manifest.tensors.get(fragment.key)
            numel = 0 if stored is None else stored.numel
            more = fragment.key in grown and numel < fragment.global_numel
            if stored is None or (numel != fragment.global_numel and not more):
                raise RunError(
                    f"checkpoint {self._checkpoint.path} has {numel:,} numbers for {fragment.key}, "
                    f"this model {fragment.global_numel:,}; it belongs to another model"
                )
            self._fill(fragment, stored)

    def _fill(self, fragment: Fragment, stored: Stored) -> None:
        end = fragment.offset + len(fragment.data)
        first = bisect_right(stored.runs, fragment.offset, key=lambda run: run.offset) - 1
        for run in stored.runs[first:]:
            low = max(run.offset, fragment.offset)
            high = min(run.offset + run.numel, end)
            if low >= high:
                break
            numbers = self.numbers(stored, run)[low - run.offset : high - run.offset]
            fragment.data[low - fragment.offset : high - fragment.offset].copy_(numbers)

    def numbers(self, stored: Stored, run: Run) -> Tensor:
        """Return the numbers of a run. For the raw form this is a view of the mapped file."""
        if run.file not in self._maps:
            with open_regular(self._checkpoint.path / run.file) as file:
                # Copy-on-write: torch has no read-only tensors, and nothing may change the file.
                self._maps[run.file] = torch.from_numpy(np.memmap(file, np.uint8, "c"))
        content = self._maps[run.file][run.start : run.start + run.length]
        if self._checkpoint.manifest.version == _LEGACY:
            return _legacy_numbers(content, stored, run)
        return content.view(stored.torch_dtype)


def _legacy_numbers(content: Tensor, stored: Stored, run: Run) -> Tensor:
    try:
        numbers = torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True)
    except Exception as error:  # malformed input makes torch.load raise almost anything
        raise DamagedError(f"{run.file}: {type(error).__name__} at byte {run.start:,}") from None
    if not isinstance(numbers, Tensor) or numbers.dtype != stored.torch_dtype:
        raise DamagedError(f"{run.file}: no {stored.dtype} tensor at byte {run.start:,}")
    if numbers.numel() != run.numel:
        raise DamagedError(f"{run.file}: not {run.numel:,} numbers at byte {run.start:,}")
    return numbers.view(-1)
