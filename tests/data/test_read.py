"""However a file is cut into pieces, each document is read once, whole and in order."""

import gzip
import json
import os
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.data import columns, sources
from pipeline.data import readers as reading
from pipeline.data.corpus_recipe import MB, Kind, Malformed, Piece
from pipeline.data.sources import plan
from pipeline.errors import DataError
from tests.data.conftest import documents, pieces_of, refused, some_texts, write_jsonl

in_tmp_path = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def cut(path: Path, kind: Kind, cuts: list[int]) -> list[Piece]:
    edges = sorted({0, path.stat().st_size, *cuts})
    return [Piece("s", kind, str(path), a, b, b - a) for a, b in pairwise(edges)]


def write_arrow(path: Path, table: Any, compression: str | None = None, **options: int) -> Path:
    settings = pyarrow.ipc.IpcWriteOptions(compression=compression)
    with pyarrow.ipc.new_file(path, table.schema, options=settings) as file:
        file.write_table(table, **options)
    return path


@in_tmp_path
@given(
    st.lists(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=30), min_size=1, max_size=8
    ),
    st.data(),
)
def test_jsonl_in_any_pieces(tmp_path: Path, texts: list[str], data: st.DataObject) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    cuts = data.draw(st.lists(st.integers(0, path.stat().st_size), max_size=5))
    assert documents(cut(path, "jsonl", cuts)) == texts


@in_tmp_path
@given(st.text(st.sampled_from("ab\né東𝕏"), min_size=1, max_size=300), st.integers(1, 5))
def test_text_in_any_pieces(tmp_path: Path, text: str, unit: int) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "TEXT_DOCUMENT_BYTES", 16)
        patch.setattr(reading, "SEEK_BYTES", 8)
        whole = documents(cut(path, "text", []))
        parts = documents(cut(path, "text", list(range(0, path.stat().st_size, 16 * unit))))
    assert "".join(map(str, whole)) == text
    assert parts == whole


def test_compressed_files_whole_and_truncated(tmp_path: Path) -> None:
    texts = some_texts(200)
    plain = write_jsonl(tmp_path / "a.jsonl", texts).read_bytes()
    two_frames = zstandard.compress(plain[:5000]) + zstandard.compress(plain[5000:])
    for suffix, packed in (("gz", gzip.compress(plain)), ("zst", two_frames)):
        path = tmp_path / f"b.jsonl.{suffix}"
        path.write_bytes(packed)
        assert documents(pieces_of(path)) == texts
        path.write_bytes(packed[: len(packed) // 2])
        with refused(path.name):
            documents(pieces_of(path))


def test_parquet_arrow_and_datasets(tmp_path: Path) -> None:
    texts = some_texts(30)
    table = pyarrow.table({"text": texts, "n": list(range(30))})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    write_arrow(tmp_path / "file.arrow", table, max_chunksize=7)
    with pyarrow.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=7)
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "saved")
    (tmp_path / "files").mkdir()
    for i in range(3):  # `datasets` streams them as three shards, as from the hub
        write_jsonl(tmp_path / "files" / f"{i}.jsonl", texts[i * 10 : i * 10 + 10])
    named = [tmp_path / name for name in ("a.parquet", "file.arrow", "stream.arrow")]
    for source in (*named, f"hf:{tmp_path}/saved", f"hf:{tmp_path}/files:train"):
        assert documents(pieces_of(source)) == texts
    for source in named:
        with refused("text-key='body'"):
            documents(pieces_of(source), key="body")


def test_a_dataset_and_its_files_are_one_source(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "saved")
    (tmp_path / "files").mkdir()
    for i in range(2):
        write_jsonl(tmp_path / "files" / f"{i}.jsonl", ["text"])
    saved = f"hf:{tmp_path}/saved"
    hub = f"hf:{tmp_path}/files"
    for first, second in (
        (saved, f"{saved}:train"),
        (saved, f"hf:{tmp_path}/../{tmp_path.name}/saved"),
        (saved, f"{tmp_path}/saved/"),
        (hub, f"{hub}:train"),
        (f"{tmp_path}/files/1.jsonl", hub),
    ):
        with refused(f"source={second!r}"):
            pieces_of(first, second)
    before = pieces_of(hub)
    assert pieces_of(hub) == before
    (tmp_path / "files" / "1.jsonl").open("a").write("{}\n")
    after = pieces_of(hub)
    assert after != before  # its time stamp has changed
    [bad] = [found for found in documents(after) if isinstance(found, Malformed)]
    assert (bad.path, bad.position) == (f"{hub} shard 1 of 2", 1)


