"""Everything that decides the bytes of a corpus, and nothing that does not: no workers, no output path."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import xxhash
from pydantic import AfterValidator, Field

from pipeline.config.layers import CONFIGS, merge, names, nearest, parse_set, read_toml, validate
from pipeline.config.parts import Frozen
from pipeline.errors import ConfigError

VOCAB = 4096  # for corpora of a few million tokens; set 32768 for real ones

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]
Shares = dict[Annotated[int, Field(ge=1)], Share]  # by n
Number = TypeVar("Number", int, float)


def _in_order(limits: tuple[Number, Number]) -> tuple[Number, Number]:
    if limits[0] > limits[1]:
        raise ValueError("nothing lies between them; give the least first, then the most")
    return limits


class Normalise(Frozen):
    """Off by default: text goes in as it is."""

    unicode: Literal["none", "NFC", "NFKC"] = "none"
    newlines: bool = False  # \r\n and \r become \n
    controls: bool = False  # C0 and C1 controls but tab and newline go
    pii: bool = False  # e-mail and IP addresses become reserved ones (RFC 2606, RFC 5737)


class Quality(Frozen):
    """Gopher's rules, table A1 of arXiv 2112.11446; the defaults are its numbers."""

    words: Annotated[tuple[Count, Count], AfterValidator(_in_order)] = (50, 100_000)
    mean_word_length: Annotated[tuple[float, float], AfterValidator(_in_order)] = (3, 10)
    symbol_ratio: Share = 0.1  # "#" and "…" per word
    bullet_lines: Share = 0.9
    ellipsis_lines: Share = 0.3
    alphabetic_words: Share = 0.8  # at least
    stop_words: Count = 2  # at least, of eight English ones; 0 for other languages and code


class Repetition(Frozen):
    """Gopher's other table: shares of lines, paragraphs and n-grams that repeat."""

    duplicate_lines: Share = 0.3
    duplicate_line_characters: Share = 0.2
    duplicate_paragraphs: Share = 0.3
    duplicate_paragraph_characters: Share = 0.2
    top_ngrams: Shares = Field(default_factory=lambda: {2: 0.20, 3: 0.18, 4: 0.16})
    duplicate_ngrams: Shares = Field(
        default_factory=lambda: {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}
    )


class C4(Frozen):
    """C4's page rules (arXiv 1910.10683, section 2.2), applied to whole documents: nothing is cut out of a text."""

    sentence_lines: Share = 0.5  # at least this share of lines ends in . ! ? or a quotation mark
    sentences: Count = 3  # at least
    phrases: tuple[str, ...] = ("lorem ipsum",)  # any of them, in any case, drops the document
    brackets: bool = True  # a curly bracket does: in prose it is a page's code


class Score(Frozen):
    """Any function from text to a number, language identifiers included, by its import path."""

    function: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]  # package.module:function
    least: float


class Filters(Frozen):
    quality: Quality | None = None
    repetition: Repetition | None = None
    c4: C4 | None = None
    score: Score | None = None


class Near(Frozen):
    """MinHash-LSH. Bands × rows = 20 × 6 finds a pair of Jaccard similarity 0.8 with probability 0.998."""

    threshold: Annotated[float, Field(gt=0, le=1)] = (
        0.8  # Jaccard similarity of the sets of word n-grams
    )
    ngram: Annotated[int, Field(ge=1)] = 5
    bands: Annotated[int, Field(ge=1)] = 20
    rows: Annotated[int, Field(ge=1)] = 6


class Dedup(Frozen):
    exact: bool = False
    near: Near | None = None


class Decontaminate(Frozen):
    against: tuple[str, ...]  # files, directories or globs of held-out text
    ngram: Annotated[int, Field(ge=1)] = 13  # words, as GPT-3 did (arXiv 2005.14165, appendix C)


class Mixture(Frozen):
    """How often each source is drawn, whatever its size."""

    weights: dict[
        str, Annotated[float, Field(gt=0)]
    ]  # by source; they are normalised to sum to one
    tokens: Annotated[int, Field(gt=0)] | None = None  # the training budget, for the epochs below
    most_epochs: Annotated[float, Field(gt=0)] | None = (
        None  # a source that would repeat more gives way to the others
    )


def _control(piece: str) -> str:
    """Text produces others: sentencepiece's BPE looks up a lone character, whatever its kind, and U+2581 is a space."""
    if len(piece) < 2 or not piece.isprintable() or "\u2581" in piece:
        raise ValueError(
            "a control piece has two printable characters or more, none of them U+2581; try <name>"
        )
    return piece


class Train(Frozen):
    """How a tokenizer is trained, where none is given."""

    kind: Literal["bpe", "unigram"] = (
        "bpe"  # unigram is encoded by sentencepiece itself, several times slower
    )
    controls: tuple[Annotated[str, AfterValidator(_control)], ...] = (
        "<pad>",
        "<mask>",
    )  # beyond <unk>, <s>, </s>; what masked and denoising objectives need
    sample_bytes: Annotated[int, Field(gt=0)] | None = (
        None  # by default 2,500 per piece, within 8…256 MiB
    )


class Recipe(Frozen):
    sources: tuple[str, ...]
    vocab_size: int = VOCAB
    tokenizer: str | None = None  # fingerprint of a given model, which then replaces vocab_size
    train: Train = Train()
    seed: Count = 0  # of the synthetic corpus and of the tokenizer's sample
    valid_share: Annotated[float, Field(ge=0, lt=1)] = 0.01
    limit_bytes: Annotated[int, Field(gt=0)] | None = None  # of each source
    text_key: str = "text"
    normalise: Normalise = Normalise()
    filters: Filters = Filters()
    dedup: Dedup = Dedup()
    decontaminate: Decontaminate | None = None
    mixture: Mixture | None = None  # without one, every token is drawn once per epoch

    @property
    def as_it_is(self) -> bool:
        """Whether no stage looks at the text."""
        off = (Normalise(), Filters(), Dedup(), None)
        return (self.normalise, self.filters, self.dedup, self.decontaminate) == off

    def fingerprint(self, *inputs: str) -> str:
        return xxhash.xxh3_128_hexdigest("\n".join((self.model_dump_json(), *inputs)).encode())


def load_recipe(
    config: str | None, settings: Mapping[str, Any], sets: Iterable[str] = ()
) -> Recipe:
    """A shipped configs/data/NAME.toml or a file of one's own, over it the options, over them each --set a.b=c."""
    table: dict[str, Any] = {}
    if config is not None:
        path = CONFIGS / "data" / f"{config}.toml" if config in names("data") else Path(config)
        if not path.is_file():
            raise ConfigError(
                f"config={config!r}: neither a file nor in configs/data{nearest(config, names('data'))}"
            )
        table = read_toml(path)
    chosen = {text: parse_set(text) for text in sets}
    if any("tokenizer" in layer for layer in (table, *chosen.values())):
        raise ConfigError(
            "tokenizer is an option, not a setting of a recipe; give --tokenizer FILE.model"
        )
    for text, layer in chosen.items():
        if settings.get("tokenizer") and layer.keys() & {"train", "vocab_size"}:
            raise ConfigError(
                f"--set {text} is for a tokenizer that is trained; take it or --tokenizer away"
            )
    for layer in ({k: v for k, v in settings.items() if v is not None}, *chosen.values()):
        table = merge(table, layer)
    if not table.get("sources"):
        raise ConfigError("sources is empty; name at least one with --source")
    return validate(Recipe, table, where=config or "")
