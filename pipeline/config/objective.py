"""Objectives: what a model predicts, and from what. The closed union `[objective]` of a run.

Special ids (mask, sentinels) are above the tokenizer's own. A model's vocabulary includes as many
as its objective needs, so that every objective can use the same token shards.
"""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from pipeline.config.parts import Count, Share, Weight, require
from pipeline.config.shape import Model
from pipeline.config.spans import BaseObjective, Denoise, Mixture, OpenShare, Spans, Stack


class Causal(BaseObjective):
    """Predict each token from those before it."""

    kind: Literal["causal"] = "causal"
    whole_text: ClassVar[bool] = True


class Prefix(BaseObjective):
    """Predict each token of a continuation from the tokens before it and a prefix that is read in
    both directions (arXiv 1910.10683, §3.2.2). The end of the prefix is random."""

    kind: Literal["prefix"] = "prefix"
    share: OpenShare = 0.5  # of a row's tokens that are predicted, the same number in every row
    whole_text: ClassVar[bool] = True
    whole_prompts: ClassVar[bool] = True

    def text_length(self, seq: int, source_seq: int | None = None) -> int:
        return seq + 1  # the last token is predicted but not read

    def predicted(self, seq: int) -> int:
        return min(max(round(self.share * seq), 1), seq - 1)


class Masked(BaseObjective):
    """Predict some tokens of a text from all others (BERT, arXiv 1810.04805)."""

    kind: Literal["masked"] = "masked"
    rate: OpenShare = 0.15  # share of tokens that are predicted
    mask: Share = 0.8  # share of these that the mask replaces
    random: Share = 0.1  # share of these that a random token replaces; the others stay
    # A row is two parts of a text, and the model also predicts whether the second follows the first
    # (BERT), or whether the two were swapped (ALBERT, arXiv 1909.11942).
    pairs: Literal["none", "next", "order"] = "none"
    stack: ClassVar[Stack] = "encoder"

    @model_validator(mode="after")
    def _one_whole(self) -> Self:
        text = f"mask={self.mask} and random={self.random} are together above 1; lower one of them"
        require(self.mask + self.random <= 1 + 1e-9, text)
        text = "mask=0 and random=0 hide no token that could be predicted; raise one of them"
        require(self.mask + self.random > 0, text)
        return self

    @property
    def special_ids(self) -> int:
        """The mask; with pairs also the first token of a row and the end of a part."""
        return 1 if self.pairs == "none" else 3

    def text_length(self, seq: int, source_seq: int | None = None) -> int:
        return seq if self.pairs == "none" else seq - 3

    def most_targets(self, seq: int) -> int | None:
        return max(1, round(self.rate * seq))


class Replaced(BaseObjective):
    """Predict which tokens of a text were replaced (ELECTRA, arXiv 2003.10555). Replacements are
    tokens of other texts, or samples of `model.generator`, which is trained to fill masks."""

    kind: Literal["replaced"] = "replaced"
    rate: OpenShare = 0.15  # share of tokens that are replaced; every token has a prediction
    trained: bool = False  # whether the model has a generator; new runs derive it from the model
    stack: ClassVar[Stack] = "encoder"

    @property
    def special_ids(self) -> int:
        return int(self.trained)  # the mask

    def most_targets(self, seq: int) -> int | None:
        """Those of the generator; the model itself predicts for every token."""
        return max(1, round(self.rate * seq)) if self.trained else None


class Pairs(BaseObjective):
    """A translation, from the text that it translates (arXiv 1706.03762)."""

    kind: Literal["pairs"] = "pairs"
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of labels, in training only
    # From the first column of the data to the second; or between any two, where the first token of
    # either side is that of its language (M2M-100, arXiv 2010.11125).
    directions: Literal["first", "every"] = "first"
    languages: tuple[str, ...] = ()  # columns of the data; a new run reads them from its manifest
    stack: ClassVar[Stack] = "encoder-decoder"

    @property
    def tagged(self) -> bool:
        """Whether a text begins with the token of its language."""
        return self.directions == "every"

    @property
    def special_ids(self) -> int:
        """One id for each language, in their order."""
        return len(self.languages) if self.tagged else 0

    @property
    def label_smoothing(self) -> float:
        return self.smoothing

    def text_length(self, seq: int, source_seq: int | None = None) -> int:
        return seq + (source_seq or seq)


