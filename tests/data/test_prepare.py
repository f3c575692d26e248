"""The whole way: same bytes whatever the workers, one line for whatever is wrong, nothing half-written."""

import gzip
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.bench.data_stage import _peak_bytes
from pipeline.data.corpus import Corpus, claimed
from pipeline.data.corpus_recipe import Recipe
from pipeline.data.encode import is_held_out
from pipeline.data.prepare import prepare
from pipeline.data.shards import MANIFEST, Manifest
from pipeline.data.sources import plan
from pipeline.data.tokenizer import Tokenizer, train
from pipeline.errors import ConfigError, DataError
from tests.data.conftest import some_texts, write_jsonl

pytestmark = pytest.mark.usefixtures("ray_cluster")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def with_tokenizer(sources: list[Path], tokenizer: Tokenizer, **settings: object) -> Recipe:
    given = {
        "sources": tuple(map(str, sources)),
        "vocab_size": tokenizer.vocab,
        "tokenizer": tokenizer.fingerprint,
    }
    return Recipe.model_validate(given | settings)


def make(sources: list[Path], out: Path, tokenizer: Tokenizer, **settings: object) -> Manifest:
    return prepare(with_tokenizer(sources, tokenizer, **settings), out, model=tokenizer.model)[0]


def fails(
    says: str, sources: list[Path], out: Path, tokenizer: Tokenizer, **settings: object
) -> None:
    with pytest.raises(DataError, match=says) as caught:
        make(sources, out, tokenizer, **settings)
    assert "\n" not in str(caught.value)
    assert not (out / MANIFEST).exists()


