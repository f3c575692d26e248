"""Turn texts into the inputs and targets of a model.

The random draws of a row are a pure function of its key, so that they do not depend on the number
of ranks and a resumed run sees the same rows. Losses are means of means over micro-batches and
ranks, so every row should predict the same number of tokens. Where rows differ (padding,
translations, answers and mixtures), the loader adds the mean number of targets (`Example.counts`).

Masks, spans and pairs are made for many rows at once: row by row, the loader's thread would hold
the interpreter's lock while training waits. The functions of masks and spans accept one row, (S),
or several, (R, S).
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
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
    """Return the function that turns texts into rows, or None if rows are unchanged texts. It pads
    the inputs of an encoder–decoder's encoder to `source_seq`."""
    match objective:
        case Causal():
            return None
        case Masked() if objective.pairs == "none":
            return partial(mask_rows, mask_tokens, objective, vocabulary)
        case Masked():
            return partial(mask_pairs, objective, vocabulary)
        case Replaced() if objective.trained:
            # ELECTRA's code masks 85% of the predicted tokens and leaves the others as they are.
            masks = Masked(rate=objective.rate, mask=0.85, random=0.0)
            return partial(mask_rows, mask_with_draws, masks, vocabulary)
        case Spans():
            return partial(cut_rows, objective, vocabulary)
        # The remaining functions make one row at a time.
        case Prefix():
            make = partial(continue_prefix, objective)
        case Replaced():
            make = partial(replace_tokens, objective, vocabulary)
        case Mixture():
            # A search, so it runs once and not for every row.
            lengths = objective.lengths(source_seq, source_seq) if source_seq else None
            make = partial(mix_denoisers, objective, vocabulary, lengths)
        case Denoise():
            make = partial(corrupt, objective, vocabulary, source_seq)
        case Pairs():
            # Real pairs come from data/pairs.py; this makes pairs from random text.
            make = partial(cut_pairs, vocabulary, source_seq)
        case Answers():
            make = partial(read_answer, vocabulary)
        case Labels():
            make = partial(read_label, objective, vocabulary)
        case _:
            assert_never(objective)
    return lambda texts, draws: list(map(make, texts, draws))


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


def is_word(
    tokens: I64, length: int | npt.NDArray[np.integer], vocabulary: Vocabulary
) -> npt.NDArray[np.bool_]:
    """Return which tokens may be predicted: not document ends, special ids or padding."""
    allowed: npt.NDArray[np.bool_] = tokens != vocabulary.eod
    allowed &= tokens < vocabulary.pieces
    allowed &= np.arange(tokens.shape[-1]) < length
    return allowed


def mask_rows(
    mask: Callable[[Masked, Vocabulary, Text, Draws], Example],
    objective: Masked,
    vocabulary: Vocabulary,
    texts: Sequence[Text],
    draws: Sequence[Draws],
) -> list[Example]:
    """Mask texts. Texts with equal numbers of tokens, words and draws share one call of `mask`."""
    tokens_RS = np.stack([text.tokens for text in texts])
    lengths_R = np.array([text.length for text in texts])
    words_R = is_word(tokens_RS, lengths_R[:, None], vocabulary).sum(axis=1)
    drawn_R = [row.drawn for row in draws]
    groups = defaultdict[tuple[int, ...], list[int]](list)
    for number, key in enumerate(zip(lengths_R.tolist(), words_R.tolist(), drawn_R, strict=True)):
        groups[key].append(number)
    examples: dict[int, Example] = {}
    for (length, *_), numbers in groups.items():
        # Either every text has documents or none has.
        documents = [d for d in (texts[number].documents for number in numbers) if d is not None]
        text = Text(tokens_RS[numbers], np.stack(documents) if documents else None, length)
        masked = mask(objective, vocabulary, text, Draws.together([draws[n] for n in numbers]))
        examples |= dict(zip(numbers, masked.rows(), strict=True))
    return [examples[number] for number in range(len(texts))]


