"""Saving behind the training's back: only its next optimizer step waits, until the state is copied.

Every rank writes aside, rank 0 gathers the checksums and commits by one rename. The training thread meets the writing
one only before the next save and at the end; each has a process group of its own, for collectives of two threads in
one group would meet in any order.
"""

import errno
import shutil
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from pipeline.atomic import digest
from pipeline.checkpoint import manifest, store
from pipeline.checkpoint.manifest import Manifest
from pipeline.checkpoint.random import random_state
from pipeline.config.schema import RunConfig
from pipeline.errors import RunError
from pipeline.parallel import fragments
from pipeline.parallel.disk import on_disk
from pipeline.parallel.engine import Engine
from pipeline.parallel.fragments import Fragment
from pipeline.parallel.world import TIMEOUT, World
from pipeline.planner.memory import checkpoint_bytes
from pipeline.runs.directory import list_checkpoints

T = TypeVar("T")
_ALIGN = 64  # bytes: between the copies of two fragments


class Saved(NamedTuple):
    step: int
    seconds: float  # to the commit
    blocked_s: float  # of them, those in which the training waited


class Saver:
    """One save at a time of one engine's state into one directory."""

    def __init__(self, engine: Engine, config: RunConfig, root: Path, world: World) -> None:
        self._engine, self._config, self._root, self._world = engine, config, root, world
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT) if world.size > 1 else None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: tuple[int, float, Future[None]] | None = None
        self._blocked_s = 0.0  # by the save under way
        self._copied = (
            threading.Event()
        )  # or, on a GPU, under way in a stream that the training's will wait for
        self._copied.set()
        self._stream: torch.cuda.Stream | None = None
        if world.device.type == "cuda":
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._live = engine.state(
            share=True
        )  # the same views throughout: to list them takes longer than to copy them
        disk = config.parallel.offload.path if config.parallel.offload.nvme else None
        live = [*self._live, *random_state(world)]
        self._host = self._thread.submit(
            _host_memory, live, disk, pinned=world.device.type == "cuda"
        )
        engine.optimizer.register_step_pre_hook(lambda *_: self._hold())

    def save(self, step: int) -> Saved | None:
        """Returns at once, with the save before it, which it waits for. The next optimizer step waits for the copy:
        until then nothing changes the state but draws of random numbers, which is why theirs is copied here."""
        before = self.wait()
        began = time.perf_counter()
        self._copied.clear()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        writing = self._thread.submit(self._write, step, [*self._live, *random_state(self._world)])
        self._pending, self._blocked_s = (step, began, writing), time.perf_counter() - began
        return before

    def wait(self) -> Saved | None:
        """The save under way, when it is committed; raises RunError if it failed."""
        if self._pending is None:
            return None
        (step, began, writing), self._pending = self._pending, None
        since = time.perf_counter()
        writing.result()
        now = time.perf_counter()
        return Saved(step, now - began, self._blocked_s + now - since)

    def finished(self) -> Saved | None:
        """The save under way, if it has ended."""
        return self.wait() if self._pending is not None and self._pending[-1].done() else None

    def _hold(self) -> None:
        began = time.perf_counter()
        self._copied.wait()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._blocked_s += time.perf_counter() - began

    def _copy(self, live: list[Fragment]) -> tuple[int, list[Fragment]]:
        """Beside the next forward and backward passes."""
        try:
            host = self._host.result()
            with torch.cuda.stream(self._stream):  # of no effect without one
                count = fragments.steps(self._engine.optimizer)
                for fragment, copy in zip(live, host, strict=True):
                    copy.copy_(fragment.data, non_blocking=True)
        finally:
            self._copied.set()
        if self._stream is not None:
            self._stream.synchronize()
        return count, [
            Fragment(f.key, f.shape, f.offset, copy) for f, copy in zip(live, host, strict=True)
        ]

    def _write(self, step: int, live: list[Fragment]) -> None:
        aside = self._root / f".step-{step:08d}.tmp"
        count, copies = self._copy(live)
        try:
            if self._world.first:
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir(parents=True)
            need, free = checkpoint_bytes(self._config.model), shutil.disk_usage(self._root).free
            if any(self._gather(free < need)):
                raise OSError(errno.ENOSPC, f"{need:,} bytes needed, {free:,} free")
            index = store.write(aside, copies, self._group)
            sums = {p.name: digest(p) for p in aside.glob(f"__{self._world.rank}_*")}
            parts = self._gather((sums, {f.key: list(f.shape) for f in copies}))
            if self._world.first:
                files = {name: each for part, _ in parts for name, each in part.items()}
                shapes = {key: shape for _, part in parts for key, shape in part.items()}
                about = Manifest(
                    manifest.VERSION, step, count, self._world.size, shapes, index, files
                )
                manifest.commit(aside, self._config, about)
                train = self._config.train
                manifest.prune(self._root, step, train.keep_last, train.keep_every, train.keep_at)
        except (
            OSError,
            RuntimeError,
            CheckpointException,
        ) as error:  # torch reports a full disk as RuntimeError
            fault = self._error(error, step)  # first: it looks how full the disk is
            shutil.rmtree(aside, ignore_errors=True)
            raise fault from error

    def _gather(self, mine: T) -> list[T]:
        parts = [mine] * self._world.size
        if self._group is not None:
            dist.all_gather_object(parts, mine, group=self._group)
        return parts

    def _error(self, error: BaseException, step: int) -> RunError:
        if isinstance(error, CheckpointException):  # of whichever ranks failed
            error = next(iter(error.failures.values()))[0]
        # torch says it in its own words, and another rank may already have cleared its part away
        short = "unexpected pos" in str(error) or "failed writing" in str(error)
        full = (
            short
            or getattr(error, "errno", None) == errno.ENOSPC
            or shutil.disk_usage(self._root).free < 1 << 20
        )
        held = list_checkpoints(self._root)
        last = f"{held[max(held)].name} is intact" if held else "there is no earlier one"
        what = "disk full" if full else f"{type(error).__name__}: {str(error).splitlines()[0]}"
        detail = f" ({error.args[1]})" if isinstance(error, OSError) and len(error.args) > 1 else ""
        return RunError(
            f"saving step {step} to {self._root} failed: {what}{detail}; {last}; make room and --resume"
        )


def _host_memory(live: list[Fragment], disk: str | None, *, pinned: bool) -> list[Tensor]:
    """Room for the copies, in one piece, held for the whole run: pinning it takes longer than a save may."""
    sizes = [-(-f.data.nbytes // _ALIGN) * _ALIGN for f in live]
    whole = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned and not disk)
    room = torch.split(on_disk(whole, disk) if disk else whole, sizes)
    return [part[: f.data.nbytes].view(f.data.dtype) for part, f in zip(room, live, strict=True)]
