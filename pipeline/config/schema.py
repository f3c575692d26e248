"""Every setting of a run as frozen, closed types: an unknown key is an error, and a variant's keys exist only with it.

Three kinds of type live here. `Size` and `Arch` are what configs/sizes.toml and configs/arch/*.toml hold: rows of
numbers, and kinds with ratios. Crossing them (shape.py) gives `Model`, where every number is absolute. `RunConfig` is
the whole run. A field that may be "auto" follows from the size and is filled in by pipeline.recipe before the run
starts, so that a run directory's config.toml holds numbers only.
"""

import math
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipeline.errors import ConfigError

VERSION: Literal[1] = 1  # of the schema: raised when an old config.toml would be read with another meaning

Auto = Literal["auto"]
Positive = Annotated[int, Field(gt=0)]
Rate = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Word = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")]  # one line of text that ends where it seems to end
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
    expert_ffn: Positive | None = None  # of one routed expert; left out, the arch's share of ffn


class Norm(Frozen):
    kind: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    eps: Rate = 1e-6
    bias: bool = False

    @model_validator(mode="after")
    def _has_bias(self) -> Self:
        if self.bias and self.kind == "rmsnorm":
            raise ValueError('bias=true, but an rmsnorm has none; take kind="layernorm" or leave it out')
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
            raise ValueError(f"high={self.high} must exceed low={self.low}: what turns more often stays as it is")
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


Position = Annotated[RoPE | Learned | Sinusoidal | RelativeBias | ALiBi | NoPosition, Field(discriminator="kind")]


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
            raise ValueError(f"global_every={self.global_every} needs a window; without one every layer is global")
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
    shared: Annotated[int, Field(ge=0)] = 0  # experts that every token meets
    router: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True  # the chosen weights sum to 1
    scale: Rate = 1.0  # of the routed experts' sum
    groups: Positive = 1
    top_groups: Positive = 1  # groups that a token may choose experts from
    capacity: Rate | None = None  # of an expert, over its even share; what exceeds it is dropped: Switch
    aux_loss: Annotated[float, Field(ge=0)] = 0.0  # Switch's balance loss over the micro-batch
    seq_aux_loss: Annotated[float, Field(ge=0)] = 0.0  # the same within each sequence
    z_loss: Annotated[float, Field(ge=0)] = 0.0  # of the router's logits
    bias_step: Annotated[float, Field(ge=0)] = 0.0  # aux-loss-free balancing (arXiv 2408.15664)
    dense_layers: Annotated[int, Field(ge=0)] = 0  # the first so many layers are dense
    every: Positive = 1  # of the rest, every so many are routed

    @property
    def gated(self) -> bool:
        return self.activation.endswith("glu")

    @model_validator(mode="after")
    def _choosable(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k} is above experts={self.experts}; a token cannot meet more than all")
        if self.top_k == 1 and self.normalise:
            raise ValueError("top_k=1 with normalise=true makes every weight 1, and the router learns nothing from it")
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
    expert_share: Rate = 1.0  # an expert's hidden width over the size's ffn, unless the size gives expert_ffn
    ratio: Rate | None = None  # hidden width over width; left out, the size's own


class MoE(MoEKind):
    hidden: Positive  # of one expert
    dense_hidden: Positive  # of the dense layers


ArchFeed = Annotated[ArchFFN | ArchMoE, Field(discriminator="kind")]
Feed = Annotated[FFN | MoE, Field(discriminator="kind")]


