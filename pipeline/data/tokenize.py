"""Last pass, one task: encode the documents that stay, write their shards, then the record that says it is done.

A plain function: it runs the same in a Ray worker, in a test, or twice because a worker died.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import xxhash

from pipeline.config.schema import Frozen
from pipeline.data.files import replacing
from pipeline.data.intake import Document, Intake
from pipeline.data.piece import MB, Task
from pipeline.data.recipe import Recipe
from pipeline.data.shards import Shard, ShardWriter, Stage, dtype_for
from pipeline.data.tokenizer import Tokenizer

BATCH_BYTES = 4 * MB  # of text held at once
SPLITS = ("train", "valid")


class Done(Frozen):
    """The record of a finished task."""

    source: str
    shards: dict[str, Shard]
    stages: tuple[Stage, ...]
    malformed: tuple[tuple[str, int, str], ...]


def tokenize(
    task: Task, name: str, out: Path, record: Path, recipe: Recipe, held_out: Path | None, keep: Path | None
) -> Done:
    """Same task, same bytes, whatever else happens; the record is written when the shards are safe."""
    intake = Intake(task, recipe, np.load(held_out) if held_out else None)
    documents = intake.only(np.load(keep)) if keep else iter(intake)
    shards = write(documents, name, task[0].source, out, recipe.valid_share)
    named = tuple((m.path, m.position, m.reason) for m in intake.malformed)
    done = Done(source=task[0].source, shards=shards, stages=intake.ledger.stages(), malformed=named)
    with replacing(record) as file:
        file.write(done.model_dump_json().encode())
    return done


def write(documents: Iterable[Document], name: str, source: str, out: Path, valid_share: float) -> dict[str, Shard]:
    """Encode and write one shard per split that has documents."""
    tokenizer = _tokenizer(out / "tokenizer.model")
    writers: dict[str, ShardWriter] = {}
    try:
        for batch in _batches(documents):
            held = [is_held_out(document.raw, valid_share) for document in batch]
            for split in SPLITS:
                mine = [d for d, valid in zip(batch, held, strict=True) if valid == (split == "valid")]
                if mine and split not in writers:
                    writers[split] = ShardWriter(out, f"{split}-{name}", source, dtype_for(tokenizer.vocab))
                if mine:
                    writers[split].add(tokenizer.documents(d.text for d in mine), sum(len(d.raw) for d in mine))
        return {split: writer.close() for split, writer in writers.items()}
    except BaseException as error:
        for writer in writers.values():
            writer.abort(error)
        raise


def is_held_out(raw: bytes, share: float) -> bool:
    """By the text's own hash: a document stays on its side when others come or go."""
    return xxhash.xxh3_64_intdigest(raw) < share * 2**64


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    held = 0
    for document in documents:
        batch.append(document)
        held += len(document.raw)
        if held >= BATCH_BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


@lru_cache(1)
def _tokenizer(path: Path) -> Tokenizer:
    """One per worker process: gigatoken's cache of words grows warm over its tasks."""
    return Tokenizer.open(path)
