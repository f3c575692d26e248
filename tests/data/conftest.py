"""One small corpus and one Ray instance for the whole session: each costs seconds."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.data.corpus import Corpus
from pipeline.data.corpus_recipe import Recipe
from pipeline.data.prepare import prepare
from pipeline.data.ray_pool import cluster
from pipeline.data.tokenizer import Tokenizer, train

WORDS = [
    "data",
    "shard",
    "token",
    "loss",
    "of",
    "the",
    "a",
    "müde",
    "東京",
    "naïve",
    "don't",
    "foo(bar)",
    "3.14",
    "\t",
    "\n\n",
]
WORDS += ["".join(random.Random(i).choices("abcdeimnorst", k=i % 9 + 2)) for i in range(300)]


def some_texts(count: int, seed: int = 0) -> list[str]:
    """Distinct documents with several scripts, runs of spaces, tabs, newlines and control strings spelt out."""
    source = random.Random(seed)
    texts = []
    for number in range(count):
        words = [source.choice(WORDS) for _ in range(source.randrange(5, 400))]
        texts.append(f"{number} {source.random()}\n" + source.choice([" ", "  ", "\n"]).join(words))
    texts[3] += " </s> <s> <mask> \u2581 \u2581\u2581 "
    return texts


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    with cluster(2):
        yield


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(train(some_texts(300), 512, controls=("<pad>", "<mask>")))


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return some_texts(1500, seed=1)


@pytest.fixture(scope="session")
def corpus(
    ray_cluster: None,
    tokenizer: Tokenizer,
    texts: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(3):
        write_jsonl(folder / f"part{i}.jsonl", texts[i * 500 : (i + 1) * 500])
    recipe = Recipe(
        sources=tuple(str(folder / f"part{i}.jsonl") for i in range(3)),
        vocab_size=tokenizer.vocab,
        tokenizer=tokenizer.fingerprint,
        valid_share=0.1,
    )
    prepare(recipe, folder / "out", model=tokenizer.model)
    return Corpus.open(folder / "out", verify=True)
