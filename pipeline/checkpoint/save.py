"""Save checkpoints in the background. Only the next optimizer step waits, for a copy of the state.

Every rank writes its part to a temporary directory; rank 0 gathers the checksums, writes the
manifest and commits with one rename. The training thread joins the writing thread only before the
next save and at the end. The writing thread has a separate process group, because collectives
of two threads in one group could run in a different order on each rank.
"""

import errno
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.atomic import digest, replace, sync_directory
from pipeline.checkpoint.format import (
    ALIGN,
    CONFIG,
    MANIFEST,
    Manifest,
    Stored,
    merge_tensors,
    seal,
    write_numbers,
)
from pipeline.config.dump import to_toml
from pipeline.config.schema import RunConfig
from pipeline.errors import RunError
from pipeline.model.stack import Decoder
from pipeline.parallel import fragments
from pipeline.parallel.engine import Engine
from pipeline.parallel.fragments import Fragment, on_disk, random_state
from pipeline.parallel.world import TIMEOUT, World
from pipeline.planner.memory import checkpoint_bytes
from pipeline.runs.directory import checkpoint_path, list_checkpoints

T = TypeVar("T")


class Saved(NamedTuple):
    step: int
    seconds: float  # from the call to the commit
    blocked_s: float  # the part of these seconds in which training waited


@dataclass(slots=True)
class _Pending:
    step: int
    began: float
    writing: Future[None]


class Saver:
    """Saves one engine's state into one directory, one save at a time."""

    def __init__(self, engine: Engine, config: RunConfig, root: Path, world: World) -> None:
        self._engine = engine
        self._config = config
        self._root = root
        self._world = world
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT) if world.size > 1 else None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: _Pending | None = None
        self._blocked_s = 0.0  # by the save in progress
        # Set when the state may change again: the copy is done or, on a GPU, enqueued.
        self._copied = threading.Event()
        self._copied.set()
        on_gpu = world.device.type == "cuda"
        self._stream = torch.cuda.Stream() if on_gpu else None  # type: ignore[no-untyped-call]
        # The views stay valid for the whole run, and listing them takes longer than copying them.
        self._live = engine.state(share=True)
        disk = config.parallel.offload.path if config.parallel.offload.nvme else None
        live = [*self._live, *random_state(world)]
        self._host = self._thread.submit(_host_memory, live, disk, pinned=on_gpu)
        engine.optimizer.register_step_pre_hook(lambda *_: self._wait_for_copy())

    def save(self, step: int) -> Saved | None:
        """Wait for the save before this one, start this save, and return the one before.

        The next optimizer step waits for the copy. Until then only random draws change the state,
        so the random state is copied here."""
        before = self.wait()
        began = time.perf_counter()
        self._copied.clear()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        live = [*self._live, *random_state(self._world)]
        self._pending = _Pending(step, began, self._thread.submit(self._save, step, live))
        self._blocked_s = time.perf_counter() - began
        return before

    def wait(self) -> Saved | None:
        """Wait for the save in progress to be committed; raise RunError if it failed."""
        pending = self._pending
        if pending is None:
            return None
        self._pending = None
        since = time.perf_counter()
        pending.writing.result()
        now = time.perf_counter()
        return Saved(pending.step, now - pending.began, self._blocked_s + now - since)

    def finished(self) -> Saved | None:
        """Return the save in progress if it has ended; do not wait."""
        return self.wait() if self._pending is not None and self._pending.writing.done() else None

    def _wait_for_copy(self) -> None:
        began = time.perf_counter()
        self._copied.wait()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._blocked_s += time.perf_counter() - began

    def _copy(self, live: list[Fragment]) -> tuple[int, list[Fragment]]:
        """Copy the state to host memory, during the next forward and backward passes."""
        try:
            host = self._host.result()
            with torch.cuda.stream(self._stream):  # without effect on a CPU, where it is None
                adam_steps = fragments.steps(self._engine.optimizer)
                for fragment, copy in zip(live, host, strict=True):
                    copy.copy_(fragment.data, non_blocking=True)
        finally:
            self._copied.set()
        if self._stream is not None:
            self._stream.synchronize()
        copies = [
            Fragment(f.key, f.shape, f.offset, copy) for f, copy in zip(live, host, strict=True)
        ]
        return adam_steps, copies

    def _save(self, step: int, live: list[Fragment]) -> None:
        temporary = _temporary(self._root, step)
        adam_steps, copies = self._copy(live)
        try:
            # Both steps end on all ranks before the next begins: the gathering is a barrier.
            self._on_all_ranks(lambda: self._prepare(temporary))
            path = temporary / f"rank-{self._world.rank:05d}.bin"
            parts = self._on_all_ranks(lambda: _write(path, copies))
            if self._world.first:
                manifest = Manifest(
                    step=step,
                    adam_steps=adam_steps,
                    world=self._world.size,
                    tensors=merge_tensors([tensors for _, tensors, _ in parts]),
                    files={name: checksum for name, _, checksum in parts},
                )
                commit(temporary, self._config, manifest)
                train = self._config.train
                prune(self._root, step, train.keep_last, train.keep_every, train.keep_at)
        except OSError as error:
            failure = self._failure(error, step)  # before the removal, which frees disk space
            shutil.rmtree(temporary, ignore_errors=True)
            raise failure from error

    def _prepare(self, temporary: Path) -> None:
        if self._world.first:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        need = checkpoint_bytes(self._config)
        free = shutil.disk_usage(self._root).free
        if free < need:
            raise OSError(errno.ENOSPC, f"{need:,} bytes needed, {free:,} free")

    def _on_all_ranks(self, action: Callable[[], T]) -> list[T]:
        """Run an action on every rank; return all results, or raise on every rank if one failed."""
        # A rank sends an error like a result: the others would wait for a rank that left.
        mine: T | OSError
        try:
            mine = action()
        except OSError as error:
            mine = error
        parts = [mine] * self._world.size
        if self._group is not None:
            dist.all_gather_object(parts, mine, group=self._group)
        results: list[T] = []
        for part in parts:
            if isinstance(part, OSError):
                raise part
            results.append(part)
        return results

    def _failure(self, error: OSError, step: int) -> RunError:
        intact = list_checkpoints(self._root)
        last = f"{intact[max(intact)].name} is intact" if intact else "there is no earlier one"
        what = "disk full: " if error.errno == errno.ENOSPC else ""
        return RunError(
            f"saving step {step} to {self._root} failed: {what}{error.strerror}; {last}; "
            "make the disk usable again and --resume"
        )


