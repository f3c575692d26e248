"""The parts of a model, each a closed type: a variant's keys exist only with that variant.

A part whose widths follow from the size has two classes: one with ratios, for an architecture file
(`Arch...`), and one with absolute widths, for a model.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

_INT64 = 2**63 - 1  # the largest number that every library below accepts
_FP32 = 1e38  # the largest power of ten that torch turns into an fp32 number

Auto = Literal["auto"]
Positive = Annotated[int, Field(gt=0, le=_INT64)]
Count = Annotated[int, Field(ge=0, le=_INT64)]
Rate = Annotated[float, Field(gt=0, le=_FP32)]
Weight = Annotated[float, Field(ge=0, le=_FP32)]
Share = Annotated[float, Field(ge=0, le=1)]
Word = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")]  # one line of text
Dtype = Literal["fp32", "bf16"]
# Activations that the backward pass computes again instead of keeping: none, all ("full" is an
# alias of true), or those of the feed-forward only.
Recompute = Annotated[
    bool | Literal["selective"], BeforeValidator(lambda given: given == "full" or given)
]
# Activations that end with "glu" are gated.
Activation = Literal[
    "swiglu", "geglu", "tanh_geglu", "reglu", "gelu", "gelu_tanh", "silu", "relu", "relu2"
]


class Frozen(BaseModel):
    """Base of every setting: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def require(condition: bool, message: str) -> None:
    """Fail a validator with a message that names the key, its value and the remedy."""
    if not condition:
        raise ValueError(message)


def rename_old(table: dict[str, Any]) -> dict[str, Any]:
    """Rename settings of an older release, in place, to their present names; return the table."""
    model = table.get("model")
    ffn = model.get("ffn") if isinstance(model, dict) else None
    if isinstance(ffn, dict) and "normalise" in ffn:
        ffn["normalize"] = ffn.pop("normalise")
    return table


class Norm(Frozen):
    kind: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    eps: Rate = 1e-6
    gain: bool = True  # a learned factor per channel
    bias: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        plain = self.kind == "rmsnorm" and self.bias
        require(not plain, 'bias=true needs kind="layernorm"; an rmsnorm has no bias')
        require(self.gain or not self.bias, "bias=true needs gain=true; set bias=false")
        return self


# ── Positions ─────────────────────────────────────────────────────────────────────────────────────


class Linear(Frozen):
    kind: Literal["linear"] = "linear"
    factor: Rate


class NTK(Frozen):
    kind: Literal["ntk"] = "ntk"
    factor: Rate


class YaRN(Frozen):
    """arXiv 2309.00071. `attention` multiplies cosines and sines; None means 0.1·ln(factor) + 1, as
    in the paper. `scores` multiplies the softmax scale instead, as in DeepSeek."""

    kind: Literal["yarn"] = "yarn"
    factor: Rate
    original_seq: Positive
    beta_fast: Rate = 32.0
    beta_slow: Rate = 1.0
    attention: Rate | None = None
    scores: Rate = 1.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        slow = self.beta_slow
        require(self.beta_fast > slow, f"beta_fast={self.beta_fast} must be above beta_slow={slow}")
        return self


class Llama3(Frozen):
    kind: Literal["llama3"] = "llama3"
    factor: Rate
    original_seq: Positive
    low: Rate = 1.0
    high: Rate = 4.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        require(self.high > self.low, f"high={self.high} must be above low={self.low}")
        return self


Scaling = Annotated[Linear | NTK | YaRN | Llama3, Field(discriminator="kind")]


class RoPE(Frozen):
    kind: Literal["rope"] = "rope"
    theta: Annotated[float, Field(gt=1)]
    window_theta: Annotated[float, Field(gt=1)] | None = None  # theta of layers with a window
    scaling: Scaling | None = None


class Learned(Frozen):
    kind: Literal["learned"] = "learned"
    offset: Annotated[int, Field(ge=0, le=1000)] = 0  # unused rows before the first: fairseq has 2


class Sinusoidal(Frozen):
    kind: Literal["sinusoidal"] = "sinusoidal"
    halves: bool = False  # sines in the first half of the channels, cosines in the second


class RelativeBias(Frozen):
    """T5: one learned bias per head and bucket of distance, shared by all layers."""

    kind: Literal["relative"] = "relative"
    buckets: Annotated[int, Field(ge=4, le=_INT64)] = 32
    max_distance: Positive = 128

    @model_validator(mode="after")
    def _check(self) -> Self:
        # The first half of the buckets are one token wide each.
        distance = f"max_distance={self.max_distance}"
        far = self.max_distance > self.buckets // 2
        require(far, f"{distance} must be above half of buckets={self.buckets}")
        return self


class ALiBi(Frozen):
    kind: Literal["alibi"] = "alibi"


class NoPosition(Frozen):
    kind: Literal["none"] = "none"


Position = Annotated[
    RoPE | Learned | Sinusoidal | RelativeBias | ALiBi | NoPosition, Field(discriminator="kind")
]


# ── Attention ─────────────────────────────────────────────────────────────────────────────────────


