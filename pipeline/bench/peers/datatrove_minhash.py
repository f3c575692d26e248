"""JSONL → tokens with datatrove as in its examples: plain, then with filters and near-duplicates removed.

The rules are those of configs/data/code.toml. Arguments: tokenizer model, output directory, JSONL
files. Prints [seconds without the rules, seconds with them].
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import gigatoken
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.dedup import (
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.filters import GopherQualityFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
from datatrove.pipeline.writers.jsonl import JsonlWriter

BUCKETS = 20


def main(model: str, out: str, *paths: str) -> None:
    Path(out).mkdir()
    tokenizer = f"{out}/t.json"
    Path(tokenizer).write_text(gigatoken.Tokenizer.from_sentencepiece(model)._hf_json)

    def run(*steps: Any, tasks: int = len(paths)) -> None:
        workers = min(2, tasks)
        logs = f"{out}/{time.time()}"
        LocalPipelineExecutor(list(steps), tasks=tasks, workers=workers, logging_dir=logs).run()

    def tokens(name: str) -> Any:
        return DocumentTokenizer(
            f"{out}/{name}", tokenizer, eos_token="</s>", shuffle_documents=False
        )

    began = time.perf_counter()
    text = JsonlReader(str(Path(paths[0]).parent), glob_pattern="*.jsonl")
    run(text, tokens("plain"))
    plain = time.perf_counter()
    rules = GopherQualityFilter(
        10, 100_000, 1, 40, 1.0, max_non_alpha_words_ratio=0.4, min_stop_words=0
    )
    config = MinhashConfig(n_grams=5, num_buckets=BUCKETS, hashes_per_bucket=6)
    run(text, rules, JsonlWriter(f"{out}/kept", "${rank}.jsonl", compression=None))
    kept = JsonlReader(f"{out}/kept")
    run(kept, MinhashDedupSignature(f"{out}/signatures", config))
    run(MinhashDedupBuckets(f"{out}/signatures", f"{out}/buckets", config=config), tasks=BUCKETS)
    run(MinhashDedupCluster(f"{out}/buckets", f"{out}/remove", config), tasks=1)
    run(kept, MinhashDedupFilter(f"{out}/remove"), tokens("full"))
    print(json.dumps([plain - began, time.perf_counter() - plain]))


if __name__ == "__main__":
    main(*sys.argv[1:])
