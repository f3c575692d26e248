"""Ids compared with sentencepiece itself, on strings made to break things."""

import io
import random

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data import tokenizer as tokenizing
from pipeline.data.corpus_recipe import MB, load_recipe
from pipeline.data.tokenizer import META, Tokenizer, train
from pipeline.errors import ConfigError, DataError
from tests.data.conftest import refused, some_texts

AWKWARD = ["<s>", "</s>", "<unk>", "<mask>", "<pad>", "<0x41>", "<0x0A>", META, " ", "  ", "\n"]
AWKWARD += ["\t", "\r\n", "\0", "é", "e\u0301", "\u3000", "\u0085", "\ufeff", "\u200b", "data"]
AWKWARD += ["𝕏", "\U0010ffff"]
strings = st.lists(st.one_of(st.sampled_from(AWKWARD), st.text(max_size=20)), max_size=12).map(
    "".join
)


@settings(max_examples=1500, deadline=None)
@given(strings)
def test_ids_are_sentencepieces_and_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).tolist()
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.vocab + 2, *ids]) == f"<2>{text}"
    assert not set(ids) & set(tokenizer.controls.values()), "text injected a control token"
    assert ids == tokenizer._encode_exact(text).tolist(), "cut where a piece runs over"
    if META not in text:
        assert ids == tokenizer.sentencepiece.encode(text)


@settings(max_examples=300, deadline=None)
@given(strings)
def test_gigatoken_itself_agrees_where_it_is_used(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.fast
    if META not in text and not any(control in text for control in tokenizer.controls):
        assert tokenizer._gigatoken.encode(text).tolist() == tokenizer.sentencepiece.encode(text)


def test_the_word_cache_is_bounded(tokenizer, monkeypatch):
    """A terabyte has enough words to fill any memory; a new cache changes no id."""
    monkeypatch.setattr(tokenizing, "CACHE_BYTES", 8 * MB)
    monkeypatch.setattr(tokenizing, "CACHE_CHECK_CHARACTERS", 100_000)
    fresh, source = Tokenizer(tokenizer.model), random.Random(0)
    first = fresh._gigatoken
    for _ in range(20):
        fresh.encode("always the same " * 10_000)
    assert fresh._gigatoken is first
    for _ in range(20):
        raw = source.randbytes(60_000).hex()
        text = " ".join(raw[i : i + 8] for i in range(0, len(raw), 8))
        ids = fresh.encode(text)
    assert fresh._gigatoken is not first
    assert ids.tolist() == tokenizer.sentencepiece.encode(text)


def sentencepiece_model(count: int, **options: object) -> bytes:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(some_texts(count)),
        model_writer=out,
        hard_vocab_limit=False,
        minloglevel=2,
        **({"model_type": "bpe", "add_dummy_prefix": False} | options),
    )
    return out.getvalue()


@pytest.mark.parametrize(
    "options",
    [
        {"normalization_rule_name": "nmt_nfkc"},
        {"model_type": "unigram"},
        {"byte_fallback": False},
        {"user_defined_symbols": ["data"]},
        {"add_dummy_prefix": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_models_go_through_sentencepiece(options: dict[str, object]) -> None:
    lossless = {"byte_fallback": True, "normalization_rule_name": "identity"}
    lossless["remove_extra_whitespaces"] = False
    model = Tokenizer(sentencepiece_model(200, vocab_size=500, **(lossless | options)))
    assert not model.fast
    for text in [*some_texts(20, seed=5), "ﬁ ＡＢＣ e\u0301 <s> data"]:
        if not (model.lossless and META in text):
            assert model.encode(text).tolist() == model.sentencepiece.encode(text)


def test_training_is_deterministic() -> None:
    assert train(some_texts(50), 400) == train(some_texts(50), 400)


def test_unigram_is_lossless_too() -> None:
    model = Tokenizer(train(some_texts(200), 500, kind="unigram"))
    text = some_texts(10, seed=9)[3]
    assert model.lossless and not model.fast
    assert model.decode(model.encode(text)) == text


def test_text_bytes_are_those_that_were_encoded(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizing, "DECODE_IDS", 50)
    for text in some_texts(20, seed=8):
        ids = np.append(tokenizer.encode(text), np.uint32(tokenizer.eod))
        assert tokenizer.text_bytes(ids) == text.encode()


@pytest.mark.parametrize(
    ("texts", "vocab", "remedy"),
    [
        ([], 400, "--source"),
        (["too short"], 4096, "at most"),
        (some_texts(50), 200, "4096"),
        (some_texts(50), 263, "at least"),
    ],
)
def test_impossible_vocabularies(texts: list[str], vocab: int, remedy: str) -> None:
    with pytest.raises(DataError) as caught:
        train(texts, vocab)
    assert f"vocab-size={vocab:,}" in str(caught.value) and remedy in str(caught.value)


@pytest.mark.parametrize("control", ["§", "a", META, f"<{META}>", "\n", "<x\0>", ""])
def test_a_control_that_text_could_produce_is_not_trained(control: str) -> None:
    with refused("train.controls", ConfigError):
        load_recipe(None, {"sources": ["python"], "train": {"controls": [control]}})


@pytest.mark.parametrize(
    ("kind", "control", "reached"),
    [
        ("bpe", "§", True),
        ("bpe", "a", True),
        ("bpe", "§§", False),
        ("char", "§", True),
        ("char", "§§", False),
        ("unigram", "§", False),
        ("word", "§§", True),
    ],
)
def test_a_given_model_whose_control_text_could_produce_is_refused(kind, control, reached):
    pieces = {"control_symbols": [control], "bos_id": -1, "eos_piece": "the end"}
    raw = sentencepiece_model(50, vocab_size=400, model_type=kind, **pieces)
    if reached:
        with refused(repr(control)):
            Tokenizer(raw)
    else:
        model = Tokenizer(raw)
        for text in (control, f"x{control}", f" {control} y", control * 3):
            assert model.controls[control] not in model.encode(text)


def test_not_a_model() -> None:
    with refused("tokenizer.model"):
        Tokenizer(b"\x00garbage")
