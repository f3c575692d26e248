"""ELECTRA's generator: a small encoder that fills the masks, trained together with the model that
has to find the tokens that it replaced (arXiv 2003.10555).

B batch · S sequence · K predicted tokens of a row · W width · V vocabulary
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from pipeline.model.head import Losses, at_targets
from pipeline.model.side import Helper, Inputs


class Filled(NamedTuple):
    """A text with the generator's tokens in place of the masked ones."""

    tokens_BS: Tensor
    replaced_BS: Tensor  # 1 where a token differs from the original text, else 0
    loss: Tensor  # loss of the generator, in nats per masked token


def fill_masks(generator: Helper, inputs: Inputs, targets_BS: Tensor, draws_BS: Tensor) -> Filled:
    """Sample a token for every target. The random numbers are functions of the keys `draws_BS`, so
    that samples do not depend on how ranks divide the batch."""
    h_BSW = generator.hidden(inputs)
    losses = cast(Losses, generator.predict(h_BSW, targets_BS))
    with torch.no_grad():
        h_BKW, targets_BK, places_BK = at_targets(h_BSW, targets_BS, generator.most_targets)
        sampled = []
        parts = torch.split(h_BKW.flatten(0, 1), generator.loss_chunk)
        draws = torch.split(draws_BS.gather(1, places_BK).flatten(), generator.loss_chunk)
        for h_TW, draws_T in zip(parts, draws, strict=True):
            logits_TV = cast(Tensor, generator.predict(h_TW[None], None))[0]
            # The argmax of logits plus Gumbel noise is a sample of their softmax. Unlike a sample
            # by cumulative probabilities, it rarely changes if logits are rounded differently.
            sampled.append((logits_TV.float() + gumbel(draws_T, logits_TV.shape[1])).argmax(-1))
        sampled_BK = torch.cat(sampled).view_as(targets_BK)
        given_BK = inputs.tokens_BS.gather(1, places_BK)
        filled_BK = torch.where(targets_BK >= 0, sampled_BK, given_BK)
        tokens_BS = inputs.tokens_BS.scatter(1, places_BK, filled_BK)
        text_BS = torch.where(targets_BS >= 0, targets_BS, inputs.tokens_BS)
    return Filled(tokens_BS, (tokens_BS != text_BS).long(), losses.total)


_LOW_BITS = 2**32 - 1


def gumbel(keys_T: Tensor, vocab: int) -> Tensor:
    """Return Gumbel noise for each token of the vocabulary, as a function of 32-bit keys.

    The hash is Wellons's lowbias32. Products in int64 wrap, and only their low bits are used."""
    token_V = torch.arange(vocab, device=keys_T.device)
    x_TV = (keys_T[:, None] + token_V * 0x9E3779B9) & _LOW_BITS
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x_TV = ((x_TV ^ (x_TV >> shift)) * factor) & _LOW_BITS
    x_TV = x_TV ^ (x_TV >> 16)
    # 23 random bits plus a half are exact in fp32, so the share is never 0 or 1.
    share_TV = ((x_TV >> 9).float() + 0.5) / 2**23
    return -(-share_TV.log()).log()
