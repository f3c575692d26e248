"""The teacher of a distilled run: a frozen model beside the student (config/distill.py).

B batch · S sequence · W width
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pipeline.config.distill import Distill
from pipeline.model.side import Inputs
from pipeline.objective.loss import Soft

if TYPE_CHECKING:  # a Decoder may have a teacher, which is a Decoder
    from pipeline.model.stack import Decoder


class Taught(NamedTuple):
    """What a teacher made of the student's input."""

    h_BSW: Tensor  # last hidden states
    soft: Soft  # predictions
    hidden: float  # weight of the hidden states

    def angle(self, h_BSW: Tensor) -> Tensor:
        """1 − cosine of the student's and the teacher's hidden states, mean over the tokens."""
        cosine_BS = torch.cosine_similarity(h_BSW.float(), self.h_BSW.float(), dim=-1)
        return self.hidden * (1 - cosine_BS.mean())


class Teacher:
    """A plain object, not a module: its weights are neither trained, divided nor saved."""

    def __init__(self, model: "Decoder", settings: Distill) -> None:
        self._model = model.requires_grad_(False).eval()
        self._settings = settings

    @torch.no_grad()
    def __call__(self, inputs: Inputs) -> Taught:
        h_BSW = self._model.states(inputs).h_BSW
        read_BSW = h_BSW
        if self._model.transform is not None:
            read_BSW = self._model.transform(h_BSW)
        head = self._model.head
        asked = self._settings
        soft = Soft(
            (read_BSW * head.scale).flatten(0, 1),
            head.weight,
            head.bias,
            head.softcap,
            asked.temperature,
            asked.soft,
            asked.hard,
        )
        return Taught(h_BSW, soft, asked.hidden)
