"""Noise of every objective, compared with the code of Hugging Face and T5 and with closed forms."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from pipeline.config.objective import Denoise, Masked, Objective, Prefix, Replaced, Spans
from pipeline.config.spans import Mixture
from pipeline.objective.draws import Draws
from pipeline.objective.noise import (
    IGNORE,
    Example,
    Text,
    Vocabulary,
    make_noise,
    permute_sentences,
)

PIECES = 1000
EOD = 2
MASK = PIECES
VOCABULARY = Vocabulary(PIECES, EOD)


def some_text(length: int, seed: int = 0) -> Text:
    tokens = np.random.default_rng(seed).integers(3, PIECES, length)
    return Text(tokens, None, length)


def made(objective: Objective, text: Text, seed: int = 0, sample: int = 0) -> Example:
    noise = make_noise(objective, VOCABULARY)
    assert noise is not None
    (example,) = noise([text], [Draws(seed, sample)])
    return example


OBJECTIVES: list[Objective] = [
    *(Masked(pairs=pairs, rate=0.7) for pairs in ("none", "next", "order")),
    *(Replaced(trained=trained) for trained in (False, True)),
    *(Spans(length=1.5, rate=0.5), Mixture(), Denoise(stops=(5, 6)), Prefix()),
]


# ── Masks ─────────────────────────────────────────────────────────────────────────────────────────


def fates(tokens: np.ndarray, before: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Count the predicted tokens that were hidden, replaced and kept."""
    chosen = targets >= 0
    assert (tokens[~chosen] == before[~chosen]).all()
    assert (targets[chosen] == before[chosen]).all()
    hidden = (tokens == MASK) & chosen
    kept = (tokens == before) & chosen
    return np.array([hidden.sum(), (chosen & ~hidden & ~kept).sum(), kept.sum()])


def test_masks_have_the_statistics_of_hugging_face() -> None:
    rows = 400
    length = 512
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(PIECES)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, mask_token="[MASK]")
    assert tokenizer.mask_token_id == MASK
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15, seed=1)
    texts = np.stack([some_text(length, seed).tokens for seed in range(rows)])
    special = torch.zeros(texts.shape, dtype=torch.bool)
    theirs, labels = collator.torch_mask_tokens(torch.from_numpy(texts.copy()), special)
    wanted = fates(theirs.numpy(), texts, labels.numpy())
    ours = [made(Masked(), Text(text, None, length), 7, i) for i, text in enumerate(texts)]
    tokens = np.stack([example.tokens for example in ours])
    targets = np.stack([example.targets for example in ours])
    found = fates(tokens, texts, targets)
    # Five standard deviations of the difference of two counts.
    assert (np.abs(found - wanted) < 5 * np.sqrt(found + wanted)).all()
    # Their number scatters around the mean; ours is the same in every row.
    assert ((targets >= 0).sum(axis=1) == round(0.15 * length)).all()
    assert (labels.numpy() >= 0).sum(axis=1).std() > 5
    # Every position is equally likely: the counts of 512 positions scatter like a binomial's.
    places = (targets >= 0).sum(axis=0)
    assert places.std() == pytest.approx(np.sqrt(rows * 0.15 * 0.85), rel=0.2)
    random = tokens[(targets >= 0) & (tokens != MASK) & (tokens != texts)]
    assert random.min() < 50 and random.max() > PIECES - 50 and random.max() < PIECES


