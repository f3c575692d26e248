"""The decoder: embedding, blocks, norm, head with its loss.

B batch · S sequence · W width · V vocabulary
"""

from collections.abc import Callable
from typing import NamedTuple

import torch.utils.checkpoint
from torch import Tensor, nn

from pipeline.config.schema import Model
from pipeline.model.norm import norm
from pipeline.model.position import rotary_table
from pipeline.objective.loss import Terms, next_token_loss, terms


class Losses(NamedTuple):
    total: Tensor  # what the backward pass starts from
    nll: Tensor  # nats per token: the loss of every curve and fit


class Block(nn.Module):
    """Pre-norm residual block around an attention and a feed-forward layer."""

    def __init__(self, cfg: Model, attention: nn.Module, ffn: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm(cfg.width, cfg.norm), attention
        self.ffn_norm, self.ffn = norm(cfg.width, cfg.norm), ffn

    def forward(self, x_BSW: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BSW = x_BSW + self.attention(self.attention_norm(x_BSW), cos, sin)
        out: Tensor = x_BSW + self.ffn(self.ffn_norm(x_BSW))
        return out


class Head(nn.Module):
    """The output matrix. The loss is taken here, where ZeRO-3 has the whole matrix gathered."""

    def __init__(self, weight_VW: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight_VW
        self.terms: Terms = terms  # an engine may swap in a compiled one

    def forward(self, h_BSW: Tensor, targets_BS: Tensor | None, z_loss: float, chunk: int) -> Tensor | Losses:
        if targets_BS is None:
            return h_BSW @ self.weight.T
        h_TW, targets_T = h_BSW.flatten(0, 1), targets_BS.flatten()
        return Losses(*next_token_loss(h_TW, self.weight, targets_T, z_loss=z_loss, chunk=chunk, terms=self.terms))


class Decoder(nn.Module):
    def __init__(
        self, cfg: Model, block: Callable[[], Block], *, z_loss: float = 0.0, loss_chunk: int = 2048, recompute: bool
    ) -> None:
        super().__init__()
        self.cfg, self.z_loss, self.loss_chunk, self.recompute = cfg, z_loss, loss_chunk, recompute
        self.embedding = nn.Embedding(cfg.vocab, cfg.width)
        self.blocks = nn.ModuleList(block() for _ in range(cfg.layers))
        self.norm = norm(cfg.width, cfg.norm)
        shared = self.embedding.weight
        assert isinstance(shared, nn.Parameter)
        self.head = Head(shared if cfg.tied else nn.Parameter(shared.new_empty(shared.shape)))

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor | None = None) -> Tensor | Losses:
        """Logits, or with targets the losses, without the logits ever being whole."""
        cos, sin = rotary_table(tokens_BS.shape[1], self.cfg.attention.head_dim, self.cfg.position, tokens_BS.device)
        x_BSW = self.embedding(tokens_BS)
        for block in self.blocks:
            if self.recompute and self.training:
                x_BSW = torch.utils.checkpoint.checkpoint(block, x_BSW, cos, sin, use_reentrant=False)
            else:
                x_BSW = block(x_BSW, cos, sin)
        out: Tensor | Losses = self.head(self.norm(x_BSW), targets_BS, self.z_loss, self.loss_chunk)
        return out
