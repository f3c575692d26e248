"""What every objective has, and those that cut spans out of a text: T5's, UL2's and BART's."""

from bisect import bisect_right
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from pipeline.config.parts import Count, Frozen, Positive, require

Stack = Literal["decoder", "encoder", "encoder-decoder"]
OpenShare = Annotated[float, Field(gt=0, lt=1)]
_Length = Annotated[float, Field(ge=1)]


class BaseObjective(Frozen):
    kind: str
    stack: ClassVar[Stack] = "decoder"  # the stack that this objective needs
    # Whether the loss covers running text, so that bits per byte exist.
    whole_text: ClassVar[bool] = False
    # Whether every token of a prompt attends to all of it, also when generating.
    whole_prompts: ClassVar[bool] = False
    # Whether a row is one example of a file (`launch finetune`), and not running text.
    examples: ClassVar[bool] = False

    @property
    def special_ids(self) -> int:
        """Number of special ids, which are above the tokenizer's."""
        return 0

    def text_length(self, seq: int, source_seq: int | None = None) -> int:
        """Number of text tokens in a row of a model with these lengths."""
        return seq

    def lengths(self, seq: int, source_seq: int | None) -> tuple[int, int | None]:
        """Return the valid `model.seq` and `model.source_seq` nearest to those given."""
        return seq, source_seq

    def most_targets(self, seq: int) -> int | None:
        """The most tokens of a row that are predicted, if they are few: only these are read by the
        head. None: the head reads every token."""
        return None

    def row_targets(self, number: int, text_length: int) -> int | None:
        """Number of tokens that a row predicts, by its number; None if all rows are alike, or if
        the text has to be read."""
        return None

    @property
    def name(self) -> str:
        """The kind and every setting that is not the default. Losses of objectives with different
        names are not comparable."""
        given = self.model_dump(exclude_defaults=True)
        return " ".join([self.kind, *(f"{key}={value}" for key, value in given.items())])

    @property
    def label_smoothing(self) -> float:
        """Share of each target's probability that training spreads over the vocabulary."""
        return 0.0

    @property
    def token_weight(self) -> float | None:
        """Weight of the tokens' loss beside the row's. None: the tokens' loss is the main one."""
        return None


class _Cut(BaseObjective):
    """Spans of a text are cut out: in every row the same number of tokens and of spans."""

    rate: OpenShare  # share of tokens that are cut out
    length: _Length  # mean length of a span in tokens
    stack: ClassVar[Stack] = "encoder-decoder"

    @model_validator(mode="after")
    def _tokens_between(self) -> Self:
        _check_spans(self.rate, self.length)
        return self

    def noise(self, tokens: int) -> tuple[int, int]:
        """Return the number of tokens to cut out of a text of this length, and of spans."""
        return _cut_and_spans(tokens, self.rate, self.length)


def _check_spans(rate: float, length: float) -> None:
    """Spans do not touch, so at least one token must stay for each span."""
    most = length / (1 + length)
    text = f"rate={rate} leaves no token between spans of {length:g} tokens"
    require(rate < most, f"{text}; use a rate below {most:.3g}, or longer spans")


def _cut_and_spans(tokens: int, rate: float, length: float | None) -> tuple[int, int]:
    cut = min(max(round(tokens * rate), 1), tokens - 1)
    # Each span follows at least one token that stays. Without a length there is one span.
    return cut, 1 if length is None else min(max(round(cut / length), 1), tokens - cut)


def _longest_text(reads: int, rest: Callable[[int], int]) -> int:
    """The longest text whose rest fits into the input of an encoder of length `reads`. A longer
    text never has a shorter rest, so bisection finds it."""
    above = 3
    while rest(above) <= reads and above < 2**60:  # `range` has a length below 2**63
        above *= 2
    return bisect_right(range(above), reads, lo=3, key=rest) - 1


class Spans(_Cut):
    """Predict the spans cut out of a text from the rest (T5, arXiv 1910.10683, §3.1.4)."""

    kind: Literal["spans"] = "spans"
    rate: OpenShare = 0.15
    length: _Length = 3.0
    sentinels: Positive = 128  # ids that replace spans, one each; T5 has 100 and 28 unused ids

    @property
    def special_ids(self) -> int:
        return self.sentinels

    def text_length(self, seq: int, source_seq: int | None = None) -> int:
        """The longest text whose rest, sentinels and end fit into the encoder's input. T5 makes 512
        tokens of input from 568 tokens of text."""
        return _longest_text(source_seq or seq, self._rest)

    def lengths(self, seq: int, source_seq: int | None) -> tuple[int, int | None]:
        """A single given length is that of the encoder's input. Some inputs end a token short of
        it, because one more token of text would also add a span and its sentinel."""
        reads = source_seq or seq
        return self.target_length(reads), self._rest(self.text_length(reads))

    def target_length(self, seq: int) -> int:
        """Length of the decoder: the tokens cut out, their sentinels and the end. T5 has 114."""
        return sum(self.noise(self.text_length(seq))) + 1

    def most_spans(self, tokens: int) -> int:
        return self.noise(tokens)[1]

    def _rest(self, tokens: int) -> int:
        cut, spans = self.noise(tokens)
        return tokens - cut + spans + 1


