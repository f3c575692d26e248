"""The loop. It does not know whether the model is dense or sparse, on one CPU or on many nodes."""

import time
from typing import Any

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
from pipeline.train.meter import Meter, peak_flops
from pipeline.train.rundir import RunDir
from pipeline.train.stop import Stop
from pipeline.train.watch import Watch

_SHIFTS = (0, 16, 32, 48)


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
    ) -> None:
        assert isinstance(config.train.batch_tokens, int) and config.train.steps is not None
        self.config, self.run, self.engine, self.world, self.tracker = config, run, engine, world, tracker
        self.steps, self.batch_tokens = config.train.steps, config.train.batch_tokens
        self.flops = flops_per_token(config.model).model
        peak = peak_flops(config.cluster, world.device)
        self.meter = Meter(self.batch_tokens, self.flops, None if peak is None else peak * world.size)
        self.stop, self.watch = stop, watch
        self._routing_every = max(1, self.steps // 100)  # what a heat map can show
        self.saver = Saver(engine, config, run.checkpoints, world)

    def train(self, loader: Loader, evaluator: Evaluator, start: int) -> bool:
        """From step `start` to the end or to a wish to stop; whether the end was reached."""
        train = self.config.train
        assert isinstance(train.eval_every, int) and isinstance(train.save_every, int)
        batches = prefetch(loader, start, self.steps, self.world.rank, self.world.size)
        self.meter.restart()
        self.watch.enter("first step", start + 1)  # may compile
        asked = time.perf_counter()
        for step, batch in batches:
            stopping = self._step(step, batch, time.perf_counter() - asked)
            done = step + 1
            if evaluate := done % train.eval_every == 0 or done == self.steps:
                self.watch.enter("evaluation", done)
                self._record("eval", done, **evaluator(self.engine))
            if save := done % train.save_every == 0 or done == self.steps or stopping:
                self.watch.enter("save", done)
                self._saved(done, self.saver.save(done))
            end = stopping or done == self.steps
            self._saved(done, self.saver.wait() if end else self.saver.finished())
            if evaluate or save:
                self.meter.restart()
            if stopping and done < self.steps:
                batches.close()
                self._end(done, event="interrupt", reason=self.stop.reason or "another rank's signal")
                return False
            self.watch.enter("step", done + 1)
            asked = time.perf_counter()
        self._end(self.steps, event="finish")
        return True

    def _step(self, step: int, batch: Batch, wait_s: float) -> bool:
        """Update, record; whether any rank wishes to stop."""
        micro, peak = self.config.train.micro_batch, self.config.optim.lr
        assert isinstance(micro, int) and isinstance(peak, float)
        lr = rate(self.config.optim.schedule, peak, step, self.steps)
        update = self.engine.update(cut(batch, micro, self.world), lr)
        # one sum over ranks: loss, wish to stop, and the hash in four 16-bit parts, which fp64 adds exactly
        parts = [float(batch.hash >> shift & 0xFFFF) for shift in _SHIFTS]
        summed = self.world.sum([float(self.stop.reason is not None), *parts], first=update.nll)
        loss, stop, *parts = summed.tolist()
        speed, done = self.meter.step(), step + 1
        if done % self.config.train.log_every == 0 or done == self.steps:
            self._record(
                "step",
                done,
                loss=loss / self.world.size,
                grad_norm=float(update.grad_norm),
                lr=lr,
                **speed,
                wait_s=wait_s,
                hash=f"{sum(int(p) << s for p, s in zip(parts, _SHIFTS, strict=True)) % 2**64:016x}",
            )
        if update.routing is not None and (done % self._routing_every == 0 or done == self.steps):
            self._record("moe", done, **_routed(update.routing))
        return bool(stop)

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
        self.tracker.record(
            {"kind": kind, "time": time.time(), "step": done, "tokens": tokens, "flops": tokens * self.flops, **values}
        )


def _routed(routing: Routing) -> dict[str, Any]:
    """By layer: each expert's share of the rows, the fullest expert over the mean, what was dropped, the entropy."""
    share_LE = routing.load_E / routing.load_E.sum(-1, keepdim=True)
    return {
        "load": [[round(share, 5) for share in layer] for layer in share_LE.tolist()],
        "imbalance": [round(x, 4) for x in (share_LE.amax(-1) * share_LE.shape[-1]).tolist()],
        "dropped": [round(x, 5) for x in routing.dropped.tolist()],
        "entropy": [round(x, 4) for x in routing.entropy.tolist()],
        "worst_imbalance": (share_LE.amax() * share_LE.shape[-1]).item(),
        "dropped_share": routing.dropped.mean().item(),
        "aux_loss": routing.loss.sum().item(),
    }
