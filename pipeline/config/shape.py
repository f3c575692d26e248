"""`Size` and `Arch` are what configs/sizes.toml and configs/arch/*.toml hold: rows of numbers, and kinds with ratios.
Crossing them (shape.py) gives `Model`, where every number is absolute."""

import math
from typing import Any, Literal, Self, assert_never

from pydantic import model_validator

from pipeline.config.parts import (
    MLA,
    NTK,
    ALiBi,
    ArchAttention,
    ArchFeed,
    ArchFFN,
    ArchGQA,
    ArchMLA,
    ArchMoE,
    Attention,
    Count,
    Feed,
    FFNKind,
    Frozen,
    GQAKind,
    MoE,
    MoEKind,
    Norm,
    Position,
    Positive,
    Rate,
    RelativeBias,
    RoPE,
    Scores,
    Sinusoidal,
    Weight,
    YaRN,
)
from pipeline.errors import ConfigError


class Size(Frozen):
    """One row of the ladder."""

    layers: Positive
    width: Positive
    heads: Positive
    kv_heads: Positive | None = None  # as many as heads
    head_dim: Positive | None = None  # width / heads
    ffn: Positive  # hidden width of a gated FFN; an arch with a ratio of its own ignores it
    expert_ffn: Positive | None = None  # of one routed expert; left out, the arch's share of ffn


class Multipliers(Frozen):
    embedding: Rate = 1.0
    residual: Rate = 1.0  # of what a layer adds to the stream
    logits: Rate = 1.0


class MuP(Frozen):
    """Width transfer (arXiv 2203.03466, table 8 for Adam): what was tuned at base_width holds at any width."""

    base_width: Positive
    base_head_dim: Positive


class Design(Frozen):
    """What an architecture says of any size."""

    norm: Norm
    placement: Literal["pre", "post", "sandwich", "deepnorm"] = "pre"
    parallel_block: bool = False  # attention and feed-forward read the same normed input
    position: Position
    nope_every: Positive | None = None  # every so many layers know no position
    tied: bool  # the head is the input embedding
    mtp: Count = 0  # further tokens predicted, each by a block of its own: DeepSeek-V3
    mtp_weight: Weight = 0.3
    init_std: Rate
    scaled_embedding: bool = (
        False  # the input embedding's first weights and rate × √width: arXiv 2312.16903
    )
    multipliers: Multipliers = Multipliers()
    parametrization: Literal["standard", "mup"] = "standard"
    mup_base: MuP = MuP(base_width=256, base_head_dim=64)  # where the rate was tuned

    @property
    def mup(self) -> MuP | None:
        return self.mup_base if self.parametrization == "mup" else None

    @model_validator(mode="after")
    def _composes(self) -> Self:
        if self.parallel_block and self.placement != "pre":
            raise ValueError(f'parallel_block needs placement="pre", got "{self.placement}"')
        if self.scaled_embedding and self.tied:
            raise ValueError(
                "scaled_embedding=true with tied=true would scale the head too; set one of them to false"
            )
        return self


class Arch(Design):
    """Kinds and ratios, never widths."""

    attention: ArchAttention
    ffn: ArchFeed


