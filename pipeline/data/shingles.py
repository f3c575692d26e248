"""Hashes of all word n-grams of a text at once, in numpy: what dedup and decontamination compare.

A word is a run of ASCII letters, digits, underscores and bytes above 127, in lower case: punctuation and spacing do
not tell documents apart. The hash of bytes i…j-1 is a polynomial modulo 2**64; an odd base has an inverse, so that one
running sum gives every substring's hash by a subtraction (Karp & Rabin 1987), mixed afterwards.
"""

import numpy as np
import numpy.typing as npt

from pipeline.data.permute import U64, mix

_BASE = 0x5851F42D4C957F2D  # odd; Knuth's MMIX multiplier
_INVERSE = pow(_BASE, -1, 2**64)
_STEP = np.uint64(0xD6E8FEB86659FD93)

_WORD = np.zeros(256, bool)
_WORD[[*range(0x30, 0x3A), *range(0x41, 0x5B), *range(0x61, 0x7B), 0x5F, *range(0x80, 0x100)]] = True

BLOCK = 2**16  # bytes hashed at once, so that a long document takes no more memory than a short one


def _powers(factor: int) -> U64:
    table: npt.NDArray[np.uint64] = np.full(BLOCK + 1, factor, np.uint64)
    table[0] = 1
    return np.cumprod(table, dtype=np.uint64)


_BASES, _INVERSES = _powers(_BASE), _powers(_INVERSE)


def word_hashes(raw: bytes) -> U64:
    """One hash per word, in order; equal words have equal hashes on every machine."""
    raw, start, blocks = raw.lower(), 0, []
    while start == 0 or start < len(raw):
        stop = start + BLOCK
        if stop < len(raw):  # behind the last space; a word that is longer than a block is cut
            stop = 1 + max(raw.rfind(space, start, stop) for space in (b" ", b"\n")) or stop
        blocks.append(_block_hashes(raw[start:stop]))
        start = stop
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


def _block_hashes(raw: bytes) -> U64:
    codes = np.frombuffer(raw, np.uint8)
    inside = np.empty(len(codes) + 2, bool)
    inside[0] = inside[-1] = False
    inside[1:-1] = _WORD[codes]
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    starts, stops = edges[::2], edges[1::2]
    sums = np.zeros(len(codes) + 1, np.uint64)
    np.cumsum((codes.astype(np.uint64) + np.uint64(1)) * _INVERSES[: len(codes)], out=sums[1:])
    return mix((sums[stops] - sums[starts]) * _BASES[starts] + (stops - starts).astype(np.uint64))


def shingles(raw: bytes, n: int) -> U64:
    """Distinct hashes of n consecutive words; a shorter text is one shingle of all its words."""
    words = word_hashes(raw)
    if len(words) == 0:
        return words
    n = min(n, len(words))
    grams = np.zeros(len(words) - n + 1, np.uint64)
    for k in range(n):
        grams = grams * _STEP + words[k : k + len(grams)]
    return np.unique(mix(grams))
