"""A trained model that scores and generates, in this process or in one process per device."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, TypeVar

import torch

from pipeline.checkpoint.restore import load_model, run_config
from pipeline.errors import RunError
from pipeline.model.decode import generate
from pipeline.tasks.likelihood import Likelihood, Pair, scorer

T = TypeVar("T")
Prompt = Sequence[int]
GENERATED_AT_ONCE = 32  # prompts


class Model:
    """The model of a run on one device, in the usual precision of training there.

    It returns the likelihoods of answers, and greedy continuations of prompts, both in order."""

    def __init__(self, run: Path, device: torch.device) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._model, config = load_model(run, dtype=dtype, device=device)
        self.longest = config.model.longest  # tokens that the model reads at once
        self.score = scorer(
            self._model,
            self.longest,
            config.model.vocab,
            device,
            whole_contexts=config.objective.whole_prompts,
        )

    def generate(self, prompts: Sequence[Prompt], most: int, end: int) -> list[list[int]]:
        found: list[list[int]] = []
        for at in range(0, len(prompts), GENERATED_AT_ONCE):
            found += generate(self._model, prompts[at : at + GENERATED_AT_ONCE], most, end)
        return found


class Pool:
    """The same model in several processes, which share the work."""

    def __init__(self, workers: ProcessPoolExecutor, processes: int, longest: int) -> None:
        self._workers = workers
        self._processes = processes
        self.longest = longest

    def score(self, pairs: Sequence[Pair]) -> list[Likelihood]:
        return self._share(_score, pairs)

    def generate(self, prompts: Sequence[Prompt], most: int, end: int) -> list[list[int]]:
        return self._share(partial(_generate, most=most, end=end), prompts)

    def _share(self, work: Callable[[Sequence[Any]], list[T]], items: Sequence[Any]) -> list[T]:
        """Give each process every n-th item, because neighbors have similar lengths."""
        count = self._processes
        shares = [items[index::count] for index in range(count)]
        out: list[Any] = [None] * len(items)
        # The first call starts the processes, which inherit the mask until `_prepare`: Ctrl-C would
        # end their imports with a traceback of each process.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            results = self._workers.map(work, shares)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            for index, found in enumerate(results):
                out[index::count] = found
        except BrokenProcessPool:
            raise RunError(
                "a worker process died, probably because memory ran out; lower --nproc"
            ) from None
        return out


Reader = Model | Pool


@contextmanager
def open_model(run: Path, processes: int) -> Iterator[Reader]:
    """Open a run's model in this many processes, each on its own GPU if there are GPUs."""
    stack = run_config(run).model.stack
    if stack != "decoder":
        raise RunError(f'--run {run} has model.stack="{stack}"; tasks need a decoder; give one')
    if processes == 1:
        yield Model(run, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        return
    context = get_context("spawn")  # CUDA does not survive a fork
    next_number = context.Value("i", 0)
    threads = max(1, (os.cpu_count() or 1) // processes)
    workers = ProcessPoolExecutor(
        processes, context, initializer=_prepare, initargs=(run, next_number, threads)
    )
    with workers:
        try:
            yield Pool(workers, processes, run_config(run).model.longest)
        except KeyboardInterrupt:
            for process in active_children():  # do not wait until they have finished their work
                process.kill()
            raise


_model: Callable[[], Model]  # returns the model of a worker process


def _prepare(run: Path, next_number: Any, threads: int) -> None:
    """Choose the device. The model is loaded with the first work, which can return an error."""
    global _model
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C prints no traceback of each process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with next_number.get_lock():
        number = next_number.value
        next_number.value += 1
    torch.set_num_threads(threads)
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", number % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)  # Triton uses the current device
    _model = cache(partial(Model, run, device))


def _score(pairs: Sequence[Pair]) -> list[Likelihood]:
    return _model().score(pairs)


def _generate(prompts: Sequence[Prompt], most: int, end: int) -> list[list[int]]:
    return _model().generate(prompts, most, end)
