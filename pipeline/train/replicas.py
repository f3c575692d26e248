"""Silent corruption: what should be the same on every rank, or from one step to the next, is hashed and compared.

Most of what a broken device does is no NaN. Copies of weights and reduced gradients must agree between ranks, and what
a rank holds must be after a forward and backward pass what it was before. The hashes are made on the device and
compared with one small collective; only a difference costs more.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.parallel.engine import Engine
from pipeline.parallel.world import World

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WHAT = ("weights", "gradients", "experts", "experts' gradients")


class DivergenceError(RuntimeError):
    """A rank holds other numbers than it should."""


class Look(NamedTuple):
    """On the device, of this rank."""

    flags: Tensor  # two, above zero where something is wrong: ranks differ, this rank's weights changed
    copies: Tensor  # hashes, as in _WHAT


class Replicas:
    def __init__(self, engine: Engine, world: World, ep: int) -> None:
        self._engine, self._world, self._ep = engine, world, ep
        self._after: Tensor | None = None  # hashes of the weights when the last step was done

    def remember(self, due: bool = True) -> None:
        """The step is done: until the next one nobody may write to the weights. Of use if the next look is due then."""
        self._after = self._weights() if due else None

    def look(self) -> Look:
        now, held = self._weights(), self._engine.local_tensors()
        gradients, others = (
            self._hash(held.gradient_copies),
            self._hash(held.expert_gradient_copies),
        )
        copies = torch.stack((now[0], gradients, now[1], others))
        differ = self._world.differ(copies[:2])
        if self._ep > 1:
            differ |= self._world.differ(copies[2:], every=self._ep)
        changed = differ.new_zeros(1) if self._after is None else now != self._after
        return Look(torch.stack((differ.any(), changed.any())).double(), copies)

    def blame(self, look: Look, step: int) -> DivergenceError:
        """Which rank, and what of it; every rank calls it with a look that found something."""
        seen = self._world.gather((bool(look.flags[1]), look.copies.tolist()))
        if restless := [rank for rank, (changed, _) in enumerate(seen) if changed]:
            return DivergenceError(
                f"step {step}: the weights of {_ranks(restless)} changed while none was to write"
            )
        for at, what in enumerate(_WHAT):
            every = 1 if at < 2 else self._ep
            for first in range(every):
                ranks = range(first, len(seen), every)
                (common, count), *others = Counter(
                    seen[rank][1][at] for rank in ranks
                ).most_common()
                if others and count > len(ranks) / 2:
                    odd = [rank for rank in ranks if seen[rank][1][at] != common]
                    return DivergenceError(
                        f"step {step}: the {what} of {_ranks(odd)} differ from those of all others"
                    )
                if others:
                    whose = (
                        f"the {what} of {_ranks(list(ranks))} differ, and no majority says whose"
                    )
                    return DivergenceError(f"step {step}: {whose} are right")
        raise AssertionError("nothing is wrong")

    def _weights(self) -> Tensor:
        held = self._engine.local_tensors()
        return torch.stack(
            [self._hash(held.copies), self._hash(held.expert_copies), self._hash(held.own)]
        )

    def _hash(self, tensors: Sequence[Tensor]) -> Tensor:
        if not tensors:
            return torch.zeros((), dtype=torch.int64, device=self._world.device)
        return fingerprint(tensors).to(
            self._world.device
        )  # from the host, where what was offloaded lies


def fingerprint(tensors: Sequence[Tensor]) -> Tensor:
    """One 64-bit number of all their bits, on their device; any single flipped bit changes it: a tensor's words are
    added up, which turns a flip into ± a power of two, and the sums are added with odd factors, mod 2^64."""
    words = (t.detach().reshape(-1).view(_WORDS[t.element_size()]) for t in tensors)
    sums = torch.stack([part.sum(dtype=torch.int64) for part in words])
    return (sums * torch.arange(1, 2 * len(sums), 2, device=sums.device)).sum()


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
