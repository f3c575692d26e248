"""Derive settings from the size: `fill` turns a RunSpec into a RunConfig.

The rules of the optimizer are in rates.py, and `launch show` prints each with its source.
"""

import math
from functools import reduce
from typing import Any

from pipeline.config.dump import flat
from pipeline.config.layers import load, merge, nested, validate
from pipeline.config.optimizer import MuonSpec
from pipeline.config.parts import Dtype, MoE
from pipeline.config.schema import RunConfig, RunSpec
from pipeline.errors import ConfigError
from pipeline.planner import rates
from pipeline.planner.count import params
from pipeline.planner.memory import Layout, model_memory
from pipeline.planner.work import training_flops

_MOST_TOKENS = 1e18  # 30,000 times the tokens of the largest published corpora
# Activations that fill a GPU: those of 1b with 16k tokens.
_ACTIVATION_BYTES = 20 * 2**30


def fill(spec: RunSpec, ranks: int, *, gpu: bool) -> RunConfig:
    """Replace every "auto". `check.faults` must have found no fault with these ranks."""
    count = params(spec.model)
    readers = ranks // spec.parallel.sp
    batch = batch_tokens(spec, readers)
    rows = batch // spec.model.seq // readers
    steps = _steps(spec, batch)
    dtype = choose_dtype(spec, gpu=gpu)
    optim = rates.optim_settings(spec, count, steps, batch)
    numbers: dict[str, Any] = {
        "train": {
            "steps": steps,
            "batch_tokens": batch,
            "micro_batch": _micro_batch(spec, rows, dtype, gpu=gpu),
            "dtype": dtype,
            "recompute": False,
            "loss_chunk": _loss_chunk(spec.model.vocab, gpu=gpu),
            "compile": gpu and compiles(spec, dtype),
            # Twenty evaluations and ten checkpoints per run.
            "eval_every": max(25, steps // 20),
            "save_every": max(50, steps // 10),
        },
        "optim": reduce(merge, (nested(key, setting.value) for key, setting in optim.items())),
        "parallel": {"zero": choose_zero(spec), "ep": 1},
    }
    given = spec.model_dump()
    length = {"steps": steps, "tokens": None, "flops": None}  # a RunConfig has only steps
    table = merge(merge(given, _where_auto(given, numbers)), {"train": length})
    return validate(RunConfig, table)


def derived(spec: RunSpec, config: RunConfig) -> list[dict[str, Any]]:
    """Return the key, the value and the rule of each setting of the recipe that may be "auto"."""
    count = params(spec.model)
    train = config.train
    optim = rates.optim_settings(spec, count, train.steps, train.batch_tokens)
    rules = {"train.batch_tokens": batch_setting(spec)}
    rules |= {f"optim.{key}": setting for key, setting in optim.items()}
    asked = flat(spec)
    values = flat(config)
    return [
        {"key": key, "value": values[key], "rule": found.rule if asked[key] == "auto" else "given"}
        for key, found in rules.items()
    ]


def _where_auto(given: dict[str, Any], numbers: dict[str, Any]) -> dict[str, Any]:
    """Return only the numbers whose setting is "auto"."""
    found = {}
    for key, value in numbers.items():
        if isinstance(value, dict):
            found[key] = _where_auto(given[key], value)
        elif given[key] == "auto":
            found[key] = value
    return found


def choose_dtype(spec: RunSpec, *, gpu: bool) -> Dtype:
    if spec.train.dtype != "auto":
        return spec.train.dtype
    return "bf16" if gpu and spec.parallel.engine == "deepspeed" else "fp32"


def choose_zero(spec: RunSpec) -> int:
    """Return the ZeRO stage for a run without a planned layout: the first that shards anything."""
    if spec.parallel.zero != "auto":
        return spec.parallel.zero
    return 0 if spec.parallel.engine == "accelerate" else max(1, spec.parallel.offload.least_zero)


def compiles(spec: RunSpec, dtype: Dtype) -> bool:
    """Return whether a model compiles: torch's compiler supports routed experts in bf16 only."""
    return not isinstance(spec.model.ffn, MoE) or dtype == "bf16"


def _loss_chunk(vocab: int, *, gpu: bool) -> int:
    """Return the number of tokens whose logits exist at the same time."""
    if gpu:  # few chunks, because each updates the head's whole gradient; logits below 3 GB
        return max(1024, min(8192, 2**28 // vocab))
    # 8 MB of logits fit into the cache, and malloc reuses the memory: new pages would be slow.
    return max(64, min(2048, 2**21 // vocab))


def rate_and_batch(
    n: float, tokens: float, recipe: str, arch: str | None = None
) -> tuple[float, int]:
    """Return the peak rate and the batch in tokens for a run of about n parameters, whose shape is
    not known. With a shape, AdamW's rules use the parameters without embeddings instead."""
    like = load(size="tiny", arch=arch, sets=[f"recipe={recipe}"])
    if isinstance(like.optim.optimizer, MuonSpec):
        lr = rates.muon_lr(tokens, normalized=rates.normalizes(like.model))
        batch = rates.muon_batch(tokens)
    else:
        lr = rates.adamw_lr(n, tokens / n)
        batch = rates.adamw_batch(n)
    return lr, 2048 * _whole_rows(batch / 2048)  # rows of the most common length


def batch_tokens(spec: RunSpec, readers: int) -> int:
    """Return the global batch: as given, or by rule, rounded to a multiple of the readers."""
    if spec.train.batch_tokens != "auto":
        return spec.train.batch_tokens
    seq = spec.model.seq
    rows = _whole_rows(batch_setting(spec).value / seq)
    if rows % readers:
        rows = max(1, round(rows / readers)) * readers
    return seq * rows


def batch_setting(spec: RunSpec) -> rates.Setting:
    """Return the batch by rule, before it is rounded to whole sequences."""
    return rates.batch_rule(spec, params(spec.model), _tokens(spec))


def _whole_rows(rows: float) -> int:
    """Return the nearest 2^k, at least 8, or 3·2^k, at least 24, which most world sizes divide."""
    candidates = [m << k for k in range(3, 24) for m in (1, 3)]  # up to 25 million
    return min(candidates, key=lambda each: abs(math.log(each / max(rows, 1))))


def _micro_batch(spec: RunSpec, rows: int, dtype: Dtype, *, gpu: bool) -> int:
    """Return the rows of a micro-batch. About 16k tokens of 1b fill a GPU and fit into its memory.
    Smaller models get more tokens, so that the host launches kernels in time (docs/LOG.md)."""
    sp = spec.parallel.sp
    most = max(1, 16384 * sp // spec.model.seq)
    if gpu:
        one = model_memory(spec.model, Layout(ranks=1, zero=1, sp=sp), dtype)
        most = max(most, _ACTIVATION_BYTES // one.activations)
    # A divisor, so that all micro-batches of a step have the same size.
    return max(m for m in range(1, min(most, rows) + 1) if rows % m == 0)


def _steps(spec: RunSpec, batch: int) -> int:
    tokens = spec.train.steps * float(batch) if spec.train.steps else _tokens(spec)
    assert tokens is not None
    if not tokens < _MOST_TOKENS:
        text = f"a run of {tokens:.3g} tokens is too long"
        raise ConfigError(f"{text}; lower --steps, --tokens, --flops or train.tokens_per_param")
    return spec.train.steps or max(1, round(tokens / batch))


def _tokens(spec: RunSpec) -> float | None:
    """Return the run's length in tokens; None if it is given in steps."""
    train = spec.train
    if train.steps is not None:
        return None
    if train.flops is not None:
        return train.flops / training_flops(spec).model
    if train.tokens is not None:
        return float(train.tokens)
    return train.tokens_per_param * params(spec.model).scaling
