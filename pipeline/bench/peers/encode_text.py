"""Time one pass of a tokenizer over a JSONL file, in a process of its own.

gigatoken remembers words, so a second pass in one process would be faster than the first.
Arguments: tokenizer model, JSONL file, `ours` or `sentencepiece`.
Prints [seconds, checksum of the token ids].
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import xxhash

from pipeline.data.tokenizer import Tokenizer


def main(model: str, path: str, which: str) -> None:
    with Path(path).open() as lines:
        texts = [json.loads(line)["text"] for line in lines]
    tokenizer = Tokenizer.open(Path(model))
    encode = tokenizer.encode if which == "ours" else tokenizer.sentencepiece.encode
    encode("the first call imports what it needs")
    began = time.perf_counter()
    ids = [encode(text) for text in texts]
    seconds = time.perf_counter() - began
    checksum = xxhash.xxh3_64()
    for text, found in zip(texts, ids, strict=True):
        # SentencePiece writes a space as this character, and cannot tell the two apart.
        if "\u2581" not in text:
            checksum.update(np.asarray(found, np.uint32).tobytes())
    print(json.dumps([seconds, checksum.hexdigest()]))


if __name__ == "__main__":
    main(*sys.argv[1:])