def mask_tokens(objective: Masked, vocabulary: Vocabulary, text: Text, draws: Draws) -> Example:
    """Predict some tokens; mask most of these. All rows must have the same number of words."""
    tokens = text.tokens.copy()
    words = np.nonzero(is_word(tokens, text.length, vocabulary))[-1].reshape(*tokens.shape[:-1], -1)
    chosen = draws.choice(words, max(1, round(objective.rate * text.length)))
    originals = np.take_along_axis(tokens, chosen, -1)
    targets = np.full(tokens.shape, IGNORE)
    np.put_along_axis(targets, chosen, originals, -1)
    share = draws.shares(chosen.shape[-1])
    random = draws.below(vocabulary.pieces, chosen.shape[-1])
    # Below `mask`: the mask's id. Below `mask + random`: another token. Above: the original.
    inputs = np.where(share < objective.mask + objective.random, random, originals)
    inputs = np.where(share < objective.mask, vocabulary.pieces, inputs)
    np.put_along_axis(tokens, chosen, inputs, -1)
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
    """Mask some tokens, and add the random keys with which a generator samples replacements."""
    row = mask_tokens(masks, vocabulary, text, draws)
    return row._replace(draws=draws.below(2**32, text.tokens.shape[-1]))


def mask_pairs(
    objective: Masked, vocabulary: Vocabulary, texts: Sequence[Text], draws: Sequence[Draws]
) -> list[Example]:
    """Divide each text in two and mask some tokens."""
    pairs = join_halves(objective, vocabulary, texts, draws)
    joined = [Text(pair.tokens, None, len(pair.tokens)) for pair in pairs]
    masked = mask_rows(mask_tokens, objective, vocabulary, joined, draws)
    return [
        row._replace(segments=pair.segments, labels=pair.labels)
        for row, pair in zip(masked, pairs, strict=True)
    ]


def join_halves(
    objective: Masked, vocabulary: Vocabulary, texts: Sequence[Text], draws: Sequence[Draws]
) -> list[Example]:
    """Divide each text in two. In half of the rows (label 1), take the second part from another
    text (BERT) or swap the parts (ALBERT)."""
    text_RS = np.stack([text.tokens for text in texts])
    rows, size = text_RS.shape
    together = Draws.together(draws)
    half = size // 2
    # Both parts have at least a quarter of the text.
    border_R1 = half // 2 + together.below(half, 1)
    label_R1 = together.below(2, 1)
    for row in draws:  # `another` and the masks use the next numbers of each row
        row.drawn = together.drawn
    place_S = np.arange(size)
    if objective.pairs == "next":
        for number in np.flatnonzero(label_R1).tolist():
            another = texts[number].another
            assert another is not None
            border = border_R1[number, 0]
            text_RS[number, border:] = another(draws[number])[border:]
    else:
        swapped_RS = np.take_along_axis(text_RS, (place_S + border_R1) % size, -1)
        text_RS = np.where(label_R1, swapped_RS, text_RS)
        border_R1 = np.where(label_R1, size - border_R1, border_R1)
    # A start, the first part, an end, the second part, an end.
    tokens = np.full((rows, size + 3), vocabulary.pieces + 2)
    tokens[:, 0] = vocabulary.pieces + 1
    np.put_along_axis(tokens, place_S + 1 + (place_S >= border_R1), text_RS, -1)
    segments = (np.arange(size + 3) > border_R1 + 1).astype(np.int64)
    return Example(tokens, tokens, segments=segments, labels=label_R1).rows()


def cut_rows(
    objective: Spans, vocabulary: Vocabulary, texts: Sequence[Text], draws: Sequence[Draws]
) -> list[Example]:
    """Replace each span by a sentinel; predict the sentinels, each followed by its span.

    As in T5's random_spans_noise_mask, text and noise are each divided into as many random parts as
    there are spans, and the parts alternate, beginning with text."""
    tokens_RS = np.stack([text.tokens for text in texts])
    cut, spans = objective.noise(tokens_RS.shape[1])
    source, targets = cut_out(tokens_RS, cut, spans, vocabulary, Draws.together(draws))
    tokens = np.roll(targets, 1, axis=-1)  # the end of the targets is the decoder's first input
    return Example(tokens, targets, source=source).rows()


