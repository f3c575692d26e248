"""Hashes of all word n-grams of a text at once, in numpy: what dedup and decontamination compare.

A word is a run of letters, marks, digits and underscores, in lower case: punctuation, symbols and spacing do not tell
documents apart. In scripts without spaces between words each character is one. The hash of characters i…j-1 is a
polynomial modulo 2**64; an odd base has an inverse, so that one running sum gives every substring's hash by a
subtraction (Karp & Rabin 1987), mixed afterwards.
"""

import unicodedata
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pipeline.data.permute import U64, mix

_BASE = 0x5851F42D4C957F2D  # odd; Knuth's MMIX multiplier
_INVERSE = pow(_BASE, -1, 2**64)
_STEP = np.uint64(0xD6E8FEB86659FD93)

_WORD = np.zeros(256, bool)
_WORD[[*range(0x30, 0x3A), *range(0x41, 0x5B), *range(0x61, 0x7B), 0x5F]] = True

_BETWEEN, _INSIDE, _ALONE = (
    0,
    1,
    2,
)  # what a character is: no part of a word, of one with its neighbours, a word
_UNSPACED = (
    (0x0E00, 0x0F00),  # Thai, Lao
    (0x1000, 0x10A0),  # Myanmar
    (0x1780, 0x1800),  # Khmer
    (0x1950, 0x1AB0),  # Tai Le, New Tai Lue, Tai Tham
    (0x1B00, 0x1B80),  # Balinese
    (0x3005, 0x3008),  # ideographic iteration, closing and zero
    (0x3040, 0x3130),  # kana, bopomofo
    (0x31A0, 0x3200),
    (0x3400, 0xA4D0),  # ideographs, Yi
    (0xA980, 0xAAE0),  # Javanese, Myanmar, Tai Viet
    (0xF900, 0xFB00),  # ideographs, for compatibility
    (0xFF66, 0xFFA0),  # kana of half a width
    (0x16FE0, 0x18D80),  # Tangut, Khitan
    (0x1AFF0, 0x1B300),  # older kana, Nushu
)
_IDEOGRAPHS = 0x20000  # from here on there is nothing else

BLOCK = 2**16  # bytes hashed at once, so that a long document takes no more memory than a short one


def _powers(factor: int) -> U64:
    table: npt.NDArray[np.uint64] = np.full(BLOCK + 1, factor, np.uint64)
    table[0] = 1
    return np.cumprod(table, dtype=np.uint64)


_BASES, _INVERSES = _powers(_BASE), _powers(_INVERSE)


def word_hashes(raw: bytes) -> U64:
    """One hash per word of a text in UTF-8, in order; equal words have equal hashes on every machine."""
    start, blocks = 0, []
    while start == 0 or start < len(raw):
        stop = start + BLOCK
        if stop < len(raw):  # behind the last space; a word that is longer than a block is cut
            stop = 1 + max(raw.rfind(space, start, stop) for space in (b" ", b"\n")) or stop
            while raw[stop] & 0xC0 == 0x80:  # inside a character
                stop -= 1
        blocks.append(_block_hashes(raw[start:stop]))
        start = stop
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


def _block_hashes(raw: bytes) -> U64:
    codes: npt.NDArray[np.integer]
    if raw.isascii():
        codes = np.frombuffer(raw.lower(), np.uint8)
        inside = np.empty(len(codes) + 2, bool)
        inside[0] = inside[-1] = False
        inside[1:-1] = _WORD[codes]
        edges = np.flatnonzero(inside[1:] != inside[:-1])
        starts, stops = edges[::2], edges[1::2]
    else:  # of code points, so that a word of ASCII has the same hash as above
        codes = np.frombuffer(raw.decode().lower().encode("utf-32-le"), "<u4")
        kinds = np.zeros(len(codes) + 2, np.uint8)
        kinds[1:-1] = _kinds()[np.minimum(codes, _IDEOGRAPHS)]
        edges = np.flatnonzero((kinds[1:] != kinds[:-1]) | (kinds[1:] == _ALONE))
        words = kinds[1:][edges] != _BETWEEN
        starts, stops = edges[words], edges[1:][words[:-1]]
    sums = np.zeros(len(codes) + 1, np.uint64)
    np.cumsum((codes.astype(np.uint64) + np.uint64(1)) * _INVERSES[: len(codes)], out=sums[1:])
    return mix((sums[stops] - sums[starts]) * _BASES[starts] + (stops - starts).astype(np.uint64))


@lru_cache(1)
def _kinds() -> npt.NDArray[np.uint8]:
    """By code point."""
    kinds = np.array(
        [unicodedata.category(chr(code))[0] in "LMN" for code in range(_IDEOGRAPHS + 1)], np.uint8
    )
    kinds[ord("_")] = _INSIDE
    for start, stop in _UNSPACED:
        kinds[start:stop] *= _ALONE
    kinds[_IDEOGRAPHS] = _ALONE
    return kinds


def shingles(raw: bytes, n: int) -> U64:
    """Distinct hashes of n consecutive words; a shorter text is one shingle of all its words."""
    words = word_hashes(raw)
    return ngrams(words, min(n, len(words)))


def ngrams(words: U64, n: int) -> U64:
    """Distinct hashes of n consecutive words, sorted; of fewer words none."""
    grams = np.zeros(max(0, len(words) - n + 1) if n else 0, np.uint64)
    for k in range(n):
        grams = grams * _STEP + words[k : k + len(grams)]
    return np.unique(mix(grams))