def test_same_bytes_whatever_the_workers(tmp_path: Path) -> None:
    """Tokenizer training included; one worker is really one at a time."""
    line = json.dumps({"text": "the shard of the loss " * 40}).encode() + b"\n"
    write_jsonl(tmp_path / "a.jsonl", some_texts(400)).open("ab").write(line * 9000)
    (tmp_path / "b.txt").write_text("\n".join(some_texts(30, seed=2)))
    recipe = Recipe(
        sources=(str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")),
        vocab_size=600,
        valid_share=0.1,
    )
    results = []
    for workers in (1, 2):
        manifest, reused = prepare(recipe, tmp_path / f"out{workers}", workers=workers)
        assert not reused and len(manifest.splits["train"].shards) > 2
        results.append(contents(tmp_path / f"out{workers}"))
    assert results[0] == results[1]
    assert not any(name.startswith(".work") for name in results[0])


def test_a_second_call_does_nothing_and_other_arguments_are_refused(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    source, out = write_jsonl(tmp_path / "a.jsonl", some_texts(50)), tmp_path / "out"
    first, first_stamp = make([source], out, tokenizer), source.stat().st_mtime_ns
    before = contents(out)
    (out / ".work" / "x").mkdir(parents=True)  # killed behind the manifest
    again, reused = prepare(with_tokenizer([source], tokenizer), out, model=tokenizer.model)
    assert reused and again == first and not (out / ".work").exists()
    with pytest.raises(DataError, match=r"made with valid_share=0.01, now 0.3"):
        make([source], out, tokenizer, valid_share=0.3)
    other = Tokenizer(train(some_texts(300), 400))
    with pytest.raises(DataError, match=f"made with tokenizer={tokenizer.fingerprint!r}, now"):
        make([source], out, other)
    text = source.read_bytes()
    write_jsonl(source, some_texts(51))
    with pytest.raises(DataError, match="input files have changed"):
        make([source], out, tokenizer)
    assert contents(out) == before
    stamp = first_stamp
    source.write_bytes(text)
    os.utime(source, ns=(stamp, stamp))
    flipped = bytearray((out / "train-00000.bin").read_bytes())
    flipped[100] ^= 4
    (out / "train-00000.bin").write_bytes(flipped)
    with pytest.raises(DataError, match=r"train-00000.bin: .*damaged"):
        make([source], out, tokenizer)
    for broken in ("", "[]", '{"recipe": null}'):
        (out / "recipe.json").write_text(broken)
        with pytest.raises(DataError, match=r"recipe.json: damaged; choose another --out"):
            make([source], out, tokenizer)


def test_relative_paths_are_the_callers(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    # Stop it in the middle: the second source goes bad after the first was done.
    good = sources[1].read_bytes()
    stamp = sources[1].stat().st_mtime_ns
    sources[1].write_bytes(b"{" * len(good))
    os.utime(sources[1], ns=(stamp, stamp))
    with pytest.raises(DataError, match=r"malformed=1 .*1.jsonl at 0: not JSON"):
        prepare(with_tokenizer(sources, tokenizer), out, model=tokenizer.model, malformed_share=0)
    assert [path.name for path in out.iterdir()] == [".work"]
    [shard] = out.glob(".work/*/train-00000.bin")
    kept = shard.stat().st_ino
    sources[1].write_bytes(good)
    os.utime(sources[1], ns=(stamp, stamp))
    [record] = out.glob(".work/*/00001.done.json")
    record.unlink()
    (record.parent / "train-00002.bin.dead.part").write_bytes(b"left by a killed writer")
    make(sources, out, tokenizer)
    assert (out / "train-00000.bin").stat().st_ino == kept
    assert contents(out) == contents(tmp_path / "whole")


def test_the_split_is_stable_when_data_are_added(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = some_texts(400)
    for count in (200, 400):
        write_jsonl(tmp_path / f"{count}.jsonl", texts[:count])
        make([tmp_path / f"{count}.jsonl"], tmp_path / f"out{count}", tokenizer, valid_share=0.2)
    few, many = (
        Corpus.open(tmp_path / f"out{count}").split("valid").documents for count in (200, 400)
    )
    assert few == sum(is_held_out(t.encode(), 0.2) for t in texts[:200])
    assert many == sum(is_held_out(t.encode(), 0.2) for t in texts)


def test_built_in_corpora(tmp_path: Path) -> None:
    for source in ("python", "synthetic"):
        manifest, _ = prepare(
            Recipe(sources=(source,), vocab_size=1000, limit_bytes=400_000), tmp_path / source
        )
        share = manifest.sources[0]
        assert share.bytes > 350_000
        assert (share.entropy_nats_per_byte is not None) == (source == "synthetic")


@pytest.mark.parametrize("dedup", [{}, {"exact": True}])
def test_malformed_documents_are_counted_and_set_aside(
    tmp_path: Path, tokenizer: Tokenizer, dedup: dict[str, bool]
) -> None:
    """Every one with its position, task after task, however many a task meets."""
    sources = [write_jsonl(tmp_path / f"{i}.jsonl", some_texts(200, seed=i)) for i in range(2)]
    size = sources[0].stat().st_size
    sources[0].open("ab").write(b'{"text": "\xff"}\n{"text": "   "}\n')
    last = sources[1].stat().st_size
    sources[1].open("ab").write(b"{}\n" * 150)
    recipe = with_tokenizer(sources, tokenizer, dedup=dedup)
    manifest, _ = prepare(recipe, tmp_path / "out", model=tokenizer.model, malformed_share=0.5)
    stage = manifest.stages[0]
    assert stage.dropped == {"malformed": (151, 14 + 450), "empty": (1, 3)}
    assert (stage.documents_in, stage.documents_kept) == (552, 400)
    first, *rest = map(json.loads, (tmp_path / "out" / "malformed.jsonl").read_text().splitlines())
    assert first == {"path": str(sources[0]), "position": size + 10, "reason": "not UTF-8"}
    assert [(line["path"], line["position"]) for line in rest] == [
        (str(sources[1]), last + 3 * i) for i in range(150)
    ]


def test_bad_input(tmp_path: Path, tokenizer: Tokenizer) -> None:
    def file(name: str, content: bytes) -> Path:
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    out = tmp_path / "out"
    fails("every file is empty", [file("empty.txt", b"")], out, tokenizer)
    fails("every file is empty", [file("empty.jsonl.gz", gzip.compress(b""))], out, tokenizer)
    fails("every file is empty", [file("lines.jsonl", b"\n\n\n")], out, tokenizer)
    fails("every file is empty", [tmp_path / "lines.jsonl"], out, tokenizer, dedup={"exact": True})
    some = file("some.jsonl", b'{"body": "a", "url": "b"}\n')
    fails("no text under 'text' .--text-key., found keys 'body', 'url'", [some], out, tokenizer)
    some = write_jsonl(tmp_path / "some.jsonl", some_texts(9))
    for against, says in (
        ("nosuch.txt", "decontaminate.against='nosuch.txt': no such file"),
        (
            str(file("evals.jsonl", b'{"question": "a"}')),
            "decontaminate.against: .*evals.jsonl at 0: no text under",
        ),
        (str(some), "none of 9 documents is left .9 overlap."),
    ):
        fails(says, [some], out, tokenizer, decontaminate={"against": [against]})
    fails(
        "none of 9 .*9 words",
        [some],
        out,
        tokenizer,
        filters={"quality": {"words": [0, 0]}},
        dedup={"exact": True},
    )
    for function, says in (("nowhere:f", "No module"), ("math:sqrt", "fails: TypeError")):
        with pytest.raises(ConfigError, match=f"filters.score.function='{function}'.*{says}"):
            make([some], out, tokenizer, filters={"score": {"function": function, "least": 0}})
    with pytest.raises(ConfigError, match="one weight per source"):
        make([some], out, tokenizer, mixture={"weights": {"other": 1}})
    fails(
        "none of 1 documents is left", [file("blank.jsonl", b'{"text": " "}\n\n')], out, tokenizer
    )
    fails("NUL byte", [file("binary.txt", bytes(range(256)))], out, tokenizer)
    fails("not UTF-8", [file("latin.txt", "é".encode("latin-1"))], out, tokenizer)
    assert not out.exists()
    one = make([file("one.txt", b"a corpus of one document")], out, tokenizer)
    assert (one.splits["train"].documents, one.splits["valid"].documents) == (1, 0)


def test_a_line_of_one_gigabyte(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A hole in the file: a gigabyte to read, none on the disk. 61 tasks meet it, and one sets it aside."""
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
    aside = json.loads((tmp_path / "out" / "malformed.jsonl").read_text())
    assert aside == {"path": str(source), "position": position, "reason": "line longer than 16 MB"}
    assert _peak_bytes() < 1.5 * 2**30


def test_unfinished_work_stands_in_nobodys_way(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A mended input, or other arguments: a corpus as if nothing had been there, whatever was killed and where."""
    source, out = write_jsonl(tmp_path / "a.jsonl", some_texts(50)), tmp_path / "out"
    good = source.read_bytes()
    source.write_bytes(good + b"{\n" * 9)
    fails("malformed=9 of 59", [source], out, tokenizer)
    assert [path.name for path in out.iterdir()] == [".work"]
    for name in (
        "train-00007.bin",
        "train-00007.idx",
        "malformed.jsonl",
    ):  # killed as its files were moved
        (out / name).write_bytes(b"of other arguments")
    source.write_bytes(good)
    said: list[str] = []
    prepare(with_tokenizer([source], tokenizer), out, model=tokenizer.model, warn=said.append)
    [line] = said
    assert "unfinished work of other arguments" in line
    make([source], tmp_path / "whole", tokenizer)
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("source", ["nest", "nest/**/*.jsonl", "nest/*/*", "link"])
def test_out_within_a_source_is_not_read(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """Neither the shards of an unfinished call nor what a finished one leaves; a link to it is no way in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nest" / "text").mkdir(parents=True)
    bad = write_jsonl(tmp_path / "nest" / "text" / "a.jsonl", some_texts(50))
    bad.open("ab").write(b"{\n" * 9)
    (tmp_path / "link").symlink_to("nest")
    out = Path("link/out")
    fails("malformed=9 of 59", [Path(source)], out, tokenizer)
    assert list(out.glob(".work/*/train-*.idx"))
    for reused in (False, True):
        recipe = with_tokenizer([Path(source)], tokenizer)
        manifest, found = prepare(recipe, out, model=tokenizer.model, malformed_share=0.5)
        assert found == reused and (out / "malformed.jsonl").exists()
        assert manifest.stages[0].documents_in == 59
    for hidden in (Path("nest/other/.work/x"), Path("nest/.cache")):
        shutil.copytree(out, hidden)
    assert len(plan(["nest"], limit_bytes=None, seed=0, out=out)[0]) == 1


def test_a_source_within_out_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_jsonl(tmp_path / "a.jsonl", some_texts(9))
    fails("lies in out=", [tmp_path / "a.jsonl"], tmp_path, tokenizer)
    with pytest.raises(DataError, match=r"lies in source='hf:.*choose another --out"):
        prepare(Recipe(sources=(f"hf:{tmp_path}",)), tmp_path / "out")


def test_two_at_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source, out = write_jsonl(tmp_path / "a.jsonl", some_texts(9)), tmp_path / "out"
    with claimed(out, "of somebody else", print):
        fails("another `launch data prepare` is writing there", [source], out, tokenizer)
        assert sorted(out.glob(".work/*")) == [
            out / ".work" / "lock",
            out / ".work" / "of somebody else",
        ]


def test_killed_as_files_are_moved(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [write_jsonl(tmp_path / f"{i}.jsonl", some_texts(30, seed=i)) for i in range(2)]
    rename, moved = Path.rename, []

    def killed(path: Path, target: Path) -> None:
        if len(moved) == 3:
            raise KeyboardInterrupt
        moved.append(target.name)
        rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            make(sources, tmp_path / "out", tokenizer, valid_share=0.2)
    assert moved[0] == "train-00000.bin" and not (tmp_path / "out" / MANIFEST).exists()
    for out in ("out", "whole"):
        make(sources, tmp_path / out, tokenizer, valid_share=0.2)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_out_that_is_not_ours(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", some_texts(10))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    fails("not made by", [source], tmp_path / "mine", tokenizer)
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    fails("a.jsonl.*choose an --out", [source], source / "below", tokenizer)
    fails("a.jsonl: a file", [source], source, tokenizer)
    fails("not UTF-8; choose another --out", [source], tmp_path / os.fsdecode(b"\xe9"), tokenizer)
    fails("/proc/.*choose an --out", [source], Path("/proc/out"), tokenizer)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small disk takes root")
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True
    ).returncode:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_full_disk_then_room(tmp_path: Path, mount: Path, tokenizer: Tokenizer) -> None:
    """One line, nothing half-written; with room again the same command finishes, byte for byte."""
    source = write_jsonl(tmp_path / "a.jsonl", some_texts(300))
    fails("no room left", [source], mount / "out", tokenizer)
    assert not list(mount.rglob("*.part")) and not list(mount.rglob("*.bin"))
    subprocess.run(["mount", "-o", "remount,size=8m", mount], check=True)
    make([source], mount / "out", tokenizer)
    make([source], tmp_path / "out", tokenizer)
    assert contents(mount / "out") == contents(tmp_path / "out")


def test_read_only_disk(tmp_path: Path, mount: Path, tokenizer: Tokenizer) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", some_texts(10))
    subprocess.run(["mount", "-o", "remount,ro", mount], check=True)
    fails("cannot be written", [source], mount / "out", tokenizer)
