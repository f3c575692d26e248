"""Silent corruption: numbers that should be equal on several ranks, or over time, are compared.

Most of what a broken device does is no NaN. Copies of weights and of reduced gradients must agree
between ranks, and the weights of a rank must not change during a forward and backward pass. Hashes
are computed on the device and compared with one small collective. Only a difference costs more.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.parallel.engine import Engine
from pipeline.parallel.world import World

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# the copies, in the order of Look.copies; the first two are equal on all ranks, the others on
# every ep-th rank
_COPIES = ("weights", "gradients", "experts", "experts' gradients")
_ON_ALL_RANKS = 2


class DivergenceError(RuntimeError):
    """A rank holds other numbers than it should."""


class Look(NamedTuple):
    """One comparison, on the device of this rank."""

    flags: Tensor  # two numbers above zero if: ranks differ, this rank's weights have changed
    copies: Tensor  # hashes, as in _COPIES


class Replicas:
    def __init__(self, engine: Engine, world: World, ep: int) -> None:
        self._engine = engine
        self._world = world
        self._ep = ep
        self._weights_after_step: Tensor | None = None  # hashes

    def remember(self, needed: bool = True) -> None:
        """Hash the weights after a step: nothing may write to them until the next `look`.

        Without `needed`, forget them: the next look is not due before the next step.
        """
        self._weights_after_step = self._hash_weights() if needed else None

    def look(self) -> Look:
        """Compare; called by every rank, between the backward pass and the step."""
        tensors = self._engine.local_tensors()
        weights = self._hash_weights()
        gradients = self._hash(tensors.gradient_copies)
        expert_gradients = self._hash(tensors.expert_gradient_copies)
        copies = torch.stack((weights[0], gradients, weights[1], expert_gradients))
        # Enqueued like the rest of the step: nothing here waits for the device.
        differ = self._world.differ(copies[:_ON_ALL_RANKS])
        if self._ep > 1:
            differ |= self._world.differ(copies[_ON_ALL_RANKS:], every=self._ep)
        if self._weights_after_step is None:
            changed = differ.new_zeros(1)
        else:
            changed = weights != self._weights_after_step
        return Look(torch.stack((differ.any(), changed.any())).double(), copies)

    def blame(self, look: Look, step: int) -> DivergenceError:
        """Name the rank that is wrong; called by every rank, with a look that found something."""
        changed_here = bool(look.flags[1])
        seen = self._world.gather((changed_here, look.copies.tolist()))
        changed = [rank for rank, (has_changed, _) in enumerate(seen) if has_changed]
        if changed:  # first: a rank whose memory changes also differs from the others
            return DivergenceError(
                f"step {step}: the weights of {_ranks(changed)} changed while none was to write"
            )
        for index, what in enumerate(_COPIES):
            every = 1 if index < _ON_ALL_RANKS else self._ep
            for first in range(every):
                ranks = range(first, len(seen), every)
                hashes = {rank: seen[rank][1][index] for rank in ranks}
                (common, count), *others = Counter(hashes.values()).most_common()
                if not others:
                    continue
                if count <= len(ranks) / 2:
                    return DivergenceError(
                        f"step {step}: the {what} of {_ranks(list(ranks))} differ, and no majority "
                        "says whose are right"
                    )
                odd = [rank for rank in ranks if hashes[rank] != common]
                return DivergenceError(
                    f"step {step}: the {what} of {_ranks(odd)} differ from those of all others"
                )
        raise AssertionError("nothing is wrong")

    def _hash_weights(self) -> Tensor:
        """Hashes of the weights on all ranks, of shared experts, and of this rank's own."""
        tensors = self._engine.local_tensors()
        return torch.stack(
            [self._hash(tensors.copies), self._hash(tensors.expert_copies), self._hash(tensors.own)]
        )

    def _hash(self, tensors: Sequence[Tensor]) -> Tensor:
        if not tensors:
            return torch.zeros((), dtype=torch.int64, device=self._world.device)
        return fingerprint(tensors).to(self._world.device)  # offloaded tensors are on the host


def fingerprint(tensors: Sequence[Tensor]) -> Tensor:
    """One 64-bit number of all their bits, on their device; any single flipped bit changes it.

    The words of a tensor are added up, which turns a flipped bit into ± a power of two. The sums
    are added with odd factors, modulo 2^64.
    """
    words = (t.detach().reshape(-1).view(_WORDS[t.element_size()]) for t in tensors)
    sums = torch.stack([part.sum(dtype=torch.int64) for part in words])
    return (sums * torch.arange(1, 2 * len(sums), 2, device=sums.device)).sum()


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
