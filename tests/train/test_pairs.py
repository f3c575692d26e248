"""A small transformer learns to copy and to reverse, and translates pairs that it has not seen."""

import json
import random
from itertools import permutations
from pathlib import Path

import pytest

from pipeline.data.corpus import Corpus
from pipeline.data.tokenizer import Tokenizer
from tests.conftest import launch, worlds
from tests.data.conftest import token_lists
from tests.train.test_run import hashes, losses

LANGUAGES = ("plain", "back", "copy")
COMMON = ("--arch", "transformer", "--no-track", "--set", "optim.lr=0.01")
SHORT = (
    "--size", "27k", "--steps", 8, "--set", "model.seq=32", "--set", "model.source_seq=48",
    "--set", "train.batch_tokens=256", "--set", "train.micro_batch=2", "--set", "objective.smoothing=0.1",
    "--set", "train.save_every=4", "--set", "train.eval_every=4",
)  # fmt: skip
LONG = (
    "--size", "27k", "--steps", 400, "--set", "model.seq=48", "--set", "train.batch_tokens=768",
    "--set", "objective.directions=every", "--set", "train.save_every=400", "--set", "train.eval_every=400",
)  # fmt: skip


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Strings, the same backwards, and the same again. A vocabulary of 269 has single letters only."""
    folder = tmp_path_factory.mktemp("translation")
    source = random.Random(0)
    words = {"".join(source.choices("abcdefgh", k=source.randrange(2, 6))) for _ in range(4000)}
    rows = [{"plain": word, "back": word[::-1], "copy": word} for word in sorted(words)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--pairs", ",".join(LANGUAGES), "--vocab-size", 269, "--valid-share", 0.03)
    launch(
        *("data", "prepare", "--source", folder / "rows.jsonl", "--workers", 1, "--quiet"),
        *("--out", folder / "data", *options),
    )
    return folder / "data"


@pytest.fixture(scope="module")
def runs(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("translators")
    jobs: list[dict] = []
    for name, ranks, options in (
        ("one", 1, SHORT),
        # Other micro-batches: rows have different numbers of targets, and each counts the same.
        ("two", 2, (*SHORT, "--zero", 2, "--set", "train.micro_batch=1")),
        ("learned", 1, LONG),
    ):
        command = ["pretrain", *COMMON, *options, "--data", pairs, "--nproc", ranks]
        jobs.append({"do": "launch", "arguments": [*command, "--out", folder / name]})
    jobs.append({"do": "copy", "src": folder / "one", "dst": folder / "stopped"})
    jobs.append({"do": "cut", "out": folder / "stopped", "step": 4})
    again = ["pretrain", "--resume", "--out", folder / "stopped", "--no-track"]
    jobs.append({"do": "launch", "arguments": again})
    worlds(jobs, folder)
    return folder


def test_ranks_and_stops_do_not_change_the_run(runs: Path, inside) -> None:
    assert hashes(runs / "two") == hashes(runs / "one")
    for kind in ("step", "eval"):
        assert losses(runs / "two", kind) == pytest.approx(losses(runs / "one", kind), abs=1e-5)
        assert losses(runs / "stopped", kind) == losses(runs / "one", kind)
    assert hashes(runs / "stopped") == hashes(runs / "one")
    found = json.loads(inside("evaluate", "--run", runs / "two", "--json"))
    assert found["loss"] == pytest.approx(losses(runs / "one", "eval")[-1], abs=1e-5)


def test_it_translates_what_it_has_not_seen_in_every_direction(
    runs: Path, pairs: Path, inside, tmp_path: Path
) -> None:
    corpus = Corpus.open(pairs)
    tokenizer = Tokenizer.open(pairs / corpus.manifest.tokenizer.file)
    words = [
        tokenizer.decode(ids[: ids.index(tokenizer.eod)]) for ids in token_lists(corpus, "valid")
    ]
    assert len(words) > 60
    for source, target in permutations(LANGUAGES, 2):
        file = tmp_path / f"{source}.txt"
        given = [word[::-1] if source == "back" else word for word in words]
        file.write_text("\n".join(given))
        options = ("--from", source, "--to", target, "--max-new", 12)
        found = inside("generate", "--run", runs / "learned", "--file", file, *options).split()
        assert found == [word[::-1] if target == "back" else word for word in words]
    one = ("generate", "--run", runs / "learned", "--source", "abcd", "--from", "plain")
    best = json.loads(inside(*one, "--to", "back", "--beam", 3, "--json"))
    assert best["source"] == "abcd" and best["text"] == "dcba" and best["ended"]
    assert inside(*one, "--to", "copy", "--temperature", 0.1, "--stream") == "abcd\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--to", "fr"), "choose from plain, back, copy"),
        (("--to", "back"), "--from is missing; choose from plain, copy"),
        (("--from", "copy", "--to", "copy"), "is also the other language; choose from plain, back"),
        (("--from", "copy"), "--to is missing; choose from plain, back"),
        (("--prompt", "x"), "give it as --source"),
    ],
)
def test_a_wrong_direction_is_one_line(runs: Path, inside, options, said: str) -> None:
    given = ("generate", "--run", runs / "learned", "--source", "abcd", *options)
    assert said in inside(*given, code=2)
    first = ("generate", "--run", runs / "one", "--source", "abcd", "--to", "back")
    assert "objective.directions=every" in inside(*first, code=2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--arch", "dense"), 'model.stack="encoder-decoder"'),
        (("--arch", "t5", "--set", "objective.kind=spans"), "has pairs of plain, back, copy"),
        (("--arch", "t5", "--set", "data.packing=best-fit"), "remove data.documents"),
        (("--arch", "t5", "--set", "objective.smoothing=1"), "objective.smoothing"),
        (("--arch", "t5", "--set", "model.seq=2"), "none within"),
    ],
)
def test_what_cannot_be_trained_is_one_line(pairs: Path, inside, tmp_path, options, said) -> None:
    given = ("pretrain", "--size", "27k", "--data", pairs, "--out", tmp_path / "run", "--nproc", 1)
    assert said in inside(*given, "--no-track", *options, code=2)
    assert not (tmp_path / "run").exists()
