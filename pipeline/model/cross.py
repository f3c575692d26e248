"""Cross-attention: the decoder's queries over the encoder's output.

B batch · S decoder sequence · E encoder sequence · W width · H query heads · G key/value heads
D head width
"""

import torch
from torch import Tensor, nn

from pipeline.config.parts import GQA
from pipeline.config.shape import Model
from pipeline.model.attention import Scoring, Sequence
from pipeline.model.context import Context, LayerCache
from pipeline.model.norm import make_norm


class CrossAttention(nn.Module):
    """No positions, windows or biases: positions of the two sequences do not correspond."""

    def __init__(self, model: Model, cfg: GQA) -> None:
        super().__init__()
        self.cfg = cfg
        self.scoring = Scoring(model.score_scale, cfg.softcap)
        self.sequence = Sequence()
        width = cfg.heads * cfg.head_dim
        self.q = nn.Linear(model.width, width, bias=cfg.bias)
        self.kv = nn.Linear(model.width, 2 * cfg.kv_heads * cfg.head_dim, bias=cfg.bias)
        self.out = nn.Linear(width, model.width, bias=cfg.out_bias)
        self.q_norm = make_norm(cfg.head_dim, model.norm) if cfg.qk_norm else nn.Identity()
        self.k_norm = make_norm(cfg.head_dim, model.norm) if cfg.qk_norm else nn.Identity()
        self.sinks = nn.Parameter(torch.zeros(cfg.heads)) if cfg.sinks else None

    def forward(self, x_BSW: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        q_BSHD = self.q_norm(self.q(x_BSW).unflatten(-1, (-1, self.cfg.head_dim)))
        # Keys and values depend on the source only, so decoding computes them once.
        kept = () if cache is None else cache.source
        if not kept:
            kept = self._keys_and_values(context)
            if cache is not None:
                cache.source = kept
        q_BHSD, k_BGED, v_BGED = (t.transpose(1, 2) for t in (q_BSHD, *kept))
        y_BHSD = self.sequence.attend(
            q_BHSD, k_BGED, v_BGED, self.scoring, context.cross, None, self.sinks
        )
        out: Tensor = self.out(y_BHSD.transpose(1, 2).flatten(2))
        return out

    def _keys_and_values(self, context: Context) -> tuple[Tensor, Tensor]:
        assert context.source_BEW is not None, "the forward pass of an encoder–decoder has a source"
        kv = self.kv(context.source_BEW).unflatten(-1, (2, -1, self.cfg.head_dim))
        k_BEGD, v_BEGD = kv.unbind(2)
        return self.k_norm(k_BEGD), v_BEGD
