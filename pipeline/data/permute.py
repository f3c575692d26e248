"""A pseudo-random permutation of 0…n-1 that is computed, never stored: any slice of it costs only that slice."""

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

ROUNDS = 6  # four are enough in theory (Luby & Rackoff 1988), two more because the mix is not cryptographic


def mix(x: U64) -> U64:
    """SplitMix64's finaliser (Steele et al. 2014): every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Permutation:
    """A Feistel network over a × b ≥ n cells; results outside 0…n-1 walk on along their cycle (Black & Rogaway 2002).

    Mixed radix instead of powers of two: a·b exceeds n by less than 2√n, so that hardly any index has to walk.
    """

    def __init__(self, n: int, seed: int, epoch: int = 0) -> None:
        assert n > 0
        self.n = n
        self._a = max(1, int(np.ceil(np.sqrt(n))))
        self._b = -(-n // self._a)
        state = np.array([seed & (2**64 - 1), epoch & (2**64 - 1)], np.uint64)
        base = mix(mix(state[:1] + np.uint64(0x9E3779B97F4A7C15)) + state[1:])
        self._keys: U64 = mix(
            base + np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        )

    def __call__(self, index: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        out = self._feistel(index.astype(np.uint64))
        while (outside := out >= self.n).any():
            out[outside] = self._feistel(out[outside])
        return out.astype(np.int64)

    def _feistel(self, x: U64) -> U64:
        a, b = np.uint64(self._a), np.uint64(self._b)
        left, right = x // b, x % b
        for i, key in enumerate(self._keys):
            if i % 2:
                right = (right + mix(left + key) % b) % b
            else:
                left = (left + mix(right + key) % a) % a
        return left * b + right
