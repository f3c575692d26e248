"""One task: read a stretch of input, encode it, write its shards, then the record that says it is done.

A plain function: it runs the same in a Ray worker, in a test, or twice because a worker died.
"""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import xxhash

from pipeline.data.files import replacing
from pipeline.data.piece import MB, Task
from pipeline.data.read import Malformed, read
from pipeline.data.recipe import Recipe
from pipeline.data.shards import Frozen, Shard, ShardWriter, dtype_for
from pipeline.data.tokenizer import Tokenizer

BATCH_BYTES = 4 * MB  # of text held at once
POSITIONS = 100  # malformed documents a task names one by one; all are counted


class Done(Frozen):
    """What a task leaves behind besides its shards."""

    source: str
    shards: dict[str, Shard]
    documents_in: int
    bytes_in: int
    dropped: dict[str, tuple[int, int]]
    malformed: tuple[tuple[str, int, str], ...]


def tokenize(task: Task, name: str, out: Path, record: Path, recipe: Recipe) -> Done:
    """Same task, same bytes, whatever else happens; the record is written when the shards are safe."""
    tokenizer = _tokenizer(out / "tokenizer.model")
    source = task[0].source
    intake = Intake()
    writers: dict[str, ShardWriter] = {}
    try:
        for batch in intake.batches(task, recipe):
            for split in ("train", "valid"):
                texts = [text for text, raw in batch if (split == "valid") == held_out(raw, recipe.valid_share)]
                if texts and split not in writers:
                    writers[split] = ShardWriter(out, f"{split}-{name}", source, dtype_for(tokenizer.vocab))
                if texts:
                    writers[split].add(tokenizer.documents(texts), sum(len(text.encode()) for text in texts))
        shards = {split: writer.close() for split, writer in writers.items()}
    except BaseException as error:
        for writer in writers.values():
            writer.abort(error)
        raise
    done = Done(
        source=source,
        shards=shards,
        documents_in=intake.documents,
        bytes_in=intake.bytes,
        dropped=intake.dropped,
        malformed=tuple((m.path, m.position, m.reason) for m in intake.malformed),
    )
    with replacing(record) as file:
        file.write(done.model_dump_json().encode())
    return done


def held_out(raw: bytes, share: float) -> bool:
    """By the text's own hash: a document stays on its side when others come or go."""
    return xxhash.xxh3_64_intdigest(raw) < share * 2**64


class Intake:
    """Reads a task in batches and keeps the books."""

    def __init__(self) -> None:
        self.documents = self.bytes = 0
        self.dropped: dict[str, tuple[int, int]] = {}
        self.malformed: list[Malformed] = []

    def batches(self, task: Task, recipe: Recipe) -> Iterator[list[tuple[str, bytes]]]:
        batch: list[tuple[str, bytes]] = []
        held = 0
        for item in (item for piece in task for item in read(piece, recipe.text_key)):
            self.documents += 1
            if isinstance(item, Malformed):
                self.bytes += item.bytes
                self._drop("malformed", item.bytes)
                if len(self.malformed) < POSITIONS:
                    self.malformed.append(item)
                continue
            raw = item.encode()
            self.bytes += len(raw)
            if not item.strip():
                self._drop("empty", len(raw))
                continue
            batch.append((item, raw))
            held += len(raw)
            if held >= BATCH_BYTES:
                yield batch
                batch, held = [], 0
        if batch:
            yield batch

    def _drop(self, reason: str, size: int) -> None:
        documents, total = self.dropped.get(reason, (0, 0))
        self.dropped[reason] = (documents + 1, total + size)


@lru_cache(1)
def _tokenizer(path: Path) -> Tokenizer:
    """One per worker process: gigatoken's cache of words grows warm over its tasks."""
    return Tokenizer.open(path)
