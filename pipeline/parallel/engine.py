"""What the loop asks of an engine; DeepSpeed answers everywhere, Accelerate's DDP is the referee it is held against."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pipeline.model.moe import Routing
from pipeline.model.stack import Decoder
from pipeline.parallel.fragments import Fragment
from pipeline.parallel.world import World


class Micro(NamedTuple):
    """One forward pass of one rank."""

    tokens_BS: Tensor
    targets_BS: Tensor
    documents_BS: Tensor | None = None  # attention stays within each


class Update(NamedTuple):
    nll: Tensor  # this rank's mean over its micro-batches, on the device: reading it waits for the device
    grad_norm: Tensor  # of the whole model, before clipping
    routing: Routing | None = None  # of the whole batch, by layer: loads are sums, the rest means


Clock = Callable[[str], AbstractContextManager[None]]  # around forward, backward and optimizer


def untimed(_part: str) -> AbstractContextManager[None]:
    return nullcontext()


class Held(NamedTuple):
    """What a rank holds of the model now, as views."""

    everywhere: list[Tensor]  # weights that every rank holds a copy of
    here: list[Tensor]  # weights that this rank alone holds: partitions, experts without a copy
    gradients: list[Tensor]  # reduced, of which every rank holds a copy
    experts: Sequence[Tensor] = ()  # weights of which every ep-th rank holds a copy
    expert_gradients: Sequence[Tensor] = ()


# this rank's mean loss and the whole model's gradient norm → whether the step is taken, which the device alone knows
Accept = Callable[[Tensor, Tensor], Tensor]


def always(nll: Tensor, _grad_norm: Tensor) -> Tensor:
    return torch.ones_like(nll, dtype=torch.bool)


class Engine(Protocol):
    clock: Clock  # a benchmark's; nothing waits otherwise

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """torch's own, inside whatever wraps it: nothing else changes what `state` shows."""

    def update(self, micros: Sequence[Micro], lr: float, accept: Accept = always) -> Update:
        """Accumulate gradients over the micro-batches of every rank and take one clipped optimizer step, if `accept`
        says so: it is asked once, before anything is written; after a no, weights and moments are as they were. All of
        it is launched; nothing waits for the device."""

    def evaluate(self, micro: Micro) -> Tensor:
        """Mean loss in nats, without gradients."""

    @property
    def module(self) -> nn.Module:
        """The model itself."""

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Reduced and whole, by name, while `accept` is asked; of experts that ranks share, this rank's. Every rank
        calls it."""

    def held(self) -> Held:
        """For comparing: between updates, or while `accept` is asked."""

    def state(self, *, share: bool = False) -> list[Fragment]:
        """This rank's part of masters and moments, as views; with `share` what it saves, so that the ranks' fragments
        cover everything once."""

    def adopt(self) -> None:
        """Take over what was written into `state`'s views: the weights follow their masters, on every rank."""


@torch.no_grad()
def balance(
    model: Decoder, routings: Sequence[Routing | None], world: World, taken: Tensor | bool = True
) -> Routing | None:
    """What the routers did with the whole batch of every rank, after which each takes one balancing step, or none."""
    routed = [routing for routing in routings if routing is not None]
    if not routed:
        return None
    parts = [torch.stack(part).double().sum(0) for part in zip(*routed, strict=True)]
    rows = world.reduce(torch.cat([part.reshape(len(parts[0]), -1) for part in parts], dim=1))
    loss, load, dropped, entropy = torch.split(rows, [1, rows.shape[1] - 3, 1, 1], dim=1)
    for router, load_E in zip(model.routers(), load, strict=True):
        router.balance(load_E * taken)  # nothing is balance
    loss, dropped, entropy = (
        part.squeeze(1) / (len(routed) * world.size) for part in (loss, dropped, entropy)
    )
    return Routing(loss, load, dropped, entropy)
