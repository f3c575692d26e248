"""The text a tokenizer is trained on: a little from all over the corpus."""

import random
from collections.abc import Iterator, Sequence

from pipeline.data.normalise import normalise
from pipeline.data.piece import MB, Task
from pipeline.data.read import Malformed, read
from pipeline.data.recipe import Recipe
from pipeline.data.tokenizer import train

TASKS = 64  # looked into, evenly spaced
BYTES_PER_PIECE = 2500  # of vocabulary: rare pieces are still seen often
LEAST_BYTES, MOST_BYTES = 8 * MB, 256 * MB


def train_on(tasks: Sequence[Task], recipe: Recipe) -> bytes:
    return train(sample(tasks, recipe), recipe.vocab_size)


def sample(tasks: Sequence[Task], recipe: Recipe) -> Iterator[str]:
    """Documents from evenly spaced tasks, from each in an order that the seed decides; the same for any workers."""
    budget = min(max(LEAST_BYTES, BYTES_PER_PIECE * recipe.vocab_size), MOST_BYTES)
    count = min(len(tasks), TASKS)
    for number in range(count):
        left = budget // count
        task = tasks[number * len(tasks) // count]
        for text in _shuffled(task, f"{recipe.seed} {number}", recipe.text_key):
            yield normalise(text, recipe.normalise)
            left -= len(text)
            if left <= 0:
                break


def _shuffled(task: Task, seed: str, key: str) -> Iterator[str]:
    for piece in random.Random(seed).sample(task, len(task)):
        yield from (item for item in read(piece, key) if not isinstance(item, Malformed))
