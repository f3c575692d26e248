"""A pseudo-random permutation of 0 … n-1 that is computed, not stored: a slice costs only itself.

This file stands alone because loader, mixture, synthetic corpus and dedup share it, and only the
loader may import torch.
"""

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, as in SplitMix64
# Four rounds suffice in theory (Luby & Rackoff 1988); two more as the mix is not cryptographic.
ROUNDS = 6


def mix(x: U64) -> U64:
    """SplitMix64's finalizer (Steele et al. 2014): every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Permutation:
    """A Feistel network over a × b ≥ n cells.

    A result outside 0 … n-1 is permuted again until it is inside (cycle walking, Black & Rogaway
    2002). Mixed radix instead of powers of two: a·b exceeds n by less than 2√n, so hardly any
    index has to walk.
    """

    def __init__(self, n: int, seed: int, epoch: int = 0) -> None:
        assert n > 0
        self.n = n
        self._a = max(1, int(np.ceil(np.sqrt(n))))
        self._b = -(-n // self._a)
        # Python's integers may be negative or longer than 64 bits.
        state = np.array([seed & (2**64 - 1), epoch & (2**64 - 1)], np.uint64)
        base = mix(mix(state[:1] + np.uint64(GOLDEN)) + state[1:])
        rounds = np.arange(1, ROUNDS + 1, dtype=np.uint64)
        self._keys: U64 = mix(base + rounds * np.uint64(GOLDEN))

    def __call__(self, index: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
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
