"""`launch generate`: what a run would write."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launch.options import examples

if TYPE_CHECKING:
    from pipeline.data.tokenizer import Tokenizer

EXAMPLES = examples(
    'launch generate --run runs/1b --prompt "Once upon a time" --stream',
    'launch generate --run runs/1b --prompt "def f(" --prompt "class A" --temperature 0.8 --top-p 0.95 --seed 1 --json',
    "launch generate --run runs/1b --file prompts.txt --beam 4",
)


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(generate)


def generate(
    run: Annotated[Path, typer.Option(help="A run directory, or one checkpoint of it.")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="What to continue; may be given several times.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Prompts, one a line.")] = None,
    max_new: Annotated[int, typer.Option(help="Tokens at most.", min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.", min=0)] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest.", min=1)] = None,
    top_p: Annotated[
        float, typer.Option(help="Draw from the likeliest that make up this share.", min=0, max=1)
    ] = 1.0,
    beam: Annotated[int | None, typer.Option(help="Beam search: how many are kept.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.", min=0)] = 0,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print as it is written; one prompt.")
    ] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A SentencePiece model, if the run's data is gone.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt.")] = False,
) -> None:
    """Continue prompts with a trained model: greedy, sampled (--temperature) or by beam search."""
    from pipeline.errors import ConfigError

    prompts = [*(prompt or ()), *(_lines(file) if file else ())]
    if not prompts:
        raise ConfigError("no prompt; give --prompt TEXT or --file FILE")
    if stream and (len(prompts) > 1 or beam or as_json):
        raise ConfigError(
            "--stream writes one prompt as it comes; take away --beam, --json and all prompts but one"
        )
    if beam and (temperature or top_k or top_p < 1):
        raise ConfigError(
            "--beam searches and does not draw; take away --temperature, --top-k and --top-p"
        )
    if (top_k or top_p < 1) and not temperature:
        raise ConfigError(
            "--top-k and --top-p shape a draw, but --temperature 0 draws nothing; give --temperature 1"
        )

    import torch

    from pipeline.checkpoint.restore import load_model
    from pipeline.model import decode
    from pipeline.runs.directory import tokenizer_of

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, config = load_model(
        run, dtype=torch.bfloat16 if device == "cuda" else torch.float32, device=device
    )
    pieces = tokenizer_of(run, config.data.dir, tokenizer)
    # an empty prompt begins as a document does: after the end of another
    ids = [pieces.encode(text).tolist() or [pieces.eod] for text in prompts]
    sampling = decode.Sampling(temperature, top_k, top_p, seed)
    if stream:
        print(prompts[0], end="", flush=True)
        tokens = (step[0] for step in decode.stream(model, ids, max_new, pieces.eod, sampling))
        for text in _text(pieces, (token for token in tokens if token is not None)):
            print(text, end="", flush=True)
        print()
        return
    if beam:
        found = [decode.beam_search(model, one, max_new, pieces.eod, beam)[0] for one in ids]
        new, scores = (
            [list(best.tokens) for best in found],
            [{"log_likelihood": best.score} for best in found],
        )
    else:
        new, scores = decode.generate(model, ids, max_new, pieces.eod, sampling), [{} for _ in ids]
    for text, tail, score in zip(prompts, new, scores, strict=True):
        body = tail[:-1] if tail[-1:] == [pieces.eod] else tail
        out = {
            "prompt": text,
            "text": pieces.decode(body),
            "tokens": tail,
            "ended": tail != body,
            **score,
        }
        print(json.dumps(out, ensure_ascii=False) if as_json else f"{text}{out['text']}")


def _lines(file: Path) -> list[str]:
    from pipeline.errors import DataError

    try:
        return [line for line in file.read_text(encoding="utf-8").splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--file {file} cannot be read: {error}") from None


def _text(pieces: "Tokenizer", tokens: Iterator[int]) -> Iterator[str]:
    """What each token adds; the bytes of a character wait for the last of them."""
    ids: list[int] = []
    shown = ""
    for token in tokens:
        if token == pieces.eod:
            return
        ids.append(token)
        text = pieces.decode(ids)
        if not text.endswith("\ufffd"):
            yield text.removeprefix(shown)
            shown = text
