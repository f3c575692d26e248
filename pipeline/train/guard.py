"""Two checks of every step, before the weights change: the guard, and the replicas.

The guard skips steps that would hurt the run, and rolls back when skipping does not help. All ranks
compare the same two numbers with the same limits: a loss or gradient norm that is not finite, or
more than 6σ above the last 128 logged ones (OLMo 3; Marin's 32B report), is skipped. Logarithms are
compared, and σ has a floor: with small batches, norms of a clean run reach seven times the usual
one, 52 of their plain σ (docs/LOG.md), and clipping handles them. Several skips close together are
more than one bad batch: the run goes back to its last checkpoint and leaves those batches out. If
that does not help, it stops. The guard's whole state is in the run's log, so that a resumed run
decides like one that was never interrupted. The host reads results one step late, so the limits of
a step come from the steps up to the one before the last.

`Replicas` finds silent corruption: a broken device usually computes wrong numbers, not NaN. Copies
of weights and of reduced gradients must agree between ranks, and the weights of a rank must not
change during a forward and backward pass. Hashes are computed on the device and compared with one
small collective. More is exchanged only if a hash differs.
"""

import math
import sys
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.errors import RunError
from pipeline.parallel.engine import Engine
from pipeline.parallel.world import World

_WINDOW = 128  # steps
_SIGMAS = 6.0
# The smallest σ of the logarithms. A loss that hardly moves is not compared with its own noise,
# and 6σ of norms are at least twenty times the usual norm.
_FLOOR = {"loss": 1e-3, "gradient norm": 0.5}
# _REPEATED skips within _NEAR steps cause a rollback.
_REPEATED = 3
_NEAR = 16


class RollbackError(Exception):
    """Go back to the last checkpoint, and then leave out the batches of steps first to last."""

    def __init__(self, first: int, last: int, reason: str) -> None:
        super().__init__(f"steps {first} to {last}: {reason}")
        self.first = first
        self.last = last
        self.reason = reason


class _Usual(NamedTuple):
    """Mean and σ of the logarithms of a quantity."""

    name: str
    mean: float
    sigma: float


class Guard:
    def __init__(self, records: Iterable[Mapping[str, Any]]) -> None:
        # (step, log of loss and gradient norm). One more than the window, because limits() ignores
        # the last step.
        self._window: deque[tuple[int, tuple[float, float]]] = deque(maxlen=_WINDOW + 1)
        self._skips: list[int] = []
        self._rolled_back_from = -math.inf  # the last step before the last rollback
        self._excluded: list[range] = []
        for record in records:
            self.update(record)

    def update(self, record: Mapping[str, Any]) -> None:
        """Update the state from a record of the log."""
        if record["kind"] == "step":
            logarithms = (_log(record["loss"]), _log(record["grad_norm"]))
            self._window.append((record["step"], logarithms))
        elif record.get("event") == "skip":
            self._skips.append(record["step"])
        elif record.get("event") == "rollback":
            self._rolled_back_from = record["last"]
            self._excluded.append(range(record["first"], record["last"] + 1))

    def is_excluded(self, step: int) -> bool:
        """Whether a rollback excluded the batch of this step, counted from 1."""
        return any(step in steps for steps in self._excluded)

    def limits(self, step: int) -> list[float]:
        """The largest loss and gradient norm that are accepted."""
        usual = self._usual(step)
        if not usual:
            return [sys.float_info.max] * 2
        return [math.exp(each.mean + _SIGMAS * each.sigma) for each in usual]

    def reason(self, step: int, loss: float, grad_norm: float) -> str:
        """Why a step was rejected."""
        values = {"loss": loss, "gradient norm": grad_norm}
        for name, value in values.items():
            if not math.isfinite(value):
                return f"{name} is {value}"

        def sigmas(usual: _Usual) -> float:
            return (_log(values[usual.name]) - usual.mean) / usual.sigma

        worst = max(self._usual(step), key=sigmas)
        usual = f"{sigmas(worst):.1f}σ above the usual {math.exp(worst.mean):.4g}"
        return f"{worst.name} {values[worst.name]:.4g} is {usual}"

    def _usual(self, step: int) -> list[_Usual]:
        """Mean and σ of the steps known when this step was launched; empty if they are too few."""
        window = [logarithms for at, logarithms in self._window if at < step - 1][-_WINDOW:]
        if len(window) < _WINDOW // 2:
            return []
        usual = []
        for name, values in zip(_FLOOR, zip(*window, strict=True), strict=True):
            mean = sum(values) / len(values)  # statistics.stdev is 13 times slower
            sigma = math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1))
            usual.append(_Usual(name, mean, max(sigma, _FLOOR[name])))
        return usual

    def escalate(self, step: int, reason: str) -> None:
        """After a skip: roll back, or give up, if there were several close together."""
        near = [skip for skip in self._skips if skip > step - _NEAR]
        if len(near) < _REPEATED:
            return
        if step - self._rolled_back_from < _WINDOW:
            raise RunError(
                f"step {step}: {reason}, the third time within {_NEAR} steps, and going back from "
                f"step {self._rolled_back_from} did not help; look at those batches or lower "
                "optim.lr, then --resume"
            )
        raise RollbackError(near[0], step, reason)


