"""Random numbers as a pure function of a key: no state to save, the same on any number of ranks."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, as in SplitMix64
_WORD = 2**64 - 1  # reduces Python's integers, which may be negative or longer, to 64 bits


def mix(x: U64) -> U64:
    """SplitMix64's finalizer (Steele et al. 2014): every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def mix_one(x: int) -> int:
    """Like `mix`, for a Python integer. An array with one element would take ten times as long."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


class Draws:
    """The random numbers of one row: SplitMix64, started by the seed and the row's number.

    A numpy generator takes longer to create than a row, and may change with the version."""

    def __init__(self, seed: int, number: int) -> None:
        self.number = number
        first = mix_one((seed + GOLDEN) & _WORD)
        self._base: np.uint64 | U64 = np.uint64(mix_one((first + number) & _WORD))
        self.drawn = 0  # numbers drawn so far

    @classmethod
    def together(cls, rows: "Sequence[Draws]") -> "Draws":
        """Return the joint draws of rows that have drawn equally often. Results have one dimension
        more, the rows, and each row gets the numbers that it would draw by itself."""
        joint = cls(0, rows[0].number)
        joint._base = np.array([row._base for row in rows])[:, None]
        joint.drawn = rows[0].drawn
        return joint

    def bits(self, count: int) -> U64:
        """Draw 64-bit numbers."""
        first = self.drawn + 1
        self.drawn += count
        numbers = np.arange(first, first + count, dtype=np.uint64)
        return mix(self._base + numbers * np.uint64(GOLDEN))

    def shares(self, count: int) -> F64:
        """Draw uniform numbers in [0, 1)."""
        high_bits = (self.bits(count) >> np.uint64(11)).astype(np.float64)
        return high_bits * 2.0**-53

    def below(self, limit: int, count: int) -> I64:
        """Draw uniform integers in [0, limit). The remainder's bias is below limit / 2^64."""
        return (self.bits(count) % np.uint64(limit)).astype(np.int64)

    def choice(self, among: I64, count: int) -> I64:
        """Choose distinct elements, in no particular order; all of them if there are too few."""
        size = among.shape[-1]
        if count >= size:
            return np.broadcast_to(among, (*np.shape(self._base)[:-1], size))
        chosen = np.argpartition(self.bits(size), count)[..., :count]
        return among[chosen] if among.ndim == 1 else np.take_along_axis(among, chosen, -1)
