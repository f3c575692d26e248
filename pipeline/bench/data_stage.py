"""How fast the data stage is, always as a ratio to something else measured in the same run on the same text."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from pipeline.data.corpus import Corpus
from pipeline.data.corpus_recipe import Recipe, load_recipe
from pipeline.data.loader import Loader, prefetch
from pipeline.data.permute import Permutation
from pipeline.data.piece import MB, Malformed
from pipeline.data.prepare import prepare
from pipeline.data.ray_pool import cluster
from pipeline.data.readers import read
from pipeline.data.sources import plan
from pipeline.data.tokenizer import Tokenizer, train_on
from pipeline.errors import DataError

# Each runs in a process of its own: gigatoken remembers words, so a second pass in one process would flatter it.
_ENCODE = """
import json, sys, time
from pathlib import Path
import numpy, sentencepiece, xxhash
from pipeline.data.tokenizer import Tokenizer
from pipeline.errors import DataError
texts = [json.loads(line)["text"] for line in open(sys.argv[2])]
tokenizer = Tokenizer.open(Path(sys.argv[1]))
encode = tokenizer.encode if sys.argv[3] == "ours" else tokenizer.sentencepiece.encode
encode("warm the imports up")
start = time.perf_counter()
ids = [encode(text) for text in texts]
seconds = time.perf_counter() - start
digest = xxhash.xxh3_64()
for text, found in zip(texts, ids):
    if "\\u2581" not in text:
        digest.update(numpy.asarray(found, numpy.uint32).tobytes())
print(json.dumps([seconds, digest.hexdigest()]))
"""

_PLAIN = """
import json, sys, time
from multiprocessing import get_context
from pathlib import Path
def begin(model):
    global tokenizer, numpy
    import gigatoken, numpy
    tokenizer = gigatoken.Tokenizer.from_sentencepiece(model)
def work(task):
    path, out = task
    ids = [tokenizer.encode(json.loads(line)["text"]) for line in open(path)]
    numpy.concatenate(ids).astype(numpy.uint16).tofile(out + ".bin")
    numpy.array([len(i) for i in ids], numpy.int32).tofile(out + ".idx")
if __name__ == "__main__":
    start = time.perf_counter()
    tasks = [(path, sys.argv[2] + str(i)) for i, path in enumerate(sys.argv[3:])]
    with get_context("spawn").Pool(2, begin, (sys.argv[1],)) as pool:
        pool.map(work, tasks, 1)
    print(time.perf_counter() - start)
"""

# To a file of tokens as nanoGPT's prepare.py makes it; prints seconds with and without that file.
_DATASETS = """
import json, sys, time
import datasets, numpy, sentencepiece
datasets.disable_progress_bars()
model = sys.argv[1]
start = time.perf_counter()
def encode(batch):
    global tokenizer
    if "tokenizer" not in globals():
        tokenizer = sentencepiece.SentencePieceProcessor(model_file=model)
    ids = tokenizer.encode(batch["text"])
    return {"ids": ids, "length": [len(each) for each in ids]}
data = datasets.load_dataset("json", data_files=sys.argv[3:], split="train", cache_dir=sys.argv[2])
data = data.map(encode, batched=True, batch_size=100, num_proc=2, remove_columns=data.column_names)
mapped = time.perf_counter() - start
parts, at = min(1024, len(data)), 0
tokens = numpy.memmap(sys.argv[2] + ".bin", numpy.uint16, "w+", shape=(sum(data["length"]),))
for part in range(parts):
    ids = numpy.concatenate(data.shard(parts, part, contiguous=True).with_format("numpy")["ids"])
    tokens[at : at + len(ids)] = ids
    at += len(ids)
tokens.flush()
print(json.dumps([time.perf_counter() - start, mapped]))
"""

# As its own examples do it, the rules those of configs/data/code.toml; prints seconds without and with them.
_DATATROVE = """
import json, sys, time
from pathlib import Path
import gigatoken
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.filters import GopherQualityFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
from datatrove.pipeline.writers.jsonl import JsonlWriter
if __name__ == "__main__":
    model, out, *paths = sys.argv[1:]
    Path(out).mkdir()
    Path(out, "t.json").write_text(gigatoken.Tokenizer.from_sentencepiece(model)._hf_json)
    config = MinhashConfig(n_grams=5, num_buckets=20, hashes_per_bucket=6)
    rules = GopherQualityFilter(10, 100_000, 1, 40, 1.0, max_non_alpha_words_ratio=0.4, min_stop_words=0)
    def run(*steps, tasks=len(paths)):
        LocalPipelineExecutor(list(steps), tasks=tasks, workers=min(2, tasks), logging_dir=f"{out}/{time.time()}").run()
    def tokens(name):
        return DocumentTokenizer(f"{out}/{name}", f"{out}/t.json", eos_token="</s>", shuffle_documents=False)
    times = [time.perf_counter()]
    text = JsonlReader(str(Path(paths[0]).parent), glob_pattern="*.jsonl")
    run(text, tokens("plain"))
    times.append(time.perf_counter())
    run(text, rules, JsonlWriter(f"{out}/kept", "${rank}.jsonl", compression=None))
    kept = JsonlReader(f"{out}/kept")
    run(kept, MinhashDedupSignature(f"{out}/signatures", config))
    run(MinhashDedupBuckets(f"{out}/signatures", f"{out}/buckets", config=config), tasks=20)
    run(MinhashDedupCluster(f"{out}/buckets", f"{out}/remove", config), tasks=1)
    run(kept, MinhashDedupFilter(f"{out}/remove"), tokens("full"))
    times.append(time.perf_counter())
    print(json.dumps([b - a for a, b in zip(times, times[1:])]))
