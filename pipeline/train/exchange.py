"""The one exchange between ranks in a step. The host reads its result one step late.

Before the weights change, the ranks add up one short vector of fp64 numbers. Each rank derives the
same decision from the sums, on its device. The host does not wait for the sums: it launches the
next step first and reads the sums afterwards, so that the device always has work.
"""

from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.model.moe import Routing
from pipeline.parallel.world import World
from pipeline.process import StopRequest
from pipeline.train.guard import Comparison, Replicas
from pipeline.train.measure import DeviceTime

# The positions in the vector.
_LOSS_AND_NORM = slice(0, 2)
_DIVERGENCE = slice(2, 4)  # Comparison.flags; zeros if the replicas are not compared in this step
_STOP = 4  # how many ranks have a stop request
_HASH = slice(5, 9)  # the hash of the batch in four 16-bit parts, which fp64 adds exactly
_SHIFTS = (0, 16, 32, 48)


@dataclass
class StepCheck:
    """Decides whether to apply a step, once its loss and gradient norm are known on the device.

    The engine calls it after the backward pass and before anything is written.
    """

    world: World
    stop: StopRequest
    batch_hash: int
    limits: list[float]  # the largest accepted loss and gradient norm
    replicas: Replicas | None  # None: not compared in this step
    # Set by __call__. The decision is the same on every rank.
    comparison: Comparison | None = None
    sums: Tensor = field(init=False)
    accepted: Tensor = field(init=False)

    def __call__(self, nll: Tensor, grad_norm: Tensor) -> Tensor:
        loss_and_norm = torch.stack((nll.double(), grad_norm.to(nll.device).double()))
        if self.replicas is not None:
            self.comparison = self.replicas.compare()
            flags = self.comparison.flags
        else:
            flags = torch.zeros_like(loss_and_norm)
        on_device = torch.cat((loss_and_norm, flags))
        stopping = float(self.stop.signal is not None)
        hash_parts = [float(self.batch_hash >> shift & 0xFFFF) for shift in _SHIFTS]
        self.sums = self.world.sum(on_device, [stopping, *hash_parts])
        means = self.sums[_LOSS_AND_NORM] / self.world.size
        # NaN fails the comparison, so such a step is rejected too
        within = means <= self.world.to_device(self.limits)
        self.accepted = within.all() & ~self.sums[_DIVERGENCE].any()
        return self.accepted


class StepResult(NamedTuple):
    """A step as the host sees it; the same on every rank."""

    loss: float
    grad_norm: float
    hash: str  # of the tokens of all ranks
    accepted: bool
    diverged: bool  # some rank has wrong weights or gradients
    stop: bool  # some rank has a stop request
    routing: dict[str, Any] | None  # loads of experts; only in some steps


@dataclass
class PendingStep:
    """A launched step whose results are still being copied to the host."""

    step: int  # counted from 1
    lr: float
    wait_s: float  # time that the host waited for the batch; the device may have been busy
    began: DeviceTime
    check: InitVar[StepCheck]
    routing: InitVar[Routing | None]

    def __post_init__(self, check: StepCheck, routing: Routing | None) -> None:
        self.comparison = check.comparison
        # torch copies into pinned memory, so that nothing waits here
        self._sums = check.sums.to("cpu", non_blocking=True)
        self._accepted = check.accepted.to("cpu", non_blocking=True)
        self._routing = None
        if routing is not None:
            self._routing = _pack(routing).to("cpu", non_blocking=True)
        self.ended = DeviceTime(check.sums.device)

    def read(self, ranks: int, readers_per_row: int) -> StepResult:
        """Wait for the device and read the result. Nothing else in a training step waits.

        Ranks that share a sequence read the same rows, and each adds their hash to the sum.
        """
        self.ended.wait()
        sums = self._sums.tolist()
        loss, grad_norm = (total / ranks for total in sums[_LOSS_AND_NORM])
        digest = sum(
            int(part) // readers_per_row << shift
            for part, shift in zip(sums[_HASH], _SHIFTS, strict=True)
        )
        return StepResult(
            loss=loss,
            grad_norm=grad_norm,
            hash=f"{digest % 2**64:016x}",
            accepted=bool(self._accepted),
            diverged=self.comparison is not None and any(sums[_DIVERGENCE]),
            stop=sums[_STOP] > 0,
            routing=None if self._routing is None else _routing_record(self._routing.tolist()),
        )


def _pack(routing: Routing) -> Tensor:
    """One row per layer: each expert's share of the tokens, then dropped, entropy and loss."""
    rest = torch.stack((routing.dropped, routing.entropy, routing.loss), dim=-1)
    return torch.cat((routing.load_E / routing.load_E.sum(-1, keepdim=True), rest), dim=-1)


def _routing_record(layers: list[list[float]]) -> dict[str, Any]:
    shares = [layer[:-3] for layer in layers]
    dropped, entropy, losses = zip(*(layer[-3:] for layer in layers), strict=True)
    imbalance = [max(share) * len(share) for share in shares]  # fullest expert over the mean
    return {
        "load": [[round(share, 5) for share in layer] for layer in shares],
        "imbalance": [round(x, 4) for x in imbalance],
        "dropped": [round(x, 5) for x in dropped],
        "entropy": [round(x, 4) for x in entropy],
        "worst_imbalance": max(imbalance),
        "dropped_share": sum(dropped) / len(dropped),
        "aux_loss": sum(losses),
    }
