"""Count a run's FLOPs, with generator, teacher and LoRA, and the parameters that LoRA trains."""

from functools import lru_cache
from typing import assert_never

from pipeline.config.parts import FFN, GQA, MLA, Recompute
from pipeline.config.schema import Lora, RunSpec
from pipeline.config.shape import Model
from pipeline.planner.count import CONVENTION, Flops, flops_per_token, params, row_head


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
        flops += flops_per_token(generator, recompute=recompute, predicted=predicted)
    if spec.lora is not None:
        flops = adapted_flops(flops, model, spec.lora)
    teacher = teacher_model(spec)
    if teacher is not None:
        whole = flops_per_token(teacher, predicted=predicted)
        flops += Flops(whole.matmul // 3, whole.attention // 3, 0)
    return flops


def convention(spec: RunSpec) -> str:
    """Return what the FLOPs of a run include. A law mixes only runs with the same convention."""
    few = spec.objective.most_targets(spec.model.seq) is not None
    text = f"{CONVENTION}; head for predicted tokens only" if few else CONVENTION
    if not spec.model.causal:
        text += "; attention in both directions counts twice"
    return text if spec.lora is None else f"{text}; 4 instead of 6 for frozen parameters (LoRA)"


def teacher_model(spec: RunSpec) -> Model | None:
    """Return the teacher of a distilled run, which reads rows of the student's length."""
    if spec.distill is None or spec.distill.model is None:
        return None
    lengths = {"seq": spec.model.seq, "source_seq": spec.model.source_seq}
    return spec.distill.model.model_copy(update=lengths)


# LoRA trains adapters beside the matrices of the blocks, and the row head. All other weights are
# frozen. A frozen matrix costs 4 FLOPs per parameter and token instead of 6, because no gradient of
# the matrix itself is computed. An adapter has rank · (inputs + outputs) parameters.


def _sides(model: Model, *, crosses: bool) -> list[int]:
    """Return inputs + outputs of each linear layer of a block (fused projections are one layer)."""
    width = model.width
    a = model.attention
    match a:
        case GQA():
            keys = a.kv_heads * a.head_dim
            queries = a.heads * a.head_dim
            sides = [width + queries + 2 * keys, queries + width]
            if crosses:
                sides += [width + queries, width + 2 * keys, queries + width]
        case MLA():
            heads = a.heads * a.score_dim
            sides = [width + a.q_rank, a.q_rank + heads] if a.q_rank else [width + heads]
            sides += [width + a.kv_rank + a.rope_dim]
            sides += [a.kv_rank + a.heads * (a.nope_dim + a.v_dim), a.heads * a.v_dim + width]
        case _:
            assert_never(a)
    f = model.ffn
    assert isinstance(f, FFN), "experts have no adapters"
    return [*sides, width + (2 if f.gated else 1) * f.hidden, f.hidden + width]


@lru_cache(maxsize=256)
def _adapted(model: Model, *, used: bool) -> list[int]:
    """Return inputs + outputs of every linear layer with an adapter: once or, if `used`, as often
    as a token of the decoder uses it. The source counts as if it had as many tokens."""
    blocks = 1 if model.shares("decoder") and not used else model.layers
    found = _sides(model, crosses=model.source_layers > 0) * blocks
    if model.source_layers:
        blocks = 1 if model.shares("encoder") and not used else model.source_layers
        found += _sides(model, crosses=False) * blocks
    return found + [*_sides(model, crosses=False), 3 * model.width] * model.mtp


def adapters(model: Model) -> int:
    """Number of adapters whose results exist at the same time."""
    return len(_adapted(model, used=True))


def trained_params(model: Model, lora: Lora | None) -> int:
    if lora is None:
        return params(model).total
    return lora.rank * sum(_adapted(model, used=False)) + sum(row_head(model))


def frozen_params(model: Model, lora: Lora | None) -> int:
    return 0 if lora is None else params(model).total - sum(row_head(model))


def adapted_flops(flops: Flops, model: Model, lora: Lora) -> Flops:
    """Convert the FLOPs of training all weights on one token to those of training with LoRA."""
    row = row_head(model)[0] // model.seq
    learned = lora.rank * sum(_adapted(model, used=True)) + row
    frozen = flops.matmul // 6 - row
    return Flops(4 * frozen + 6 * learned, flops.attention, flops.recompute)
