"""Attention layers: grouped queries, and multi-head latent attention.

B batch · S sequence · W width · H query heads · G key/value heads · D head width · R latent rank
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeline.config.model import Model
from pipeline.config.parts import GQA, MLA
from pipeline.model.attend import Mask, Scoring, attend
from pipeline.model.cache import LayerCache
from pipeline.model.norm import LayerNorm, RMSNorm, norm
from pipeline.model.position import Rotary, rotate
from pipeline.model.sequence import Sequence


class Context(NamedTuple):
    """What a layer knows beside the hidden states, made once per forward pass."""

    rotary: Rotary | None = None
    bias_HQK: Tensor | None = None
    near: Mask = None  # of windowed layers
    far: Mask = None

    def at(self, windowed: bool, placed: bool) -> tuple[Mask, Tensor | None, Rotary | None]:
        return (
            self.near if windowed else self.far,
            self.bias_HQK if placed else None,
            self.rotary if placed else None,
        )


class GroupedAttention(nn.Module):
    """Over one fused projection: queries, then keys, then values."""

    def __init__(self, model: Model, cfg: GQA, *, windowed: bool, placed: bool) -> None:
        super().__init__()
        self.cfg, self.windowed, self.placed, self.eps = cfg, windowed, placed, model.norm.eps
        self.scoring, self.sequence = Scoring(model.score_scale, cfg.softcap), Sequence()
        self.qkv = nn.Linear(
            model.width, (cfg.heads + 2 * cfg.kv_heads) * cfg.head_dim, bias=cfg.bias
        )
        self.out = nn.Linear(cfg.heads * cfg.head_dim, model.width, bias=cfg.out_bias)
        self.q_norm = norm(cfg.head_dim, model.norm) if cfg.qk_norm else nn.Identity()
        self.k_norm = norm(cfg.head_dim, model.norm) if cfg.qk_norm else nn.Identity()
        self.sinks = nn.Parameter(torch.zeros(cfg.heads)) if cfg.sinks else None

    def forward(self, x_BSW: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        mask, bias, table = context.at(self.windowed, self.placed)
        qkv_BSHD = self.qkv(x_BSW).unflatten(-1, (-1, self.cfg.head_dim))
        q_BSHD, k_BSGD, v_BSGD = self._place(qkv_BSHD, table)
        if cache is not None:
            k_BSGD, v_BSGD = cache.append(k_BSGD, v_BSGD)
        q_BHSD, k_BGSD, v_BGSD = (t.transpose(1, 2) for t in (q_BSHD, k_BSGD, v_BSGD))
        y_BHSD = self.sequence.attend(q_BHSD, k_BGSD, v_BGSD, self.scoring, mask, bias, self.sinks)
        out: Tensor = self.out(y_BHSD.transpose(1, 2).flatten(2))
        return out

    def _place(self, qkv_BSHD: Tensor, table: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys normed and turned, and the values."""
        c, q_norm, k_norm = self.cfg, self.q_norm, self.k_norm
        if (
            qkv_BSHD.is_cuda
            and c.head_dim & (c.head_dim - 1) == 0
            and not isinstance(q_norm, LayerNorm)
        ):
            from pipeline.model.kernels import turn  # Triton comes with torch where there is a GPU

            gains = (
                (q_norm.gain, k_norm.gain)
                if isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm)
                else None
            )
            return turn(qkv_BSHD, c.heads, gains, self.eps, table)
        q_BSHD, k_BSGD, v_BSGD = torch.split(qkv_BSHD, [c.heads, c.kv_heads, c.kv_heads], dim=2)
        return rotate(q_norm(q_BSHD), table), rotate(k_norm(k_BSGD), table), v_BSGD


class LatentAttention(nn.Module):
    """MLA (arXiv 2405.04434): keys and values are made from a latent of rank R, positions travel in a part of their own
    that all heads share. Decoding keeps the latent and that part alone, and absorbs the projections that would have
    made keys and values into the queries and the output."""

    def __init__(self, model: Model, cfg: MLA, *, windowed: bool, placed: bool) -> None:
        super().__init__()
        self.cfg, self.windowed, self.placed = cfg, windowed, placed
        self.scoring, self.sequence = Scoring(model.score_scale, cfg.softcap), Sequence()
        width, q = model.width, cfg.heads * cfg.score_dim
        straight = cfg.q_rank is None
        self.q_down = nn.Identity() if straight else nn.Linear(width, cfg.q_rank or 0, bias=False)
        self.q_norm = nn.Identity() if straight else norm(cfg.q_rank or 0, model.norm)
        self.q_up = nn.Linear(cfg.q_rank or width, q, bias=False)
        self.kv_down = nn.Linear(width, cfg.kv_rank + cfg.rope_dim, bias=False)
        self.kv_norm = norm(cfg.kv_rank, model.norm)
        self.kv_up = nn.Linear(
            cfg.kv_rank, cfg.heads * (cfg.nope_dim + cfg.v_dim), bias=False
        )  # per head: key, value
        self.out = nn.Linear(cfg.heads * cfg.v_dim, width, bias=False)
        self.sinks = nn.Parameter(torch.zeros(cfg.heads)) if cfg.sinks else None

    def forward(self, x_BSW: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        c = self.cfg
        mask, bias, table = context.at(self.windowed, self.placed)
        q_BSHD = self.q_up(self.q_norm(self.q_down(x_BSW))).unflatten(-1, (c.heads, c.score_dim))
        q_nope, q_rope = q_BSHD.split((c.nope_dim, c.rope_dim), dim=-1)
        latent_BSR, k_rope = self.kv_down(x_BSW).split((c.kv_rank, c.rope_dim), dim=-1)
        latent_BSR, q_rope = self.kv_norm(latent_BSR), rotate(q_rope, table)
        k_rope = rotate(k_rope.unsqueeze(2), table)
        if cache is None:
            kv_BSHE = self.kv_up(latent_BSR).unflatten(-1, (c.heads, c.nope_dim + c.v_dim))
            k_nope, v_BSHE = kv_BSHE.split((c.nope_dim, c.v_dim), dim=-1)
            k_BSHD = torch.cat((k_nope, k_rope.expand(-1, -1, c.heads, -1)), dim=-1)
            q_BSHD = torch.cat((q_nope, q_rope), dim=-1)
            q, k, v = (t.transpose(1, 2) for t in (q_BSHD, k_BSHD, v_BSHE))
            y_BHSE = self.sequence.attend(q, k, v, self.scoring, mask, bias, self.sinks)
        else:
            latent_BKR, k_rope = cache.append(latent_BSR, k_rope.squeeze(2))
            up_HER = self.kv_up.weight.view(c.heads, c.nope_dim + c.v_dim, c.kv_rank)
            key_HDR, value_HER = torch.split(up_HER, [c.nope_dim, c.v_dim], dim=1)
            q_BHSR = torch.einsum("bshd,hdr->bhsr", q_nope, key_HDR)
            q = torch.cat((q_BHSR, q_rope.transpose(1, 2)), dim=-1)
            k = torch.cat((latent_BKR, k_rope), dim=-1).unsqueeze(1)  # one key for all heads
            seen_BHSR = attend(q, k, latent_BKR.unsqueeze(1), self.scoring, mask, bias, self.sinks)
            y_BHSE = torch.einsum("bhsr,her->bhse", seen_BHSR, value_HER)
        out: Tensor = self.out(y_BHSE.transpose(1, 2).flatten(2))
        return out
