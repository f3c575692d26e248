"""Grouped-query attention over one fused projection.

B batch · S sequence · W width · H query heads · K key/value heads · D head width
"""

import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.config.schema import GQA, Norm
from pipeline.model.norm import norm
from pipeline.model.position import rotate


class GroupedAttention(nn.Module):
    def __init__(self, width: int, cfg: GQA, norm_cfg: Norm) -> None:
        super().__init__()
        self.cfg = cfg
        self.qkv = nn.Linear(width, (cfg.heads + 2 * cfg.kv_heads) * cfg.head_dim, bias=False)
        self.out = nn.Linear(cfg.heads * cfg.head_dim, width, bias=False)
        self.q_norm = norm(cfg.head_dim, norm_cfg) if cfg.qk_norm else nn.Identity()
        self.k_norm = norm(cfg.head_dim, norm_cfg) if cfg.qk_norm else nn.Identity()

    def forward(self, x_BSW: Tensor, cos_Sh: Tensor, sin_Sh: Tensor) -> Tensor:
        heads, kv_heads, dim = self.cfg.heads, self.cfg.kv_heads, self.cfg.head_dim
        qkv_BSHD = self.qkv(x_BSW).unflatten(-1, (heads + 2 * kv_heads, dim))
        q_BSHD, k_BSKD, v_BSKD = qkv_BSHD.split((heads, kv_heads, kv_heads), dim=2)
        q_BSHD = rotate(self.q_norm(q_BSHD), cos_Sh, sin_Sh)
        k_BSKD = rotate(self.k_norm(k_BSKD), cos_Sh, sin_Sh)
        y_BHSD = F.scaled_dot_product_attention(
            q_BSHD.transpose(1, 2),
            k_BSKD.transpose(1, 2),
            v_BSKD.transpose(1, 2),
            is_causal=True,
            enable_gqa=heads != kv_heads,
        )
        out: Tensor = self.out(y_BHSD.transpose(1, 2).flatten(2))
        return out
