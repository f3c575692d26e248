"""launch data: text to shards, and a look at them."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.options import examples

if TYPE_CHECKING:
    from pipeline.data.prepare import Report

app = typer.Typer(
    help="Turn text into token shards with Ray, and look at them.", no_args_is_help=True
)

PREPARE = examples(
    "launch data prepare --source python --out data/python",
    "launch data prepare --source 'web/*.jsonl.zst' --source books.parquet --vocab-size 32768 --out data/web",
    "launch data prepare --config web --source crawl/ --set dedup.near.threshold=0.7 --out data/crawl",
    "launch data prepare --source hf:roneneldan/TinyStories:train --tokenizer t.model --out data/stories",
)


@app.command(epilog=PREPARE)
def prepare(
    out: Annotated[Path, typer.Option(help="Directory for the shards.")],
    source: Annotated[
        list[str] | None,
        typer.Option(
            help="python, synthetic, hf:NAME[:split], a file, directory or glob; repeatable."
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(help="Filters, dedup, mixture: a name in configs/data or a TOML file."),
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Train a SentencePiece BPE of this size.  [default: 4096]")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Use this SentencePiece .model instead.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Ray workers; the shards do not depend on it.  [default: all CPUs]"
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, help="Of the synthetic corpus and of the tokenizer's sample.  [default: 0]"
        ),
    ] = None,
    valid_share: Annotated[
        float | None,
        typer.Option(min=0, max=0.5, help="Documents held out, by their hash.  [default: 0.01]"),
    ] = None,
    limit_bytes: Annotated[
        int | None,
        typer.Option(min=1, help="Of each source.  [default: 32 MiB of a built-in, else all]"),
    ] = None,
    text_key: Annotated[
        str | None, typer.Option(help="Field or column that holds the text.  [default: text]")
    ] = None,
    malformed_share: Annotated[
        float, typer.Option(min=0, max=1, help="More malformed documents than this is an error.")
    ] = 0.01,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any setting of the recipe, e.g. dedup.near.threshold=0.7."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Read text, train or take a tokenizer, write Megatron .bin/.idx shards and a manifest with checksums.

    The same arguments give the same bytes whatever the number of workers. A second call finishes what a first one left.
    """
    from pipeline.data.corpus_recipe import load_recipe
    from pipeline.data.prepare import prepare as make
    from pipeline.data.tokenizer import Tokenizer
    from pipeline.errors import ConfigError

    if vocab_size is not None and tokenizer is not None:
        raise ConfigError(
            f"vocab-size={vocab_size} and tokenizer={tokenizer} exclude each other; give one"
        )
    given = Tokenizer.open(tokenizer) if tokenizer else None
    settings = {
        "sources": tuple(source) if source else None,
        "vocab_size": given.vocab if given else vocab_size,
        "tokenizer": given.fingerprint if given else None,
        "seed": seed,
        "valid_share": valid_share,
        "limit_bytes": limit_bytes,
        "text_key": text_key,
    }
    recipe = load_recipe(config, settings, sets or ())
    start = time.monotonic()
    with _progress(quiet or as_json) as report:
        manifest, reused = make(
            recipe,
            out,
            model=given.model if given else None,
            workers=workers,
            malformed_share=malformed_share,
            report=report,
            warn=lambda line: print(line, file=sys.stderr),
        )
    seconds = time.monotonic() - start
    if as_json:
        print(
            json.dumps(
                {
                    "out": str(out),
                    "reused": reused,
                    "seconds": round(seconds, 2),
                    **manifest.model_dump(),
                }
            )
        )
    else:
        train, valid = manifest.splits["train"], manifest.splits["valid"]
        state = "already there, every checksum right" if reused else f"written in {seconds:.1f} s"
        print(
            f"{out}: {train.tokens:,} tokens to train on, {valid.tokens:,} held out, "
            f"{(train.bytes + valid.bytes) / (train.tokens + valid.tokens):.2f} bytes per token, "
            f"vocabulary {manifest.tokenizer.vocab:,}; {state}"
        )
        for stage in manifest.stages:
            kept = f"kept {stage.documents_kept:>12,} of {stage.documents_in:,} documents"
            tokens = "" if stage.tokens is None else f", {stage.tokens:,} tokens"
            print(
                f"  {stage.name:<14} {kept}, {stage.bytes_kept:,} of {stage.bytes_in:,} bytes{tokens}"
            )
            for reason, (documents, size) in stage.dropped.items():
                print(
                    f"  {stage.name:<14} dropped {documents:>9,} documents, {size:>13,} bytes: {reason}"
                )
        for share in (share for share in manifest.sources if share.weight is not None):
            passes = "" if share.epochs is None else f", {share.epochs:.2f} epochs"
            print(
                f"  {share.name}: {share.tokens:,} tokens, {share.weight:.1%} of the batches{passes}"
            )
        if not valid.tokens:
            print("no document was held out: raise --valid-share to measure a held-out loss")


