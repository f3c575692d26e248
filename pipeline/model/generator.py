"""ELECTRA's generator: a small encoder that fills the masks, trained beside the model that has to
find what it filled in (arXiv 2003.10555).

B batch · S sequence · K predicted tokens of a row · W width · V vocabulary
"""

from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from pipeline.model.head import Losses, at_targets
from pipeline.model.side import Inputs

if TYPE_CHECKING:  # a Decoder may have a generator, which is a Decoder
    from pipeline.model.stack import Decoder


class Filled(NamedTuple):
    tokens_BS: Tensor  # the text with the generator's tokens in place of the masked ones
    replaced_BS: Tensor  # 1 where a token differs from the text, else 0
    loss: Tensor  # of the generator, in nats per masked token


def fill_masks(
    generator: "Decoder", inputs: Inputs, targets_BS: Tensor, draws_BS: Tensor
) -> Filled:
    """Sample a token for every target, by inverting the distribution at a given uniform number, so
    that the sample does not depend on how ranks divide the batch."""
    h_BSW = generator.states(inputs).h_BSW
    losses = cast(Losses, generator.to_losses(h_BSW, targets_BS))
    with torch.no_grad():
        h_BKW, targets_BK, places_BK = at_targets(h_BSW, targets_BS, generator.most_targets)
        sampled = []
        parts = torch.split(h_BKW.flatten(0, 1), generator.loss_chunk)
        draws = torch.split(draws_BS.gather(1, places_BK).flatten(), generator.loss_chunk)
        for h_TW, draws_T in zip(parts, draws, strict=True):
            logits_TV = cast(Tensor, generator.to_losses(h_TW[None], None))[0]
            cumulated_TV = logits_TV.float().softmax(-1).cumsum(-1)
            # Rounding may leave the last sum below 1.
            wanted_T1 = draws_T[:, None] * cumulated_TV[:, -1:]
            sampled.append(torch.searchsorted(cumulated_TV, wanted_T1, right=True).squeeze(1))
        last = generator.cfg.vocab - 1
        sampled_BK = torch.cat(sampled).clamp(max=last).view_as(targets_BK)
        given_BK = inputs.tokens_BS.gather(1, places_BK)
        filled_BK = torch.where(targets_BK >= 0, sampled_BK, given_BK)
        tokens_BS = inputs.tokens_BS.scatter(1, places_BK, filled_BK)
        text_BS = torch.where(targets_BS >= 0, targets_BS, inputs.tokens_BS)
    return Filled(tokens_BS, (tokens_BS != text_BS).long(), losses.total)
