"""A run to Hugging Face's files and back, and what it writes: through the command line."""

import io
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch.generate import Input, _inputs, _print, _print_stream
from pipeline.checkpoint.restore import load_model
from pipeline.config.layers import load
from pipeline.data.shards import Manifest
from pipeline.data.tokenizer import Tokenizer, train
from pipeline.hub.exporting import _write_tokenizer
from tests.conftest import flip_bit, launch, records
from tests.data.conftest import some_texts

SMALL = ("--no-track", "--nproc", 1, "--quiet", "--set", "model.seq=64")
SMALL += ("--set", "train.batch_tokens=512")


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("interop") / "run"
    launch("pretrain", "--size", "tiny", "--arch", "mla-moe", "--data", corpus, "--out", run, "--steps", 20, *SMALL,
           "--set", "model.ffn.experts=8", "--set", "model.ffn.top_k=2", "--set", "optim.lr=0.01")  # fmt: skip
    return run


@pytest.fixture(scope="module")
def exported(trained) -> Path:
    return trained.parent / "hub"


def test_a_run_is_exported_imported_and_continued(trained, exported, corpus, inside, tmp_path):
    done = json.loads(inside("export", "--run", trained, "--to", exported, "--json"))
    assert done["architecture"] == "DeepseekV3ForCausalLM" and done["difference"] < 1e-5
    assert "--to" in inside("export", "--run", trained, "--to", exported, code=2)
    ours, config = load_model(trained)
    theirs = AutoModelForCausalLM.from_pretrained(exported)
    tokens = torch.randint(config.model.vocab, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), atol=1e-4, rtol=1e-4)

    # both `generate` functions give the same greedy text, and AutoTokenizer our ids
    tokenizer = AutoTokenizer.from_pretrained(exported)
    pieces = Tokenizer.open(corpus / "tokenizer.model")
    r = random.Random(0)
    letters = " \n\t" * 9 + "abcdeghinorstuwy" * 3 + "ABC0123456789.,;:!?(){}äßé東🦊\r\0"
    texts = ["".join(r.choices(letters, k=r.randrange(80))) for _ in range(300)]
    for text in ("", " ", "  a", *texts):
        ids = tokenizer(text)["input_ids"]
        assert ids == pieces.encode(text).tolist() and tokenizer.decode(ids) == text
    prompt = "the state of"
    hub = theirs.generate(
        **tokenizer(prompt, return_tensors="pt"), max_new_tokens=12, do_sample=False
    )[0].tolist()
    row = json.loads(
        inside("generate", "--run", trained, "--prompt", prompt, "--max-new", 12, "--json")
    )
    assert row["tokens"] == hub[len(pieces.encode(prompt)) :]

    begun = tmp_path / "begun"
    again = json.loads(inside("import", "--from", exported, "--out", begun, "--json"))
    assert again["family"] == "deepseek_v3" and again["difference"] < 1e-5
    assert "--out" in inside("import", "--from", exported, "--out", begun, code=2)
    inside("export", "--run", begun / "checkpoints" / "step-00000000", "--to", tmp_path / "hub")
    assert (tmp_path / "hub" / "tokenizer.json").exists()
    back = load_model(begun)[0]
    for name, tensor in ours.state_dict().items():
        if not name.endswith("steps"):
            assert torch.equal(tensor, back.state_dict()[name]), name
    out = tmp_path / "on"
    on = ("pretrain", "--init", begun, "--data", corpus, "--out", out, "--steps", 1, *SMALL)
    assert "--size tiny" in launch(*on, "--size", "tiny", code=2).stderr
    for setting in ("model.tied=true", 'model.parametrization="mup"', "model.attention.heads=1"):
        assert setting in launch(*on, "--set", setting, code=2).stderr
    assert "another model" in inside(*on, "--set", "model.ffn.hidden=16", code=2)
    assert not out.exists()
    launch(*on, "--set", "optim.lr=1e-9", "--set", "train.eval_every=1")
    before, after = (records(run, "eval")[-1]["loss"] for run in (trained, out))
    assert after == pytest.approx(before, abs=1e-4)  # training continues where the other stopped


