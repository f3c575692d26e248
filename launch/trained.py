"""Use a trained model: `launch evaluate`, `export` and `import`."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from launch.options import AsJson, RunPath, TokenizerFile, examples, output_option
from launch.tables import new_console, print_json, table
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig
    from pipeline.data.tokenizer import Tokenizer
    from pipeline.tasks.answering import Reader
    from pipeline.tasks.questions import Task

MOST_PROCESSES = 8  # or as many as there are CPUs, if these are more; each loads the model

Data = Annotated[Path | None, Option(help="Prepared data (default: the data of the run).")]
_BATCHES = "Held-out batches (default: as many as in training)."
Batches = Annotated[int | None, Option(min=1, help=_BATCHES)]
_TASKS = "File of questions (JSON lines), or the name of a task of lm-eval. Repeatable."
Tasks = Annotated[list[str] | None, Option(help=_TASKS)]
_QUESTIONS = "Questions per task, evenly spaced; for lm-eval, the first ones (default: all)."
Questions = Annotated[int | None, Option(min=1, help=_QUESTIONS)]
Shots = Annotated[int | None, Option(min=0, help="Examples before each question; lm-eval only.")]
TaskDir = Annotated[Path | None, Option(help="Directory with more lm-eval tasks, as YAML files.")]
Nproc = Annotated[int | None, Option(min=1, help="Processes for the tasks (default: one per GPU).")]
To = Annotated[Path, output_option(text="Directory to write, for transformers' Auto classes.")]
Dtype = Annotated[str, Option(help="Precision of the exported weights: fp32 or bf16.")]
Source = Annotated[Path, Option("--from", help="Directory written by `save_pretrained`.")]
Out = Annotated[Path, output_option(text="Directory to create, with a checkpoint at step 0.")]

app = typer.Typer()


@app.command(
    epilog=examples(
        "launch evaluate --run runs/1b",
        "launch evaluate --run runs/1b/checkpoints/step-00002000 --data data/other --batches 64 "
        "--json",
        "launch evaluate --run runs/1b --tasks blimp.jsonl.gz --questions 6700",
        "launch evaluate --run runs/1b --tasks hellaswag --tasks lambada_openai --nproc 8",
        "sbatch --gpus-per-node=1 slurm/export.sbatch evaluate --run runs/1b",
    )
)
def evaluate(
    run: RunPath,
    data: Data = None,
    batches: Batches = None,
    tasks: Tasks = None,
    questions: Questions = None,
    shots: Shots = None,
    task_dir: TaskDir = None,
    nproc: Nproc = None,
    tokenizer: TokenizerFile = None,
    as_json: AsJson = False,
) -> None:
    """Print nats per token and bits per byte on held-out text, or the scores of tasks."""
    if tasks:
        for option, value in (("data", data), ("batches", batches)):
            if value is not None:
                raise ConfigError(f"--{option} {value} is for held-out text; remove it or --tasks")
        _evaluate_tasks(run, tasks, questions, shots, task_dir, nproc, tokenizer, as_json=as_json)
        return
    of_tasks = {"questions": questions, "shots": shots, "task-dir": task_dir, "nproc": nproc}
    for option, value in of_tasks.items():
        if value is not None:
            raise ConfigError(f"--{option} {value} belongs to tasks; add --tasks")
    _evaluate_text(run, data, batches, as_json=as_json)


def _evaluate_text(run: Path, data: Path | None, batches: int | None, *, as_json: bool) -> None:
    """Evaluate on held-out text, on one device."""
    import torch

    from pipeline.checkpoint.restore import load_model
    from pipeline.data.corpus import Corpus
    from pipeline.parallel.world import World
    from pipeline.runs.directory import same_tokenizer
    from pipeline.train.measure import Evaluator

    # An empty environment: one process, even if a job with many ranks calls this command.
    world = World.from_environment({})
    # The usual precision of training on each kind of device.
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    model, config = load_model(run, dtype=dtype, device=world.device)
    where = data or config.data.dir
    if where is None:
        raise ConfigError(f"{run} does not name its data; give --data DIR")
    corpus = Corpus.open(Path(where))
    remedy = "give data made with its tokenizer"
    # Two tokenizers of the same size fit the same model, and the loss would mean nothing.
    same_tokenizer(run, corpus.manifest.tokenizer.fingerprint, f"--data {where}", remedy)
    # An imported model may have no tokenizer to compare with, and its vocabulary may be larger.
    pieces = corpus.manifest.tokenizer.vocab + config.objective.special_ids
    if pieces > config.model.vocab:
        sizes = f"{pieces:,} pieces, and the model {config.model.vocab:,}"
        raise ConfigError(f"--data {where} has {sizes}; {remedy}")
    # By default the batches that training evaluates on, so that the run's log is comparable.
    evaluator = Evaluator(config, corpus, world, batches=batches)
    with torch.no_grad():
        figures = evaluator(lambda micro: model(**micro.inputs))
    if as_json:
        print(json.dumps({"run": str(run), "data": str(where), **figures}))
        return
    more = f", {figures['bpb']:.4f} bits per byte" if "bpb" in figures else ""
    unit = "nats per predicted token"
    if scores := {key.partition("/")[2]: figures[key] for key in figures if "/" in key}:
        unit = "loss per row"
        more = "".join(f", {name} {score:.4f}" for name, score in scores.items())
    print(f"{run}: {figures['loss']:.4f} {unit}{more} on {where}")


def _evaluate_tasks(
    run: Path,
    tasks: Sequence[str],
    questions: int | None,
    shots: int | None,
    folder: Path | None,
    processes: int | None,
    tokenizer: Path | None,
    *,
    as_json: bool,
) -> None:
    """Print the scores of a run; a task is a file if one has its name, or a task of lm-eval."""
    from pipeline.tasks import harness
    from pipeline.tasks.questions import read_tasks

    files = [task for task in tasks if Path(task).is_file()]
    names = [task for task in tasks if task not in files]
    _refuse_options(names, shots, folder, processes)
    given = [task.sample(questions) for task in read_tasks(files)]

    # Imported after the checks, because torch takes seconds.
    import torch

    from pipeline.checkpoint.restore import run_config
    from pipeline.runs.directory import tokenizer_of
    from pipeline.tasks.answering import open_model

    config = run_config(run)
    warn_of_labels(run, config)
    pieces = tokenizer_of(run, config.data.dir, tokenizer, vocab=config.model.vocab)
    with open_model(run, processes or max(1, torch.cuda.device_count())) as reader:
        rows = [row for task in given for row in _rows(task, reader, pieces)]
        more = (
            harness.evaluate(names, reader, pieces, folder=folder, questions=questions, shots=shots)
            if names
            else {}
        )
    if as_json:
        print_json({"run": str(run), "tasks": {row.pop("task"): row for row in rows} | more})
        return
    console = new_console()
    if rows:
        columns = ("task", "accuracy", "per byte", "bits/byte", "questions")
        lines = []
        for row in rows:
            shares = [f"{row[key]:.1%}" for key in ("accuracy", "accuracy_per_byte")]
            others = [f"{row['bits_per_byte']:.4f}", f"{row['questions']:,}"]
            lines.append([str(row["task"]), *shares, *others])
        console.print(table(str(run), columns, lines))
    for task, figures in more.items():
        shown = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
        console.print(f"{task}  {shown}", markup=False)


def _refuse_options(
    names: list[str], shots: int | None, folder: Path | None, processes: int | None
) -> None:
    """Refuse options without effect, more processes than the machine can run, unknown tasks."""
    from pipeline.tasks.harness import refuse_unknown

    for name in names:
        # The name of a task of lm-eval has neither of the two.
        if "/" in name or name.endswith((".jsonl", ".gz")):
            problem = "not a regular file" if Path(name).exists() else "no such file"
            raise ConfigError(f"--tasks {name}: {problem}; check the path")
        if not name or Path(name).is_dir():
            text = f"--tasks {name!r} is not a file"
            raise ConfigError(f"{text}; give a file of questions, or the name of a task of lm-eval")
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--task-dir {folder} is not a directory; give one with YAML files")
    for option, value in (("shots", shots), ("task-dir", folder)):
        if value is not None and not names:
            raise ConfigError(f"--{option} {value} is for tasks of lm-eval; remove it")
    most = max(MOST_PROCESSES, os.cpu_count() or 1)
    if processes is not None and processes > most:
        raise ConfigError(f"--nproc {processes} is too many for this machine; use at most {most}")
    refuse_unknown(names, folder)


def warn_of_labels(run: Path, config: "RunConfig") -> None:
    """Warn that a run was fine-tuned on labels only."""
    from pipeline.config.objective import Labels

    objective = config.objective
    decoder = config.model.stack == "decoder"  # both commands refuse encoders later
    if isinstance(objective, Labels) and decoder and not objective.lm_weight:
        text = f"{run} was fine-tuned on labels only, so its text may be poor"
        remedy = "`launch finetune --lm-weight 0.5` trains on text too"
        typer.echo(f"warning: {text}; {remedy}", err=True)


def _rows(task: "Task", reader: "Reader", pieces: "Tokenizer") -> list[dict[str, float | str]]:
    """Return a row for the task, the mean over its parts, and one per part if it has several."""
    from pipeline.tasks.likelihood import pairs_of, score_parts
    from pipeline.tasks.questions import mean

    parts = score_parts(task, reader.score(pairs_of(task, pieces)))
    named = {task.name: mean(parts.values())}
    if len(parts) > 1:
        named |= {f"{task.name}/{part}": score for part, score in parts.items()}
    return [{"task": name, **score._asdict()} for name, score in named.items()]


# Trailing underscores: `import` is a Python keyword, and `export` the function that is called.
@app.command(
    "export",
    epilog=examples(
        "launch export --run runs/1b --to hub/1b",
        "launch export --run runs/1b --to hub/1b --dtype bf16 --json",
    ),
)
def export_(
    run: RunPath,
    to: To,
    dtype: Dtype = "fp32",
    tokenizer: TokenizerFile = None,
    as_json: AsJson = False,
) -> None:
    """Export a run as a Hugging Face directory, after checking that transformers' logits match."""
    import torch

    from pipeline.checkpoint.restore import load_model
    from pipeline.config.objective import Labels
    from pipeline.hub.exporting import export
    from pipeline.hub.sequences import export_family
    from pipeline.runs.directory import run_of, tokenizer_of

    # Both sides are rounded to this dtype before their logits are compared.
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if dtype not in dtypes:
        raise ConfigError(f"--dtype {dtype} is not one of {', '.join(dtypes)}")
    # In fp32 on the CPU, where the logits of the two implementations can be compared closely.
    model, config = load_model(run)
    labels = config.objective if isinstance(config.objective, Labels) else None
    export_family(config.model, labels)  # refuse before the slow part
    # An imported model may come without a tokenizer and has no data to take one from.
    known = tokenizer or config.data.dir or (run_of(run) / "tokenizer.model").exists()
    found = None
    if known:
        found = tokenizer_of(run, config.data.dir, tokenizer, vocab=config.model.vocab)
    # The directory appears under its name only after the logits match.
    done = export(model, to, found, dtypes[dtype], labels=labels)
    if as_json:
        print(json.dumps({"to": str(to), "tokenizer": found is not None, **done._asdict()}))
        return
    print(
        f"{done.architecture} in {to}: {done.tensors} tensors, {done.bytes / 2**20:,.1f} MiB; "
        f"logits differ from transformers' by {done.difference:.1e} of the largest"
    )
    if config.objective.whole_prompts:
        print(
            f'objective.kind="{config.objective.kind}" trains prompts that are read in both '
            "directions, but transformers reads them from left to right; use `launch generate`"
        )
    if found is None:
        print(
            "no tokenizer files: the run has none and names no data; add them yourself, or export "
            "again with --tokenizer FILE"
        )
    elif not (to / "tokenizer.json").exists():
        print(
            "transformers has no tokenizer with the ids of this one: encode texts with "
            f"sentencepiece and {to / 'spiece.model'}"
        )


@app.command(
    "import",
    epilog=examples(
        "launch import --from hub/llama --out runs/llama",
        "launch pretrain --init runs/llama --data data/web --out runs/more",
    ),
)
def import_(
    source: Source,
    out: Out,
    as_json: AsJson = False,
) -> None:
    """Import a Hugging Face model; `launch pretrain --init OUT` continues its training."""
    from pipeline.hub.importing import import_model

    # The same check as in an export, in the other direction: a mismatch leaves no directory.
    done = import_model(source, out)
    if as_json:
        print(json.dumps({"out": str(out), **done._asdict()}))
        return
    print(
        f"{done.family} in {out}: {done.parameters:,} parameters; logits differ from "
        f"transformers' by {done.difference:.1e} of the largest"
    )
    print(f"continue training with: launch pretrain --init {out} --data DATA --out RUN")
