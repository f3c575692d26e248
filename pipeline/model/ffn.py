"""Feed-forward layers: plain, or gated with the gate and up projections fused into one matmul."""

from typing import assert_never

import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.config.parts import Activation


def activate(x: Tensor, kind: Activation) -> Tensor:
    """Apply the activation. Gated kinds expect gate and up side by side and halve the width."""
    if x.is_cuda and kind in ("swiglu", "gelu"):
        # Triton exists only where torch was built for a GPU.
        from pipeline.model import kernels

        return kernels.swiglu(x) if kind == "swiglu" else kernels.gelu(x)
    # The gate comes first in the fused projection.
    if kind.endswith("glu"):
        gate, x = x.chunk(2, dim=-1)
    match kind:
        case "relu":
            return F.relu(x)
        case "relu2":
            return F.relu(x).square()  # Primer (arXiv 2109.08668)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "silu":
            return F.silu(x)
        # The gated kinds are those of arXiv 2002.05202.
        case "swiglu":
            return F.silu(gate) * x
        case "geglu":
            return F.gelu(gate) * x
        case "tanh_geglu":
            return F.gelu(gate, approximate="tanh") * x  # T5 v1.1
        case "reglu":
            return F.relu(gate) * x
        case _:
            assert_never(kind)


class FeedForward(nn.Module):
    def __init__(
        self, width: int, hidden: int, activation: Activation, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.activation = activation
        both = hidden * (2 if activation.endswith("glu") else 1)  # gate first
        self.up = nn.Linear(width, both, bias=bias)
        self.out = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(activate(self.up(x), self.activation))
        return y
