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
from pipeline.data.corpus_recipe import PAIR, Dedup, Malformed, Recipe, Task
from pipeline.data.shards import DType, Shard, ShardWriter, Stage, dtype_for, replacing, save
from pipeline.data.sketch import decontaminated
from pipeline.data.tokenizer import Tokenizer

SPLITS = ("train", "valid")
MODEL = "tokenizer.model"
HELD_OUT = "held-out.npz"
CONVERTED = "tokenizer.json"  # written once, so that workers need not convert the model again


class Encoded(Frozen):
    """The record of a finished task."""

    source: str  # a task never mixes sources
    shards: dict[str, Shard]  # by split
    stages: tuple[Stage, ...]  # without the stages that the sketch pass has counted
    malformed: Malformed | None  # the first; all are in NAME.malformed


def tokenize(task: Task, stem: Path, recipe: Recipe) -> Encoded:
    """Write the shards and the record of one task; the same task always gives the same bytes.

    Earlier steps have written the tokenizer, the n-grams to decontaminate against, and the
    documents that dedup keeps into the same folder.
    """
    tokenizer = _open_tokenizer(stem.parent)
    tokenized = tuple(piece for piece in task if piece.kind == "megatron")
    text = tuple(piece for piece in task if piece.kind != "megatron")
    with replacing(stem.with_suffix(".malformed"), flush_name=False) as malformed_file:
        reading = Ledger(malformed_file)
        if recipe.dedup == Dedup():
            ledger = reading
            batches = before_dedup(text, recipe, reading)
        else:
            ledger = Ledger()  # the sketch pass has counted the stages before dedup
            keep = np.load(stem.with_name(f"sketch-{stem.name}.keep.npy"))
            batches = after_dedup(text, recipe, keep, reading)
        if recipe.decontaminate:
            grams = {int(n): known for n, known in np.load(stem.with_name(HELD_OUT)).items()}
            batches = (decontaminated(batch, grams, ledger) for batch in batches)
        documents = chain(
            _read_tokenized(tokenized, tokenizer, ledger),
            chain.from_iterable(_encode(batch, tokenizer, recipe) for batch in batches),
        )
        writers = _write(documents, recipe.valid_share, stem, dtype_for(tokenizer.vocab))
    source = task[0].source
    shards = {split: writer.index(_shard(stem, split), source) for split, writer in writers.items()}
    sync_directory(stem.parent)  # the shards are durable before the record exists
    record = Encoded(
        source=source,
        shards=shards,
        stages=ledger.stages(),
        malformed=reading.first_malformed,
    )
    # If a power cut loses the record's name, the task runs again.
    save(stem.with_suffix(".done.json"), record.model_dump_json().encode(), flush_name=False)
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
    for ids in chain.from_iterable(megatron.documents(piece, info) for piece in task):
        if isinstance(ids, Malformed):
            ledger.report(ids)
            continue
        raw = tokenizer.text_bytes(ids)
        ledger.keep("read", 1, len(raw), len(raw))
        yield _Document(ids, raw)


def _write(
    documents: Iterable[_Document], valid_share: float, stem: Path, dtype: DType
) -> dict[str, ShardWriter]:
    """Write one .bin file per split that has documents."""
    writers: dict[str, ShardWriter] = {}
    with ExitStack() as files:
        for document in documents:
            split = SPLITS[is_held_out(document.raw, valid_share)]
            if split not in writers:
                path = _shard(stem, split).with_suffix(".bin")
                file = files.enter_context(replacing(path, flush_name=False))
                writers[split] = ShardWriter(file, dtype)
            writers[split].add(document.ids, len(document.raw))
    return {split: writers[split] for split in SPLITS if split in writers}


def _shard(stem: Path, split: str) -> Path:
    return stem.with_name(f"{split}-{stem.name}")


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
