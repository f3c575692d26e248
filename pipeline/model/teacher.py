"""The teacher of a distilled run: a frozen model beside the student (config/distill.py).

B batch · S sequence · W width
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.config.distill import Distill
from pipeline.model.side import Helper, Inputs
from pipeline.objective.loss import Soft


class Teacher:
    """Not a module, so that the weights of the frozen model are neither sharded nor saved."""

    def __init__(self, model: Helper, settings: Distill) -> None:
        self.model = model
        self.settings = settings

    @torch.no_grad()
    def __call__(self, inputs: Inputs) -> "Taught":
        return Taught(self, self.model.hidden(inputs))


class Taught(NamedTuple):
    """A teacher's result for the student's input."""

    teacher: Teacher
    h_BSW: Tensor  # last hidden states

    @torch.no_grad()
    def soft(self, places_BK: Tensor | None) -> Soft:
        """Return the predictions at all tokens, or at some places of each row."""
        model = self.teacher.model
        h_BSW = self.h_BSW
        if places_BK is not None:
            h_BSW = h_BSW.gather(1, places_BK[..., None].expand(-1, -1, h_BSW.shape[-1]))
        if model.transform is not None:
            h_BSW = model.transform(h_BSW)
        head = model.head
        settings = self.teacher.settings
        h_TW = (h_BSW * head.scale).flatten(0, 1)
        weights = (settings.temperature, settings.soft, settings.hard)
        return Soft(h_TW, head.weight, head.bias, head.softcap, *weights)

    def angle(self, h_BSW: Tensor) -> Tensor:
        """Return the weighted loss of the hidden states: 1 − cosine, as a mean over the tokens."""
        cosine_BS = torch.cosine_similarity(h_BSW.float(), self.h_BSW.float(), dim=-1)
        return self.teacher.settings.hidden * (1 - cosine_BS.mean())
