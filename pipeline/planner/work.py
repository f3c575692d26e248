"""Count the FLOPs of a run: those of its model, and those that other parts of the run add."""

from pipeline.config.parts import Recompute
from pipeline.config.schema import RunSpec
from pipeline.config.shape import Model
from pipeline.planner.count import CONVENTION, Flops, flops_per_token
from pipeline.planner.lora import adapted_flops


def training_flops(spec: RunSpec, *, recompute: Recompute = False) -> Flops:
    """FLOPs of training on one token, as `count.py` defines them. A head reads the predicted tokens
    only. A teacher's forward pass is a third of what its training would cost."""
    model = spec.model
    predicted = spec.objective.most_targets(model.seq)
    generator = model.generator_model
    # A model that finds replaced tokens predicts for all of them, its generator for some.
    own = None if generator else predicted
    flops = flops_per_token(model, recompute=recompute, predicted=own)
    if generator is not None:
        more = flops_per_token(generator, recompute=recompute, predicted=predicted)
        flops = _sum(flops, more)
    if spec.lora is not None:
        flops = adapted_flops(flops, model, spec.lora)
    teacher = teacher_model(spec)
    if teacher is not None:
        whole = flops_per_token(teacher, predicted=predicted)
        flops = _sum(flops, Flops(whole.matmul // 3, whole.attention // 3, 0))
    return flops


def _sum(a: Flops, b: Flops) -> Flops:
    return Flops(a.matmul + b.matmul, a.attention + b.attention, a.recompute + b.recompute)


def convention(spec: RunSpec) -> str:
    """What the FLOPs of a run count. Laws mix only runs that are counted alike."""
    few = spec.objective.most_targets(spec.model.seq) is not None
    text = f"{CONVENTION}; head for predicted tokens only" if few else CONVENTION
    if not spec.model.causal:
        text += "; attention in both directions counts twice"
    return text if spec.lora is None else f"{text}; 4 instead of 6 for frozen parameters (LoRA)"


def teacher_model(spec: RunSpec) -> Model | None:
    """The teacher of a distilled run, which reads rows of the student's length."""
    if spec.distill is None or spec.distill.model is None:
        return None
    lengths = {"seq": spec.model.seq, "source_seq": spec.model.source_seq}
    return spec.distill.model.model_copy(update=lengths)
