"""However a file is cut into pieces, its documents come out once, whole and in order; what is malformed is named."""

import gzip
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.data import columns
from pipeline.data import readers as reading
from pipeline.data.piece import Kind, Malformed, Piece
from pipeline.data.readers import read
from pipeline.data.sources import plan
from pipeline.errors import DataError
from tests.data.conftest import some_texts, write_jsonl


def pieces(path: Path, kind: Kind, cuts: list[int]) -> list[Piece]:
    edges = sorted({0, path.stat().st_size, *cuts})
    return [Piece("s", kind, str(path), a, b, b - a) for a, b in pairwise(edges)]


def everything(items: list[Piece]) -> list[str | Malformed]:
    return [item for piece in items for item in read(piece, "text")]


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=30), min_size=1, max_size=8
    ),
    st.data(),
)
def test_jsonl_in_any_pieces(tmp_path: Path, texts: list[str], data: st.DataObject) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    cuts = data.draw(st.lists(st.integers(0, path.stat().st_size), max_size=5))
    assert everything(pieces(path, "jsonl", cuts)) == texts


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.text(st.sampled_from("ab\né東𝕏"), min_size=1, max_size=300), st.integers(1, 5))
def test_text_in_any_pieces(tmp_path: Path, text: str, unit: int) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    size = path.stat().st_size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "TEXT_DOCUMENT_BYTES", 16)
        patch.setattr(reading, "SEEK_BYTES", 8)
        whole = everything(pieces(path, "text", []))
        parts = everything(pieces(path, "text", list(range(0, size, 16 * unit))))
    assert "".join(map(str, whole)) == text
    assert parts == whole


