"""The referee: the same training through Accelerate and torch's own DDP, against which DeepSpeed's is held."""

from collections.abc import Iterator, Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.config.schema import RunConfig
from pipeline.model.stack import Decoder, Losses
from pipeline.optim.groups import adamw, gate_step, set_learning_rate
from pipeline.parallel import fragments
from pipeline.parallel.engine import Accept, Clock, Held, Micro, Update, always, balance, untimed
from pipeline.parallel.fragments import Fragment, Piece
from pipeline.parallel.world import TIMEOUT, World


class DDPEngine:
    def __init__(self, config: RunConfig, model: Decoder, world: World) -> None:
        # cpu is said outright: left to itself on a node without GPUs, Accelerate counts every process and yet leaves
        # the model unwrapped, so that each rank trains alone, without a word
        self._accelerator = Accelerator(
            cpu=world.device.type == "cpu",
            kwargs_handlers=[InitProcessGroupKwargs(backend=world.backend, timeout=TIMEOUT)],
        )
        assert self._accelerator.num_processes == world.size, (
            "Accelerate did not join the process group"
        )
        self._clip, self._world = config.optim.clip, world
        self.clock: Clock = untimed
        optimizer = adamw(model.to(world.device), config)
        self._model, self._optimizer = self._accelerator.prepare(model, optimizer)
        assert world.size == 1 or isinstance(self._model, DistributedDataParallel), (
            "Accelerate did not wrap the model"
        )

    def update(self, micros: Sequence[Micro], lr: float, accept: Accept = always) -> Update:
        set_learning_rate(self._optimizer, lr)
        self._model.train()
        nlls, routings = [], []
        for micro in micros:
            with self.clock("forward"):
                losses: Losses = self._model(*micro)
            with self.clock("backward"):
                self._accelerator.backward(losses.total / len(micros))
            nlls.append(losses.nll.detach())
            routings.append(losses.routing)
        nll, norm = torch.stack(nlls).mean(), torch.nn.utils.get_total_norm(self.held().gradients)
        gate_step(self.optimizer, taken := accept(nll, norm))
        torch.nn.utils.clip_grads_with_norm_(self._model.parameters(), self._clip, norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        model = self._accelerator.unwrap_model(self._model)
        return Update(nll, norm, balance(model, routings, self._world, taken))

    @torch.no_grad()
    def evaluate(self, micro: Micro) -> Tensor:
        self._model.eval()
        losses: Losses = self._model(*micro)
        return losses.nll

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        inner: torch.optim.Optimizer = self._optimizer.optimizer
        return inner

    @property
    def module(self) -> nn.Module:
        inner: nn.Module = self._accelerator.unwrap_model(self._model)
        return inner

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, p.grad) for name, p in self.module.named_parameters() if p.grad is not None)

    def held(self) -> Held:
        parameters = list(self._model.parameters())
        return Held(
            [*self._model.buffers(), *parameters],
            [],
            [p.grad for p in parameters if p.grad is not None],
        )

    def state(self, *, share: bool = False) -> list[Fragment]:
        module, replica = (
            self._accelerator.unwrap_model(self._model),
            (self._world.rank, self._world.size),
        )
        pieces = [
            Piece(name, p, p, 0, 0, p.numel(), replica) for name, p in module.named_parameters()
        ]
        fragments.ready(pieces, self.optimizer)
        return [
            *fragments.state(pieces, self.optimizer, share=share),
            *fragments.buffers(module, replica, share=share),
        ]

    def adopt(self) -> None:
        pass  # the weights are their own masters
