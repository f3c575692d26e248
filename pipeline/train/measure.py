"""Measurements during training: the held-out loss, time, speed and memory.

The held-out batches are fixed: the same tokens at every step, on any number of ranks. This file
also builds a run's loaders and cuts its batches, which training and evaluation share.

B rows · C classes, or one number
"""

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.config.layers import CONFIGS, read_toml
from pipeline.config.schema import Cluster, RunConfig
from pipeline.data.corpus import Corpus
from pipeline.data.loader import Loader
from pipeline.data.pairs import PairRows
from pipeline.model.head import IGNORED, Losses
from pipeline.objective.batch import Batch, Micro
from pipeline.objective.example import Vocabulary
from pipeline.objective.noise import make_noise
from pipeline.parallel.world import World


class Evaluator:
    def __init__(
        self, config: RunConfig, corpus: Corpus, world: World, *, batches: int | None = None
    ) -> None:
        split = corpus.manifest.splits["valid"]
        self._config = config
        self._world = world
        self._loader = loader(config, corpus, "valid")
        wanted = batches or config.train.eval_batches
        self._batches = max(1, min(wanted, self._loader.steps_per_epoch))
        # `launch evaluate` has one rank, so fewer ranks may share a sequence than in training.
        self._reader = world.reader(min(config.parallel.sp, world.size))
        # Converts nats per token to bits per byte of raw text.
        self._bits_per_nat_token = split.tokens / split.bytes / math.log(2)

    def __call__(self, evaluate: Callable[[Micro], Losses]) -> dict[str, float]:
        """Return the loss in nats per predicted token, and of running text the bits per byte, which
        do not depend on the tokenizer. Of labels, return the loss per row and the scores."""
        if self._config.objective.examples:
            return self._evaluate_examples(evaluate)
        total = torch.zeros((), device=self._world.device)
        count = 0
        for micro in self.micros():
            total += evaluate(micro).nll  # stays on the device: read once, at the end
            count += 1
        loss = self._world.sum(total).item() / count / self._world.size
        if not self._config.objective.whole_text:
            return {"loss": loss}
        return {"loss": loss, "bpb": loss * self._bits_per_nat_token}

    def micros(self) -> Iterator[Micro]:
        """This rank's held-out rows."""
        for step in range(self._batches):
            batch = self._loader.batch(step, *self._reader)
            yield from cut(batch, self._config, self._world)

    def _evaluate_examples(self, evaluate: Callable[[Micro], Losses]) -> dict[str, float]:
        """Average labels over rows, and answers over tokens. Rows that only fill a batch have no
        label and no answer, and do not count."""
        sums: list[Tensor] = []
        for micro in self.micros():
            losses = evaluate(micro)
            if micro.labels_B is not None and losses.rows_BC is not None:
                sums.append(label_sums(micro.labels_B, losses.rows_BC))
            else:
                assert micro.counts_B is not None
                tokens = micro.counts_B.double().sum()
                sums.append(torch.stack((tokens, losses.nll * tokens)))
        total = self._world.sum(torch.stack(sums).sum(0))
        if len(total) > 2:
            return label_figures(total)
        return {"loss": (total[1] / total[0]).item()}


def loader(config: RunConfig, corpus: Corpus, split: Literal["train", "valid"]) -> Loader:
    """Build the loader of a run's global batches for a split. Held-out data is never packed."""
    packing = config.data.packing
    boundaries = config.data.documents
    if split == "valid":
        # Best-fit packing keeps documents apart, so they are kept apart here as well.
        boundaries = boundaries or packing == "best-fit"
        packing = "concatenate"
    corpus.check_pairs(config.objective)
    if config.objective.examples:
        corpus.check_rows(config.text_length)
    tokenizer = corpus.manifest.tokenizer
    return Loader(
        corpus,
        split,
        seq=config.text_length,
        rows=config.rows,
        seed=config.seed,
        packing=packing,
        boundaries=boundaries,
        noise=make_noise(
            config.objective, Vocabulary(tokenizer.vocab, tokenizer.eod), config.model.source_seq
        ),
        pairs=PairRows.of(config),
        objective=config.objective,
    )


