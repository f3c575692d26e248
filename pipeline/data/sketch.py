"""The first pass of dedup, one task: filter every document and write a small sketch of the rest.

Dedup and decontamination compare hashes of word n-grams. A word is a run of letters, marks, digits
and underscores in lower case: punctuation, symbols and spacing make no difference. In scripts
without spaces between words, each character is a word. The hash of characters i … j-1 is a
polynomial modulo 2**64; its base is odd and so has an inverse, and one running sum gives the hash
of every substring by a subtraction (Karp & Rabin 1987).

A sketch is a few arrays, sorted by key, so that a later step reads only its own range of keys. It
has several parts: a compressed file is one task of any length, and must not take more memory.
"""

import unicodedata
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from pipeline.atomic import sync_directory
from pipeline.config.parts import Frozen
from pipeline.data.clean import Batch, Document, Ledger, before_dedup
from pipeline.data.corpus_recipe import MB, Malformed, Near, Recipe, Task
from pipeline.data.shards import Stage, save
from pipeline.objective.draws import U64, mix

BOTTOM = 512  # smallest shingle hashes per document: exact Jaccard up to that many, ±0.02 beyond
PART_BYTES = 128 * MB  # of sketches in memory; sorting takes as much again
OBJECT_BYTES = 128  # overhead of a Python object beside its numbers
SHINGLE_BLOCK = 2048  # shingles hashed at once, ...
TEXT_BLOCK = 2**16  # ... and bytes of text: a long document takes no more memory than a short one

EXACT = np.dtype([("key", "u8"), ("check", "u8"), ("document", "u4")])
BAND = np.dtype([("key", "u8"), ("document", "u4")])

_BASE = 0x5851F42D4C957F2D  # odd; Knuth's MMIX multiplier
_STEP = np.uint64(0xD6E8FEB86659FD93)

# Classes of characters: not part of a word, part of a word, a word by itself.
_BETWEEN = 0
_INSIDE = 1
_ALONE = 2
_ASCII_WORD = np.zeros(256, bool)
_ASCII_WORD[[*range(0x30, 0x3A), *range(0x41, 0x5B), *range(0x61, 0x7B), 0x5F]] = True
_UNSPACED = (
    (0x0E00, 0x0F00),  # Thai, Lao
    (0x1000, 0x10A0),  # Myanmar
    (0x1780, 0x1800),  # Khmer
    (0x1950, 0x1AB0),  # Tai Le, New Tai Lue, Tai Tham
    (0x1B00, 0x1B80),  # Balinese
    (0x3005, 0x3008),  # ideographic iteration and closing marks, zero
    (0x3040, 0x3130),  # kana, bopomofo
    (0x31A0, 0x3200),  # bopomofo, strokes, kana
    (0x3400, 0xA4D0),  # ideographs, Yi
    (0xA980, 0xAAE0),  # Javanese, Myanmar, Tai Viet
    (0xF900, 0xFB00),  # compatibility ideographs
    (0xFF66, 0xFFA0),  # half-width kana
    (0x16FE0, 0x18D80),  # Tangut, Khitan
    (0x1AFF0, 0x1B300),  # older kana, Nushu
)
_IDEOGRAPHS = 0x20000  # all code points from here on are ideographs


def _powers(factor: int) -> U64:
    table: U64 = np.full(TEXT_BLOCK + 1, factor, np.uint64)
    table[0] = 1
    return np.cumprod(table, dtype=np.uint64)


_BASES = _powers(_BASE)
_INVERSES = _powers(pow(_BASE, -1, 2**64))


# Word n-grams


def word_hashes(raw: bytes) -> U64:
    """Hash each word of a UTF-8 text, in order; equal words have equal hashes on every machine."""
    start = 0
    blocks = []
    while start == 0 or start < len(raw):
        stop = start + TEXT_BLOCK
        if stop < len(raw):
            # Cut behind the last space. A word that is longer than a block is cut.
            space = max(raw.rfind(b" ", start, stop), raw.rfind(b"\n", start, stop))
            stop = space + 1 if space >= 0 else stop
            while raw[stop] & 0xC0 == 0x80:  # inside a character
                stop -= 1
        blocks.append(_block_hashes(raw[start:stop]))
        start = stop
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


