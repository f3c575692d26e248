"""The stages before deduplication: read → normalise → filter, on batches of documents.

Stages do not depend on the program that runs them. The sketch pass and the encode pass chain them
within one task, and a ledger counts what each stage reads, keeps and drops. The filters are the
rules of Gopher and C4 and a score function of the user.
"""

import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from importlib import import_module
from itertools import chain
from typing import BinaryIO, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from pipeline.data.corpus_recipe import (
    C4,
    MB,
    PAIR,
    Filters,
    Malformed,
    Normalize,
    Quality,
    Recipe,
    Repetition,
    Score,
    Task,
)
from pipeline.data.readers import read
from pipeline.data.shards import Stage
from pipeline.errors import ConfigError, DataError
from pipeline.objective.draws import I64, U64

BATCH_DOCUMENTS = 1024  # at most, and about a megabyte of text

STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})  # Gopher's
_BULLETS = ("•", "-", "*", "‣", "◦")
_PARAGRAPHS = re.compile(r"\n{2,}")
_SENTENCE_ENDS = (".", "!", "?", '"', "”", "'", "’")

# All control characters but \t, \n, \r and U+0085, which is a line end.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f-\x84\x86-\x9f]")
# Bounded repetitions: an unbounded pattern takes quadratic time on long runs of letters.
_EMAIL = re.compile(r"\b[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63})+\b")
_BYTE = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
_IPV4 = re.compile(rf"(?<![\w.])(?:{_BYTE}\.){{3}}{_BYTE}(?![\w.])")


class Document(NamedTuple):
    item: int  # number of the document in its task, where malformed documents count too
    text: str
    raw: bytes  # the text in UTF-8


Batch = list[Document]


class Ledger:
    """Count documents and bytes per stage, and list malformed documents in a file."""

    def __init__(self, malformed_file: BinaryIO | None = None) -> None:
        # Stage → reason → documents, their bytes, and bytes after a stage that changes the text.
        # Documents that are kept have the reason "".
        self._counts: dict[str, dict[str, I64]] = defaultdict(lambda: defaultdict(_zeros))
        self._malformed_file = malformed_file
        self.first_malformed: Malformed | None = None

    def keep(self, stage: str, documents: int, bytes_in: int, bytes_kept: int) -> None:
        self._counts[stage][""] += (documents, bytes_in, bytes_kept)

    def drop(self, stage: str, reason: str, documents: int, size: int) -> None:
        self._counts[stage][reason] += (documents, size, 0)

    def report(self, found: Malformed) -> None:
        self.drop("read", "malformed", 1, found.bytes)
        self.first_malformed = self.first_malformed or found
        if self._malformed_file:
            line = {"path": found.path, "position": found.position, "reason": found.reason}
            self._malformed_file.write(json.dumps(line).encode() + b"\n")

    def sift(self, stage: str, batch: Batch, reason: Callable[[Document], str | None]) -> Batch:
        """Return the documents for which `reason` returns None, and count all of them."""
        kept = []
        for document in batch:
            why = reason(document)
            if why:
                self.drop(stage, why, 1, len(document.raw))
            else:
                kept.append(document)
        size = sum(len(document.raw) for document in kept)
        self.keep(stage, len(kept), size, size)
        return kept

    def stages(self) -> tuple[Stage, ...]:
        stages = []
        for name, counts in self._counts.items():
            kept, _, bytes_kept = counts[""].tolist()
            documents_in, bytes_in, _ = sum(counts.values(), _zeros()).tolist()
            dropped = {why: tuple(n[:2].tolist()) for why, n in sorted(counts.items()) if why}
            stages.append(
                Stage(
                    name=name,
                    documents_in=documents_in,
                    bytes_in=bytes_in,
                    documents_kept=kept,
                    bytes_kept=bytes_kept,
                    dropped=dropped,
                )
            )
        return tuple(stages)


def _zeros() -> I64:
    return np.zeros(3, np.int64)


def total(parts: Iterable[tuple[Stage, ...]]) -> tuple[Stage, ...]:
    """Add up the counts of many tasks."""
    ledger = Ledger()
    for stage in chain.from_iterable(parts):
        dropped_bytes = sum(size for _, size in stage.dropped.values())
        bytes_in = stage.bytes_in - dropped_bytes
        ledger.keep(stage.name, stage.documents_kept, bytes_in, stage.bytes_kept)
        for reason, (documents, size) in stage.dropped.items():
            ledger.drop(stage.name, reason, documents, size)
    return ledger.stages()


# Stages


