"""The loop. It does not know whether the model is dense or sparse, on one CPU or on many nodes."""

import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pipeline.account import flops_per_token
from pipeline.config.schema import RunConfig
from pipeline.data.loader import Loader, prefetch
from pipeline.objective.batch import Batch
from pipeline.optim.schedule import rate
from pipeline.parallel.engine import Engine, Update
from pipeline.parallel.world import World
from pipeline.track.tracker import Tracker
from pipeline.train import checkpoint
from pipeline.train.evaluate import Evaluator, cut
from pipeline.train.meter import Meter
from pipeline.train.rundir import RunDir
from pipeline.train.stop import Stop


@dataclass(frozen=True, slots=True)
class Pending:
    """A step's figures while the device still works on them; they are read one step later, so it never idles."""

    step: int
    lr: float
    wait_s: float
    grad_norm: Tensor | float
    summed: Tensor  # over ranks: loss, wish to stop, the step hash in four 16-bit parts, which fp64 adds exactly


class Loop:
    def __init__(
        self, config: RunConfig, run: RunDir, engine: Engine, world: World, tracker: Tracker, peak_flops: float | None
    ) -> None:
        assert isinstance(config.train.batch_tokens, int) and config.train.steps is not None
        self.config, self.run, self.engine, self.world, self.tracker = config, run, engine, world, tracker
        self.steps, self.batch_tokens = config.train.steps, config.train.batch_tokens
        self.flops = flops_per_token(config.model).model
        peak = None if peak_flops is None else peak_flops * world.size
        self.meter = Meter(self.batch_tokens, self.flops, peak)
        self.stop = Stop()

    def train(self, loader: Loader, evaluator: Evaluator, start: int) -> bool:
        """From step `start` to the end or to a wish to stop; whether the end was reached."""
        train, stopping = self.config.train, False
        pending: Pending | None = None
        assert isinstance(train.eval_every, int) and isinstance(train.save_every, int)
        batches = prefetch(loader, start, self.steps, self.world.rank, self.world.size)
        self.meter.restart()
        asked = time.perf_counter()
        for step, batch in batches:
            late, pending = pending, self._launch(step, batch, time.perf_counter() - asked)
            stopping = late is not None and self._report(late)
            done = step + 1
            evaluate = done % train.eval_every == 0 or done == self.steps
            save = done % train.save_every == 0 or done == self.steps
            if evaluate or save or stopping or self.world.device.type == "cpu":  # a CPU has nothing to overlap
                stopping = self._report(pending) or stopping
                pending = None
                if evaluate:
                    self._record("eval", done, **evaluator(self.engine))
                if save or stopping:
                    self._save(done)
                if evaluate or save:
                    self.meter.restart()
            if stopping and done < self.steps:
                batches.close()
                self._record("event", done, event="interrupt", reason=self.stop.reason or "another rank's signal")
                return False
            asked = time.perf_counter()
        self._record("event", self.steps, event="finish")
        return True

    def _launch(self, step: int, batch: Batch, wait_s: float) -> Pending:
        micro = self.config.train.micro_batch
        assert isinstance(micro, int) and isinstance(self.config.optim.lr, float)
        lr = rate(self.config.optim.schedule, self.config.optim.lr, step, self.steps)
        update: Update = self.engine.update(cut(batch, micro, self.world), lr)
        parts = [float(batch.hash >> shift & 0xFFFF) for shift in (0, 16, 32, 48)]
        summed = self.world.sum([float(self.stop.reason is not None), *parts], first=update.nll)
        return Pending(step, lr, wait_s, update.grad_norm, summed)

    def _report(self, pending: Pending) -> bool:
        """Record a step; whether any rank wishes to stop."""
        loss, stop, *parts = pending.summed.tolist()
        total = sum(int(part) << shift for part, shift in zip(parts, (0, 16, 32, 48), strict=True)) % 2**64
        done, speed = pending.step + 1, self.meter.step()
        if done % self.config.train.log_every == 0 or done == self.steps:
            self._record(
                "step",
                done,
                loss=loss / self.world.size,
                grad_norm=float(pending.grad_norm),
                lr=pending.lr,
                **speed,
                wait_s=pending.wait_s,
                hash=f"{total:016x}",
            )
        return bool(stop)

    def _save(self, done: int) -> None:
        began = time.perf_counter()
        checkpoint.save(self.engine, self.config, self.run.checkpoints, done, self.world)
        self._record("event", done, event="save", seconds=time.perf_counter() - began)

    def _record(self, kind: str, done: int, **values: Any) -> None:
        tokens = done * self.batch_tokens
        self.tracker.record(
            {"kind": kind, "time": time.time(), "step": done, "tokens": tokens, "flops": tokens * self.flops, **values}
        )