def test_compressed(tmp_path: Path) -> None:
    texts = some_texts(20)
    plain = write_jsonl(tmp_path / "a.jsonl", texts).read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(plain))
    (tmp_path / "c.jsonl.zst").write_bytes(
        zstandard.compress(plain[:5000]) + zstandard.compress(plain[5000:])
    )
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst"):
        [task] = plan([str(tmp_path / name)], limit_bytes=None, seed=0)
        assert everything(list(task)) == texts


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_truncated_archive_is_an_error(tmp_path: Path, suffix: str) -> None:
    plain = write_jsonl(tmp_path / "a.jsonl", some_texts(200)).read_bytes()
    packed = gzip.compress(plain) if suffix == "gz" else zstandard.compress(plain)
    path = tmp_path / f"b.jsonl.{suffix}"
    path.write_bytes(packed[: len(packed) // 2])
    [task] = plan([str(path)], limit_bytes=None, seed=0)
    with pytest.raises(DataError, match="compressed stream is broken"):
        everything(list(task))


def test_parquet_arrow_and_datasets(tmp_path: Path) -> None:
    texts = some_texts(30)
    table = pyarrow.table({"text": texts, "n": list(range(30))})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    for name, writer in (("file", pyarrow.ipc.new_file), ("stream", pyarrow.ipc.new_stream)):
        with writer(tmp_path / f"{name}.arrow", table.schema) as file:
            file.write_table(table, max_chunksize=7)
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "saved")
    named = [str(tmp_path / name) for name in ("a.parquet", "file.arrow", "stream.arrow")]
    (tmp_path / "files").mkdir()
    for i in range(3):  # opened by `datasets` as a stream of three shards, as from the hub
        write_jsonl(tmp_path / "files" / f"{i}.jsonl", texts[i * 10 : i * 10 + 10])
    for source in (*named, f"hf:{tmp_path / 'saved'}", f"hf:{tmp_path / 'files'}:train"):
        tasks = plan([source], limit_bytes=None, seed=0)
        assert everything([piece for task in tasks for piece in task]) == texts
    for again in (
        f"hf:{tmp_path}/saved:train",
        f"hf:{tmp_path}/../{tmp_path.name}/saved",
        f"{tmp_path}/saved/",
    ):
        with pytest.raises(
            DataError, match=rf"reached twice, by source='hf:{tmp_path}/saved' and '{again}'"
        ):
            plan([f"hf:{tmp_path}/saved", again], limit_bytes=None, seed=0)
    hub = f"hf:{tmp_path}/files"
    for again in (f"{hub}:train", f"{tmp_path}/files/1.jsonl"):
        for sources in ([hub, again], [again, hub]):
            with pytest.raises(DataError, match=r"reached twice"):
                plan(sources, limit_bytes=None, seed=0)
    before = plan([hub], limit_bytes=None, seed=0)
    assert plan([hub], limit_bytes=None, seed=0) == before
    write_jsonl(tmp_path / "files" / "1.jsonl", texts[20:30])
    after = plan([hub], limit_bytes=None, seed=0)
    assert after != before
    (tmp_path / "files" / "1.jsonl").open("a").write("{}\n")
    assert plan([hub], limit_bytes=None, seed=0) not in (before, after)
    bad = [
        d
        for d in everything([piece for task in after for piece in task])
        if isinstance(d, Malformed)
    ]
    assert [(d.path, d.position) for d in bad] == [(f"{hub} shard 1 of 3", 10)]
    for source in named:
        with pytest.raises(DataError, match=r"text-key='body'.*text, n"):
            list(read(plan([source], limit_bytes=None, seed=0)[0][0], "body"))


@pytest.mark.parametrize(
    "writing",
    [
        {"compression": "none", "use_dictionary": False},
        {"compression": "zstd", "data_page_version": "2.0", "write_page_index": True},
        {"compression": "snappy", "dictionary_pagesize_limit": 2**30},
    ],
)
def test_parquet_with_long_rows_and_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writing: dict[str, Any]
) -> None:
    path = tmp_path / "a.parquet"
    texts = [*some_texts(200), "x" * 300_000, *some_texts(200, seed=1)]
    table = pyarrow.table({"n": list(range(401)), "text": texts})
    pyarrow.parquet.write_table(table, path, data_page_size=1000, write_batch_size=5, **writing)
    [piece] = plan([str(path)], limit_bytes=None, seed=0)[0]
    for batch_bytes in (columns.BATCH_BYTES, 3000, 1):  # rows at a time: 256, a few, one
        monkeypatch.setattr(columns, "BATCH_BYTES", batch_bytes)
        assert everything([piece]) == texts
    monkeypatch.setattr(columns, "DOCUMENT_BYTES", 100_000)
    monkeypatch.setattr(reading, "DOCUMENT_BYTES", 100_000)
    assert everything([piece])[200] == Malformed(str(path), 200, "text longer than 0 MB", 300_000)
    column = pyarrow.parquet.read_metadata(path).row_group(0).column(1)
    raw = bytearray(path.read_bytes())
    raw[column.data_page_offset + 1 : column.data_page_offset + 20] = b"\xff" * 19
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"a.parquet"):
        everything([piece])


@pytest.mark.parametrize("new", [pyarrow.ipc.new_file, pyarrow.ipc.new_stream])
@pytest.mark.parametrize("compression", ["lz4", "zstd", None])
def test_arrow_is_planned_without_reading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new: Any, compression: str | None
) -> None:
    path = tmp_path / "a.arrow"
    texts: list[str | None] = [*some_texts(29), None]
    table = pyarrow.table({"text": pyarrow.array(texts).dictionary_encode(), "n": list(range(30))})
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    with new(path, table.schema, options=options) as file:
        file.write_table(table, max_chunksize=7)
    with monkeypatch.context() as patch:
        patch.setattr(columns, "_read_batches", lambda *_: pytest.fail("planning reads batches"))
        task = [piece for task in plan([str(path)], limit_bytes=None, seed=0) for piece in task]
    assert len(task) == 5
    *found, last = everything(task)
    assert found == texts[:-1] and everything(task[3:])[:-1] == texts[21:-1]
    for item in (last, everything(task[4:])[-1]):  # rows are numbered in the file
        assert isinstance(item, Malformed) and item.position == 29


