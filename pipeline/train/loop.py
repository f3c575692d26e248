"""The loop. It does not know whether the model is dense or sparse, on one CPU or on many nodes."""

import time
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.account import flops_per_token
from pipeline.checkpoint.save import Saved, Saver
from pipeline.config.schema import RunConfig
from pipeline.data.loader import Loader, prefetch
from pipeline.model.moe import Routing
from pipeline.objective.batch import Batch
from pipeline.optim.schedule import rate
from pipeline.parallel.engine import Engine
from pipeline.parallel.world import World
from pipeline.track.log import read
from pipeline.track.tracker import Tracker
from pipeline.train.evaluate import Evaluator, cut
from pipeline.train.goodput import goodput
from pipeline.train.guard import Guard
from pipeline.train.meter import Meter, peak_flops
from pipeline.train.replicas import Replicas
from pipeline.train.rundir import RunDir
from pipeline.train.stop import Stop
from pipeline.train.watch import Watch

_SHIFTS = (0, 16, 32, 48)


class _Seen(NamedTuple):
    """A step's numbers over all ranks, and what speaks against it."""

    loss: float
    grad_norm: float
    stop: bool
    hash: str
    reason: str


class Loop:
    def __init__(
        self,
        config: RunConfig,
        run: RunDir,
        engine: Engine,
        world: World,
        tracker: Tracker,
        stop: Stop,
        watch: Watch,
        guard: Guard,
        saver: Saver,
    ) -> None:
        assert isinstance(config.train.batch_tokens, int) and config.train.steps is not None
        self.config, self.run, self.engine, self.world, self.tracker = config, run, engine, world, tracker
        self.steps, self.batch_tokens = config.train.steps, config.train.batch_tokens
        self.flops = flops_per_token(config.model).model
        peak = peak_flops(config.cluster, world.device)
        self.meter = Meter(self.batch_tokens, self.flops, None if peak is None else peak * world.size)
        self.stop, self.watch, self.guard, self.saver = stop, watch, guard, saver
        self.replicas = Replicas(engine, world, config.parallel.ep)
        self._routing_every = max(1, self.steps // 100)  # what a heat map can show

    def train(self, loader: Loader, evaluator: Evaluator, start: int) -> bool:
        """From step `start` to the end or to a wish to stop; whether the end was reached."""
        train = self.config.train
        assert isinstance(train.eval_every, int) and isinstance(train.save_every, int)
        self.replicas.remember()
        self.meter.restart()
        self.watch.enter("first step", start + 1)  # may compile
        asked = time.perf_counter()
        reader, pin = self.world.reader(self.config.parallel.sp), self.world.device.type == "cuda"
        with closing(prefetch(loader, start, self.steps, *reader, pin=pin)) as batches:
            for step, batch in batches:
                stopping = self.step(step, batch, time.perf_counter() - asked)
                done = step + 1
                if evaluate := done % train.eval_every == 0 or done == self.steps:
                    self.watch.enter("evaluation", done)
                    self._record("eval", done, **evaluator(self.engine.evaluate))
                if save := done % train.save_every == 0 or done in train.keep_at or done == self.steps or stopping:
                    self.watch.enter("save", done)
                    self.save(done)
                end = stopping or done == self.steps
                self._saved(done, self.saver.wait() if end else self.saver.finished())
                if evaluate or save:
                    self.meter.restart()
                if stopping and done < self.steps:
                    self._end(done, event="interrupt", reason=self.stop.reason or "another rank's signal")
                    return False
                self.watch.enter("step", done + 1)
                asked = time.perf_counter()
        self._end(self.steps, event="finish")
        return True

    def step(self, step: int, batch: Batch, wait_s: float) -> bool:
        """Update, record; whether any rank wishes to stop."""
        done, began = step + 1, time.perf_counter()
        if self.guard.leaves_out(done):
            self._record("event", done, event="omit", reason="the run went back past this batch")
            return False
        assert isinstance(self.config.optim.lr, float)
        lr = rate(self.config.optim.schedule, self.config.optim.lr, step, self.steps)
        update = self.engine.update(cut(batch, self.config, self.world), lr, partial(self._accept, done, batch))
        self.replicas.remember((done + 1) % self.config.train.check_every == 0)
        speed, seen = self.meter.step(), self._seen
        values = {"loss": seen.loss, "grad_norm": seen.grad_norm, "lr": lr, "hash": seen.hash}
        if seen.reason:
            seconds = time.perf_counter() - began
            self._record("event", done, event="skip", reason=seen.reason, **values, seconds=seconds)
            self.guard.escalate(done, seen.reason)
        elif done % self.config.train.log_every == 0 or done == self.steps:
            self._record("step", done, **values, **speed, wait_s=wait_s)
        if update.routing is not None and (done % self._routing_every == 0 or done == self.steps):
            self._record("moe", done, **_routed(update.routing))
        return seen.stop

    def _accept(self, done: int, batch: Batch, nll: Tensor, grad_norm: Tensor) -> bool:
        """Before the weights change, all that ranks tell each other of a step, in one sum and one reading: loss, norm,
        wish to stop, and the batch's hash in four 16-bit parts, which fp64 adds exactly; the same verdict on each."""
        parts = [float(batch.hash >> shift & 0xFFFF) for shift in _SHIFTS]
        on_device = torch.stack((nll.double(), grad_norm.to(nll.device).double()))
        if done % self.config.train.check_every == 0:
            on_device = torch.cat((on_device, self.replicas.look()))
        summed = self.world.sum([float(self.stop.reason is not None), *parts], first=on_device).tolist()
        (loss, norm, *wrong), (stop, *parts) = summed[:-5], summed[-5:]
        if any(wrong):
            raise self.replicas.blame(done)
        loss, norm = loss / self.world.size, norm / self.world.size
        sp = self.config.parallel.sp  # each row was read, and its hash told, by so many ranks
        digest = sum(int(part) // sp << shift for part, shift in zip(parts, _SHIFTS, strict=True)) % 2**64
        self._seen = _Seen(loss, norm, bool(stop), f"{digest:016x}", self.guard.judge(loss, norm))
        return not self._seen.reason

    def save(self, done: int) -> None:
        if self.world.sum([], first=self.replicas.look()).any():  # what is saved is what all agree on
            raise self.replicas.blame(done)
        self._saved(done, self.saver.save(done))

    def _saved(self, done: int, saved: Saved | None) -> None:
        """A checkpoint counts from its commit on, some steps after its own."""
        if saved is not None:
            seconds, blocked_s = saved.seconds, saved.blocked_s
            self._record("event", done, event="save", saved=saved.step, seconds=seconds, blocked_s=blocked_s)

    def _end(self, done: int, **values: Any) -> None:
        lost = goodput(read(self.run.log)) if self.world.first else {}
        self._record("event", done, **values, **lost)

    def _record(self, kind: str, done: int, **values: Any) -> None:
        tokens = done * self.batch_tokens
        record = {"kind": kind, "time": time.time(), "step": done, "tokens": tokens, "flops": tokens * self.flops}
        self.tracker.record({**record, **values})
        self.guard.hear({**record, **values})


def _routed(routing: Routing) -> dict[str, Any]:
    """By layer: each expert's share of the rows, the fullest expert over the mean, what was dropped, the entropy."""
    rest = torch.stack((routing.dropped, routing.entropy, routing.loss), dim=-1)
    layers = torch.cat((routing.load_E / routing.load_E.sum(-1, keepdim=True), rest), dim=-1).tolist()  # one reading
    shares, (dropped, entropy, losses) = [layer[:-3] for layer in layers], zip(*(x[-3:] for x in layers), strict=True)
    imbalance = [max(share) * len(share) for share in shares]
    return {
        "load": [[round(share, 5) for share in layer] for layer in shares],
        "imbalance": [round(x, 4) for x in imbalance],
        "dropped": [round(x, 5) for x in dropped],
        "entropy": [round(x, 4) for x in entropy],
        "worst_imbalance": max(imbalance),
        "dropped_share": sum(dropped) / len(dropped),
        "aux_loss": sum(losses),
    }
