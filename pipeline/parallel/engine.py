"""What the loop asks of an engine; DeepSpeed answers everywhere, Accelerate's DDP is the referee it is held against."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

Micro = tuple[Tensor, Tensor]  # tokens_BS and targets_BS of one forward pass


class Update(NamedTuple):
    nll: Tensor  # this rank's mean over its micro-batches, on the device: reading it waits for the device
    grad_norm: Tensor | float  # of the whole model, before clipping


class Engine(Protocol):
    def update(self, micros: Sequence[Micro], lr: float) -> Update:
        """Accumulate gradients over the micro-batches of every rank and take one clipped optimizer step."""

    def evaluate(self, micro: Micro) -> Tensor:
        """Mean loss in nats, without gradients."""

    def save(self, directory: Path) -> None:
        """Write this rank's files; every rank calls it."""

    def load(self, directory: Path) -> None:
        """Read what `save` wrote in the same world."""
