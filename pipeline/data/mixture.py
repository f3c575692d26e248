"""Sources drawn by weight: the table that GPT-3's paper prints (2.2), and the order that follows from it.

Samples come in blocks. In every block each source has the same number of places, shuffled anew, so that how many
samples of a source came before any other is a multiplication: nothing to count, nothing to save.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pipeline.data.permute import Permutation
from pipeline.data.recipe import Mixture
from pipeline.data.shards import SourceShare
from pipeline.errors import ConfigError

BLOCK = 4096  # samples; weights are rounded to 1/4096


def mixed(sources: Sequence[SourceShare], mixture: Mixture | None) -> tuple[SourceShare, ...]:
    """Sources with their final weights, caps applied, and the epochs they will see."""
    if mixture is None:
        return tuple(sources)
    names = [source.name for source in sources]
    check(mixture, names)
    if empty := [source.name for source in sources if source.tokens == 0]:
        raise ConfigError(
            f"mixture.weights: source={empty[0]!r} has no tokens left to draw; remove it or its filters"
        )
    weights = np.array([mixture.weights[name] for name in names])
    weights /= weights.sum()
    if mixture.tokens is not None and mixture.most_epochs is not None:
        most = _most(sources, mixture.tokens, mixture.most_epochs)
        counts = below(places(capped(weights, most / BLOCK)), most)
    else:
        counts = places(weights)
    shares = counts / BLOCK
    return tuple(
        source.model_copy(
            update={"weight": float(share), "epochs": _epochs(source, float(share), mixture.tokens)}
        )
        for source, share in zip(sources, shares, strict=True)
    )


def check(mixture: Mixture | None, names: Sequence[str]) -> None:
    """What can be told before a token is counted."""
    if mixture is None:
        return
    if unknown := set(mixture.weights) ^ set(names):
        raise ConfigError(
            f"mixture.weights: {', '.join(sorted(unknown))} without its match; give one weight per source"
        )
    if mixture.most_epochs is not None and mixture.tokens is None:
        raise ConfigError(
            f"mixture.most_epochs={mixture.most_epochs} needs mixture.tokens, the training budget"
        )
    least = sum(mixture.weights.values()) / BLOCK
    for name, weight in mixture.weights.items():
        if weight < least / 2:
            raise ConfigError(
                f"mixture.weights: source={name!r} weighs {weight:g}, the least that is drawn is 1/{BLOCK} of all; "
                f"give it {least:.2g} or remove it"
            )


def _epochs(source: SourceShare, share: float, tokens: int | None) -> float | None:
    return round(share * tokens / source.tokens, 4) if tokens else None


def _most(sources: Sequence[SourceShare], tokens: int, epochs: float) -> npt.NDArray[np.int64]:
    """Places in a block that each source may have, and not one more."""
    limits = np.array([source.tokens * epochs / tokens for source in sources])
    most: npt.NDArray[np.int64] = np.floor(limits * BLOCK).astype(np.int64)
    if most.sum() < BLOCK:
        enough = int(tokens * limits.sum() * BLOCK / (BLOCK + len(sources)))  # each is rounded down
        raise ConfigError(
            f"mixture.most_epochs={epochs:g}: all sources together last for {most.sum() / BLOCK:.2%} of "
            f"mixture.tokens={tokens:,}; lower it to {enough:,}, raise the cap or add data"
        )
    if (most < 1).any():
        least = sources[int(np.argmin(limits))]
        raise ConfigError(
            f"mixture.most_epochs={epochs:g}: source={least.name!r}, {least.tokens:,} tokens, would pass it with the "
            f"fewest batches it can have, 1/{BLOCK}; remove it, or lower mixture.tokens={tokens:,} to "
            f"{int(least.tokens * epochs * BLOCK):,}"
        )
    return most


def capped(
    weights: npt.NDArray[np.float64], limits: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Weights with none above its limit; what a capped source gives up goes to the rest in proportion."""
    fixed = np.zeros(len(weights), bool)
    while True:
        free = np.where(fixed, 0, weights)
        result = np.where(fixed, limits, free * (1 - limits[fixed].sum()) / max(free.sum(), 1e-300))
        over = ~fixed & (result > limits)
        if not over.any():
            return result
        fixed |= over


def places(weights: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Samples of each source in a block, by largest remainder, at least one each."""
    exact = weights * (BLOCK - len(weights))
    counts = np.floor(exact).astype(np.int64)
    for i in np.argsort(counts - exact, kind="stable")[: BLOCK - len(weights) - counts.sum()]:
        counts[i] += 1
    return counts + 1


def below(counts: npt.NDArray[np.int64], most: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Places that rounding put above a limit go to where most are left."""
    over = np.maximum(counts - most, 0)
    counts = counts - over
    for _ in range(over.sum()):
        counts[np.argmax(most - counts)] += 1
    return counts


class Schedule:
    """Which source each sample is drawn from, and how many of that source came before it."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self._counts = np.round(np.array(weights) * BLOCK).astype(np.int64)
        assert self._counts.sum() == BLOCK, "weights come from mixed(), in whole places"
        self._slots = np.repeat(np.arange(len(weights)), self._counts)
        self._seed = seed

    def block(self, number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Sources of the block's samples, and each one's number among all samples of its source."""
        slots = self._slots[Permutation(BLOCK, self._seed, number)(np.arange(BLOCK))]
        order = np.argsort(slots, kind="stable")
        within = np.empty(BLOCK, np.int64)
        within[order] = np.arange(BLOCK) - np.repeat(
            np.cumsum(self._counts) - self._counts, self._counts
        )
        return slots, number * self._counts[slots] + within
