"""Count what LoRA trains: adapters beside the matrices of the blocks, and the head of a row.

All other weights are frozen. A frozen matrix costs 4 FLOPs per parameter and token instead of 6,
because no gradient of the matrix itself is computed.
"""

from functools import lru_cache
from typing import assert_never

from pipeline.config.parts import FFN, GQA, MLA
from pipeline.config.schema import Lora
from pipeline.config.shape import Model
from pipeline.planner.count import Flops, params, row_matrix


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
    """Inputs + outputs of every linear layer with an adapter: each once, or as often as a token of
    the decoder uses it. The source is counted as if it had as many tokens."""
    once = 1 if model.shares("decoder") and not used else model.layers
    found = _sides(model, crosses=model.source_layers > 0) * once
    if model.source_layers:
        once = 1 if model.shares("encoder") and not used else model.source_layers
        found += _sides(model, crosses=False) * once
    return found + [*_sides(model, crosses=False), 3 * model.width] * model.mtp


def adapters(model: Model) -> int:
    """Number of adapters whose results exist at the same time."""
    return len(_adapted(model, used=True))


def _row_head(model: Model) -> int:
    if not model.row_classes:
        return 0
    biases = model.width + model.row_classes if model.stack == "encoder" else 0
    return row_matrix(model) + biases


def trained_params(model: Model, lora: Lora) -> int:
    return lora.rank * sum(_adapted(model, used=False)) + _row_head(model)


def frozen_params(model: Model) -> int:
    return params(model).total - _row_head(model)


def adapted_flops(flops: Flops, model: Model, lora: Lora) -> Flops:
    """Return the FLOPs of training on one token from those of training all weights."""
    row = row_matrix(model) // model.seq
    learned = lora.rank * sum(_adapted(model, used=True)) + row
    frozen = flops.matmul // 6 - row
    return Flops(4 * frozen + 6 * learned, flops.attention, flops.recompute)
