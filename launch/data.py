"""`launch data`: turn text into token shards, train a tokenizer, inspect a corpus."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from launch.options import AsJson, Quiet, examples, output_option
from launch.tables import print_json
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.data.prepare import Report
    from pipeline.data.shards import Manifest

app = typer.Typer(
    help="Turn text into token shards with Ray, and inspect them.", no_args_is_help=True
)


SOURCE_HELP = "Text: a file, directory, glob, hf:NAME[:split], python or synthetic. Repeatable."
LIMIT_HELP = "Bytes to read of each --source; the files of a directory or glob share it."
# Both commands read text in the same way.
LimitBytes = Annotated[int | None, Option(min=1, help=LIMIT_HELP)]
TextKey = Annotated[str | None, Option(help="Column with the text (default: text).")]
_PAIRS = "Columns with the same text in two or more languages, such as en,de."
Pairs = Annotated[str | None, Option(metavar="SOURCE,TARGET", help=_PAIRS)]
# Options of prepare. One that is not given has the value of --config, or the recipe's default.
Shards = Annotated[Path, output_option("--out", text="Directory for the shards.")]
RecipeName = Annotated[str | None, Option(help="Recipe: web, code or a TOML file.")]
VocabSize = Annotated[int | None, Option(help="Pieces of the tokenizer to train (default: 4096).")]
GivenTokenizer = Annotated[Path | None, Option(help="SentencePiece .model (default: train one).")]
Workers = Annotated[int | None, Option(min=1, help="Ray workers (default: all CPUs).")]
Seed = Annotated[int | None, Option(min=0, help="Sampling seed (default: 0).")]
_VALID_SHARE = "Share of the documents to hold out (default: 0.01)."
ValidShare = Annotated[float | None, Option(min=0, max=0.5, help=_VALID_SHARE)]
_MALFORMED_SHARE = "Stop if a larger share of documents is malformed."
MalformedShare = Annotated[float, Option(min=0, max=1, help=_MALFORMED_SHARE)]
_RECIPE_SETTINGS = "One setting of the recipe as KEY=VALUE, such as seed=1. Repeatable."
RecipeSettings = Annotated[list[str] | None, Option("--set", help=_RECIPE_SETTINGS)]
# Options of tokenizer.
Kind = Annotated[str, Option(help="bpe, or unigram, which is several times slower to encode.")]
_SPECIALS = "Control piece to add; no text contains it. Repeatable (default: <pad> and <mask>)."
Specials = Annotated[list[str] | None, Option(help=_SPECIALS)]
_WEIGHTS = "Weight of a source in the sample, as SOURCE=WEIGHT. Repeatable (default: by size)."
Weights = Annotated[list[str] | None, Option(help=_WEIGHTS)]
_SAMPLE_BYTES = "Bytes of text to train on (default: by vocabulary size)."
SampleBytes = Annotated[int | None, Option(min=1, help=_SAMPLE_BYTES)]
PREPARE_EXAMPLES = examples(
    "launch data prepare --source python --out data/python",
    "launch data prepare --source 'web/*.jsonl.zst' --source books.parquet --vocab-size 32768 "
    "--out data/web",
    "launch data prepare --config web --source crawl/ --set dedup.near.threshold=0.7 "
    "--out data/crawl",
    "launch data prepare --source hf:roneneldan/TinyStories:train --tokenizer t.model "
    "--out data/stories",
    "launch data prepare --source talks.jsonl.gz --pairs en,de --out data/en-de",
)


@app.command(epilog=PREPARE_EXAMPLES)
def prepare(
    out: Shards,
    source: Annotated[list[str] | None, Option(help=SOURCE_HELP)] = None,
    config: RecipeName = None,
    vocab_size: VocabSize = None,
    tokenizer: GivenTokenizer = None,
    workers: Workers = None,
    seed: Seed = None,
    valid_share: ValidShare = None,
    limit_bytes: LimitBytes = None,
    text_key: TextKey = None,
    pairs: Pairs = None,
    malformed_share: MalformedShare = 0.01,
    sets: RecipeSettings = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Read text, train or load a tokenizer, write Megatron .bin/.idx shards and a manifest.

    The same arguments give the same bytes for any number of workers. If the command is stopped,
    the same command finishes the corpus.
    """
    from pipeline.data.corpus_recipe import load_recipe
    from pipeline.data.prepare import prepare as make
    from pipeline.data.tokenizer import Tokenizer

    _refuse_both(vocab_size=vocab_size, tokenizer=tokenizer)
    _refuse_both(text_key=text_key, pairs=pairs)
    given = Tokenizer.open(tokenizer) if tokenizer else None
    settings = {
        "sources": tuple(source) if source else None,
        "vocab_size": given.vocab if given else vocab_size,
        "tokenizer": given.fingerprint if given else None,  # the content counts, not the path
        "seed": seed,
        "valid_share": valid_share,
        "limit_bytes": limit_bytes,
        "text_key": text_key,
        "pairs": pairs.split(",") if pairs is not None else None,
    }
    recipe = load_recipe(config, settings, sets or ())
    model = given.model if given else None
    start = time.monotonic()
    with _progress(quiet or as_json) as report:
        manifest, reused = make(
            recipe,
            out,
            model=model,
            workers=workers,
            malformed_share=malformed_share,
            report=report,
            # stdout is for the result, which may be JSON.
            warn=partial(typer.echo, err=True),
        )
    seconds = round(time.monotonic() - start, 2)
    if as_json:
        made = {"out": str(out), "reused": reused, "seconds": seconds}
        print_json(made | manifest.model_dump())
    else:
        state = "already complete, all checksums match" if reused else f"written in {seconds} s"
        _print_manifest(out, manifest, state)