@settings(max_examples=100, deadline=None)
@given(st.integers(4, 300), st.floats(0.01, 0.99), st.integers(0, 2**63 - 1), st.data())
def test_masks_are_exact_counts_of_words(length: int, rate: float, seed: int, data) -> None:
    text = some_text(length, seed % 1000)
    ends = data.draw(st.integers(0, length - 2))
    text.tokens[np.random.default_rng(seed).permutation(length)[:ends]] = EOD
    padding = data.draw(st.integers(0, length // 2))
    text = Text(text.tokens, np.arange(length), length - padding)
    example = made(Masked(rate=rate), text, seed)
    words = (text.tokens[: length - padding] != EOD).sum()
    chosen = example.targets >= 0
    assert chosen.sum() == min(max(1, round(rate * (length - padding))), words)
    assert not chosen[length - padding :].any() and (example.targets[chosen] != EOD).all()
    assert np.array_equal(example.documents, text.documents)


def test_shares_of_masks_are_settings() -> None:
    text = some_text(1000)
    for mask, random, wanted in ((1.0, 0.0, [150, 0, 0]), (0.0, 0.0, [0, 0, 150])):
        # Settings that hide nothing are refused, but show which tokens are kept.
        example = made(Masked.model_construct(mask=mask, random=random), text)
        assert fates(example.tokens, text.tokens, example.targets).tolist() == wanted


@pytest.mark.parametrize("kind", ["next", "order"])
def test_pairs_are_two_parts_with_a_label(kind: str) -> None:
    objective = Masked.model_validate({"kind": "masked", "pairs": kind})
    length = objective.text_length(128)
    text = Text(np.arange(3, 3 + length), None, length, lambda _: np.arange(500, 500 + length))
    labels = []
    borders = set()
    for sample in range(600):
        row = made(objective, text, sample=sample)
        assert row.segments is not None and row.labels is not None
        whole = np.where(row.targets >= 0, row.targets, row.tokens)
        assert (row.targets >= 0).sum() == round(0.15 * 128) and len(whole) == 128
        start, end = PIECES + 1, PIECES + 2
        ends = np.flatnonzero(whole == end)
        assert whole[0] == start and len(ends) == 2 and ends[1] == 127
        assert row.segments.tolist() == [0] * (ends[0] + 1) + [1] * (127 - ends[0])
        first = whole[1 : ends[0]]
        second = whole[ends[0] + 1 : -1]
        label = int(row.labels[0])
        labels.append(label)
        borders.add(len(first))
        if label and kind == "order":
            first, second = second, first
        follows = np.concatenate((first, second)).tolist() == text.tokens.tolist()
        assert follows == (label == 0 or kind == "order")
        assert len(first) + len(second) == length and min(len(first), len(second)) > length // 5
    assert 240 < sum(labels) < 360 and len(borders) > 50


# ── Spans ─────────────────────────────────────────────────────────────────────────────────────────


def t5_noise_mask(length: int, density: float, mean: float, rng: np.random.Generator):
    """random_spans_noise_mask of t5/data/preprocessors.py, in numpy."""
    noise = min(max(round(length * density), 1), length - 1)
    spans = max(round(noise / mean), 1)

    def segmentation(items: int, segments: int) -> np.ndarray:
        first = np.arange(items - 1) < segments - 1
        rng.shuffle(first)
        segment_id = np.cumsum(np.concatenate(([False], first)))
        return np.bincount(segment_id, minlength=segments)

    lengths = np.stack([segmentation(length - noise, spans), segmentation(noise, spans)], axis=1)
    starts = np.cumsum(lengths.reshape(-1))[:-1]
    indicator = np.zeros(length, int)
    indicator[starts] = 1
    return np.cumsum(indicator) % 2 == 1


def t5_sentinels(tokens: np.ndarray, noise: np.ndarray) -> list[int]:
    """noise_span_to_unique_sentinel, with sentinels that count up from PIECES."""
    previous = np.concatenate(([False], noise[:-1]))
    first = noise & ~previous
    sentinel = PIECES - 1 + np.cumsum(first)
    return np.where(first, sentinel, tokens)[~(noise & previous)].tolist()


def noise_of(example: Example, text: Text) -> np.ndarray:
    """Return which tokens of a text were cut out. Every token of the text is different."""
    assert example.source is not None
    return ~np.isin(text.tokens, example.source)


def different(length: int) -> Text:
    return Text(np.arange(3, 3 + length), None, length)


def test_t5_reads_512_and_writes_114_of_568() -> None:
    spans = Spans()
    assert spans.text_length(512) == 568 and spans.target_length(512) == 114
    example = made(spans, some_text(568))
    assert example.source is not None
    assert (len(example.source), len(example.tokens), len(example.targets)) == (512, 114, 114)
    assert spans.noise(568) == (85, 28)
    # Found by bisection: counting up to it would take minutes.
    assert Spans(rate=0.999999, length=1e7).text_length(512) == 465_000_465


@pytest.mark.parametrize("sample", range(20))
def test_sentinels_are_placed_as_in_t5(sample: int) -> None:
    text = different(568)
    example = made(Spans(), text, sample=sample)
    noise = noise_of(example, text)
    assert example.source is not None and noise.sum() == 85
    assert example.source.tolist() == [*t5_sentinels(text.tokens, noise), EOD]
    assert example.targets.tolist() == [*t5_sentinels(text.tokens, ~noise), EOD]
    assert example.tokens.tolist() == [EOD, *example.targets.tolist()[:-1]]


@pytest.mark.parametrize("number", range(7))
def test_each_denoiser_of_ul2_cuts_as_t5_does_and_names_its_mode(number: int) -> None:
    """Table 1 of arXiv 2205.05131: rates, lengths and modes of seven denoisers."""
    mixture = Mixture()
    size = mixture.text_length(512)
    seq, reads = mixture.lengths(512, None)
    text = different(size)
    vocabulary = Vocabulary(PIECES, EOD)
    (example,) = make_noise(mixture, vocabulary, reads)([text], [Draws(1, number + 700)])
    noise = noise_of(example, text)
    denoiser = mixture.denoiser(number)
    assert noise.sum() == round(denoiser.rate * size)
    starts = int((noise & ~np.append(False, noise[:-1])).sum())
    if denoiser.mode == "S":  # a prefix and its continuation
        assert starts == 1 and noise[-noise.sum() :].all()
    else:
        assert starts == round(noise.sum() / denoiser.length)
    mode = PIECES + mixture.sentinels + "RSX".index(denoiser.mode)
    source = [mode, *t5_sentinels(text.tokens, noise), EOD]
    targets = [*t5_sentinels(text.tokens, ~noise), EOD]
    assert (len(example.source), len(example.tokens), len(example.targets)) == (reads, seq, seq)
    assert example.source[: len(source)].tolist() == source
    assert example.source_documents.tolist() == [0] * len(source) + [1] * (reads - len(source))
    assert example.targets.tolist() == [*targets, *[IGNORE] * (seq - len(targets))]
    assert example.tokens[: len(targets)].tolist() == [EOD, *targets[:-1]]
    assert len(targets) == mixture.row_targets(number, size)


def test_the_shares_of_a_mixture_are_exact() -> None:
    used = Counter(Mixture().denoiser(number) for number in range(70, 140))
    assert set(used.values()) == {10} and len(used) == 7
    assert Counter(each.mode for each in used) == {"R": 2, "S": 1, "X": 4}
    found = {(each.mode, each.rate, each.length) for each in used}
    assert found == {
        ("R", 0.15, 3), ("R", 0.15, 8), ("S", 0.25, None),
        ("X", 0.5, 3), ("X", 0.5, 8), ("X", 0.15, 64), ("X", 0.5, 64),
    }  # fmt: skip
    weighted = Mixture.model_validate(
        {"denoisers": [{"mode": "R", "rate": 0.15, "length": 3, "weight": 3},
                       {"mode": "S", "rate": 0.25}]}
    )  # fmt: skip
    assert Counter(weighted.denoiser(n).mode for n in range(40)) == {"R": 30, "S": 10}


def test_spans_are_as_likely_as_those_of_t5() -> None:
    """All possible cuts of a short text occur equally often."""
    draws = 12_000
    rng = np.random.default_rng(0)
    text = different(9)
    spans = Spans(rate=0.45, length=2.0)
    theirs = Counter(tuple(t5_noise_mask(9, 0.45, 2.0, rng)) for _ in range(draws))
    ours = Counter(tuple(noise_of(made(spans, text, 1, i), text)) for i in range(draws))
    # 4 tokens in 2 spans between 5 in 2 parts: 3 × 4 ways.
    assert ours.keys() == theirs.keys() and len(ours) == 12
    expected = draws / len(ours)
    chi2 = sum((count - expected) ** 2 / expected for count in ours.values())
    assert chi2 < 35  # exceeded once in 4,000 times with 11 degrees of freedom


@settings(max_examples=200, deadline=None)
@given(st.integers(3, 700), st.floats(0.02, 0.99), st.floats(1.0, 50.0), st.integers(0, 2**62))
def test_every_row_has_the_same_lengths(seq: int, rate: float, length: float, seed: int) -> None:
    if rate >= length / (1 + length):
        return
    spans = Spans(rate=rate, length=length, sentinels=10_000)
    size = spans.text_length(seq)
    text = different(size)
    noise = make_noise(spans, Vocabulary(10**6, EOD))
    assert noise is not None
    (example,) = noise([text], [Draws(seed, 3)])
    assert example.source is not None
    writes, reads = spans.lengths(seq, None)
    assert (len(example.targets), len(example.source)) == (writes, reads)
    assert reads in (seq, seq - 1) and spans.lengths(seq, reads) == (writes, reads)
    cut = example.targets[(example.targets < 10**6) & (example.targets != EOD)]
    # Nothing is lost: the parts cut out and the rest make up the text.
    kept = example.source[(example.source < 10**6) & (example.source != EOD)]
    assert sorted([*cut, *kept]) == text.tokens.tolist()


# ── Denoising ─────────────────────────────────────────────────────────────────────────────────────


def test_infilling_has_poisson_lengths_and_exact_counts() -> None:
    length = 512
    text = different(length)
    counts: Counter[int] = Counter()
    rows = 400
    for sample in range(rows):
        example = made(Denoise(), text, sample=sample)
        assert example.source is not None
        assert example.targets.tolist() == text.tokens.tolist()
        assert example.tokens.tolist() == [EOD, *text.tokens[:-1].tolist()]
        masks = np.flatnonzero(example.source == MASK)
        assert len(masks) == 51 and len(example.source) == 512 - 154 + 51
        assert (np.diff(masks) > 1).all()
        # A span consists of the tokens between the two that surround its mask.
        around = np.concatenate(([text.tokens[0] - 1], example.source, [text.tokens[-1] + 1]))
        counts.update((around[masks + 2] - around[masks] - 1).tolist())
    spans = 51 * rows
    assert sum(n * count for n, count in counts.items()) == 154 * rows
    for n in range(9):
        # Poisson with the mean 154/51, given the sum: binomial.
        share = math.comb(154, n) * (1 / 51) ** n * (50 / 51) ** (154 - n)
        assert counts[n] / spans == pytest.approx(share, abs=5 * math.sqrt(share / spans))


def test_padding_of_a_source_is_a_separate_document() -> None:
    assert Denoise().lengths(512, None) == (512, 512) and Denoise().lengths(512, 300) == (512, 409)
    noise = make_noise(Denoise(), VOCABULARY, 512)
    assert noise is not None
    (padded,) = noise([different(512)], [Draws(0, 0)])
    plain = made(Denoise(), different(512)).source
    assert padded.source is not None and plain is not None and padded.documents is not None
    assert padded.source.tolist() == [*plain.tolist(), *[EOD] * (512 - 409)]
    assert padded.source_documents is not None and not padded.documents.any()
    assert padded.source_documents.tolist() == [0] * 409 + [1] * (512 - 409)


def test_sentences_are_permuted_and_whole() -> None:
    sentences = [
        [10 * i + j for j in range(i % 4 + 1)] + [5 if i % 2 else EOD] for i in range(1, 9)
    ]
    tokens = np.array([token for sentence in sentences for token in sentence] + [900, 901])
    wanted = sorted([*sentences, [900, 901]])
    orders = set()
    for sample in range(50):
        found = permute_sentences(tokens, (EOD, 5), Draws(0, sample))
        ends = np.flatnonzero(np.isin(found, (EOD, 5, 901))) + 1
        parts = [part.tolist() for part in np.split(found, ends) if len(part)]
        assert sorted(parts) == wanted
        orders.add(str(parts))
    assert len(orders) == 50
    # Without a permutation, the remaining tokens are in the order of the text.
    source = made(Denoise(permute=False, stops=(7,)), different(100)).source
    assert source is not None and (np.diff(source[source != MASK]) > 0).all()


# ── Prefixes, and what all kinds share ────────────────────────────────────────────────────────────


def test_a_prefix_of_any_length_and_as_many_targets() -> None:
    prefix = Prefix(share=0.25)
    text = different(101)
    ends = []
    for sample in range(2000):
        example = made(prefix, text, sample=sample)
        assert example.prefix is not None
        end = int(example.prefix[0])
        ends.append(end)
        predicted = np.flatnonzero(example.targets >= 0)
        # The last token of the prefix predicts the first after it.
        assert predicted.tolist() == list(range(end - 1, end + 24))
        assert (example.targets[predicted] == text.tokens[predicted + 1]).all()
        assert (example.tokens == text.tokens[:-1]).all()
    assert set(ends) == set(range(1, 76))


@pytest.mark.parametrize("objective", [Masked(), Spans(), Prefix(), Denoise()])
def test_draws_are_a_function_of_seed_and_sample(objective: Objective) -> None:
    text = some_text(568)
    one = made(objective, text, 5, 9)
    assert bytes(one.raw) == bytes(made(objective, text, 5, 9).raw)
    assert bytes(one.raw) != bytes(made(objective, text, 5, 10).raw)
    assert bytes(one.raw) != bytes(made(objective, text, 6, 9).raw)
    assert (text.tokens == some_text(568).tokens).all()  # the text itself does not change
    assert IGNORE not in one.tokens


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(OBJECTIVES), st.integers(7, 90), st.integers(0, 2**64 - 1), st.data())
def test_a_row_does_not_depend_on_the_other_rows_of_its_batch(objective, seq, seed, data) -> None:
    """Rows are made together, but each is the same as if it were made alone."""
    size = objective.text_length(*objective.lengths(seq, None))
    another = some_text(size, 1).tokens
    texts = [Text(some_text(size, i).tokens, None, size, lambda _: another) for i in range(6)]
    for text in texts:
        text.tokens[: data.draw(st.integers(0, size // 2))] = EOD
    noise = make_noise(objective, VOCABULARY, seq)
    alone = [noise([text], [Draws(seed, i)])[0].raw for i, text in enumerate(texts)]
    some = data.draw(st.permutations(range(6)))[: data.draw(st.integers(1, 6))]
    together = noise([texts[i] for i in some], [Draws(seed, i) for i in some])
    assert [bytes(row.raw) for row in together] == [bytes(alone[i]) for i in some]


def test_the_stream_of_draws_never_changes() -> None:
    """SplitMix64's published first outputs for the seed 1234567; a resumed run needs the same."""
    draws = Draws(1234, 5)
    assert draws.bits(2).tolist() == [16798086689510436074, 8632482709287447233]
    assert draws.below(1000, 3).tolist() == [618, 785, 248]
    draws._base = np.array([1234567], np.uint64)
    draws.drawn = 0
    assert draws.bits(2).tolist() == [6457827717110365317, 3203168211198807973]