@pytest.mark.parametrize(
    "writing",
    [
        {"compression": "none", "use_dictionary": False},
        {"compression": "zstd", "data_page_version": "2.0", "write_page_index": True},
        {"compression": "snappy", "dictionary_pagesize_limit": 2**30},
    ],
)
def test_parquet_with_long_rows_and_damage(tmp_path, monkeypatch, writing):
    path = tmp_path / "a.parquet"
    texts = [*some_texts(200), "x" * 300_000, *some_texts(200, seed=1)]
    table = pyarrow.table({"n": list(range(401)), "text": texts})
    pyarrow.parquet.write_table(table, path, data_page_size=1000, write_batch_size=5, **writing)
    [piece] = pieces_of(path)
    for batch_bytes in (columns.BATCH_BYTES, 3000, 1):  # it reads 256 rows at a time, a few, or one
        monkeypatch.setattr(columns, "BATCH_BYTES", batch_bytes)
        assert documents([piece]) == texts
    monkeypatch.setattr(columns, "DOCUMENT_BYTES", 100_000)
    monkeypatch.setattr(reading, "DOCUMENT_BYTES", 100_000)
    assert documents([piece])[200] == Malformed(str(path), 200, "text longer than 0 MB", 300_000)
    page = pyarrow.parquet.read_metadata(path).row_group(0).column(1).data_page_offset
    raw = bytearray(path.read_bytes())
    raw[page + 1 : page + 20] = b"\xff" * 19
    path.write_bytes(raw)
    with refused("a.parquet"):
        documents([piece])


@pytest.mark.parametrize("new", [pyarrow.ipc.new_file, pyarrow.ipc.new_stream])
@pytest.mark.parametrize("compression", ["lz4", "zstd", None])
def test_arrow_is_planned_without_reading_it(tmp_path, monkeypatch, new, compression):
    path = tmp_path / "a.arrow"
    texts: list[str | None] = [*some_texts(29), None]
    table = pyarrow.table({"text": pyarrow.array(texts).dictionary_encode(), "n": list(range(30))})
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    with new(path, table.schema, options=options) as file:
        file.write_table(table, max_chunksize=7)
    with monkeypatch.context() as patch:
        patch.setattr(columns, "_read_batches", lambda *_: pytest.fail("planning reads batches"))
        pieces = pieces_of(path)
    assert len(pieces) == 5
    *found, last = documents(pieces)
    assert found == texts[:-1] and documents(pieces[3:])[:-1] == texts[21:-1]
    for item in (last, documents(pieces[4:])[-1]):  # rows are numbered in the file
        assert isinstance(item, Malformed) and item.position == 29


def test_text_that_is_not_utf8_is_malformed_row_by_row(tmp_path: Path) -> None:
    raw = [b"good", b"\xff\xfe", b"also good"]
    broken = pyarrow.array(raw, pyarrow.binary()).view(pyarrow.string())
    kinds = {"plain": broken, "dictionary": broken.dictionary_encode(), "bytes": pyarrow.array(raw)}
    for name, column in kinds.items():
        table = pyarrow.table({"text": column})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
        write_arrow(tmp_path / f"{name}.arrow", table)
    for path in sorted(tmp_path.iterdir()):
        first, bad, last = documents(pieces_of(path))
        assert isinstance(bad, Malformed) and (bad.position, bad.bytes) == (1, 2), path
        assert path.stem == "bytes" or (first, last) == ("good", "also good"), path