class Scores(Frozen):
    """Settings of the attention scores that every kind of attention has."""

    # Number of tokens that a query attends to, including itself; in an encoder also to its right.
    window: Positive | None = None
    global_every: Positive | None = None  # with a window: every n-th layer sees everything
    global_first: bool = False  # the first of each n layers is global, not the last
    scaled: bool = True  # divide scores by √head_dim; T5 initializes smaller queries instead
    score_scale: Rate = 1.0  # multiplies the softmax scale; nanochat has 1.2² = 1.44
    softcap: Rate | None = None
    sinks: bool = False  # a learned score per head that absorbs attention and has no value

    @model_validator(mode="after")
    def _check(self) -> Self:
        every = self.global_every
        windowed = every is None or self.window is not None
        require(windowed, f"global_every={every} needs a window; without one every layer is global")
        first = every is not None or not self.global_first
        require(first, "global_first=true needs global_every, the step of the global layers")
        return self


class GQAKind(Scores):
    kind: Literal["gqa"] = "gqa"
    qk_norm: bool = False
    bias: bool = False  # of queries, keys and values
    out_bias: bool = False


class ArchGQA(GQAKind):
    group: Positive | None = None  # query heads per key/value head; None: from the size


class GQA(GQAKind):
    """Grouped-query attention. Multi-head and multi-query attention are its two extremes."""

    heads: Positive
    kv_heads: Positive
    head_dim: Positive

    @model_validator(mode="after")
    def _divides(self) -> Self:
        text = f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}"
        require(self.heads % self.kv_heads == 0, text)
        return self

    @property
    def rotary_dim(self) -> int:
        return self.head_dim

    @property
    def score_dim(self) -> int:
        return self.head_dim

    @property
    def value_dim(self) -> int:
        return self.head_dim


class ArchMLA(Scores):
    """Widths in units of the head, as in arXiv 2405.04434. No rank exceeds half of the width."""

    kind: Literal["mla"] = "mla"
    q_ratio: Rate | None = None  # None: queries are projected from the full width
    kv_ratio: Rate = 4.0
    rope_ratio: Rate = 0.5


class MLA(Scores):
    """Multi-head latent attention: low-rank queries, keys and values, and separate channels for
    positions."""

    kind: Literal["mla"] = "mla"
    heads: Positive
    q_rank: Positive | None = None  # None: queries are projected from the full width
    kv_rank: Positive
    nope_dim: Positive
    rope_dim: Positive
    v_dim: Positive

    @property
    def head_dim(self) -> int:
        """The unit in which the paper gives the other widths."""
        return self.nope_dim

    @property
    def rotary_dim(self) -> int:
        return self.rope_dim

    @property
    def score_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def value_dim(self) -> int:
        return self.v_dim


ArchAttention = Annotated[ArchGQA | ArchMLA, Field(discriminator="kind")]
Attention = Annotated[GQA | MLA, Field(discriminator="kind")]


# ── Feed-forward ──────────────────────────────────────────────────────────────────────────────────


class FeedForward(Frozen):
    activation: Activation
    init_scale: Rate = 1.0  # factor of the first matrix's initial weights; nanochat has 0.4

    @property
    def gated(self) -> bool:
        return self.activation.endswith("glu")


class FFNKind(FeedForward):
    kind: Literal["ffn"] = "ffn"
    bias: bool = False


class ArchFFN(FFNKind):
    ratio: Rate | None = None  # hidden width over width; None: from the size


class FFN(FFNKind):
    hidden: Positive


class MoEKind(FeedForward):
    """Routed experts. No token is dropped unless `capacity` is set. The router computes in fp32."""

    kind: Literal["moe"] = "moe"
    experts: Positive
    top_k: Positive
    shared: Count = 0  # experts that every token uses
    router: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True  # the chosen weights sum to 1
    scale: Rate = 1.0  # factor of the routed experts' sum
    groups: Positive = 1
    top_groups: Positive = 1  # groups from which a token may choose experts
    # Most tokens of an expert, relative to an even share. Others are dropped, as in Switch.
    capacity: Rate | None = None
    aux_loss: Weight = 0.0  # Switch's balance loss over the micro-batch
    seq_aux_loss: Weight = 0.0  # the same within each sequence
    z_loss: Weight = 0.0  # weight of the z-loss of the router's logits
    bias_step: Weight = 0.0  # balancing without an auxiliary loss (arXiv 2408.15664)
    dense_layers: Count = 0  # the first n layers are dense
    every: Positive = 1  # of the other layers, every n-th is routed

    @model_validator(mode="after")
    def _check(self) -> Self:
        experts = f"experts={self.experts}"
        groups = f"groups={self.groups}"
        require(self.top_k <= self.experts, f"top_k={self.top_k} is above {experts}")
        constant = self.top_k == 1 and self.normalize
        require(not constant, "top_k=1 with normalize=true makes every weight 1; set it to false")
        require(self.experts % self.groups == 0, f"{experts} is not a multiple of {groups}")
        require(self.top_groups <= self.groups, f"top_groups={self.top_groups} is above {groups}")
        within = self.experts // self.groups * self.top_groups
        text = f"top_k={self.top_k} is above the {within} experts of top_groups={self.top_groups}"
        require(self.top_k <= within, f"{text}; raise top_groups or lower top_k")
        return self


class ArchMoE(MoEKind):
    # Hidden width of an expert over the size's ffn, unless the size has its own expert_ffn.
    expert_share: Rate = 1.0
    ratio: Rate | None = None  # hidden width over width; None: from the size


class MoE(MoEKind):
    hidden: Positive  # hidden width of one expert
    dense_hidden: Positive  # hidden width of the dense layers


ArchFeed = Annotated[ArchFFN | ArchMoE, Field(discriminator="kind")]
Feed = Annotated[FFN | MoE, Field(discriminator="kind")]
