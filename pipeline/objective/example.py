"""A row of a batch, the text that it is made from, and rows that hold one fine-tuning example."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from pipeline.config.objective import LABEL_DIGITS, Labels
from pipeline.objective.draws import F32, I64, Draws

IGNORE = -100  # target of a position without a prediction, as in torch's cross-entropy


class Example(NamedTuple):
    """A row of a batch: the tensors of `batch.Micro`, in the same order."""

    tokens: I64
    targets: I64
    documents: I64 | None = None
    source: I64 | None = None
    source_documents: I64 | None = None
    segments: I64 | None = None
    prefix: I64 | None = None  # one number
    labels: I64 | F32 | None = None  # one number
    last: I64 | None = None  # one number
    counts: F32 | None = None  # one number
    draws: I64 | None = None

    @property
    def raw(self) -> memoryview:
        """The bytes that enter the hash of a batch: everything that the model reads."""
        return np.concatenate([part for part in self if part is not None]).data

    def rows(self) -> "list[Example]":
        """Split an example whose parts have one more dimension, the rows."""
        parts = (itertools.repeat(part) if part is None else part for part in self)
        return [Example(*row) for row in zip(*parts, strict=False)]


class Text(NamedTuple):
    """The text from which a row is made."""

    tokens: I64
    documents: I64 | None  # document of each token, if documents are kept apart
    length: int  # number of tokens without padding
    another: Callable[[Draws], I64] | None = None  # draws another text of the same length


class Vocabulary(NamedTuple):
    pieces: int  # ids of the tokenizer; the special ids follow them
    eod: int  # ends every document, and is the first input of an encoder–decoder's decoder


# Turns the texts of a batch, and the draws of each, into rows.
Noise = Callable[[Sequence[Text], Sequence[Draws]], list[Example]]


# Fine-tuning examples (data/rows.py). A text holds one example of two parts; the second part may be
# empty. The end-of-document token ends each part and pads the text; no part contains this token.


def read_answer(vocabulary: Vocabulary, text: Text, _draws: Draws) -> Example:
    """Predict the answer after the prompt, and the end of an answer that was not cut off."""
    eod = vocabulary.eod
    seq = len(text.tokens) - 2
    prompt, answer, ended = _two_parts(text.tokens, eod)
    if not len(prompt):
        prompt = np.array([eod])  # an empty prompt starts like a document, as in `launch generate`
    whole = np.concatenate((prompt, answer, [eod] if ended else []))[: seq + 1].astype(np.int64)
    tokens = np.full(seq, eod)
    targets = np.full(seq, IGNORE)
    inputs = len(whole) - 1
    tokens[:inputs] = whole[:-1]
    if len(answer):  # padding rows of a batch have no answer
        first = len(prompt) - 1
        targets[first:inputs] = whole[first + 1 :]
    return Example(tokens, targets)


def read_label(objective: Labels, vocabulary: Vocabulary, text: Text, _draws: Draws) -> Example:
    """Predict the label from one or two texts. The first tokens of the row encode the label's bits.

    A decoder reads each text and its end, and predicts the label at the last end: in GPT's terms,
    the ends are the delimiter and extract tokens. An encoder reads BERT's [CLS] text [SEP] text
    [SEP], or the same with the end-of-document token in place of both special tokens."""
    digits, rest = np.split(text.tokens, [LABEL_DIGITS])
    bits = int("".join(f"{digit % 16:x}" for digit in digits.tolist()), 16)
    seq = len(rest)
    first, second, _ended = _two_parts(rest, vocabulary.eod)
    encoder = objective.reads == "first"
    framed = encoder and objective.special >= 3  # has the ids that noise.join_halves uses
    start = [vocabulary.pieces + 1 if framed else vocabulary.eod] if encoder else []
    end = [vocabulary.pieces + 2 if framed else vocabulary.eod]
    second_end = end if len(second) else []
    whole = np.concatenate((start, first, end, second, second_end)).astype(np.int64)[:seq]
    length = len(whole)
    tokens = np.full(seq, vocabulary.eod)
    tokens[:length] = whole
    targets = np.full(seq, IGNORE)
    label = _label(bits, objective)
    if not encoder:
        targets[: length - 1] = whole[1:]
        return Example(tokens, targets, labels=label, last=np.array([length - 1]))
    # Padding is a separate document, to which no token of the text attends.
    documents = (np.arange(seq) >= length).astype(np.int64)
    segments = None
    if framed:
        border = len(first) + 2
        segments = ((np.arange(seq) >= border) & (np.arange(seq) < length)).astype(np.int64)
    return Example(tokens, targets, documents, segments=segments, labels=label)


NO_LABEL = 2**32 - 1  # the label's bits in a padding row of a batch; as a float they are a NaN


def _label(bits: int, objective: Labels) -> I64 | F32:
    """Return the number or, if the objective names classes, the class that 32 bits stand for."""
    if not objective.names:
        return np.array([bits], np.uint32).view(np.float32)
    return np.array([IGNORE if bits == NO_LABEL else bits % objective.classes])


def _two_parts(text: I64, eod: int) -> tuple[I64, I64, bool]:
    """Return the two parts, and whether the second one has an end."""
    ends = np.flatnonzero(text == eod)[:2]
    first = int(ends[0]) if len(ends) else len(text)
    second = int(ends[1]) if len(ends) > 1 else len(text)
    return text[:first], text[first + 1 : second], len(ends) > 1
