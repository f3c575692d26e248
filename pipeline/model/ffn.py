"""Feed-forward layers: plain, or gated with gate and up projections fused into one matmul."""

from typing import assert_never

import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.config.parts import Activation


def activate(x: Tensor, kind: Activation) -> Tensor:
    """Act on x; the gated kinds take gate and up side by side and give back half the width."""
    match kind:
        case "relu":
            return F.relu(x)
        case "relu2":
            return F.relu(x).square()
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "silu":
            return F.silu(x)
        case "swiglu":
            if x.is_cuda:
                from pipeline.model.kernels import (
                    swiglu,  # Triton comes with torch where there is a GPU
                )

                return swiglu(x)
            gate, up = x.chunk(2, dim=-1)
            return F.silu(gate) * up
        case "geglu":
            gate, up = x.chunk(2, dim=-1)
            return F.gelu(gate) * up
        case "reglu":
            gate, up = x.chunk(2, dim=-1)
            return F.relu(gate) * up
        case _:
            assert_never(kind)


class FeedForward(nn.Module):
    def __init__(
        self, width: int, hidden: int, activation: Activation, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(
            width, hidden * (2 if activation.endswith("glu") else 1), bias=bias
        )  # gated: gate first
        self.out = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(activate(self.up(x), self.activation))
        return y
