"""The numbers that follow from the size: a config with "auto" in it becomes one with numbers only.

Sources are beside each default in configs/base.toml. N here is the active non-embedding
parameters, as in OLMo-core's ladder.
"""

import math
from typing import Any

from pipeline.config.dump import Change, flags
from pipeline.config.layers import merge, validate
from pipeline.config.parts import Dtype, MoE
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError
from pipeline.planner.count import flops_per_token, params
from pipeline.planner.memory import model_memory

_MOST_TOKENS = 1e18  # a hundred thousand times what anyone has
_N0 = 108e6  # the size OLMo-core's ladder was tuned at
_KEPT_BYTES = 20 * 2**30  # of activations: those of 1b in 16k tokens


def resolve(config: RunConfig, *, ranks: int, gpu: bool) -> RunConfig:
    """Fill in every "auto" for a run on `ranks` processes; refuse what cannot be cut evenly, all of it in one line."""
    faults, take, more = mend(config, ranks, gpu=gpu)
    if faults:
        raise ConfigError(
            f"{'; '.join(faults)}; try {flags(take, short=False)}{f', or {more} ranks' if more else ''}"
        )
    model, train, readers = config.model, config.train, ranks // config.parallel.sp
    count = params(model)
    n = count.active_non_embedding
    batch_tokens = _batch_tokens(config, readers)
    steps = _steps(config, batch_tokens)
    warmup = config.optim.schedule.warmup_steps
    dtype = _dtype(config, gpu=gpu)
    over: dict[str, Any] = {
        "train": {
            "steps": steps,
            "tokens": None,
            "flops": None,
            "batch_tokens": batch_tokens,
            "micro_batch": _micro_batch(
                config, batch_tokens // model.seq // readers, dtype, gpu=gpu
            ),
            "dtype": dtype,
            "loss_chunk": _loss_chunk(model.vocab, gpu=gpu)
            if train.loss_chunk == "auto"
            else train.loss_chunk,
            "compile": gpu and not _uncompiled(config, dtype)
            if train.compile == "auto"
            else train.compile,
            "eval_every": max(25, steps // 20) if train.eval_every == "auto" else train.eval_every,
            "save_every": max(50, steps // 10) if train.save_every == "auto" else train.save_every,
        },
        "optim": {
            "lr": lr(n, steps * batch_tokens / count.scaling)
            if config.optim.lr == "auto"
            else config.optim.lr,
            "optimizer": {"beta2": _beta2(config, batch_tokens)},
            "schedule": {
                "warmup_steps": _warmup(n, steps, batch_tokens) if warmup == "auto" else warmup
            },
        },
    }
    return validate(RunConfig, merge(config.model_dump(), over))


def mend(
    config: RunConfig, ranks: int, *, gpu: bool, keep: bool = False
) -> tuple[list[str], Change, int | None]:
    """What stands against a layout, the nearest settings against which nothing does, and of how many more ranks this
    is true as it is. A run that goes on is to `keep` its batch, whatever else gives way."""
    faults, take = _against(config, ranks, gpu=gpu)
    fewer = ranks
    while keep and fewer > 1 and "train.batch_tokens" in take:
        fewer -= 1
        take = {"nproc": fewer, **_against(config, fewer, gpu=gpu)[1]}
    asked = {"ep": config.parallel.ep, "sp": config.parallel.sp}.get(" ".join(take), 1)
    more = -(-ranks // asked) * asked
    return faults, take, more if more > ranks and not _against(config, more, gpu=gpu)[0] else None


def _against(config: RunConfig, ranks: int, *, gpu: bool) -> tuple[list[str], Change]:
    here, train, model, seq = config.parallel, config.train, config.model, config.model.seq
    faults, take = list[str](), Change()
    plain, least, dtype = (
        here.engine == "accelerate",
        here.offload.least_zero,
        _dtype(config, gpu=gpu),
    )
    if plain and least:
        faults.append("engine accelerate has no shards for parallel.offload to move")
        plain, take["engine"] = False, "deepspeed"
    if here.zero < least:
        faults.append(f"parallel.offload needs the shards of ZeRO-{least}, not zero={here.zero}")
        take["zero"] = least
    if plain and (here.zero or dtype == "bf16"):
        faults.append(
            f"engine accelerate is plain fp32 DDP, not zero={here.zero} with dtype={dtype}"
        )
        take["zero"], take["dtype"] = 0, (dtype := "fp32")
    if train.compile is True and _uncompiled(config, dtype):
        faults.append("train.compile=true with routed experts needs train.dtype=bf16")
        take["train.compile"] = False
    degrees, shares = [1] if plain else model.degrees(ranks), model.shares(ranks)
    if here.ep not in degrees:
        if plain:
            faults.append(f"engine accelerate puts every expert on every rank, not ep={here.ep}")
        elif isinstance(model.ffn, MoE):
            whom = f"the {ranks} ranks" if ranks % here.ep else f"experts={model.ffn.experts}"
            faults.append(f"parallel.ep={here.ep} does not divide {whom}")
        else:
            faults.append(f"parallel.ep={here.ep} needs a routed model, such as --arch moe")
        take["ep"] = min(degrees, key=lambda n: abs(math.log(n / here.ep)))
    if here.sp not in shares:
        whom = (
            f"the {ranks} ranks"
            if ranks % here.sp
            else f"heads={model.attention.heads} and seq={seq}"
        )
        faults.append(f"parallel.sp={here.sp} does not divide {whom}")
        take["sp"] = min(shares, key=lambda n: abs(math.log(n / here.sp)))
    readers = ranks // int(take.get("sp", here.sp))
    batch, unit = _batch_tokens(config, readers), seq * readers
    if batch % unit:
        faults.append(
            f"train.batch_tokens={batch:,} is not a multiple of {unit:,} (ranks {readers} × seq {seq})"
        )
        take["train.batch_tokens"] = batch = max(1, round(batch / unit)) * unit
    if train.micro_batch != "auto" and (rows := batch // unit) % train.micro_batch:
        faults.append(
            f"train.micro_batch={train.micro_batch} does not divide the {rows} sequences of a rank"
        )
        take["train.micro_batch"] = max(m for m in range(1, train.micro_batch + 1) if rows % m == 0)
    return faults, take


def _dtype(config: RunConfig, *, gpu: bool) -> Dtype:
    return ("bf16" if gpu else "fp32") if config.train.dtype == "auto" else config.train.dtype


def _uncompiled(config: RunConfig, dtype: Dtype) -> bool:
    """torch's compiler takes experts in bf16 alone."""
    return isinstance(config.model.ffn, MoE) and dtype == "fp32"


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


def _batch_tokens(config: RunConfig, readers: int) -> int:
    """The global batch, as given or chosen and rounded until it cuts evenly."""
    seq, asked = config.model.seq, config.train.batch_tokens
    if asked != "auto":
        return asked
    rows = _rows(params(config.model).active_non_embedding, seq)
    return seq * (rows if rows % readers == 0 else max(1, round(rows / readers)) * readers)


def _rows(n: float, seq: int) -> int:
    """The nearest 2^k or 3·2^k, at least 8: such a batch cuts evenly over most worlds, so they train the same one."""
    rows = 2048 * 160 * (n / _N0) ** (2 / 3) / seq
    steps = [m << k for k in range(3, 24) for m in (1, 3)]
    return min(steps, key=lambda s: abs(math.log(s / rows)))


def _micro_batch(config: RunConfig, rows: int, dtype: Dtype, *, gpu: bool) -> int:
    """About 16k tokens fill a GPU at the widths of 1b, and fit it; a smaller model takes as many as keep no more than
    they do, since its kernels are over before the host has started the next (docs/LOG.md)."""
    if config.train.micro_batch != "auto":
        return config.train.micro_batch
    sp = config.parallel.sp
    most = max(1, 16384 * sp // config.model.seq)
    if gpu:
        row = model_memory(
            config.model, dtype=dtype, zero=1, ranks=1, micro_batch=1, loss_chunk=1, sp=sp
        ).activations
        most = max(most, _KEPT_BYTES // row)
    return max(m for m in range(1, min(most, rows) + 1) if rows % m == 0)


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
        raise ConfigError(
            f"a run of {tokens:.3g} tokens has no end; lower --tokens, --flops or train.tokens_per_param"
        )
    return max(1, round(tokens / batch_tokens))
