"""Compare the speed of the data stage with other programs, in the same run and on the same text."""

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from pipeline.data.corpus import Corpus
from pipeline.data.corpus_recipe import MB, Malformed, Recipe, load_recipe
from pipeline.data.loader import Loader, prefetch
from pipeline.data.order import Permutation
from pipeline.data.prepare import prepare
from pipeline.data.ray_pool import cluster
from pipeline.data.readers import read
from pipeline.data.sources import plan
from pipeline.data.tokenizer import Tokenizer, train_on
from pipeline.errors import DataError
from pipeline.process import python_module

Figures = Iterator[tuple[str, Any]]
ROUNDS = 5  # runs of each side, in turn
FILES = 8  # files of text


@dataclass(frozen=True, slots=True)
class Setup:
    """Text to convert, and the tokenizer to convert it with."""

    folder: Path
    model: Path
    paths: list[Path]  # JSONL
    size_mb: float

    def prepare(self, paths: Sequence[Path], config: str | None = None) -> float:
        """Return the seconds that our data stage takes for some files."""
        tokenizer = Tokenizer.open(self.model)
        # A finished tokenizer: training one is not part of the measured time.
        given = {"sources": tuple(map(str, paths)), "vocab_size": tokenizer.vocab}
        recipe = load_recipe(config, given | {"tokenizer": tokenizer.fingerprint})
        with tempfile.TemporaryDirectory(dir=self.folder) as out:
            began = time.perf_counter()
            # Two workers, as every other program here has.
            prepare(recipe, Path(out), model=tokenizer.model, workers=2)
            return time.perf_counter() - began

    def peer(self, name: str, out: str) -> Any:
        """Return the measurements of another program on all files."""
        return _peer(name, self.model, self.folder / out, *self.paths)


