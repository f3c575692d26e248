"""Held-out loss on a fixed set of batches: the same tokens at every step, in every world."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.config.schema import RunConfig
from pipeline.data.loader import Loader
from pipeline.data.shards import Corpus
from pipeline.objective.batch import Batch
from pipeline.parallel.engine import Micro
from pipeline.parallel.world import World


class Evaluator:
    def __init__(self, config: RunConfig, corpus: Corpus, world: World, *, batches: int | None = None) -> None:
        assert isinstance(config.train.batch_tokens, int) and isinstance(config.train.micro_batch, int)
        rows = config.train.batch_tokens // config.model.seq
        split = corpus.manifest.splits["valid"]
        self._loader = Loader(
            corpus,
            "valid",
            seq=config.model.seq,
            rows=rows,
            seed=config.seed,
            boundaries=config.data.documents or config.data.packing == "best-fit",
        )
        self._batches = max(1, min(batches or config.train.eval_batches, self._loader.steps_per_epoch))
        self._micro, self._world = config.train.micro_batch, world
        self._reader = world.reader(min(config.parallel.sp, world.size))
        self._bits_per_nat_token = split.tokens / split.bytes / math.log(2)

    def __call__(self, nll: Callable[[Micro], Tensor]) -> dict[str, float]:
        """Nats per token and bits per byte of the raw text, which compares across tokenizers."""
        total, count = torch.zeros((), device=self._world.device), 0
        for step in range(self._batches):
            for micro in cut(self._loader.batch(step, *self._reader), self._micro, self._world):
                total += nll(micro)
                count += 1
        loss = self._world.sum([], first=total).item() / count / self._world.size
        return {"loss": loss, "bpb": loss * self._bits_per_nat_token}


def cut(batch: Batch, micro: int, world: World) -> list[Micro]:
    """This rank's rows as micro-batches on its device, copied without waiting."""
    given = (batch.tokens_BS, batch.targets_BS, batch.documents_BS)
    rows = [t.to(world.device, non_blocking=True) for t in given if t is not None]
    return [Micro(*part) for part in zip(*(torch.split(t, micro) for t in rows), strict=True)]