class Answers(BaseObjective):
    """Predict the answer to a prompt. The prompt itself is not predicted (objective/noise.py)."""

    kind: Literal["answers"] = "answers"
    examples: ClassVar[bool] = True

    def text_length(self, seq: int, source_seq: int | None = None) -> int:
        return seq + 2  # the end after the prompt, and the last token, which is not read


class Labels(BaseObjective):
    """Predict the class of a text or of a pair of texts, or a number (objective/noise.py)."""

    kind: Literal["labels"] = "labels"
    names: tuple[str, ...] = ()  # names of the classes; none: the label is a number
    # The token that the row's head reads: the last one of a decoder, the first one of an encoder.
    reads: Literal["last", "first"] = "last"
    lm_weight: Weight = 0.0  # weight of the language-model loss on the text; GPT has 0.5
    special: Count = 0  # ids above the tokenizer's that the pretrained model has
    examples: ClassVar[bool] = True

    @model_validator(mode="after")
    def _tokens_ahead(self) -> Self:
        text = f"lm_weight={self.lm_weight} needs a decoder: an encoder sees the tokens to predict"
        require(self.reads == "last" or not self.lm_weight, f"{text}; set lm_weight=0")
        require(len(self.names) != 1, f"names={list(self.names)} is one class; give two or more")
        return self

    @property
    def stack(self) -> Stack:  # type: ignore[override]  # not the same for all labels
        return "decoder" if self.reads == "last" else "encoder"

    @property
    def classes(self) -> int:
        """How many numbers the head predicts for a row."""
        return len(self.names) or 1

    @property
    def special_ids(self) -> int:
        return self.special

    @property
    def token_weight(self) -> float | None:
        return self.lm_weight

    def text_length(self, seq: int, source_seq: int | None = None) -> int:
        return seq + LABEL_DIGITS


# The least share of words in a row: if no document is empty, at most every second token ends one.
LEAST_WORD_SHARE = 0.5
LABEL_DIGITS = 8  # hexadecimal, at the start of a row of the data: 32 bits
Objective = Annotated[
    Causal | Prefix | Masked | Replaced | Spans | Mixture | Denoise | Pairs | Answers | Labels,
    Field(discriminator="kind"),
]


