"""Whether transformers computes the same logits from the same files."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from pipeline.errors import RunError
from pipeline.model.stack import Decoder

_ROWS, _LENGTH = 2, 64
_TOLERANCE = 1e-4  # of logits in fp32, relative to the largest


def held(model: Decoder, directory: Path, what: str) -> float:
    """Their difference, if it is one of rounding."""
    apart = difference(model, directory)
    if not apart <= _TOLERANCE:
        raise RunError(
            f"{what}: our logits and transformers' differ by {apart:.2g} of the largest, more than {_TOLERANCE:g}; "
            "nothing was written"
        )
    return apart


@torch.no_grad()
def difference(model: Decoder, directory: Path) -> float:
    """The largest difference of two logits over the largest logit, on seeded random tokens, both in fp32."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    theirs = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True
    ).eval()
    shape = (_ROWS, min(_LENGTH, model.cfg.seq))
    tokens = torch.randint(model.cfg.vocab, shape, generator=torch.Generator().manual_seed(0))
    a, b = model.eval()(tokens), theirs(tokens).logits
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-6))
