"""Everything that determines the bytes of a corpus: the recipe, and the pieces of its inputs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import xxhash
from pydantic import AfterValidator, Field

from pipeline.config.layers import merge, named_table, parse_set, validate
from pipeline.config.parts import Count, Frozen, Share
from pipeline.errors import ConfigError

MB = 2**20
# A longer line, row or document is reported as malformed: the stages after reading hold several
# copies of a text, which would not fit a worker's memory.
DOCUMENT_BYTES = 16 * MB
# Between the parts of a document of pairs. Unicode reserves this noncharacter for use inside a
# program; no normalization changes it, and words never contain it.
PAIR = "\ufdd0"
VOCAB = 4096  # for corpora of a few million tokens; use 32768 for larger ones

Shares = dict[Annotated[int, Field(ge=1)], Share]  # by n of the n-gram
Number = TypeVar("Number", int, float)


def _in_order(limits: tuple[Number, Number]) -> tuple[Number, Number]:
    if limits[0] > limits[1]:
        raise ValueError("the range is empty; give the lower limit first")
    return limits


class Normalize(Frozen):
    """Off by default: the text is not changed."""

    unicode: Literal["none", "NFC", "NFKC"] = "none"
    newlines: bool = False  # \r\n and \r become \n
    controls: bool = False  # remove C0 and C1 controls except tab and newline
    pii: bool = False  # replace e-mail and IP addresses by reserved ones (RFC 2606, RFC 5737)


class Quality(Frozen):
    """Gopher's rules with its numbers: table A1 of arXiv 2112.11446."""

    words: Annotated[tuple[Count, Count], AfterValidator(_in_order)] = (50, 100_000)
    mean_word_length: Annotated[tuple[float, float], AfterValidator(_in_order)] = (3, 10)
    symbol_ratio: Share = 0.1  # "#" and "…" per word
    bullet_lines: Share = 0.9
    ellipsis_lines: Share = 0.3
    alphabetic_words: Share = 0.8  # at least
    stop_words: Count = 2  # at least, of eight English words; 0 for other languages and code


class Repetition(Frozen):
    """Gopher's second table: shares of lines, paragraphs and n-grams that repeat."""

    duplicate_lines: Share = 0.3
    duplicate_line_characters: Share = 0.2
    duplicate_paragraphs: Share = 0.3
    duplicate_paragraph_characters: Share = 0.2
    top_ngrams: Shares = Field(default_factory=lambda: {2: 0.20, 3: 0.18, 4: 0.16})
    duplicate_ngrams: Shares = Field(
        default_factory=lambda: {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}
    )


class C4(Frozen):
    """C4's page rules (arXiv 1910.10683, section 2.2). They drop whole documents, never lines."""

    sentence_lines: Share = 0.5  # at least this share of lines ends in . ! ? or a quotation mark
    sentences: Count = 3  # at least
    phrases: tuple[str, ...] = ("lorem ipsum",)  # any of them, in any case, drops the document
    brackets: bool = True  # so does a curly bracket: in prose it is the code of a web page


class Score(Frozen):
    """Any function from text to a number, for example a language identifier."""

    function: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]  # package.module:function
    least: float


class Filters(Frozen):
    quality: Quality | None = None
    repetition: Repetition | None = None
    c4: C4 | None = None
    score: Score | None = None


class Near(Frozen):
    """MinHash-LSH. 20 bands × 6 rows find a pair of similarity 0.8 with probability 0.998."""

    # Jaccard similarity of the sets of word n-grams
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.8
    ngram: Annotated[int, Field(ge=1)] = 5
    bands: Annotated[int, Field(ge=1)] = 20
    rows: Annotated[int, Field(ge=1)] = 6


class Dedup(Frozen):
    exact: bool = False
    near: Near | None = None


class Decontaminate(Frozen):
    against: tuple[str, ...]  # files, directories or globs of held-out text
    ngram: Annotated[int, Field(ge=1)] = 13  # words, as for GPT-3 (arXiv 2005.14165, appendix C)


class Mixture(Frozen):
    """How often each source is drawn, whatever its size."""

    weights: dict[str, Annotated[float, Field(gt=0)]]  # by source; normalized to sum to one
    tokens: Annotated[int, Field(gt=0)] | None = None  # the training budget, to compute epochs
    # Cap: a source that would repeat more often gives its share to the others.
    most_epochs: Annotated[float, Field(gt=0)] | None = None


