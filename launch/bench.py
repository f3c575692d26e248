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


def _print(measured: Iterator[tuple[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(dict(measured)))
        return
    for what, value in measured:
        print(f"{what:<70} {value}", flush=True)
