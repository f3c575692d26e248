"""`launch generate`: text from a trained model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launch.options import RunPath, TokenizerFile, examples
from pipeline.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pipeline.data.tokenizer import Tokenizer
    from pipeline.model.decode import Sampling
    from pipeline.model.stack import Decoder

EXAMPLES = examples(
    'launch generate --run runs/1b --prompt "Once upon a time" --stream',
    'launch generate --run runs/1b --prompt "def f(" --prompt "class A" '
    "--temperature 0.8 --top-p 0.95 --seed 1 --json",
    "launch generate --run runs/1b --file prompts.txt --beam 4",
)


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(generate)


def generate(
    run: RunPath,
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue. Repeatable.")] = None,
    file: Annotated[Path | None, typer.Option(help="File with one prompt per line.")] = None,
    max_new: Annotated[int, typer.Option(help="Maximum number of new tokens.", min=1)] = 64,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 chooses the likeliest token.", min=0)
    ] = 0.0,
    top_k: Annotated[
        int | None, typer.Option(help="Sample from the k likeliest tokens.", min=1)
    ] = None,
    top_p: Annotated[
        float,
        typer.Option(help="Sample from the likeliest tokens up to this share.", min=0, max=1),
    ] = 1.0,
    beam: Annotated[int | None, typer.Option(help="Beam search of this width.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Sampling seed.", min=0)] = 0,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print tokens as they come; one prompt only.")
    ] = False,
    tokenizer: TokenizerFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line per prompt.")] = False,
) -> None:
    """Continue prompts with a trained model: greedy, sampled (--temperature) or by beam search."""
    prompts = [*(prompt or ()), *(_lines(file) if file else ())]
    samples = bool(temperature or top_k or top_p < 1)  # each of them asks for sampling
    _check(prompts, beam, samples, alone=not (beam or as_json), stream=stream)
    if samples and not temperature:
        raise ConfigError("--top-k and --top-p need sampling; give --temperature 1")

    # Imported after the checks, because torch takes seconds.
    import torch

    from pipeline.checkpoint.restore import load_model
    from pipeline.model.decode import Sampling, beam_search
    from pipeline.model.decode import generate as continuations
    from pipeline.runs.directory import tokenizer_of

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model, config = load_model(run, dtype=dtype, device=device)
    pieces = tokenizer_of(run, config.data.dir, tokenizer)
    # An empty prompt starts like a document: after the end of another one.
    ids = [pieces.encode(text).tolist() or [pieces.eod] for text in prompts]
    sampling = Sampling(temperature, top_k, top_p, seed)
    if stream:
        _print_stream(model, prompts[0], ids, max_new, pieces, sampling)
    elif beam:  # one prompt at a time: its beams are the batch
        for text, one in zip(prompts, ids, strict=True):
            best = beam_search(model, one, max_new, pieces.eod, beam)[0]
            _print(text, list(best.tokens), pieces, as_json, log_likelihood=best.score)
    else:
        found = continuations(model, ids, max_new, pieces.eod, sampling)
        for text, tokens in zip(prompts, found, strict=True):
            _print(text, tokens, pieces, as_json)


def _check(
    prompts: list[str], beam: int | None, samples: bool, *, alone: bool, stream: bool
) -> None:
    """Refuse options that contradict each other, before the model is loaded."""
    if not prompts:
        raise ConfigError("no prompt; give --prompt TEXT or --file FILE")
    if stream and (len(prompts) > 1 or not alone):
        raise ConfigError("--stream prints one prompt; remove --beam, --json and other prompts")
    if beam and samples:
        raise ConfigError(f"--beam {beam} does not sample; remove --temperature, --top-k, --top-p")


def _lines(file: Path) -> list[str]:
    try:
        # An empty line is not a prompt; `--prompt ''` is.
        return [line for line in file.read_text(encoding="utf-8").splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--file {file} cannot be read: {error}") from None


def _print(
    prompt: str, tokens: list[int], pieces: "Tokenizer", as_json: bool, **more: float
) -> None:
    # The end of the document is a flag in the JSON and never part of the text.
    ended = tokens[-1:] == [pieces.eod]
    text = pieces.decode(tokens[:-1] if ended else tokens)
    row = {"prompt": prompt, "text": text, "tokens": tokens, "ended": ended, **more}
    print(json.dumps(row, ensure_ascii=False) if as_json else f"{prompt}{text}")


def _print_stream(
    model: "Decoder",
    prompt: str,
    ids: list[list[int]],
    max_new: int,
    pieces: "Tokenizer",
    sampling: "Sampling",
) -> None:
    from pipeline.model.decode import stream

    print(prompt, end="", flush=True)
    # There is one prompt, so a step has one token, or None after the end.
    tokens = (step[0] for step in stream(model, ids, max_new, pieces.eod, sampling))
    for text in _text(pieces, (token for token in tokens if token is not None)):
        print(text, end="", flush=True)
    print()


def _text(pieces: "Tokenizer", tokens: Iterator[int]) -> Iterator[str]:
    """Yield the text that each token adds; an incomplete character waits for its last byte."""
    ids: list[int] = []
    shown = ""
    for token in tokens:
        if token == pieces.eod:
            return
        ids.append(token)
        # All tokens each time: spaces and bytes of a piece depend on its neighbors.
        text = pieces.decode(ids)
        if not text.endswith("\ufffd"):  # U+FFFD stands for an incomplete character
            yield text.removeprefix(shown)
            shown = text
