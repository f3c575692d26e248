"""A rank that lives and does not go on is found out and ended with its reason, while a scheduler would see it running.
(One that a signal has stopped is found by its parent: `start.attend`.)

No heartbeat travels. Every step ends in a sum over all ranks, so one rank that stands still makes each of the others
wait there, and a thread of its own clock tells it so: there is no store to ask that could hang as well. The files with
the stacks are the only word between ranks: who left none is the one that stands still.
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
from typing import Any

import torch

from pipeline.parallel.world import World
from pipeline.runs.directory import RunDir
from pipeline.runs.faults import HangError

_POLL_S = 0.5
_WORD_S = 2.0  # after the first rank has spoken, for the others to write their stacks too
_WINDOW = 128  # spans that the p99 is of
_COLLECTIVES = 20  # last ones to show


class Watch:
    """Times the phases of a rank. One may take three times its p99 plus `hang_s`, or ten minutes if it is a save, which
    waits for the one before it; the start and the first of each, which may compile, `first_s`."""

    def __init__(self, run: RunDir, world: World, hang_s: float, first_s: float) -> None:
        self._run, self._world, self._hang_s, self._first_s = run, world, hang_s, first_s
        self._logs = run.path / "logs"
        self._spans: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_WINDOW))
        self._closed = threading.Event()
        self._file = self._stacks(world.rank).open("a", encoding="utf-8")
        # from C: a rank that holds Python's lock shows where it stood before anything else
        faulthandler.register(signal.SIGTERM, self._file, chain=True)
        self._begin("start", 0)
        threading.Thread(target=self._work, name="watch", daemon=True).start()

    def enter(self, phase: str, step: int) -> None:
        """The phase before ends here; from now on the run is in this one, at this step."""
        self._spans[self._phase].append(time.monotonic() - self._began)
        self._begin(phase, step)

    def close(self) -> None:
        self._closed.set()
        faulthandler.unregister(signal.SIGTERM)
        self._file.close()

    def _begin(self, phase: str, step: int) -> None:
        self._phase, self._step, self._began, self._since, self._age_s = (
            phase,
            step,
            time.monotonic(),
            time.time(),
            0.0,
        )

    def _limit_s(self) -> float:
        spans = sorted(
            self._spans[self._phase] or (self._spans["first step"] if self._phase == "step" else ())
        )
        if not spans:
            return self._first_s
        return 3 * spans[math.ceil(0.99 * len(spans)) - 1] + (
            600 if self._phase == "save" else self._hang_s
        )

    def _work(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(_POLL_S):
            now = time.monotonic()
            self._age_s += min(
                now - last, 2 * _POLL_S
            )  # the time that this process itself was stopped is no hang
            last, limit_s = now, self._limit_s()
            if self._age_s > limit_s or (self._age_s > limit_s / 2 and self._spoken()):
                self._end(limit_s)

    def _end(self, limit_s: float) -> None:
        # from C, whatever happens to this thread: torch's recorder has been seen to give no answer
        faulthandler.dump_traceback_later(5 * _WORD_S, file=self._file, exit=True)
        phase, step, age_s = self._phase, self._step, self._age_s
        with contextlib.suppress(OSError):
            print(
                f"rank {self._world.rank} in {phase} {step} for {age_s:.1f} s\n",
                file=self._file,
                flush=True,
            )
            faulthandler.dump_traceback(self._file)
            print(f"\nlast collectives\n{_collectives()}\n", file=self._file, flush=True)
        time.sleep(_WORD_S)
        silent = sorted(set(range(self._world.size)) - self._spoken())
        who = f"rank {', '.join(map(str, silent))} stands still" if silent else "every rank waits"
        self._run.fail(
            HangError(
                f"{phase} {step} did not end within {age_s:.1f} s, its limit is {limit_s:.1f} s: {who}; the stacks are "
                f"in {self._logs}/stacks-rank-*.txt"
            )
        )
        os._exit(1)

    def _stacks(self, rank: int) -> Path:
        return self._logs / f"stacks-rank-{rank}.txt"

    def _spoken(self) -> set[int]:
        """Ranks that have written their stacks since this phase began."""
        there = set()
        for rank in range(self._world.size):
            with contextlib.suppress(OSError):
                if self._stacks(rank).stat().st_mtime > self._since:
                    there.add(rank)
        return there


def _collectives() -> str:
    """What torch's flight recorder has of the last collectives, one line each; it records gloo and NCCL unasked."""
    try:
        dump: Any = torch._C._distributed_c10d
        entries = json.loads(dump._dump_fr_trace_json())["entries"][-_COLLECTIVES:]
    except (AttributeError, ValueError, KeyError, RuntimeError) as error:
        return f"unknown: {error}"
    return "\n".join(
        f"{entry['collective_seq_id']:>8} {entry['profiling_name']} {entry['input_sizes']} {entry['state']}"
        for entry in entries
    )
