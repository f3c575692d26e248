"""Config → engine with an initialized, compiled model: the one place where engines are chosen."""

import os
from typing import assert_never

import torch

from pipeline.config.parts import MoE
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError
from pipeline.model.adapter import adapt
from pipeline.model.block import Block, compile_blocks
from pipeline.model.build import build_model, init_weights
from pipeline.model.fp8 import convert_to_fp8
from pipeline.model.stack import Decoder
from pipeline.parallel.engine import Engine
from pipeline.parallel.sequence import share_sequences
from pipeline.parallel.world import World, join


def build_engine(config: RunConfig, world: World) -> Engine:
    join(world, os.environ)
    if config.train.dtype == "bf16" and world.device.type == "cuda":
        # For routers, which multiply bf16 values in fp32. TF32 represents these values exactly.
        torch.set_float32_matmul_precision("high")
    engine: Engine
    # Each engine is imported where it is used: DeepSpeed alone takes seconds.
    match config.parallel.engine:
        case "deepspeed":
            from pipeline.parallel.zero import ZeroEngine

            engine = ZeroEngine(config, prepare_model(config, world), world)
        case "accelerate":
            from pipeline.parallel.ddp import DDPEngine

            engine = DDPEngine(config, prepare_model(config, world), world)
        case _:
            assert_never(config.parallel.engine)
    if config.parallel.sp > 1:
        share_sequences(engine.module, config.parallel.sp)
    return engine


def prepare_model(config: RunConfig, world: World) -> Decoder:
    """Build this rank's model and draw its weights; convert to fp8 and compile as configured."""
    train = config.train
    ep = config.parallel.ep
    experts = None
    if isinstance(config.model.ffn, MoE) and ep > 1:
        share = config.model.ffn.experts // ep
        # Consecutive ranks form a group, in which each rank has other experts (expert.py).
        first = world.rank % ep * share
        experts = range(first, first + share)
    model = build_model(
        config.model,
        z_loss=config.optim.z_loss,
        smoothing=config.objective.label_smoothing,
        loss_chunk=train.loss_chunk,
        recompute=train.recompute,
        experts=experts,
        token_weight=config.objective.token_weight,
        most_targets=config.objective.most_targets(config.model.seq),
    )
    init_weights(model, config.model, config.seed)
    if config.lora is not None:
        dtype = torch.bfloat16 if train.dtype == "bf16" else torch.float32
        adapt(model, config.lora, config.seed, dtype)
    if experts is not None:
        from pipeline.parallel.expert import announce

        announce(model, ep)
    if train.fp8:
        _convert_to_fp8(model, config, world)
    if train.compile:
        compile_blocks(model)
    return model


def _convert_to_fp8(model: Decoder, config: RunConfig, world: World) -> None:
    # Compute capability 8.9 (Ada) and 9.0 (Hopper) are the first with fp8 matmuls.
    if world.device.type == "cuda" and torch.cuda.get_device_capability(world.device) < (8, 9):
        name = torch.cuda.get_device_name(world.device)
        raise ConfigError(
            f"train.fp8=true: {name} has no fp8 matmuls (Hopper and Ada have); set train.fp8=false"
        )
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    if not sum(map(convert_to_fp8, blocks)):
        raise ConfigError(
            f"train.fp8=true: no layer of width {config.model.width} has two sides divisible by "
            "16; use another --size, or train.fp8=false"
        )
