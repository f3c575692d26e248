"""The reference engine: the same training through Accelerate and torch's own DDP."""

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pipeline.config.schema import RunConfig
from pipeline.model.head import Losses
from pipeline.model.stack import Decoder
from pipeline.objective.batch import Micro
from pipeline.optim.groups import build_optimizer, gate_step, set_learning_rate
from pipeline.parallel import engine
from pipeline.parallel.fragments import Piece
from pipeline.parallel.muon_shards import bind
from pipeline.parallel.world import TIMEOUT, World


class DDPEngine(engine.Engine):
    def __init__(self, config: RunConfig, model: Decoder, world: World) -> None:
        # `cpu` is explicit: otherwise, on a node without GPUs, Accelerate counts every process but
        # does not wrap the model, and each rank trains alone without an error.
        self._accelerator = Accelerator(
            cpu=world.device.type == "cpu",
            kwargs_handlers=[InitProcessGroupKwargs(backend=world.backend, timeout=TIMEOUT)],
        )
        ranks = self._accelerator.num_processes
        assert ranks == world.size, "Accelerate did not join the process group"
        self._clip = config.optim.clip
        self.world = world
        optimizer = build_optimizer(model.to(world.device), config)
        self.wrapped, self._optimizer = self._accelerator.prepare(model, optimizer)
        wrapped = isinstance(self.wrapped, DistributedDataParallel)
        assert wrapped or world.size == 1, "Accelerate did not wrap the model"
        bind(self.optimizer, self.pieces(), world)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        inner: torch.optim.Optimizer = self._optimizer.optimizer
        return inner

    @cached_property  # Accelerate reads the metadata of installed packages in every call
    def module(self) -> Decoder:
        inner: Decoder = self._accelerator.unwrap_model(self.wrapped)
        return inner

    def forward_backward(self, micros: Sequence[Micro]) -> engine.Passes:
        self.wrapped.train()
        nlls = []
        routings = []
        for micro in micros:
            with self.clock("forward"):
                losses: Losses = self.wrapped(**micro.inputs)
            with self.clock("backward"):
                # Without no_sync, DDP averages after every micro-batch. That is slow but correct:
                # averaging the part that is already equal on all ranks does not change it.
                self._accelerator.backward(losses.total / len(micros))
            nlls.append(losses.nll.detach())
            routings.append(losses.routing)
        return engine.Passes(torch.stack(nlls).mean(), routings)

    def step(
        self, passes: engine.Passes, lr: float, accept: engine.Accept = engine.accept_always
    ) -> engine.Update:
        set_learning_rate(self._optimizer, lr)
        # DDP has averaged the gradients, so every rank computes the same norm.
        norm = torch.nn.utils.get_total_norm(self.local_tensors().gradient_copies)
        apply = accept(passes.nll, norm)
        gate_step(self.optimizer, apply)
        torch.nn.utils.clip_grads_with_norm_(self.wrapped.parameters(), self._clip, norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        routing = engine.balance(self.module, passes.routings, self.world, apply)
        return engine.Update(passes.nll, norm, routing)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, p.grad) for name, p in self.module.named_parameters() if p.grad is not None)

    def local_tensors(self) -> engine.LocalTensors:
        parameters = list(self.wrapped.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        return engine.LocalTensors([*self.wrapped.buffers(), *parameters], [], gradients)

    def pieces(self) -> list[Piece]:
        # Every rank has a copy of everything, so each saves an equal share.
        replica = (self.world.rank, self.world.size)
        return [
            Piece(name, p, p, 0, 0, p.numel(), replica)
            for name, p in self.module.named_parameters()
        ]

    def sync_weights(self) -> None:
        pass  # the weights are fp32 and have no separate masters
