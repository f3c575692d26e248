"""Last pass, one task: encode the documents that stay, write their shards, then the record that says it is done.

A plain function: it runs the same in a Ray worker, in a test, or twice because a worker died.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from pipeline.atomic import sync_directory
from pipeline.config.parts import Frozen
from pipeline.data import megatron
from pipeline.data.files import replacing, save
from pipeline.data.piece import Task
from pipeline.data.read import Malformed
from pipeline.data.recipe import Recipe
from pipeline.data.shards import DType, Shard, ShardWriter, Stage, dtype_for
from pipeline.data.stages import Batch, Ledger, Position, after_dedup, before_dedup, decontaminated
from pipeline.data.tokenizer import Tokenizer

SPLITS = ("train", "valid")
MODEL = "tokenizer.model"
CONVERTED = "tokenizer.json"  # what every worker would otherwise work out for itself


class Done(Frozen):
    """The record of a finished task."""

    source: str
    shards: dict[str, Shard]
    stages: tuple[Stage, ...]
    malformed: Position | None  # the first; all are in NAME.malformed


def tokenize(
    task: Task, name: str, folder: Path, recipe: Recipe, held_out: Path | None, keep: Path | None
) -> Done:
    """Same task, same bytes, whatever else happens; the record is written when the shards are safe."""
    tokenizer = _tokenizer(folder)
    dtype = dtype_for(tokenizer.vocab)
    taken = tuple(piece for piece in task if piece.kind == "megatron")
    text = tuple(piece for piece in task if piece.kind != "megatron")
    with replacing(folder / f"{name}.malformed", flush_name=False) as aside:
        earlier = Ledger(aside)
        ledger = earlier if keep is None else Ledger()  # what comes before dedup was counted then
        texts = (
            after_dedup(text, recipe, np.load(keep), earlier)
            if keep
            else before_dedup(text, recipe, earlier)
        )
        if held_out:
            grams = {int(n): known for n, known in np.load(held_out).items()}
            texts = (decontaminated(batch, grams, ledger) for batch in texts)
        encodings = (encoded(batch, tokenizer, dtype) for batch in texts)
        tokens = chain(_already_encoded(taken, tokenizer, ledger), encodings)
        shards = write(tokens, name, task[0].source, folder, recipe.valid_share, dtype)
    sync_directory(folder)
    done = Done(
        source=task[0].source, shards=shards, stages=ledger.stages(), malformed=earlier.malformed
    )
    # Should a power cut take its name, the task runs again.
    save(folder / f"{name}.done.json", done.model_dump_json().encode(), flush_name=False)
    return done


class Encoded(NamedTuple):
    ids: npt.NDArray[np.integer]  # the end of the document included
    raw: bytes  # the text, by which its side of the split is decided


def encoded(batch: Batch, tokenizer: Tokenizer, dtype: DType) -> list[Encoded]:
    done = []
    for document in batch:
        found = tokenizer.encode(document.text)
        ids = np.empty(len(found) + 1, dtype)
        ids[:-1], ids[-1] = found, tokenizer.eod
        done.append(Encoded(ids, document.raw))
    return done


def _already_encoded(task: Task, tokenizer: Tokenizer, ledger: Ledger) -> Iterator[list[Encoded]]:
    for ids in (ids for piece in task for ids in megatron.documents(piece, tokenizer)):
        if isinstance(ids, Malformed):
            ledger.set_aside(ids)
            continue
        raw = megatron.text_of(ids, tokenizer)
        ledger.keep("read", 1, len(raw), len(raw))
        yield [Encoded(ids, raw)]


def write(
    batches: Iterable[list[Encoded]],
    name: str,
    source: str,
    folder: Path,
    valid_share: float,
    dtype: DType,
) -> dict[str, Shard]:
    """One shard per split that has documents."""
    writers: dict[str, ShardWriter] = {}
    try:
        for document in (document for batch in batches for document in batch):
            split = SPLITS[is_held_out(document.raw, valid_share)]
            if split not in writers:
                writers[split] = ShardWriter(folder, f"{split}-{name}", source, dtype)
            writers[split].add(document.ids, len(document.raw))
        return {split: writers[split].close() for split in SPLITS if split in writers}
    except BaseException as error:
        for writer in writers.values():
            writer.abort(error)
        raise


def is_held_out(raw: bytes, share: float) -> bool:
    """By the text's own hash: a document stays on its side when others come or go."""
    return xxhash.xxh3_64_intdigest(raw) < share * 2**64


@lru_cache(1)
def _tokenizer(folder: Path) -> Tokenizer:
    """One per worker process: gigatoken's cache of words grows warm over its tasks."""
    tokenizer = Tokenizer.open(folder / MODEL)
    if (folder / CONVERTED).exists():
        tokenizer.fast, tokenizer.converted = True, (folder / CONVERTED).read_text()
    return tokenizer
