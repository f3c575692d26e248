"""`launch finetune`: train a run further on examples of a task."""

import math
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from launch import options, pretrain
from launch.options import given_only
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.train.finetuning import FineTuning

EXAMPLES = options.examples(
    "launch finetune --run runs/1b --data answers.jsonl --out runs/assistant",
    "launch finetune --run runs/1b --data reviews.jsonl --valid held-out.jsonl --epochs 3",
    "launch finetune --run runs/1b --data scores.jsonl --regression --lm-weight 0.5",
    "launch finetune --init runs/bert --data pairs.jsonl --lr 3e-5 --batch 16",
    "launch finetune --run runs/1b --data answers.jsonl --lora 16 --nproc 8 --zero 2",
    "launch finetune --resume --out runs/assistant",
    "launch finetune --run runs/1b --data answers.jsonl --cluster h100 --slurm --time 2:00:00",
)
_DATA = "JSON lines with prompt and answer; or text, label and optionally text2."
Data = Annotated[Path | None, Option(parser=options.parse_path, metavar="FILE", help=_DATA)]
Run = Annotated[Path | None, Option("--run", help="Run to start from, or a checkpoint of it.")]
Init = Annotated[Path | None, Option(help="Model of `launch import`, instead of --run.")]
Valid = Annotated[Path | None, Option(help="Held-out examples (default: a share of --data).")]
_SHARE = "Share of --data held out without --valid (default: 0.1)."
Share = Annotated[float | None, Option(help=_SHARE, min=0.0, max=0.9)]
_OUT = "Run directory (default: RUN-FILE in runs/finetune)."
Out = Annotated[Path | None, options.output_option(text=_OUT)]
Epochs = Annotated[float, Option(help="Passes over the examples.", min=0.001, max=1e6)]
Batch = Annotated[int, Option(help="Examples per step.", min=1)]
_RATE = "Peak learning rate (default: a quarter of pretraining's; with --lora, 2.5 times it)."
Rate = Annotated[float | None, Option("--lr", help=_RATE)]
_SEQ = "Tokens of a row; longer texts are cut (default: the longest text, up to the model's)."
Seq = Annotated[int | None, Option(help=_SEQ, min=2)]
_NUMBERS = "Predict numbers instead of classes; the default if a label has a decimal point."
Regression = Annotated[bool, Option("--regression", help=_NUMBERS)]
_LM = "Weight of the language-model loss that is added to the labels' (default: 0; GPT: 0.5)."
LmWeight = Annotated[float | None, Option(help=_LM, min=0.0, max=1e6)]
_LORA = "Train only adapters of this rank (LoRA) and the head of the labels."
Rank = Annotated[int | None, Option("--lora", help=_LORA, min=1)]
_SCRATCH = "Start from new random weights instead of the run's, as a baseline."
Scratch = Annotated[bool, Option("--scratch", help=_SCRATCH)]

# Options that a resumed run would ignore.
OF_NEW_RUNS = (
    *("run", "init", "data", "valid", "valid_share", "epochs", "batch", "lr", "seq"),
    *("regression", "lm_weight", "lora", "scratch", "tokenizer"),
)

app = typer.Typer()