def _block_hashes(raw: bytes) -> U64:
    codes: npt.NDArray[np.integer]
    if raw.isascii():
        codes = np.frombuffer(raw.lower(), np.uint8)
        inside = np.zeros(len(codes) + 2, bool)
        inside[1:-1] = _ASCII_WORD[codes]
        edges = np.flatnonzero(inside[1:] != inside[:-1])
        starts = edges[::2]
        stops = edges[1::2]
    else:
        # Hash code points, so that an ASCII word has the same hash as above.
        codes = np.frombuffer(raw.decode().lower().encode("utf-32-le"), "<u4")
        classes = np.zeros(len(codes) + 2, np.uint8)
        classes[1:-1] = _character_classes()[np.minimum(codes, _IDEOGRAPHS)]
        edges = np.flatnonzero((classes[1:] != classes[:-1]) | (classes[1:] == _ALONE))
        words = classes[1:][edges] != _BETWEEN
        starts = edges[words]
        stops = edges[1:][words[:-1]]
    sums = np.zeros(len(codes) + 1, np.uint64)
    np.cumsum((codes.astype(np.uint64) + np.uint64(1)) * _INVERSES[: len(codes)], out=sums[1:])
    return mix((sums[stops] - sums[starts]) * _BASES[starts] + (stops - starts).astype(np.uint64))


@lru_cache(1)
def _character_classes() -> npt.NDArray[np.uint8]:
    """Return the class of every code point up to the first of the last ideographs."""
    categories = (unicodedata.category(chr(code)) for code in range(_IDEOGRAPHS + 1))
    classes = np.array([category[0] in "LMN" for category in categories], np.uint8)
    classes[ord("_")] = _INSIDE
    for start, stop in _UNSPACED:
        classes[start:stop] *= _ALONE
    classes[_IDEOGRAPHS] = _ALONE
    return classes


def shingles(raw: bytes, n: int) -> U64:
    """Return the n-grams of a text; a shorter text is one shingle of all its words."""
    words = word_hashes(raw)
    return ngrams(words, min(n, len(words)))


def ngrams(words: U64, n: int) -> U64:
    """Return the distinct hashes of n consecutive words, sorted; none if there are fewer words."""
    grams = np.zeros(max(0, len(words) - n + 1) if n else 0, np.uint64)
    for k in range(n):
        grams = grams * _STEP + words[k : k + len(grams)]
    return np.unique(mix(grams))


def decontaminated(batch: Batch, held_out: Mapping[int, U64], ledger: Ledger) -> Batch:
    """Drop documents that share n words in a row with held-out text. held_out: n → n-grams."""

    def overlap(document: Document) -> str | None:
        words = word_hashes(document.raw)
        for n, known in held_out.items():
            grams = ngrams(words, n)
            at = np.searchsorted(known, grams)
            at[at == len(known)] = 0
            if (known[at] == grams).any():
                return "overlap"
        return None

    return ledger.sift("decontaminate", batch, overlap)


# Sketches


class Sketched(Frozen):
    """The record of a finished sketch."""

    stages: tuple[Stage, ...]  # up to the copies within the task
    malformed: Malformed | None  # the first
    parts: int


def part_of(stem: Path, number: int) -> Path:
    return stem.with_name(f"{stem.name}-{number}")


def sketch(task: Task, stem: Path, recipe: Recipe) -> Sketched:
    """Write the parts of the sketch, then the record."""
    ledger = Ledger()
    part = _Part()
    parts = 0
    for batch in before_dedup(task, recipe, ledger):
        if part.bytes > PART_BYTES:
            part.save(part_of(stem, parts))
            part = _Part()
            parts += 1
        for document in part.unique(batch, ledger) if recipe.dedup.exact else batch:
            part.add(document, recipe.dedup.near)
    part.save(part_of(stem, parts))
    sync_directory(stem.parent)
    stages = ledger.stages()
    record = Sketched(stages=stages, malformed=ledger.first_malformed, parts=parts + 1)
    save(stem.with_suffix(".done.json"), record.model_dump_json().encode(), flush_name=False)
    return record