class Denoiser(Frozen):
    """One way to cut spans out of a text, and how often it is used."""

    mode: Literal["R", "S", "X"]  # regular, sequential or extreme: the first token that is read
    rate: OpenShare
    length: _Length | None = None  # mean length of a span; None: one span at the end of the text
    weight: Positive = 1  # rows in each cycle through all denoisers

    @model_validator(mode="after")
    def _tokens_between(self) -> Self:
        if self.length is not None:
            _check_spans(self.rate, self.length)
        return self

    def noise(self, tokens: int) -> tuple[int, int]:
        return _cut_and_spans(tokens, self.rate, self.length)


MODES = ("R", "S", "X")
# Table 1 of arXiv 2205.05131.
_UL2 = tuple(
    Denoiser.model_validate({"mode": mode, "rate": rate, "length": length})
    for mode, rate, length in (
        ("R", 0.15, 3), ("X", 0.5, 3), ("S", 0.25, None), ("X", 0.15, 64),
        ("R", 0.15, 8), ("X", 0.5, 8), ("X", 0.5, 64),
    )
)  # fmt: skip


class Mixture(BaseObjective):
    """Spans as in T5, of several rates and lengths. Each row starts with a token for the mode of
    its denoiser (UL2's mixture of denoisers). Denoisers take turns, so that shares are exact."""

    kind: Literal["mixture"] = "mixture"
    denoisers: Annotated[tuple[Denoiser, ...], Field(min_length=1)] = _UL2
    sentinels: Positive = 128
    stack: ClassVar[Stack] = "encoder-decoder"

    @property
    def special_ids(self) -> int:
        """The sentinels, then a token for each mode."""
        return self.sentinels + len(MODES)

    def denoiser(self, number: int) -> Denoiser:
        """The denoiser of a row."""
        place = number % sum(each.weight for each in self.denoisers)
        for each in self.denoisers:
            place -= each.weight
            if place < 0:
                return each
        raise AssertionError("the place is within the cycle")

    def text_length(self, seq: int, source_seq: int | None = None) -> int:
        return _longest_text(source_seq or seq, self._rest)

    def lengths(self, seq: int, source_seq: int | None) -> tuple[int, int | None]:
        """A single given length is that of the encoder's input. Shorter rows are padded."""
        reads = source_seq or seq
        tokens = self.text_length(reads)
        writes = max(sum(each.noise(tokens)) for each in self.denoisers) + 1
        return writes, max(reads, self._rest(tokens))

    def row_targets(self, number: int, text_length: int) -> int:
        return sum(self.denoiser(number).noise(text_length)) + 1

    def most_spans(self, tokens: int) -> int:
        return max(each.noise(tokens)[1] for each in self.denoisers)

    def _rest(self, tokens: int) -> int:
        """The longest input: the mode, the tokens that stay, the sentinels and the end."""
        made = [each.noise(tokens) for each in self.denoisers]
        return max(tokens - cut + spans for cut, spans in made) + 2


class Denoise(_Cut):
    """Predict a whole text from one with permuted sentences, in which one mask replaces each span
    of any length (BART, arXiv 1910.13461: infilling with Poisson lengths)."""

    kind: Literal["denoise"] = "denoise"
    rate: OpenShare = 0.3
    length: _Length = 3.0
    permute: bool = True
    # Ids that end a sentence, besides the end of a document; new runs read them from the tokenizer.
    stops: tuple[Count, ...] = ()

    @property
    def special_ids(self) -> int:
        return 1

    def lengths(self, seq: int, source_seq: int | None) -> tuple[int, int | None]:
        """The decoder writes the whole text; the encoder reads the rest of it, and padding."""
        return seq, max(source_seq or seq, self.source_length(seq))

    def source_length(self, seq: int) -> int:
        """Length of the rest of a text, with a mask for each span."""
        cut, spans = self.noise(seq)
        return seq - cut + spans