def test_a_column_with_a_dot_in_its_name(tmp_path: Path) -> None:
    table = pyarrow.table({"a.b": ["dotted"] * 3, "a": ["plain"] * 3, "c": [["in a list"]] * 3})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    pieces = pieces_of(tmp_path)
    assert documents(pieces, "a.b") == ["dotted"] * 3
    assert documents(pieces, "a") == ["plain"] * 3
    assert all(isinstance(found, Malformed) for found in documents(pieces, "c"))


@pytest.mark.parametrize("damage", ["offsets", "end", "reader"])
def test_a_damaged_arrow_file_is_one_line(tmp_path, monkeypatch, damage):
    """This includes files that crash Arrow's process, and any other exception of a reader."""
    column = pyarrow.array(some_texts(30))
    if damage == "offsets":
        _, offsets, data = column.buffers()
        wrong = bytearray(offsets.to_pybytes())
        wrong[4:8] = b"\0\0\0\x60"
        column = pyarrow.StringArray.from_buffers(30, pyarrow.py_buffer(bytes(wrong)), data)
    path = write_arrow(tmp_path / "a.arrow", pyarrow.table({"text": column}), "lz4")
    if damage == "end":
        path.write_bytes(path.read_bytes()[:-4])
    if damage == "reader":
        monkeypatch.setattr(columns, "_read_batches", lambda *_: {}["unheard of"])
    with refused("a.arrow"):
        documents(pieces_of(path))


def test_malformed_rows_are_counted_with_their_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "DOCUMENT_BYTES", 20)
    monkeypatch.setattr(columns, "DOCUMENT_BYTES", 20)
    table = pyarrow.table({"text": pyarrow.array(["good", "ü" * 15, None, "good"])})
    coded = pyarrow.table({"text": table["text"].combine_chunks().dictionary_encode()})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    write_arrow(tmp_path / "a.arrow", table)
    write_arrow(tmp_path / "coded.arrow", coded)
    write_arrow(tmp_path / "blobs.arrow", pyarrow.table({"text": pyarrow.array([b"12345"])}))
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    names = [tmp_path / name for name in ("a.parquet", "a.arrow", "coded.arrow", "blobs.arrow")]
    for source in (*names, f"hf:{tmp_path}/saved"):
        found = documents(pieces_of(source))
        bad = [(item.position, item.bytes) for item in found if isinstance(item, Malformed)]
        assert bad == ([(0, 5)] if "blobs" in str(source) else [(1, 30), (2, 0)]), source


def test_malformed_lines_have_positions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "DOCUMENT_BYTES", 100)
    good = b'{"text": "good"}\n'
    bad = [
        b'{"text": \n',
        b'{"text": null}\n',
        b'["text"]\n',
        b'{"text": "\\ud800"}\n',
        b'{"text": "\xff"}\n',
        b'{"text": "' + b"x" * 3_000_000 + b'"}\n',
    ]
    path = tmp_path / "a.jsonl"
    # A byte order mark is not part of the first line.
    content = b"\xef\xbb\xbf" + good + b"".join(line + good for line in bad) + b"\n\n"
    path.write_bytes(content)
    items = documents(cut(path, "jsonl", []))
    assert [item for item in items if isinstance(item, str)] == ["good"] * (len(bad) + 1)
    found = [item for item in items if isinstance(item, Malformed)]
    for item, line in zip(found, bad, strict=True):
        start = content.index(line)
        assert start <= item.position < start + len(line)


def test_a_line_across_many_pieces_is_read_once(tmp_path, monkeypatch):
    """A 1 GB line in 64 pieces once took 32 GB of reading."""
    skip = reading._skip_line
    skipped: list[int] = []
    monkeypatch.setattr(
        reading, "_skip_line", lambda *given: skipped.append(skip(*given)) or skipped[-1]
    )
    texts = ["first", "x" * 1_000_000, "last"]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    assert documents(cut(path, "jsonl", list(range(0, 1_000_000, 1000)))) == texts
    assert sum(skipped) < 1_100_000


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\n")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "two"}')
    assert documents(pieces_of(tmp_path)) == ["one\n", "two"]