@app.command(
    "tokenizer",
    epilog=examples(
        "launch data tokenizer --source web/ --source code/ --weight code/=0.3 --out t.model"
    ),
)
def train_tokenizer(
    source: Annotated[list[str], typer.Option(help="As for prepare; repeatable.")],
    out: Annotated[Path, typer.Option(help="The .model file to write.")],
    vocab_size: Annotated[
        int, typer.Option(help="Pieces, bytes and control pieces included.")
    ] = 32768,
    kind: Annotated[
        str, typer.Option(help="bpe or unigram; unigram encodes several times slower.")
    ] = "bpe",
    special: Annotated[
        list[str] | None, typer.Option(help="A control piece; repeatable.  [default: <pad> <mask>]")
    ] = None,
    weight: Annotated[
        list[str] | None, typer.Option(help="SOURCE=WEIGHT of the sample.  [default: by size]")
    ] = None,
    sample_bytes: Annotated[
        int | None, typer.Option(min=1, help="Text to train on.  [default: by vocabulary]")
    ] = None,
    limit_bytes: Annotated[int | None, typer.Option(min=1, help="Of each source.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the sample.")] = 0,
    text_key: Annotated[str, typer.Option(help="Field or column that holds the text.")] = "text",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a SentencePiece model that returns every text byte for byte; same sources and seed, same file."""
    from pipeline.data.corpus_recipe import load_recipe
    from pipeline.data.tokenizer import make_tokenizer

    train: dict[str, Any] = {"kind": kind, "sample_bytes": sample_bytes} | (
        {"controls": special} if special else {}
    )
    settings = {
        "sources": source,
        "vocab_size": vocab_size,
        "seed": seed,
        "limit_bytes": limit_bytes,
    }
    settings |= {"text_key": text_key, "train": train}
    settings |= {"mixture": {"weights": _weights(weight, source)} if weight else None}
    made = make_tokenizer(load_recipe(None, settings), out)
    if as_json:
        print(
            json.dumps(
                {"out": str(out), **made.info(out.name).model_dump(), "gigatoken": made.fast}
            )
        )
    else:
        speed = "gigatoken" if made.fast else "sentencepiece"
        print(f"{out}: {made.vocab:,} pieces, fingerprint {made.fingerprint}; encoded by {speed}")


def _weights(given: list[str], sources: list[str]) -> dict[str, float]:
    """What --weight says; a source without one weighs 1."""
    from pipeline.errors import ConfigError

    weights = dict.fromkeys(sources, 1.0)
    for entry in given:
        source, _, number = entry.rpartition("=")
        try:
            weights[source] = float(number)
        except ValueError:
            raise ConfigError(f"weight={entry!r} is not SOURCE=NUMBER") from None
        if source not in sources:
            raise ConfigError(
                f"weight={entry!r}: {source!r} is not a --source; known: {', '.join(sources)}"
            )
    return weights


@app.command(epilog=examples("launch data inspect data/python --json"))
def inspect(
    path: Annotated[Path, typer.Argument(help="A directory made by `launch data prepare`.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Verify every checksum; print counts, token statistics and a sample."""
    from pipeline.data.corpus import inspect as look

    described = look(path)
    print(json.dumps(described) if as_json else "\n".join(_lines(described)))


def _lines(described: dict[str, Any], indent: str = "") -> Iterator[str]:
    for key, value in described.items():
        if isinstance(value, dict):
            yield f"{indent}{key}"
            yield from _lines(value, indent + "  ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for entry in value:
                yield f"{indent}{key}"
                yield from _lines(entry, indent + "  ")
        elif key == "sample":
            yield f"{indent}sample"
            yield from (f"{indent}  │ {line}" for line in value.splitlines())
        else:
            yield f"{indent}{key:<24} {f'{value:,}' if isinstance(value, int) else value}"


@contextmanager
def _progress(quiet: bool) -> "Iterator[Report]":
    """A bar on a terminal, a line every tenth elsewhere; on stderr, so that results can be piped."""
    if quiet:
        yield lambda what, done, total: None
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True)) as bars:
            known: dict[str, Any] = {}

            def draw(what: str, done: int, total: int) -> None:
                if what not in known:
                    known[what] = bars.add_task(what, total=total)
                bars.update(known[what], completed=done)

            yield draw
    else:
        shown: dict[str, int] = {}

        def line(what: str, done: int, total: int) -> None:
            tenth = done * 10 // max(total, 1)
            if shown.get(what) != tenth:
                shown[what] = tenth
                print(f"{what} {tenth * 10}%", file=sys.stderr, flush=True)

        yield line
