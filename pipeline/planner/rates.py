"""Learning rates, batch, decay and warmup as functions of model size, tokens and batch.

AdamW's rules are those of OLMo-core's ladder, with Step Law's for short runs, and for post-norm
models those of the first transformer. Muon's rules were measured on one H200 (docs/RECIPE.md has
the table). All rules are starting points for runs of any size and length.
"""

import math
from dataclasses import dataclass
from typing import assert_never

from pipeline.config.optimizer import AdamWSpec, MuonSpec
from pipeline.config.parts import GQA
from pipeline.config.schema import RunSpec
from pipeline.config.shape import Model
from pipeline.planner.count import Params

_N0 = 108e6  # the size at which OLMo-core's ladder was tuned
_MOST_BATCH = 2**26  # tokens; the largest published batch, DeepSeek-V3's, has 63M


@dataclass(frozen=True, slots=True)
class Setting:
    """A number that follows from a rule."""

    value: float
    rule: str


Settings = dict[str, Setting]  # by dotted key below `optim`


def optim_settings(spec: RunSpec, count: Params, steps: int, batch: int) -> Settings:
    """Return every setting of the optimizer and its schedule that may be "auto"."""
    match spec.optim.optimizer:
        case AdamWSpec():
            found = _adamw(count.active_non_embedding, steps, batch)
            seq = spec.model.seq
            predicted = (spec.objective.most_targets(seq) or seq) / seq * batch
            # The tokens of an encoder–decoder's source train parameters, too.
            read = steps * batch * (seq + spec.model.source_length) / seq
            found["lr"] = adamw_peak(spec.model, count, read, predicted)
            if spec.model.placement == "post":
                rule = "4000, at most a quarter of the run: arXiv 1706.03762"
                found["schedule.warmup_steps"] = Setting(max(1, min(4000, steps // 4)), rule)
            return found
        case MuonSpec():
            peak = spec.optim.lr
            if peak == "auto":
                normalized = normalizes(spec.model)
                peak = muon_lr(steps * batch, spec.model.layers, normalized=normalized)
            return _muon(peak, spec.model, steps)
        case _:
            assert_never(spec.optim.optimizer)


def batch_rule(spec: RunSpec, count: Params, tokens: float | None) -> Setting:
    """Return the global batch in tokens. Without `tokens`, the run's length is spec.train.steps."""
    match spec.optim.optimizer:
        case AdamWSpec():
            rule = "2048·160·(N/108M)^(2/3), N without embeddings, at most 2^26: OLMo-core's ladder"
            return Setting(adamw_batch(count.active_non_embedding), rule)
        case MuonSpec():
            if tokens is None:
                # Solving tokens = steps·c·tokens^(2/3), where c is the batch for one token.
                tokens = ((spec.train.steps or 1) * muon_batch(1)) ** 3
            return Setting(muon_batch(tokens), "32,768·(tokens/35M)^(2/3), at most 2^26: measured")
        case _:
            assert_never(spec.optim.optimizer)


# --- AdamW


def adamw_batch(n: float) -> float:
    return float(min(_MOST_BATCH, 2048 * 160 * (n / _N0) ** (2 / 3)))


def adamw_lr(n: float, tokens_per_param: float, predicted: float | None = None) -> float:
    """Return the peak rate for a batch with this many `predicted` tokens, or for the rule's batch.

    The ladder was tuned at 20 tokens per parameter, and shorter runs need lower rates: Step Law's
    best rate grows with tokens^0.307 (arXiv 2503.04715). Gradients of smaller batches are noisier,
    so the rate falls with the root of the batch (arXiv 2205.10287). This begins at two thirds of
    the rule's batch, so that rounding to whole rows has no effect. Below 2M parameters the rate
    does not grow further, as measured with `tiny` (docs/RECIPE.md)."""
    multiple = tokens_per_param / 20
    length = multiple**0.307 if multiple < 1 else multiple**-0.5
    share = 1.0 if predicted is None else min(1.0, 1.5 * predicted / adamw_batch(n))
    return _digits(0.5 * 0.0047 * (max(n, 2e6) / _N0) ** (-1 / 3) * length * share**0.5)


def adamw_peak(
    model: Model, count: Params, tokens: float, predicted: float | None = None
) -> Setting:
    """Return the peak rate of a model.

    Norms after the residual sums need a lower rate and a longer warmup than norms before them. A
    RoBERTa of 8 layers did not learn at the rate of OLMo-core's rule (docs/RECIPE.md). At a width
    of 768 the rate is 5.7e-4; RoBERTa-base used 6e-4."""
    if model.placement == "post":
        lr = _digits((4000 * model.width) ** -0.5)
        return Setting(lr, "(4000·width)^(−1/2): arXiv 1706.03762")
    lr = adamw_lr(count.active_non_embedding, tokens / count.scaling, predicted)
    rule = (
        "½·0.0047·(N/108M)^(−1/3), N ≥ 2M: OLMo-core's ladder; at x tokens per parameter "
        "·(x/20)^0.307 below 20, /√(x/20) above; ·√(1.5·predicted tokens/rule's batch), at most 1"
    )
    return Setting(lr, rule)


def _adamw(n: int, steps: int, batch: int) -> Settings:
    # One token per parameter, but at most 2,000 steps and a tenth of the run.
    warmup = max(1, min(n // batch, 2000, steps // 10))
    return {
        "optimizer.beta2": Setting(
            0.95 if batch >= 524_288 else 0.99,
            "0.95, and 0.99 below 524,288 tokens per batch: OLMo-core's ladder",
        ),
        "schedule.warmup_steps": Setting(
            warmup, "N tokens, at most 2000 steps and a tenth of the run: OLMo-core's ladder"
        ),
    }


# --- Muon


def muon_batch(tokens: float) -> float:
    return float(min(_MOST_BATCH, 32_768 * (tokens / 35e6) ** (2 / 3)))


def normalizes(model: Model) -> bool:
    """Return whether queries and keys are normalized. Those of latent attention are not."""
    return isinstance(model.attention, GQA) and model.attention.qk_norm


def muon_lr(tokens: float, layers: int = 8, *, normalized: bool = True) -> float:
    """Return the peak rate of the matrices. Orthogonalized updates have the same size at every
    width, so the best rate hardly depends on it. Longer runs and deeper models need lower rates,
    and so do models without norms of queries and keys, whose scores grow with the matrices."""
    deep = min(1.0, (8 / layers) ** 0.25)  # sizes with up to 8 layers were measured on a GPU
    share = 1.0 if normalized else 0.5  # measured with `tiny` and `1m` (docs/LOG.md)
    return _digits(min(0.06, 0.045 * (50e6 / tokens) ** 0.15) * deep * share)


def _muon(lr: float, model: Model, steps: int) -> Settings:
    # The rates of AdamW's groups are divided by √width (nanochat), the matrices' rate is not.
    narrow = math.sqrt(768 / model.width)
    if model.tied:
        embedding = Setting(_digits(0.8 * narrow), "0.8·√(768/width): measured, with a tied head")
    else:
        embedding = Setting(_digits(15 * narrow), "15·√(768/width): nanochat")
    return {
        "lr": Setting(
            lr,
            "0.045·(50M/tokens)^0.15, at most 0.06, ·(8/layers)^0.25 above 8 layers, ·½ without "
            "norms of queries and keys: measured at 13M to 285M tokens, and 2 to 32 layers",
        ),
        "optimizer.embedding_rate": embedding,
        "optimizer.head_rate": Setting(_digits(0.4 * narrow), "0.4·√(768/width): nanochat"),
        "optimizer.vector_rate": Setting(_digits(0.4 * narrow), "the same as head_rate"),
        # Updates older than a fifth of the run lose their effect. A step decays at most a tenth.
        "optimizer.decay": Setting(
            _digits(5 / (lr * max(steps, 50))), "5/(rate·steps), steps ≥ 50: arXiv 2405.13698"
        ),
        "optimizer.beta1": Setting(0.8, "nanochat"),
        "optimizer.beta2": Setting(0.96, "nanochat"),
        "schedule.warmup_steps": Setting(
            max(1, min(40, steps // 10)), "40, at most a tenth of the run: nanochat"
        ),
    }


def _digits(value: float) -> float:
    """Round to three digits, because these are rules of thumb."""
    return float(f"{value:.3g}")
