"""Turn a text into the inputs and targets of a model, row by row.

The random draws of a row are a pure function of its key, so that they do not depend on the number
of ranks and a resumed run sees the same rows. Every row predicts the same number of tokens, or
fewer if it has padding, because losses are means of means over micro-batches and ranks. Where rows
differ (answers and mixtures), the loader adds the mean number of targets (`Example.counts`).
"""

from collections.abc import Sequence
from typing import NamedTuple, assert_never

import numpy as np
import numpy.typing as npt

from pipeline.config.objective import (
    Answers,
    Causal,
    Labels,
    Masked,
    Objective,
    Pairs,
    Prefix,
    Replaced,
)
from pipeline.config.spans import MODES, Denoise, Mixture, Spans
from pipeline.objective.draws import I64, Draws
from pipeline.objective.example import (
    IGNORE,
    Example,
    Noise,
    Text,
    Vocabulary,
    read_answer,
    read_label,
)


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
        case Replaced() if objective.trained:
            # ELECTRA's code masks 85% of the predicted tokens and leaves the others as they are.
            masks = Masked(rate=objective.rate, mask=0.85, random=0.0)
            return lambda text, draws: mask_with_draws(masks, vocabulary, text, draws)
        case Replaced():
            return lambda text, draws: replace_tokens(objective, vocabulary, text, draws)
        case Spans():
            return lambda text, draws: cut_spans(objective, vocabulary, text, draws)
        case Mixture():
            return lambda text, draws: mix_denoisers(objective, vocabulary, source_seq, text, draws)
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


def mask_with_draws(masks: Masked, vocabulary: Vocabulary, text: Text, draws: Draws) -> Example:
    """Mask some tokens, each with the random key by which a generator samples another one."""
    row = mask_tokens(masks, vocabulary, text, draws)
    return row._replace(draws=draws.below(2**32, len(text.tokens)))


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
    source, targets = cut_out(text.tokens, *objective.noise(len(text.tokens)), vocabulary, draws)
    tokens = np.concatenate(([vocabulary.eod], targets[:-1]))
    return Example(tokens, targets, source=source)


def cut_out(
    text: I64, cut: int, spans: int, vocabulary: Vocabulary, draws: Draws
) -> tuple[I64, I64]:
    """Return the rest and the spans of a text, each with its sentinels and its end."""
    parts = np.empty(2 * spans, np.int64)
    parts[0::2] = random_parts(len(text) - cut, spans, draws)
    parts[1::2] = random_parts(cut, spans, draws)
    sentinels = vocabulary.pieces + np.arange(spans)
    is_noise = np.repeat(np.arange(2 * spans) % 2 == 1, parts)
    # A sentinel is at the place of its span: after the tokens that stay before it.
    source = np.insert(text[~is_noise], np.cumsum(parts[0::2]), sentinels)
    starts = np.cumsum(parts[1::2]) - parts[1::2]
    targets = np.insert(text[is_noise], starts, sentinels)
    return np.append(source, vocabulary.eod), np.append(targets, vocabulary.eod)


def mix_denoisers(
    objective: Mixture, vocabulary: Vocabulary, source_seq: int | None, text: Text, draws: Draws
) -> Example:
    """Cut spans out as the denoiser of this row does. Both sides are padded to the longest row.

    The parts alternate, beginning with text, so a single span is the end of the text."""
    denoiser = objective.denoiser(draws.number)
    cut, spans = denoiser.noise(len(text.tokens))
    rest, predicted = cut_out(text.tokens, cut, spans, vocabulary, draws)
    mode = vocabulary.pieces + objective.sentinels + MODES.index(denoiser.mode)
    source = np.concatenate(([mode], rest))
    reads = source_seq or len(source)
    seq, _ = objective.lengths(reads, reads)
    tokens = np.full(seq, vocabulary.eod)
    tokens[1 : len(predicted)] = predicted[:-1]
    targets = np.full(seq, IGNORE)
    targets[: len(predicted)] = predicted
    return pad_source(Example(tokens, targets, source=source), reads, vocabulary.eod)


def corrupt(
    objective: Denoise, vocabulary: Vocabulary, source_seq: int | None, text: Text, draws: Draws
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
    reads = source_seq or len(source)
    return row if reads == len(source) else pad_source(row, reads, vocabulary.eod)


def pad_source(row: Example, length: int, eod: int) -> Example:
    """Pad the source. Padding is a separate document, to which no token of the text attends."""
    assert row.source is not None
    padding = length - len(row.source)
    return row._replace(
        documents=np.zeros_like(row.tokens),
        source=np.pad(row.source, (0, padding), constant_values=eod),
        source_documents=np.pad(np.zeros_like(row.source), (0, padding), constant_values=1),
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
