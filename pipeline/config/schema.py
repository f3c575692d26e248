"""Every setting of a run, as frozen and closed types.

A `RunSpec` is what the user asks for: a field may say "auto". The planner turns it into a
`RunConfig`, which holds numbers only. Each `...Spec` class below allows "auto"; the class that
inherits from it does not. A run directory's config.toml is a `RunConfig`.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, SecretStr, TypeAdapter, model_validator

from pipeline.config.distill import Distill, refuse_distill
from pipeline.config.objective import Causal, Objective, refuse
from pipeline.config.optimizer import Optim, OptimSpec
from pipeline.config.parts import (
    FFN,
    Auto,
    Count,
    Dtype,
    Frozen,
    Positive,
    Rate,
    Recompute,
    Share,
    Word,
    require,
)
from pipeline.config.shape import Model
from pipeline.errors import ConfigError

# Version of the schema. Raise it when an old config.toml would be read with another meaning.
VERSION: Literal[1] = 1


class TrainSpec(Frozen):
    """Length, batch and intervals. At most one of steps, tokens and flops is given; without any of
    them the length is tokens_per_param."""

    steps: Positive | None = None
    tokens: Positive | None = None
    flops: Rate | None = None
    tokens_per_param: Rate
    batch_tokens: Positive | Auto
    micro_batch: Positive | Auto  # sequences per rank and forward pass
    auto_batch: bool = False  # try the largest micro-batch that may fit, and lower it if it fails
    dtype: Dtype | Auto
    fp8: bool = False  # in the matmuls of the blocks' linear layers
    recompute: Recompute | Auto
    compile: bool | Auto
    loss_chunk: Positive | Auto  # tokens whose logits exist at the same time
    eval_every: Positive | Auto
    eval_batches: Positive
    save_every: Positive | Auto
    keep_last: Positive
    keep_every: Positive | None = None  # also keep checkpoints whose step is a multiple of this
    keep_at: tuple[Positive, ...] = ()  # also write and keep these steps: branches start there
    log_every: Positive
    max_restarts: Count  # restarts without a new checkpoint between them
    check_every: Positive  # steps between comparisons of the ranks' copies
    # A step counts as a hang if it takes longer than three times the p99 plus this.
    hang_s: Rate
    first_s: Rate  # limit for the start, and for the first step, evaluation and save

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        given = [k for k in ("steps", "tokens", "flops") if getattr(self, k) is not None]
        require(len(given) <= 1, f"{' and '.join(given)} are both given; a run has one length")
        return self


class Train(TrainSpec):
    steps: Positive
    batch_tokens: Positive
    micro_batch: Positive
    dtype: Dtype
    recompute: Recompute
    compile: bool
    loss_chunk: Positive
    eval_every: Positive
    save_every: Positive


class Offload(Frozen):
    """Which states are moved out of GPU memory between uses, and where to."""

    optimizer: Literal["cpu", "nvme"] | None = None  # master weights and moments; the CPU updates
    params: Literal["cpu", "nvme"] | None = None
    path: str | None = None  # for nvme: a directory on a local disk of each node

    @model_validator(mode="after")
    def _has_a_place(self) -> Self:
        text = "offload to nvme needs a directory on each node"
        placed = self.path is not None or not self.nvme
        require(placed, f"{text}; add --set parallel.offload.path=DIR")
        return self

    @property
    def nvme(self) -> bool:
        return "nvme" in (self.optimizer, self.params)

    @property
    def least_zero(self) -> int:
        """The lowest ZeRO stage that supports this."""
        if self.params or self.nvme:
            return 3
        return 1 if self.optimizer else 0


ZeroStage = Literal[0, 1, 2, 3]


class ParallelSpec(Frozen):
    engine: Literal["deepspeed", "accelerate"]
    zero: ZeroStage | Auto
    ep: Positive | Auto = "auto"  # ranks that share the experts of a routed model
    sp: Positive = 1  # ranks that share each sequence
    offload: Offload = Offload()


class Parallel(ParallelSpec):
    zero: ZeroStage
    ep: Positive = 1


class Data(Frozen):
    dir: str | None = None
    packing: Literal["concatenate", "best-fit"] = "concatenate"  # best-fit splits no document
    # Attention and positions restart at each document. Always so with best-fit packing.
    documents: bool = False
    hash: str | None = None  # hash of the data manifest; a resumed run refuses other data


class Eval(Frozen):
    """Tasks to score the model on whenever its held-out loss is computed."""

    tasks: tuple[str, ...] = ()  # files of questions, see pipeline/tasks/questions.py
    share: Share = 0.01  # of the run's time that all tasks together may take
    questions: Positive | None = None  # of each task; None: as many as `share` pays for
    # The in-context score and the heads' prefix matching; the two tokens whose losses are compared.
    in_context: bool | tuple[Positive, Positive] = False


class Lora(Frozen):
    """Adapters beside the matrices of the blocks; only they and the head of a row are trained."""

    rank: Positive
    # Of the adapters' output: alpha / rank. 2 is the choice of arXiv 2405.09673.
    scale: Rate = 2.0


_Efficiency = Annotated[float, Field(gt=0, le=1)]
# An argument on its own, which sbatch, srun or apptainer must not read as an option.
Operand = Annotated[str, Field(pattern=r"^[^-\x00-\x1f\x7f][^\x00-\x1f\x7f]*$")]


class Rates(Frozen):
    """Rates that a GPU reaches in training. Links are in bytes/s per GPU and direction."""

    matmul_share: _Efficiency  # share of peak_flops
    expert_share: _Efficiency  # share of peak_flops, in grouped matmuls of routed experts
    attention_share: _Efficiency  # share of peak_flops, not counting the masked half
    hbm_bytes_s: Rate
    intra_bytes_s: Rate  # to GPUs of the same node
    inter_bytes_s: Rate  # to other nodes


class Container(Frozen):
    """The container in which a job's processes run."""

    kind: Literal["pyxis", "apptainer"]
    image: Operand
    mounts: tuple[Word, ...] = ()  # HOST:INSIDE; must include the run's and the data's directories
    python: Operand = "python3"  # inside the container