class Model(Design):
    size: str = "custom"
    arch: str = "custom"
    vocab: Positive
    seq: Positive
    width: Positive
    layers: Positive
    attention: Attention
    ffn: Feed

    @model_validator(mode="after")
    def _possible(self) -> Self:
        a = self.attention
        if isinstance(self.position, RoPE) and a.rotary_dim % 2:
            key = "rope_dim" if isinstance(a, MLA) else "head_dim"
            raise ValueError(
                f"attention.{key}={a.rotary_dim} is odd; rotary positions turn pairs of channels"
            )
        if (
            isinstance(self.position, RoPE)
            and isinstance(self.position.scaling, NTK)
            and a.rotary_dim == 2
        ):
            raise ValueError(
                "position.scaling is ntk, which spares the fastest pair, but one pair is all there is"
            )
        if self.nope_every is not None and not isinstance(
            self.position, RoPE | RelativeBias | ALiBi
        ):
            raise ValueError(
                f"nope_every={self.nope_every} leaves layers without a position, but position.kind="
                f'"{self.position.kind}" is not given to layers; take rope, relative or alibi'
            )
        if isinstance(self.position, Sinusoidal) and self.width % 2:
            raise ValueError(
                f"width={self.width} is odd; sinusoidal positions are pairs of sine and cosine"
            )
        if isinstance(a, MLA):
            for key in ("q_rank", "kv_rank"):
                if (getattr(a, key) or 0) > self.width:
                    raise ValueError(
                        f"attention.{key}={getattr(a, key)} is above width={self.width}; a low rank is below it"
                    )
        if isinstance(self.ffn, MoE) and not any(map(self.routed, range(self.layers))):
            raise ValueError(
                f"ffn.dense_layers={self.ffn.dense_layers} and every={self.ffn.every} leave none of "
                f"layers={self.layers} routed"
            )
        if self.mtp >= self.seq:
            raise ValueError(f"mtp={self.mtp} predicts beyond seq={self.seq}")
        return self

    def routed(self, layer: int) -> bool:
        """Whether a layer's feed-forward is routed."""
        f = self.ffn
        return (
            isinstance(f, MoE)
            and layer >= f.dense_layers
            and (layer - f.dense_layers) % f.every == f.every - 1
        )

    def degrees(self, ranks: int) -> list[int]:
        """Of expert parallelism: what divides experts and ranks."""
        return _divisors(self.ffn.experts if isinstance(self.ffn, MoE) else 1, ranks)

    def shares(self, ranks: int) -> list[int]:
        """Of sequence parallelism: what divides heads, sequence and ranks."""
        return _divisors(self.attention.heads, self.seq, ranks)

    def windowed(self, layer: int) -> bool:
        a = self.attention
        return a.window is not None and not (
            a.global_every and layer % a.global_every == a.global_every - 1
        )

    def placed(self, layer: int) -> bool:
        """Whether a layer knows positions."""
        return not (self.nope_every and layer % self.nope_every == self.nope_every - 1)

    def narrower(self, name: str) -> float:
        """Under muP, how much narrower a matrix's input was where the rate was tuned. An embedding's is the vocabulary,
        a latent's rank goes with the head; the head itself is scaled at its output."""
        if self.mup is None or name.startswith(("embedding.", "position.", "head.")):
            return 1.0
        a, ups = self.attention, ("kv_up.weight", "q_up.weight")
        if isinstance(a, MLA) and name.endswith(ups[: 1 if a.q_rank is None else 2]):
            return self.mup.base_head_dim / a.head_dim
        return self.mup.base_width / self.width

    @property
    def embedding_scale(self) -> float:
        """Of the input embedding's first weights and of its rate: so large a stream that what layers add to it at first
        does not drown it. Under muP the same at every width."""
        return (
            math.sqrt(self.mup.base_width if self.mup else self.width)
            if self.scaled_embedding
            else 1.0
        )

    @property
    def score_scale(self) -> float:
        """Of q·k: 1/√d, and under muP ∝ 1/d."""
        a, scaling = (
            self.attention,
            self.position.scaling if isinstance(self.position, RoPE) else None,
        )
        factor = scaling.scores if isinstance(scaling, YaRN) else 1.0
        widened = 1.0 if self.mup is None else a.head_dim / self.mup.base_head_dim
        return factor / math.sqrt(a.score_dim * widened)

    @property
    def logit_scale(self) -> float:
        return self.multipliers.logits * (
            1.0 if self.mup is None else self.mup.base_width / self.width
        )


def _divisors(*of: int) -> list[int]:
    most = math.gcd(*of)
    return [n for n in range(1, most + 1) if most % n == 0]


def cross(size: Size, arch: Arch) -> dict[str, Any]:
    """The model table of a run config, still without vocabulary and sequence length."""
    return {
        **arch.model_dump(include=set(Design.model_fields)),
        "width": size.width,
        "layers": size.layers,
        "attention": _attention(size, arch.attention),
        "ffn": _ffn(size, arch.ffn),
    }


def _attention(size: Size, arch: ArchGQA | ArchMLA) -> dict[str, Any]:
    if size.head_dim is None and size.width % size.heads:
        raise ConfigError(
            f"width={size.width} is not a multiple of heads={size.heads}; give head_dim in the size's row"
        )
    head_dim = size.head_dim or size.width // size.heads
    match arch:
        case ArchGQA():
            kv_heads = (
                (size.kv_heads or size.heads)
                if arch.group is None
                else max(1, size.heads // arch.group)
            )
            widths = {"kv_heads": kv_heads, "head_dim": head_dim}
            return {
                **arch.model_dump(include=set(GQAKind.model_fields)),
                "heads": size.heads,
                **widths,
            }
        case ArchMLA():
            most = size.width // 2
            return {
                **arch.model_dump(include={"kind", *Scores.model_fields}),
                "heads": size.heads,
                "q_rank": None
                if arch.q_ratio is None
                else min(round(arch.q_ratio * head_dim), most),
                "kv_rank": min(round(arch.kv_ratio * head_dim), most),
                "nope_dim": head_dim,
                "rope_dim": max(2, round(arch.rope_ratio * head_dim / 2) * 2),
                "v_dim": head_dim,
            }
        case _:
            assert_never(arch)


def _ffn(size: Size, arch: ArchFFN | ArchMoE) -> dict[str, Any]:
    hidden = size.ffn if arch.ratio is None else round(arch.ratio * size.width)
    match arch:
        case ArchFFN():
            return {**arch.model_dump(include=set(FFNKind.model_fields)), "hidden": hidden}
        case ArchMoE():
            # multiples of 16: what a GPU's grouped matmul takes
            share = (
                hidden
                if arch.expert_share == 1
                else max(16, round(arch.expert_share * hidden / 16) * 16)
            )
            widths = {"hidden": size.expert_ffn or share, "dense_hidden": hidden}
            dense = min(
                arch.dense_layers, size.layers - 1
            )  # a shallow size still routes its last layer
            return {
                **arch.model_dump(include=set(MoEKind.model_fields)),
                **widths,
                "dense_layers": dense,
            }
        case _:
            assert_never(arch)
