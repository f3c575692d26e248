"""Positions: rotations of queries and keys, tables added to the embedding, biases on the scores.

B batch · S sequence · Q queries · K keys · H heads · D head width · W width
half = D/2 rotated pairs: channel i is rotated with channel i + half, as in GPT-NeoX and Llama
"""

import math
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.config.parts import NTK, Linear, Llama3, RelativeBias, RoPE, YaRN

Rotary = tuple[Tensor, Tensor]  # cosines and sines, (S, half) or (B, S, half); see also `spread`


def rotary(positions: Tensor, dim: int, cfg: RoPE, *, windowed: bool = False) -> Rotary:
    """Return cosines and sines, computed in every pass. A buffer would be cast to bf16, which is
    too coarse for positions above 256."""
    if windowed and cfg.window_theta is not None:
        cfg = RoPE(theta=cfg.window_theta)  # a window is short, so it needs no scaling
    frequencies, factor = _frequencies(dim, cfg, positions.device)
    angle = positions.float()[..., None] * frequencies
    return angle.cos() * factor, angle.sin() * factor


def spread(table: Rotary) -> Rotary:
    """Return the table with all D channels, (…, 1, D), so that `rotate` needs fewer operations.
    On a CPU, the overhead of operations is most of the time of decoding."""
    cos, sin = (part[..., None, :] for part in table)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x_BSHD: Tensor, table: Rotary | None) -> Tensor:
    """Rotate the channel pairs of every head; without a table, return the input."""
    if table is None:
        return x_BSHD
    half = x_BSHD.shape[-1] // 2
    if table[0].shape[-1] == 2 * half:
        x = x_BSHD.float()
        return (x * table[0] + x.roll(half, -1) * table[1]).type_as(x_BSHD)
    # In fp32: bf16 has 8 bits, too few for the product of two rotations.
    cos, sin = (part[..., None, :] for part in table)
    a, b = x_BSHD.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x_BSHD)


def _frequencies(dim: int, cfg: RoPE, device: torch.device) -> tuple[Tensor, float]:
    """Return the radians per position of each pair, and the factor of the cosines and sines."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    frequencies = cfg.theta**-exponents
    scaling = cfg.scaling
    match scaling:
        case None:
            return frequencies, 1.0
        case Linear():
            return frequencies / scaling.factor, 1.0  # arXiv 2306.15595
        case NTK():  # the slowest pair is scaled as by Linear, the fastest is not scaled
            return (cfg.theta * scaling.factor ** (dim / (dim - 2))) ** -exponents, 1.0
        case Llama3():  # only pairs with few turns within the original length are scaled
            turns = scaling.original_seq * frequencies / (2 * math.pi)
            keep = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
            return frequencies * (keep + (1 - keep) / scaling.factor), 1.0
        case YaRN():
            low = max(math.floor(_yarn_pair(scaling.beta_fast, dim, cfg.theta, scaling)), 0)
            high = min(math.ceil(_yarn_pair(scaling.beta_slow, dim, cfg.theta, scaling)), dim - 1)
            # Between the two pairs the scaling fades in linearly.
            ramp = (torch.arange(dim // 2, device=device) - low) / max(high - low, 0.001)
            keep = 1 - ramp.clamp(0, 1)
            factor = scaling.attention
            if factor is None:
                factor = 0.1 * math.log(scaling.factor) + 1
            return frequencies * (keep + (1 - keep) / scaling.factor), factor
        case _:
            assert_never(scaling)


def _yarn_pair(turns: float, dim: int, theta: float, scaling: YaRN) -> float:
    """Return the pair that makes this many turns in the original length."""
    return dim * math.log(scaling.original_seq / (turns * 2 * math.pi)) / (2 * math.log(theta))


def sinusoidal(positions: Tensor, width: int, *, halves: bool = False) -> Tensor:
    """Return sines in even and cosines in odd channels (arXiv 1706.03762), or one half each."""
    exponents = -torch.arange(0, width, 2, device=positions.device) / width
    angle = positions.float()[..., None] * 10000**exponents
    if halves:
        return torch.cat((angle.sin(), angle.cos()), dim=-1)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)


def places_in(documents_BS: Tensor) -> Tensor:
    """Return the position of each token in its document, counted from 0."""
    places = torch.arange(documents_BS.shape[1], device=documents_BS.device)
    # A token's position counts from the last start of a document at or before the token.
    starts = torch.ones_like(documents_BS, dtype=torch.bool)
    starts[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    return places - torch.where(starts, places, 0).cummax(dim=1).values


def distances(queries: int, keys: int, device: torch.device, past: Tensor | None = None) -> Tensor:
    """Return how far each key is before each query, (Q, K); negative for keys after the query. The
    last query is at the last key, unless `past` gives the number of keys before the first query."""
    before = keys - queries if past is None else past
    places_Q = torch.arange(queries, device=device) + before
    return places_Q[:, None] - torch.arange(keys, device=device)


def alibi(distance_QK: Tensor, heads: int) -> Tensor:
    """Return a penalty per head that grows with distance (arXiv 2108.12409).

    If the number of heads is not a power of two, the heads beyond the largest power use every
    second slope of the next power, as in the authors' code."""
    power = 2 ** math.floor(math.log2(heads))
    # Made on the device, because a CUDA graph cannot copy from the host.
    head = torch.arange(heads, device=distance_QK.device)
    # For eight heads, the slopes are 1/2, 1/4, …, 1/256.
    step = torch.where(head < power, 2 * (head + 1), 2 * (head - power) + 1)
    slopes_H = torch.exp2(-4 * step / power)
    return -slopes_H[:, None, None] * distance_QK