def test_binary_and_invalid_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc\0def")
    (tmp_path / "b.txt").write_bytes(b"abc\xffdef")
    for found in documents(pieces_of(tmp_path)):
        assert isinstance(found, Malformed) and found.position == 3


def test_large_files_are_cut_and_small_ones_grouped(tmp_path: Path) -> None:
    line = json.dumps({"text": "x" * 1000}).encode() + b"\n"
    (tmp_path / "big.jsonl").write_bytes(line * 9000)
    for i in range(5):
        (tmp_path / f"small{i}.jsonl").write_bytes(line)
    tasks = plan([str(tmp_path)], limit_bytes=None, seed=0)
    assert len(tasks) == 2 and len(tasks[-1]) == 6
    assert len(documents([piece for task in tasks for piece in task])) == 9005


def test_a_directory_with_links_loops_and_other_files(tmp_path: Path) -> None:
    texts = [some_texts(9, seed=i) for i in range(4)]
    source = tmp_path / "in"
    (source / "deep").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    write_jsonl(source / "a.jsonl", texts[0])
    write_jsonl(source / "deep" / "b.JSONL", texts[1])
    packed = zstandard.compress(write_jsonl(tmp_path / "c", texts[2]).read_bytes())
    (source / "deep" / "C.JSONL.ZST").write_bytes(packed)
    write_jsonl(tmp_path / "elsewhere" / "d.jsonl", texts[3])
    links = {"far": "../elsewhere", "loop": ".", "again": "deep", "gone.jsonl": "nowhere"}
    links |= {"self.jsonl": "self.jsonl", "ping": "pong", "pong": "ping"}
    for name, target in links.items():
        (source / name).symlink_to(target)
    for name in ("README.md", "deep/x.bin", ".hidden.md"):
        (source / name).write_text("hello")
    warnings: list[str] = []
    options: dict[str, Any] = {"limit_bytes": None, "seed": 0, "warn": warnings.append}
    [task] = plan([str(source)], out=tmp_path / "out", **options)
    found = documents(list(task))
    assert sorted(map(str, found)) == sorted(text for some in texts for text in some)
    others, broken = warnings
    assert "2 files" in others and f"{source}/README.md" in others
    assert "4 broken links" in broken and f"{source}/gone.jsonl" in broken
    plan([f"{source}/*.[Jj]*"], out=source / "ping", **options)
    assert "2 broken links" in warnings[2] and len(warnings) == 3


def test_the_library_is_read_once_also_where_files_are_links(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.py").symlink_to("a.py")  # as in Debian's sysconfig data
    paths = {"stdlib": str(tmp_path), "purelib": str(tmp_path / "none")}
    monkeypatch.setattr("sysconfig.get_paths", lambda: paths)
    assert [piece.path for piece in pieces_of("python")] == [str(tmp_path / "a.py")]


def test_a_limit_ends_at_the_document_that_reaches_it(tmp_path: Path) -> None:
    texts = [f"{i:03d} {'x' * 95}" for i in range(100)]
    for i in range(2):
        write_jsonl(tmp_path / f"{i}.jsonl", texts[i * 50 : i * 50 + 50])
    (tmp_path / "a.txt").write_text("\n".join(texts))
    plain = write_jsonl(tmp_path / "all.jsonl", texts).read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(plain))
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet", row_group_size=70)
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")

    def within(source: str, limit: int) -> list[str | Malformed]:
        return documents(pieces_of(source, limit_bytes=limit))

    line = len(plain) // 100
    assert within(f"{tmp_path}/all.jsonl", 60 * line) == texts[:60]
    assert within(f"{tmp_path}/all.jsonl", 60 * line + 1) == texts[:61]
    assert within(f"{tmp_path}/[01].jsonl", 60 * line) == [*texts[:30], *texts[50:80]]
    assert within(f"{tmp_path}/a.txt", 999) == ["\n".join(texts[:10]) + "\n"]
    for source in (f"{tmp_path}/b.jsonl.gz", f"{tmp_path}/c.parquet", f"hf:{tmp_path}/saved"):
        assert within(source, 990) == texts[:10] and within(source, 991) == texts[:11]


