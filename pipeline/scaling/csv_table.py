"""CSV files of points and targets: rows as text, and their columns as numbers."""

import csv
import io
import re
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.atomic import read_regular
from pipeline.errors import DataError

OPTIONAL = ("C", "experts", "unique")
LONG_TEXT = 80  # characters of an error; a convention is a sentence, and a tokenizer a digest
# Words in the names of columns, and the column that is probably meant.
COLUMN_OF_WORD = {
    **dict.fromkeys(("flops", "compute"), "C"),
    **dict.fromkeys(("expert", "experts"), "experts"),
    **dict.fromkeys(("unique", "distinct"), "unique"),
    **dict.fromkeys(("vocab", "vocabulary"), "vocab"),
}
COLUMN_OF_LETTER = {"c": "C", "u": "unique"}  # only as the whole name
OTHER_MEANING = {"per", "parallel", "loss", "id"}  # such as flops_per_second
EPOCHS = {"epoch", "epochs", "passes", "repeat", "repeats", "repetitions"}
CYRILLIC = {0x0421: "C", 0x0441: "c"}  # looks like C and is on other keyboards
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
            names = [_plain(name) for name in next(reader, [])]
            cells = [(row, reader.line_num) for row in reader if row]
    except OSError as error:
        why = error.strerror
        raise DataError(f"{key}={path} cannot be read ({why}); give a CSV file") from None
    except (UnicodeDecodeError, csv.Error):
        raise DataError(f"{key}={path} is not a CSV text file; save it as CSV in UTF-8") from None
    comments = [(row, line) for row, line in cells if _is_comment(row)]
    if len(comments) == len(cells):  # names of runs may all begin with such a sign
        comments = []
    if _is_comment(names):
        comments.insert(0, (names, 1))
    for row, line in comments[:1]:
        text = f"{path}:{line} begins like a comment ({_plain(row[0])[:LONG_TEXT]!r})"
        raise DataError(f"{text}; delete the line, or the sign if it is a header or a row")
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
            remedy = "write numbers without thousands separators and with decimal points"
            if len(row) < len(names):
                remedy = "separate cells by commas, and write a comma for each empty cell"
            text = f"{path}:{line}: {len(row)} cells under {len(names)} columns"
            raise DataError(f"{text}; {remedy}")
    return [
        dict(zip(names, map(_plain, row), strict=False)) | {LINE: str(line)} for row, line in cells
    ]


def _is_comment(row: Sequence[str]) -> bool:
    return bool(row) and row[0].lstrip().startswith(("#", "//"))


def _plain(text: str) -> str:
    """Return a cell without control characters, with which a name could move the cursor."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", text).strip()


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
            raise DataError(
                f"{text}; fill all empty cells (here {len(empty)}), or remove the column"
            )
    return {key: _column(path, rows, key) for key in (*required, *present)}


def _column(path: Path, rows: Sequence[dict[str, str]], key: str) -> npt.NDArray[np.float64]:
    values: list[float] = []
    for row in rows:
        text = row.get(key) or "nan"  # an empty cell is reported later, with its row
        try:
            values.append(float(text))
        except ValueError:
            remedy = {"task_accuracy": "55% as 0.55", "loss": "a number such as 3.25"}.get(key)
            remedy = remedy or "it as 1e6 or 1000000"
            name = key.removeprefix("task_")
            problem = f"{path}:{row[LINE]}: {name}={text[:LONG_TEXT]!r} is not a number"
            raise DataError(f"{problem}; write {remedy}") from None
    return np.array(values)


def unread_columns(rows: Sequence[dict[str, str]], read: Collection[str]) -> list[str]:
    """Warn about columns with a name like one that is read, or that show repeated data."""
    found = []
    for name in rows[0].keys() - set(read) - {LINE}:
        words = _words(name)
        kinds = {row[name] for row in rows}
        numbers = all(is_number(kind) for kind in kinds)
        meant = {COLUMN_OF_WORD[word] for word in words & COLUMN_OF_WORD.keys()}
        # `C (FLOPs)` and `C` with a Cyrillic letter.
        whole = re.sub(r"[(\[].*", "", name.translate(CYRILLIC)).strip().lower()
        meant |= {COLUMN_OF_LETTER[whole]} if whole in COLUMN_OF_LETTER else set()
        meant |= {key for key in read if key.lower() == name.lower()}
        for key in sorted(meant - rows[0].keys()):
            if len(kinds) > 1 if key == "vocab" else numbers and not words & OTHER_MEANING:
                text = f"The column `{name}` is not read; rename it to `{key}` if that is what it"
                found.append(f"{text} holds.")
        repeated = numbers and any(float(kind) > 1 for kind in kinds)
        if repeated and EPOCHS & words and "unique" not in rows[0]:
            found.append(
                f"The column `{name}` is not read, so repeated tokens count like new ones; give "
                f"the distinct tokens of each row in a column `unique`."
            )
    return sorted(found)


def _words(name: str) -> set[str]:
    """Return the words of a name: `trainFLOPs` and `train_flops` have the same."""
    name = re.sub("flops?", "_flops_", name, flags=re.IGNORECASE)
    return {word.lower() for word in re.findall("[A-Z]?[a-z]+[0-9]*|[A-Z]+[0-9]*", name)}
