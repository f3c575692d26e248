"""The text a tokenizer is trained on: a little from all over the corpus, more from sources that weigh more."""

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pipeline.data.files import as_data_error, save
from pipeline.data.normalise import normalise
from pipeline.data.piece import MB, Task
from pipeline.data.read import Malformed, read
from pipeline.data.recipe import Recipe
from pipeline.data.sources import plan
from pipeline.data.tokenizer import Tokenizer, train
from pipeline.errors import DataError

TASKS = 64  # looked into per source, evenly spaced
BYTES_PER_PIECE = 2500  # of vocabulary: rare pieces are still seen often
LEAST_BYTES, MOST_BYTES = 8 * MB, 256 * MB


def train_on(tasks: Sequence[Task], recipe: Recipe) -> bytes:
    options = recipe.train
    return train(
        sample(tasks, recipe), recipe.vocab_size, kind=options.kind, controls=options.controls
    )


def make_tokenizer(recipe: Recipe, out: Path) -> Tokenizer:
    """Train on the recipe's sources and write the model; an existing file is kept if it is the same, never replaced."""
    if out.is_dir():
        raise DataError(f"out={out}: a directory; name the .model file to write")
    made = Tokenizer(
        train_on(plan(recipe.sources, limit_bytes=recipe.limit_bytes, seed=recipe.seed), recipe),
        str(out),
    )
    if out.exists() and out.read_bytes() != made.model:
        raise DataError(
            f"out={out}: another tokenizer is there; shards may depend on it, so choose another name"
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise as_data_error(error, out) from error
    save(out, made.model)
    return made


def sample(tasks: Sequence[Task], recipe: Recipe) -> Iterator[str]:
    """Documents from evenly spaced tasks, from each in an order that the seed decides; the same for any workers."""
    budget = recipe.train.sample_bytes or min(
        max(LEAST_BYTES, BYTES_PER_PIECE * recipe.vocab_size), MOST_BYTES
    )
    shares = _shares(tasks, recipe.mixture.weights if recipe.mixture else None)
    bad, some = None, False
    for source, share in shares.items():
        mine = [task for task in tasks if task[0].source == source]
        count = min(len(mine), TASKS)
        for number in range(count):
            left = budget * share / count
            task, seed = mine[number * len(mine) // count], f"{recipe.seed} {source} {number}"
            pieces = random.Random(seed).sample(task, len(task))
            for text in (text for piece in pieces for text in read(piece, recipe.text_key)):
                if isinstance(text, Malformed):
                    bad = bad or text
                    continue
                some = True
                yield normalise(text, recipe.normalise)
                left -= len(text)
                if left <= 0:
                    break
    if bad and not some:
        first = f"{bad.path} at {bad.position:,}: {bad.reason}"
        raise DataError(
            f"sources={', '.join(shares)}: no text to train a tokenizer on; the first is {first}"
        )


def _shares(tasks: Sequence[Task], weights: Mapping[str, float] | None) -> dict[str, float]:
    """Of the sample, by source: the mixture's weights, or the sizes."""
    sizes: dict[str, float] = {}
    for piece in (piece for task in tasks for piece in task):
        sizes[piece.source] = sizes.get(piece.source, 0) + piece.bytes
    chosen = {source: weights.get(source, 0) for source in sizes} if weights else sizes
    return {source: weight / max(sum(chosen.values()), 1e-300) for source, weight in chosen.items()}