def test_the_files_of_a_glob_share_a_limit(tmp_path: Path) -> None:
    """Files share it in proportion to their sizes. Of many small files, only some are read."""
    lines = {"a": 4000, "b": 2000, "c": 2000}
    for name, count in lines.items():
        write_jsonl(tmp_path / f"{name}.jsonl", [name * 87] * count)
    line = (tmp_path / "a.jsonl").stat().st_size // 4000
    pieces = pieces_of(f"{tmp_path}/?.jsonl", limit_bytes=4000 * line)
    read = Counter(str(text)[0] for text in documents(pieces))
    assert read == {"a": 2000, "b": 1000, "c": 1000}
    for i in range(1000):
        write_jsonl(tmp_path / f"{i:04d}.jsonl", [f"{i:04d}" * 20] * 10)
    warnings: list[str] = []
    limit = 1000 * line
    [task] = plan([f"{tmp_path}/0*.jsonl"], limit_bytes=limit, seed=0, warn=warnings.append)
    chosen = [int(Path(piece.path).stem) for piece in task]
    assert sum(piece.bytes for piece in task) == pytest.approx(limit, rel=0.02)
    assert np.diff(chosen).max() <= 2 + np.diff(chosen).min()
    [warning] = warnings
    unread = 1000 - len(chosen)
    assert f"limit-bytes={limit:,}" in warning and f"{unread:,} of 1,000 files" in warning


def test_pieces_count_by_what_is_read_of_them_and_quickly(tmp_path: Path) -> None:
    texts = [os.urandom(60).hex() for _ in range(1000)]
    plain = write_jsonl(tmp_path / "all", texts).read_bytes()
    for i in range(8):
        (tmp_path / f"{i}.jsonl.gz").write_bytes(gzip.compress(plain))
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / f"{i}.parquet")
    for suffix in ("gz", "parquet"):
        found = documents(pieces_of(f"{tmp_path}/*.{suffix}", limit_bytes=400_000))
        assert sum(len(str(text)) for text in found) == pytest.approx(400_000, rel=0.01)
    tiny = [[Piece("s", "text", f"{i}", 0, 9, 9)] for i in range(40_000)]
    start = time.process_time()
    [task] = sources._group(sources._shared(tiny, 9 * 30_000), MB)
    assert len(task) == 30_000 and time.process_time() - start < 4  # it once took a minute


@pytest.mark.parametrize(
    ("sources", "key"),
    [
        (["{}/nowhere.jsonl"], "nowhere.jsonl"),
        (["{}/empty"], "empty"),
        (["{}/loop.jsonl"], "loop.jsonl"),
        (["{}/" + "x" * 300], "source="),
        (["hf:{}/" + "x" * 300], "source="),
        (["{}/picture.png"], ".png"),
        (["{}/a.txt", "{}/*.txt"], "a.txt"),
        (["{}/a.txt", "{}/a.txt"], "a.txt"),
        (["{}/bad.parquet"], "bad.parquet"),
        (["{}/bad.arrow"], "bad.arrow"),
        (["{}/bad.idx"], "bad.bin"),
        (["hf:{}/empty"], "source="),
        (["hf:{}/saved:nosuch"], "'nosuch'"),
        ([""], "source=''"),
        (["{}/latin"], "latin"),
    ],
)
def test_sources_that_cannot_be_read(tmp_path: Path, sources: list[str], key: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    for name in ("a.txt", "picture.png", "bad.parquet", "bad.arrow", "bad.idx"):
        (tmp_path / name).write_text("hello")
    (tmp_path / "latin").mkdir()
    (tmp_path / "latin" / os.fsdecode(b"\xe9.txt")).write_text("hello")
    if "saved" in sources[0]:
        split = datasets.Dataset.from_dict({"text": ["a"]})
        datasets.DatasetDict({"train": split, "test": split}).save_to_disk(tmp_path / "saved")
    with refused(key, DataError):
        pieces_of(*(source.format(tmp_path) for source in sources))
