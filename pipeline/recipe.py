"""The numbers that follow from the size: a config with "auto" in it becomes one with numbers only.

Sources are beside each default in configs/base.toml. N here is the active non-embedding
parameters, as in OLMo-core's ladder.
"""

import math
from typing import Any

from pipeline.account import flops_per_token, params
from pipeline.config.load import merge, validate
from pipeline.config.parts import MoE
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError

_MOST_TOKENS = 1e18  # a hundred thousand times what anyone has
_N0 = 108e6  # the size OLMo-core's ladder was tuned at


def resolve(config: RunConfig, *, ranks: int, gpu: bool) -> RunConfig:
    """Fill in every "auto" for a run on `ranks` processes; refuse what cannot be cut evenly."""
    model, train, ranks = config.model, config.train, config.readers(ranks)
    count = params(model)
    n = count.active_non_embedding
    batch_tokens = _batch_tokens(config, n, ranks)
    rows = batch_tokens // model.seq
    steps = _steps(config, batch_tokens)
    micro_batch = _micro_batch(config, rows, ranks)
    warmup = config.optim.schedule.warmup_steps
    dtype = ("bf16" if gpu else "fp32") if train.dtype == "auto" else train.dtype
    over: dict[str, Any] = {
        "train": {
            "steps": steps,
            "tokens": None,
            "flops": None,
            "batch_tokens": batch_tokens,
            "micro_batch": micro_batch,
            "dtype": dtype,
            "loss_chunk": _loss_chunk(model.vocab, gpu=gpu) if train.loss_chunk == "auto" else train.loss_chunk,
            "compile": _compile(config, dtype, gpu=gpu),
            "eval_every": max(25, steps // 20) if train.eval_every == "auto" else train.eval_every,
            "save_every": max(50, steps // 10) if train.save_every == "auto" else train.save_every,
        },
        "optim": {
            "lr": lr(n, steps * batch_tokens / count.scaling) if config.optim.lr == "auto" else config.optim.lr,
            "optimizer": {"beta2": _beta2(config, batch_tokens)},
            "schedule": {"warmup_steps": _warmup(n, steps, batch_tokens) if warmup == "auto" else warmup},
        },
    }
    return validate(RunConfig, merge(config.model_dump(), over))


def _compile(config: RunConfig, dtype: str, *, gpu: bool) -> bool:
    routed_fp32 = isinstance(config.model.ffn, MoE) and dtype == "fp32"  # torch's compiler takes bf16 experts alone
    if config.train.compile == "auto":
        return gpu and not routed_fp32
    if config.train.compile and routed_fp32:
        raise ConfigError("train.compile=true with routed experts needs train.dtype=bf16; or set train.compile=false")
    return config.train.compile


def _loss_chunk(vocab: int, *, gpu: bool) -> int:
    """Each chunk adds to the head's whole gradient: few of them on a GPU, as long as the logits stay below 3 GB. On a
    CPU logits of 8 MB, which it has in its cache, and which malloc keeps: new pages cost more than the arithmetic."""
    return max(1024, min(8192, 2**28 // vocab)) if gpu else max(64, min(2048, 2**21 // vocab))


def rule(n: float, tokens: float, seq: int = 2048) -> tuple[float, int]:
    """Peak rate and batch in tokens for n parameters on so many tokens, whatever their shape."""
    return lr(n, tokens / n), seq * _rows(n, seq)


def lr(n: float, tokens_per_param: float) -> float:
    """Peak rate at 20 tokens per parameter; longer runs × 1/√multiple. Three digits: it is a rule of thumb."""
    multiple = max(1.0, tokens_per_param / 20)
    return float(f"{0.5 * 0.0047 * (n / _N0) ** (-1 / 3) / multiple**0.5:.3g}")


def _beta2(config: RunConfig, batch_tokens: int) -> float:
    beta2 = config.optim.optimizer.beta2
    if beta2 != "auto":
        return beta2
    return 0.95 if batch_tokens >= 524_288 else 0.99


def _warmup(n: int, steps: int, batch_tokens: int) -> int:
    return max(1, min(n // batch_tokens, 2000, steps // 10))


def _batch_tokens(config: RunConfig, n: int, ranks: int) -> int:
    """The global batch: a given one must cut evenly, a chosen one is rounded until it does."""
    seq, asked = config.model.seq, config.train.batch_tokens
    if asked == "auto":
        rows = _rows(n, seq)
        return seq * (rows if rows % ranks == 0 else max(1, round(rows / ranks)) * ranks)
    micro = config.train.micro_batch
    unit = seq * ranks * (1 if micro == "auto" else micro)
    if asked % unit:
        raise ConfigError(
            f"train.batch_tokens={asked:,} is not a multiple of {unit:,} (ranks {ranks} × micro_batch × seq {seq}); "
            f"try {max(1, round(asked / unit)) * unit:,}"
        )
    return asked


def _rows(n: float, seq: int) -> int:
    """The nearest 2^k or 3·2^k, at least 8: such a batch cuts evenly over most worlds, so they train the same one."""
    rows = 2048 * 160 * (n / _N0) ** (2 / 3) / seq
    steps = [m << k for k in range(3, 24) for m in (1, 3)]
    return min(steps, key=lambda s: abs(math.log(s / rows)))


def _micro_batch(config: RunConfig, rows: int, ranks: int) -> int:
    micro, per_rank = config.train.micro_batch, rows // ranks
    if micro == "auto":  # about 16k tokens fill a GPU at these widths, and fit it
        most = max(1, 16384 * config.parallel.sp // config.model.seq)
        return max(m for m in range(1, min(most, per_rank) + 1) if per_rank % m == 0)
    if per_rank % micro:
        raise ConfigError(
            f"train.micro_batch={micro} does not divide the {per_rank} sequences of a rank "
            f"(batch_tokens / seq / ranks); try {max(m for m in range(1, micro + 1) if per_rank % m == 0)}"
        )
    return micro


def _steps(config: RunConfig, batch_tokens: int) -> int:
    train, model = config.train, config.model
    if train.steps is not None:
        return train.steps
    if train.flops is not None:
        tokens = train.flops / flops_per_token(model).model
    elif train.tokens is not None:
        tokens = float(train.tokens)
    else:
        tokens = train.tokens_per_param * params(model).scaling
    if not tokens < _MOST_TOKENS:
        raise ConfigError(f"a run of {tokens:.3g} tokens has no end; lower --tokens, --flops or train.tokens_per_param")
    return max(1, round(tokens / batch_tokens))
