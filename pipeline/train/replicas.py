"""Silent corruption: what should be the same on every rank, or from one step to the next, is hashed and compared.

Most of what a broken device does is no NaN. Copies of weights and reduced gradients must agree between ranks, and what
a rank holds must be after a forward and backward pass what it was before. The hashes are made on the device and
compared with one small collective; only a difference costs more.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.parallel.engine import Engine
from pipeline.parallel.world import World

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WHAT = ("weights", "gradients")


class DivergenceError(RuntimeError):
    """A rank holds other numbers than it should."""


class Replicas:
    def __init__(self, engine: Engine, world: World) -> None:
        self._engine, self._world = engine, world
        self._after: Tensor | None = None  # hashes of the weights when the last step was done

    def remember(self, due: bool = True) -> None:
        """The step is done: until the next one nobody may write to the weights. Of use if the next look is due then."""
        self._after = self._weights() if due else None

    def look(self) -> Tensor:
        """Two flags on the device, above zero where something is wrong: ranks differ, this rank's weights changed."""
        self._now, self._gradients = self._weights(), self._hash(self._engine.held().gradients)
        differ = self._world.differ(torch.stack((self._now[0], self._gradients)))
        changed = torch.zeros_like(differ) if self._after is None else self._now != self._after
        return torch.stack((differ.any(), changed.any())).double()

    def blame(self, step: int) -> DivergenceError:
        """Which rank, and what of it; every rank calls it after a look that found something."""
        changed = self._after is not None and bool((self._now != self._after).any())
        seen = self._world.gather((changed, int(self._now[0]), int(self._gradients)))
        restless = [rank for rank, (changed, *_) in enumerate(seen) if changed]
        if restless:
            return DivergenceError(f"step {step}: the weights of {_ranks(restless)} changed while none was to write")
        for what, hashes in zip(_WHAT, list(zip(*seen, strict=True))[1:], strict=True):
            (common, count), *others = Counter(hashes).most_common()
            if others and count > len(seen) / 2:
                odd = [rank for rank, hash in enumerate(hashes) if hash != common]
                return DivergenceError(f"step {step}: the {what} of {_ranks(odd)} differ from those of all others")
            if others:
                return DivergenceError(f"step {step}: the {what} of the ranks differ, and no majority says whose")
        raise AssertionError("nothing is wrong")

    def _weights(self) -> Tensor:
        held = self._engine.held()
        return torch.stack([self._hash(held.everywhere), self._hash(held.here)])

    def _hash(self, tensors: Sequence[Tensor]) -> Tensor:
        found = fingerprint(tensors) if tensors else torch.zeros((), dtype=torch.int64)
        return found.to(self._world.device)  # from the host, where what was offloaded lies


def fingerprint(tensors: Sequence[Tensor]) -> Tensor:
    """One 64-bit number of all their bits, on their device; any single flipped bit changes it: a tensor's words are
    added up, which turns a flip into ± a power of two, and the sums are added with odd factors, mod 2^64."""
    words = (t.detach().reshape(-1).view(_WORDS[t.element_size()]) for t in tensors)
    sums = torch.stack([part.sum(dtype=torch.int64) for part in words])
    return (sums * torch.arange(1, 2 * len(sums), 2, device=sums.device)).sum()


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