def _is_control(piece: str) -> str:
    # SentencePiece's BPE looks up a lone character of any kind, and reads U+2581 as a space, so
    # text could produce such a piece.
    if len(piece) < 2 or not piece.isprintable() or "\u2581" in piece:
        raise ValueError("needs two or more printable characters, none of them U+2581; try <name>")
    return piece


class Train(Frozen):
    """How a tokenizer is trained if none is given."""

    kind: Literal["bpe", "unigram"] = "bpe"  # unigram encodes several times slower
    # Beyond <unk>, <s>, </s>; masked and denoising objectives need them.
    controls: tuple[Annotated[str, AfterValidator(_is_control)], ...] = ("<pad>", "<mask>")
    # By default 2,500 bytes per piece, between 8 and 256 MiB.
    sample_bytes: Annotated[int, Field(gt=0)] | None = None


def _are_columns(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(names) < 2 or "" in names or len({*names}) < len(names):
        raise ValueError("needs two or more different columns, such as en,de")
    return names


class Recipe(Frozen):
    sources: tuple[str, ...]
    vocab_size: int = VOCAB
    tokenizer: str | None = None  # fingerprint of a given model, which then replaces vocab_size
    train: Train = Train()
    seed: Count = 0  # of the synthetic corpus and of the tokenizer's sample
    valid_share: Annotated[float, Field(ge=0, lt=1)] = 0.01
    limit_bytes: Annotated[int, Field(gt=0)] | None = None  # of each source
    text_key: str = "text"
    # Columns with the same text in several languages. A document is then a row with all of them,
    # so that duplicates, the held-out split and every count are of whole pairs.
    pairs: Annotated[tuple[str, ...], AfterValidator(_are_columns)] | None = None
    normalise: Normalize = Normalize()
    filters: Filters = Filters()
    dedup: Dedup = Dedup()
    decontaminate: Decontaminate | None = None
    mixture: Mixture | None = None  # without one, every token is drawn once per epoch

    @property
    def columns(self) -> tuple[str, ...]:
        """Where the text of a document is: one column, or one for each part of a pair."""
        return self.pairs or (self.text_key,)

    @property
    def is_plain(self) -> bool:
        """Whether no stage reads or changes the text."""
        chosen = (self.normalise, self.filters, self.dedup, self.decontaminate)
        return chosen == (Normalize(), Filters(), Dedup(), None)

    def fingerprint(self, *inputs: str) -> str:
        # Without pairs, the same fingerprint as before this setting existed.
        table = self.model_dump_json(exclude=None if self.pairs else {"pairs"})
        return xxhash.xxh3_128_hexdigest("\n".join((table, *inputs)).encode())


def load_recipe(
    config: str | None, settings: Mapping[str, Any], sets: Iterable[str] = ()
) -> Recipe:
    """Load configs/data/NAME.toml or a file; then apply the options, then each --set a.b=c."""
    table = {} if config is None else named_table("data", config, "config")
    chosen = {text: parse_set(text) for text in sets}
    if any("tokenizer" in layer for layer in (table, *chosen.values())):
        raise ConfigError("tokenizer is not a setting of a recipe; give --tokenizer FILE.model")
    for text, layer in chosen.items():
        if settings.get("tokenizer") and layer.keys() & {"train", "vocab_size"}:
            problem = f"--set {text} configures the training of a tokenizer, but one is given"
            raise ConfigError(f"{problem}; remove it or --tokenizer")
    given = {key: value for key, value in settings.items() if value is not None}
    for layer in (given, *chosen.values()):
        table = merge(table, layer)
    if not table.get("sources"):
        raise ConfigError("sources is empty; name at least one with --source")
    return validate(Recipe, table, where=config or "")


# Inputs

Kind = Literal["text", "jsonl", "parquet", "arrow", "megatron", "hf", "synthetic"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of one input.

    `start` and `stop` count bytes of a text or jsonl file, row groups of a parquet file, record
    batches, documents, rows, shards or batches, depending on the kind. All fields enter the
    fingerprint of a corpus.
    """

    source: str
    kind: Kind
    path: str
    start: int
    stop: int
    bytes: int  # approximate amount of work
    stamp: int = 0  # changes when the input changes
    limit: int | None = None  # stop after the document that reaches this many bytes of text


Task = tuple[Piece, ...]


class Malformed(NamedTuple):
    """A document that cannot be used."""

    path: str
    position: int  # a byte of a text or jsonl file, otherwise a row
    reason: str
    bytes: int = 0

    @property
    def where(self) -> str:
        return f"{self.path} at {self.position:,}: {self.reason}"
