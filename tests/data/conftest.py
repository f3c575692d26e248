"""One small corpus and one Ray instance for the whole session: each costs seconds."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from pipeline.data.corpus import Corpus
from pipeline.data.corpus_recipe import Malformed, Piece, Recipe
from pipeline.data.prepare import prepare
from pipeline.data.ray_pool import cluster
from pipeline.data.readers import read
from pipeline.data.shards import Manifest
from pipeline.data.sources import plan
from pipeline.data.tokenizer import Tokenizer, train
from pipeline.errors import DataError, UserError

WORDS = ["data", "shard", "token", "loss", "of", "the", "a", "müde", "東京", "naïve", "don't"]
WORDS += ["foo(bar)", "3.14", "\t", "\n\n"]
WORDS += ["".join(random.Random(i).choices("abcdeimnorst", k=i % 9 + 2)) for i in range(300)]


def some_texts(count: int, seed: int = 0) -> list[str]:
    """Distinct documents: several scripts, runs of spaces, tabs, newlines, spelled-out controls."""
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


@contextmanager
def refused(key: str, kind: type[UserError] = DataError) -> Iterator[None]:
    """Check that the block raises this class, with one line that names the key."""
    with pytest.raises(kind) as caught:
        yield
    assert key in str(caught.value) and "\n" not in str(caught.value)


def pieces_of(*sources: object, limit_bytes: int | None = None) -> list[Piece]:
    tasks = plan([str(source) for source in sources], limit_bytes=limit_bytes, seed=0)
    return [piece for task in tasks for piece in task]


def documents(pieces: list[Piece], key: str = "text") -> list[str | Malformed]:
    return [found for piece in pieces for found in read(piece, (key,))]


def recipe_for(sources: list[Path], tokenizer: Tokenizer, **settings: object) -> Recipe:
    given = {
        "sources": tuple(map(str, sources)),
        "vocab_size": tokenizer.vocab,
        "tokenizer": tokenizer.fingerprint,
    }
    return Recipe.model_validate(given | settings)


def make(sources: list[Path], out: Path, tokenizer: Tokenizer, **settings: object) -> Manifest:
    return prepare(recipe_for(sources, tokenizer, **settings), out, model=tokenizer.model)[0]


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def token_lists(corpus: Corpus, split: str) -> list[list[int]]:
    """The ids of every document of a split, ends included."""
    found = []
    for shard in corpus.split(split).shards:
        ends = np.cumsum(corpus.lengths(shard))[:-1]
        found += [ids.tolist() for ids in np.split(corpus.tokens(shard), ends)]
    return found


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
def corpus(ray_cluster, tokenizer, texts, tmp_path_factory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    parts = [write_jsonl(folder / f"{i}.jsonl", texts[i * 500 : i * 500 + 500]) for i in range(3)]
    make(parts, folder / "out", tokenizer, valid_share=0.1)
    return Corpus.open(folder / "out", verify=True)
