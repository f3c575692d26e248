"""Norms. The reduction runs in fp32 whatever the input."""

from typing import assert_never

import torch.nn.functional as F
from torch import Tensor, nn, ones, zeros

from pipeline.config.parts import Norm


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.gain, self.eps = nn.Parameter(ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.gain.shape, self.gain, self.eps)


class StreamNorm(nn.Module):
    """RMSNorm of the residual stream, to which it adds what is given beside it: in one pass where there is a GPU."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.gain, self.eps = nn.Parameter(ones(width)), eps

    def forward(self, x: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
        if x.is_cuda:
            from pipeline.model.kernels import (
                add_norm,  # Triton comes with torch where there is a GPU
            )

            return add_norm(x, given, self.gain, self.eps)
        x = x if given is None else x + given
        return x, F.rms_norm(x, self.gain.shape, self.gain, self.eps)


class LayerNorm(nn.Module):
    def __init__(self, width: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.gain, self.eps = nn.Parameter(ones(width)), eps
        self.bias = nn.Parameter(zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.gain.shape, self.gain, self.bias, self.eps)


def norm(width: int, cfg: Norm) -> nn.Module:
    match cfg.kind:
        case "rmsnorm":
            return RMSNorm(width, cfg.eps)
        case "layernorm":
            return LayerNorm(width, cfg.eps, cfg.bias)
        case _:
            assert_never(cfg.kind)


def reading(width: int, cfg: Norm) -> nn.Module:
    """A norm that the residual stream is read through, by `read`."""
    return StreamNorm(width, cfg.eps) if cfg.kind == "rmsnorm" else norm(width, cfg)


def read(through: nn.Module, x: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
    """The stream with what was given added to it, and its norm."""
    if isinstance(through, StreamNorm):
        total, normed = through(x, given)
        return total, normed
    x = x if given is None else x + given
    return x, through(x)
