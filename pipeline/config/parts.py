"""The parts of a model, each a closed type: a variant's keys exist only with it.

A part whose widths follow from the size comes twice: as an architecture says it, in ratios, and as a model has it.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Auto = Literal["auto"]
Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]
Weight = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Word = Annotated[
    str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")
]  # one line of text that ends where it seems to end
Dtype = Literal["fp32", "bf16"]
# of each block's forward in the backward pass: none, all ("full" too), the feed-forward
Recompute = Annotated[
    bool | Literal["selective"], BeforeValidator(lambda given: given == "full" or given)
]


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Activation = Literal["swiglu", "geglu", "reglu", "gelu", "gelu_tanh", "silu", "relu", "relu2"]


class Norm(Frozen):
    kind: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    eps: Rate = 1e-6
    bias: bool = False

    @model_validator(mode="after")
    def _has_bias(self) -> Self:
        if self.bias and self.kind == "rmsnorm":
            raise ValueError(
                'bias=true, but an rmsnorm has none; take kind="layernorm" or leave it out'
            )
        return self


# ── Positions ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Linear(Frozen):
    kind: Literal["linear"] = "linear"
    factor: Rate


class NTK(Frozen):
    kind: Literal["ntk"] = "ntk"
    factor: Rate


class YaRN(Frozen):
    """arXiv 2309.00071. `attention` multiplies cosines and sines, `scores` the softmax scale, which is where DeepSeek
    puts it; attention left out is the paper's 0.1·ln(factor) + 1."""

    kind: Literal["yarn"] = "yarn"
    factor: Rate
    original_seq: Positive
    beta_fast: Rate = 32.0
    beta_slow: Rate = 1.0
    attention: Rate | None = None
    scores: Rate = 1.0

    @model_validator(mode="after")
    def _ramps(self) -> Self:
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast={self.beta_fast} must exceed beta_slow={self.beta_slow}")
        return self


class Llama3(Frozen):
    kind: Literal["llama3"] = "llama3"
    factor: Rate
    original_seq: Positive
    low: Rate = 1.0
    high: Rate = 4.0

    @model_validator(mode="after")
    def _ramps(self) -> Self:
        if self.high <= self.low:
            raise ValueError(
                f"high={self.high} must exceed low={self.low}: what turns more often stays as it is"
            )
        return self


Scaling = Annotated[Linear | NTK | YaRN | Llama3, Field(discriminator="kind")]


class RoPE(Frozen):
    kind: Literal["rope"] = "rope"
    theta: Annotated[float, Field(gt=1)]
    scaling: Scaling | None = None


class Learned(Frozen):
    kind: Literal["learned"] = "learned"


class Sinusoidal(Frozen):
    kind: Literal["sinusoidal"] = "sinusoidal"


class RelativeBias(Frozen):
    """T5's: one learned bias per head and bucket of distance, shared by all layers."""

    kind: Literal["relative"] = "relative"
    buckets: Annotated[int, Field(ge=4)] = 32
    max_distance: Positive = 128

    @model_validator(mode="after")
    def _reaches(self) -> Self:
        if self.max_distance <= self.buckets // 2:
            raise ValueError(
                f"max_distance={self.max_distance} must exceed half of buckets={self.buckets}: those are one step wide"
            )
        return self


class ALiBi(Frozen):
    kind: Literal["alibi"] = "alibi"


class NoPosition(Frozen):
    kind: Literal["none"] = "none"


Position = Annotated[
    RoPE | Learned | Sinusoidal | RelativeBias | ALiBi | NoPosition, Field(discriminator="kind")
]


# ── Attention ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Scores(Frozen):
    """What shapes the scores of any attention."""

    window: Positive | None = None  # tokens that a query sees, itself included
    global_every: Positive | None = None  # with a window: every so many layers see everything
    softcap: Rate | None = None
    sinks: bool = False  # a learned score per head that takes attention and gives nothing

    @model_validator(mode="after")
    def _windowed(self) -> Self:
        if self.global_every is not None and self.window is None:
            raise ValueError(
                f"global_every={self.global_every} needs a window; without one every layer is global"
            )
        return self