def before_dedup(task: Task, recipe: Recipe, ledger: Ledger) -> Iterator[Batch]:
    rules = recipe.filters
    for batch in _read_batches(task, recipe, ledger):
        normalized = _normalized(batch, recipe, ledger)
        if rules != Filters():
            normalized = ledger.sift(
                "filter", normalized, lambda document: reason_to_drop(document.text, rules)
            )
        yield normalized


def after_dedup(
    task: Task, recipe: Recipe, keep: npt.NDArray[np.bool_], ledger: Ledger
) -> Iterator[Batch]:
    """Read the kept documents again; the sketch pass has filtered and counted all of them."""
    for batch in _read_batches(task, recipe, ledger):
        kept = [document for document in batch if document.item < len(keep) and keep[document.item]]
        yield _normalized(kept, recipe, ledger)
    found = sum(stage.documents_in for stage in ledger.stages() if stage.name == "read")
    if found != len(keep):  # the flags would belong to other documents
        text = f"source={task[0].source!r}: a file changed after dedup had read it"
        raise DataError(f"{text}; run the command again")


def _read_batches(task: Task, recipe: Recipe, ledger: Ledger) -> Iterator[Batch]:
    batch: Batch = []
    size = 0
    texts = chain.from_iterable(read(piece, recipe.columns) for piece in task)
    for item, text in enumerate(texts):
        if isinstance(text, Malformed):
            ledger.report(text)
            continue
        raw = text.encode()  # every later stage needs the bytes
        empty = _why_empty(text, recipe)
        if empty:
            ledger.drop("read", empty, 1, len(raw))
            continue
        ledger.keep("read", 1, len(raw), len(raw))
        batch.append(Document(item, text, raw))
        size += len(raw)
        if size >= MB or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _why_empty(text: str, recipe: Recipe) -> str:
    if recipe.pairs is None:
        return "empty" if not text or text.isspace() else ""
    # A row needs text in two languages, also if there are more columns.
    filled = sum(bool(part.strip()) for part in text.split(PAIR))
    return "empty side" if filled < 2 else ""


def _normalized(batch: Batch, recipe: Recipe, ledger: Ledger) -> Batch:
    rules = recipe.normalise
    if rules == Normalize():
        return batch
    kept = []
    for document in batch:
        text = normalize(document.text, rules)
        empty = _why_empty(text, recipe)
        if empty:
            ledger.drop("normalise", empty, 1, len(document.raw))
        else:
            raw = text.encode()
            kept.append(Document(document.item, text, raw))
            ledger.keep("normalise", 1, len(document.raw), len(raw))
    return kept


def normalize(text: str, rules: Normalize) -> str:
    """Apply the rules in a fixed order; without rules, return the same object."""
    if rules.unicode != "none" and not text.isascii():
        text = unicodedata.normalize(rules.unicode, text)
    if rules.newlines and "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if rules.controls:
        text = _CONTROLS.sub("", text)
    if rules.pii:  # addresses that are reserved for documentation
        text = _EMAIL.sub("name@example.com", text)
        text = _IPV4.sub("192.0.2.1", text)
    return text


# Filters


def reason_to_drop(text: str, rules: Filters) -> str | None:
    """Return the name of the first rule that the text breaks."""
    words = text.split() if rules.quality or rules.repetition else []
    return (
        (rules.quality and _quality(text, words, rules.quality))
        or (rules.c4 and _c4(text, rules.c4))
        or (rules.repetition and _repetition(text, words, rules.repetition))
        or (rules.score and _score(text, rules.score))
        or None
    )


def _lines(text: str) -> list[str]:
    return [line for line in map(str.strip, text.splitlines()) if line]


def _quality(text: str, words: list[str], rule: Quality) -> str | None:
    count = len(words)
    if not rule.words[0] <= count <= rule.words[1]:
        return "words"
    if count == 0:  # the recipe allows empty documents; the rules below divide by the count
        return None
    if not rule.mean_word_length[0] <= sum(map(len, words)) / count <= rule.mean_word_length[1]:
        return "mean_word_length"
    if (text.count("#") + text.count("...") + text.count("…")) / count > rule.symbol_ratio:
        return "symbol_ratio"
    lines = _lines(text)
    if sum(line.startswith(_BULLETS) for line in lines) / len(lines) > rule.bullet_lines:
        return "bullet_lines"
    if sum(line.endswith(("...", "…")) for line in lines) / len(lines) > rule.ellipsis_lines:
        return "ellipsis_lines"
    if sum(any(map(str.isalpha, word)) for word in words) / count < rule.alphabetic_words:
        return "alphabetic_words"
    if rule.stop_words and len(STOP_WORDS.intersection(map(str.lower, words))) < rule.stop_words:
        return "stop_words"
    return None


