"""The interface between the training loop and an engine.

DeepSpeed implements it for every layout. Accelerate's DDP is a second implementation, which the
tests compare with DeepSpeed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pipeline.model.head import Losses
from pipeline.model.moe import Routing
from pipeline.model.stack import Decoder
from pipeline.objective.batch import Micro
from pipeline.parallel import fragments
from pipeline.parallel.fragments import Fragment, Piece
from pipeline.parallel.world import World


class Passes(NamedTuple):
    """The result of the forward and backward passes of one step on this rank."""

    nll: Tensor  # mean over the micro-batches, on the device
    routings: list[Routing | None]  # of each micro-batch


class Update(NamedTuple):
    """The result of a step, on the device: reading it waits for the device."""

    nll: Tensor  # this rank's mean over its micro-batches
    grad_norm: Tensor  # norm of the whole model's gradient, before clipping
    routing: Routing | None = None  # of the whole batch, by layer: loads are sums, the rest means


class LocalTensors(NamedTuple):
    """Views of the model's tensors on one rank, grouped by the ranks that have the same tensors."""

    copies: list[Tensor]  # weights and buffers that every rank has
    own: list[Tensor]  # weights that only this rank has: partitions, masters
    gradient_copies: list[Tensor]  # reduced gradients that every rank has
    expert_copies: Sequence[Tensor] = ()  # weights that every ep-th rank has
    expert_gradient_copies: Sequence[Tensor] = ()


# Times forward, backward and optimizer in a benchmark; otherwise it does nothing.
Clock = Callable[[str], AbstractContextManager[None]]
# Decides whether to apply a step, from this rank's mean loss and the whole model's gradient norm.
# The result is a boolean on the device.
Accept = Callable[[Tensor, Tensor], Tensor]


def untimed(_part: str) -> AbstractContextManager[None]:
    return nullcontext()


def uncompiled(compiled: bool) -> AbstractContextManager[None]:
    """Run compiled blocks without the compiler, which would compile every new shape."""
    if not compiled:
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def accept_always(nll: Tensor, _grad_norm: Tensor) -> Tensor:
    return torch.ones_like(nll, dtype=torch.bool)


class Engine(Protocol):
    """The methods with a body are the same for both engines, which inherit this class."""

    clock: Clock = staticmethod(untimed)
    wrapped: nn.Module  # the model as the engine calls it
    world: World

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """torch's own optimizer, inside any wrapper. It holds all of the optimizer's state."""

    @property
    def module(self) -> nn.Module:
        """The model itself."""

    def forward_backward(self, micros: Sequence[Micro]) -> Passes:
        """Accumulate the gradients of this rank's micro-batches; nothing waits for the device."""

    def step(self, passes: Passes, lr: float, accept: Accept = accept_always) -> Update:
        """Clip the gradients of all ranks and apply one optimizer step.

        `accept` is called once, before anything is written. If it rejects the step, weights and
        moments stay as they were. Nothing waits for the device."""

    def update(self, micros: Sequence[Micro], lr: float, accept: Accept = accept_always) -> Update:
        """Call `forward_backward` and `step`."""
        return self.step(self.forward_backward(micros), lr, accept)

    @torch.no_grad()
    def evaluate(self, micro: Micro) -> Losses:
        """Return the losses and any predictions for whole rows, without gradients."""
        self.wrapped.eval()
        losses: Losses = self.wrapped(**micro.inputs)
        return losses

    @torch.no_grad()
    def logits(self, **inputs: Tensor) -> Tensor:
        """Return the logits of every position, without gradients."""
        self.wrapped.eval()
        out: Tensor = self.wrapped(**inputs)
        return out

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and whole, reduced gradients; with expert parallelism, only local experts'.
        Every rank must call this method, and only while `accept` runs."""

    def local_tensors(self) -> LocalTensors:
        """Return tensors to compare with other ranks. Valid between updates and during `accept`."""

    def state(self, *, share: bool = False) -> list[Fragment]:
        """Return views of this rank's masters, moments and buffers. With `share`, return only the
        part that this rank saves: together, the ranks save everything once."""
        pieces = list(self.pieces())
        fragments.create_moments(pieces, self.optimizer)
        replica = (self.world.rank, self.world.size)
        return [
            *fragments.state(pieces, self.optimizer, share=share),
            *fragments.buffers(self.module, replica, share=share),
        ]

    def pieces(self) -> Iterable[Piece]:
        """Return where this rank's fp32 masters are."""

    def sync_weights(self) -> None:
        """Copy the masters to the weights on every rank, after a load has written to `state`."""


@torch.no_grad()
def balance(
    model: Decoder, routings: Sequence[Routing | None], world: World, apply: Tensor | bool = True
) -> Routing | None:
    """Sum the routing of a batch over all ranks; if `apply`, let each router balance its load."""
    routed = [routing for routing in routings if routing is not None]
    if not routed:
        return None
    parts = [torch.stack(part).double().sum(0) for part in zip(*routed, strict=True)]
    rows = world.reduce(torch.cat([part.reshape(len(parts[0]), -1) for part in parts], dim=1))
    loss, load, dropped, entropy = torch.split(rows, [1, rows.shape[1] - 3, 1, 1], dim=1)
    for router, load_E in zip(model.routers(), load, strict=True):
        router.balance(load_E * apply)  # a load of zero changes nothing
    passes = len(routed) * world.size
    loss, dropped, entropy = (part.squeeze(1) / passes for part in (loss, dropped, entropy))
    return Routing(loss, load, dropped, entropy)
