"""Config → engine with its model drawn and compiled: the one place where engines are chosen."""

import os
from typing import assert_never

import torch

from pipeline.config.parts import MoE
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError
from pipeline.model.build import build_model, init_weights
from pipeline.model.fp8 import convert_to_fp8
from pipeline.model.stack import Decoder
from pipeline.parallel.engine import Engine
from pipeline.parallel.sequence import share_sequences
from pipeline.parallel.world import World, join


def engine(config: RunConfig, world: World) -> Engine:
    join(world, os.environ)
    if config.train.dtype == "bf16" and world.device.type == "cuda":
        # the only fp32 products are the routers', whose operands are bf16 values: TF32 holds them exactly
        torch.set_float32_matmul_precision("high")
    built: Engine
    match config.parallel.engine:
        case "deepspeed":
            from pipeline.parallel.zero import ZeroEngine

            built = ZeroEngine(config, _model(config, world), world)
        case "accelerate":
            from pipeline.parallel.ddp import DDPEngine

            built = DDPEngine(config, _model(config, world), world)
        case _:
            assert_never(config.parallel.engine)
    if config.parallel.sp > 1:
        share_sequences(built.module, config.parallel.sp)
    return built


def _model(config: RunConfig, world: World) -> Decoder:
    train, ep, ffn = config.train, config.parallel.ep, config.model.ffn
    assert train.loss_chunk != "auto", "resolve the recipe first"
    experts = None
    if isinstance(ffn, MoE) and ep > 1:
        share = ffn.experts // ep
        experts = range(world.rank % ep * share, (world.rank % ep + 1) * share)
    model = build_model(
        config.model,
        z_loss=config.optim.z_loss,
        loss_chunk=train.loss_chunk,
        recompute=train.recompute,
        experts=experts,
    )
    init_weights(model, config.model, config.seed)
    if experts is not None:
        from pipeline.parallel.expert import announce

        announce(model, ep)
    blocks = [*model.blocks, *(ahead.block for ahead in model.ahead)]
    if train.fp8:
        if world.device.type == "cuda" and torch.cuda.get_device_capability(world.device) < (8, 9):
            name = torch.cuda.get_device_name(world.device)
            raise ConfigError(
                f"train.fp8=true: {name} has no fp8 matmuls (Hopper and Ada have); set train.fp8=false"
            )
        if not sum(map(convert_to_fp8, blocks)):
            raise ConfigError(
                f"train.fp8=true: no layer of width {config.model.width} has two sides that 16 divides; take a model "
                "that has, or train.fp8=false"
            )
    if train.compile is True:
        for block in blocks:
            # per block: starts faster than the whole, and every layer shares one graph. What an engine hooks to a
            # block, such as ZeRO-3's gathering, stays outside of the graph.
            block.forward = torch.compile(block.forward)
    return model