def measure_data_stage(megabytes: int, *, datatrove: bool, tenfold: bool) -> Figures:
    """Yield the name and the value of each figure as it is measured."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = Recipe(sources=("python",), limit_bytes=megabytes * MB, vocab_size=32768)
        tasks = plan(recipe.sources, limit_bytes=recipe.limit_bytes, seed=0)
        documents = (text for task in tasks for piece in task for text in read(piece, ("text",)))
        texts = [text for text in documents if not isinstance(text, Malformed)]
        size_mb = sum(len(text.encode()) for text in texts) / 1e6
        yield "text, MB", round(size_mb, 1)
        # The python corpus may be smaller than asked for; repeat it in other word orders.
        times = max(1, round(megabytes / size_mb))
        yield "text in the comparisons of pipelines, MB", round(times * size_mb, 1)
        model = folder / "t.model"
        model.write_bytes(train_on(tasks, recipe))
        # A sample is enough: sentencepiece is 6 to 10 times slower than ours (docs/LOG.md).
        yield from _encoding(model, *_write(folder / "encode", texts[::FILES], 1))
        paths = _write(folder / "text", _shuffled(texts, 1, 1 + times), FILES)
        setup = Setup(folder, model, paths, times * size_mb)
        began = time.perf_counter()
        with cluster(2):
            yield "Ray start-up, s", round(time.perf_counter() - began, 1)
            yield from _end_to_end(setup, datatrove)
            if tenfold:
                more = _shuffled(texts, 1 + times, 1 + 11 * times)
                yield from _tenfold(setup, _write(folder / "often", more, FILES))
            yield "peak memory of a worker, MiB", _peak_bytes() // MB


def _write(folder: Path, texts: Iterable[str], files: int) -> list[Path]:
    folder.mkdir()
    paths = [folder / f"{i}.jsonl" for i in range(files)]
    with ExitStack() as stack:
        handles = [stack.enter_context(path.open("w")) for path in paths]
        for text, file in zip(texts, cycle(handles), strict=False):
            file.write(json.dumps({"text": text}) + "\n")
    return paths


def _shuffled(texts: list[str], first: int, end: int) -> Iterator[str]:
    """Yield the texts with their words in several orders, so that none is a near-duplicate. Order n
    has every n-th word from each offset: the same words and bytes, but other n-grams."""
    for step in range(first, end):
        for text in texts:
            words = text.split(" ")
            yield " ".join(word for begin in range(step) for word in words[begin::step])


def _encoding(model: Path, path: Path) -> Figures:
    size_mb = sum(len(json.loads(line)["text"].encode()) for line in path.open()) / 1e6
    theirs_s, expected = _peer("encode", model, path, "sentencepiece")
    ours_s, found = _peer("encode", model, path, "ours")
    yield "encode, one core, first pass: sentencepiece, MB/s", round(size_mb / theirs_s, 2)
    yield "encode, one core, first pass: ours, MB/s", round(size_mb / ours_s, 2)
    yield "encode: ours / sentencepiece", round(theirs_s / ours_s, 2)
    yield "encode: ids equal", expected == found


def _end_to_end(setup: Setup, datatrove: bool) -> Figures:
    """Compare medians of alternating runs, so that other load slows both sides."""
    plain = []
    ours = []
    for number in range(ROUNDS):
        plain.append(_measured(lambda: float(setup.peer("plain_pool", "plain"))))
        ours.append(_measured(lambda: setup.prepare(setup.paths)))
        # datasets.map caches its result, so it runs once, in the middle.
        if number == ROUNDS // 2:
            to_file_s, to_arrow_s = setup.peer("datasets_map", "cache")
    wall_s, cpu_s = np.median(ours, axis=0)
    wall_ratio, cpu_ratio = np.median(plain, axis=0) / (wall_s, cpu_s)
    yield "jsonl → shards, ours, 2 workers, MB/s", round(setup.size_mb / wall_s, 2)
    yield "jsonl → shards, ours, CPU s", round(cpu_s, 2)
    yield "jsonl → shards: ours / plain processes", round(wall_ratio, 2)
    yield "jsonl → shards: ours / plain processes, by CPU s", round(cpu_ratio, 2)
    yield "jsonl → shards: ours / datasets.map to a file of tokens", round(to_file_s / wall_s, 2)
    yield "jsonl → shards: ours / datasets.map that ends at Arrow", round(to_arrow_s / wall_s, 2)
    # configs/data/code.toml adds quality filters and MinHash deduplication.
    full_s = setup.prepare(setup.paths, "code")
    speed = round(setup.size_mb / full_s, 2)
    yield "jsonl → shards, ours with filters and near-dedup, MB/s", speed
    if datatrove:
        plain_s, minhash_s = setup.peer("datatrove", "datatrove")
        yield "jsonl → shards: ours / datatrove", round(plain_s / wall_s, 2)
        yield "with filters and near-dedup: ours / datatrove", round(minhash_s / full_s, 2)


def _tenfold(setup: Setup, often: list[Path]) -> Figures:
    # A stage of linear time takes at most 10 times as long, because its start-up time is constant.
    for suffix, config in (("", None), (" with filters and near-dedup", "code")):
        once = [_measured(partial(setup.prepare, setup.paths, config)) for _ in range(3)]
        tenfold = np.array(_measured(partial(setup.prepare, often, config)))
        wall, cpu = tenfold / np.median(once, axis=0)
        yield f"10 × the text{suffix}: × the time", round(wall, 2)
        yield f"10 × the text{suffix}: × the CPU s", round(cpu, 2)


def _measured(action: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds that an action returns, and its CPU seconds."""
    os.sync()  # earlier writes reach the disk before, not during the measurement
    before = _cpu_s()
    seconds = action()
    return seconds, _cpu_s() - before


def _processes() -> list[psutil.Process]:
    """Return this process and those of Ray."""
    return [psutil.Process(), *psutil.Process().children(recursive=True)]


