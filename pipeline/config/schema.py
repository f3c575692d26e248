"""Every setting of a run as frozen, closed types: an unknown key is an error with the nearest name.

A field that may be "auto" follows from the size and is filled in by pipeline.planner.recipe before the run starts, so that a
run directory's config.toml holds numbers only.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, SecretStr, TypeAdapter, model_validator

from pipeline.config.parts import (
    Auto,
    Count,
    Dtype,
    Frozen,
    Positive,
    Rate,
    Recompute,
    Share,
    Weight,
    Word,
)
from pipeline.config.shape import Model
from pipeline.errors import ConfigError

VERSION: Literal[1] = (
    1  # of the schema: raised when an old config.toml would be read with another meaning
)


class AdamW(Frozen):
    kind: Literal["adamw"] = "adamw"
    beta1: Share
    beta2: Share | Auto
    eps: Rate
    decay: Weight


class WSD(Frozen):
    """Warm up, stay, decay over the last share of the steps as 1 − √x."""

    kind: Literal["wsd"] = "wsd"
    warmup_steps: Count | Auto = "auto"
    decay_share: Share = 0.2
    final_share: Share = 0.0  # of the peak, at the last step


class Cosine(Frozen):
    kind: Literal["cosine"] = "cosine"
    warmup_steps: Count | Auto = "auto"
    final_share: Share = 0.1


Schedule = Annotated[WSD | Cosine, Field(discriminator="kind")]


class Optim(Frozen):
    lr: Rate | Auto
    clip: Rate
    z_loss: Weight
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
    auto_batch: bool = (
        False  # micro_batch "auto" is the largest that may fit, and is lowered where it does not
    )
    dtype: Dtype | Auto
    fp8: bool = False  # the blocks' linear layers multiply in fp8
    recompute: Recompute  # run again in the backward pass instead of keeping the activations
    compile: bool | Auto
    loss_chunk: Positive | Auto  # tokens whose logits exist at once
    eval_every: Positive | Auto
    eval_batches: Positive
    save_every: Positive | Auto
    keep_last: Positive
    keep_every: Positive | None = None  # besides, every checkpoint whose step is a multiple
    keep_at: tuple[
        Positive, ...
    ] = ()  # steps whose checkpoints are written and stay: where branches begin
    log_every: Positive
    max_restarts: Count  # after a fault, until a new checkpoint is written
    check_every: Positive  # steps between comparisons of the ranks' copies
    hang_s: (
        Rate  # a step may last three times the p99 and this much more before it is taken for a hang
    )
    first_s: Rate  # and the start, or the first of each phase

    @model_validator(mode="after")
    def _one_horizon(self) -> Self:
        given = [k for k in ("steps", "tokens", "flops") if getattr(self, k) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are both given; a run has one length")
        return self


class Offload(Frozen):
    """What a GPU does not hold between its uses, and where it lies instead."""

    optimizer: Literal["cpu", "nvme"] | None = None  # masters and moments; the CPU updates them
    params: Literal["cpu", "nvme"] | None = None
    path: str | None = None  # of nvme: a directory on a disk of each node

    @model_validator(mode="after")
    def _somewhere(self) -> "Offload":
        if self.nvme and self.path is None:
            raise ValueError(
                "offload to nvme needs a place; give --set parallel.offload.path=DIR, on a disk of each node"
            )
        return self

    @property
    def nvme(self) -> bool:
        return "nvme" in (self.optimizer, self.params)

    @property
    def least_zero(self) -> int:
        """The first ZeRO stage that can."""
        return 3 if self.params or self.nvme else 1 if self.optimizer else 0


class Parallel(Frozen):
    engine: Literal["deepspeed", "accelerate"]
    zero: Literal[0, 1, 2, 3]
    ep: Positive = 1  # ranks that share the experts of a routed model
    sp: Positive = 1  # ranks that share each sequence
    offload: Offload = Offload()


class Data(Frozen):
    dir: str | None = None
    packing: Literal["concatenate", "best-fit"] = (
        "concatenate"  # best-fit: no document crosses a row
    )
    documents: bool = (
        False  # attention and positions start anew at each document; always when packed best-fit
    )
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
    mounts: tuple[
        Word, ...
    ] = ()  # HOST:INSIDE; the run's and the data's folders must be among them
    python: Word = "python3"  # inside


_WORD = TypeAdapter[str](Word)
MASK = str(SecretStr("x"))  # what a secret shows of itself


def _word(secret: SecretStr) -> SecretStr:
    _WORD.validate_python(secret.get_secret_value())
    return secret


# A value that is used and never recorded: printed or dumped, it is the mask.
Secret = Annotated[SecretStr, AfterValidator(_word)]


class Slurm(Frozen):
    """How a site takes jobs: each value is an argument of sbatch or srun, or an exported variable, never text of a
    script."""

    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: Word | None = None
    time: Annotated[str, Field(pattern=r"^(\d+-)?\d+(:\d+){0,2}$")] | None = (
        None  # left out, the partition's
    )
    cpus_per_task: Positive | None = None
    sbatch: tuple[Word, ...] = ()  # further arguments, such as "--exclusive"
    srun: tuple[Word, ...] = ()
    modules: tuple[Annotated[str, Field(pattern=r"^[\w./+-]+$")], ...] = ()
    setup: Word | None = None  # a shell file that every job sources first
    # Variables of every process. A run directory records their names; the values may be credentials.
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], Secret] = Field(
        default_factory=dict
    )
    container: Container | None = None
    scratch: Word | None = (
        None  # a folder on each node's own disk, to which shards are copied first
    )
    launcher: Literal["srun", "torchrun"] = "srun"
    grace_s: Positive = 300  # so long before the limit the run is asked to save
    max_restarts: Count = 100  # of one job, for whatever reason

    @model_validator(mode="after")
    def _time_to_train(self) -> Self:
        """SLURM sends the signal up to a minute early: a job that had it at once would save and come back for ever."""
        days, _, clock = (self.time or "").rpartition("-")
        parts = [int(part) for part in clock.split(":") if part]
        if not days and len(parts) < 3:  # MINUTES or MINUTES:SECONDS
            parts.insert(0, 0)
        seconds = 86400 * int(days or 0) + sum(
            n * unit for n, unit in zip(parts, (3600, 60, 1), strict=False)
        )
        if self.time is not None and seconds <= self.grace_s + 60:
            raise ValueError(
                f"time={self.time} ({seconds} s) ends before it could train: it saves grace_s={self.grace_s} before; "
                f"give more time, or --set cluster.slurm.grace_s={max(1, (seconds - 60) // 2)}"
            )
        return self

    def environment(self, outer: Mapping[str, str]) -> dict[str, str]:
        """The variables with their values. A run directory has the names only: then the values come
        from the environment of the submitting process."""
        values = {name: secret.get_secret_value() for name, secret in self.env.items()}
        for name, value in values.items():
            if value == MASK and name not in outer:
                raise ConfigError(
                    f"cluster.slurm.env.{name}: its value is not recorded with the run; export {name}, "
                    "or give the cluster file again with --cluster"
                )
            values[name] = outer[name] if value == MASK else value
        return values


class Cluster(Frozen):
    """What a GPU of the cluster can do, with its source in configs/cluster, and how its SLURM takes jobs."""

    name: str
    device: str | None = None  # as torch names it, in part
    gpus_per_node: Positive = 8
    peak_flops: Rate | None = None  # dense bf16, per GPU
    memory_bytes: Positive | None = None  # per GPU
    usd_per_gpu_hour: Rate | None = None  # what a forecast's cost is counted with
    rates: Rates | None = None  # for predicted step times
    slurm: Slurm = Slurm()

    @model_validator(mode="after")
    def _shares_of_something(self) -> Self:
        if self.rates is not None and self.peak_flops is None:
            raise ValueError(
                "rates are shares of peak_flops, which is missing; give it, or leave rates out"
            )
        return self

    def has(self, device: str) -> bool:
        """Whether a device, by torch's name for it, is one of these; a cluster that names none is believed."""
        return self.device is None or self.device in device


class RunConfig(Frozen):
    version: Literal[1] = VERSION
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    experiment: Annotated[str, Field(pattern=r"^[\w. /-]{1,64}$")]
    seed: Count
    init: str | None = None  # the run or checkpoint whose weights it begins with
    model: Model
    data: Data
    optim: Optim
    train: Train
    parallel: Parallel
    cluster: Cluster

    @property
    def rows(self) -> int:
        """Sequences of a global batch."""
        assert self.train.batch_tokens != "auto", "resolve the recipe first"
        return self.train.batch_tokens // self.model.seq
