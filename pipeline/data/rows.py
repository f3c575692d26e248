"""Files of examples for fine-tuning, as a corpus whose documents are rows of one length.

A line of the file is a JSON object in one of two forms; the file may be compressed with gzip:

    {"prompt": "Translate: chat", "answer": " cat"}                       the answer is learned
    {"text": "A fine film.", "label": "good"}                             the label is learned
    {"text": "It rains.", "text2": "It is wet.", "label": 1}              the label of a pair

A label is a class, given as a whole number or a text, or a number with a decimal point. Rows are
padded to the same length, so that the loader, which cuts a corpus into windows of one length, reads
one example per window; objective/noise.py turns a window into the inputs of the model.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.config.objective import LABEL_DIGITS, Answers, Labels
from pipeline.data.encode import MODEL, is_held_out
from pipeline.data.json_lines import Line, read_lines, shown
from pipeline.data.shards import (
    VERSION,
    Manifest,
    ShardWriter,
    SourceShare,
    Split,
    dtype_for,
    replacing,
    save,
)  # fmt: skip
from pipeline.data.tokenizer import Tokenizer
from pipeline.errors import DataError
from pipeline.objective.example import NO_LABEL

_LARGEST = int(np.finfo(np.float32).max)
_LARGEST_NUMBER = 1e18  # the sum of the squared errors of 300 rows is finite in fp32
_FORMS = "prompt and answer; or text, label and optionally text2"
_ROUND = 32  # tokens: rows have a multiple of this


class Example(NamedTuple):
    first: str  # the prompt or the text
    second: str  # the answer or the other text of a pair, if there is one
    label: str | int | float | None  # None: the second text is an answer
    where: str  # file and line


def read_examples(path: Path) -> list[Example]:
    """Return all examples of a file; they must have the same form."""
    found = [_example(line) for line in read_lines(path, _FORMS)]
    for each in found:
        if (each.label is None) != (found[0].label is None):
            first = "an answer" if found[0].label is None else "a label"
            text = f"{each.where}: another form than {found[0].where}, which has {first}"
            raise DataError(f"{text}; split the file")
        if each.label is not None and bool(each.second) != bool(found[0].second):
            text = f"{each.where} and {found[0].where}: only one of the two has text2"
            raise DataError(f"{text}; give it in every line or in none")
    return found


def _example(line: Line) -> Example:
    if {"prompt", "answer", "text", "label"} <= line.fields.keys():
        raise line.error("answer and label are of two forms")
    if "prompt" in line.fields or "answer" in line.fields:
        return Example(line.text("prompt", empty=True), line.text("answer"), None, line.where)
    text = line.text("text")
    second = line.text("text2") if "text2" in line.fields else ""
    label = line.fields.get("label")
    if isinstance(label, bool) or not isinstance(label, int | float | str) or label == "":
        raise line.error(f"label={shown(label)} is neither a class nor a number")
    if isinstance(label, str):
        return Example(text, second, line.text("label"), line.where)
    # NaN fails the comparison. Labels are stored as 32-bit floats.
    if not abs(label) <= _LARGEST:
        remedy = f"remove the line, or scale labels to at most {_LARGEST:.1e}"
        raise DataError(f"{line.where}: label={str(label)[:20]} is not finite in fp32; {remedy}")
    return Example(text, second, label, line.where)


def split_examples(rows: Sequence[Example], share: float) -> tuple[list[Example], list[Example]]:
    """Split into training and held-out examples by the text, so that equal texts stay together."""
    held = [is_held_out(f"{row.first}\0{row.second}".encode(), share) for row in rows]
    train = [row for row, out in zip(rows, held, strict=True) if not out]
    valid = [row for row, out in zip(rows, held, strict=True) if out]
    if not train or not valid:
        text = f"--valid-share {share} leaves {len(train)} of {len(rows)} examples for training"
        raise DataError(f"{text}; give another share, or --valid FILE")
    return train, valid


def label_names(
    train: Sequence[Example], valid: Sequence[Example], numbers: bool
) -> tuple[str, ...]:
    """Return the classes of the training labels in order, or none if the labels are `numbers`."""
    every = [*train, *valid]
    texts = isinstance(train[0].label, str)
    for row in every:
        if isinstance(row.label, str) != texts:
            raise DataError(
                f"{row.where}: label={row.label!r}, but that of {train[0].where} is "
                f"{train[0].label!r}; labels are all texts or all numbers"
            )
    if numbers and texts:
        raise DataError(f"{train[0].where}: label={train[0].label!r} is text; remove --regression")
    classes: list[Any] = sorted({row.label for row in train})
    if len(classes) < 2:
        text = f"every label of the {len(train)} training examples is {classes[0]!r}"
        raise DataError(f"{text}; add examples with another label")
    if numbers:
        labels: list[Any] = [row.label for row in every]
        largest = max(labels, key=abs)
        if abs(largest) > _LARGEST_NUMBER:
            text = f"label={largest:g} is too large for a squared error in fp32"
            raise DataError(f"{text}; scale labels to at most {_LARGEST_NUMBER:.0e}")
        if len(np.unique(np.array(classes, np.float32))) < 2:
            text = f"the labels of the {len(train)} training examples, such as {classes[0]!r}"
            raise DataError(f"{text}, are equal as 32-bit floats; subtract what they share")
        return ()
    other = "held-out ones with --valid" if texts else "--regression if labels are numbers"
    known = set(classes)  # a list would take minutes with many classes
    for row in valid:
        # 1.0 equals 1, but a number with a decimal point is not a class.
        decimal = isinstance(row.label, float)
        if decimal and row.label in known:
            text = f"{row.where}: label={row.label!r} has a decimal point, and classes have none"
            raise DataError(f"{text}; write {row.label:.0f}")
        if decimal or row.label not in known:
            raise DataError(
                f"{row.where}: label={row.label!r} is not one of the {len(classes)} classes of the "
                f"training examples; add such examples, or give {other}"
            )
    return tuple(map(str, classes))


# Rows


class Encoded(NamedTuple):
    first: list[int]
    second: list[int]
    bits: int  # of the label
    text_bytes: int


def encode_examples(
    rows: Sequence[Example], objective: Answers | Labels, tokenizer: Tokenizer
) -> list[Encoded]:
    found = []
    names = objective.names if isinstance(objective, Labels) else ()
    classes = {name: number for number, name in enumerate(names)}
    for row in rows:
        bits = 0
        if classes:
            bits = classes[str(row.label)]
        elif isinstance(objective, Labels):
            bits = int(np.array([row.label], np.float32).view(np.uint32)[0])
        first = tokenizer.encode(row.first).tolist()
        second = tokenizer.encode(row.second).tolist()
        found.append(Encoded(first, second, bits, len(row.first.encode() + row.second.encode())))
    return found


def row_length(rows: Sequence[Encoded], objective: Answers | Labels, longest: int) -> int:
    """Return the length that the longest example needs, at most that of the model."""
    most = max(_places(row, objective) for row in rows)
    return min(longest, math.ceil(most / _ROUND) * _ROUND)


def _places(row: Encoded, objective: Answers | Labels) -> int:
    if isinstance(objective, Answers):  # the end is predicted but not read
        return max(1, len(row.first)) + len(row.second)
    ends = 2 if row.second else 1
    return len(row.first) + len(row.second) + ends + (objective.reads == "first")


def make_row(
    row: Encoded, objective: Answers | Labels, seq: int, eod: int
) -> tuple[list[int], bool]:
    """Return the tokens of a row of the corpus, and whether the example had to be cut to fit."""
    excess = max(0, _places(row, objective) - seq)
    if isinstance(objective, Answers):
        # Keep the end of a prompt, which is next to its answer, and at least a quarter of the row.
        kept = max(len(row.first) - excess, min(len(row.first), seq // 4))
        prompt = row.first[len(row.first) - kept :]
        tokens = [*prompt, eod, *row.second[: seq + 1 - max(1, kept)]]
    else:
        first = len(row.first)
        second = len(row.second)
        for _ in range(excess):  # shorten the longer text of a pair first
            if first < second:
                second -= 1
            elif first > 0:  # a row of two tokens has no space for three ends
                first -= 1
        digits = [int(digit, 16) for digit in f"{row.bits:0{LABEL_DIGITS}x}"]
        tokens = [*digits, *row.first[:first], eod, *row.second[:second]]
    return tokens + [eod] * (objective.text_length(seq) - len(tokens)), excess > 0


def write_rows(
    out: Path,
    splits: dict[str, list[Encoded]],  # train and valid
    objective: Answers | Labels,
    seq: int,
    batch: int,
    tokenizer: Tokenizer,
) -> int:
    """Write the corpus of a run's examples; return how many were cut.

    Rows without a label complete the last held-out batch, so that an evaluation reads every example
    once."""
    cut = 0
    shards: dict[str, Split] = {}
    dtype = dtype_for(tokenizer.vocab)
    length = objective.text_length(seq)
    for split, rows in splits.items():
        blanks = -len(rows) % batch if split == "valid" else 0
        with replacing(out / f"{split}.bin") as file:
            writer = ShardWriter(file, dtype)
            for row in [*rows, *[Encoded([], [], NO_LABEL, 0)] * blanks]:
                tokens, shortened = make_row(row, objective, seq, tokenizer.eod)
                writer.add(np.array(tokens), row.text_bytes)
                cut += shortened
            # A window of running text has one more token, its last target.
            writer.add(np.array([tokenizer.eod]), 0)
        shards[split] = Split.of([writer.index(out / split, "examples")])
    save(out / MODEL, tokenizer.model)
    train = shards["train"]
    source = SourceShare(
        name="examples", documents=train.documents, bytes=train.bytes, tokens=train.tokens
    )
    Manifest(
        version=VERSION,
        hash="",
        plan=f"{objective.kind} in rows of {length} tokens",
        tokenizer=tokenizer.info(MODEL),
        dtype=dtype,
        splits=shards,
        sources=(source,),
        stages=(),
    ).save(out)
    return cut
