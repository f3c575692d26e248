"""Everything that decides the bytes of a corpus, and nothing that does not: no workers, no output path."""

from typing import Annotated

import xxhash
from pydantic import Field

from pipeline.data.shards import Frozen

VOCAB = 4096  # for corpora of a few million tokens; set 32768 for real ones


class Recipe(Frozen):
    sources: tuple[str, ...]
    vocab_size: int = VOCAB
    tokenizer: str | None = None  # fingerprint of a given model, which then replaces vocab_size
    seed: int = 0  # of the synthetic corpus and of the tokenizer's sample
    valid_share: Annotated[float, Field(ge=0, lt=1)] = 0.01
    limit_bytes: int | None = None  # of each source
    text_key: str = "text"

    def fingerprint(self, *inputs: str) -> str:
        return xxhash.xxh3_128_hexdigest("\n".join((self.model_dump_json(), *inputs)).encode())
