"""What the loop asks of an engine; DeepSpeed answers everywhere, Accelerate's DDP is the referee it is held against."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, assert_never

import torch
from torch import Tensor

from pipeline.config.schema import RunConfig
from pipeline.model.build import build, draw
from pipeline.model.stack import Decoder
from pipeline.parallel.world import World

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


def engine(config: RunConfig, world: World) -> Engine:
    match config.parallel.engine:
        case "deepspeed":
            from pipeline.parallel.zero import ZeroEngine

            return ZeroEngine(config, _model(config), world)
        case "accelerate":
            from pipeline.parallel.ddp import DDPEngine

            return DDPEngine(config, _model(config), world)
        case _:
            assert_never(config.parallel.engine)


def _model(config: RunConfig) -> Decoder:
    train = config.train
    model = build(config.model, z_loss=config.optim.z_loss, loss_chunk=train.loss_chunk, recompute=train.recompute)
    draw(model, config.model, config.seed)
    if train.compile is True:
        for block in model.blocks:
            block.compile()  # per block: starts faster than the whole, and every layer shares one graph
        model.head.terms = torch.compile(model.head.terms)
    return model
