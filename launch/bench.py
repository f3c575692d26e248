"""`launch bench`: measure both sides of a comparison in one call, because machines vary."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer import Argument, Option

from launch.options import Arch, AsJson, Cluster, Settings, Size, examples
from launch.tables import new_console, print_json, table
from pipeline.errors import ConfigError, RunError

if TYPE_CHECKING:
    from rich.status import Status

    from pipeline.bench.peers.trainers import Peer
    from pipeline.config.schema import RunConfig, RunSpec
    from pipeline.data.corpus import Corpus
    from pipeline.parallel.world import World

# datatrove hashes strings, which xxhash 4 no longer does.
_DATATROVE = "pip install datatrove spacy orjson 'xxhash<4'"
# The micro-batch that ran out of memory, from one trial of --auto-batch to the next.
_FAILED = "ISOFLOP_FAILED_MICRO_BATCH"

# Name and value. They are generated and printed one by one, because a measurement takes minutes.
Figures = Iterable[tuple[str, Any]]
_TENFOLD = "Also measure with ten times the text, which takes minutes."
Tenfold = Annotated[bool, Option("--tenfold", help=_TENFOLD)]
Profile = Annotated[bool, Option("--profile", help="Also print a step's kernels and gaps.")]
_COMPARE_TRAIN = (
    "Also time hf: Hugging Face's model of the same shape; hf-mixed: the same with fp32 master "
    "weights, like ours; or bf16: our own model without fp8 (fp32 on a CPU)."
)
CompareTrain = Annotated[str | None, Option(help=_COMPARE_TRAIN)]
AutoBatch = Annotated[bool, Option("--auto-batch", help="Find the largest micro-batch that fits.")]
_OVERHEADS = "Also measure what guard, log, hashes and checkpoints cost."
Overheads = Annotated[bool, Option("--overheads", help=_OVERHEADS)]

app = typer.Typer(
    help="Compare speed with other programs; measure learning in context.", no_args_is_help=True
)


@app.command(
    epilog=examples(
        "launch bench data",
        "launch bench data --compare datatrove --json",
        "launch bench data --megabytes 64 --tenfold",
    )
)
def data(
    megabytes: Annotated[int, Option(min=1, help="Megabytes of the python corpus to use.")] = 128,
    compare: Annotated[
        str | None, Option(help=f"datatrove: also time it, which takes minutes ({_DATATROVE}).")
    ] = None,
    tenfold: Tenfold = False,
    as_json: AsJson = False,
) -> None:
    """Compare encoding and jsonl → shards with sentencepiece, plain processes and datasets.map."""
    from pipeline.bench.data_stage import measure_data_stage

    installed = find_spec("datatrove") and find_spec("spacy")
    if compare is not None and not (compare == "datatrove" and installed):
        raise ConfigError(f"--compare {compare}: only datatrove is supported; {_DATATROVE}")
    figures = measure_data_stage(megabytes, datatrove=compare is not None, tenfold=tenfold)
    _print(figures, as_json)


@app.command(
    epilog=examples(
        "launch bench loader data/python", "launch bench loader data/web --seq 4096 --json"
    )
)
def loader(
    path: Annotated[Path, Argument(help="Directory made by `launch data prepare`.")],
    rows: Annotated[int, Option(min=1, help="Rows per batch.")] = 8,
    seq: Annotated[int, Option(min=1, help="Tokens per row.")] = 2048,
    as_json: AsJson = False,
) -> None:
    """Compare batches per second with a plain permuted gather from the same tokens."""
    from pipeline.bench.data_stage import measure_loader
    from pipeline.data.corpus import Corpus

    _print(measure_loader(Corpus.open(path), rows, seq), as_json)


@app.command(
    epilog=examples(
        "launch bench train --size 1b --data data/web",
        "launch bench train --size tiny --arch moe --steps 5 --json",
        "launch bench train --size 125m --profile",
        "launch bench train --size 1m --compare hf --steps 10",
        "launch bench train --size 1b --auto-batch --overheads",
        "launch bench train --size 3b --set recipe=adamw --set train.fp8=true "
        "--set model.scaled_embedding=true --compare bf16",
    )
)
def train(
    size: Size = "tiny",
    arch: Arch = None,
    data: Annotated[Path | None, Option(help="Prepared data (default: random tokens).")] = None,
    steps: Annotated[int, Option(min=1, max=100_000, help="Timed steps.")] = 3,
    zero: Annotated[int | None, Option(min=0, max=3, help="ZeRO stage (default: 1).")] = None,
    cluster: Cluster = None,
    sets: Settings = None,
    parts: Annotated[bool, Option(help="Also time forward, backward and optimizer.")] = True,
    profile: Profile = False,
    compare: CompareTrain = None,
    auto_batch: AutoBatch = False,
    overheads: Overheads = False,
    as_json: AsJson = False,
) -> None:
    """Time the training step with the real engine: tokens/s, MFU, parts and memory."""
    from rich.console import Console

    from pipeline.bench.step_time import measure_step
    from pipeline.config.layers import load
    from pipeline.data.corpus import Corpus
    from pipeline.parallel.world import World, leave
    from pipeline.process import one_node

    environment = dict(os.environ)  # unchanged, for the next trial of --auto-batch
    if "RANK" not in environment:  # not started by torchrun
        os.environ |= one_node(0, 1)
    world = World.from_environment(os.environ)
    if world.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # otherwise DeepSpeed looks for a GPU
    over = {
        "parallel": {} if zero is None else {"zero": zero},
        "train": {"auto_batch": True} if auto_batch else {},
    }
    corpus = None if data is None else Corpus.open(data)
    # As in `launch pretrain`, the data determines the vocabulary.
    pieces = None if corpus is None else corpus.manifest.tokenizer.vocab
    loaded = load(size=size, arch=arch, cluster=cluster, sets=sets or (), over=over, pieces=pieces)
    config, notes = _resolve(loaded, world, corpus, int(environment.get(_FAILED, 0)) or None)
    peer = None if compare is None else _peer(compare, config, world.size)
    terminal = False if as_json or not world.first else None  # None: detect
    # Refreshed once a second only, because its thread shares the CPU with the timed step.
    status = Console(stderr=True, force_terminal=terminal).status(
        "matmul ceiling", refresh_per_second=1
    )
    figures = measure_step(
        config, world, corpus, steps=steps, parts=parts, profile=profile, peer=peer,
        overheads=overheads, progress=status.update,
    )  # fmt: skip
    try:
        # Nothing is measured before this line, because `figures` is a generator.
        _print(chain(notes, _with_status(figures, status)), as_json, show=world.first)
    except RuntimeError as error:
        _try_smaller_batch(error, config, world, environment)
    finally:
        if world.size == 1 or not sys.exc_info()[0]:  # a failed rank might wait for others here
            leave()


@app.command(
    epilog=examples(
        "launch bench generate --size tiny --rows 8",
        "launch bench generate --run runs/1b --rows 32 --prompt-tokens 512 --json",
    )
)
def generate(
    size: Annotated[str | None, Option(help="Size of a random model (default: tiny).")] = None,
    arch: Arch = None,
    run: Annotated[Path | None, Option(help="Run to use instead of a random model.")] = None,
    rows: Annotated[int, Option(min=1, max=10**5, help="Prompts per call.")] = 8,
    prompt_tokens: Annotated[int, Option(min=1, max=10**6, help="Tokens of each prompt.")] = 64,
    new_tokens: Annotated[int, Option(min=1, max=10**6, help="Tokens to generate.")] = 128,
    rounds: Annotated[int, Option(min=1, max=10**5, help="Timed calls, for the median.")] = 3,
    sets: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Compare greedy generation with `generate` of transformers, from the same weights."""
    if run is not None and (size or arch or sets):
        raise ConfigError("--run has its own model; remove --size, --arch and --set")
    import torch

    from pipeline.bench.peers.generation import measure_generation, random_model
    from pipeline.checkpoint.restore import load_model
    from pipeline.config.layers import load

    device = "cuda" if torch.cuda.is_available() else "cpu"  # as in `launch generate`
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if run is None:
        model = random_model(load(size=size or "tiny", arch=arch, sets=sets or ()), device, dtype)
    else:
        model, _ = load_model(run, dtype=dtype, device=device)
    _print(measure_generation(model, rows, prompt_tokens, new_tokens, rounds), as_json)


