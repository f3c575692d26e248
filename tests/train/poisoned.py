"""Workers with bad batches: `python -m tests.train.poisoned RUN_DIR RANKS STUCK BROKEN STEP…`. Whatever forward pass
sees a row that is rank 1's in one of these steps, of two ranks, gets NaN for it; in step STUCK it never ends, in step
BROKEN it fails."""

import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from pipeline.config.layers import reload
from pipeline.data.corpus import Corpus
from pipeline.data.loader import Loader
from pipeline.parallel.world import World
from pipeline.train import worker
from tests.worlds import fork

path, (ranks, stuck, broken, *steps) = Path(sys.argv[1]), [int(number) for number in sys.argv[2:]]
config = reload(path / "config.toml")
rows = config.train.batch_tokens // config.model.seq
loader = Loader(
    Corpus.open(Path(config.data.dir)), "train", seq=config.model.seq, rows=rows, seed=config.seed
)
bad = {
    row.numpy().tobytes(): step
    for step in (stuck, broken, *steps)
    for row in loader.batch(step - 1, 1, 2).tokens_BS
}


def poison(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
    if not isinstance(module, nn.Embedding):
        return None
    which = [bad.get(row.numpy().tobytes()) for row in inputs[0]]
    if stuck in which:
        time.sleep(600)
    if broken in which:
        raise MemoryError(f"no memory in step {broken}")
    struck = torch.tensor([step is not None for step in which])
    return torch.where(struck[:, None, None], torch.nan, output)


def work(_world: World) -> None:
    code = worker.main([str(path), "--quiet"])
    sys.stderr.flush()
    os._exit(code)


torch.set_num_threads(1)  # threads do not survive a fork
register_module_forward_hook(poison)
fork(ranks, work)
