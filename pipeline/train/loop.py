"""The loop. It does not know whether the model is dense or sparse, on one CPU or on many nodes."""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.checkpoint.save import Saved, Saver
from pipeline.config.schema import RunConfig
from pipeline.data.loader import Loader, prefetch
from pipeline.model.moe import Routing
from pipeline.objective.batch import Batch
from pipeline.optim.schedule import learning_rate
from pipeline.parallel.engine import Engine
from pipeline.parallel.world import World
from pipeline.planner.count import flops_per_token
from pipeline.runs.directory import RunDir
from pipeline.runs.history import goodput
from pipeline.runs.log import read
from pipeline.track.console import Tracker
from pipeline.train.evaluation import Evaluator, cut
from pipeline.train.guard import Guard
from pipeline.train.meter import Meter, peak_flops
from pipeline.train.reading import Moment, Reading
from pipeline.train.replicas import Look, Replicas
from pipeline.train.supervisor import StopRequest
from pipeline.train.watchdog import Watch

_SHIFTS = (0, 16, 32, 48)


class _Launched(NamedTuple):
    """A step that the device may still be at."""

    done: int
    lr: float
    wait_s: float  # the host for the batch; the device may have been at the step before
    began: Moment
    look: Look | None
    reading: Reading


class Loop:
    def __init__(
        self,
        config: RunConfig,
        run: RunDir,
        engine: Engine,
        world: World,
        tracker: Tracker,
        stop: StopRequest,
        watch: Watch,
        guard: Guard,
        saver: Saver,
    ) -> None:
        assert isinstance(config.train.batch_tokens, int) and config.train.steps is not None
        self.config, self.run, self.engine, self.world, self.tracker = (
            config,
            run,
            engine,
            world,
            tracker,
        )
        self.steps, self.batch_tokens = config.train.steps, config.train.batch_tokens
        self.flops = flops_per_token(config.model).model
        peak = peak_flops(config.cluster, world.device)
        peak = None if peak is None else peak * world.size
        self.meter = Meter(self.batch_tokens, self.flops, peak, Moment(world.device))
        self.stop, self.watch, self.guard, self.saver = stop, watch, guard, saver
        self.replicas = Replicas(engine, world, config.parallel.ep)
        self._routing_every = max(1, self.steps // 100)  # what a heat map can show
        self._last: _Launched | None = None
        self.stopping = False  # whether any rank wishes to

    def train(self, loader: Loader, evaluator: Evaluator, start: int) -> bool:
        """From step `start` to the end or to a wish to stop; whether the end was reached."""
        train = self.config.train
        assert isinstance(train.eval_every, int) and isinstance(train.save_every, int)
        self.replicas.remember()
        self.meter.restart(Moment(self.world.device))
        self.watch.enter("first step", start + 1)  # may compile
        asked = time.perf_counter()
        reader, pin = self.world.reader(self.config.parallel.sp), self.world.device.type == "cuda"
        with (
            closing(prefetch(loader, start, self.steps, *reader, pin=pin)) as batches,
            self._last_word(),
        ):
            for step, batch in batches:
                self.step(step, batch, time.perf_counter() - asked)
                done = step + 1
                evaluate = done % train.eval_every == 0 or done == self.steps
                save = done % train.save_every == 0 or done in train.keep_at or done == self.steps
                if evaluate or save or self.stopping:
                    self.settle()
                if evaluate:
                    self.watch.enter("evaluation", done)
                    self._record("eval", done, **evaluator(self.engine.evaluate))
                if save or self.stopping:
                    self.watch.enter("save", done)
                    self.save(done)
                end = self.stopping or done == self.steps
                self.saved(self.saver.wait() if end else self.saver.finished())
                if evaluate or save:
                    self.meter.restart(Moment(self.world.device))
                if self.stopping and done < self.steps:
                    self._end(
                        done, event="interrupt", reason=self.stop.reason or "another rank's signal"
                    )
                    return False
                if done > start + 1 or self._last is None:  # else the device may be at the first
                    self.watch.enter("step", done + 1)
                asked = time.perf_counter()
        self._end(self.steps, event="finish")
        return True

    def step(self, step: int, batch: Batch, wait_s: float) -> None:
        """Launch an update, and then settle the one before: the device has work while the host reads."""
        done, began = step + 1, Moment(self.world.device)
        if self.guard.leaves_out(done):
            self.settle()
            self._record("event", done, event="omit", reason="the run went back past this batch")
            return
        assert isinstance(self.config.optim.lr, float)
        lr = learning_rate(self.config.optim.schedule, self.config.optim.lr, step, self.steps)
        update = self.engine.update(
            cut(batch, self.config, self.world), lr, partial(self._accept, done, batch)
        )
        self.replicas.remember((done + 1) % self.config.train.check_every == 0)
        routed = (
            [_figures(update.routing)]
            if update.routing and self._due(done, self._routing_every)
            else []
        )
        launched = _Launched(done, lr, wait_s, began, self._look, Reading(*self._told, *routed))
        self.settle()
        self._last = launched

    def _accept(self, done: int, batch: Batch, nll: Tensor, grad_norm: Tensor) -> Tensor:
        """Before the weights change, all that ranks tell each other of a step, in one sum: loss, norm, what copies say,
        wish to stop, and the batch's hash in four 16-bit parts, which fp64 adds exactly; the same verdict on each."""
        parts = [float(batch.hash >> shift & 0xFFFF) for shift in _SHIFTS]
        on_device = torch.stack((nll.double(), grad_norm.to(nll.device).double()))
        self._look = self.replicas.look() if done % self.config.train.check_every == 0 else None
        if self._look is not None:
            on_device = torch.cat((on_device, self._look.flags))
        told = self.world.sum([float(self.stop.reason is not None), *parts], first=on_device)
        usual = told[:2] / self.world.size <= self.world.to_device(self.guard.limits(done))
        self._told = told, usual.all() & ~told[2:-5].any()
        return self._told[1]

    def settle(self) -> None:
        """What the last step told, once the next is launched or where none follows at once: judged and recorded."""
        last, self._last = self._last, None
        if last is None:
            return
        told, taken, *routed = last.reading.get()
        done, (loss, norm, *wrong), (stop, *parts) = last.done, told[:-5], told[-5:]
        if last.look is not None and any(wrong):
            raise self.replicas.blame(last.look, done)
        self.stopping |= stop > 0
        loss, norm, speed = (
            loss / self.world.size,
            norm / self.world.size,
            self.meter.step(last.began, last.reading.at),
        )
        sp = self.config.parallel.sp  # each row was read, and its hash told, by so many ranks
        digest = (
            sum(int(part) // sp << shift for part, shift in zip(parts, _SHIFTS, strict=True))
            % 2**64
        )
        values = {"loss": loss, "grad_norm": norm, "lr": last.lr, "hash": f"{digest:016x}"}
        if not taken:
            reason = self.guard.reason(done, loss, norm)
            self._record(
                "event", done, event="skip", reason=reason, **values, seconds=self.meter.took_s
            )
            self.guard.escalate(done, reason)
            return
        if self._due(done, self.config.train.log_every):
            self._record(
                "step", done, **values, **speed, wait_s=min(last.wait_s, self.meter.idle_s)
            )
        if routed:
            self._record("moe", done, **_routed(*routed))

    @contextmanager
    def _last_word(self) -> Iterator[None]:
        """Where a launch fails, the step before it is done: recorded if it can still be read, and the first error goes
        on. One that found ranks to differ is not: to name the rank takes them all, and they are elsewhere."""
        try:
            yield
        except Exception:
            with suppress(Exception):
                if self._last is not None and not any(self._last.reading.get()[0][2:-5]):
                    self.settle()
            raise

    def _due(self, done: int, every: int) -> bool:
        return done % every == 0 or done == self.steps

    def save(self, done: int) -> None:
        look = self.replicas.look()
        if self.world.sum([], first=look.flags).any():  # what is saved is what all agree on
            raise self.replicas.blame(look, done)
        self.saved(self.saver.save(done))

    def saved(self, saved: Saved | None) -> None:
        """A checkpoint counts from its commit on, some steps after its own, and is told at its own: it stands as long
        as the log up to there."""
        if saved is not None:
            seconds, blocked_s = saved.seconds, saved.blocked_s
            self._record(
                "event",
                saved.step,
                event="save",
                saved=saved.step,
                seconds=seconds,
                blocked_s=blocked_s,
            )

    def _end(self, done: int, **values: Any) -> None:
        lost = goodput(read(self.run.log)) if self.world.first else {}
        self._record("event", done, **values, **lost)

    def _record(self, kind: str, done: int, **values: Any) -> None:
        tokens = done * self.batch_tokens
        record = {
            "kind": kind,
            "time": time.time(),
            "step": done,
            "tokens": tokens,
            "flops": tokens * self.flops,
        }
        self.tracker.record({**record, **values})
        self.guard.hear({**record, **values})


def _figures(routing: Routing) -> Tensor:
    rest = torch.stack((routing.dropped, routing.entropy, routing.loss), dim=-1)
    return torch.cat((routing.load_E / routing.load_E.sum(-1, keepdim=True), rest), dim=-1)


def _routed(layers: list[list[float]]) -> dict[str, Any]:
    """By layer: each expert's share of the rows, the fullest expert over the mean, what was dropped, the entropy."""
    shares, (dropped, entropy, losses) = (
        [layer[:-3] for layer in layers],
        zip(*(x[-3:] for x in layers), strict=True),
    )
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