def test_columns_that_are_not_utf8_are_set_aside_row_by_row(tmp_path: Path) -> None:
    raw = [b"good", b"\xff\xfe", b"also good"]
    broken = pyarrow.array(raw, pyarrow.binary()).view(pyarrow.string())
    kinds = {"plain": broken, "dictionary": broken.dictionary_encode(), "bytes": pyarrow.array(raw)}
    for name, column in kinds.items():
        table = pyarrow.table({"text": column})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
        with pyarrow.ipc.new_file(tmp_path / f"{name}.arrow", table.schema) as file:
            file.write_table(table)
    for path in sorted(tmp_path.iterdir()):
        first, bad, last = everything(
            [piece for task in plan([str(path)], limit_bytes=None, seed=0) for piece in task]
        )
        assert bad == Malformed(str(path), 1, "bytes, not UTF-8 text, under 'text'", 2), path
        assert path.stem == "bytes" or (first, last) == ("good", "also good"), path


def test_a_column_with_a_dot_in_its_name(tmp_path: Path) -> None:
    table = pyarrow.table({"a.b": ["dotted"] * 3, "a": ["plain"] * 3, "c": [["in a list"]] * 3})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    [task] = plan([str(tmp_path)], limit_bytes=None, seed=0)
    assert (
        list(read(task[0], "a.b")) == ["dotted"] * 3 and list(read(task[0], "a")) == ["plain"] * 3
    )
    assert [type(item) for item in read(task[0], "c")] == [Malformed] * 3


@pytest.mark.parametrize("damage", ["offsets", "end", "reader"])
def test_a_damaged_arrow_file_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """Also where Arrow itself would end the process, and whatever else a reader may say."""
    path, column = tmp_path / "a.arrow", pyarrow.array(some_texts(30))
    if damage == "offsets":
        _, offsets, data = column.buffers()
        wrong = bytearray(offsets.to_pybytes())
        wrong[4:8] = b"\0\0\0\x60"
        column = pyarrow.StringArray.from_buffers(30, pyarrow.py_buffer(bytes(wrong)), data)
    table = pyarrow.table({"text": column})
    with pyarrow.ipc.new_file(
        path, table.schema, options=pyarrow.ipc.IpcWriteOptions(compression="lz4")
    ) as file:
        file.write_table(table)
    if damage == "end":
        path.write_bytes(path.read_bytes()[:-4])
    if damage == "reader":
        monkeypatch.setattr(columns, "_read_batches", lambda *_: {}["unheard of"])
    with pytest.raises(
        DataError, match=r"a.arrow: cannot be read \(\w+: .*\); fetch the file again"
    ) as caught:
        everything(
            [piece for task in plan([str(path)], limit_bytes=None, seed=0) for piece in task]
        )
    assert "\n" not in str(caught.value) and caught.value.__cause__


def test_a_byte_order_mark_is_no_part_of_a_line(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["first", "second"])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert everything(pieces(path, "jsonl", [])) == ["first", "second"]


def test_malformed_rows_are_counted_with_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "DOCUMENT_BYTES", 20)
    monkeypatch.setattr(columns, "DOCUMENT_BYTES", 20)
    long = "ü" * 15
    table = pyarrow.table({"text": pyarrow.array(["good", long, None, "good"])})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    coded = pyarrow.table({"text": table["text"].combine_chunks().dictionary_encode()})
    blobs = pyarrow.table({"text": pyarrow.array([b"12345"])})
    for name, rows in (("a", table), ("coded", coded), ("blobs", blobs)):
        with pyarrow.ipc.new_file(tmp_path / f"{name}.arrow", rows.schema) as file:
            file.write_table(rows)
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    for source in ("a.parquet", "a.arrow", "coded.arrow", "blobs.arrow", "saved"):
        named = f"hf:{tmp_path}/saved" if source == "saved" else str(tmp_path / source)
        [task] = plan([named], limit_bytes=None, seed=0)
        found = everything(list(task))
        bad = [(item.position, item.bytes) for item in found if isinstance(item, Malformed)]
        assert bad == ([(0, 5)] if source == "blobs.arrow" else [(1, 30), (2, 0)]), source


