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
_WHAT = ("weights", "gradients", "experts", "experts' gradients")


class DivergenceError(RuntimeError):
    """A rank holds other numbers than it should."""


class Replicas:
    def __init__(self, engine: Engine, world: World, ep: int) -> None:
        self._engine, self._world, self._ep = engine, world, ep
        self._after: Tensor | None = None  # hashes of the weights when the last step was done

    def remember(self, due: bool = True) -> None:
        """The step is done: until the next one nobody may write to the weights. Of use if the next look is due then."""
        self._after = self._weights() if due else None

    def look(self) -> Tensor:
        """Two flags on the device, above zero where something is wrong: ranks differ, this rank's weights changed."""
        self._now, held = self._weights(), self._engine.held()
        gradients, others = self._hash(held.gradients), self._hash(held.expert_gradients)
        self._copies = torch.stack((self._now[0], gradients, self._now[1], others))  # as in _WHAT
        differ = self._world.differ(self._copies[:2])
        if self._ep > 1:
            differ |= self._world.differ(self._copies[2:], every=self._ep)
        changed = differ.new_zeros(1) if self._after is None else self._now != self._after
        return torch.stack((differ.any(), changed.any())).double()

    def blame(self, step: int) -> DivergenceError:
        """Which rank, and what of it; every rank calls it after a look that found something."""
        changed = self._after is not None and bool((self._now != self._after).any())
        seen = self._world.gather((changed, self._copies.tolist()))
        if restless := [rank for rank, (changed, _) in enumerate(seen) if changed]:
            return DivergenceError(f"step {step}: the weights of {_ranks(restless)} changed while none was to write")
        for at, what in enumerate(_WHAT):
            every = 1 if at < 2 else self._ep
            for first in range(every):
                ranks = range(first, len(seen), every)
                (common, count), *others = Counter(seen[rank][1][at] for rank in ranks).most_common()
                if others and count > len(ranks) / 2:
                    odd = [rank for rank in ranks if seen[rank][1][at] != common]
                    return DivergenceError(f"step {step}: the {what} of {_ranks(odd)} differ from those of all others")
                if others:
                    whose = f"the {what} of {_ranks(list(ranks))} differ, and no majority says whose"
                    return DivergenceError(f"step {step}: {whose} are right")
        raise AssertionError("nothing is wrong")

    def _weights(self) -> Tensor:
        held = self._engine.held()
        return torch.stack([self._hash(held.everywhere), self._hash(held.experts), self._hash(held.here)])

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