def cut_out(
    text: I64, cut: int, spans: int, vocabulary: Vocabulary, draws: Draws
) -> tuple[I64, I64]:
    """Cut `spans` spans with `cut` tokens in total out of a text. Return the rest, with a sentinel
    for each span, and the spans, each after its sentinel. Both end with the end of a document."""
    kept = random_parts(text.shape[-1] - cut, spans, draws)
    noise = random_parts(cut, spans, draws)
    parts = np.stack((kept, noise), axis=-1)
    is_noise = np.repeat(np.arange(parts.size) % 2 == 1, parts.ravel()).reshape(text.shape)
    rest = _insert(text[~is_noise], np.cumsum(kept, axis=-1), vocabulary)
    return rest, _insert(text[is_noise], np.cumsum(noise, axis=-1) - noise, vocabulary)


def _insert(tokens: I64, places: I64, vocabulary: Vocabulary) -> I64:
    """Insert sentinels at `places` and append the end. The rows of `tokens` are concatenated."""
    *rows, spans = places.shape
    sentinels = vocabulary.pieces + np.arange(spans)
    per_row = tokens.size * spans // places.size
    starts = np.arange(0, tokens.size, per_row).reshape(*rows, 1)
    whole = np.insert(tokens, (places + starts).ravel(), np.tile(sentinels, len(starts.ravel())))
    end = np.full((*rows, 1), vocabulary.eod)
    return np.concatenate((whole.reshape(*rows, -1), end), axis=-1)


def mix_denoisers(
    objective: Mixture,
    vocabulary: Vocabulary,
    lengths: tuple[int, int | None] | None,
    text: Text,
    draws: Draws,
) -> Example:
    """Cut out spans by the rule of this row's denoiser. Both sides are padded to the longest row.

    The parts alternate, beginning with text, so a single span is the end of the text."""
    denoiser = objective.denoiser(draws.number)
    cut, spans = denoiser.noise(len(text.tokens))
    rest, predicted = cut_out(text.tokens, cut, spans, vocabulary, draws)
    mode = vocabulary.pieces + objective.sentinels + MODES.index(denoiser.mode)
    source = np.concatenate(([mode], rest))
    seq, source_seq = lengths or objective.lengths(len(source), len(source))
    tokens = np.full(seq, vocabulary.eod)
    tokens[1 : len(predicted)] = predicted[:-1]
    targets = np.full(seq, IGNORE)
    targets[: len(predicted)] = predicted
    return pad_source(Example(tokens, targets, source=source), source_seq or seq, vocabulary.eod)


def corrupt(
    objective: Denoise, vocabulary: Vocabulary, source_seq: int | None, text: Text, draws: Draws
) -> Example:
    """Permute the sentences, replace each span by one mask, and predict the whole text.

    The lengths of the spans are Poisson distributed, given that their sum is the number of tokens
    to cut out: every such token is assigned to a random span. An empty span inserts a mask."""
    length = len(text.tokens)
    cut, spans = objective.noise(length)
    shuffled = text.tokens
    if objective.permute:
        shuffled = permute_sentences(shuffled, (vocabulary.eod, *objective.stops), draws)
    span_lengths = np.bincount(draws.below(spans, cut), minlength=spans)
    # Each span lies before a different one of the remaining tokens, or at the end.
    before = np.sort(draws.choice(np.arange(length - cut + 1), spans))
    starts = before + np.cumsum(span_lengths) - span_lengths
    kept = np.ones(length, bool)
    offsets = np.arange(cut) - np.repeat(np.cumsum(span_lengths) - span_lengths, span_lengths)
    kept[np.repeat(starts, span_lengths) + offsets] = False
    source = np.insert(shuffled[kept], before, vocabulary.pieces)
    tokens = np.concatenate(([vocabulary.eod], text.tokens[:-1]))
    row = Example(tokens, text.tokens, source=source)
    if source_seq is None or source_seq == len(source):
        return row
    return pad_source(row, source_seq, vocabulary.eod)


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
    """Return a row of pairs. On both sides, each pair is a document, followed by padding."""
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
    source, target = np.split(text.tokens, [source_seq or len(text.tokens) // 2])
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
    return np.diff(borders, prepend=0, append=total)
