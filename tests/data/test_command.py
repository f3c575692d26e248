"""The commands as a user types them."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launch.__main__ import main
from launch.data import app
from pipeline.data.corpus import Corpus
from pipeline.data.ray_pool import cluster
from pipeline.data.tokenizer import Tokenizer
from pipeline.errors import ConfigError, DataError
from tests.data.conftest import some_texts, write_jsonl

runner = CliRunner()


@pytest.mark.usefixtures("ray_cluster")
def test_prepare_then_inspect(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", some_texts(300))
    arguments = [
        "prepare",
        "--source",
        str(source),
        "--out",
        str(tmp_path / "out"),
        "--vocab-size",
        "500",
        "--valid-share",
        "0.1",
    ]
    first = runner.invoke(app, [*arguments, "--json"], catch_exceptions=False)
    made = json.loads(first.stdout)
    assert made["reused"] is False and made["tokenizer"]["vocab"] == 500
    again = runner.invoke(app, arguments, catch_exceptions=False)
    assert again.exit_code == 0 and "already there" in again.stdout
    looked = runner.invoke(
        app, ["inspect", str(tmp_path / "out"), "--json"], catch_exceptions=False
    )
    found = json.loads(looked.stdout)
    assert found["hash"] == made["hash"] and found["checksums"] == "ok"
    assert found["splits"]["train"]["tokens"] == made["splits"]["train"]["tokens"]
    assert found["splits"]["train"]["sample"] in some_texts(300)[0]
    plain = runner.invoke(app, ["inspect", str(tmp_path / "out")], catch_exceptions=False)
    assert f"{made['splits']['train']['tokens']:,}" in plain.stdout


def test_tokenizer_on_a_weighted_sample(tmp_path: Path) -> None:
    for name, word in (("a", "zebra"), ("b", "quark")):
        write_jsonl(tmp_path / f"{name}.jsonl", [f"{text} {word * 3}" for text in some_texts(300)])
    sources = [part for name in "ab" for part in ("--source", str(tmp_path / f"{name}.jsonl"))]
    out = tmp_path / "deep" / "t.model"
    arguments = [
        "tokenizer",
        *sources,
        "--vocab-size",
        "500",
        "--special",
        "<sep>",
        "--out",
        str(out),
        "--json",
    ]
    made = json.loads(runner.invoke(app, arguments, catch_exceptions=False).stdout)
    assert made["controls"] == {"<unk>": 0, "<s>": 1, "</s>": 2, "<sep>": 3} and made["gigatoken"]
    assert Tokenizer.open(out).fingerprint == made["fingerprint"]
    again = runner.invoke(app, arguments, catch_exceptions=False)
    assert json.loads(again.stdout) == made
    weighted = [*arguments, "--weight", f"{tmp_path / 'a.jsonl'}=1e-9", "--sample-bytes", "100000"]
    assert "another tokenizer is there" in str(runner.invoke(app, weighted).exception)
    weighted[weighted.index(str(out))] = str(tmp_path / "w.model")
    runner.invoke(app, weighted, catch_exceptions=False)
    one = Tokenizer.open(tmp_path / "w.model")
    assert len(one.encode("quarkquarkquark")) < len(one.encode("zebrazebrazebra"))
    unknown = runner.invoke(app, [*arguments, "--weight", "nowhere=2"])
    assert isinstance(unknown.exception, ConfigError)


def test_a_tokenizer_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{")
    good = write_jsonl(tmp_path / "good.jsonl", some_texts(50))
    for source, out, says in (
        (
            tmp_path / "bad.jsonl",
            tmp_path / "t.model",
            "no text to train a tokenizer on; the first is .*bad.jsonl at 0",
        ),
        (good, tmp_path, "a directory"),
        (good, good / "t.model", "cannot be written"),
        (good, Path("/proc/nowhere/t.model"), "cannot be written"),
    ):
        error = runner.invoke(
            app, ["tokenizer", "--source", str(source), "--vocab-size", "300", "--out", str(out)]
        ).exception
        assert (
            isinstance(error, DataError) and re.search(says, str(error)) and "\n" not in str(error)
        )


def test_a_cluster_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: Ray itself tries for minutes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", address := f"127.0.0.1:{free.getsockname()[1]}")
        with (
            pytest.raises(DataError, match=f"RAY_ADDRESS={address}: nothing answers there"),
            cluster(1),
        ):
            pass


def test_inspect_finds_damage(corpus: Corpus, tmp_path: Path) -> None:
    damaged = subprocess.run(["cp", "-r", corpus.path, tmp_path / "copy"], check=False)
    assert damaged.returncode == 0
    shard = tmp_path / "copy" / "train-00000.bin"
    raw = bytearray(shard.read_bytes())
    raw[100] ^= 4
    shard.write_bytes(raw)
    assert isinstance(runner.invoke(app, ["inspect", str(tmp_path / "copy")]).exception, DataError)
    assert "give the directory it is in" in str(
        runner.invoke(app, ["inspect", str(shard)]).exception
    )


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--set", "tokenizer=t.model"], "tokenizer is an option.*give --tokenizer FILE.model"),
        (["--config", "recipe.toml"], "tokenizer is an option.*give --tokenizer FILE.model"),
        (
            ["--tokenizer", "t.model", "--set", "train.kind=unigram"],
            "--set train.kind=unigram is for a tokenizer that",
        ),
        (
            ["--tokenizer", "t.model", "--set", "vocab_size=9"],
            "--set vocab_size=9 is for a tokenizer that",
        ),
    ],
)
def test_what_says_nothing_of_a_tokenizer_is_refused(
    tmp_path: Path,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    more: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.model").write_bytes(tokenizer.model)
    (tmp_path / "recipe.toml").write_text('tokenizer = "t.model"\n')
    error = runner.invoke(app, ["prepare", "--source", "python", "--out", "o", *more]).exception
    assert isinstance(error, ConfigError) and re.search(says, str(error))


def test_the_traceback_behind_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["launch", "data", "inspect", "nowhere"])
    with pytest.raises(SystemExit, match="2"):
        main()
    monkeypatch.setenv("ISOFLOP_TRACEBACK", "1")
    with pytest.raises(DataError, match="nowhere"):
        main()


def test_two_tokenizers_are_one_too_many(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "t.model").write_bytes(tokenizer.model)
    result = runner.invoke(
        app,
        [
            "prepare",
            "--source",
            "python",
            "--out",
            str(tmp_path / "o"),
            "--vocab-size",
            "500",
            "--tokenizer",
            str(tmp_path / "t.model"),
        ],
    )
    assert isinstance(result.exception, ConfigError)


def test_help_is_quick() -> None:
    """It must not import what takes seconds."""
    slow = "('torch', 'ray', 'datasets', 'pyarrow', 'numpy')"
    code = f"import sys, launch.data; print([m for m in {slow} if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
        == "[]"
    )
