"""Rotary positions.

S sequence · D head width · half = D/2 rotated pairs (channel i turns with channel i + half, as in GPT-NeoX and Llama)
"""

import torch
from torch import Tensor

from pipeline.config.schema import RoPE


def rotary_table(seq: int, head_dim: int, cfg: RoPE, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines per position and pair. Made anew in every forward pass, which costs nothing beside a block: as
    a buffer they would be cast to bf16 with the weights, and positions beyond 256 would blur."""
    turns = cfg.theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    angle_Sh = torch.arange(seq, dtype=torch.float32, device=device)[:, None] * turns
    return angle_Sh.cos(), angle_Sh.sin()


def rotate(x_BSHD: Tensor, cos_Sh: Tensor, sin_Sh: Tensor) -> Tensor:
    cos, sin = cos_Sh[:, None, :], sin_Sh[:, None, :]
    a, b = x_BSHD.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x_BSHD)
