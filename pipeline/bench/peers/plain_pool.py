"""JSONL → token files with two plain processes: the least work that the data stage can be.

Arguments: tokenizer model, prefix of the output files, JSONL files. Prints the seconds.
"""

import json
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gigatoken
import numpy as np

tokenizer: Any = None  # of a worker process


def start(model: str) -> None:
    global tokenizer
    tokenizer = gigatoken.Tokenizer.from_sentencepiece(model)


def convert(task: tuple[str, str]) -> None:
    path, out = task
    with Path(path).open() as lines:
        ids = [tokenizer.encode(json.loads(line)["text"]) for line in lines]
    np.concatenate(ids).astype(np.uint16).tofile(f"{out}.bin")
    np.array([len(each) for each in ids], np.int32).tofile(f"{out}.idx")


def main(model: str, out: str, *paths: str) -> None:
    began = time.perf_counter()
    tasks = [(path, f"{out}{i}") for i, path in enumerate(paths)]
    with get_context("spawn").Pool(2, start, (model,)) as pool:
        pool.map(convert, tasks, 1)
    print(time.perf_counter() - began)


if __name__ == "__main__":
    main(*sys.argv[1:])