def test_malformed_lines_are_placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "DOCUMENT_BYTES", 100)
    good = b'{"text": "good"}\n'
    bad = {
        b'{"text": \n': "not JSON",
        b'{"text": null}\n': "no text under 'text'",
        b'["text"]\n': "no text under 'text'",
        b'{"text": "\\ud800"}\n': "half of a surrogate pair",
        b'{"text": "\xff"}\n': "not UTF-8",
        b'{"text": "' + b"x" * 3_000_000 + b'"}\n': "line longer",
    }
    path = tmp_path / "a.jsonl"
    path.write_bytes(good + b"".join(line + good for line in bad) + b"\n\n")
    items = everything(pieces(path, "jsonl", []))
    assert [i for i in items if isinstance(i, str)] == ["good"] * (len(bad) + 1)
    named = [i for i in items if isinstance(i, Malformed)]
    content = path.read_bytes()
    for item, (line, reason) in zip(named, bad.items(), strict=True):
        assert item.reason.startswith(reason)
        start = content.index(line)
        assert start <= item.position < start + len(line)


def test_a_line_over_many_pieces_is_not_read_by_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 1 GB line in 64 pieces took 32 GB of reading."""
    skip, skipped = reading._skip_line, []
    monkeypatch.setattr(
        reading, "_skip_line", lambda *given: skipped.append(skip(*given)) or skipped[-1]
    )
    path = write_jsonl(tmp_path / "a.jsonl", ["first", "x" * 1_000_000, "last"])
    assert everything(pieces(path, "jsonl", list(range(0, 1_000_000, 1000)))) == [
        "first",
        "x" * 1_000_000,
        "last",
    ]
    assert sum(skipped) < 1_100_000


def test_binary_and_invalid_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc\0def")
    (tmp_path / "b.txt").write_bytes(b"abc\xffdef")
    [task] = plan([str(tmp_path)], limit_bytes=None, seed=0)
    a, b = everything(list(task))
    assert isinstance(a, Malformed) and (a.position, a.reason) == (3, "NUL byte: a binary file")
    assert isinstance(b, Malformed) and (b.position, b.reason) == (3, "not UTF-8")


def test_large_files_are_cut_and_small_ones_grouped(tmp_path: Path) -> None:
    line = json.dumps({"text": "x" * 1000}).encode() + b"\n"
    (tmp_path / "big.jsonl").write_bytes(line * 9000)
    for i in range(5):
        (tmp_path / f"small{i}.jsonl").write_bytes(line)
    tasks = plan([str(tmp_path)], limit_bytes=None, seed=0)
    assert len(tasks) == 2 and len(tasks[-1]) == 6
    assert len(everything([p for t in tasks for p in t])) == 9005


def test_a_directory_is_taken_whole_and_what_is_not_is_said(tmp_path: Path) -> None:
    """Links are followed, each directory once; a suffix counts in any case."""
    texts = [[f"{i} {text}" for text in some_texts(9)] for i in range(4)]
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    write_jsonl(tmp_path / "in" / "A.JSONL", texts[0])
    plain = write_jsonl(tmp_path / "b.jsonl", texts[1]).read_bytes()
    (tmp_path / "in" / "deep" / "B.Jsonl.GZ").write_bytes(gzip.compress(plain))
    (tmp_path / "in" / "deep" / "C.JSONL.ZST").write_bytes(
        zstandard.compress(write_jsonl(tmp_path / "c", texts[2]).read_bytes())
    )
    write_jsonl(tmp_path / "elsewhere" / "d.jsonl", texts[3])
    for name, target in (
        ("far", "../elsewhere"),
        ("loop", "."),
        ("again", "deep"),
        ("gone.jsonl", "nowhere"),
    ):
        (tmp_path / "in" / name).symlink_to(target)
    for name in ("README.md", "deep/x.bin", ".hidden.md"):
        (tmp_path / "in" / name).write_text("hello")
    said: list[str] = []
    source = str(tmp_path / "in")
    [task] = plan([source], limit_bytes=None, seed=0, warn=said.append)
    assert sorted(map(str, everything(list(task)))) == sorted(
        text for some in texts for text in some
    )
    assert said == [
        f"source={source!r}: 2 files of another kind not taken, the first {source}/README.md",
        f"source={source!r}: 1 links to nothing not taken, the first {source}/gone.jsonl",
    ]
    plan([f"{source}/*.[Jj]*"], limit_bytes=None, seed=0, warn=said.append)
    assert said[2:] == [
        f"source='{source}/*.[Jj]*': 1 links to nothing not taken, the first {source}/gone.jsonl"
    ]


def test_the_library_is_read_once_also_where_files_are_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.py").symlink_to("a.py")  # as Debian's sysconfig data
    monkeypatch.setattr(
        "sysconfig.get_paths", lambda: {"stdlib": str(tmp_path), "purelib": str(tmp_path / "none")}
    )
    assert [
        piece.path for task in plan(["python"], limit_bytes=None, seed=0) for piece in task
    ] == [str(tmp_path / "a.py")]


def test_a_limit_ends_at_the_document_it_falls_into(tmp_path: Path) -> None:
    texts = [f"{i:03d} {'x' * 95}" for i in range(100)]
    for i in range(2):
        write_jsonl(tmp_path / f"{i}.jsonl", texts[i * 50 : i * 50 + 50])
    (tmp_path / "a.txt").write_text("\n".join(texts))
    plain = write_jsonl(tmp_path / "all.jsonl", texts).read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(plain))
    pyarrow.parquet.write_table(
        pyarrow.table({"text": texts}), tmp_path / "c.parquet", row_group_size=70
    )
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "saved")

    def taken(source: str, limit: int) -> list[str | Malformed]:
        tasks = plan(
            [f"hf:{tmp_path}/saved" if source == "hf" else str(tmp_path / source)],
            limit_bytes=limit,
            seed=0,
        )
        return everything([piece for task in tasks for piece in task])

    line = len(plain) // 100
    assert (
        taken("[01].jsonl", 60 * line) == texts[:60]
        and taken("[01].jsonl", 60 * line + 1) == texts[:61]
    )
    assert (
        taken("a.txt", 999) == ["\n".join(texts[:10]) + "\n"]
        and taken("a.txt", 100 * 10 + 1)[0].count("\n") == 11
    )
    for source in ("b.jsonl.gz", "c.parquet", "hf"):
        assert taken(source, 990) == texts[:10] and taken(source, 991) == texts[:11]


@pytest.mark.parametrize(
    ("sources", "says"),
    [
        (["{}/nowhere.jsonl"], "no such file"),
        (["{}/empty"], "no .txt"),
        (["{}/picture.png"], "unknown suffix '.png'"),
        (["{}/a.txt", "{}/*.txt"], "reached twice"),
        (["{}/a.txt", "{}/a.txt"], "given twice"),
        (["{}/bad.parquet"], "not a parquet file"),
        (["{}/bad.arrow"], "not an Arrow file"),
        (["{}/bad.idx"], r"bad.bin: cannot be read"),
        (["hf:{}/empty"], "check name"),
        (["hf:{}/saved:nosuch"], "no split 'nosuch', there are train, test;"),
        ([""], "no such file"),
        (["{}/latin"], r"'.*/latin/\\udce9.txt': a name that is not UTF-8; rename it"),
    ],
)
def test_sources_that_cannot_be(tmp_path: Path, sources: list[str], says: str) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("a.txt", "picture.png", "bad.parquet", "bad.arrow", "bad.idx"):
        (tmp_path / name).write_text("hello")
    (tmp_path / "latin").mkdir()
    (tmp_path / "latin" / os.fsdecode(b"\xe9.txt")).write_text("hello")
    if "saved" in sources[0]:
        split = datasets.Dataset.from_dict({"text": ["a"]})
        datasets.DatasetDict({"train": split, "test": split}).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=says) as caught:
        plan([s.format(tmp_path) for s in sources], limit_bytes=None, seed=0)
    assert "\n" not in str(caught.value)
