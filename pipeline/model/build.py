"""Config → module: the one place where variants are chosen and weights are drawn."""

import hashlib
import math

import torch
from torch import nn

from pipeline.config.schema import Model
from pipeline.model.attention import GroupedAttention
from pipeline.model.ffn import FeedForward
from pipeline.model.stack import Block, Decoder


def build(cfg: Model, *, z_loss: float = 0.0, loss_chunk: int = 2048, recompute: bool = False) -> Decoder:
    """The model with its weights not yet drawn; under torch.device("meta") it takes no memory."""

    def block() -> Block:
        return Block(cfg, GroupedAttention(cfg.width, cfg.attention, cfg.norm), FeedForward(cfg.width, cfg.ffn))

    return Decoder(cfg, block, z_loss=z_loss, loss_chunk=loss_chunk, recompute=recompute)


@torch.no_grad()
def draw(model: nn.Module, cfg: Model, seed: int) -> None:
    """Weights ~ N(0, init_std), those that write into the residual stream / √(2·layers), norms 1.

    Every matrix has a generator of its own, seeded by its name: the start is the same in every layout and order."""
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            parameter.fill_(1.0)
            continue
        std = cfg.init_std / math.sqrt(2 * cfg.layers) if name.endswith(".out.weight") else cfg.init_std
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