MASK = str(SecretStr("any"))  # what pydantic prints and dumps in place of a secret
_WORD = TypeAdapter[str](Word)


def _is_word(secret: SecretStr) -> SecretStr:
    _WORD.validate_python(secret.get_secret_value())
    return secret


Secret = Annotated[SecretStr, AfterValidator(_is_word)]


class Slurm(Frozen):
    """Site settings. Each value is an argument of sbatch or srun or an exported variable, never
    text of a script."""

    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: Word | None = None
    time: Annotated[str, Field(pattern=r"^([0-9]+-)?[0-9]+(:[0-9]+){0,2}$")] | None = None
    cpus_per_task: Positive | None = None
    sbatch: tuple[Word, ...] = ()  # more arguments, such as "--exclusive"
    srun: tuple[Word, ...] = ()
    modules: tuple[Annotated[str, Field(pattern=r"^[\w./+][\w./+-]*$")], ...] = ()
    setup: Operand | None = None  # a shell file that every job sources first
    # Variables of every process. A run directory records their names only: a value may be a
    # credential.
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], Secret] = Field(
        default_factory=dict
    )
    container: Container | None = None
    scratch: Operand | None = None  # on each node's own disk; shards are copied there first
    launcher: Literal["srun", "torchrun"] = "srun"
    grace_s: Positive = 300  # the run is asked to save this long before the time limit
    max_restarts: Count = 100  # of one job, for any reason

    @model_validator(mode="after")
    def _time_to_train(self) -> Self:
        """SLURM may send the signal a minute early. A job that gets it at once never trains."""
        if self.time is not None:
            seconds = _seconds(self.time)
            text = f"time={self.time} ({seconds} s) is not above grace_s={self.grace_s} by a minute"
            shorter = max(1, (seconds - 60) // 2)
            remedy = f"give more time, or --set cluster.slurm.grace_s={shorter}"
            require(seconds > self.grace_s + 60, f"{text}; {remedy}")
        return self

    def environment(self, outer: Mapping[str, str]) -> dict[str, str]:
        """The variables with their values. Values that a run directory masks come from `outer`, the
        environment of the submitting process."""
        values = {name: secret.get_secret_value() for name, secret in self.env.items()}
        for name in [name for name, value in values.items() if value == MASK]:
            if name not in outer:
                raise ConfigError(
                    f"cluster.slurm.env.{name} has no value: run directories do not record it; "
                    f"export {name}, or give the cluster file again with --cluster"
                )
            values[name] = outer[name]
        return values


def _seconds(time: str) -> int:
    """A time limit as sbatch reads it: MIN, MIN:SEC, H:MIN:SEC, D-H, D-H:MIN or D-H:MIN:SEC."""
    days, _, clock = time.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if not days and len(parts) < 3:
        parts.insert(0, 0)
    units = (3600, 60, 1)
    return 86400 * int(days or 0) + sum(n * u for n, u in zip(parts, units, strict=False))


class Cluster(Frozen):
    """What a GPU of the cluster can do (sources in configs/cluster), and how its SLURM is used."""

    name: str
    device: str | None = None  # a part of torch's name for it
    gpus_per_node: Positive = 8
    peak_flops: Rate | None = None  # dense bf16, per GPU
    memory_bytes: Positive | None = None  # per GPU
    usd_per_gpu_hour: Rate | None = None  # for the cost of a forecast
    rates: Rates | None = None  # for predicted step times
    slurm: Slurm = Slurm()

    @model_validator(mode="after")
    def _rates_have_a_peak(self) -> Self:
        known = self.rates is None or self.peak_flops is not None
        require(known, "rates are shares of peak_flops, which is missing; add it or remove rates")
        return self

    def has(self, device: str) -> bool:
        """Whether a device, by torch's name, is of this cluster. True if the cluster names none."""
        return self.device is None or self.device in device


def _inside(path: str) -> str:
    """Both names become parts of the path runs/EXPERIMENT/NAME."""
    parts = path.split("/")
    require("" not in parts and "." not in parts and ".." not in parts, "must stay inside runs/")
    return path


class RunSpec(Frozen):
    version: Literal[1] = VERSION
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$"), AfterValidator(_inside)]
    experiment: Annotated[str, Field(pattern=r"^[\w. /-]{1,64}$"), AfterValidator(_inside)]
    seed: Count
    recipe: str = "adamw"  # in configs/recipe; older runs, which name none, were trained with this
    init: str | None = None  # the run or checkpoint whose weights this run starts from
    model: Model
    objective: Objective = Causal()
    lora: Lora | None = None  # None: all weights are trained
    distill: Distill | None = None  # None: no teacher
    data: Data
    optim: OptimSpec
    train: TrainSpec
    eval: Eval = Eval()
    parallel: ParallelSpec
    cluster: Cluster

    @model_validator(mode="after")
    def _objective_is_served(self) -> Self:
        apart = self.data.documents or self.data.packing == "best-fit"
        refusal = refuse(self.objective, self.model, apart=apart)
        require(not refusal, refusal)
        if self.distill is not None:
            packed = self.data.packing == "best-fit"
            sp = self.parallel.sp
            refusal = refuse_distill(self.distill, self.model, self.objective, sp=sp, packed=packed)
            require(not refusal, refusal)
        return self

    @model_validator(mode="after")
    def _adapters_are_served(self) -> Self:
        if self.lora is not None:
            key = f"lora.rank={self.lora.rank}"
            width = self.model.width
            require(
                self.lora.rank <= width, f"{key} is above model.width={width}; use a lower rank"
            )
            text = f'{key} needs model.ffn.kind="ffn": experts have no adapters'
            require(isinstance(self.model.ffn, FFN), f"{text}; train all weights instead")
            text = f"{key} needs optim.optimizer.kind=adamw, got {self.optim.optimizer.kind}"
            require(self.optim.optimizer.kind == "adamw", f"{text}; use --recipe adamw")
            require(not self.train.fp8, f"{key} conflicts with train.fp8=true; remove one")
        return self

    @model_validator(mode="after")
    def _rows_are_whole(self) -> Self:
        """The head of a row reads one token, which one of the ranks that share the row has."""
        shared = self.objective.examples and self.parallel.sp > 1
        kind = self.objective.kind
        text = f'parallel.sp={self.parallel.sp} conflicts with objective.kind="{kind}"'
        require(not shared, f"{text}, whose rows are short; remove it")
        fills = self.model.generator is not None and self.parallel.sp > 1
        require(not fills, f"{text}, whose generator reads whole rows; remove it")
        return self

    @model_validator(mode="after")
    def _tasks_are_served(self) -> Self:
        tasks = f"eval.tasks={list(self.eval.tasks)}"
        remedy = "leave it out and use `launch evaluate --tasks` after the run"
        if self.eval.tasks:
            stack = self.model.stack
            text = f'{tasks} needs a decoder, got model.stack="{stack}"; remove it'
            require(stack == "decoder", text)
            shared = f"{tasks} conflicts with parallel.sp={self.parallel.sp}, which cuts questions"
            require(self.parallel.sp == 1, f"{shared}; {remedy}")
        return self

    @model_validator(mode="after")
    def _in_context_is_served(self) -> Self:
        if self.in_context_tokens is None:
            return self
        given = self.eval.in_context
        asked = f"eval.in_context={list(given) if isinstance(given, tuple) else 'true'}"
        early, late = self.in_context_tokens
        seq = self.model.seq
        kind = self.objective.kind
        causal = kind == "causal" and self.model.stack == "decoder"
        require(causal, f'{asked} needs objective.kind="causal", got "{kind}"; remove it')
        text = f"{asked} conflicts with parallel.sp={self.parallel.sp}, which cuts rows; remove one"
        require(self.parallel.sp == 1, text)
        require(seq >= 16, f"{asked} needs model.seq of 16 or more, got {seq}; remove it")
        ordered = early < late <= seq
        require(ordered, f"{asked}: give two tokens in order, at most model.seq={seq}")
        return self

    @property
    def in_context_tokens(self) -> tuple[int, int] | None:
        """The two tokens whose losses are compared. Olsson et al. use 50 and 500; in a shorter
        context they are at a tenth and nine tenths of it."""
        given = self.eval.in_context
        if isinstance(given, tuple):
            return given
        seq = self.model.seq
        return ((50, 500) if seq >= 500 else (seq // 10, seq * 9 // 10)) if given else None

    @property
    def text_length(self) -> int:
        """Tokens of text that a row is made of."""
        return self.objective.text_length(self.model.seq, self.model.source_seq)


class RunConfig(RunSpec):
    optim: Optim
    train: Train
    parallel: Parallel

    @property
    def rows(self) -> int:
        """Sequences of a global batch."""
        return self.train.batch_tokens // self.model.seq