class DistanceBias(nn.Module):
    """T5's buckets: one for each near distance, and as many with logarithmic widths up to
    max_distance. In an encoder, half of all buckets are for keys after the query."""

    def __init__(self, heads: int, cfg: RelativeBias, *, causal: bool) -> None:
        super().__init__()
        self.cfg = cfg
        self.causal = causal
        self.weight = nn.Parameter(torch.empty(cfg.buckets, heads))

    def forward(self, distance_QK: Tensor) -> Tensor:
        """Return the bias of each head, (H, Q, K)."""
        # Look up each diagonal once. With a lookup for every pair, the backward pass would add Q·K
        # gradients to a few buckets, one by one.
        diagonals = torch.cat((distance_QK[1:, 0].flip(0), distance_QK[0]))
        bias_HL = self.weight[self._bucket(diagonals)].T
        return _along_diagonals(bias_HL, *distance_QK.shape)

    def _bucket(self, distance: Tensor) -> Tensor:
        buckets = self.cfg.buckets
        after = torch.zeros_like(distance)
        if not self.causal:
            buckets //= 2
            after = buckets * (distance < 0)
            distance = distance.abs()
        near = buckets // 2
        far = torch.log(distance.clamp(min=1) / near) / math.log(self.cfg.max_distance / near)
        # The last bucket holds everything beyond max_distance.
        bucket = (near + (far * (buckets - near)).long()).clamp(max=buckets - 1)
        # Keys in the future get bucket 0; the mask hides them, unless they are in a prefix.
        bucket = torch.where(distance < near, distance.clamp(min=0), bucket)
        return bucket + after


def _along_diagonals(values_HL: Tensor, queries: int, keys: int) -> Tensor:
    """Spread values over the diagonals of a matrix, from the lower left to the upper right.

    Copies of the values, padded by one element, are concatenated and cut again into rows without
    the padding, so that each row is shifted by one. Forward and backward need no index."""
    length = queries + keys - 1
    padded_HQL = F.pad(values_HL, (0, 1)).unsqueeze(1).expand(-1, queries, -1)
    shifted_HQL = padded_HQL.flatten(1)[:, : queries * length].view(-1, queries, length)
    # SDPA's fast kernels need contiguous keys; for other layouts SDPA stores every score.
    return shifted_HQL[:, :, queries - 1 :].contiguous()
