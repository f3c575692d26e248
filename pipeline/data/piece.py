"""A piece of work: which stretch of which input."""

from dataclasses import dataclass
from typing import Literal

MB = 2**20

Kind = Literal["text", "jsonl", "parquet", "arrow", "megatron", "hf", "synthetic"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of one input: bytes of a text or jsonl file, row groups of a parquet file, rows, shards or batches."""

    source: str
    kind: Kind
    path: str
    start: int
    stop: int
    bytes: int  # how much work it is, roughly
    stamp: int = 0  # changes when the input does
    limit: int | None = None  # the document in which its text reaches so many bytes is its last


Task = tuple[Piece, ...]
