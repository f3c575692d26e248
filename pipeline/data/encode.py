"""The last pass, one task: encode the documents that remain, write their shards, then a record.

A plain function: it runs the same in a Ray worker, in a test, or twice because a worker died.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
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
from pipeline.data.clean import Batch, Ledger, after_dedup, before_dedup
from pipeline.data.corpus_recipe import PAIR, Malformed, Recipe, Task
from pipeline.data.shards import DType, Shard, ShardWriter, Stage, dtype_for, replacing, save
from pipeline.data.sketch import decontaminated
from pipeline.data.tokenizer import Tokenizer

SPLITS = ("train", "valid")
MODEL = "tokenizer.model"
CONVERTED = "tokenizer.json"  # written once, so that workers need not convert the model again


class Encoded(Frozen):
    """The record of a finished task."""

    source: str  # a task never mixes sources
    shards: dict[str, Shard]  # by split
    stages: tuple[Stage, ...]  # without those that the sketch pass has counted
    malformed: Malformed | None  # the first; all are in NAME.malformed


def tokenize(
    task: Task, name: str, folder: Path, recipe: Recipe, held_out: Path | None, keep: Path | None
) -> Encoded:
    """Write the shards and the record of one task; the same task always gives the same bytes.

    `held_out` has the n-grams to decontaminate against, `keep` the documents that dedup keeps.
    """
    tokenizer = _open_tokenizer(folder)
    tokenized = tuple(piece for piece in task if piece.kind == "megatron")
    text = tuple(piece for piece in task if piece.kind != "megatron")
    with replacing(folder / f"{name}.malformed", flush_name=False) as malformed_file:
        reading = Ledger(malformed_file)
        if keep is None:
            ledger = reading
            batches = before_dedup(text, recipe, reading)
        else:
            ledger = Ledger()  # the sketch pass has counted the stages before dedup
            batches = after_dedup(text, recipe, np.load(keep), reading)
        if held_out:
            grams = {int(n): known for n, known in np.load(held_out).items()}
            batches = (decontaminated(batch, grams, ledger) for batch in batches)
        documents = chain(
            _read_tokenized(tokenized, tokenizer, ledger),
            (document for batch in batches for document in _encode(batch, tokenizer, recipe)),
        )
        writers = _write(documents, recipe.valid_share, folder, name, dtype_for(tokenizer.vocab))
    shards = {
        split: writers[split].index(folder / f"{split}-{name}", task[0].source)
        for split in SPLITS
        if split in writers
    }
    sync_directory(folder)  # the shards are durable before the record exists
    record = Encoded(
        source=task[0].source,
        shards=shards,
        stages=ledger.stages(),
        malformed=reading.first_malformed,
    )
    # If a power cut loses the record's name, the task runs again.
    save(folder / f"{name}.done.json", record.model_dump_json().encode(), flush_name=False)
    return record


class _Document(NamedTuple):
    ids: npt.NDArray[np.integer]  # with the end of the document
    raw: bytes  # the text, whose hash decides the split


def _encode(batch: Batch, tokenizer: Tokenizer, recipe: Recipe) -> Iterator[_Document]:
    dtype = dtype_for(tokenizer.vocab)
    for document in batch:
        parts = [document.text] if recipe.pairs is None else document.text.split(PAIR)
        found = [tokenizer.encode(part) for part in parts]
        # One copy, into the dtype of the shard. An end follows each part.
        ids = np.full(sum(map(len, found)) + len(found), tokenizer.eod, dtype)
        at = 0
        for part in found:
            ids[at : at + len(part)] = part
            at += len(part) + 1
        yield _Document(ids, document.raw)


def _read_tokenized(task: Task, tokenizer: Tokenizer, ledger: Ledger) -> Iterator[_Document]:
    info = tokenizer.info(MODEL)
    for ids in (ids for piece in task for ids in megatron.documents(piece, info)):
        if isinstance(ids, Malformed):
            ledger.report(ids)
            continue
        raw = tokenizer.text_bytes(ids)
        ledger.keep("read", 1, len(raw), len(raw))
        yield _Document(ids, raw)


def _write(
    documents: Iterable[_Document], valid_share: float, folder: Path, name: str, dtype: DType
) -> dict[str, ShardWriter]:
    """Write one .bin file per split that has documents."""
    writers: dict[str, ShardWriter] = {}
    with ExitStack() as files:
        for document in documents:
            split = SPLITS[is_held_out(document.raw, valid_share)]
            if split not in writers:
                path = folder / f"{split}-{name}.bin"
                file = files.enter_context(replacing(path, flush_name=False))
                writers[split] = ShardWriter(file, dtype)
            writers[split].add(document.ids, len(document.raw))
    return writers


def is_held_out(raw: bytes, share: float) -> bool:
    """Decide by the hash of the text, so that a document keeps its split when others change."""
    return xxhash.xxh3_64_intdigest(raw) < share * 2**64


@lru_cache(1)
def _open_tokenizer(folder: Path) -> Tokenizer:
    # One per worker process: gigatoken's word cache warms up over its tasks.
    tokenizer = Tokenizer.open(folder / MODEL)
    if (folder / CONVERTED).exists():
        tokenizer.fast = True
        tokenizer.converted = (folder / CONVERTED).read_text()
    return tokenizer
