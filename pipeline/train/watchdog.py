"""The watchdog ends a rank that is alive and makes no progress, and records which rank hangs.

There is no heartbeat between ranks. Every step ends in a sum over all ranks, so when one rank
hangs, all others wait in that sum, and a thread in each of them notices by its own clock. A store
that could be asked might hang as well. The ranks share only the files with their stacks: a rank
that has written none is the one that hangs. (The supervisor finds a rank that SIGSTOP has stopped.)
"""

import contextlib
import faulthandler
import json
import math
import os
import signal
import threading
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pipeline.parallel.world import World
from pipeline.runs.directory import HangError, RunDir

_POLL_S = 0.5
_STACKS_S = 2.0  # for the other ranks to write their stacks too, after the first has
_WINDOW = 128  # durations from which the p99 is computed
_UNSURE = 4.0  # a limit from n durations is larger by this divided by n
_COLLECTIVES = 20  # the last ones are shown
_SAVE_S = 600.0  # a save waits for the one before it


class _Phase(NamedTuple):
    name: str
    step: int
    began_monotonic: float
    began_time: float


class Watchdog:
    """Times the phases of a rank.

    A phase may take three times its p99 plus `hang_s`; a save has ten minutes instead. A few
    durations say little about the next one on a busy machine: after the first one the limit is 15
    times that one, after the second 9 times. The start, and the first phase of each kind, which
    may compile, may take `first_s`.
    """

    def __init__(self, run: RunDir, world: World, hang_s: float, first_s: float) -> None:
        self._run = run
        self._world = world
        self._hang_s = hang_s
        self._first_s = first_s
        self._logs = run.path / "logs"
        self._durations: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_WINDOW))
        self._closed = threading.Event()
        self._file = self._stacks(world.rank).open("a", encoding="utf-8")
        # Written from C, so that a rank that holds Python's lock also shows its stack at SIGTERM.
        faulthandler.register(signal.SIGTERM, self._file, chain=True)
        self._begin("start", 0)
        threading.Thread(target=self._work, name="watchdog", daemon=True).start()

    def enter(self, phase: str, step: int) -> None:
        """End the phase before, and begin this one."""
        took_s = time.monotonic() - self._phase.began_monotonic
        self._durations[self._phase.name].append(took_s)
        self._begin(phase, step)

    def close(self) -> None:
        self._closed.set()
        faulthandler.unregister(signal.SIGTERM)
        self._file.close()

    def _begin(self, phase: str, step: int) -> None:
        self._phase = _Phase(phase, step, time.monotonic(), time.time())
        self._age_s = 0.0

    def _limit_s(self) -> float:
        name = self._phase.name
        durations = self._durations[name]
        more_s = _SAVE_S if name == "save" else self._hang_s
        if durations:
            p99 = sorted(durations)[math.ceil(0.99 * len(durations)) - 1]
            return 3 * (1 + _UNSURE / len(durations)) * p99 + more_s
        if name == "step" and self._durations["first step"]:
            return 3 * self._durations["first step"][-1] + more_s  # it may have compiled
        return self._first_s

    def _work(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(_POLL_S):
            now = time.monotonic()
            # Time during which this process was suspended does not count.
            self._age_s += min(now - last, 2 * _POLL_S)
            last = now
            limit_s = self._limit_s()
            if self._age_s > limit_s or (self._age_s > limit_s / 2 and self._reported()):
                self._end(limit_s)

    def _end(self, limit_s: float) -> None:
        # From C, in case this thread blocks: torch's flight recorder may never answer.
        faulthandler.dump_traceback_later(5 * _STACKS_S, file=self._file, exit=True)
        where = f"{self._phase.name} {self._phase.step}"
        age_s = self._age_s
        with contextlib.suppress(OSError):
            header = f"rank {self._world.rank} in {where} for {age_s:.1f} s\n"
            print(header, file=self._file, flush=True)
            faulthandler.dump_traceback(self._file)
            print(f"\nlast collectives\n{_collectives()}\n", file=self._file, flush=True)
        time.sleep(_STACKS_S)
        silent = sorted(set(range(self._world.size)) - self._reported())
        who = f"rank {', '.join(map(str, silent))} is stuck" if silent else "every rank waits"
        self._run.fail(
            HangError(
                f"{where} did not end within {age_s:.1f} s (limit {limit_s:.1f} s): {who}; "
                f"the stacks are in {self._logs}/stacks-rank-*.txt"
            )
        )
        os._exit(1)

    def _stacks(self, rank: int) -> Path:
        return self._logs / f"stacks-rank-{rank}.txt"

    def _reported(self) -> set[int]:
        """The ranks that have written their stacks since this phase began."""
        ranks = set()
        for rank in range(self._world.size):
            with contextlib.suppress(OSError):
                found = self._stacks(rank).stat()
                # A rank that starts later creates an empty file.
                if found.st_size and found.st_mtime > self._phase.began_time:
                    ranks.add(rank)
        return ranks


def _collectives() -> str:
    """The last collectives, one per line, from torch's flight recorder, which is always on."""
    try:
        recorder: Any = torch._C._distributed_c10d
        entries = json.loads(recorder._dump_fr_trace_json())["entries"][-_COLLECTIVES:]
    except (AttributeError, ValueError, KeyError, RuntimeError) as error:
        return f"unknown: {error}"
    return "\n".join(
        f"{entry['collective_seq_id']:>8} {entry['profiling_name']} {entry['input_sizes']} "
        f"{entry['state']}"
        for entry in entries
    )
