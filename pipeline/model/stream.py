"""Learned additions to the stream: the previous token, the first input, the middle layer.

B batch · S sequence · W width

Each of these modules has a few scalars and is a switch of the model config. The formulas and
initial values are those of nanochat, and of modded-nanogpt before it.
"""

import torch
from torch import Tensor, nn

from pipeline.config.shape import Model

BACKOUT = 0.2  # initial share of the middle stream that is subtracted


class Smear(nn.Module):
    """Adds a gated part of the previous token's embedding to each embedding: cheap bigrams."""

    def __init__(self, cfg: Model) -> None:
        super().__init__()
        self.gate = nn.Linear(cfg.smear_inputs, 1, bias=False)
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, x_BSW: Tensor, follows: Tensor) -> Tensor:
        """The input begins with an extra token. `follows` is false where a document starts."""
        here_BSW = x_BSW[:, 1:]
        gate_BS1 = torch.sigmoid(self.gate(here_BSW[..., : self.gate.in_features]))
        gate_BS1 = self.scale * gate_BS1 * follows.unsqueeze(-1)
        return here_BSW + gate_BS1 * x_BSW[:, :-1]


class Scales(nn.Module):
    """Scales the stream before a block, and adds a share of the first block's input to it."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = nn.Parameter(torch.ones(1))
        self.first = nn.Parameter(torch.zeros(1))

    def forward(self, x_BSW: Tensor, pending: Tensor | None, first_BSW: Tensor) -> Tensor:
        return self.stream * settle(x_BSW, pending) + self.first * first_BSW


class Backout(nn.Module):
    """Subtracts, after the last layer, a share of the middle layer's stream: later layers used it,
    but it does not help the prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), BACKOUT))

    def forward(self, x_BSW: Tensor, pending: Tensor | None, middle_BSW: Tensor) -> Tensor:
        return settle(x_BSW, pending) - self.scale * middle_BSW


def settle(x_BSW: Tensor, pending: Tensor | None) -> Tensor:
    """Return the stream with the pending term added (see norm.py)."""
    return x_BSW if pending is None else x_BSW + pending


def initial_scale(name: str, cfg: Model) -> float | None:
    """Return the initial value of a scalar of this file; None for any other parameter."""
    if name == "smear.scale":
        return 0.0
    if name == "backout.scale":
        return BACKOUT
    # From the first to the last layer: 1.15 to 1.05 for the stream, 0.2 to 0.05 for the input.
    if name.endswith((".scales.stream", ".scales.first")):
        depth = int(name.split(".")[1]) / max(1, cfg.layers - 1)
        return 1.15 - 0.1 * depth if name.endswith("stream") else 0.2 - 0.15 * depth
    return None
