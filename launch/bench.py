"""`launch bench data | loader | train`: ratios measured in one run, since machines are noisy."""

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.options import examples
from pipeline.errors import ConfigError, RunError

if TYPE_CHECKING:
    from rich.status import Status

    from pipeline.bench.step_time import Peer
    from pipeline.config.schema import RunConfig
    from pipeline.parallel.world import World

_DATATROVE = "pip install datatrove spacy orjson 'xxhash<4'"  # it hashes strings, which xxhash 4 no longer does

_FAILED = "ISOFLOP_FAILED_MICRO_BATCH"  # from one trial of --auto-batch to the next

app = typer.Typer(help="Measure speed as ratios within one run.", no_args_is_help=True)


@app.command(
    epilog=examples(
        "launch bench data",
        "launch bench data --compare datatrove --json",
        "launch bench data --megabytes 64 --tenfold",
    )
)
def data(
    megabytes: Annotated[int, typer.Option(min=1, help="Of the python corpus to work on.")] = 128,
    compare: Annotated[
        str | None, typer.Option(help=f"datatrove: its pipelines too ({_DATATROVE}); minutes more.")
    ] = None,
    tenfold: Annotated[
        bool, typer.Option("--tenfold", help="Ten times the text too; minutes more.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Encoding and jsonl → shards, against sentencepiece, plain processes and datasets.map."""
    from importlib.util import find_spec

    from pipeline.bench import data_stage as bench

    if compare is not None and (
        compare != "datatrove" or not (find_spec("datatrove") and find_spec("spacy"))
    ):
        raise ConfigError(f"--compare {compare}: only datatrove is known; {_DATATROVE}")
    _print(bench.data(megabytes, datatrove=compare is not None, tenfold=tenfold), as_json)


@app.command(
    epilog=examples(
        "launch bench loader data/python", "launch bench loader data/web --seq 4096 --json"
    )
)
def loader(
    path: Annotated[Path, typer.Argument(help="A directory made by `launch data prepare`.")],
    rows: Annotated[int, typer.Option(min=1)] = 8,
    seq: Annotated[int, typer.Option(min=1)] = 2048,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Batches per second, against a bare permuted gather from the same tokens."""
    from pipeline.bench import data_stage as bench
    from pipeline.data.corpus import Corpus

    _print(bench.loader(Corpus.open(path), rows, seq), as_json)


@app.command(
    epilog=examples(
        "launch bench train --size 1b --data data/web",
        "launch bench train --size tiny --arch moe --steps 5 --json",
        "launch bench train --size 125m --profile",
        "launch bench train --size 1m --compare hf --steps 10",
        "launch bench train --size 1b --auto-batch --overheads",
        "launch bench train --size 3b --set train.fp8=true --set model.scaled_embedding=true --compare bf16",
    )
)
def train(
    size: Annotated[str, typer.Option(help="A row of configs/sizes.toml.")] = "tiny",
    arch: Annotated[str, typer.Option(help="An architecture (configs/arch).")] = "dense",
    data: Annotated[
        Path | None, typer.Option(help="Prepared shards; left out, tokens are random.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps.")] = 3,
    zero: Annotated[
        int | None, typer.Option(min=0, max=3, help="ZeRO stage; 1 if left out.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="A cluster (configs/cluster), for its peak and memory.")
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="key.subkey=value, over everything else.")
    ] = None,
    parts: Annotated[
        bool, typer.Option(help="Time forward, backward and optimizer by themselves too.")
    ] = True,
    profile: Annotated[
        bool, typer.Option("--profile", help="The kernels of one step, and on a GPU its pauses.")
    ] = False,
    compare: Annotated[
        str | None,
        typer.Option(
            help="hf: Hugging Face's model of the same shape, in turn with ours (hf-mixed: with fp32 weights, as ours "
            "keeps them); bf16: our own without fp8 (on a CPU fp32)."
        ),
    ] = None,
    auto_batch: Annotated[
        bool, typer.Option("--auto-batch", help="The largest micro-batch that fits, by trial.")
    ] = False,
    overheads: Annotated[
        bool,
        typer.Option(
            "--overheads", help="What guard, log, hashes and checkpoints cost, each by itself."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """The training step through the real engine: tokens/s, MFU, parts, memory, beside the device's own ceiling."""
    import os
    import sys

    from rich.console import Console

    from pipeline.bench import step_time as bench
    from pipeline.config.layers import load
    from pipeline.data.corpus import Corpus
    from pipeline.parallel.world import World
    from pipeline.planner.check import DeviceMemory, check_one_micro_batch, smaller_micro_batch
    from pipeline.planner.recipe import resolve
    from pipeline.process import one_node, python_module
    from pipeline.runs.faults import out_of_memory
    from pipeline.train.request import Devices

    before = dict(os.environ)
    if "RANK" not in before:  # alone, not under torchrun
        os.environ |= one_node(0, 1)
    world = World.from_environment(os.environ)
    if world.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    over = {
        "parallel": {} if zero is None else {"zero": zero},
        "train": {"auto_batch": True} if auto_batch else {},
    }
    corpus = None if data is None else Corpus.open(data)
    layer = {} if corpus is None else {"model": {"vocab": corpus.padded_vocab}}
    loaded = load(size=size, arch=arch, data=layer, cluster=cluster, sets=sets or (), over=over)
    config = resolve(loaded, ranks=world.size, gpu=world.device.type == "cuda")
    first: list[tuple[str, Any]] = []
    check_one_micro_batch(loaded)
    if loaded.train.auto_batch:
        here, failed = Devices.here(), int(before.get(_FAILED, 0)) or None
        config, note = DeviceMemory(here.memory_bytes, here.name, not here.gpus).widen(
            config, world.size, failed
        )
        first.append(("auto-batch", note))
    peer = None
    if compare is not None:
        peer = _peer(compare, config, world.size)
    if corpus is not None:
        corpus.check(config.model.vocab, config.model.seq, "train")
    terminal = False if as_json or not world.first else None  # None: whatever it is
    # once a second: its thread shares the processor with what is timed
    status = Console(stderr=True, force_terminal=terminal).status(
        "matmul ceiling", refresh_per_second=1
    )
    figures = bench.train(
        config,
        world,
        corpus,
        steps=steps,
        parts=parts,
        profile=profile,
        peer=peer,
        beside=overheads,
        say=status.update,
    )
    try:
        _print(chain(first, _waited(figures, status)), as_json, show=world.first)
    except RuntimeError as error:
        if not out_of_memory(type(error).__name__, str(error)):
            raise
        lower, micro = smaller_micro_batch(config, world.size), config.train.micro_batch
        if lower is None or "RANK" in before:  # of several ranks the others wait for this one
            least = "" if micro == 1 else "a smaller one, or "
            if lower is not None:
                least = f"--set train.micro_batch={lower.train.micro_batch} in place of --auto-batch, or "
            said = (
                f"train.micro_batch={micro}: memory ran out; take {least}--set train.recompute=true"
            )
            raise RunError(said) from error
        # the next trial in this process's place: DeepSpeed lets go of no engine, and only so is its memory free again
        typer.echo(f"micro-batch {micro} does not fit", err=True)
        os.execve(
            sys.executable,
            python_module("launch", *sys.argv[1:]),
            before | {_FAILED: str(micro)},
        )


def _peer(name: str, config: "RunConfig", ranks: int) -> "Callable[[RunConfig, World], Peer]":
    """Refused before anything is timed."""
    from pipeline.bench.peers.hf_model import HuggingFace, described
    from pipeline.bench.step_time import Twin

    if name == "bf16" and config.train.fp8:
        return Twin
    if name == "bf16":
        raise ConfigError("--compare bf16 is what fp8 is held against; add --set train.fp8=true")
    if name not in ("hf", "hf-mixed"):
        raise ConfigError(
            f"--compare {name} is not known; take hf, hf-mixed, or bf16 with --set train.fp8=true"
        )
    if ranks > 1:
        raise ConfigError(
            f"--compare {name} is for one process, and these are {ranks}; start it without torchrun"
        )
    described(config)
    return partial(HuggingFace, mixed=name == "hf-mixed")


def _waited(figures: Iterator[tuple[str, Any]], status: "Status") -> Iterator[tuple[str, Any]]:
    """What is being done stands on stderr while a figure is waited for, and is gone when the figure is printed."""
    while True:
        with status:
            figure = next(figures, None)
        if figure is None:
            return
        yield figure


def _print(measured: Iterable[tuple[str, Any]], as_json: bool, show: bool = True) -> None:
    """All is measured in any case: other ranks may take part in it."""
    if as_json:
        found = dict(measured)
        if show:
            print(json.dumps(found))
        return
    for what, value in measured:
        if show:
            print(f"{what:<70} {value}", flush=True)