# ── The model ────────────────────────────────────────────────────────────────────────────────────────────────────────


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
    mtp: Annotated[int, Field(ge=0)] = 0  # further tokens predicted, each by a block of its own: DeepSeek-V3
    mtp_weight: Annotated[float, Field(ge=0)] = 0.3
    init_std: Rate
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
            raise ValueError(f"attention.{key}={a.rotary_dim} is odd; rotary positions turn pairs of channels")
        if isinstance(self.position, RoPE) and isinstance(self.position.scaling, NTK) and a.rotary_dim == 2:
            raise ValueError("position.scaling is ntk, which spares the fastest pair, but one pair is all there is")
        if self.nope_every is not None and not isinstance(self.position, RoPE | RelativeBias | ALiBi):
            raise ValueError(
                f"nope_every={self.nope_every} leaves layers without a position, but position.kind="
                f'"{self.position.kind}" is not given to layers; take rope, relative or alibi'
            )
        if isinstance(self.position, Sinusoidal) and self.width % 2:
            raise ValueError(f"width={self.width} is odd; sinusoidal positions are pairs of sine and cosine")
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
        return isinstance(f, MoE) and layer >= f.dense_layers and (layer - f.dense_layers) % f.every == f.every - 1

    def windowed(self, layer: int) -> bool:
        a = self.attention
        return a.window is not None and not (a.global_every and layer % a.global_every == a.global_every - 1)

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
    def score_scale(self) -> float:
        """Of q·k: 1/√d, and under muP ∝ 1/d."""
        a, scaling = self.attention, self.position.scaling if isinstance(self.position, RoPE) else None
        factor = scaling.scores if isinstance(scaling, YaRN) else 1.0
        widened = 1.0 if self.mup is None else a.head_dim / self.mup.base_head_dim
        return factor / math.sqrt(a.score_dim * widened)

    @property
    def logit_scale(self) -> float:
        return self.multipliers.logits * (1.0 if self.mup is None else self.mup.base_width / self.width)


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
    auto_batch: bool = False  # micro_batch "auto" is the largest that fits, and is lowered if that turns out too large
    dtype: Dtype | Auto
    recompute: bool  # run each block's forward again in the backward pass instead of keeping its activations
    compile: bool | Auto
    loss_chunk: Positive | Auto  # tokens whose logits exist at once
    eval_every: Positive | Auto
    eval_batches: Positive
    save_every: Positive | Auto
    keep_last: Positive
    keep_every: Positive | None = None  # besides, every checkpoint whose step is a multiple
    keep_at: tuple[Positive, ...] = ()  # steps whose checkpoints are written and stay: where branches begin
    log_every: Positive
    max_restarts: Annotated[int, Field(ge=0)]  # after a fault, until a new checkpoint is written
    check_every: Positive  # steps between comparisons of the ranks' copies
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
    ep: Positive = 1  # ranks that share the experts of a routed model
    sp: Positive = 1  # ranks that share each sequence

    def readers(self, ranks: int) -> int:
        """How many of the ranks read rows of their own; sp of them read the same."""
        if ranks % self.sp:
            near, up = math.gcd(ranks, self.sp), -(-ranks // self.sp) * self.sp
            raise ConfigError(
                f"parallel.sp={self.sp} does not divide the {ranks} ranks; try --sp {near}, or {up} ranks"
            )
        return ranks // self.sp


class Data(Frozen):
    dir: str | None = None
    packing: Literal["concatenate", "best-fit"] = "concatenate"  # best-fit: no document crosses a row
    documents: bool = False  # attention and positions start anew at each document; always when packed best-fit
    hash: str | None = None  # of the manifest the run was started on: a resumed run refuses another


class Rates(Frozen):
    """What of its peaks a GPU reaches in training; links in bytes/s per GPU and direction."""

    matmul_share: Share  # of peak_flops
    expert_share: Share  # of peak_flops, in grouped matmuls of routed experts
    attention_share: Share  # of peak_flops, with the masked half not counted
    hbm_bytes_s: Rate
    intra_bytes_s: Rate  # to GPUs of the same node
    inter_bytes_s: Rate  # to other nodes


class Container(Frozen):
    """What the processes of a job run in."""

    kind: Literal["pyxis", "apptainer"]
    image: Word
    mounts: tuple[Word, ...] = ()  # HOST:INSIDE; the run's and the data's folders must be among them
    python: Word = "python3"  # inside


class Slurm(Frozen):
    """How a site takes jobs: each value is an argument of sbatch or srun, or an exported variable, never text of a
    script."""

    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: Word | None = None
    time: Annotated[str, Field(pattern=r"^(\d+-)?\d+(:\d+){0,2}$")] | None = None  # left out, the partition's
    cpus_per_task: Positive | None = None
    sbatch: tuple[Word, ...] = ()  # further arguments, such as "--exclusive"
    srun: tuple[Word, ...] = ()
    modules: tuple[Annotated[str, Field(pattern=r"^[\w./+-]+$")], ...] = ()
    setup: Word | None = None  # a shell file that every job sources first
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], Word] = {}
    container: Container | None = None
    scratch: Word | None = None  # a folder on each node's own disk, to which shards are copied first
    launcher: Literal["srun", "torchrun"] = "srun"
    grace_s: Positive = 300  # so long before the limit the run is asked to save
    max_restarts: Annotated[int, Field(ge=0)] = 100  # of one job, for whatever reason


class Cluster(Frozen):
    """What a GPU of the cluster can do, with its source in configs/cluster, and how its SLURM takes jobs."""

    name: str
    device: str | None = None  # as torch names it, in part
    gpus_per_node: Positive = 8
    peak_flops: Rate | None = None  # dense bf16, per GPU
    memory_bytes: Positive | None = None  # per GPU
    rates: Rates | None = None  # for predicted step times
    slurm: Slurm = Slurm()

    @model_validator(mode="after")
    def _shares_of_something(self) -> Self:
        if self.rates is not None and self.peak_flops is None:
            raise ValueError("rates are shares of peak_flops, which is missing; give it, or leave rates out")
        return self


class RunConfig(Frozen):
    version: Literal[1] = VERSION
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    experiment: Annotated[str, Field(pattern=r"^[\w. /-]{1,64}$")]
    seed: Annotated[int, Field(ge=0)]
    init: str | None = None  # the run or checkpoint whose weights it begins with
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
        if self.parallel.engine == "accelerate" and self.parallel.ep > 1:
            raise ValueError(
                f"engine accelerate puts every expert on every rank, not ep={self.parallel.ep}; give --ep 1"
            )
        if self.parallel.ep > 1 and not isinstance(self.model.ffn, MoE):
            raise ValueError(f"parallel.ep={self.parallel.ep} needs a routed model; give --arch moe, or --ep 1")
        if isinstance(self.model.ffn, MoE) and self.model.ffn.experts % self.parallel.ep:
            raise ValueError(
                f"parallel.ep={self.parallel.ep} does not divide experts={self.model.ffn.experts}; "
                f"try --ep {math.gcd(self.parallel.ep, self.model.ffn.experts)}"
            )
        heads, sp = self.model.attention.heads, self.parallel.sp
        if heads % sp or self.model.seq % sp:
            raise ValueError(
                f"parallel.sp={sp} does not divide heads={heads} and seq={self.model.seq}; "
                f"try --sp {math.gcd(sp, heads, self.model.seq)}"
            )
        return self
