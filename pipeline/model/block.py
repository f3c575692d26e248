"""A block: attention, cross-attention where there is an encoder, and feed-forward.

B batch · S sequence · W width
"""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from pipeline.config.shape import Model
from pipeline.model.context import Context, LayerCache
from pipeline.model.moe import MixtureOfExperts, Routing
from pipeline.model.norm import Residual, make_norm, make_stream_norm
from pipeline.model.stream import Scales

T = TypeVar("T")
# The residual stream, the pending term (see norm.py), and the block's routing.
Stream = tuple[Tensor, Tensor | None, Routing | None]


def recomputed(part: Callable[..., T], *inputs: object, on: bool) -> T:
    """Call a part of the model. If `on`, keep only the inputs and call it again in the backward."""
    if not on:
        return part(*inputs)
    # The reentrant form would need an input that has a gradient.
    out: T = torch.utils.checkpoint.checkpoint(part, *inputs, use_reentrant=False)
    return out


class Block(nn.Module):
    """x = x + attention(norm(x)), then x = x + ffn(norm(x)). The decoder of an encoder–decoder has
    x = x + cross(norm(x)) between them, which attends to the encoder's output.

    The next block's norm computes the last addition. `recompute` applies to the feed-forward."""

    def __init__(
        self,
        cfg: Model,
        attention: nn.Module,
        ffn: nn.Module,
        scales: Scales | None = None,
        cross: nn.Module | None = None,
        *,
        first: bool = False,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.scales = scales
        self.attention = attention
        self.ffn = ffn
        self.recompute = recompute
        self.at_attention = Residual(cfg, normed=first and not cfg.first_norm)
        self.cross = cross
        self.at_cross = None if cross is None else Residual(cfg)
        self.at_ffn = None if cfg.parallel_block else Residual(cfg)  # GPT-J, PaLM

    def forward(
        self,
        x_BSW: Tensor,
        pending: Tensor | None,
        context: Context,
        cache: LayerCache | None = None,
    ) -> Stream:
        # Attention is never recomputed: its kernels keep little memory and are slow to repeat.
        on = self.recompute and self.training
        if self.scales is not None and context.first_BSW is not None:
            x_BSW = self.scales(x_BSW, pending, context.first_BSW)
            pending = None
        x_BSW, normed_BSW = self.at_attention.read(x_BSW, pending)
        y_BSW = self.attention(normed_BSW, context, cache)
        if self.at_ffn is None:  # a parallel block: both layers read the same input
            fed_BSW, routing = recomputed(self._feed, normed_BSW, on=on)
            x_BSW, pending = self.at_attention.add(x_BSW, y_BSW + fed_BSW)
            return x_BSW, pending, routing
        x_BSW, pending = self.at_attention.add(x_BSW, y_BSW)
        if self.cross is not None and self.at_cross is not None:
            x_BSW, normed_BSW = self.at_cross.read(x_BSW, pending)
            x_BSW, pending = self.at_cross.add(x_BSW, self.cross(normed_BSW, context, cache))
        x_BSW, y_BSW, routing = recomputed(self._read_and_feed, self.at_ffn, x_BSW, pending, on=on)
        x_BSW, pending = self.at_ffn.add(x_BSW, y_BSW)
        return x_BSW, pending, routing

    def _read_and_feed(
        self, at: Residual, x_BSW: Tensor, pending: Tensor | None
    ) -> tuple[Tensor, Tensor, Routing | None]:
        x_BSW, normed_BSW = at.read(x_BSW, pending)
        return x_BSW, *self._feed(normed_BSW)

    def _feed(self, x_BSW: Tensor) -> tuple[Tensor, Routing | None]:
        if isinstance(self.ffn, MixtureOfExperts):
            out: tuple[Tensor, Routing] = self.ffn(x_BSW)
            return out
        return self.ffn(x_BSW), None


def compile_blocks(model: nn.Module) -> None:
    """Compile every block by itself. This starts faster than compiling the whole model, and all
    layers share one graph. Hooks that an engine adds, such as ZeRO-3's gathering, stay outside."""
    for module in model.modules():
        if isinstance(module, Block):
            module.forward = torch.compile(module.forward)  # type: ignore[method-assign]


class Ahead(nn.Module):
    """Predicts the token after the next from state and next token (arXiv 2412.19437, §2.2)."""

    def __init__(self, cfg: Model, block: Block) -> None:
        super().__init__()
        self.h_norm = make_norm(cfg.width, cfg.norm)
        self.e_norm = make_norm(cfg.width, cfg.norm)
        self.norm = make_stream_norm(cfg.width, cfg.norm)
        self.join = nn.Linear(2 * cfg.width, cfg.width, bias=False)
        self.block = block

    def forward(self, h_BSW: Tensor, embedded_BSW: Tensor, context: Context) -> Stream:
        joined = torch.cat((self.h_norm(h_BSW), self.e_norm(embedded_BSW)), dim=-1)
        out: Stream = self.block(self.join(joined), None, context)
        return out
