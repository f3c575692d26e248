"""The training loop: batch → forward → backward → clip → step → log.

It does not know whether the model is dense or sparse, on one CPU or on many nodes.
"""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from pipeline.checkpoint.save import Saved, Saver
from pipeline.config.schema import RunConfig
from pipeline.data.loader import Loader, prefetch
from pipeline.objective.batch import Batch
from pipeline.optim.schedule import learning_rate
from pipeline.parallel.engine import Engine
from pipeline.parallel.world import World
from pipeline.planner.work import training_flops
from pipeline.process import StopRequest
from pipeline.runs.directory import RunDir
from pipeline.runs.history import goodput
from pipeline.runs.log import read
from pipeline.tasks.in_context import InContext
from pipeline.tasks.monitor import Monitor
from pipeline.track.console import Tracker
from pipeline.train.exchange import PendingStep, StepCheck, StepResult
from pipeline.train.guard import Guard, Replicas
from pipeline.train.measure import DeviceTime, Evaluator, Meter, cut, peak_flops, peak_memory_bytes
from pipeline.train.watchdog import Watchdog


@dataclass
class Loop:
    config: RunConfig
    run: RunDir
    engine: Engine
    world: World
    tracker: Tracker
    stop: StopRequest
    watch: Watchdog
    guard: Guard
    saver: Saver

    def __post_init__(self) -> None:
        config = self.config
        world = self.world
        self.steps = config.train.steps
        self.batch_tokens = config.train.batch_tokens
        self.flops_per_token = training_flops(config).model
        peak = peak_flops(config.cluster, world.device)
        all_ranks = None if peak is None else peak * world.size
        self.meter = Meter(self.batch_tokens, self.flops_per_token, all_ranks, world.device)
        self.replicas = Replicas(self.engine, world, config.parallel.ep)
        self.stopping = False  # some rank has a stop request
        self._routing_every = max(1, self.steps // 100)  # as many columns as a heat map can show
        self._pending: PendingStep | None = None

    def train(
        self,
        loader: Loader,
        evaluator: Evaluator,
        tasks: Monitor,
        in_context: InContext,
        start: int,
    ) -> bool:
        """Train from step `start`. Return True after the last step, False after a stop request."""
        train = self.config.train
        share, shares = self.world.reader(self.config.parallel.sp)
        pin = self.world.device.type == "cuda"
        fetched = prefetch(loader, start, self.steps, share, shares, pin=pin)
        self.replicas.remember()
        self.meter.restart()
        self.watch.enter("first step", start + 1)  # it may compile, so it has a longer limit
        with closing(fetched) as batches, self._settle_on_error():
            asked_at_s = time.perf_counter()
            for step, batch in batches:
                self.step(step, batch, time.perf_counter() - asked_at_s)
                done = step + 1
                last = done == self.steps
                evaluate = last or done % train.eval_every == 0
                save = last or done % train.save_every == 0 or done in train.keep_at
                # Log the pending step before the device starts work other than training.
                if evaluate or save or self.stopping:
                    self.settle()
                if evaluate:
                    self.watch.enter("evaluation", done)
                    figures = evaluator(self.engine.evaluate) | tasks(self.engine.logits)
                    figures |= in_context(self.engine)
                    self._record("eval", done, **figures)
                    too_slow = tasks.complaint(last=last)  # the tasks take too much of the run
                    if too_slow:
                        self._record("event", done, event="warning", reason=too_slow)
                if save or self.stopping:
                    self.watch.enter("save", done)
                    self.save(done)
                self.log_save(self.saver.wait() if last or self.stopping else self.saver.finished())
                if evaluate or save:
                    self.meter.restart()
                if self.stopping and not last:
                    reason = self.stop.reason or "another rank's signal"
                    self._record_end(done, event="interrupt", reason=reason)
                    return False
                # Until the first step is settled, the device may still be compiling it.
                if done > start + 1 or self._pending is None:
                    self.watch.enter("step", done + 1)
                asked_at_s = time.perf_counter()
        self._record_end(self.steps, event="finish")
        return True

    def step(self, step: int, batch: Batch, wait_s: float) -> None:
        """Launch one update. While the device works, settle the update before it."""
        done = step + 1
        if self.guard.is_excluded(done):
            self.settle()
            self._record("event", done, event="omit", reason="the run went back past this batch")
            return
        began = DeviceTime(self.world.device)
        lr = learning_rate(self.config.optim.schedule, self.config.optim.lr, step, self.steps)
        compared = self.replicas if done % self.config.train.check_every == 0 else None
        check = StepCheck(self.world, self.stop, batch.hash, self.guard.limits(done), compared)

        # batch: this rank's rows, as micro-batches on its device
        micros = cut(batch, self.config, self.world)
        # forward and backward, for every micro-batch
        passed = self.engine.forward_backward(micros)
        # clip and step: the weights change only if `check` accepts the loss and the gradient norm
        update = self.engine.step(passed, lr, check)

        self.replicas.remember((done + 1) % self.config.train.check_every == 0)
        routing = update.routing if self._due(done, self._routing_every) else None
        launched = PendingStep(done, lr, wait_s, began, check, routing)
        # log: the step before this one
        self.settle()
        self._pending = launched

    def settle(self) -> None:
        """Read and log the pending step; raise if ranks diverged or too many steps were skipped."""
        pending = self._pending
        self._pending = None
        if pending is None:
            return
        result = self._read(pending)
        if result.diverged:
            assert pending.comparison is not None
            raise self.replicas.blame(pending.comparison, pending.step)
        self.stopping |= result.stop  # the same on every rank, so all stop at the same step
        speed = self.meter.step(pending.began, pending.ended)
        values = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": pending.lr,
            "hash": result.hash,
        }
        if not result.accepted:
            reason = self.guard.reason(pending.step, result.loss, result.grad_norm)
            skip = {"event": "skip", "reason": reason, **values, "seconds": speed.seconds}
            self._record("event", pending.step, **skip)
            self.guard.escalate(pending.step, reason)
            return
        if self._due(pending.step, self.config.train.log_every):
            self._record(
                "step",
                pending.step,
                **values,
                tokens_per_s=speed.tokens_per_s,
                mfu=speed.mfu,
                memory_bytes=peak_memory_bytes(),
                wait_s=min(pending.wait_s, speed.idle_s),
            )
        if result.routing is not None:
            self._record("moe", pending.step, **result.routing)

    def save(self, done: int) -> None:
        """Check that all ranks have the same weights, then begin a checkpoint of them."""
        comparison = self.replicas.compare()
        if self.world.sum(comparison.flags).any():
            raise self.replicas.blame(comparison, done)
        self.log_save(self.saver.save(done))

    def log_save(self, saved: Saved | None) -> None:
        """Log a committed save, if any, under its own step, so that a rollback keeps the record."""
        if saved is None:
            return
        times = {"seconds": saved.seconds, "blocked_s": saved.blocked_s}
        self._record("event", saved.step, event="save", saved=saved.step, **times)

    def _read(self, pending: PendingStep) -> StepResult:
        return pending.read(self.world.size, self.config.parallel.sp)

    @contextmanager
    def _settle_on_error(self) -> Iterator[None]:
        """If a step fails, log the step before it, which is complete, and raise the error again.

        A divergence is not reported here: naming the rank needs a collective of all ranks.
        """
        try:
            yield
        except Exception:
            with suppress(Exception):
                if self._pending is not None and not self._read(self._pending).diverged:
                    self.settle()
            raise

    def _due(self, done: int, every: int) -> bool:
        return done % every == 0 or done == self.steps

    def _record_end(self, done: int, **values: Any) -> None:
        times = goodput(read(self.run.log)) if self.world.first else {}
        self._record("event", done, **values, **times)

    def _record(self, kind: str, done: int, **values: Any) -> None:
        tokens = done * self.batch_tokens
        record = {
            "kind": kind,
            "step": done,
            "tokens": tokens,
            "flops": tokens * self.flops_per_token,
            **values,
        }
        self.tracker.record(record)
        self.guard.update(record)