def _cpu_s() -> float:
    """Return the CPU seconds of all processes, including children that have ended."""
    seconds = 0.0
    for process in _processes():
        with suppress(psutil.NoSuchProcess):  # a worker may end in between
            # User and system time, then the same of ended children. The fifth, iowait, is not CPU.
            seconds += sum(process.cpu_times()[:4])
    return seconds


def _peak_bytes() -> int:
    """Return the largest peak memory of a Ray worker. VmHWM is in KiB."""
    largest = 0
    for process in _processes():
        with suppress(psutil.NoSuchProcess, FileNotFoundError):  # a worker may end in between
            if process.name().startswith("ray::"):
                state = Path(f"/proc/{process.pid}/status").read_text()
                largest = max(largest, int(state.partition("VmHWM:")[2].split()[0]) * 1024)
    return largest


def _peer(name: str, *arguments: str | Path) -> Any:
    """Run one of the `data_programs`; return the JSON that it prints last."""
    command = python_module("pipeline.bench.peers.data_programs", name, *arguments)
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1]
        raise DataError(f"{name} failed: {last}; see --help for the packages it needs")
    # Libraries print to stdout as well, so only the last line is the result.
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure_loader(corpus: Corpus, rows: int, seq: int) -> Figures:
    """Compare our loader, on files in memory, with a plain permuted gather of the same bytes."""
    ours = Loader(corpus, "train", seq=seq, rows=rows, seed=0)
    if rows > ours.windows:
        raise DataError(f"rows={rows:,} is more than the {ours.windows:,} of the corpus; lower it")
    # One mapped file, as a loader without shards would read.
    with tempfile.NamedTemporaryFile() as file:
        for shard in corpus.split("train").shards:
            file.write(corpus.tokens(shard).tobytes())
        file.flush()
        yield from _against_gather(ours, np.memmap(file.name, corpus.manifest.dtype, "r"))
    yield from _waiting(ours, step_s=0.05, steps=40)


def _against_gather(ours: Loader, stream: npt.NDArray[np.integer]) -> Figures:
    rows = ours.rows
    seq = ours.seq
    steps = min(ours.steps_per_epoch, 2000)  # a few seconds
    order = Permutation(ours.windows, 0)(np.arange(steps * rows))

    def gather(step: int) -> None:
        starts = order[step * rows : (step + 1) * rows] * seq
        # int64, as the embedding needs it.
        np.stack([stream[start : start + seq + 1] for start in starts]).astype(np.int64)

    own_s = []
    plain_s = []
    for _ in range(5):  # in turn, so that other load slows both
        own_s.append(_seconds(ours.batch, steps))
        plain_s.append(_seconds(gather, steps))
    tokens = steps * rows * seq / 1e6
    # Speeds are from the fastest round, because other load only ever slows a round down.
    speed = round(tokens / min(own_s))
    yield f"loader {rows} × {seq}, shuffled, hashed, M tokens/s (best of 5)", speed
    yield "bare permuted memmap gather, M tokens/s (best of 5)", round(tokens / min(plain_s))
    ratio = statistics.median(own_s) / statistics.median(plain_s)
    yield "bare / loader, median", round(ratio, 2)


def _waiting(ours: Loader, step_s: float, steps: int) -> Figures:
    waited_s = 0.0
    batches = prefetch(ours, 0, steps + 1, 0, 1)  # rank 0 of 1
    next(batches)  # the first batch starts the thread
    for _ in range(steps):
        time.sleep(step_s)  # in place of a training step
        waited_s += _seconds(lambda _step: next(batches), 1)
    batches.close()
    share = f"{waited_s / steps / step_s:.2%}"
    yield f"waiting for a batch, share of a {step_s * 1000:.0f} ms step", share


def _seconds(function: Callable[[int], object], steps: int) -> float:
    began = time.perf_counter()
    for step in range(steps):
        function(step)
    return time.perf_counter() - began
