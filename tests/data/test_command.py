"""The commands as a user types them."""

import json
import re
import shutil
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from launch.data import app
from pipeline.data import ray_pool
from pipeline.data.corpus import Corpus
from pipeline.data.ray_pool import cluster
from pipeline.data.tokenizer import Tokenizer
from pipeline.errors import ConfigError, DataError
from tests.conftest import flip_bit
from tests.data.conftest import refused, some_texts, write_jsonl


def launch(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)


@pytest.mark.usefixtures("ray_cluster")
def test_prepare_then_inspect(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", some_texts(300))
    out = tmp_path / "out"
    prepare = ("prepare", "--source", source, "--out", out)
    prepare += ("--vocab-size", 500, "--valid-share", 0.1)
    made = json.loads(launch(*prepare, "--json").stdout)
    assert made["reused"] is False and made["tokenizer"]["vocab"] == 500
    again = launch(*prepare)
    tokens = made["splits"]["train"]["tokens"]
    assert again.exit_code == 0 and f"{tokens:,}" in again.stdout
    found = json.loads(launch("inspect", out, "--json").stdout)
    assert found["hash"] == made["hash"] and found["checksums"] == "ok"
    assert found["splits"]["train"]["tokens"] == tokens
    assert found["splits"]["train"]["sample"] in some_texts(300)[0]
    text = launch("inspect", out).stdout
    assert f"{tokens:,}" in text and not re.search(r"None|\[\[|\(\d+, ", text)


def test_tokenizer_on_a_weighted_sample(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "t.model"
    train: list[object] = ["tokenizer", "--vocab-size", 500, "--special", "<sep>", "--json"]
    for name, word in (("a", "zebra"), ("b", "quark")):
        texts = [f"{text} {word * 3}" for text in some_texts(300)]
        train += ["--source", write_jsonl(tmp_path / f"{name}.jsonl", texts)]
    made = json.loads(launch(*train, "--out", out).stdout)
    assert made["controls"] == {"<unk>": 0, "<s>": 1, "</s>": 2, "<sep>": 3} and made["gigatoken"]
    assert Tokenizer.open(out).fingerprint == made["fingerprint"]
    assert json.loads(launch(*train, "--out", out).stdout) == made
    weighted = [*train, "--weight", f"{tmp_path}/a.jsonl=1e-9", "--sample-bytes", 100_000]
    with refused("out="):  # the file has another tokenizer
        launch(*weighted, "--out", out)
    launch(*weighted, "--out", tmp_path / "w.model")
    one = Tokenizer.open(tmp_path / "w.model")
    assert len(one.encode("quarkquarkquark")) < len(one.encode("zebrazebrazebra"))
    with refused("weight='nowhere=2'", ConfigError):
        launch(*train, "--out", out, "--weight", "nowhere=2")


def test_a_tokenizer_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{")
    good = write_jsonl(tmp_path / "good.jsonl", some_texts(50))
    for source, out, key in (
        (tmp_path / "bad.jsonl", tmp_path / "t.model", "bad.jsonl at 0"),
        (good, tmp_path, "out="),
        (good, tmp_path / ("x" * 300), "--out"),
        (good, good / "t.model", "--out"),
        (good, "/proc/nowhere/t.model", "--out"),
    ):
        with refused(key):
            launch("tokenizer", "--source", source, "--vocab-size", 300, "--out", out)


def test_a_cluster_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails at once: Ray itself would try for minutes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with refused(f"RAY_ADDRESS={address}"), cluster(1):
            pass


def test_inspect_finds_damage(corpus: Corpus, tmp_path: Path) -> None:
    shutil.copytree(corpus.path, tmp_path / "copy")
    shard = tmp_path / "copy" / "train-00000.bin"
    flip_bit(shard)
    for path in (tmp_path / "copy", shard):
        with refused("train-00000.bin"):
            launch("inspect", path)


@pytest.mark.parametrize(
    ("options", "kind", "key"),
    [
        (["--set", "tokenizer=t.model"], ConfigError, "--tokenizer"),
        (["--config", "recipe.toml"], ConfigError, "--tokenizer"),
        (["--config", "x" * 300], ConfigError, "config="),
        (["--tokenizer", "t.model", "--set", "train.kind=unigram"], ConfigError, "train.kind"),
        (["--tokenizer", "t.model", "--set", "vocab_size=9"], ConfigError, "vocab_size=9"),
        (["--tokenizer", "t.model", "--vocab-size", "500"], ConfigError, "vocab-size=500"),
        (["--tokenizer", "x" * 300], DataError, "tokenizer="),
        (["--vocab-size", "0"], DataError, "vocab-size=0"),
        (["--set", "vocab_size=-5"], DataError, "vocab-size=-5"),
        (["--out", "x" * 300], DataError, "--out"),
    ],
)
def test_arguments_that_are_refused_before_ray_starts(
    tmp_path, tokenizer, monkeypatch, options, kind, key
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray_pool, "_connect", lambda *_: pytest.fail("Ray was started"))
    (tmp_path / "t.model").write_bytes(tokenizer.model)
    (tmp_path / "recipe.toml").write_text('tokenizer = "t.model"\n')
    before = sorted(tmp_path.iterdir())
    with refused(key, kind):
        launch("prepare", "--source", "python", "--limit-bytes", 100_000, "--out", "o", *options)
    assert sorted(tmp_path.iterdir()) == before
