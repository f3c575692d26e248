"""From the last layer to the losses: for tokens, for replaced tokens, and for whole rows.

B batch · S sequence · W width · V vocabulary · T = B·S tokens
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.config.parts import FFN
from pipeline.config.shape import Model
from pipeline.model.attention import Sequence
from pipeline.model.ffn import activate
from pipeline.model.moe import Routing
from pipeline.model.norm import make_norm
from pipeline.objective.loss import Soft, cap, next_token_loss

IGNORED = -100  # a target or label without a loss


class Losses(NamedTuple):
    total: Tensor  # for the backward pass
    nll: Tensor  # nats per token, or the loss per row, for every curve and fit
    routing: Routing | None = None  # statistics of the routed layers, stacked
    rows_BC: Tensor | None = None  # predictions of the row head


def at_targets(
    h_BSW: Tensor, targets_BS: Tensor, most: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the hidden states and targets of the tokens with a target, and their places.

    Every row returns `most` tokens. If a row has fewer targets, some of its tokens have none. The
    shape must not depend on the data, or the CPU would have to wait for the GPU."""
    places_BK = (targets_BS < 0).argsort(dim=1, stable=True)[:, :most]
    index_BKW = places_BK[..., None].expand(-1, -1, h_BSW.shape[-1])
    return h_BSW.gather(1, index_BKW), targets_BS.gather(1, places_BK), places_BK


class Transform(nn.Module):
    """The layer before the head: a projection, with `head_transform` also activation and norm."""

    def __init__(self, cfg: Model) -> None:
        super().__init__()
        bias = cfg.head_transform and isinstance(cfg.ffn, FFN) and cfg.ffn.bias
        self.dense = nn.Linear(cfg.width, cfg.head_width, bias=bias)
        self.activation = None
        if cfg.head_transform:
            self.activation = "gelu" if cfg.ffn.gated else cfg.ffn.activation
        # ELECTRA's discriminator has no norm here.
        normed = cfg.head_transform and cfg.head == "tokens"
        self.norm = make_norm(cfg.head_width, cfg.norm) if normed else nn.Identity()

    def forward(self, h_BSW: Tensor) -> Tensor:
        h_BSW = self.dense(h_BSW)
        if self.activation is not None:
            h_BSW = activate(h_BSW, self.activation)
        out: Tensor = self.norm(h_BSW)
        return out


class Head(nn.Module):
    """The output matrix. The loss is computed here, where ZeRO-3 has gathered the whole matrix."""

    def __init__(self, cfg: Model, weight_VW: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight_VW
        self.bias = nn.Parameter(torch.zeros(len(weight_VW))) if cfg.head_bias else None
        self.replaced = cfg.head == "replaced"
        self.scale = cfg.logit_scale
        self.softcap = cfg.logit_softcap
        self.sequence = Sequence()

    def forward(
        self,
        h_BSW: Tensor,
        targets_BS: Tensor | None,
        z_loss: float,
        chunk: int,
        smoothing: float = 0.0,
        soft: Soft | None = None,
    ) -> Tensor | Losses:
        # Scaling the hidden state is cheaper than scaling the logits, which are V/W times as many.
        h_BSW = h_BSW if self.scale == 1 else h_BSW * self.scale
        if targets_BS is None:
            logits_BSV = cap(F.linear(h_BSW, self.weight, self.bias), self.softcap)
            return logits_BSV.squeeze(-1) if self.replaced else logits_BSV
        # Dividing by `parts` makes the mean over the ranks that share a row the row's mean loss.
        count = (targets_BS >= 0).sum().clamp(min=1) / self.sequence.parts
        h_TW = h_BSW.flatten(0, 1)
        targets_T = self.sequence.cut(targets_BS, 1).flatten()
        if self.replaced:
            logits_T = F.linear(h_TW, self.weight, self.bias).squeeze(-1).float()
            truth_T = targets_T.clamp(min=0).float()
            nll_T = F.binary_cross_entropy_with_logits(logits_T, truth_T, reduction="none")
            nll = (nll_T * (targets_T >= 0)).sum() / count
            return Losses(nll, nll.detach())
        total, nll = next_token_loss(
            h_TW,
            self.weight,
            targets_T,
            count,
            z_loss=z_loss,
            chunk=chunk,
            softcap=self.softcap,
            smoothing=smoothing,
            bias_V=self.bias,
            soft=soft,
        )
        return Losses(total, nll)


class RowHead(nn.Module):
    """Predicts the class of a row, or a number. An encoder predicts from the first token through
    BERT's pooler, a decoder from the last token, as transformers' classes for sequences do."""

    def __init__(self, cfg: Model) -> None:
        super().__init__()
        pooled = cfg.stack == "encoder"
        self.pool = nn.Linear(cfg.width, cfg.width) if pooled else None
        self.out = nn.Linear(cfg.width, cfg.row_classes, bias=pooled)
        self.sequence = Sequence()

    def forward(
        self, h_BSW: Tensor, labels_B: Tensor, last_B: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the mean loss of the labeled rows, and the predictions. The loss of floating-point
        labels is the squared error; NaN is no label."""
        rows = torch.arange(len(h_BSW), device=h_BSW.device)
        h_BW = h_BSW[:, 0] if last_B is None else h_BSW[rows, last_B]
        if self.pool is not None:
            h_BW = torch.tanh(self.pool(h_BW))
        out_BC: Tensor = self.out(h_BW).float()
        labeled_B = labels_B >= 0
        if labels_B.is_floating_point():
            labeled_B = ~labels_B.isnan()
            nll_B = (out_BC[:, 0] - labels_B.nan_to_num()).square() * labeled_B
        else:
            nll_B = F.cross_entropy(out_BC, labels_B, ignore_index=IGNORED, reduction="none")
        nll = nll_B.sum() / labeled_B.sum().clamp(min=1)
        # Of the ranks that share a row, only the first has its first token; losses are averaged.
        return nll * (self.sequence.parts if self.sequence.rank == 0 else 0), out_BC
