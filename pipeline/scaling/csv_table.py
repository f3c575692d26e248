"""CSV files of points and targets: rows as text, and their columns as numbers."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.atomic import read_regular
from pipeline.errors import DataError

OPTIONAL = ("C", "experts", "unique")
LONG_TEXT = 80  # characters of an error; a convention is a sentence, and a tokenizer a digest
LINE = ""  # key of a row's line in its file, which differs from its number after blank lines


def listed(kinds: Sequence[str]) -> str:
    text = ", ".join(kinds)
    return text if len(text) <= LONG_TEXT else f"{len(kinds)} different ones"


def read_table(path: Path, required: Sequence[str], key: str = "points") -> list[dict[str, str]]:
    """Return the rows of a CSV file as text; its columns are checked, its cells are not."""
    try:
        # Spreadsheets write a byte-order mark, and spaces around names and numbers.
        with io.StringIO(read_regular(path).decode("utf-8-sig"), newline="") as file:
            reader = csv.reader(file)
            names = [name.strip() for name in next(reader, [])]
            cells = [(row, reader.line_num) for row in reader if row]
    except OSError as error:
        why = error.strerror
        raise DataError(f"{key}={path} cannot be read ({why}); give a CSV file") from None
    except (UnicodeDecodeError, csv.Error):
        raise DataError(f"{key}={path} is not a CSV text file") from None
    missing = [key for key in required if key not in names]
    if missing:
        problem = f"{path}: columns {missing} are missing (found {listed(names) or 'none'})"
        raise DataError(f"{problem}; it needs {', '.join(required)}, separated by commas")
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        raise DataError(f"{path}: column {', '.join(twice)} occurs twice; keep one of them")
    if not cells:
        raise DataError(f"{path} has a header and no rows; add one row per run")
    for row, line in cells:
        if any(_holds_rows(text, len(names)) for text in row):
            raise DataError(f"{path}:{line}: a cell contains whole rows; close the quote before it")
        # `1,000,000` would put each group of digits into a separate cell.
        if any(text.strip() for text in row[len(names) :]) or len(row) < len(names):
            raise DataError(
                f"{path}:{line}: {len(row)} cells under {len(names)} columns; write numbers "
                f"without thousands separators, and a comma for each empty cell"
            )
    return [
        dict(zip(names, map(str.strip, row), strict=False)) | {LINE: str(line)}
        for row, line in cells
    ]


def _holds_rows(text: str, columns: int) -> bool:
    """Whether an unclosed quote has made the reader take whole rows for one cell."""
    lines = text.splitlines()
    return len(lines) > 1 and any(line.count(",") >= columns - 1 for line in lines)


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def read_columns(
    path: Path, rows: Sequence[dict[str, str]], required: Sequence[str]
) -> dict[str, npt.NDArray[np.float64]]:
    """Return the required columns as numbers, and the optional ones that have values."""
    present = [key for key in OPTIONAL if any(row.get(key) for row in rows)]
    for key in present:
        empty = [row[LINE] for row in rows if not row.get(key)]
        # An empty cell might mean "as usual" or "unknown"; a guess would bias the law.
        if empty:
            text = f"{path}:{empty[0]}: {key}= is empty here and filled in other rows"
            raise DataError(f"{text}; fill all {len(empty)} empty cells, or remove the column")
    return {key: _column(path, rows, key) for key in (*required, *present)}


def _column(path: Path, rows: Sequence[dict[str, str]], key: str) -> npt.NDArray[np.float64]:
    values: list[float] = []
    for row in rows:
        text = row.get(key) or "nan"  # an empty cell is reported later, with its row
        try:
            values.append(float(text))
        except ValueError:
            remedy = "55% as 0.55" if key == "task_accuracy" else "it as 1e6 or 1000000"
            name = key.removeprefix("task_")
            problem = f"{path}:{row[LINE]}: {name}={text[:LONG_TEXT]!r} is not a number"
            raise DataError(f"{problem}; write {remedy}") from None
    return np.array(values)
