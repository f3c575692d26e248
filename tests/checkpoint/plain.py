"""The smallest engine: a few tensors under torch's AdamW. Every number identifies its step."""

import torch
from torch import nn

from pipeline.config.layers import load
from pipeline.parallel import fragments
from pipeline.parallel.fragments import Fragment, Piece
from pipeline.planner.recipe import fill

KINDS = {"model": 0.0, "exp_avg": 0.25, "exp_avg_sq": 0.5}


def small_config():
    spec = load(size="tiny", arch="dense", sets=["model.vocab=64", "model.seq=8"])
    return fill(spec, ranks=1, gpu=False)


class Plain:
    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        self._parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        self.optimizer = torch.optim.AdamW(self._parameters)

    def state(self, *, share: bool = False) -> list[Fragment]:
        pieces = [Piece(f"p{i}", p, p, 0, 0, p.numel()) for i, p in enumerate(self._parameters)]
        fragments.create_moments(pieces, self.optimizer)
        return list(fragments.state(pieces, self.optimizer, share=share))

    def sync_weights(self) -> None:
        pass

    def stamp(self, step: int) -> None:
        # Without gradients this changes nothing, but waits for a save that copies the state.
        self.optimizer.step()
        for fragment in self.state():
            fragment.data.fill_(step + KINDS[fragment.key.split("/")[0]])
        fragments.set_steps(self.optimizer, step)

    def step(self) -> int:
        """Return the step that all numbers belong to."""
        values = [fragment.data - KINDS[fragment.key.split("/")[0]] for fragment in self.state()]
        (step,) = torch.cat(values).unique().tolist()
        assert step == fragments.steps(self.optimizer)
        return int(step)
