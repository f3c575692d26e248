"""More than 200 malformed inputs: each ends in a one-line error, or in a law with a warning."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from launch.plan import _known_best
from pipeline.errors import UserError
from pipeline.scaling import predict
from pipeline.scaling.csv_table import LINE, read_table
from pipeline.scaling.points import read_csv
from pipeline.scaling.quality import Goodness, Outlier, fit_warnings
from pipeline.scaling.study import study
from tests.scaling.made_runs import true_loss

Table = dict[str, list[str]]


def table(seed: int = 0, noise: float = 0.002) -> Table:
    """A valid ladder: five sizes at three lengths."""
    rng = np.random.default_rng(seed)
    N = np.repeat(np.geomspace(1e6, 1e9, 5), 3)
    D = N * np.tile([5.0, 20.0, 80.0], 5)
    loss = true_loss(N, D) * np.exp(rng.normal(0, noise, len(N)))
    return {
        "N": [f"{n:.0f}" for n in N],
        "D": [f"{d:.0f}" for d in D],
        "loss": [f"{x:.4f}" for x in loss],
    }


def text_of(made: Table, separator: str = ",") -> str:
    rows = [list(made), *zip(*made.values(), strict=True)]
    return "".join(separator.join(row) + "\n" for row in rows)


def column(key: str, change: Callable[[float], float], rows: slice | list[int]) -> Table:
    made = table()
    for i in range(len(made[key]))[rows] if isinstance(rows, slice) else rows:
        made[key][i] = f"{change(float(made[key][i])):.6g}"
    return made


def cells() -> Iterator[tuple[str, str]]:
    """A cell that is not a number, in every required column and several rows."""
    words = ("x", "12M", "1e6 params", "3.1%", "1.2.3", "0x10", "–", "1 000", "3,1", "$4", "None")
    for key in ("N", "D", "loss"):
        for row, word in enumerate(words):
            made = table()
            made[key][row] = word
            yield f"{key} {word}", text_of(made)
        for row, word in enumerate(("", "nan", "inf", "-inf", "-1", "0", "1e400", "-0.0")):
            made = table()
            made[key][row] = word
            yield f"{key} {word or 'empty'}", text_of(made)
        made = table()
        made[key] = [
            f"{float(value):,.4f}" if key == "loss" else f"{int(value):,}" for value in made[key]
        ]
        if key != "loss":
            yield f"{key} with thousands", text_of(made)
            made[key] = [f'"{value}"' for value in made[key]]
            yield f"{key} with quoted thousands", text_of(made)


def shapes() -> Iterator[tuple[str, str]]:
    """Files whose rows and columns are wrong."""
    good = text_of(table())
    lines = good.splitlines()
    yield "empty", ""
    yield "header alone", lines[0] + "\n"
    yield "no header", "\n".join(lines[1:])
    yield "semicolons", text_of(table(), ";")
    yield "tabs", text_of(table(), "\t")
    yield "lower case", good.replace("N,D", "n,d")
    yield "two columns of N", good.replace("N,D,loss", "N,N,loss")
    for key in ("N", "D", "loss"):
        made = table()
        del made[key]
        yield f"without {key}", text_of(made)
    for row in (1, 5, 15):
        yield (
            f"cell too many in {row}",
            "\n".join([*lines[:row], lines[row] + ",7", *lines[row + 1 :]]),
        )
        short = lines[row].rpartition(",")[0]
        yield f"cell too few in {row}", "\n".join([*lines[:row], short, *lines[row + 1 :]])
    for key in ("C", "experts", "unique"):
        for empty in (0, 7, 14):
            made = table()
            made[key] = ["1e9"] * 15
            made[key][empty] = ""
            yield f"{key} empty in {empty}", text_of(made)
    for key in ("vocab", "arch", "objective", "convention", "tokenizer"):
        for at in (0, 9):
            made = table()
            made[key] = ["a"] * 15
            made[key][at] = "b"
            yield f"{key} mixed at {at}", text_of(made)
    for name in (
        *("flops", "Experts", "UNIQUE", "compute", "C (FLOPs)", "train_flops", "num_experts"),
        *("D_unique", "epochs", "\u0421"),  # the last is Cyrillic
    ):
        made = table()
        made[name] = ["8"] * 15
        yield f"column {name}", text_of(made)
    yield "vocabularies of another name", text_of({**table(), "vocab_size": ["8", "9", "9"] * 5})
    yield "comment above", "# by hand\n" + good
    yield "comment inside", "\n".join([*lines[:5], "# second machine", *lines[5:]])
    decimals = text_of({**table(), "loss": [x.replace(".", ",") for x in table()["loss"]]})
    yield "decimal commas", decimals
    yield "decimal commas that fill another column", decimals.replace("loss", "loss,note", 1)
    made = table()
    made["experts"] = [str(2 ** (i % 3)) for i in range(15)]
    made["D"] = ["1000000000"] * 15
    yield "experts with one D", text_of(made)
    noted = text_of({**table(), "note": [f"run {i}" for i in range(15)]})
    yield "unclosed quote", noted.replace(",run 8", ',"run 8')
    yield "two unclosed quotes", noted.replace(",run 3", ',"run 3').replace("run 11", 'run 11"')
    for vocab in ("32k", "50 257"):
        yield f"vocab {vocab}", text_of({**table(), "vocab": [vocab] * 15})
    for repeated in (1, 6):
        yield f"{repeated} rows twice", good + "\n".join(lines[1 : 1 + repeated]) + "\n"


def figures() -> Iterator[tuple[str, str]]:
    """Well-formed numbers that mean something else."""
    every = slice(None)
    for key, factor in (
        ("N", 1e-6),
        ("N", 1e-9),
        ("D", 1e-6),
        ("D", 1e-9),
        ("D", 1e-3),
        ("N", 1e6),
    ):
        yield f"{key} × {factor:g}", text_of(column(key, lambda x, f=factor: x * f, every))
    for key, factor in (("D", 1e-6), ("D", 1e-3), ("D", 1e3), ("N", 1e-6), ("N", 1e3), ("D", 1e-9)):
        for start in range(3):
            rows = slice(start, None, 3)
            yield (
                f"a third of {key} × {factor:g}, {start}",
                text_of(column(key, lambda x, f=factor: x * f, rows)),
            )
    yield "N and D swapped", text_of({**table(), "N": table()["D"], "D": table()["N"]})
    for factor in (0.25, 4.0):
        made = {**table(), "D": column("D", lambda x, f=factor: x * f, every)["D"]}
        yield f"N and D swapped, × {factor:g}", text_of({**made, "N": made["D"], "D": made["N"]})
    both = {key: column(key, lambda x: x / 1e3, every)[key] for key in ("N", "D")}
    yield "N and D in thousands", text_of({**table(), **both})
    yield "N in thousands", text_of(column("N", lambda x: x / 1e3, every))
    for noise in (1e-6, 1e-4):
        again = {key: 4 * values for key, values in table().items()}
        rng = np.random.default_rng(0)
        again["loss"] = [f"{float(x) * (1 + noise * rng.normal()):.9g}" for x in again["loss"]]
        yield f"four copies of each run, noise {noise:g}", text_of(again)
    for key, factor in (("D", 1.01), ("D", 3.9), ("N", 1.2)):
        again = column(key, lambda x, f=factor: x * f, every)
        both = {name: table()[name] + again[name] for name in again}
        both["loss"] = table()["loss"] * 2
        yield f"each run again with {key} × {factor:g}", text_of(both)
    tenths = [f"{float(x):.1f}" if i % 3 == 0 else x for i, x in enumerate(table()["loss"])]
    yield "a third of the losses with one decimal", text_of({**table(), "loss": tenths})
    yield "perplexities", text_of(column("loss", np.exp, every))
    for start in (0, 1):
        yield f"half perplexities {start}", text_of(column("loss", np.exp, slice(start, None, 2)))
    for row in range(15):
        yield f"diverged {row}", text_of(column("loss", lambda _: 11.0, [row]))
        yield f"outlier {row}", text_of(column("loss", lambda x: 1.3 * x, [row]))
        yield f"low outlier {row}", text_of(column("loss", lambda x: 0.75 * x, [row]))
    for seed in range(15):
        rng = np.random.default_rng(seed)
        made = table()
        made["loss"] = [f"{x:.4f}" for x in 3 * np.exp(rng.normal(0, 0.1, 15))]
        yield f"noise {seed}", text_of(made)
        made["loss"] = list(rng.permutation(table()["loss"]))
        yield f"shuffled {seed}", text_of(made)
    yield "reversed", text_of({**table(), "loss": table()["loss"][::-1]})
    yield "all alike", text_of({**table(), "loss": ["3.0"] * 15})
    yield "above ln(vocab)", text_of({**table(), "vocab": ["16"] * 15})
    compute = [6 * float(n) * float(d) for n, d in zip(table()["N"], table()["D"], strict=True)]
    yield "C of a forward pass", text_of({**table(), "C": [f"{c / 3:g}" for c in compute]})
    yield "tiny losses", text_of(column("loss", lambda x: 1e-300 * x, every))
    yield "one name of all runs", text_of({**table(), "run": ["a"] * 15})
    yield "one name per size", text_of({**table(), "run": [f"r{i // 3}" for i in range(15)]})
    yield (
        "D of the largest size in thousandths",
        text_of(column("D", lambda x: 1e3 * x, [12, 13, 14])),
    )
    thousands = [f"{float(d) / 1e3:g}" for d in table()["D"]]
    yield "unique in thousands", text_of({**table(), "unique": thousands})
    yield "unique in billions", text_of({**table(), "unique": ["5"] * 15})
    yield "vocab of a table of floats", text_of({**table(), "vocab": ["16.0"] * 15})
    yield "half an expert", text_of({**table(), "experts": ["1.5"] * 15})
    for vocab in ("0", "-5", "1", "nan", "inf"):
        yield f"vocab {vocab}", text_of({**table(), "vocab": [vocab] * 15})
    for key in ("model", "dataset"):
        yield f"two kinds of {key}", text_of({**table(), key: ["a", "b", "b"] * 5})
    for factor in (0.5, 5):
        mixed = [f"{c * (factor if i % 3 == 0 else 1):g}" for i, c in enumerate(compute)]
        yield f"a third of C × {factor:g}", text_of({**table(), "C": mixed})
    for extreme in ("1e-308", "1e200"):
        yield f"a C of {extreme}", text_of({**table(), "C": [*map(str, compute[1:]), extreme]})
    for factor in (1e-18, 1e-3, 1e3, 8.64e-20):
        yield f"C × {factor:g}", text_of({**table(), "C": [f"{c * factor:g}" for c in compute]})
        mixed = [f"{c * (factor if i % 4 == 0 else 1):g}" for i, c in enumerate(compute)]
        yield f"some C × {factor:g}", text_of({**table(), "C": mixed})


CASES = [*cells(), *shapes(), *figures()]


def outcome(file: Path) -> str:
    """Return the error, the first warning, or nothing."""
    try:
        done = study(read_csv(file), "chinchilla", profiled=False)
    except UserError as error:
        return str(error)
    return done.warnings[0] if done.warnings else ""


def test_there_are_enough_and_the_original_is_clean(tmp_path: Path) -> None:
    assert len(CASES) >= 200 and len({name for name, _ in CASES}) == len(CASES)
    for seed in range(5):
        file = tmp_path / "good.csv"
        file.write_text(text_of(table(seed)))
        assert outcome(file) == ""


@pytest.mark.parametrize("text", [text for _, text in CASES], ids=[name for name, _ in CASES])
def test_nothing_is_silent(text: str, tmp_path: Path) -> None:
    file = tmp_path / "p.csv"
    file.write_text(text)
    message = outcome(file)
    assert message and "\n" not in message


@pytest.mark.parametrize("row", [0, 1, 7, 12, 14])
def test_a_run_with_a_wrong_length_or_swapped_columns_is_named(row: int, tmp_path: Path) -> None:
    """Its residual is small, because the law passes through it."""
    longer = column("D", lambda x: 10 * x, [row])
    swapped = table()
    swapped["N"][row] = table()["D"][row]
    swapped["D"][row] = table()["N"][row]
    file = tmp_path / "p.csv"
    for made in (longer, swapped):
        file.write_text(text_of(made))
        warnings = study(read_csv(file), "chinchilla").warnings
        assert any(re.search(rf"row {row + 2}\b", text) for text in warnings)
    file.write_text(text_of(table()))
    assert not study(read_csv(file), "chinchilla").warnings


@pytest.mark.parametrize(
    "text",
    [text for _, text in [*cells(), *shapes()]],
    ids=[name for name, _ in [*cells(), *shapes()]],
)
def test_targets_end_in_one_line(text: str, tmp_path: Path) -> None:
    """The same files as targets: read, or refused in one line."""
    file = tmp_path / "t.csv"
    file.write_text(text)
    try:
        found = predict.read_targets(file)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert (found["N"] > 0).all() and (found["D"] > 0).all()


def test_odd_rows_end_in_one_line(
    tmp_path: Path, launch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `auto`, and in commands that use points before they are fitted."""
    file = tmp_path / "p.csv"
    rows = [f"{10**n},{2 * 10 ** (n + 1)},{{}},{5 - n / 4}" for n in range(6, 11)]
    for compute in ("1e-308", "1e300"):
        file.write_text("\n".join(["N,D,C,loss", *(row.format(compute) for row in rows)]))
        with pytest.raises(UserError, match="is not a possible value"):
            launch("fit --points", file)
    with pytest.raises(UserError, match="NUL character"):
        read_csv(Path("a\0b"))
    file.write_text("N,D,loss\n1e6,2e7,nan\n")
    for call in ("forecast --size 1b", "sweep plan isoflop"):
        with pytest.raises(UserError, match="points=0"):
            launch(call, "--points", file)
    file.write_text(text_of(column("loss", lambda x: 1.3 * x, [7])))
    with pytest.raises(UserError, match="law=parabola"):
        launch("fit --law parabola --points", file)
    _known_best(file)
    assert "row 9 lies" in capsys.readouterr().err
    rng = np.random.default_rng(7)
    file.write_text(
        text_of({**table(), "loss": [f"{3 * np.exp(x):g}" for x in rng.normal(0, 0.1, 15)]})
    )
    assert "explains 0.0% of" in " ".join(launch("fit --bootstrap 0 --points", file).split())
    outliers = (Outlier("a", 0.1, 9.0),) * 4
    assert fit_warnings(Goodness(0.99, 0.001, outliers))[-1].startswith("1 more outlier:")
    for words in ("--target-tokens 1e30", "--noise 90%", "--target-tokens 1 --target-size 1m"):
        key = words.split()[-2].strip("-").replace("-", "_")
        with pytest.raises(UserError, match=f"{key}="):
            launch("sweep plan cpu --target-size 1m", words)


def test_an_error_names_the_line_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "p.csv"
    file.write_text("run,N,D,loss,\x1b[2Jx\n\x1b[2Ja,1e6,2e7,3.5,\nb,1e7,2e8,3.2,\n")
    assert read_csv(file).run == ("[2Ja", "b")  # no escape sequence reaches a terminal
    assert read_table(file, ())[0].keys() == {"run", "N", "D", "loss", "[2Jx", LINE}
    file.write_text("run,N,D,loss\n#1,1e6,2e7,3.5\n#2,1e7,2e8,3.2\n")
    assert read_csv(file).run == ("#1", "#2")
    file.write_text("run,N,D,loss\na,1e6,2e7,3.5\n#b,1e7,2e8,3.2\n")  # commented out
    with pytest.raises(UserError, match=r"p.csv:3 "):
        read_csv(file)
    file.write_text("N,D,loss\n1e6,2e7,3.5\n\n1e7,2e8,x\n")
    with pytest.raises(UserError, match=r"p.csv:4: loss='x'"):
        read_csv(file)
    file.write_text("N,D\n\n1e7,-1\n")
    with pytest.raises(UserError, match=r"p.csv:3: D=-1"):
        predict.read_targets(file)
