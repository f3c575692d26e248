"""A piece of work: which stretch of which input. The planner and the reader of every format use it.

This file stands alone so that formats, readers and planner can import it without a circle.
"""

from dataclasses import dataclass
from typing import Literal

MB = 2**20

# A longer line, row or document is reported as malformed: the stages after reading hold several
# copies of a text, which would not fit a worker's memory.
DOCUMENT_BYTES = 16 * MB

Kind = Literal["text", "jsonl", "parquet", "arrow", "megatron", "hf", "synthetic"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of one input.

    `start` and `stop` count bytes of a text or jsonl file, row groups of a parquet file, record
    batches, documents, rows, shards or batches, depending on the kind. All fields enter the
    fingerprint of a corpus.
    """

    source: str
    kind: Kind
    path: str
    start: int
    stop: int
    bytes: int  # approximate amount of work
    stamp: int = 0  # changes when the input changes
    limit: int | None = None  # stop after the document that reaches this many bytes of text


Task = tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Malformed:
    """A document that cannot be used."""

    path: str
    position: int  # a byte of a text or jsonl file, otherwise a row
    reason: str
    bytes: int
