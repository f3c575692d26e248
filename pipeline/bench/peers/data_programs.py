"""Other ways from text to tokens: `python -m pipeline.bench.peers.data_programs NAME ARGUMENTS`.

Each program runs in a separate process and prints its measurements as JSON. The measured time
includes imports where a user would wait for them.
"""

import json
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

_tokenizers: dict[str, Any] = {}  # by model; every worker process opens its own


def encode(model: str, path: str, which: str) -> tuple[float, str]:
    """Return the seconds of one pass of a tokenizer (`ours` or `sentencepiece`), and a checksum of
    the ids. Every pass needs a new process: gigatoken remembers words and would be faster."""
    import numpy as np
    import xxhash

    from pipeline.data.tokenizer import Tokenizer

    texts = [json.loads(line)["text"] for line in Path(path).read_text().splitlines()]
    tokenizer = Tokenizer.open(Path(model))
    function = tokenizer.encode if which == "ours" else tokenizer.sentencepiece.encode
    function("the first call imports what it needs")
    began = time.perf_counter()
    ids = [function(text) for text in texts]
    seconds = time.perf_counter() - began
    checksum = xxhash.xxh3_64()
    for text, found in zip(texts, ids, strict=True):
        # SentencePiece writes a space as this character, and cannot tell the two apart.
        if "\u2581" not in text:
            checksum.update(np.asarray(found, np.uint32).tobytes())
    return seconds, checksum.hexdigest()


def plain_pool(model: str, out: str, *paths: str) -> float:
    """Return the seconds of two plain processes, which do the least that a data stage can do."""
    began = time.perf_counter()
    tasks = [(model, path, f"{out}{number}") for number, path in enumerate(paths)]
    with get_context("spawn").Pool(2) as pool:
        pool.map(_convert_file, tasks, 1)
    return time.perf_counter() - began


def _convert_file(task: tuple[str, str, str]) -> None:
    import gigatoken
    import numpy as np

    model, path, out = task
    if model not in _tokenizers:
        _tokenizers[model] = gigatoken.Tokenizer.from_sentencepiece(model)
    tokenizer = _tokenizers[model]
    ids = [
        tokenizer.encode(json.loads(line)["text"]) for line in Path(path).read_text().splitlines()
    ]
    # The benchmark's vocabulary of 32,768 fits 16 bits, as in our shards.
    np.concatenate(ids).astype(np.uint16).tofile(f"{out}.bin")
    np.array([len(each) for each in ids], np.int32).tofile(f"{out}.idx")


def datasets_map(model: str, cache: str, *paths: str) -> tuple[float, float]:
    """Run Hugging Face datasets as in nanoGPT's prepare.py; return seconds to tokens and Arrow."""
    import datasets
    import numpy as np

    datasets.disable_progress_bars()
    began = time.perf_counter()
    data = datasets.load_dataset("json", data_files=list(paths), split="train", cache_dir=cache)
    options = {"batch_size": 100, "num_proc": 2, "remove_columns": data.column_names}
    data = data.map(_encode_batch, batched=True, fn_kwargs={"model": model}, **options)
    # `map` ends in Arrow files and our stage in token files, so both times are reported.
    mapped_s = time.perf_counter() - began
    parts = min(1024, len(data))
    position = 0
    # In parts, because all tokens may not fit into memory.
    tokens = np.memmap(f"{cache}.bin", np.uint16, "w+", shape=(sum(data["length"]),))
    for part in range(parts):
        shard = data.shard(parts, part, contiguous=True).with_format("numpy")
        ids = np.concatenate(shard["ids"])
        tokens[position : position + len(ids)] = ids
        position += len(ids)
    tokens.flush()
    return time.perf_counter() - began, mapped_s


def _encode_batch(batch: dict[str, list[str]], model: str) -> dict[str, list[Any]]:
    import sentencepiece

    if model not in _tokenizers:
        _tokenizers[model] = sentencepiece.SentencePieceProcessor(model_file=model)
    ids = _tokenizers[model].encode(batch["text"])
    return {"ids": ids, "length": [len(each) for each in ids]}


def datatrove(model: str, out: str, *paths: str) -> tuple[float, float]:
    """Run datatrove as in its examples; return seconds to tokens, plain and with data/code.toml."""
    import gigatoken
    from datatrove.executor.local import LocalPipelineExecutor
    from datatrove.pipeline import dedup
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.pipeline.filters import GopherQualityFilter
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    from datatrove.pipeline.writers.jsonl import JsonlWriter

    Path(out).mkdir()
    tokenizer = f"{out}/t.json"
    # datatrove loads a tokenizers file, and gigatoken has its text only as a private attribute.
    Path(tokenizer).write_text(gigatoken.Tokenizer.from_sentencepiece(model)._hf_json)

    def run(*steps: Any, tasks: int = len(paths)) -> None:
        # datatrove skips tasks that its log directory lists as done, so every run gets a new one.
        logs = f"{out}/{time.time()}"
        workers = min(2, tasks)
        LocalPipelineExecutor(list(steps), tasks=tasks, workers=workers, logging_dir=logs).run()

    def tokens(name: str) -> Any:
        options = {"eos_token": "</s>", "shuffle_documents": False}
        return DocumentTokenizer(f"{out}/{name}", tokenizer, **options)

    began = time.perf_counter()
    text = JsonlReader(str(Path(paths[0]).parent), glob_pattern="*.jsonl")
    run(text, tokens("plain"))
    plain = time.perf_counter()
    # The arguments are the limits of configs/data/code.toml, in Gopher's order.
    rules = GopherQualityFilter(
        10, 100_000, 1, 40, 1.0, max_non_alpha_words_ratio=0.4, min_stop_words=0
    )
    # The same 20 bands of 6 rows as our `dedup.near`.
    config = MinhashConfig(n_grams=5, num_buckets=20, hashes_per_bucket=6)
    run(text, rules, JsonlWriter(f"{out}/kept", "${rank}.jsonl", compression=None))
    kept = JsonlReader(f"{out}/kept")
    signatures = f"{out}/signatures"
    buckets = f"{out}/buckets"
    run(kept, dedup.MinhashDedupSignature(signatures, config))
    # datatrove requires a task for each bucket here, and a single task for the clusters.
    run(dedup.MinhashDedupBuckets(signatures, buckets, config=config), tasks=config.num_buckets)
    run(dedup.MinhashDedupCluster(buckets, f"{out}/remove", config), tasks=1)
    run(kept, dedup.MinhashDedupFilter(f"{out}/remove"), tokens("full"))
    return plain - began, time.perf_counter() - plain


PROGRAMS = (encode, plain_pool, datasets_map, datatrove)

if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    program: Any = {each.__name__: each for each in PROGRAMS}[name]
    print(json.dumps(program(*arguments)))
