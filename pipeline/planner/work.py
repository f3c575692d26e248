"""Count the FLOPs of a run: those of its model, and those that other parts of the run add."""

from dataclasses import replace

from pipeline.config.parts import Recompute
from pipeline.config.schema import RunSpec
from pipeline.config.shape import Model
from pipeline.planner.count import Flops, flops_per_token


def training_flops(spec: RunSpec, *, recompute: Recompute = False) -> Flops:
    """FLOPs of training on one token, as `count.py` defines them. A teacher's forward pass is a
    third of what its training would cost."""
    flops = flops_per_token(spec.model, recompute=recompute)
    teacher = teacher_model(spec)
    if teacher is None:
        return flops
    whole = flops_per_token(teacher)
    return replace(
        flops,
        matmul=flops.matmul + whole.matmul // 3,
        attention=flops.attention + whole.attention // 3,
    )


def teacher_model(spec: RunSpec) -> Model | None:
    """The teacher of a distilled run, which reads rows of the student's length."""
    if spec.distill is None or spec.distill.model is None:
        return None
    lengths = {"seq": spec.model.seq, "source_seq": spec.model.source_seq}
    return spec.distill.model.model_copy(update=lengths)