def _refuse_both(**options: object) -> None:
    if None not in options.values():
        given = [f"{name.replace('_', '-')}={value}" for name, value in options.items()]
        raise ConfigError(f"{' and '.join(given)} exclude each other; give one")


def _print_manifest(out: Path, manifest: "Manifest", state: str) -> None:
    train = manifest.splits["train"]
    valid = manifest.splits["valid"]
    bytes_per_token = (train.bytes + valid.bytes) / (train.tokens + valid.tokens)
    print(
        f"{out}: {train.tokens:,} training tokens, {valid.tokens:,} held out, "
        f"{bytes_per_token:.2f} bytes per token, vocabulary {manifest.tokenizer.vocab:,}; {state}"
    )
    for stage in manifest.stages:
        tokens = "" if stage.tokens is None else f", {stage.tokens:,} tokens"
        print(
            f"  {stage.name:<14} kept {stage.documents_kept:>12,} of {stage.documents_in:,} "
            f"documents, {stage.bytes_kept:,} of {stage.bytes_in:,} bytes{tokens}"
        )
        for reason, (documents, size) in stage.dropped.items():
            dropped = f"{documents:>9,} documents, {size:>13,} bytes: {reason}"
            print(f"  {stage.name:<14} dropped {dropped}")
    for share in manifest.sources:
        # Only a mixture has weights. Without one every token is drawn once per epoch.
        if share.weight is not None:
            epochs = "" if share.epochs is None else f", {share.epochs:.2f} epochs"
            weight = f"{share.weight:.1%} of the batches"
            print(f"  {share.name}: {share.tokens:,} tokens, {weight}{epochs}")
    # A hash of its text decides whether a document is held out, so a small corpus may get none.
    if not valid.tokens:
        print("no document was held out, and training needs some: raise --valid-share")


