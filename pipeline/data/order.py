"""The order in which a run reads its corpus: a computed permutation, and sources drawn by weight.

The weights are the table in GPT-3's paper (2.2). Samples come in blocks. Every block has the same
number of places for each source, in a new order, so that the number of earlier samples of a source
is a multiplication: there is no state to save.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pipeline.data.shards import SourceShare
from pipeline.errors import ConfigError
from pipeline.objective.draws import F64, I64, U64, Draws, mix

if TYPE_CHECKING:  # training needs no recipe
    from pipeline.data.corpus_recipe import Mixture

SHARDS_TOGETHER = 8  # shards of packed rows that are shuffled, and kept by a reader, together
BLOCK = 4096  # samples; weights are rounded to 1/4096
# Four rounds suffice in theory (Luby & Rackoff 1988); two more as the mix is not cryptographic.
ROUNDS = 6


class Permutation:
    """A pseudo-random permutation of 0 … n-1, computed, not stored: a slice costs only itself.

    A Feistel network over a × b ≥ n cells. A result outside 0 … n-1 is permuted again until it is
    inside (cycle walking, Black & Rogaway 2002). Mixed radix instead of powers of two: a·b exceeds
    n by less than 2√n, so hardly any index has to walk.
    """

    def __init__(self, n: int, seed: int, epoch: int = 0) -> None:
        assert n > 0
        self.n = n
        self._a = max(1, int(np.ceil(np.sqrt(n))))
        self._b = -(-n // self._a)
        self._keys = Draws(seed, epoch).bits(ROUNDS)

    def __call__(self, index: I64) -> I64:
        out = self._feistel(index.astype(np.uint64))
        while (outside := out >= self.n).any():
            out[outside] = self._feistel(out[outside])
        return out.astype(np.int64)

    def _feistel(self, x: U64) -> U64:
        a = np.uint64(self._a)
        b = np.uint64(self._b)
        left = x // b
        right = x % b
        for i, key in enumerate(self._keys):
            if i % 2:
                right = (right + mix(left + key) % b) % b
            else:
                left = (left + mix(right + key) % a) % a
        return left * b + right


class ShardRows:
    """Rows that are packed shard by shard, numbered over all shards.

    A shard is packed when one of its rows is first read. An epoch visits a few shards at a time, in
    its own order, so that each shard is packed once per epoch and memory stays constant.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = np.array(counts, np.int64)  # rows of each shard
        self._starts = np.cumsum([0, *counts])
        self.windows = int(self._starts[-1])

    def place(self, window: int) -> tuple[int, int]:
        """Return the shard of a row, and its number there."""
        shard = int(np.searchsorted(self._starts, window, "right")) - 1
        return shard, window - int(self._starts[shard])

    def order(self, index: I64, seed: int, epoch: int) -> I64:
        """Return the rows at these positions of the epoch's order."""
        count = len(self._counts)
        shards = Permutation(count, seed, epoch)(np.arange(count))
        ends = np.cumsum(self._counts[shards])  # in the order of this epoch
        last_shards = np.minimum(np.arange(0, count, SHARDS_TOGETHER) + SHARDS_TOGETHER, count) - 1
        group_ends = ends[last_shards]
        groups = np.searchsorted(group_ends, index, "right")
        found = np.empty_like(index)
        for group in np.unique(groups).tolist():
            low = int(group_ends[group - 1]) if group else 0
            mine = groups == group
            shuffle = Permutation(int(group_ends[group]) - low, seed + group, epoch)
            place = low + shuffle(index[mine] - low)
            at = np.searchsorted(ends, place, "right")
            shard = shards[at]
            found[mine] = self._starts[shard] + place - (ends[at] - self._counts[shard])
        return found


# Mixtures


def mixed(sources: Sequence[SourceShare], mixture: "Mixture | None") -> tuple[SourceShare, ...]:
    """Return the sources with their final weights, caps applied, and their epochs."""
    if mixture is None:
        return tuple(sources)
    check_mixture(mixture, [source.name for source in sources])
    for source in sources:
        if source.tokens == 0:
            text = f"mixture.weights: source={source.name!r} has no tokens left"
            raise ConfigError(f"{text}; remove it or its filters")
    weights = np.array([mixture.weights[source.name] for source in sources])
    weights /= weights.sum()
    most = np.full(len(sources), BLOCK)  # without a cap
    if mixture.tokens is not None and mixture.most_epochs is not None:
        most = _most_places(sources, mixture.tokens, mixture.most_epochs)
        weights = capped(weights, most / BLOCK)
    counts = places(weights, most)
    result = []
    for source, count in zip(sources, counts.tolist(), strict=True):
        share = count / BLOCK
        epochs = round(share * mixture.tokens / source.tokens, 4) if mixture.tokens else None
        result.append(source.model_copy(update={"weight": share, "epochs": epochs}))
    return tuple(result)