def _write(path: Path, copies: list[Fragment]) -> tuple[str, dict[str, Stored], str]:
    # A network file system may be late to show the directory that rank 0 created.
    path.parent.mkdir(exist_ok=True)
    return path.name, *write_numbers(path, copies)


def _host_memory(live: list[Fragment], disk: str | None, *, pinned: bool) -> list[Tensor]:
    """Allocate the host copies of a run's saves once and in one piece, because pinning is slow."""
    sizes = [-(-f.data.nbytes // ALIGN) * ALIGN for f in live]
    whole = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned and not disk)
    parts = torch.split(on_disk(whole, disk) if disk else whole, sizes)
    return [part[: f.data.nbytes].view(f.data.dtype) for part, f in zip(parts, live, strict=True)]


def save_weights(model: Decoder, config: RunConfig, root: Path) -> None:
    """Write a checkpoint at step 0 without optimizer state, for a new run to start from."""
    temporary = _temporary(root, 0)
    temporary.mkdir(parents=True)
    name = "rank-00000.bin"
    tensors, checksum = write_numbers(temporary / name, fragments.weights(model))
    files = {name: checksum}
    commit(temporary, config, Manifest(step=0, adam_steps=0, world=1, tensors=tensors, files=files))


def _temporary(root: Path, step: int) -> Path:
    return root / f".step-{step:08d}.tmp"


def commit(temporary: Path, config: RunConfig, manifest: Manifest) -> None:
    """Write config and manifest. Then one rename makes the checkpoint exist."""
    replace(temporary / CONFIG, to_toml(config).encode())
    manifest.files[CONFIG] = digest(temporary / CONFIG)
    replace(temporary / MANIFEST, seal(manifest))
    final = checkpoint_path(temporary.parent, manifest.step)
    if final.exists():  # the run was rolled back past this step
        remove(final)
    temporary.rename(final)
    sync_directory(final.parent)


def prune(
    root: Path, step: int, keep_last: int, keep_every: int | None, keep_at: Sequence[int] = ()
) -> None:
    """Remove all checkpoints except the last `keep_last` up to a step, those at multiples of
    `keep_every` and those at `keep_at`. Later checkpoints belong to steps rolled back."""
    by_step = list_checkpoints(root)
    newest = [each for each in by_step if each <= step][-keep_last:]
    for each, path in by_step.items():
        regular = keep_every is not None and each % keep_every == 0
        if each > step or not (each in newest or each in keep_at or regular):
            remove(path)


def remove(path: Path) -> None:
    """Rename a checkpoint first, so that a half-removed one is never read."""
    gone = path.with_name(f".{path.name}.gone")
    with suppress(FileNotFoundError):  # a user may have deleted it just now
        path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
