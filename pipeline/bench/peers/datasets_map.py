"""JSONL → one file of tokens with Hugging Face datasets, as nanoGPT's prepare.py does it.

Arguments: tokenizer model, cache directory, JSONL files.
Prints [seconds to the file of tokens, seconds to Arrow].
"""

import json
import sys
import time
from typing import Any

import datasets
import numpy as np
import sentencepiece

tokenizers: dict[str, Any] = {}  # by model; a worker process opens its own


def encode(batch: dict[str, list[str]], model: str) -> dict[str, list[Any]]:
    if model not in tokenizers:
        tokenizers[model] = sentencepiece.SentencePieceProcessor(model_file=model)
    ids = tokenizers[model].encode(batch["text"])
    return {"ids": ids, "length": [len(each) for each in ids]}


def main(model: str, cache: str, *paths: str) -> None:
    datasets.disable_progress_bars()
    began = time.perf_counter()
    data = datasets.load_dataset("json", data_files=list(paths), split="train", cache_dir=cache)
    data = data.map(
        encode,
        batched=True,
        batch_size=100,
        num_proc=2,
        remove_columns=data.column_names,
        fn_kwargs={"model": model},
    )
    mapped_s = time.perf_counter() - began
    parts = min(1024, len(data))
    position = 0
    tokens = np.memmap(f"{cache}.bin", np.uint16, "w+", shape=(sum(data["length"]),))
    for part in range(parts):
        shard = data.shard(parts, part, contiguous=True).with_format("numpy")
        ids = np.concatenate(shard["ids"])
        tokens[position : position + len(ids)] = ids
        position += len(ids)
    tokens.flush()
    print(json.dumps([time.perf_counter() - began, mapped_s]))


if __name__ == "__main__":
    main(*sys.argv[1:])
