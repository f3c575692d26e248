"""Every setting of a run as frozen, closed types: an unknown key is an error, and a variant's keys exist only with it.

Three kinds of type live here. `Size` and `Arch` are what configs/sizes.toml and configs/arch/*.toml hold: rows of
numbers, and kinds with ratios. Crossing them (shape.py) gives `Model`, where every number is absolute. `RunConfig` is
the whole run. A field that may be "auto" follows from the size and is filled in by pipeline.recipe before the run
starts, so that a run directory's config.toml holds numbers only.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

VERSION: Literal[1] = 1  # of the schema: raised when an old config.toml would be read with another meaning

Auto = Literal["auto"]
Positive = Annotated[int, Field(gt=0)]
Rate = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Activation = Literal["swiglu", "geglu", "reglu", "gelu", "gelu_tanh", "silu", "relu", "relu2"]
Dtype = Literal["fp32", "bf16"]


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


# ── The ladder and the architectures: what is crossed ────────────────────────────────────────────────────────────────


class Size(Frozen):
    """One row of the ladder."""

    layers: Positive
    width: Positive
    heads: Positive
    kv_heads: Positive | None = None  # as many as heads
    head_dim: Positive | None = None  # width / heads
    ffn: Positive  # hidden width of a gated FFN; an arch with a ratio of its own ignores it


class ArchGQA(Frozen):
    kind: Literal["gqa"] = "gqa"
    qk_norm: bool
    group: Positive | None = None  # query heads per key/value head; left out, the size's own


class ArchFFN(Frozen):
    activation: Activation
    ratio: Rate | None = None  # hidden width over width; left out, the size's own


# ── The model ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Norm(Frozen):
    kind: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    eps: Rate = 1e-6


class RoPE(Frozen):
    kind: Literal["rope"] = "rope"
    theta: Rate


class GQA(Frozen):
    """Grouped-query attention; multi-head and multi-query are its two ends."""

    kind: Literal["gqa"] = "gqa"
    heads: Positive
    kv_heads: Positive
    head_dim: Positive
    qk_norm: bool

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary positions turn pairs of channels")
        return self


class FFN(Frozen):
    activation: Activation
    hidden: Positive

    @property
    def gated(self) -> bool:
        return self.activation.endswith("glu")


class Arch(Frozen):
    """Kinds and ratios, never widths."""

    norm: Norm
    position: RoPE
    attention: ArchGQA
    ffn: ArchFFN
    tied: bool
    init_std: Rate


class Model(Frozen):
    size: str = "custom"
    arch: str = "custom"
    vocab: Positive
    seq: Positive
    width: Positive
    layers: Positive
    norm: Norm
    position: RoPE
    attention: GQA
    ffn: FFN
    tied: bool  # the head is the input embedding
    init_std: Rate


# ── How it is trained ────────────────────────────────────────────────────────────────────────────────────────────────


class AdamW(Frozen):
    kind: Literal["adamw"] = "adamw"
    beta1: Share
    beta2: Share | Auto
    eps: Rate
    decay: Annotated[float, Field(ge=0)]


class WSD(Frozen):
    """Warm up, stay, decay over the last share of the steps as 1 − √x."""

    kind: Literal["wsd"] = "wsd"
    warmup_steps: Annotated[int, Field(ge=0)] | Auto = "auto"
    decay_share: Share = 0.2
    final_share: Share = 0.0  # of the peak, at the last step


class Cosine(Frozen):
    kind: Literal["cosine"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] | Auto = "auto"
    final_share: Share = 0.1


Schedule = Annotated[WSD | Cosine, Field(discriminator="kind")]


class Optim(Frozen):
    lr: Rate | Auto
    clip: Rate
    z_loss: Annotated[float, Field(ge=0)]
    optimizer: AdamW
    schedule: Schedule


class Train(Frozen):
    """How long, how wide, how often. Of steps, tokens and flops at most one is given; none means tokens_per_param."""

    steps: Positive | None = None
    tokens: Positive | None = None
    flops: Rate | None = None
    tokens_per_param: Rate
    batch_tokens: Positive | Auto
    micro_batch: Positive | Auto  # sequences per rank and forward pass
    dtype: Dtype | Auto
    recompute: bool  # run each block's forward again in the backward pass instead of keeping its activations
    compile: bool | Auto
    loss_chunk: Positive  # tokens whose logits exist at once
    eval_every: Positive | Auto
    eval_batches: Positive
    save_every: Positive | Auto
    keep_last: Positive
    log_every: Positive
    max_restarts: Annotated[int, Field(ge=0)]  # after a fault, until a new checkpoint is written
    hang_s: Rate  # a step may last three times the p99 and this much more before it is taken for a hang

    @model_validator(mode="after")
    def _one_horizon(self) -> Self:
        given = [k for k in ("steps", "tokens", "flops") if getattr(self, k) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are both given; a run has one length")
        return self


class Parallel(Frozen):
    engine: Literal["deepspeed", "accelerate"]
    zero: Annotated[int, Field(ge=0, le=3)]


class Data(Frozen):
    dir: str | None = None
    hash: str | None = None  # of the manifest the run was started on: a resumed run refuses another


class Cluster(Frozen):
    """What a GPU of the cluster can do; the source of every rate is in configs/cluster."""

    name: str
    device: str | None = None  # as torch names it, in part
    gpus_per_node: Positive = 8
    peak_flops: Rate | None = None  # dense bf16, per GPU
    memory_bytes: Positive | None = None  # per GPU


class RunConfig(Frozen):
    version: Literal[1] = VERSION
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    experiment: Annotated[str, Field(pattern=r"^[\w. /-]{1,64}$")]
    seed: Annotated[int, Field(ge=0)]
    model: Model
    data: Data
    optim: Optim
    train: Train
    parallel: Parallel
    cluster: Cluster

    @model_validator(mode="after")
    def _referee(self) -> Self:
        if self.parallel.engine == "accelerate" and (self.parallel.zero or self.train.dtype == "bf16"):
            raise ValueError(
                f"engine accelerate is plain fp32 DDP, not zero={self.parallel.zero} with dtype={self.train.dtype}; "
                "give --zero 0 --dtype fp32"
            )
        return self