@app.command(
    "tokenizer",
    epilog=examples(
        "launch data tokenizer --source web/ --source code/ --weight code/=0.3 --out t.model"
    ),
)
def train_tokenizer(
    source: Annotated[list[str], Option(help=SOURCE_HELP)],
    out: Annotated[Path, output_option(text="The .model file to write.")],
    vocab_size: Annotated[int, Option(help="Pieces, including bytes and controls.")] = 32768,
    kind: Kind = "bpe",
    special: Specials = None,
    weight: Weights = None,
    sample_bytes: SampleBytes = None,
    limit_bytes: LimitBytes = None,
    seed: Seed = None,
    text_key: TextKey = None,
    as_json: AsJson = False,
) -> None:
    """Train a lossless SentencePiece model; the same sources and seed give the same file."""
    from pipeline.data.corpus_recipe import load_recipe
    from pipeline.data.tokenizer import make_tokenizer

    train: dict[str, Any] = {"kind": kind, "sample_bytes": sample_bytes}
    if special:
        train["controls"] = special
    settings = {
        "sources": source,
        "vocab_size": vocab_size,
        "seed": seed,
        "limit_bytes": limit_bytes,
        "text_key": text_key,
        "train": train,
        # The weights of a mixture apply to the tokenizer's sample, too.
        "mixture": {"weights": _weights(weight, source)} if weight else None,
    }
    made = make_tokenizer(load_recipe(None, settings), out)
    if as_json:
        print_json({"out": str(out), **made.info(out.name).model_dump(), "gigatoken": made.fast})
    else:
        encoder = "gigatoken" if made.fast else "sentencepiece"
        print(f"{out}: {made.vocab:,} pieces, fingerprint {made.fingerprint}; encoder {encoder}")


def _weights(given: list[str], sources: list[str]) -> dict[str, float]:
    """Parse --weight; a source without one has weight 1."""
    weights = dict.fromkeys(sources, 1.0)
    for entry in given:
        # From the right, because a path may contain an equals sign.
        source, _, number = entry.rpartition("=")
        if source not in sources:
            known = ", ".join(sources)
            raise ConfigError(f"weight={entry!r}: {source!r} is not a --source; known: {known}")
        try:
            weights[source] = float(number)
        except ValueError:
            raise ConfigError(f"weight={entry!r}: not SOURCE=NUMBER") from None
    return weights


@app.command(epilog=examples("launch data inspect data/python --json"))
def inspect(
    path: Annotated[Path, Argument(help="A directory made by `launch data prepare`.")],
    as_json: AsJson = False,
) -> None:
    """Verify every checksum; print counts, token statistics and a sample."""
    from pipeline.data.corpus import inspect as describe

    described = describe(path)
    if as_json:
        print_json(described)
    else:
        print("\n".join(_lines(described)))


def _lines(described: dict[str, Any], indent: str = "") -> Iterator[str]:
    for key, value in described.items():
        # Stages and sources are lists of tables, printed as indented blocks.
        blocks = value if isinstance(value, list) else [value]
        if blocks and isinstance(blocks[0], dict):
            for entry in blocks:
                yield f"{indent}{key}"
                yield from _lines(entry, indent + "  ")
        elif key == "sample":  # text with its own line breaks
            yield f"{indent}sample"
            yield from (f"{indent}  │ {line}" for line in value.splitlines())
        else:
            yield f"{indent}{key:<24} {_plain(key, value)}"


def _plain(key: str, value: Any) -> str:
    """Return a value of `launch data inspect` as text."""
    if key == "most_frequent":  # pieces with their shares of all tokens
        return "  ".join(f"{piece!r} {share:.1%}" for piece, share in value)
    if isinstance(value, tuple):  # dropped by a stage for one reason
        return f"{value[0]:,} documents, {value[1]:,} bytes"
    if isinstance(value, int):
        return f"{value:,}"
    return "–" if value is None else str(value)


@contextmanager
def _progress(quiet: bool) -> "Iterator[Report]":
    # On stderr, so that results can be piped: a bar on a terminal, otherwise a line every tenth.
    if quiet:
        yield lambda what, done, total: None
    # TERM=dumb is an editor's shell, which would show the escape codes of a bar.
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        from rich.console import Console
        from rich.progress import Progress, TaskID

        with Progress(console=Console(stderr=True)) as bars:
            # Stages report by name; each gets its bar when it first reports.
            known: dict[str, TaskID] = {}

            def draw(what: str, done: int, total: int) -> None:
                if what not in known:
                    known[what] = bars.add_task(what, total=total)
                bars.update(known[what], completed=done)

            yield draw
    else:
        shown: dict[str, int] = {}  # stage → last tenth printed

        def line(what: str, done: int, total: int) -> None:
            tenth = done * 10 // max(total, 1)
            if shown.get(what) != tenth:
                shown[what] = tenth
                print(f"{what} {tenth * 10}%", file=sys.stderr, flush=True)

        yield line