def check_mixture(mixture: "Mixture | None", names: Sequence[str]) -> None:
    """Check the mixture as far as possible before tokens are counted."""
    if mixture is None:
        return
    unmatched = set(mixture.weights) ^ set(names)
    if unmatched:
        text = f"mixture.weights: {', '.join(sorted(unmatched))} must be in weights and in sources"
        raise ConfigError(f"{text}; give one weight per source")
    if mixture.most_epochs is not None and mixture.tokens is None:
        raise ConfigError(f"mixture.most_epochs={mixture.most_epochs} needs mixture.tokens")
    least = sum(mixture.weights.values()) / BLOCK
    for name, weight in mixture.weights.items():
        if weight < least / 2:  # it would be rounded up by more than a factor of two
            raise ConfigError(
                f"mixture.weights: source={name!r} has weight {weight:g}, below 1/{BLOCK} of the "
                f"sum; give it {least:.2g} or remove it"
            )


def _most_places(sources: Sequence[SourceShare], tokens: int, epochs: float) -> I64:
    """Return how many places of a block each source may have."""
    limits = np.array([source.tokens * epochs / tokens for source in sources])
    most: I64 = np.floor(limits * BLOCK).astype(np.int64)
    if most.sum() < BLOCK:
        # Each source's places are rounded down, hence the extra len(sources).
        enough = int(tokens * limits.sum() * BLOCK / (BLOCK + len(sources)))
        raise ConfigError(
            f"mixture.most_epochs={epochs:g}: all sources together have {most.sum() / BLOCK:.2%} "
            f"of mixture.tokens={tokens:,}; lower it to {enough:,}, raise the cap or add data"
        )
    if (most < 1).any():
        least = sources[int(np.argmin(limits))]
        raise ConfigError(
            f"mixture.most_epochs={epochs:g}: source={least.name!r} with {least.tokens:,} tokens "
            f"exceeds it even with 1/{BLOCK} of the batches; remove it, or lower "
            f"mixture.tokens={tokens:,} to {int(least.tokens * epochs * BLOCK):,}"
        )
    return most


def capped(weights: F64, limits: F64) -> F64:
    """Cap the weights; the other sources get the rest in proportion."""
    fixed = np.zeros(len(weights), bool)
    while True:
        free = np.where(fixed, 0, weights)
        result = np.where(fixed, limits, free * (1 - limits[fixed].sum()) / max(free.sum(), 1e-300))
        over = ~fixed & (result > limits)
        if not over.any():  # a cap raises the others, which may then exceed theirs
            return result
        fixed |= over


def places(weights: F64, most: I64) -> I64:
    """Return the samples of each source in a block: at least one, at most its limit.

    The places left over by rounding down go to the sources with the largest remainders."""
    exact = weights * (BLOCK - len(weights))  # one place per source is reserved
    counts = np.minimum(1 + np.floor(exact).astype(np.int64), most)
    for _ in range(BLOCK - counts.sum()):
        counts[np.argmax(np.where(counts < most, exact - counts, -np.inf))] += 1
    return counts


class Schedule:
    """The source of each sample, and the number of earlier samples of that source."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self._counts = np.round(np.array(weights) * BLOCK).astype(np.int64)
        assert self._counts.sum() == BLOCK, "weights come from mixed(), in whole places"
        # One entry per place of a block: its source.
        self._slots = np.repeat(np.arange(len(weights)), self._counts)
        self._seed = seed

    def block(self, number: int) -> tuple[I64, I64]:
        """Return the source of each sample of a block, and its number within that source."""
        slots = self._slots[Permutation(BLOCK, self._seed, number)(np.arange(BLOCK))]
        order = np.argsort(slots, kind="stable")  # the places of each source, in order
        first = np.repeat(np.cumsum(self._counts) - self._counts, self._counts)
        within = np.empty(BLOCK, np.int64)
        within[order] = np.arange(BLOCK) - first
        return slots, number * self._counts[slots] + within