def test_prompts_are_continued(trained, inside, tmp_path):
    given = ("generate", "--run", trained, "--max-new", 10)
    plain = inside(*given, "--prompt", "the ")
    assert plain.startswith("the ") and inside(*given, "--prompt", "the ", "--stream") == plain
    (tmp_path / "prompts").write_text("a\nthe state\n")
    rows = [
        json.loads(line)
        for line in inside(*given, "--file", tmp_path / "prompts", "--json").splitlines()
    ]
    assert [row["prompt"] for row in rows] == ["a", "the state"] and all(
        len(r["tokens"]) <= 10 for r in rows
    )
    # Many prompts are generated some at a time, which changes nothing; examples come before each.
    many = tmp_path / "many.jsonl"
    many.write_text("\n".join(json.dumps({"prompt": "the " * (n % 5 + 1)}) for n in range(40)))
    shots = tmp_path / "shots"
    shots.write_text("a state\n")
    sampled = ("--json", "--temperature", 1.0)
    texts = inside(*given, "--file", many, "--shots", shots, *sampled).splitlines()
    assert len(texts) == 40 and len({json.loads(line)["text"] for line in texts[::5]}) > 1
    alone = json.loads(inside(*given, "--prompt", "a state\nthe ", *sampled))
    assert json.loads(texts[0])["tokens"] == alone["tokens"]
    many.write_text('{"prompt": "the ", "source": "wiki"}')
    shots.write_text("\ufeffa state\n")  # as Windows writes it
    found = json.loads(inside(*given, "--file", many, "--shots", shots, *sampled))
    assert found["tokens"] == alone["tokens"]
    many.write_text('{"source": "wiki"}')
    assert "source 'wiki'" in inside(*given, "--file", many, code=2)
    shots.write_text("\n")
    assert "has no text" in inside(*given, "--prompt", "a", "--shots", shots, code=2)
    many.write_text('{"prompt": 3}')
    assert "many.jsonl:1" in inside(*given, "--file", many, code=2)
    draw = ("--prompt", "the ", "--temperature", 1.0, "--top-p", 0.9, "--json")
    assert (
        inside(*given, *draw, "--seed", 1)
        == inside(*given, *draw, "--seed", 1)
        != inside(*given, *draw, "--seed", 2)
    )
    beams = [json.loads(inside(*given, "--prompt", "the ", "--json", "--beam", n)) for n in (1, 4)]
    assert beams[1]["log_likelihood"] >= beams[0]["log_likelihood"] - 1e-4
    assert beams[0]["tokens"] == json.loads(inside(*given, "--prompt", "the ", "--json"))["tokens"]
    asked = ("generate", "--prompt", "a", "--run", tmp_path / "copy")
    assert "copy: does not exist; give a run" in inside(*asked, code=2)
    shutil.copytree(trained, tmp_path / "copy")
    flip_bit(next((tmp_path / "copy").rglob("*.bin")))
    assert "checksum differs" in inside(*asked, code=2)
    assert "--max-new 99999 is too many" in inside(*asked, "--max-new", 99999, code=2)


