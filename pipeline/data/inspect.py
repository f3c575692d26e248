"""What a corpus holds: counts, token statistics, a sample, every checksum."""

from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data.shards import Corpus, Split
from pipeline.data.tokenizer import Tokenizer

SAMPLE_TOKENS = 120


def inspect(path: Path) -> dict[str, Any]:
    """Read every byte once, checking it, and describe the corpus as plain values."""
    corpus = Corpus.open(path, verify=True)
    manifest = corpus.manifest
    tokenizer = Tokenizer.open(path / manifest.tokenizer.file)
    return {
        "path": str(path),
        "hash": manifest.hash,
        "dtype": manifest.dtype,
        "tokenizer": manifest.tokenizer.model_dump(),
        "splits": {
            name: _describe(corpus, split, tokenizer) for name, split in manifest.splits.items()
        },
        "sources": [source.model_dump() for source in manifest.sources],
        "stages": [stage.model_dump(exclude_none=True) for stage in manifest.stages],
        "checksums": "ok",
    }


def _describe(corpus: Corpus, split: Split, tokenizer: Tokenizer) -> dict[str, Any]:
    described: dict[str, Any] = {
        "tokens": split.tokens,
        "documents": split.documents,
        "bytes": split.bytes,
        "shards": len(split.shards),
        "bytes_per_token": round(split.bytes / split.tokens, 4) if split.tokens else None,
    }
    if not split.tokens:
        return described
    counts = np.zeros(tokenizer.vocab, np.int64)
    for shard in split.shards:
        counts += np.bincount(corpus.tokens(shard), minlength=tokenizer.vocab)
    share = counts[counts > 0] / split.tokens
    lengths = np.concatenate([corpus.lengths(shard) for shard in split.shards])
    first = split.shards[0]
    described |= {
        "pieces_used": int((counts > 0).sum()),
        "unigram_nats_per_token": round(float(-(share * np.log(share)).sum()), 4),
        "document_tokens": {f"p{q}": int(np.percentile(lengths, q)) for q in (10, 50, 90, 99)}
        | {"max": int(lengths.max())},
        "most_frequent": [
            [tokenizer.sentencepiece.id_to_piece(int(i)), round(float(counts[i] / split.tokens), 4)]
            for i in np.argsort(-counts, kind="stable")[:10]
        ],
        "sample": tokenizer.decode(
            corpus.tokens(first)[: min(SAMPLE_TOKENS, int(corpus.lengths(first)[0]) - 1)]
        ),
    }
    return described
