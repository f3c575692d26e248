"""Held-out loss on a fixed set of batches: the same tokens at every step, on any number of ranks.

This file also builds a run's loaders and cuts its batches, which training and evaluation share.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from pipeline.config.schema import RunConfig
from pipeline.data.corpus import Corpus
from pipeline.data.loader import Loader
from pipeline.objective.batch import Batch
from pipeline.parallel.engine import Micro
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
        # Sequences are shared by fewer ranks where there are fewer, as in `launch evaluate`.
        self._reader = world.reader(min(config.parallel.sp, world.size))
        # Bits per byte of raw text: tokens per byte of the split, and nats to bits.
        self._bits_per_nat_token = split.tokens / split.bytes / math.log(2)

    def __call__(self, nll: Callable[[Micro], Tensor]) -> dict[str, float]:
        """Nats per token, and bits per byte of the raw text, which compare across tokenizers."""
        total = torch.zeros((), device=self._world.device)
        count = 0
        for step in range(self._batches):
            batch = self._loader.batch(step, *self._reader)
            for micro in cut(batch, self._config, self._world):
                total += nll(micro)  # stays on the device: read once, at the end
                count += 1
        loss = self._world.sum([], first=total).item() / count / self._world.size
        return {"loss": loss, "bpb": loss * self._bits_per_nat_token}


def loader(config: RunConfig, corpus: Corpus, split: Literal["train", "valid"]) -> Loader:
    """Build the loader of a run's global batches for a split. Held-out data is never packed."""
    packing = config.data.packing
    boundaries = config.data.documents
    if split == "valid":
        # Best-fit packing keeps documents apart, so they are kept apart here as well.
        boundaries = boundaries or packing == "best-fit"
        packing = "concatenate"
    return Loader(
        corpus,
        split,
        seq=config.model.seq,
        rows=config.rows,
        seed=config.seed,
        packing=packing,
        boundaries=boundaries,
    )


def cut(batch: Batch, config: RunConfig, world: World) -> list[Micro]:
    """This rank's rows as micro-batches on its device; the copy does not wait for the device."""
    micro = config.train.micro_batch
    given = (batch.tokens_BS, batch.targets_BS, batch.documents_BS)
    rows = [t.to(world.device, non_blocking=True) for t in given if t is not None]
    return [Micro(*part) for part in zip(*(torch.split(t, micro) for t in rows), strict=True)]