class _Part:
    """Sketches of consecutive documents, until they are written."""

    def __init__(self) -> None:
        self.bytes = 0  # estimated memory
        self._digests: dict[bytes, None] = {}  # empty if exact dedup is off
        self._items: list[int] = []  # number of the document in its task
        self._sizes: list[int] = []  # bytes of text
        self._bands: list[U64] = []
        self._bottoms: list[npt.NDArray[np.uint32]] = []

    def unique(self, batch: Batch, ledger: Ledger) -> Batch:
        """Drop copies within the part, so that a million copies are not a bucket of a million rows.

        The remaining documents are counted when all tasks are compared.
        """
        fresh = []
        for document in batch:
            digest = xxhash.xxh3_128_digest(document.raw)
            if digest in self._digests:
                ledger.drop("dedup", "exact", 1, len(document.raw))
            else:
                self._digests[digest] = None
                fresh.append(document)
        return fresh

    def add(self, document: Document, near: Near | None) -> None:
        self._items.append(document.item)
        self._sizes.append(len(document.raw))
        self.bytes += OBJECT_BYTES
        if near:
            grams = shingles(document.raw, near.ngram)
            self._bands.append(band_keys(grams, near))
            self._bottoms.append(bottom(grams))
            self.bytes += 2 * OBJECT_BYTES + self._bands[-1].nbytes + self._bottoms[-1].nbytes

    def save(self, stem: Path) -> None:
        """Write STEM.items, .sizes, .exact, .bands, .bottom and .ends."""
        pairs = np.frombuffer(b"".join(self._digests), "<u8").reshape(-1, 2)
        exact = np.zeros(len(pairs), EXACT)
        exact["key"] = pairs[:, 0]
        exact["check"] = pairs[:, 1]
        exact["document"] = np.arange(len(exact))
        bands = np.zeros(sum(map(len, self._bands)), BAND)
        if len(bands):
            lengths = [len(keys) for keys in self._bands]
            bands["key"] = np.concatenate(self._bands)
            bands["document"] = np.repeat(np.arange(len(self._items)), lengths)
        arrays: dict[str, npt.NDArray[Any]] = {
            "items": np.array(self._items, np.uint32),
            "sizes": np.array(self._sizes, np.uint64),
            "exact": np.sort(exact, order=["key", "check", "document"]),
            "bands": np.sort(bands, order=["key", "document"]),
            "bottom": np.concatenate([*self._bottoms, np.zeros(0, np.uint32)]),
            "ends": np.cumsum([0, *map(len, self._bottoms)], dtype=np.int64),
        }
        for suffix, array in arrays.items():
            save(stem.with_suffix(f".{suffix}.npy"), array, flush_name=False)


def band_keys(grams: U64, near: Near) -> U64:
    """Return one key per band of the MinHash signature.

    MinHash: Broder 1997. Bands: Leskovec, Rajaraman & Ullman, Mining of Massive Datasets, ch. 3.
    """
    if len(grams) == 0:
        return grams
    factor, offset, salt = _constants(near.bands, near.rows)
    smallest = np.full(len(factor), 2**64 - 1, np.uint64)
    for start in range(0, len(grams), SHINGLE_BLOCK):
        hashed = np.multiply.outer(grams[start : start + SHINGLE_BLOCK], factor)
        hashed += offset
        np.minimum(smallest, hashed.min(axis=0), out=smallest)
    # The low bits of a product modulo 2**64 are the weak ones, so only the high half is used.
    rows = (smallest >> np.uint64(32)).reshape(near.bands, near.rows)
    return mix((rows * factor[: near.rows]).sum(axis=1, dtype=np.uint64) + salt)


@lru_cache(4)
def _constants(bands: int, rows: int) -> tuple[U64, U64, U64]:
    size = bands * rows
    factor, offset = mix(np.arange(1, 2 * size + 1, dtype=np.uint64)).reshape(2, size)
    salt = mix(np.arange(bands, dtype=np.uint64) + np.uint64(2 * size))
    return factor | np.uint64(1), offset, salt


def bottom(grams: U64) -> npt.NDArray[np.uint32]:
    """Return the smallest distinct hashes of sorted grams, 32 bits of each."""
    return np.unique((grams[:BOTTOM] >> np.uint64(32)).astype(np.uint32))


def similarity(a: npt.NDArray[np.uint32], b: npt.NDArray[np.uint32]) -> float:
    """Estimate the Jaccard similarity over the range of hashes that both sketches cover."""
    reach = min(int(x[-1]) if len(x) >= BOTTOM - 1 else 2**32 for x in (a, b))
    a = a[a <= reach]
    b = b[b <= reach]
    shared = len(np.intersect1d(a, b, assume_unique=True))
    return shared / max(1, len(a) + len(b) - shared)
