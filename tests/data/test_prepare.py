"""The whole preparation: the same bytes for any number of workers, one line for every error."""

import gzip
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.bench.data_stage import _peak_bytes
from pipeline.data.corpus import Corpus, claimed
from pipeline.data.corpus_recipe import Recipe
from pipeline.data.dedup import _mapped, deduplicate
from pipeline.data.encode import is_held_out
from pipeline.data.prepare import prepare
from pipeline.data.shards import MANIFEST, save
from pipeline.data.sources import plan
from pipeline.data.tokenizer import Tokenizer, train
from pipeline.errors import ConfigError
from tests.conftest import flip_bit
from tests.data.conftest import contents, make, recipe_for, refused, some_texts, write_jsonl

pytestmark = pytest.mark.usefixtures("ray_cluster")

Fails = Callable[..., None]


@pytest.fixture
def fails(tokenizer: Tokenizer) -> Fails:
    def check(key: str, sources: list[Path], out: Path, **settings: object) -> None:
        with refused(key):
            make(sources, out, tokenizer, **settings)
        # Unlike Path.exists, it accepts a name that is too long.
        assert not os.path.exists(out / MANIFEST)  # noqa: PTH110

    return check


def replace_content(path: Path, content: bytes) -> None:
    """Keep the time stamp, so that the planner sees no change."""
    stamp = path.stat().st_mtime_ns
    path.write_bytes(content)
    os.utime(path, ns=(stamp, stamp))