def _c4(text: str, rule: C4) -> str | None:
    if rule.brackets and "{" in text:
        return "brackets"
    lower = text.lower()
    if any(phrase.lower() in lower for phrase in rule.phrases):
        return "phrases"
    lines = _lines(text)
    sentence_lines = sum(line.endswith(_SENTENCE_ENDS) for line in lines)
    if not lines or sentence_lines / len(lines) < rule.sentence_lines:
        return "sentence_lines"
    if rule.sentences and len(re.findall(r"[.!?]+[\"”'’)]*(?:\s|$)", text)) < rule.sentences:
        return "sentences"
    return None


def _repetition(text: str, words: list[str], rule: Repetition) -> str | None:
    duplicates, characters = _duplicates(text.split("\n"))
    if duplicates > rule.duplicate_lines:
        return "duplicate_lines"
    if characters / max(1, len(text)) > rule.duplicate_line_characters:
        return "duplicate_line_characters"
    duplicates, characters = _duplicates(_PARAGRAPHS.split(text))
    if duplicates > rule.duplicate_paragraphs:
        return "duplicate_paragraphs"
    if characters / max(1, len(text)) > rule.duplicate_paragraph_characters:
        return "duplicate_paragraph_characters"
    # Hash words once; n-grams are then arithmetic on arrays.
    # Python's hash differs between processes, but which n-grams are equal does not.
    hashes = np.fromiter(map(hash, words), np.int64, len(words)).view(np.uint64)
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    for n, share in rule.top_ngrams.items():
        if _top_share(hashes, lengths, n, len(text)) > share:
            return f"top_{n}grams"
    for n, share in rule.duplicate_ngrams.items():
        if _duplicate_share(hashes, lengths, n, len(text)) > share:
            return f"duplicate_{n}grams"
    return None


def _duplicates(parts: list[str]) -> tuple[float, int]:
    """Return the share of parts that occurred before, and their characters."""
    parts = [part for part in map(str.strip, parts) if part]
    counts = Counter(parts)
    share = 1 - len(counts) / len(parts) if parts else 0.0
    return share, sum(len(part) * (n - 1) for part, n in counts.items())


def _ngram_hashes(hashes: U64, n: int) -> U64:
    grams = np.zeros(max(0, len(hashes) - n + 1), np.uint64)
    for k in range(n):
        mixed = (grams ^ (grams >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15)
        grams = mixed + hashes[k : k + len(grams)]
    return grams


def _top_share(hashes: U64, lengths: I64, n: int, characters: int) -> float:
    """Return the share of the text that the most frequent n-gram covers."""
    grams = _ngram_hashes(hashes, n)
    if not len(grams):
        return 0.0
    _, first, counts = np.unique(grams, return_index=True, return_counts=True)
    top = int(counts.max())
    if top < 2:  # nothing repeats
        return 0.0
    size = max(int(lengths[i : i + n].sum()) for i in first[counts == top])
    return size * top / characters


def _duplicate_share(hashes: U64, lengths: I64, n: int, characters: int) -> float:
    """Return the share of the text in n-grams that occurred before, counting each word once."""
    grams = _ngram_hashes(hashes, n)
    if not len(grams):
        return 0.0
    repeated = np.ones(len(grams), bool)
    repeated[np.unique(grams, return_index=True)[1]] = False
    # +1 where a repeated n-gram starts, -1 where it ends: the running sum covers its words.
    covered = np.zeros(len(hashes) + 1, np.int64)
    np.add.at(covered, np.flatnonzero(repeated), 1)
    np.add.at(covered, np.flatnonzero(repeated) + n, -1)
    return float(lengths[np.cumsum(covered[:-1]) > 0].sum()) / characters


def _score(text: str, rule: Score) -> str | None:
    function = _import_function(rule.function)
    try:
        return "score" if function(text) < rule.least else None
    except Exception as error:  # the function is the user's
        raise ConfigError(
            f"filters.score.function={rule.function!r} fails: {type(error).__name__}: {error}"
        ) from error


@lru_cache
def _import_function(path: str) -> Callable[[str], float]:
    module, _, name = path.partition(":")
    try:
        return cast("Callable[[str], float]", getattr(import_module(module), name))
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"filters.score.function={path!r}: {error}; give package.module:function"
        ) from error
