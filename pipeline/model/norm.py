"""Norms, and where they are placed around a layer. Reductions always run in fp32.

The output of a layer is not added to the residual stream at once. It travels beside the stream as
`pending`, and the next norm that reads the stream adds it, in one pass on a GPU.
"""

from functools import cache
from typing import NamedTuple, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn, ones, zeros

from pipeline.config.parts import Norm
from pipeline.config.shape import Model


def rms_norm(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """Return x divided by the root of its mean square, times the gain."""
    compiling = torch.compiler.is_compiling()
    if compiling or not torch.is_inference_mode_enabled() or x.is_cuda or x.dtype != torch.float32:
        return F.rms_norm(x, x.shape[-1:], gain, eps)
    # On a CPU, F.rms_norm is nine operations. For a single token, these four take half as long.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    y = x * torch.addcmul(_number(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return y if gain is None else y.mul_(gain)


@cache
def _number(value: float) -> Tensor:
    """Return a scalar tensor. It is cached, because making one costs as much as an operation."""
    return torch.tensor(value, device="cpu")


class _Norm(nn.Module):
    def __init__(self, width: int, cfg: Norm) -> None:
        super().__init__()
        self.gain = nn.Parameter(ones(width)) if cfg.gain else None
        self.eps = cfg.eps


class RMSNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.gain, self.eps)


class LayerNorm(_Norm):
    def __init__(self, width: int, cfg: Norm) -> None:
        super().__init__(width, cfg)
        self.bias = nn.Parameter(zeros(width)) if cfg.bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.gain, self.bias, self.eps)


class StreamNorm(_Norm):
    """RMSNorm of the residual stream plus the pending term; returns the sum and its norm."""

    def forward(self, x: Tensor, pending: Tensor | None) -> tuple[Tensor, Tensor]:
        if x.is_cuda and x.shape[-2] > 1:  # for one token, kernels of torch start faster
            # Triton exists only where torch was built for a GPU.
            from pipeline.model.kernels import add_norm

            return add_norm(x, pending, self.gain, self.eps)
        x = x if pending is None else x + pending
        return x, rms_norm(x, self.gain, self.eps)


def make_norm(width: int, cfg: Norm) -> nn.Module:
    match cfg.kind:
        case "rmsnorm":
            return RMSNorm(width, cfg)
        case "layernorm":
            return LayerNorm(width, cfg)
        case _:
            assert_never(cfg.kind)


def make_stream_norm(width: int, cfg: Norm) -> nn.Module:
    """Build a norm for `add_and_norm`. The fused kernel exists for RMSNorm only."""
    return StreamNorm(width, cfg) if cfg.kind == "rmsnorm" else make_norm(width, cfg)


def add_and_norm(norm: nn.Module, x: Tensor, pending: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the stream with the pending term added, and its norm."""
    # Called as a module, so that ZeRO-3's hooks gather its gain.
    if isinstance(norm, StreamNorm):
        total, normed = norm(x, pending)
        return total, normed
    x = x if pending is None else x + pending
    return x, norm(x)


class Placement(NamedTuple):
    before: bool = False  # norm of the layer's input
    inside: bool = False  # norm of the layer's output
    after: bool = False  # norm of the stream after the output is added


# pre: GPT-2 and most later models. post: the first transformer. sandwich: Gemma 2. deepnorm: post
# with a scaled stream, for very deep models.
PLACEMENTS = {
    "pre": Placement(before=True),
    "post": Placement(after=True),
    "sandwich": Placement(before=True, inside=True),
    "deepnorm": Placement(after=True),
}


class Residual(nn.Module):
    """How one layer reads the residual stream and adds to it, for every norm placement."""

    def __init__(self, cfg: Model, *, normed: bool = False) -> None:
        """`normed`: the stream is already normalized, so this layer does not normalize it again."""
        super().__init__()
        place = PLACEMENTS[cfg.placement]
        before = place.before and not normed
        self.before = make_stream_norm(cfg.width, cfg.norm) if before else nn.Identity()
        self.inside = make_norm(cfg.width, cfg.norm) if place.inside else nn.Identity()
        self.after = make_norm(cfg.width, cfg.norm) if place.after else nn.Identity()
        self.output_scale = cfg.multipliers.residual
        self.stream_scale = deepnorm_alpha(cfg.layers) if cfg.placement == "deepnorm" else 1.0

    def read(self, x: Tensor, pending: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the stream and the input of the layer."""
        return add_and_norm(self.before, x, pending)

    def add(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the stream and the pending term after the layer returned y."""
        y = self.inside(y)
        # A multiplication by 1 would still read and write the whole stream.
        y = y if self.output_scale == 1 else self.output_scale * y
        # A norm after the sum needs the sum now; otherwise the next reader adds it.
        if isinstance(self.after, nn.Identity):
            return x, y
        x = x if self.stream_scale == 1 else self.stream_scale * x
        return self.after(x + y), None


def deepnorm_alpha(layers: int) -> float:
    """Scale of the stream in a decoder (arXiv 2203.00555, table 1)."""
    return float((2 * layers) ** 0.25)


def deepnorm_beta(layers: int) -> float:
    """Scale of the initial weights."""
    return float((8 * layers) ** -0.25)