def padded_vocab(pieces: int, objective: Objective) -> int:
    """Return the vocabulary of a model: a multiple of 64, because GPUs are faster with those."""
    return -(-(pieces + objective.special_ids) // 64) * 64


def refuse(objective: Objective, model: Model, *, apart: bool) -> str:
    """Return why a model, or documents that are kept `apart`, do not work with an objective, and
    the remedy; empty if they do."""
    encodes = "replaced" if model.head == "replaced" else "masked"
    usual = {"decoder": "causal", "encoder": encodes, "encoder-decoder": "spans"}
    encoder = "electra" if isinstance(objective, Replaced) else "bert"
    arch = {"decoder": "dense", "encoder": encoder, "encoder-decoder": "t5"}
    key = f'objective.kind="{objective.kind}"'
    if objective.stack != model.stack:
        text = f'{key} needs model.stack="{objective.stack}", not "{model.stack}"'
        remedy = f"--arch {arch[objective.stack]}, or --set objective.kind={usual[model.stack]}"
        if isinstance(objective, Pairs):  # data of pairs serves no other objective
            remedy = "--arch transformer"
        return f"{text}; use {remedy}"
    pairs = isinstance(objective, Masked) and objective.pairs != "none"
    if isinstance(objective, Labels):
        return _refuse_labels(objective, model, key, apart=apart)
    if isinstance(objective, Replaced) != (model.head == "replaced"):
        remedy = "--arch electra" if isinstance(objective, Replaced) else "objective.kind=replaced"
        return f'{key} has another head than model.head="{model.head}"; use {remedy}'
    refusal = _refuse_two_losses(objective, model, apart=apart)
    if refusal:
        return refusal
    if pairs and (model.row_classes != 2 or model.segments < 2):
        text = "objective.pairs needs model.row_classes=2 and model.segments=2"
        return f"{text}; use --arch bert, or --set objective.pairs=none"
    if model.row_classes and not pairs:
        text = f"model.row_classes={model.row_classes} labels rows, which {key} does not"
        other = "objective.pairs=next, or " if isinstance(objective, Masked) else ""
        return f"{text}; set {other}model.row_classes=0"
    if apart and (pairs or isinstance(objective, Prefix | Spans | Mixture | Denoise | Answers)):
        cause = "objective.pairs" if pairs else key
        text = f"{cause} reads rows of running text, not documents kept apart"
        other = ", or set objective.pairs=none and model.row_classes=0" if pairs else ""
        return f'{text}; remove data.documents=true and data.packing="best-fit"{other}'
    if apart and isinstance(objective, Pairs):
        text = f"{key} always keeps pairs apart and packs them"
        return f'{text}; remove data.documents=true and data.packing="best-fit"'
    # A prefix needs a token after it, and a hidden token needs others. A pair has 3 special tokens,
    # and in fewer than 4 tokens of text, the first part could be empty.
    least = 2 if isinstance(objective, Prefix | Masked | Replaced | Denoise) else 1
    least = 7 if pairs else least
    if model.seq < least:
        return f"model.seq={model.seq} is too short for {key}; use at least {least}"
    lengths = objective.lengths(model.seq, model.source_seq)
    if lengths != (model.seq, model.source_seq):
        text = f"model.seq={model.seq} and model.source_seq={model.source_seq} do not match {key}"
        return f"{text}; set model.seq={lengths[0]} and model.source_seq={lengths[1]}"
    if isinstance(objective, Spans | Mixture):
        spans = objective.most_spans(objective.text_length(model.seq, model.source_seq))
        if spans > objective.sentinels:
            text = f"objective.sentinels={objective.sentinels} are fewer than the {spans} spans"
            return f"{text} of {model.source_seq} tokens; set objective.sentinels={spans}"
    return ""


def _refuse_two_losses(objective: Objective, model: Model, *, apart: bool) -> str:
    """Return why a second loss, of row classes or of a generator, does not work, and the remedy."""
    if isinstance(objective, Replaced):
        if objective.trained != (model.generator is not None):
            text = f"objective.trained={str(objective.trained).lower()}"
            return f"{text} with model.generator={model.generator}; remove one of the two settings"
        if objective.trained and apart:
            text = "model.generator conflicts with separate documents: padding would be predicted"
            return f'{text}; remove data.documents=true and data.packing="best-fit"'
    pairs = isinstance(objective, Masked) and objective.pairs != "none"
    rate = objective.rate if isinstance(objective, Masked | Replaced) else 0.0
    if (pairs or model.generator is not None) and rate > LEAST_WORD_SHARE:
        # Rows of short documents would mask fewer tokens than others, but count the same.
        also = "objective.pairs" if pairs else "model.generator"
        text = f"objective.rate={rate} is too high for {also}: some rows have too few words"
        return f"{text}; set objective.rate to at most {LEAST_WORD_SHARE}"
    return ""


def _refuse_labels(objective: Labels, model: Model, key: str, *, apart: bool) -> str:
    if model.row_classes != objective.classes:
        text = f"{key} has {objective.classes} classes, not model.row_classes={model.row_classes}"
        return f"{text}; set model.row_classes={objective.classes}"
    if apart:
        text = f"{key} reads one example per row, not documents"
        return f'{text}; remove data.documents=true and data.packing="best-fit"'
    return ""