def cut(batch: Batch, config: RunConfig, world: World) -> list[Micro]:
    """This rank's rows as micro-batches on its device; the copy does not wait for the device."""
    inputs = batch.inputs
    rows = [t.to(world.device, non_blocking=True) for t in inputs.values()]
    parts = zip(*(torch.split(t, config.train.micro_batch) for t in rows), strict=True)
    return [Micro(**dict(zip(inputs, part, strict=True))) for part in parts]


# Scores of labels: accuracy, or squared error and correlation


def label_sums(labels_B: Tensor, rows_BC: Tensor) -> Tensor:
    """Return sums over the rows with a label, which can be added over micro-batches and ranks.

    For classes: rows, loss and right predictions. For numbers: rows, loss, and the first and second
    moments of prediction and label."""
    if not labels_B.is_floating_point():
        loss = F.cross_entropy(rows_BC.double(), labels_B, ignore_index=IGNORED, reduction="sum")
        right_B = rows_BC.argmax(-1) == labels_B  # false for rows without a label
        return torch.stack(((labels_B >= 0).sum(), loss, right_B.sum()))
    labeled_B = ~labels_B.isnan()
    guess_B = rows_BC[:, 0].double() * labeled_B
    label_B = labels_B.double().nan_to_num()
    products = (guess_B * guess_B, label_B * label_B, guess_B * label_B)
    error_B = (guess_B - label_B).square()
    parts = (labeled_B.double(), error_B, guess_B, label_B, *products)
    return torch.stack([part.sum() for part in parts])


def label_figures(sums: Tensor) -> dict[str, float]:
    """Return the figures of an evaluation, from `label_sums` of all rows."""
    rows, loss, *rest = sums.tolist()
    if len(rest) == 1:
        return {"loss": loss / rows, "labels/accuracy": rest[0] / rows}
    guess, label, guess_2, label_2, both = (each / rows for each in rest)
    # Rounding can make a variance slightly negative; without variance there is no correlation.
    spread = math.sqrt(max(0.0, guess_2 - guess**2) * max(0.0, label_2 - label**2))
    correlation = (both - guess * label) / spread if spread > 0 else 0.0
    return {"loss": loss / rows, "labels/correlation": correlation}


# Time, speed and memory


class DeviceTime:
    """The time at which the device has finished everything launched so far.

    On a CPU that is now. On a GPU it is known only after `wait`.
    """

    def __init__(self, device: torch.device) -> None:
        self._event = None
        self._host_s = time.perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: "DeviceTime") -> float:
        """Seconds from an earlier time; both must have been reached."""
        if self._event is None:
            return self._host_s - earlier._host_s
        return float(earlier._event.elapsed_time(self._event)) / 1e3  # type: ignore[union-attr]


class Speed(NamedTuple):
    seconds: float  # duration of the step, including idle time before it
    idle_s: float  # idle time of the device before the step
    tokens_per_s: float
    mfu: float | None  # model FLOPs utilization; None if the peak of the device is unknown


@dataclass
class Meter:
    """Measures the speed of training steps, without evaluations and checkpoints."""

    tokens_per_step: int
    flops_per_token: int
    peak_flops: float | None  # of all ranks together
    device: torch.device

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Do not count the time since the last step."""
        self._last = DeviceTime(self.device)

    def step(self, began: DeviceTime, ended: DeviceTime) -> Speed:
        seconds = max(ended.since(self._last), 1e-9)
        idle_s = began.since(self._last)
        self._last = ended
        tokens_per_s = self.tokens_per_step / seconds
        mfu = None
        if self.peak_flops is not None:
            mfu = tokens_per_s * self.flops_per_token / self.peak_flops
        return Speed(seconds, idle_s, tokens_per_s, mfu)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def peak_flops(cluster: Cluster, device: torch.device) -> float | None:
    """Peak FLOP/s of one device; None if it is unknown, since a guess would give a wrong MFU.

    A configured cluster gives the peak of its own devices. Without one, the peak comes from the
    shipped cluster file that names this device.
    """
    name = device_name(device)
    if cluster.peak_flops is not None:
        return cluster.peak_flops if cluster.has(name) else None
    for path in sorted((CONFIGS / "cluster").glob("*.toml")):
        table = read_toml(path)["cluster"]
        if "device" in table and table["device"] in name:
            return float(table["peak_flops"])
    return None


def peak_memory_bytes() -> float:
    """The most memory that this rank has used so far: of its GPU, or of the process on a CPU."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(most if sys.platform == "darwin" else most * 1024)  # Linux counts in KiB
