"""`launch bench data`, `launch bench loader`: ratios measured in one run, since machines are noisy."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from launch.examples import examples

app = typer.Typer(help="Measure speed as ratios within one run.", no_args_is_help=True)


@app.command(epilog=examples("launch bench data", "launch bench data --megabytes 100 --json"))
def data(
    megabytes: Annotated[int, typer.Option(min=1, help="Of the python corpus to work on.")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Encoding and jsonl → shards, against sentencepiece, plain processes and datasets.map."""
    from pipeline.data import bench

    _print(bench.data(megabytes), as_json)


@app.command(epilog=examples("launch bench loader data/python", "launch bench loader data/web --seq 4096 --json"))
def loader(
    path: Annotated[Path, typer.Argument(help="A directory made by `launch data prepare`.")],
    rows: Annotated[int, typer.Option(min=1)] = 8,
    seq: Annotated[int, typer.Option(min=1)] = 2048,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Batches per second, against a bare permuted gather from the same tokens."""
    from pipeline.data import bench
    from pipeline.data.shards import Corpus

    _print(bench.loader(Corpus.open(path), rows, seq), as_json)


@app.command(
    epilog=examples(
        "launch bench train --size 1b --data data/web",
        "launch bench train --size tiny --arch moe --steps 5 --json",
        "launch bench train --size 125m --profile kernels.txt",
    )
)
def train(
    size: Annotated[str, typer.Option(help="A row of configs/sizes.toml.")] = "tiny",
    arch: Annotated[str, typer.Option(help="An architecture (configs/arch).")] = "dense",
    data: Annotated[Path | None, typer.Option(help="Prepared shards; left out, tokens are random.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps.")] = 3,
    zero: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")] = 1,
    cluster: Annotated[str | None, typer.Option(help="A cluster (configs/cluster), for its peak.")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="key.subkey=value, over everything else.")] = None,
    parts: Annotated[bool, typer.Option(help="Time forward, backward and optimizer by themselves too.")] = True,
    profile: Annotated[Path | None, typer.Option(help="Write the kernels of one step to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """The training step through the real engine: tokens/s, MFU, parts, memory, beside the device's own ceiling."""
    import os
    import socket

    from pipeline.config.load import load
    from pipeline.data.shards import Corpus
    from pipeline.parallel.world import World
    from pipeline.recipe import resolve
    from pipeline.train import bench

    if "RANK" not in os.environ:  # alone, not under torchrun
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        os.environ |= {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }
    world = World.from_environment(os.environ)
    if world.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    over = {"parallel": {"zero": zero}}
    config = load(size=size, arch=arch, cluster=cluster, sets=sets or (), over=over)
    config = resolve(config, ranks=world.size, gpu=world.device.type == "cuda")
    corpus = None if data is None else Corpus.open(data)
    _print(bench.train(config, world, corpus, steps=steps, parts=parts, profile=profile), as_json)


def _print(measured: Iterator[tuple[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(dict(measured)))
        return
    for what, value in measured:
        print(f"{what:<70} {value}", flush=True)
