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
