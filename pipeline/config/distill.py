"""Distillation: a run whose model also learns from the predictions of a trained one.

The loss is hard·(loss of the targets) + soft·T²·KL(teacher ‖ student), with both predictions at
temperature T (arXiv 1503.02531), + hidden·(1 − cosine of the last hidden states), a term of
DistilBERT (arXiv 1910.01108, where hard, soft and hidden are 2, 5 and 1).
"""

from typing import Self

from pydantic import model_validator

from pipeline.config.objective import Objective
from pipeline.config.parts import Frozen, Learned, Rate, Weight, require
from pipeline.config.shape import Model

# Kinds that need no special ids, so a teacher of one may teach another.
_NEXT_TOKEN = ("causal", "prefix", "answers")


class Distill(Frozen):
    teacher: str  # a run directory or a checkpoint; every rank holds all of its weights
    temperature: Rate = 2.0
    soft: Weight = 0.5  # weight of the divergence from the teacher, at the predicted tokens
    hard: Weight = 0.5  # weight of the objective's own loss
    hidden: Weight = 0.0  # weight of the angle between the last hidden states, at every token
    model: Model | None = None  # the teacher's; a new run reads it from the teacher's config

    @model_validator(mode="after")
    def _learns_from_the_teacher(self) -> Self:
        used = self.soft > 0 or self.hidden > 0
        text = f"soft={self.soft} and hidden={self.hidden} do not use the teacher"
        require(used, f"{text}; raise one of them, or remove distill")
        return self


def teacher_kind_refusal(teacher: Objective, objective: Objective) -> str:
    """Return why a teacher with this objective cannot serve another one; empty if it can."""
    kind = teacher.kind
    if kind == objective.kind or (kind in _NEXT_TOKEN and objective.kind in _NEXT_TOKEN):
        return ""
    text = f'distill.teacher was trained with objective.kind="{kind}", not "{objective.kind}"'
    return f"{text}; give another teacher, or --set objective.kind={kind}"


def refuse_distill(
    distill: Distill, model: Model, objective: Objective, *, sp: int, packed: bool
) -> str:
    """Return why a run cannot be distilled from its teacher, and the remedy; empty if it can."""
    key = f"distill.teacher={distill.teacher}"
    if objective.kind in ("replaced", "labels"):
        text = f'{key} conflicts with objective.kind="{objective.kind}", which predicts no tokens'
        return f"{text}; remove distill"
    if sp > 1:
        return f"{key} conflicts with parallel.sp={sp}: teachers read whole rows; use --sp 1"
    if packed and distill.hidden:
        text = f'distill.hidden={distill.hidden} conflicts with padding of data.packing="best-fit"'
        return f"{text}; set distill.hidden=0"
    teacher = distill.model
    if teacher is None:
        return ""  # not yet read
    for name in ("stack", "vocab", *(("width",) if distill.hidden else ())):
        ours = getattr(model, name)
        theirs = getattr(teacher, name)
        if ours != theirs:
            remedy = "set distill.hidden=0" if name == "width" else f"set model.{name}={theirs}"
            return f"{key} has model.{name}={theirs} and the student {ours}; {remedy}"
    if isinstance(teacher.position, Learned) and teacher.learned_positions < max(
        model.seq, model.source_length
    ):
        text = f"{key} has learned positions for {teacher.learned_positions} tokens"
        return f"{text}, fewer than a row; set model.seq={teacher.seq}"
    return ""
