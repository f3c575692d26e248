"""Every parameter, FLOP and byte, in integers and without torch. Planner, meter, sweep and fit all quote these.

FLOPs are those of training one token: a multiply-add counts 2, the backward pass twice the forward. Matmuls cost
6 × their parameters, the head included and the input embedding, a lookup, not; attention costs
6·layers·heads·head_dim·seq, the causal half of 12·…, since the kernel skips what the mask hides.
"""

from dataclasses import dataclass
from typing import Literal

from pipeline.config.schema import FFN, GQA, Dtype, Model

CONVENTION = (
    "FLOPs = 6·matmul parameters (head in, input embedding out) + 6·layers·heads·head_dim·seq (causal attention); "
    "N = parameters without input embedding, with head"
)

BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, slots=True)
class Params:
    """`active` are those that one token meets; `scaling` is the N of every fit: with head, without input embedding,
    which keeps small sizes on the same line as large ones (arXiv 2406.19146)."""

    embedding: int
    head: int  # 0 when tied: the embedding serves twice
    attention: int
    ffn: int
    norm: int
    active: int
    scaling: int

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.attention + self.ffn + self.norm

    @property
    def non_embedding(self) -> int:
        return self.attention + self.ffn + self.norm


def params(model: Model) -> Params:
    embedding = model.vocab * model.width
    attention, qk_norm = _attention_params(model.width, model.attention)
    ffn = _ffn_params(model.width, model.ffn)
    norm = model.layers * (2 * model.width + qk_norm) + model.width
    blocks = model.layers * (attention + ffn)
    head = 0 if model.tied else embedding
    return Params(
        embedding=embedding,
        head=head,
        attention=model.layers * attention,
        ffn=model.layers * ffn,
        norm=norm,
        active=embedding + head + blocks + norm,
        scaling=blocks + norm + embedding,
    )


def _attention_params(width: int, cfg: GQA) -> tuple[int, int]:
    """Matrices, and the gains of the query and key norms."""
    return 2 * width * (cfg.heads + cfg.kv_heads) * cfg.head_dim, 2 * cfg.head_dim if cfg.qk_norm else 0


def _ffn_params(width: int, cfg: FFN) -> int:
    return (3 if cfg.gated else 2) * width * cfg.hidden


@dataclass(frozen=True, slots=True)
class Flops:
    """Of training one token. `recompute` is work done twice: it costs time but earns no MFU."""

    matmul: int
    attention: int
    recompute: int

    @property
    def model(self) -> int:
        return self.matmul + self.attention

    @property
    def hardware(self) -> int:
        return self.model + self.recompute


def flops_per_token(model: Model, *, recompute: bool = False) -> Flops:
    p = params(model)
    blocks = p.attention + p.ffn
    attention = 6 * model.layers * model.attention.heads * model.attention.head_dim * model.seq
    return Flops(
        matmul=6 * (blocks + model.vocab * model.width),
        attention=attention,
        recompute=2 * blocks + attention // 3 if recompute else 0,
    )


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank while it trains. States are exact; activations are the tensors autograd keeps, an estimate."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    loss: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.loss


def memory(
    model: Model,
    *,
    dtype: Dtype,
    zero: Literal[0, 1, 2, 3] | int,
    ranks: int,
    micro_batch: int,
    loss_chunk: int,
    recompute: bool = False,
) -> Memory:
    """ZeRO shards the optimizer at 1, the gradients at 2, the weights at 3; below 3 what a rank holds is whole."""
    total, size = params(model).total, BYTES[dtype]
    master = 0 if dtype == "fp32" and zero == 0 else 4  # only unsharded fp32 updates the weights themselves
    tokens = micro_batch * model.seq
    kept = model.layers * 2 * model.width * size if recompute else model.layers * _kept(model) * size
    once = _kept(model) * size if recompute else 0
    chunk = min(loss_chunk, tokens)
    return Memory(
        weights=-(-total * size // (ranks if zero >= 3 else 1)),
        gradients=-(-total * size // (ranks if zero >= 2 else 1)),
        optimizer=-(-total * (master + 8) // (ranks if zero >= 1 else 1)),
        activations=tokens * (kept + once),
        loss=chunk * model.vocab * (4 + 4 + size) + 4 * model.vocab * model.width,
    )


def _kept(model: Model) -> int:
    """Numbers that autograd keeps per token and block: norm inputs and outputs, q k v before and after rotation, the
    attention's output, and the FFN's inner tensors."""
    a = model.attention
    inner = (3 if model.ffn.gated else 2) * model.ffn.hidden
    return 4 * model.width + 2 * (a.heads + 2 * a.kv_heads) * a.head_dim + a.heads * a.head_dim + inner


def checkpoint_bytes(model: Model, dtype: Dtype) -> int:
    """One checkpoint on disk, all ranks together: weights, fp32 masters and two moments."""
    return params(model).total * (BYTES[dtype] + 12)