def _log(value: float) -> float:
    return math.log(max(value, 1e-30))


def relevant(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Select the records of a log that the guard needs."""
    records = list(records)
    keys = ("kind", "step", "loss", "grad_norm")
    steps = [{key: r[key] for key in keys} for r in records if r["kind"] == "step"]
    events = [r for r in records if r.get("event") in ("skip", "rollback")]
    return [*steps[-_WINDOW - 1 :], *events]


# Replicas

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Names of Comparison.copies, in order. The first two are equal on all ranks, the others on every
# ep-th rank.
_COPIES = ("weights", "gradients", "experts", "experts' gradients")
_ON_ALL_RANKS = 2


class DivergenceError(RuntimeError):
    """A rank has weights or gradients that differ from what they should be."""


class Comparison(NamedTuple):
    """The result of one comparison, on the device of this rank."""

    flags: Tensor  # [ranks differ, this rank's weights changed]; each above zero if true
    copies: Tensor  # hashes, in the order of _COPIES


class Replicas:
    def __init__(self, engine: Engine, world: World, ep: int) -> None:
        self._engine = engine
        self._world = world
        self._ep = ep
        self._weights_after_step: Tensor | None = None  # hashes

    def remember(self, needed: bool = True) -> None:
        """Hash the weights after a step: nothing may write to them until the next comparison.

        Without `needed`, drop the hash: the next step is not checked.
        """
        self._weights_after_step = self._hash_weights() if needed else None

    def compare(self) -> Comparison:
        """Compare hashes; called by every rank, between the backward pass and the step."""
        tensors = self._engine.local_tensors()
        weights = self._hash_weights()
        gradients = self._hash(tensors.gradient_copies)
        expert_gradients = self._hash(tensors.expert_gradient_copies)
        copies = torch.stack((weights[0], gradients, weights[1], expert_gradients))
        # Enqueued like the rest of the step: nothing here waits for the device.
        differ = self._world.differ(copies[:_ON_ALL_RANKS])
        if self._ep > 1:
            differ |= self._world.differ(copies[_ON_ALL_RANKS:], every=self._ep)
        if self._weights_after_step is None:
            changed = differ.new_zeros(1)
        else:
            changed = weights != self._weights_after_step
        return Comparison(torch.stack((differ.any(), changed.any())).double(), copies)

    def blame(self, comparison: Comparison, step: int) -> DivergenceError:
        """Name the rank that is wrong; called by every rank, after `compare` found a difference."""
        changed_here = bool(comparison.flags[1])
        seen = self._world.gather((changed_here, comparison.copies.tolist()))
        changed = [rank for rank, (has_changed, _) in enumerate(seen) if has_changed]
        if changed:  # reported first, because such a rank also differs from the others
            return DivergenceError(
                f"step {step}: the weights of {_ranks(changed)} changed without an update"
            )
        for index, what in enumerate(_COPIES):
            every = 1 if index < _ON_ALL_RANKS else self._ep
            for first in range(every):
                ranks = range(first, len(seen), every)
                hashes = {rank: seen[rank][1][index] for rank in ranks}
                (common, count), *others = Counter(hashes.values()).most_common()
                if not others:
                    continue
                if count <= len(ranks) / 2:
                    return DivergenceError(
                        f"step {step}: the {what} of {_ranks(list(ranks))} differ, and there is no "
                        "majority to show which are right"
                    )
                odd = [rank for rank in ranks if hashes[rank] != common]
                return DivergenceError(
                    f"step {step}: the {what} of {_ranks(odd)} differ from those of all others"
                )
        raise AssertionError("nothing is wrong")

    def _hash_weights(self) -> Tensor:
        """Hashes of the weights on all ranks, of shared experts, and of this rank's own."""
        tensors = self._engine.local_tensors()
        return torch.stack(
            [self._hash(tensors.copies), self._hash(tensors.expert_copies), self._hash(tensors.own)]
        )

    def _hash(self, tensors: Sequence[Tensor]) -> Tensor:
        if not tensors:
            return torch.zeros((), dtype=torch.int64, device=self._world.device)
        return fingerprint(tensors).to(self._world.device)  # offloaded tensors are on the host


def fingerprint(tensors: Sequence[Tensor]) -> Tensor:
    """Return a 64-bit hash of all tensors, on their device; any single flipped bit changes it.

    The words of a tensor are added up, which turns a flipped bit into ± a power of two. The sums
    are added with odd factors, modulo 2^64.
    """
    words = (t.detach().reshape(-1).view(_WORDS[t.element_size()]) for t in tensors)
    sums = torch.stack([part.sum(dtype=torch.int64) for part in words])
    return (sums * torch.arange(1, 2 * len(sums), 2, device=sums.device)).sum()


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