"""


ROUNDS = 5  # in turn


def data(
    megabytes: int, files: int = 8, datatrove: bool = False, tenfold: bool = False
) -> Iterator[tuple[str, Any]]:
    """Measure step by step: what was measured, and its value."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = Recipe(sources=("python",), limit_bytes=megabytes * MB, vocab_size=32768)
        tasks = plan(recipe.sources, limit_bytes=recipe.limit_bytes, seed=0)
        texts = [
            t
            for task in tasks
            for piece in task
            for t in read(piece, "text")
            if not isinstance(t, Malformed)
        ]
        size = sum(len(text.encode()) for text in texts) / 1e6
        yield "text, MB", round(size, 1)
        times = max(1, round(megabytes / size))
        yield "text in the comparisons of pipelines, MB", round(times * size, 1)
        paths = _write(folder / "text", _orders(texts, 1, 1 + times), files)
        model = folder / "t.model"
        model.write_bytes(train_on(tasks, recipe))
        yield from _encoding(model, *_write(folder / "encode", texts[::files], 1))
        tokenizer = Tokenizer.open(model)
        start = time.perf_counter()
        with cluster(2):
            yield "Ray start-up, s", round(time.perf_counter() - start, 1)

            def prepared(paths: Sequence[Path], config: str | None = None) -> float:
                given = {"sources": tuple(map(str, paths)), "vocab_size": tokenizer.vocab}
                recipe = load_recipe(config, given | {"tokenizer": tokenizer.fingerprint})
                with tempfile.TemporaryDirectory(dir=folder) as out:
                    start = time.perf_counter()
                    prepare(recipe, Path(out), model=tokenizer.model, workers=2)
                    return time.perf_counter() - start

            yield from _end_to_end(folder, model, paths, times * size, prepared, datatrove)
            if tenfold:
                often = _write(folder / "often", _orders(texts, 1 + times, 1 + 11 * times), files)
                yield from _tenfold(paths, often, prepared)
            yield "peak memory of a worker, MiB", _peak_bytes() // MB


def _write(folder: Path, texts: Iterable[str], files: int) -> list[Path]:
    folder.mkdir()
    paths = [folder / f"{i}.jsonl" for i in range(files)]
    with ExitStack() as stack:
        for text, file in zip(
            texts, cycle([stack.enter_context(path.open("w")) for path in paths]), strict=False
        ):
            file.write(json.dumps({"text": text}) + "\n")
    return paths


def _orders(texts: list[str], first: int, end: int) -> Iterator[str]:
    """The texts with their words in one order after the other, the first their own: no near-duplicates among them."""
    for step in range(first, end):
        for words in (text.split(" ") for text in texts):
            yield " ".join(word for begin in range(step) for word in words[begin::step])


def _encoding(model: Path, path: Path) -> Iterator[tuple[str, Any]]:
    size = sum(len(json.loads(line)["text"].encode()) for line in path.open()) / 1e6
    theirs, expected = json.loads(_script(_ENCODE, model, path, "sentencepiece"))
    ours, found = json.loads(_script(_ENCODE, model, path, "ours"))
    yield "encode, one core, first pass: sentencepiece, MB/s", round(size / theirs, 2)
    yield "encode, one core, first pass: ours, MB/s", round(size / ours, 2)
    yield "encode: ours / sentencepiece", round(theirs / ours, 2)
    yield "encode: ids equal", expected == found


def _end_to_end(
    folder: Path,
    model: Path,
    paths: list[Path],
    size: float,
    prepared: Callable[..., float],
    datatrove: bool,
) -> Iterator[tuple[str, Any]]:
    """In turn, and the middle of each: other work on the machine then slows all, and their CPU seconds least."""
    plain, ours = [], []
    for number in range(ROUNDS):
        plain.append(_took(lambda: float(_script(_PLAIN, model, folder / "plain", *paths))))
        ours.append(_took(lambda: prepared(paths)))
        if number == ROUNDS // 2:
            seconds, bare = json.loads(_script(_DATASETS, model, folder / "cache", *paths))
    mine = np.median(ours, axis=0)
    yield "jsonl → shards, ours, 2 workers, MB/s", round(size / mine[0], 2)
    yield "jsonl → shards, ours, CPU s", round(mine[1], 2)
    wall, cpu = np.median(plain, axis=0) / mine
    yield "jsonl → shards: ours / plain processes", round(wall, 2)
    yield "jsonl → shards: ours / plain processes, by CPU s", round(cpu, 2)
    yield "jsonl → shards: ours / datasets.map to a file of tokens", round(seconds / mine[0], 2)
    yield "jsonl → shards: ours / datasets.map that ends at Arrow", round(bare / mine[0], 2)
    full = prepared(paths, "code")
    yield "jsonl → shards, ours with filters and near-dedup, MB/s", round(size / full, 2)
    if datatrove:
        theirs, minhash = json.loads(_script(_DATATROVE, model, folder / "datatrove", *paths))
        yield "jsonl → shards: ours / datatrove", round(theirs / mine[0], 2)
        yield "with filters and near-dedup: ours / datatrove", round(minhash / full, 2)