def test_same_bytes_for_any_number_of_workers(tmp_path: Path) -> None:
    """This includes the training of a tokenizer. One worker means one task at a time."""
    line = json.dumps({"text": "the shard of the loss " * 40}).encode() + b"\n"
    write_jsonl(tmp_path / "a.jsonl", some_texts(400)).open("ab").write(line * 9000)
    (tmp_path / "b.txt").write_text("\n".join(some_texts(30, seed=2)))
    sources = (str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt"))
    recipe = Recipe(sources=sources, vocab_size=600, valid_share=0.1)
    results = []
    for workers in (1, 2):
        manifest, reused = prepare(recipe, tmp_path / f"out{workers}", workers=workers)
        assert not reused and len(manifest.splits["train"].shards) > 2
        results.append(contents(tmp_path / f"out{workers}"))
    assert results[0] == results[1]
    assert not any(name.startswith(".work") for name in results[0])


def test_a_second_call_does_nothing_and_other_arguments_are_refused(tmp_path, tokenizer):
    source = write_jsonl(tmp_path / "a.jsonl", some_texts(50))
    out = tmp_path / "out"
    first = make([source], out, tokenizer)
    before = contents(out)
    (out / ".work" / "x").mkdir(parents=True)  # killed just after the manifest
    again, reused = prepare(recipe_for([source], tokenizer), out, model=tokenizer.model)
    assert reused and again == first and not (out / ".work").exists()
    with refused("valid_share=0.01"):
        make([source], out, tokenizer, valid_share=0.3)
    with refused(f"tokenizer={tokenizer.fingerprint!r}"):
        make([source], out, Tokenizer(train(some_texts(300), 400)))
    text = source.read_bytes()
    replace_content(source, text + text)
    with refused("input files"):
        make([source], out, tokenizer)
    assert contents(out) == before
    replace_content(source, text)
    flip_bit(out / "train-00000.bin")
    with refused("train-00000.bin"):
        make([source], out, tokenizer)
    for broken in ("", "[]", '{"recipe": null}'):
        (out / "recipe.json").write_text(broken)
        with refused("recipe.json"):
            make([source], out, tokenizer)


def test_relative_paths_are_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the cluster was started."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("a.jsonl"), some_texts(50)).open("ab").write(b"{\n")
    (tmp_path / "hub").mkdir()
    write_jsonl(Path("hub/b.jsonl"), some_texts(50, seed=1))
    recipe = Recipe(sources=("a.jsonl", "hf:hub"), vocab_size=600, dedup={"exact": True})
    manifest, _ = prepare(recipe, Path("out"), malformed_share=0.1)
    assert manifest.stages[0].documents_kept == 100
    assert json.loads((tmp_path / "out" / "malformed.jsonl").read_text())["path"] == "a.jsonl"


def test_only_what_is_missing_is_done(tmp_path: Path, tokenizer: Tokenizer) -> None:
    sources = [write_jsonl(tmp_path / f"{i}.jsonl", some_texts(30, seed=i)) for i in range(3)]
    make(sources, tmp_path / "whole", tokenizer)
    out = tmp_path / "out"
    # Stop it midway: the second source goes bad after the first is done.
    good = sources[1].read_bytes()
    replace_content(sources[1], b"{" * len(good))
    with refused("1.jsonl at 0"):
        prepare(recipe_for(sources, tokenizer), out, model=tokenizer.model, malformed_share=0)
    assert [path.name for path in out.iterdir()] == [".work"]
    [shard] = out.glob(".work/*/train-00000.bin")
    inode = shard.stat().st_ino
    replace_content(sources[1], good)
    [record] = out.glob(".work/*/00001.done.json")
    record.unlink()
    (record.parent / "train-00002.bin.dead.part").write_bytes(b"left by a killed writer")
    make(sources, out, tokenizer)
    assert (out / "train-00000.bin").stat().st_ino == inode
    assert contents(out) == contents(tmp_path / "whole")


def test_the_split_is_stable_when_data_are_added(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = some_texts(400)
    for count in (200, 400):
        source = write_jsonl(tmp_path / f"{count}.jsonl", texts[:count])
        make([source], tmp_path / f"out{count}", tokenizer, valid_share=0.2)
        held_out = Corpus.open(tmp_path / f"out{count}").split("valid").documents
        assert held_out == sum(is_held_out(text.encode(), 0.2) for text in texts[:count])


def test_built_in_corpora(tmp_path: Path) -> None:
    for source in ("python", "synthetic"):
        recipe = Recipe(sources=(source,), vocab_size=1000, limit_bytes=400_000)
        share = prepare(recipe, tmp_path / source)[0].sources[0]
        assert share.bytes > 350_000
        assert (share.entropy_nats_per_byte is not None) == (source == "synthetic")


@pytest.mark.parametrize("dedup", [{}, {"exact": True}])
def test_malformed_documents_are_counted_and_listed(tmp_path, tokenizer, dedup):
    sources = [write_jsonl(tmp_path / f"{i}.jsonl", some_texts(200, seed=i)) for i in range(2)]
    size = sources[0].stat().st_size
    sources[0].open("ab").write(b'{"text": "\xff"}\n{"text": "   "}\n')
    last = sources[1].stat().st_size
    sources[1].open("ab").write(b"{}\n" * 150)
    recipe = recipe_for(sources, tokenizer, dedup=dedup)
    manifest, _ = prepare(recipe, tmp_path / "out", model=tokenizer.model, malformed_share=0.5)
    stage = manifest.stages[0]
    assert stage.dropped == {"malformed": (151, 14 + 450), "empty": (1, 3)}
    assert (stage.documents_in, stage.documents_kept) == (552, 400)
    first, *rest = map(json.loads, (tmp_path / "out" / "malformed.jsonl").read_text().splitlines())
    assert first == {"path": str(sources[0]), "position": size + 10, "reason": "not UTF-8"}
    positions = [(line["path"], line["position"]) for line in rest]
    assert positions == [(str(sources[1]), last + 3 * i) for i in range(150)]


def test_bad_input(tmp_path: Path, tokenizer: Tokenizer, fails: Fails) -> None:
    def file(name: str, content: bytes) -> Path:
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    out = tmp_path / "out"
    for empty in (
        file("empty.txt", b""),
        file("empty.jsonl.gz", gzip.compress(b"")),
        file("lines.jsonl", b"\n\n\n"),
    ):
        fails("empty", [empty], out)
    fails("empty", [empty], out, dedup={"exact": True})
    fails("'body'", [file("some.jsonl", b'{"body": "a", "url": "b"}\n')], out)
    some = write_jsonl(tmp_path / "some.jsonl", some_texts(9))
    evals = file("evals.jsonl", b'{"question": "a"}')
    for against, key in (
        ("nosuch.txt", "decontaminate.against='nosuch.txt'"),
        (str(evals), "decontaminate.against"),
        (str(some), "overlap: 9"),
    ):
        fails(key, [some], out, decontaminate={"against": [against]})
    nothing = {"quality": {"words": [0, 0]}}
    fails("words: 9", [some], out, filters=nothing, dedup={"exact": True})
    for function in ("nowhere:f", "math:sqrt"):
        with refused(f"filters.score.function={function!r}", ConfigError):
            make([some], out, tokenizer, filters={"score": {"function": function, "least": 0}})
    with refused("mixture.weights", ConfigError):
        make([some], out, tokenizer, mixture={"weights": {"other": 1}})
    fails("empty: 1", [file("blank.jsonl", b'{"text": " "}\n\n')], out)
    fails("NUL byte", [file("binary.txt", bytes(range(256)))], out)
    fails("not UTF-8", [file("latin.txt", "é".encode("latin-1"))], out)
    assert not out.exists()
    one = make([file("one.txt", b"a corpus of one document")], out, tokenizer)
    assert (one.splits["train"].documents, one.splits["valid"].documents) == (1, 0)


def test_a_line_of_one_gigabyte(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The file has a hole: a gigabyte to read, none on disk. 61 tasks find it, and one reports it."""
    source = write_jsonl(tmp_path / "a.jsonl", some_texts(200))
    position = source.stat().st_size
    with source.open("r+b") as file:
        file.seek(position)
        file.write(b'{"text": "')
        file.seek(2**30, os.SEEK_CUR)
        file.write(b'"}\n' + json.dumps({"text": "behind it"}).encode())
    manifest = make([source], tmp_path / "out", tokenizer)
    assert manifest.stages[0].dropped == {"malformed": (1, 2**30 + 13)}
    assert manifest.stages[0].documents_kept == 201
    listed = json.loads((tmp_path / "out" / "malformed.jsonl").read_text())
    assert (listed["path"], listed["position"]) == (str(source), position)
    assert _peak_bytes() < 1.5 * 2**30


def test_unfinished_work_of_other_arguments_does_not_matter(tmp_path, tokenizer, fails):
    source = write_jsonl(tmp_path / "a.jsonl", some_texts(50))
    out = tmp_path / "out"
    good = source.read_bytes()
    source.write_bytes(good + b"{\n" * 9)
    fails("malformed=9", [source], out)
    assert [path.name for path in out.iterdir()] == [".work"]
    # Another call was killed while it moved its files.
    for name in ("train-00007.bin", "train-00007.idx", "malformed.jsonl"):
        (out / name).write_bytes(b"of other arguments")
    source.write_bytes(good)
    warnings: list[str] = []
    prepare(recipe_for([source], tokenizer), out, model=tokenizer.model, warn=warnings.append)
    assert len(warnings) == 1 and ".work" in warnings[0]
    make([source], tmp_path / "whole", tokenizer)
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("source", ["nest", "nest/**/*.jsonl", "nest/*/*", "link"])
def test_out_within_a_source_is_not_read(tmp_path, tokenizer, fails, monkeypatch, source):
    """Not the shards of an unfinished call, not the files of a finished one, and not through links."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nest" / "text").mkdir(parents=True)
    bad = write_jsonl(tmp_path / "nest" / "text" / "a.jsonl", some_texts(50))
    bad.open("ab").write(b"{\n" * 9)
    (tmp_path / "link").symlink_to("nest")
    out = Path("link/out")
    fails("malformed=9", [Path(source)], out)
    assert list(out.glob(".work/*/train-*.idx"))
    recipe = recipe_for([Path(source)], tokenizer)
    for expected in (False, True):
        manifest, reused = prepare(recipe, out, model=tokenizer.model, malformed_share=0.5)
        assert reused == expected and (out / "malformed.jsonl").exists()
        assert manifest.stages[0].documents_in == 59
    for hidden in (Path("nest/other/.work/x"), Path("nest/.cache")):
        shutil.copytree(out, hidden)
    assert len(plan(["nest"], limit_bytes=None, seed=0, out=out)[0]) == 1


def test_a_source_within_out_is_refused(tmp_path: Path, fails: Fails) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", some_texts(9))
    fails("out=", [source], tmp_path)
    with refused("out="):
        prepare(Recipe(sources=(f"hf:{tmp_path}",)), tmp_path / "out")


def test_two_at_once(tmp_path: Path, fails: Fails) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", some_texts(9))
    out = tmp_path / "out"
    with claimed(out, "of somebody else", print):
        fails("out=", [source], out)
        assert {path.name for path in out.glob(".work/*")} == {"lock", "of somebody else"}


def test_killed_while_files_are_moved(tmp_path, tokenizer, monkeypatch):
    sources = [write_jsonl(tmp_path / f"{i}.jsonl", some_texts(30, seed=i)) for i in range(2)]
    rename = Path.rename
    moved: list[str] = []

    def killed(path: Path, target: Path) -> None:
        if len(moved) == 3:
            raise KeyboardInterrupt
        moved.append(target.name)
        rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", killed)
        make(sources, tmp_path / "out", tokenizer, valid_share=0.2)
    assert moved[0] == "train-00000.bin" and not (tmp_path / "out" / MANIFEST).exists()
    for out in ("out", "whole"):
        make(sources, tmp_path / out, tokenizer, valid_share=0.2)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_out_that_cannot_be_used(tmp_path: Path, fails: Fails) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", some_texts(10))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    (tmp_path / "loop").symlink_to("loop")
    fails("mine", [source], tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    for out in ("a.jsonl/below", "a.jsonl", os.fsdecode(b"\xe9"), "x" * 300, "loop", "/proc/out"):
        fails("--out", [source], tmp_path / out)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small disk needs root")
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_full_disk_then_space(tmp_path, disk, tokenizer, fails):
    """One line, nothing half-written; with space again, the same command finishes."""
    source = write_jsonl(tmp_path / "a.jsonl", some_texts(300))
    fails("disk full", [source], disk / "out")
    assert not list(disk.rglob("*.part")) and not list(disk.rglob("*.bin"))
    subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
    make([source], disk / "out", tokenizer)
    make([source], tmp_path / "out", tokenizer)
    assert contents(disk / "out") == contents(tmp_path / "out")


@pytest.mark.parametrize("lost", [0, 1])
def test_a_file_that_changes_between_the_passes(tmp_path, monkeypatch, fails, lost):
    """Otherwise dedup's decisions would be applied to other documents."""
    source = tmp_path / "a.jsonl.gz"
    lines = [json.dumps({"text": text}) + "\n" for text in some_texts(50)]
    source.write_bytes(gzip.compress("".join(lines).encode()))

    def change(*arguments: object) -> None:
        found = lines[lost:] if lost else [*lines, lines[0]]
        source.write_bytes(gzip.compress("".join(found).encode()))
        return deduplicate(*arguments)

    monkeypatch.setattr("pipeline.data.prepare.deduplicate", change)
    fails("a file changed", [source], tmp_path / "out", dedup={"exact": True})


def test_a_full_disk_is_an_error_of_every_writer(disk: Path) -> None:
    """numpy's own writer gives no error number, and a mapped file would end the process."""
    with refused("disk full"):
        save(disk / "a.npy", np.zeros(2**16))
    with refused("disk full"):
        _mapped(disk / "b", np.arange, 2**20)
    assert not list(disk.iterdir())
    save(disk / "c.npy", np.arange(5))
    assert np.load(disk / "c.npy").tolist() == [*_mapped(disk / "d", np.arange, 5)]


def test_read_only_disk(tmp_path: Path, disk: Path, fails: Fails) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", some_texts(10))
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    fails("--out", [source], disk / "out")
