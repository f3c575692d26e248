"""`launch finetune`: train a run further on examples of a task."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launch.options import (
    AsJson,
    Cluster,
    ConfigFile,
    Quiet,
    Settings,
    TokenizerFile,
    examples,
    parse_path,
)
from launch.pretrain import (
    DtypeName,
    Engine,
    Experiment,
    Nproc,
    Resume,
    Seed,
    Track,
    Zero,
    given_only,
    train_here,
    where,
)
from pipeline.errors import ConfigError, RunError

if TYPE_CHECKING:
    from pipeline.train.finetuning import FineTuning
    from pipeline.train.request import Devices, PlannedRun, Request

EXAMPLES = examples(
    "launch finetune --run runs/1b --data questions.jsonl --out runs/assistant",
    "launch finetune --run runs/1b --data reviews.jsonl --valid held-out.jsonl --epochs 3",
    "launch finetune --run runs/1b --data scores.jsonl --regression --lm-weight 0.5",
    "launch finetune --init runs/bert --data pairs.jsonl --lr 3e-5 --batch 16",
    "launch finetune --run runs/1b --data questions.jsonl --lora 16 --nproc 8 --zero 2",
    "launch finetune --resume --out runs/assistant",
)
Option = typer.Option
_DATA = "JSON lines with prompt and answer; or text, label and optionally text2."
Data = Annotated[Path | None, Option(parser=parse_path, metavar="FILE", help=_DATA)]
_RUN = "Run to start from, or one checkpoint of it."
Run = Annotated[Path | None, Option("--run", help=_RUN)]
Init = Annotated[Path | None, Option(help="The same, for a directory of `launch import`.")]
_VALID = "Held-out examples (default: a share of --data)."
Valid = Annotated[Path | None, Option(help=_VALID)]
Share = Annotated[float, Option(help="Share of --data to hold out.", min=0.0, max=0.9)]
_OUT = "Run directory (default: runs/finetune/RUN-FILE)."
Out = Annotated[Path | None, Option(parser=parse_path, metavar="PATH", help=_OUT)]
Epochs = Annotated[float, Option(help="Passes over the examples.", min=0.001)]
Batch = Annotated[int, Option(help="Examples per step.", min=1)]
_RATE = "Peak learning rate (default: a quarter of pretraining's, with --lora ten times that)."
Rate = Annotated[float | None, Option("--lr", help=_RATE)]
_SEQ = "Tokens of a row; longer texts are cut (default: the longest, at most the model's)."
Seq = Annotated[int | None, Option(help=_SEQ, min=2)]
_NUMBERS = "Predict labels as numbers; the default if any label has a fraction."
Regression = Annotated[bool, Option("--regression", help=_NUMBERS)]
_LM = "Weight of the language-model loss, in addition to the labels' loss; GPT has 0.5."
LmWeight = Annotated[float | None, Option(help=_LM, min=0.0)]
_LORA = "Train only adapters of this rank for the blocks' matrices (LoRA)."
Rank = Annotated[int | None, Option("--lora", help=_LORA, min=1)]
_SCRATCH = "Start from new random weights instead of the run's, as a baseline."
Scratch = Annotated[bool, Option("--scratch", help=_SCRATCH)]

app = typer.Typer()


@app.command(epilog=EXAMPLES)
def finetune(
    run: Run = None,
    init: Init = None,
    data: Data = None,
    valid: Valid = None,
    valid_share: Share = 0.1,
    out: Out = None,
    epochs: Epochs = 3.0,
    batch: Batch = 32,
    lr: Rate = None,
    seq: Seq = None,
    regression: Regression = False,
    lm_weight: LmWeight = None,
    lora: Rank = None,
    scratch: Scratch = False,
    nproc: Nproc = None,
    zero: Zero = None,
    engine: Engine = None,
    dtype: DtypeName = None,
    resume: Resume = False,
    experiment: Experiment = None,
    cluster: Cluster = None,
    config: ConfigFile = None,
    sets: Settings = None,
    seed: Seed = None,
    tokenizer: TokenizerFile = None,
    track: Track = True,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a run further on examples: answers to prompts, classes or numbers."""
    from pipeline.train.finetuning import FineTuning
    from pipeline.train.request import Request, plan_run

    before = out if resume else None  # the run to continue
    _, devices, ranks = where(None, nproc, None, cluster, config, sets or (), before)
    layout = {"zero": zero, "engine": engine}
    over = {"experiment": experiment, "seed": seed, "train": {"dtype": dtype}, "parallel": layout}
    request = Request(
        None, None, None, out, ranks, cluster, config, sets or (), given_only(over), resume
    )
    if resume:
        planned = plan_run(request, devices)
    else:
        start = _start(run, init)
        if data is None:
            raise ConfigError("--data is missing; give a file with a JSON object per line")
        asked = FineTuning(
            *(start, data, valid, valid_share, seq, batch, epochs, lr, regression, lm_weight),
            *(lora, scratch, tokenizer),
        )
        planned = _plan(asked, request, devices, quiet=quiet)
    train_here(planned, ranks, devices, track=track, as_json=as_json, quiet=quiet)


def _plan(
    asked: "FineTuning", request: "Request", devices: "Devices", *, quiet: bool
) -> "PlannedRun":
    """Write the examples into the new run's directory and plan the run."""
    from pipeline.train.finetuning import prepare
    from pipeline.train.request import plan_run

    name = f"{asked.start.name}-{asked.data.name.partition('.')[0]}"
    out = request.out or Path("runs") / "finetune" / name
    prepared = prepare(asked, out)
    if not quiet:
        typer.echo(prepared.note, err=True)
    start = replace(request, out=out, init=asked.start, defaults=prepared.defaults)
    try:
        return plan_run(replace(start, data=prepared.rows), devices)
    except BaseException:
        shutil.rmtree(prepared.rows)  # a refused run leaves nothing behind
        raise


def _start(run: Path | None, init: Path | None) -> Path:
    """Return the run to start from, from either option."""
    if run is not None and init is not None:
        both = f"--run {run} and --init {init}"
        raise ConfigError(f"{both} both give a model; remove one of them")
    start = run or init
    if start is None:
        raise ConfigError("--run is missing; name a run, such as runs/1b")
    if (start / "config.json").is_file():
        remedy = f"first `launch import --from {start} --out RUN`"
        raise RunError(f"{start} is a Hugging Face directory; {remedy}")
    return start