class GQAKind(Scores):
    kind: Literal["gqa"] = "gqa"
    qk_norm: bool = False
    bias: bool = False  # of queries, keys and values
    out_bias: bool = False


class ArchGQA(GQAKind):
    group: Positive | None = None  # query heads per key/value head; left out, the size's own


class GQA(GQAKind):
    """Grouped-query attention; multi-head and multi-query are its two ends."""

    heads: Positive
    kv_heads: Positive
    head_dim: Positive

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
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
    """Widths in units of the head, as the paper gives them (arXiv 2405.04434); no rank above half the model's width."""

    kind: Literal["mla"] = "mla"
    q_ratio: Rate | None = None  # left out: queries straight from the width
    kv_ratio: Rate = 4.0
    rope_ratio: Rate = 0.5


class MLA(Scores):
    """Multi-head latent attention: queries, keys and values through low ranks, positions in channels of their own."""

    kind: Literal["mla"] = "mla"
    heads: Positive
    q_rank: Positive | None = None  # left out: queries straight from the width
    kv_rank: Positive
    nope_dim: Positive
    rope_dim: Positive
    v_dim: Positive

    @property
    def head_dim(self) -> int:
        """In whose units the paper gives the others."""
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


# ── Feed-forward ─────────────────────────────────────────────────────────────────────────────────────────────────────


class FFNKind(Frozen):
    kind: Literal["ffn"] = "ffn"
    activation: Activation
    bias: bool = False

    @property
    def gated(self) -> bool:
        return self.activation.endswith("glu")


class ArchFFN(FFNKind):
    ratio: Rate | None = None  # hidden width over width; left out, the size's own


class FFN(FFNKind):
    hidden: Positive


class MoEKind(Frozen):
    """Routed experts. Dropless unless `capacity` is given; the router always works in fp32."""

    kind: Literal["moe"] = "moe"
    activation: Activation
    experts: Positive
    top_k: Positive
    shared: Count = 0  # experts that every token meets
    router: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True  # the chosen weights sum to 1
    scale: Rate = 1.0  # of the routed experts' sum
    groups: Positive = 1
    top_groups: Positive = 1  # groups that a token may choose experts from
    capacity: Rate | None = (
        None  # of an expert, over its even share; what exceeds it is dropped: Switch
    )
    aux_loss: Weight = 0.0  # Switch's balance loss over the micro-batch
    seq_aux_loss: Weight = 0.0  # the same within each sequence
    z_loss: Weight = 0.0  # of the router's logits
    bias_step: Weight = 0.0  # aux-loss-free balancing (arXiv 2408.15664)
    dense_layers: Count = 0  # the first so many layers are dense
    every: Positive = 1  # of the rest, every so many are routed

    @property
    def gated(self) -> bool:
        return self.activation.endswith("glu")

    @model_validator(mode="after")
    def _choosable(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(
                f"top_k={self.top_k} is above experts={self.experts}; a token cannot meet more than all"
            )
        if self.top_k == 1 and self.normalise:
            raise ValueError(
                "top_k=1 with normalise=true makes every weight 1, and the router learns nothing from it"
            )
        if self.experts % self.groups:
            raise ValueError(f"experts={self.experts} is not a multiple of groups={self.groups}")
        if self.top_groups > self.groups:
            raise ValueError(f"top_groups={self.top_groups} is above groups={self.groups}")
        if self.top_k > self.experts // self.groups * self.top_groups:
            raise ValueError(
                f"top_k={self.top_k} is above the {self.experts // self.groups * self.top_groups} experts of "
                f"top_groups={self.top_groups} groups; raise top_groups or lower top_k"
            )
        return self


class ArchMoE(MoEKind):
    expert_share: Rate = (
        1.0  # an expert's hidden width over the size's ffn, unless the size gives expert_ffn
    )
    ratio: Rate | None = None  # hidden width over width; left out, the size's own


class MoE(MoEKind):
    hidden: Positive  # of one expert
    dense_hidden: Positive  # of the dense layers


ArchFeed = Annotated[ArchFFN | ArchMoE, Field(discriminator="kind")]
Feed = Annotated[FFN | MoE, Field(discriminator="kind")]
