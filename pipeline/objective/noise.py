"""Turn a text into the inputs and targets of a model, row by row.

The random draws of a row are a pure function of its key, so that they do not depend on the number
of ranks and a resumed run sees the same rows. Every row predicts the same number of tokens, or
fewer if it has padding, because losses are means of means over micro-batches and ranks.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, assert_never

import numpy as np
import numpy.typing as npt

from pipeline.config.objective import (
    LABEL_DIGITS,
    Answers,
    Causal,
    Denoise,
    Labels,
    Masked,
    Objective,
    Pairs,
    Prefix,
    Replaced,
    Spans,
)
from pipeline.objective.draws import F32, I64, Draws

IGNORE = -100  # target of a position without a prediction, as in torch's cross-entropy


class Example(NamedTuple):
    """A row of a batch: the tensors of `Batch`, in the same order."""

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

    @property
    def raw(self) -> memoryview:
        """The bytes that the hash of a batch covers: everything that the model reads."""
        return np.concatenate([part for part in self if part is not None]).data


class Text(NamedTuple):
    """The text of a row."""

    tokens: I64
    documents: I64 | None  # document of each token, if documents are kept apart
    length: int  # number of tokens without padding
    another: Callable[[Draws], I64] | None = None  # draws another text of the same length


class Vocabulary(NamedTuple):
    pieces: int  # ids of the tokenizer; the special ids follow them
    eod: int  # ends every document, and is the first input of an encoder–decoder's decoder


Noise = Callable[[Text, Draws], Example]


def make_noise(
    objective: Objective, vocabulary: Vocabulary, source_seq: int | None = None
) -> Noise | None:
    """Return the function that turns texts into rows; None if rows are unchanged texts. Sources are
    padded to `source_seq`."""
    match objective:
        case Causal():
            return None
        case Prefix():
            return lambda text, draws: continue_prefix(objective, text, draws)
        case Masked() if objective.pairs != "none":
            return lambda text, draws: mask_pair(objective, vocabulary, text, draws)
        case Masked():
            return lambda text, draws: mask_tokens(objective, vocabulary, text, draws)
        case Replaced():
            return lambda text, draws: replace_tokens(objective, vocabulary, text, draws)
        case Spans():
            return lambda text, draws: cut_spans(objective, vocabulary, text, draws)
        case Denoise():
            return lambda text, draws: corrupt(objective, vocabulary, source_seq, text, draws)
        case Pairs():
            # Rows of data are read as pairs (data/pairs.py); these are of random text.
            return lambda text, draws: cut_pairs(vocabulary, source_seq, text, draws)
        case Answers():
            return lambda text, _draws: read_answer(text.tokens, vocabulary)
        case Labels():
            return lambda text, _draws: read_label(text.tokens, objective, vocabulary)
        case _:
            assert_never(objective)


def continue_prefix(objective: Prefix, text: Text, draws: Draws) -> Example:
    """Predict a fixed number of tokens after a prefix of random length."""
    seq = len(text.tokens) - 1
    predicted = objective.predicted(seq)
    prefix = 1 + draws.below(seq - predicted, 1)
    # The last token of the prefix predicts the first one after it.
    first = int(prefix[0]) - 1
    targets = np.full(seq, IGNORE)
    targets[first : first + predicted] = text.tokens[first + 1 : first + predicted + 1]
    return Example(text.tokens[:-1], targets, prefix=prefix)


def mask_tokens(objective: Masked, vocabulary: Vocabulary, text: Text, draws: Draws) -> Example:
    """Predict some tokens, most of which are masked. Document ends are never predicted."""
    is_word = (text.tokens != vocabulary.eod) & (text.tokens < vocabulary.pieces)
    words = np.flatnonzero(is_word[: text.length])
    wanted = max(1, round(objective.rate * text.length))
    chosen = draws.choice(words, wanted)
    targets = np.full(len(text.tokens), IGNORE)
    targets[chosen] = text.tokens[chosen]
    share = draws.shares(len(chosen))
    random = draws.below(vocabulary.pieces, len(chosen))
    tokens = text.tokens.copy()
    hidden = np.where(share < objective.mask + objective.random, random, tokens[chosen])
    tokens[chosen] = np.where(share < objective.mask, vocabulary.pieces, hidden)
    return Example(tokens, targets, text.documents)


def replace_tokens(
    objective: Replaced, vocabulary: Vocabulary, text: Text, draws: Draws
) -> Example:
    """Replace some tokens by those of another text; predict 1 for each that differs, else 0."""
    assert text.another is not None
    words = np.flatnonzero(text.tokens[: text.length] != vocabulary.eod)
    chosen = draws.choice(words, max(1, round(objective.rate * text.length)))
    tokens = text.tokens.copy()
    tokens[chosen] = text.another(draws)[chosen]
    targets = (tokens != text.tokens).astype(np.int64)
    targets[text.length :] = IGNORE
    return Example(tokens, targets, text.documents)


def mask_pair(objective: Masked, vocabulary: Vocabulary, text: Text, draws: Draws) -> Example:
    """Divide a text in two and mask some tokens. In half of the rows the second part is that of
    another text, or comes first."""
    half = len(text.tokens) // 2
    # Both parts have at least a quarter of the text.
    border = half // 2 + int(draws.below(half, 1)[0])
    first = text.tokens[:border]
    second = text.tokens[border:]
    label = draws.below(2, 1)
    if label[0] and objective.pairs == "next":
        assert text.another is not None
        second = text.another(draws)[border:]
    elif label[0]:
        first, second = second, first
    start = [vocabulary.pieces + 1]
    end = [vocabulary.pieces + 2]
    tokens = np.concatenate((start, first, end, second, end))
    row = mask_tokens(objective, vocabulary, Text(tokens, None, len(tokens)), draws)
    segments = np.repeat([0, 1], [len(first) + 2, len(second) + 1])
    return row._replace(segments=segments, labels=label)


def cut_spans(objective: Spans, vocabulary: Vocabulary, text: Text, draws: Draws) -> Example:
    """Replace each span by a sentinel; predict the sentinels, each followed by its span.

    As in T5's random_spans_noise_mask, text and noise are each divided into as many random parts as
    there are spans, and the parts alternate, beginning with text."""
    length = len(text.tokens)
    cut, spans = objective.noise(length)
    parts = np.empty(2 * spans, np.int64)
    parts[0::2] = random_parts(length - cut, spans, draws)
    parts[1::2] = random_parts(cut, spans, draws)
    sentinels = vocabulary.pieces + np.arange(spans)
    is_noise = np.repeat(np.arange(2 * spans) % 2 == 1, parts)
    source = text.tokens[~is_noise]
    # A sentinel is at the place of its span: after the tokens that stay before it.
    source = np.insert(source, np.cumsum(parts[0::2]), sentinels)
    source = np.append(source, vocabulary.eod)
    starts = np.cumsum(parts[1::2]) - parts[1::2]
    targets = np.append(np.insert(text.tokens[is_noise], starts, sentinels), vocabulary.eod)
    tokens = np.concatenate(([vocabulary.eod], targets[:-1]))
    return Example(tokens, targets, source=source)


def corrupt(
    objective: Denoise,
    vocabulary: Vocabulary,
    source_seq: int | None,
    text: Text,
    draws: Draws,
) -> Example:
    """Permute the sentences, replace each span by one mask, and predict the whole text.

    The lengths of the spans are Poisson distributed, given that their sum is the number of tokens
    to cut out: every such token is assigned to a random span. An empty span inserts a mask.
    """
    length = len(text.tokens)
    cut, spans = objective.noise(length)
    given = text.tokens
    if objective.permute:
        given = permute_sentences(given, (vocabulary.eod, *objective.stops), draws)
    spans_lengths = np.bincount(draws.below(spans, cut), minlength=spans)
    # Each span is before a different one of the tokens that stay, or at the end.
    before = np.sort(draws.choice(np.arange(length - cut + 1), spans))
    starts = before + np.cumsum(spans_lengths) - spans_lengths
    stays = np.ones(length, bool)
    offsets = np.arange(cut) - np.repeat(np.cumsum(spans_lengths) - spans_lengths, spans_lengths)
    stays[np.repeat(starts, spans_lengths) + offsets] = False
    source = np.insert(given[stays], before, vocabulary.pieces)
    tokens = np.concatenate(([vocabulary.eod], text.tokens[:-1]))
    row = Example(tokens, text.tokens, source=source)
    padding = (source_seq or len(source)) - len(source)
    if not padding:
        return row
    # Padding is a separate document, to which no token of the text attends.
    return row._replace(
        documents=np.zeros_like(tokens),
        source=np.pad(source, (0, padding), constant_values=vocabulary.eod),
        source_documents=np.pad(np.zeros_like(source), (0, padding), constant_values=1),
    )


class Pair(NamedTuple):
    source: npt.NDArray[np.integer]  # with its end
    start: int  # the decoder's first input
    target: npt.NDArray[np.integer]  # with its end


def join_pairs(pairs: Sequence[Pair], seq: int, source_seq: int, eod: int) -> Example:
    """Return a row of pairs. On both sides, each pair is a document and the rest is padding."""
    tokens = np.full(seq, eod, np.int64)
    targets = np.full(seq, IGNORE, np.int64)
    # Padding of the decoder continues the last pair, so that it has a source to attend to; no token
    # of the pair attends to it. Padding of the encoder is a separate document.
    documents = np.full(seq, len(pairs) - 1, np.int64)
    source = np.full(source_seq, eod, np.int64)
    source_documents = np.full(source_seq, len(pairs), np.int64)
    at = 0
    source_at = 0
    for number, pair in enumerate(pairs):
        end = at + len(pair.target)
        source_end = source_at + len(pair.source)
        tokens[at] = pair.start
        tokens[at + 1 : end] = pair.target[:-1]
        targets[at:end] = pair.target
        documents[at:end] = number
        source[source_at:source_end] = pair.source
        source_documents[source_at:source_end] = number
        at = end
        source_at = source_end
    return Example(tokens, targets, documents, source, source_documents)


def cut_pairs(vocabulary: Vocabulary, source_seq: int | None, text: Text, draws: Draws) -> Example:
    """Return a row filled by two pairs, for checks and benchmarks without data."""
    reads = source_seq or len(text.tokens) // 2
    source = text.tokens[:reads]
    target = text.tokens[reads:]
    borders = [1 + int(draws.below(len(side) - 1, 1)[0]) for side in (source, target)]
    pairs = [
        Pair(source[: borders[0]], vocabulary.eod, target[: borders[1]]),
        Pair(source[borders[0] :], vocabulary.eod, target[borders[1] :]),
    ]
    return join_pairs(pairs, len(target), len(source), vocabulary.eod)


def permute_sentences(tokens: I64, stops: tuple[int, ...], draws: Draws) -> I64:
    """Permute sentences, each of which ends with one of the stops; the last may be cut off."""
    after = np.flatnonzero(np.isin(tokens[:-1], stops)) + 1
    sentences = np.split(tokens, after)
    order = np.argsort(draws.bits(len(sentences)))
    return np.concatenate([sentences[i] for i in order])


def random_parts(total: int, parts: int, draws: Draws) -> I64:
    """Return lengths of at least one that add up to a total; every such list is equally likely."""
    borders = np.sort(draws.choice(np.arange(1, total), parts - 1))
    return np.diff(np.concatenate(([0], borders, [total])))


# Examples of a file (data/rows.py). The text of a row is one example. Each of its parts ends with
# the end of a document, which also fills the rest of the row; no text contains this token.


def read_answer(text: I64, vocabulary: Vocabulary) -> Example:
    """Predict the answer after the prompt, and its end unless the answer was cut."""
    eod = vocabulary.eod
    seq = len(text) - 2
    prompt, answer, ended = _two_parts(text, eod)
    if not len(prompt):
        prompt = np.array([eod])  # an empty prompt starts like a document, as in `launch generate`
    whole = np.concatenate((prompt, answer, [eod] if ended else []))[: seq + 1].astype(np.int64)
    tokens = np.full(seq, eod)
    targets = np.full(seq, IGNORE)
    inputs = len(whole) - 1
    tokens[:inputs] = whole[:-1]
    if len(answer):  # rows that only fill a batch have no answer
        first = len(prompt) - 1
        targets[first:inputs] = whole[first + 1 :]
    return Example(tokens, targets)


def read_label(text: I64, objective: Labels, vocabulary: Vocabulary) -> Example:
    """Predict the label, which is 32 bits at the start of the row, from the text or pair after it.

    A decoder reads each text and its end, and predicts the label at the last end, like GPT's tokens
    for delimiting and extracting. An encoder reads BERT's [CLS] text [SEP] text [SEP], or the same
    with the end of a document in place of both special tokens."""
    bits = int("".join(f"{digit % 16:x}" for digit in text[:LABEL_DIGITS].tolist()), 16)
    seq = len(text) - LABEL_DIGITS
    first, second, _ = _two_parts(text[LABEL_DIGITS:], vocabulary.eod)
    encoder = objective.reads == "first"
    framed = encoder and objective.special >= 3  # as the pretraining of pairs (mask_pair)
    start = [vocabulary.pieces + 1 if framed else vocabulary.eod] if encoder else []
    end = [vocabulary.pieces + 2 if framed else vocabulary.eod]
    after = end if len(second) else []
    whole = np.concatenate((start, first, end, second, after)).astype(np.int64)[:seq]
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


NO_LABEL = 2**32 - 1  # of a row that fills a batch up; as a float, it is a NaN


def _label(bits: int, objective: Labels) -> I64 | F32:
    if not objective.names:
        return np.array([bits], np.uint32).view(np.float32)
    return np.array([IGNORE if bits == NO_LABEL else bits % objective.classes])


def _two_parts(text: I64, eod: int) -> tuple[I64, I64, bool]:
    """The tokens before the first end and those between it and the second, if there is one."""
    ends = np.flatnonzero(text == eod)[:2]
    first = int(ends[0]) if len(ends) else len(text)
    second = int(ends[1]) if len(ends) > 1 else len(text)
    return text[:first], text[first + 1 : second], len(ends) > 1