def test_another_tokenizer_is_an_error_everywhere(trained, corpus, inside, tmp_path):
    """Both have the same size, so only the fingerprint shows the difference."""
    other, mine = tmp_path / "other", Manifest.load(corpus).tokenizer.fingerprint
    shutil.copytree(corpus, other)
    model = train(some_texts(300), 512, controls=("<pad>", "<mask>"))
    (other / "tokenizer.model").write_bytes(model)
    theirs = Tokenizer(model).info("tokenizer.model")
    Manifest.load(other).model_copy(update={"tokenizer": theirs}).save(other)
    (imported := tmp_path / "imported").mkdir()
    shutil.copytree(trained / "checkpoints", imported / "checkpoints")
    shutil.copy(corpus / "tokenizer.model", imported)
    generate = ("generate", "--prompt", "a", "--max-new", 1, "--run")
    onward = ("--data", other, "--out", tmp_path / "on", "--steps", 1, *SMALL)
    wrong = ("--tokenizer", other / "tokenizer.model")
    for refused in (
        ("pretrain", "--init", trained, *onward),
        ("pretrain", "--init", imported, *onward),
        ("evaluate", "--run", trained, "--data", other),
        ("evaluate", "--run", next((trained / "checkpoints").iterdir()), "--data", other),
        (*generate, trained, *wrong),
        ("export", "--run", trained, "--to", tmp_path / "hub", *wrong),
    ):
        printed = inside(*refused, code=2)
        assert theirs.fingerprint in printed and mine in printed
    inside("pretrain", "--resume", "--out", trained, "--data", other, code=2)
    (imported / "tokenizer.model").unlink()  # unknown, so only the sizes are compared
    inside("evaluate", "--run", imported, "--data", other)
    inside(*generate, trained, "--tokenizer", corpus / "tokenizer.model")
    larger = tmp_path / "larger.model"
    larger.write_bytes(train(some_texts(3000), 1600))
    refused = inside(*generate, imported, "--tokenizer", larger, code=2)
    assert "larger.model has 1,600 pieces" in refused


def test_contradicting_options_are_one_line(trained, inside, tmp_path):
    given = ("generate", "--run", trained)
    for key, refused in {
        "--prompt": given,
        "--temperature": (*given, "--prompt", "a", "--top-k", 3),
        "--beam": (*given, "--prompt", "a", "--temperature", 1.0, "--beam", 2),
        "--stream": (*given, "--prompt", "a", "--prompt", "b", "--stream"),
        "--file": (*given, "--file", tmp_path / "no"),
        "checkpoint": ("generate", "--run", tmp_path, "--prompt", "a"),
        "--dtype": ("export", "--run", trained, "--to", tmp_path / "x", "--dtype", "fp8"),
        "config.json": ("import", "--from", tmp_path, "--out", tmp_path / "y"),
    }.items():
        assert key in inside(*refused, code=2)
    assert not (tmp_path / "x").exists() and not (tmp_path / "y").exists()


def test_a_stream_prints_a_character_that_stays_incomplete(capsys):
    class Bytes:
        eod = 0

        def decode(self, ids):
            return bytes(ids).decode(errors="replace")

    _print_stream(Input("a", [1], None), iter([*"é".encode(), 0xE6, 0]), Bytes())
    assert capsys.readouterr().out == "aé\ufffd\n"


def test_other_tokenizers_keep_their_ids_or_have_no_class(tmp_path):
    for kind in ("bpe", "unigram"):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(some_texts(300)), model_writer=model, model_type=kind,
            vocab_size=400, byte_fallback=True, normalization_rule_name="identity",
            remove_extra_whitespaces=False, hard_vocab_limit=False, minloglevel=2,
        )  # fmt: skip
        pieces = Tokenizer(model.getvalue())
        (tmp_path / kind).mkdir()
        _write_tokenizer(pieces, tmp_path / kind, None)
        if kind == "bpe":  # like Llama's, with a space before every text
            theirs = AutoTokenizer.from_pretrained(tmp_path / kind)
            for text in ("the state", " two  words\n", "é\t🦊"):
                ids = theirs(text)["input_ids"]
                assert ids == pieces.encode(text).tolist() and theirs.decode(ids) == text
    # AutoTokenizer would read a tokenizer.model as BPE.
    assert [path.name for path in (tmp_path / "unigram").iterdir()] == ["spiece.model"]


def test_a_continuation_keeps_its_first_space(capsys):
    class Stripping:  # as the tokenizer of Llama, which adds a space to the start of every text
        eod = 0

        def encode(self, text):
            return np.frombuffer(f" {text}".encode(), np.uint8)

        def decode(self, ids):
            return bytes(ids).decode().removeprefix(" ")

    config = load(size="tiny")
    (one,) = _inputs(config, Stripping(), [("a", "a")], None, None)
    _print(one, [*b" b", 0], Stripping(), as_json=False)
    _print_stream(one, iter([*b" b", 0]), Stripping())
    assert capsys.readouterr().out == "a b\na b\n"