def _tenfold(
    once: list[Path], often: list[Path], prepared: Callable[..., float]
) -> Iterator[tuple[str, Any]]:
    for what, config in (("", None), (" with filters and near-dedup", "code")):
        small = np.median([_took(lambda: prepared(once, config)) for _ in range(3)], axis=0)  # noqa: B023
        wall, cpu = np.array(_took(lambda: prepared(often, config))) / small  # noqa: B023
        yield f"10 × the text{what}: × the time", round(wall, 2)
        yield f"10 × the text{what}: × the CPU s", round(cpu, 2)


def _took(action: Callable[[], float]) -> tuple[float, float]:
    """The seconds that the action tells, and CPU seconds. What was written before it is on the disk first."""
    os.sync()
    before, seconds = _cpu_s(), action()
    return seconds, _cpu_s() - before


def _processes() -> Iterator[psutil.Process]:
    """This one, and those of Ray."""
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            yield process


def _cpu_s() -> float:
    """Of all processes, of those that have ended too."""
    return sum(sum(process.cpu_times()[:4]) for process in _processes())


def _peak_bytes() -> int:
    """The most that any worker of Ray has held."""
    states = [
        Path(f"/proc/{p.pid}/status").read_text()
        for p in _processes()
        if p.name().startswith("ray::")
    ]
    return max(int(state.partition("VmHWM:")[2].split()[0]) * 1024 for state in states)


def _script(code: str, *arguments: str | Path) -> str:
    with tempfile.NamedTemporaryFile(
        "w", suffix=".py"
    ) as file:  # a file: the processes it spawns import it again
        file.write(code)
        file.flush()
        command = [sys.executable, file.name, *map(str, arguments)]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=3600
        )
    if done.returncode:
        raise DataError(
            f"a peer failed: {done.stderr.strip().splitlines()[-1]}; see --help for what it needs"
        )
    return done.stdout.strip().splitlines()[-1]


def loader(
    corpus: Corpus, rows: int = 8, seq: int = 2048, step_s: float = 0.05
) -> Iterator[tuple[str, Any]]:
    """Batches from warm files against a bare permuted gather of the same bytes."""
    ours = Loader(corpus, "train", seq=seq, rows=rows, seed=0)
    with (
        tempfile.NamedTemporaryFile() as file
    ):  # one file, mapped: what a loader without shards would read
        for shard in corpus.split("train").shards:
            file.write(corpus.tokens(shard).tobytes())
        file.flush()
        yield from _against_gather(ours, np.memmap(file.name, corpus.manifest.dtype, "r"))
    yield from _waiting(ours, step_s)


def _against_gather(ours: Loader, stream: npt.NDArray[np.integer]) -> Iterator[tuple[str, Any]]:
    rows, seq = ours.rows, ours.seq
    steps = min(ours.steps_per_epoch, 2000)
    order = Permutation(ours.windows, 0)(np.arange(steps * rows))

    def gather(step: int) -> None:
        starts = order[step * rows : (step + 1) * rows] * seq
        np.stack([stream[start : start + seq + 1] for start in starts]).astype(np.int64)

    times: dict[str, list[float]] = {"ours": [], "bare": []}
    for _ in range(5):  # in turn, so that a busy machine slows both
        for name, function in (("ours", ours.batch), ("bare", gather)):
            times[name].append(_seconds(function, steps))
    tokens = steps * rows * seq / 1e6
    yield (
        f"loader {rows} × {seq}, shuffled, hashed, M tokens/s (best of 5)",
        round(tokens / min(times["ours"])),
    )
    yield "bare permuted memmap gather, M tokens/s (best of 5)", round(tokens / min(times["bare"]))
    yield (
        "bare / loader, median",
        round(statistics.median(times["ours"]) / statistics.median(times["bare"]), 2),
    )


def _waiting(ours: Loader, step_s: float, steps: int = 40) -> Iterator[tuple[str, Any]]:
    waited = 0.0
    batches = prefetch(ours, 0, steps + 1, 0, 1)
    next(batches)
    for _ in range(steps):
        time.sleep(step_s)  # the training step
        start = time.perf_counter()
        next(batches)
        waited += time.perf_counter() - start
    batches.close()
    yield (
        f"waiting for a batch, share of a {step_s * 1000:.0f} ms step",
        f"{waited / steps / step_s:.2%}",
    )


def _seconds(function: Callable[[int], object], steps: int) -> float:
    start = time.perf_counter()
    for step in range(steps):
        function(step)
    return time.perf_counter() - start
