"""Hostile files in every place where a command reads one."""

import shutil
from pathlib import Path

import pytest

from tests.attack.harness import LEGACY, NODES, expect_none, fault

RUN = LEGACY / "runs" / "dense"
RUNS = LEGACY / "runs"
OUT = "--out OUT --slurm --dry-run --no-track"
TOKENIZER = f"--tokenizer {LEGACY / 'corpus' / 'tokenizer.model'}"
# Commands that read FILE.
READERS = (
    "show --size tiny --config FILE",
    f"pretrain --size tiny --data {LEGACY / 'corpus'} --cluster FILE {OUT}",
    "sweep plan FILE",
    "fit --points FILE",
    f"forecast --runs {RUNS} --targets FILE",
    f"generate --run {RUN} {TOKENIZER} --file FILE --max-new 1",
    f"generate --run {RUN} {TOKENIZER} --shots FILE --prompt a --max-new 1",
    f"evaluate --run {RUN} {TOKENIZER} --tasks FILE",
    f"finetune --run {RUN} {TOKENIZER} --data FILE {OUT}",
    f"generate --run {RUN} --tokenizer FILE --prompt a --max-new 1",
    "data prepare --source nowhere --out OUT --config FILE",
)
CSV = ("", "N,D", "N,D,loss\n", "N,D,loss\n1,2\n", "N,D,loss\n1,2,x\n", "N,D,loss\n,,\n",
       "N,D,loss\n0,0,0\n", "N,D,loss\n-1,1,1\n", "N,D,loss\nnan,1,1\n", "N,D,loss\n1e400,1,1\n",
       "N,D,loss\n" + "1,1,1\n" * 5, "N,N,loss\n1,1,1\n", "N;D;loss\n1;1;1\n", "\ufeffN,D,loss\n1,1,1\n")  # fmt: skip
TOML = ("x", "x = ", "= 1", "[model]\nlayers = 'a'", "[model]\nlayers = 1e400", "[nonsense]\nx = 1",
        "[model]\nlayers = -1", "model = 3", "[[model]]\nlayers = 2", f"x = {'[' * 3000}{']' * 3000}",
        "[train]\nsteps = 1979-05-27", "[model]\nlayers = true", "x.y.z.w = 1")  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def words(line: str, file: Path, out: Path) -> list[str]:
    return [{"FILE": str(file), "OUT": str(out)}.get(word, word) for word in line.split()]


@pytest.mark.parametrize("reader", READERS)
def test_special_files(reader, here) -> None:
    def attack(name: str) -> str:
        file = here / name
        NODES[name](file)
        # An empty TOML file is valid, and every short text is a prompt.
        refuse = name != "empty" and not ("generate" in reader and name == "not an object")
        return fault(words(reader, file, here / "out"), refuse=refuse, out=here / "out")

    expect_none(attack(name) for name in NODES)


@pytest.mark.parametrize(
    ("reader", "contents"),
    [(READERS[0], TOML), (READERS[2], TOML), (READERS[3], CSV), (READERS[4], CSV)],
)
def test_damaged_content(reader, contents, here) -> None:
    def attack(content: str) -> str:
        file = here / "file"
        file.write_text(content)
        return fault(words(reader, file, here / "out"), out=here / "out")

    expect_none(attack(content) for content in contents)


def test_there_are_enough_hostile_files() -> None:
    special = len(READERS) * len(NODES)
    assert special + 2 * len(TOML) + 2 * len(CSV) >= 60 and len({*NODES, *TOML, *CSV}) >= 35


@pytest.mark.parametrize(
    "name", ["manifest.json", "recipe.json", "train-00000.idx", "tokenizer.model"]
)
def test_a_damaged_corpus(name, here) -> None:
    def attack(node: str) -> str:
        data = here / node.replace(" ", "-")
        shutil.copytree(LEGACY / "corpus", data)
        (data / name).unlink()
        NODES[node](data / name)
        return fault(["data", "inspect", data])

    expect_none(attack(node) for node in NODES)