@app.command(epilog=EXAMPLES)
def finetune(
    context: typer.Context,
    run: Run = None,
    init: Init = None,
    data: Data = None,
    valid: Valid = None,
    valid_share: Share = None,
    out: Out = None,
    epochs: Epochs = 3.0,
    batch: Batch = 32,
    lr: Rate = None,
    seq: Seq = None,
    regression: Regression = False,
    lm_weight: LmWeight = None,
    lora: Rank = None,
    scratch: Scratch = False,
    nproc: pretrain.Nproc = None,
    zero: pretrain.Zero = None,
    engine: pretrain.Engine = None,
    dtype: pretrain.DtypeName = None,
    resume: pretrain.Resume = False,
    experiment: pretrain.Experiment = None,
    cluster: options.Cluster = None,
    config: options.ConfigFile = None,
    sets: options.Settings = None,
    seed: pretrain.Seed = None,
    tokenizer: options.TokenizerFile = None,
    track: pretrain.Track = True,
    as_json: options.AsJson = False,
    quiet: options.Quiet = False,
    slurm: pretrain.Slurm = False,
    nodes: pretrain.NodeCount = None,
    gpus_per_node: pretrain.Gpus = None,
    time: pretrain.Time = None,
    dry_run: pretrain.DryRun = False,
) -> None:
    """Train a run further on examples: answers to prompts, classes or numbers."""
    from pipeline.train.finetuning import FineTuning
    from pipeline.train.request import Request, plan_run

    pretrain.refuse_job_options(slurm, nodes, gpus_per_node, time, dry_run)
    over: dict[str, Any] = {"experiment": experiment, "seed": seed, "train": {"dtype": dtype}}
    over |= {"parallel": {"zero": zero, "engine": engine}, "cluster": {"slurm": {"time": time}}}
    request = Request(
        out=out, cluster=cluster, file=config, sets=sets or (), over=given_only(over), resume=resume
    )  # fmt: skip
    request, devices, job = pretrain.place(request, slurm, nodes, nproc, gpus_per_node)
    start = pretrain.Start(
        request, devices, job, track=track, dry_run=dry_run, as_json=as_json, quiet=quiet
    )
    if resume:
        _refuse_options_of_new_runs(context)
        start.begin(plan_run(replace(request, data=_examples_of(out)), devices))
        return
    asked = FineTuning(
        start=_start(run, init), data=_given(data), valid=valid,
        valid_share=_share(valid, valid_share), seq=seq, batch=batch, epochs=epochs, lr=lr,
        regression=regression, lm_weight=lm_weight, lora=lora, scratch=scratch, tokenizer=tokenizer,
    )  # fmt: skip
    _begin_new(asked, start)


def _begin_new(asked: "FineTuning", start: pretrain.Start) -> None:
    """Write the examples into the new run's directory, plan the run and begin it."""
    from pipeline.runs.directory import RunDir
    from pipeline.train.finetuning import prepare
    from pipeline.train.request import plan_run

    name = f"{asked.start.resolve().name}-{asked.data.name.partition('.')[0]}"
    out = start.request.out or Path("runs") / "finetune" / name
    _check_batch(asked.batch, start.job.worlds if start.job else [start.request.nproc])
    was_there = out.exists()
    prepared = prepare(asked, out)
    try:
        if not start.quiet:
            typer.echo(prepared.note, err=True)
        new = replace(start.request, out=out, init=asked.start, defaults=prepared.defaults)
        start.begin(plan_run(replace(new, data=prepared.rows), start.devices))
    finally:
        # If the run was refused, interrupted or only shown, remove its examples.
        if not RunDir(out).exists:
            shutil.rmtree(prepared.rows)
            if not was_there:
                with suppress(OSError):  # not empty: it has other files
                    out.rmdir()


def _check_batch(batch: int, worlds: Sequence[int]) -> None:
    """Refuse a batch that is not a multiple of every number of processes the job may have."""
    refused = next((world for world in worlds if batch % world), None)
    if refused is not None:
        every = math.lcm(*worlds[:8])
        remedy = f"try --batch {max(1, round(batch / every)) * every}"
        if len(worlds) > 1:
            remedy += ", or give one number of --nodes"
        if len(worlds) > 8:
            remedy = "give one number of --nodes"
        raise ConfigError(f"--batch {batch} is not a multiple of {refused} processes; {remedy}")


def _refuse_options_of_new_runs(context: typer.Context) -> None:
    """Refuse options that a resumed run would ignore, because it keeps its own settings."""
    for name in OF_NEW_RUNS:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            text = f"{option} is for a new run, and --resume keeps the settings of the run"
            raise ConfigError(f"{text}; remove {option}, or give another --out without --resume")


def _examples_of(run: Path | None) -> Path | None:
    """Return the examples in the run's directory, which may have moved since they were written."""
    from pipeline.runs.directory import ROWS

    rows = None if run is None else run / ROWS
    return rows if rows is not None and rows.is_dir() else None


def _given(data: Path | None) -> Path:
    if data is None:
        raise ConfigError("--data is missing; give a file with a JSON object per line")
    return data


def _share(valid: Path | None, share: float | None) -> float:
    if valid is not None and share is not None:
        both = f"--valid {valid} and --valid-share {share:g}"
        raise ConfigError(f"{both} both choose the held-out examples; remove one of them")
    return 0.1 if share is None else share


def _start(run: Path | None, init: Path | None) -> Path:
    """Return the run to start from, from either option."""
    if run is not None and init is not None:
        both = f"--run {run} and --init {init}"
        raise ConfigError(f"{both} both give a model; remove one of them")
    start = run or init
    if start is None:
        raise ConfigError("--run is missing; name a run, such as runs/1b")
    return start