@app.command(
    "in-context",
    epilog=examples(
        "launch bench in-context",
        "launch bench in-context --d 5 --examples 40 --size 1m --rows 1024 --steps 12000",
    ),
)
def in_context(
    d: Annotated[int, Option("--d", min=1, max=100, help="Dimensions of x.")] = 2,
    count: Annotated[int, Option("--examples", min=1, max=1000, help="Examples per row.")] = 10,
    noise: Annotated[float, Option(min=1e-3, max=1e3, help="Standard deviation of noise.")] = 0.5,
    size: Size = "83k",
    arch: Arch = None,
    steps: Annotated[int, Option(min=1, help="Training steps.")] = 2500,
    rows: Annotated[int, Option(min=1, max=10**5, help="Rows per step.")] = 64,
    test_rows: Annotated[int, Option(min=1, max=10**7, help="Rows of the final test.")] = 20_000,
    sets: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Train on linear regression in context; compare each error with the lowest possible one."""
    import torch

    from pipeline.bench.regression import Problem, configure, measure, train

    problem = Problem(d, count, noise)
    config = configure(problem, size, arch, steps, rows, sets or ())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def report(step: int, loss: float) -> None:
        if not as_json:
            typer.echo(f"step {step}/{steps}  squared error {loss:.4f}", err=True)

    model = train(config, problem, device, report)
    errors = measure(model, problem, test_rows, device)
    worst = max(errors.excess)
    columns = list(zip(errors.model, errors.ridge, errors.excess, strict=True))
    if as_json:
        keys = ("model", "ridge", "excess")
        found = [{"k": k, **dict(zip(keys, row, strict=True))} for k, row in enumerate(columns)]
        print_json({"d": d, "noise": noise, "steps": steps, "worst_excess": worst, "errors": found})
        return
    lines = [
        (f"{k}", f"{ours:.4f}", f"{best:.4f}", f"{more:.1%}")
        for k, (ours, best, more) in enumerate(columns)
    ]
    console = new_console()
    console.print(table("squared error after k examples", ("k", "model", "ridge", "excess"), lines))
    console.print(f"largest excess {worst:.1%}", markup=False)


def _resolve(
    loaded: "RunSpec", world: "World", corpus: "Corpus | None", failed: int | None
) -> tuple["RunConfig", list[tuple[str, str]]]:
    """Fill in the recipe and, with --auto-batch, the micro-batch; return its explanation too."""
    from pipeline.planner.check import check_one_micro_batch, resolve, widen_micro_batch
    from pipeline.train.request import Devices

    config = resolve(loaded, ranks=world.size, gpu=world.device.type == "cuda")
    check_one_micro_batch(loaded)
    notes = []
    if loaded.train.auto_batch:
        here = Devices.here()
        config, note = widen_micro_batch(config, world.size, here.memory, failed)
        notes.append(("auto-batch", note))
    # Only the training split is timed, so the held-out split may be too small.
    if corpus is not None:
        corpus.check(config, "train")
    return config, notes


def _peer(name: str, config: "RunConfig", ranks: int) -> "Callable[[RunConfig, World], Peer]":
    """Return the trainer to compare with; refuse before anything is timed."""
    from pipeline.bench.peers.trainers import HuggingFace, Twin, describe

    if name == "bf16" and config.train.fp8:
        return Twin
    if name == "bf16":
        raise ConfigError("--compare bf16 needs fp8 to compare with; add --set train.fp8=true")
    if name not in ("hf", "hf-mixed"):
        raise ConfigError(f"--compare {name}: use hf, hf-mixed, or bf16 with --set train.fp8=true")
    # Hugging Face's side of the comparison is plain torch without collectives.
    if ranks > 1:
        raise ConfigError(
            f"--compare {name} is for one process, not {ranks}; start it without torchrun"
        )
    describe(config)  # refuses a shape that transformers does not have
    return partial(HuggingFace, mixed=name == "hf-mixed")


def _try_smaller_batch(
    error: RuntimeError, config: "RunConfig", world: "World", environment: dict[str, str]
) -> NoReturn:
    """After this process ran out of memory, replace it by the next trial of --auto-batch.

    Only a new process has the memory again, because DeepSpeed never releases an engine.
    """
    from pipeline.planner.check import smaller_micro_batch
    from pipeline.process import python_module
    from pipeline.runs.directory import out_of_memory

    # torch also raises RuntimeError for wrong shapes and broken kernels. A retry cannot fix those.
    if not out_of_memory(type(error).__name__, str(error)):
        raise error
    micro = config.train.micro_batch
    lower = smaller_micro_batch(config, world.size)
    # With several ranks, the others wait for this one.
    if lower is None or "RANK" in environment:
        # Without --auto-batch `lower` is None even if a smaller micro-batch exists.
        remedy = "" if micro == 1 else "a smaller one, or "
        if lower is not None:
            remedy = f"--set train.micro_batch={lower.train.micro_batch} without --auto-batch, or "
        raise RunError(
            f"train.micro_batch={micro}: out of memory; use {remedy}--set train.recompute=true"
        ) from error
    typer.echo(f"micro-batch {micro} does not fit", err=True)
    command = python_module("launch", *sys.argv[1:])
    # The process id stays the same, so a shell or a scheduler sees one command.
    os.execve(sys.executable, command, environment | {_FAILED: str(micro)})


def _with_status(figures: Iterator[tuple[str, Any]], status: "Status") -> Iterator[tuple[str, Any]]:
    """Show the status on stderr while a figure is measured, and remove it before printing."""
    while True:
        # `next` does the measuring: a generator computes a figure when it is asked for.
        with status:
            figure = next(figures, None)
        if figure is None:
            return
        yield figure


def _print(figures: Figures, as_json: bool, show: bool = True) -> None:
    """Print each figure when it is measured. Hidden figures are measured too, for other ranks."""
    if as_json:
        # One object at the end. A failure halfway prints no JSON instead of half of it.
        found = dict(figures)
        if show:
            print(json.dumps(found))
        return
    for what, value in figures:
        if show:
            print(f"{what:<70} {value}", flush=True)
