"""`launch generate`: continue prompts, or translate sources with an encoder–decoder."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from typer import Option

from launch.options import RunPath, TokenizerFile, examples
from launch.trained import warn_of_labels
from pipeline.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig
    from pipeline.data.tokenizer import Tokenizer

Prompt = Annotated[list[str] | None, Option(help="Text to continue. Repeatable.")]
_SOURCE = "Text for an encoder-decoder to read, such as one to translate. Repeatable."
Source = Annotated[list[str] | None, Option(help=_SOURCE)]
_FILE = "File with a prompt or source per line; .jsonl has a `prompt` or `source` in each line."
File = Annotated[Path | None, Option(help=_FILE)]
To = Annotated[str | None, Option(help="Language to translate to, if the run has several.")]
_FROM = "Language of the sources, if the run has more than two."
From = Annotated[str | None, Option("--from", help=_FROM)]
Shots = Annotated[Path | None, Option(help="File with examples to put before every prompt.")]
_TEMPERATURE = "Sampling temperature; 0 chooses the likeliest token."
Temperature = Annotated[float, Option(help=_TEMPERATURE, min=0, max=1e6)]
TopK = Annotated[int | None, Option(help="Sample from the k likeliest tokens.", min=1)]
_TOP_P = "Sample from the likeliest tokens whose probabilities add up to this share."
TopP = Annotated[float, Option(help=_TOP_P, min=0, max=1)]
Beam = Annotated[int | None, Option(help="Beam search with this many beams.", min=1, max=1000)]
Stream = Annotated[bool, Option("--stream", help="Print tokens as they come; one prompt only.")]
AT_ONCE = 32  # prompts that are generated together
MOST_LENGTHS = 16  # longest prompt or continuation, as a multiple of a training row
MOST_NEW = 4096  # new tokens that every run may be asked for

app = typer.Typer()


class Given(NamedTuple):
    """A text of the user, and its kind."""

    kind: str  # "prompt", "source", or "" for a line of plain text, which may be either
    text: str


class Input(NamedTuple):
    """The inputs of the model for one text of the user."""

    text: str
    prompt: list[int]  # first tokens of the decoder
    source: list[int] | None  # input of the encoder, if there is one
    # Tokens to decode together with the new ones, because Llama's tokenizer removes the first space
    # of a text. Empty for an answer, which fine-tuning tokenizes alone.
    before: tuple[int, ...] = ()


@app.command(
    epilog=examples(
        'launch generate --run runs/1b --prompt "Once upon a time" --stream',
        'launch generate --run runs/1b --prompt "def f(" --prompt "class A" '
        "--temperature 0.8 --top-p 0.95 --seed 1 --json",
        "launch generate --run runs/1b --file prompts.txt --beam 4",
        "launch generate --run runs/1b --file prompts.jsonl --shots examples.txt --json",
        'launch generate --run runs/en-de --source "A sentence to translate." --beam 4',
        'launch generate --run runs/europe --source "A sentence." --from en --to de',
    )
)
def generate(
    run: RunPath,
    prompt: Prompt = None,
    source: Source = None,
    file: File = None,
    to: To = None,
    from_: From = None,
    shots: Shots = None,
    max_new: Annotated[int, Option(help="Maximum number of new tokens.", min=1)] = 64,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = 1.0,
    beam: Beam = None,
    seed: Annotated[int, Option(help="Sampling seed.", min=0, max=2**63 - 1)] = 0,
    stream: Stream = False,
    tokenizer: TokenizerFile = None,
    as_json: Annotated[bool, Option("--json", help="Print a JSON line per prompt.")] = False,
) -> None:
    """Continue prompts, or translate sources: greedy, sampled (--temperature) or by beam search."""
    given = [*_texts("prompt", prompt), *_texts("source", source), *(_lines(file) if file else ())]
    before = _examples(shots) if shots else ""
    samples = bool(temperature or top_k or top_p < 1)  # each of them asks for sampling
    _refuse_mixed(given, temperature, samples, beam, one_stream=stream, as_json=as_json)
    # Imported after the checks, because torch takes seconds.
    import torch

    from pipeline.checkpoint.restore import load_model, run_config
    from pipeline.model import decode
    from pipeline.runs.directory import tokenizer_of

    gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if gpu else torch.float32
    config = run_config(run)
    warn_of_labels(run, config)
    _refuse_kind(config.model.stack, given)
    pieces = tokenizer_of(run, config.data.dir, tokenizer, vocab=config.model.vocab)
    inputs = _inputs(config, pieces, [(text, before + text) for _, text in given], from_, to)
    _check_lengths(inputs, max_new, config)
    model, _ = load_model(run, dtype=dtype, device="cuda" if gpu else "cpu")
    sampling = decode.Sampling(temperature, top_k, top_p, seed)
    decode.lay_out(model)
    if stream:
        # There is one prompt, so a step has one token, or None after the end.
        prompts = [inputs[0].prompt]
        steps = decode.stream(model, prompts, max_new, pieces.eod, sampling, _sources(inputs))
        _print_stream(inputs[0], (step[0] for step in steps if step[0] is not None), pieces)
    elif beam:  # one prompt at a time: its beams are the batch
        for one in inputs:
            best = decode.beam_search(model, one.prompt, max_new, pieces.eod, beam, one.source)[0]
            _print(one, list(best.tokens), pieces, as_json, log_likelihood=best.score)
    else:
        # In groups, because the cache of all prompts of a long file would not fit.
        for at in range(0, len(inputs), AT_ONCE):
            few = inputs[at : at + AT_ONCE]
            # The seed of a prompt does not depend on the other prompts of its batch.
            draws = replace(sampling, seed=sampling.row_seed(at))
            prompts = [one.prompt for one in few]
            found = decode.generate(model, prompts, max_new, pieces.eod, draws, _sources(few))
            for one, tokens in zip(few, found, strict=True):
                _print(one, tokens, pieces, as_json)


def _inputs(
    config: "RunConfig",
    pieces: "Tokenizer",
    texts: list[tuple[str, str]],
    from_: str | None,
    to: str | None,
) -> list[Input]:
    """Return the inputs of the model for each pair of a text as written and with examples."""
    from pipeline.config.objective import Answers
    from pipeline.config.spans import MODES, Mixture

    languages = _languages(config, from_, to)
    found = []
    for shown, text in texts:
        ids: list[int] = pieces.encode(text).tolist()
        if config.model.stack != "encoder-decoder":
            # An empty prompt starts like a document: after the end of another one.
            before = () if isinstance(config.objective, Answers) else tuple(ids)
            found.append(Input(shown, ids or [pieces.eod], None, before))
            continue
        # As in training: a source has its end, and the decoder starts after the end of a document.
        if isinstance(config.objective, Mixture):
            # The sequential mode continues a text: the first sentinel stands for the rest of it.
            sequential = pieces.vocab + config.objective.sentinels + MODES.index("S")
            source = [sequential, *ids, pieces.vocab, pieces.eod]
            found.append(Input(shown, [pieces.eod, pieces.vocab], source))
            continue
        # A language has the special id of its number.
        tags = [pieces.vocab + language for language in languages]
        found.append(Input(shown, tags[1:] or [pieces.eod], [*tags[:1], *ids, pieces.eod]))
    return found


def _check_lengths(inputs: list[Input], max_new: int, config: "RunConfig") -> None:
    """Warn about texts longer than a training row, and refuse those that would take too long."""
    most = max(MOST_NEW, MOST_LENGTHS * config.model.longest)
    if max_new > most:
        raise ConfigError(f"--max-new {max_new} is too many for this run; use at most {most}")
    for key, trained in (("prompt", config.model.longest), ("source", config.model.source_seq)):
        longest = max((len(getattr(one, key) or ()) for one in inputs), default=0)
        limit = trained or config.model.longest
        text = f"a {key} has {longest:,} tokens, and the run was trained on {limit:,} at a time"
        if longest > MOST_LENGTHS * limit:
            raise DataError(f"{text}; shorten it")
        if longest > limit:
            typer.echo(f"warning: {text}", err=True)


def _languages(config: "RunConfig", from_: str | None, to: str | None) -> list[int]:
    """Return the numbers of the source's and target's language; none if the run has no tags."""
    from pipeline.config.objective import Pairs

    objective = config.objective
    if not isinstance(objective, Pairs) or not objective.tagged:
        for option, language in (("--from", from_), ("--to", to)):
            if language is not None:
                text = f"{option} {language}: the run was trained in one direction only"
                raise ConfigError(f"{text}; remove it, or train with objective.directions=every")
        return []
    known = objective.languages
    # No run is trained to translate a language into itself.
    sources = [language for language in known if language != to]
    targets = [language for language in known if language != from_]
    if from_ is None and len(sources) == 1:
        from_ = sources[0]
    for option, language, choices in (("--to", to, targets), ("--from", from_, sources)):
        if language not in choices:
            given = f"{language} is not a language of the run"
            if language is None:
                given = "is missing"
            elif language in known:
                given = f"{language} is also the other language"
            raise ConfigError(f"{option} {given}; choose from {', '.join(choices)}")
    return [known.index(language) for language in (from_, to) if language is not None]


def _sources(inputs: list[Input]) -> list[list[int]] | None:
    """Return the sources of an encoder–decoder; None for a decoder."""
    return [one.source for one in inputs if one.source is not None] or None


def _refuse_kind(stack: str, given: list[Given]) -> None:
    from pipeline.data.json_lines import shown

    both = stack == "encoder-decoder"
    for kind, text in given:
        if both and kind == "prompt":
            problem = f'prompt {shown(text)}: model.stack="{stack}" reads a source'
            raise ConfigError(f"{problem}; give it as --source, or as source in --file")
        if kind == "source" and stack == "decoder":  # an encoder cannot generate at all
            problem = f'source {shown(text)}: model.stack="{stack}" has no encoder to read it'
            raise ConfigError(f"{problem}; give it as --prompt, or as prompt in --file")


def _refuse_mixed(
    prompts: list[Given],
    temperature: float,
    samples: bool,
    beam: int | None,
    *,
    one_stream: bool,
    as_json: bool,
) -> None:
    """Refuse options of `generate` that do not go together."""
    if not prompts:
        raise ConfigError("no prompt; give --prompt, --source or a --file with at least one line")
    if one_stream and (len(prompts) > 1 or beam or as_json):
        raise ConfigError("--stream prints one prompt; remove --beam, --json and other prompts")
    if beam and samples:
        raise ConfigError(f"--beam {beam} does not sample; remove --temperature, --top-k, --top-p")
    if samples and not temperature:
        raise ConfigError("--top-k and --top-p need sampling; give --temperature 1")


def _texts(option: str, texts: list[str] | None) -> list[Given]:
    """Return the texts of an option. Refuse bytes that are not UTF-8, which a shell passes too."""
    for text in texts or ():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"--{option} {text!r} is not valid UTF-8; correct it") from None
    return [Given(option, text) for text in texts or ()]


def _lines(file: Path) -> list[Given]:
    from pipeline.data.json_lines import read_lines

    if not file.name.lower().removesuffix(".gz").endswith((".jsonl", ".json")):
        # An empty line is not a prompt; `--prompt ''` is.
        lines = _read(file, "file").split("\n")
        return [Given("", line.removesuffix("\r")) for line in lines if line.strip()]
    found = []
    for line in read_lines(file, "prompt or source"):
        # In files of prompts, a key `source` often names the origin of the prompt.
        key = "source" if "source" in line.fields and "prompt" not in line.fields else "prompt"
        found.append(Given(key, line.text(key, empty=True)))
    return found


def _examples(file: Path) -> str:
    text = _read(file, "shots")
    if not text.strip():
        raise DataError(f"--shots {file} has no text; give a file with examples, or remove it")
    return text


def _read(file: Path, option: str) -> str:
    from pipeline.atomic import read_regular

    try:
        return read_regular(file).decode("utf-8-sig")  # without a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--{option} {file} cannot be read: {error}; check the file") from None


def _print(
    one: Input, tokens: list[int], pieces: "Tokenizer", as_json: bool, **more: float
) -> None:
    # The end of the document is a flag in the JSON and never part of the text.
    ended = tokens[-1:] == [pieces.eod]
    new = tokens[:-1] if ended else tokens
    text = pieces.decode([*one.before, *new]).removeprefix(pieces.decode(one.before))
    name = "prompt" if one.source is None else "source"
    row = {name: one.text, "text": text, "tokens": tokens, "ended": ended, **more}
    # A continuation follows its prompt; a translation stands alone.
    shown = f"{one.text}{text}" if one.source is None else text
    print(json.dumps(row, ensure_ascii=False) if as_json else shown)


def _print_stream(one: Input, tokens: Iterator[int], pieces: "Tokenizer") -> None:
    """Print the text that each token adds; an incomplete character waits for its last byte."""
    print("" if one.source else one.text, end="", flush=True)
    ids = [*one.before]
    shown = pieces.decode(ids)
    for token in tokens:
        if token == pieces.eod:
            break
        ids.append(token)
        # All tokens each time: spaces and bytes of a piece depend on its neighbors.
        text = pieces.decode(ids)
        if not text.endswith("\ufffd"):  # U+FFFD stands for an incomplete character
            print(text.removeprefix(shown), end="", flush=True)
            shown = text
    print(pieces.decode(ids).removeprefix(shown))  # a character that stays incomplete
