"""What a person can get wrong: one line with key, value and remedy, exit code 2, nothing lost or half-written."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import command, environment, launch

TINY = (
    "--size",
    "tiny",
    "--no-track",
    "--nproc",
    2,
    "--set",
    "model.seq=64",
    "--set",
    "train.batch_tokens=1024",
)


def refused(*arguments: object, out: Path | None = None) -> str:
    done = launch(*arguments, code=2)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    if out is not None:
        assert not out.exists()
    return lines[0]


@pytest.fixture
def broken(corpus, tmp_path) -> Path:
    """A copy of the corpus to damage."""
    return shutil.copytree(corpus, tmp_path / "data")


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "run"


def test_a_missing_shard(broken, out):
    next(broken.rglob("*.bin")).unlink()
    assert ".bin" in refused("pretrain", *TINY, "--data", broken, "--out", out, out=out)


def test_a_shard_with_one_flipped_bit(broken, out):
    shard = max(broken.rglob("*.bin"), key=lambda p: p.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[1000] ^= 4
    shard.write_bytes(data)
    assert shard.stem in refused("pretrain", *TINY, "--data", broken, "--out", out, out=out)


def test_no_data_there(tmp_path, out):
    assert "manifest.json" in refused("pretrain", *TINY, "--data", tmp_path, "--out", out, out=out)
    assert "--data is missing" in refused("pretrain", *TINY, "--out", out, out=out)


def test_an_empty_corpus(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    line = refused(
        "data",
        "prepare",
        "--source",
        tmp_path / "empty.txt",
        "--out",
        tmp_path / "d",
        "--vocab-size",
        300,
    )
    assert "empty" in line or "no document" in line
    assert not (tmp_path / "d" / "manifest.json").exists()


def test_a_vocabulary_smaller_than_the_tokenizers(corpus, out):
    line = refused(
        "pretrain", *TINY, "--data", corpus, "--out", out, "--set", "model.vocab=256", out=out
    )
    assert "model.vocab=256" in line and "512" in line


def test_a_sequence_longer_than_the_split(corpus, out):
    line = refused(
        "pretrain", *TINY, "--data", corpus, "--out", out, "--set", "model.seq=10000000", out=out
    )
    assert "seq=10000000" in line and "split 'train'" in line


def test_a_batch_that_does_not_divide(corpus, out):
    line = refused(
        "pretrain",
        *TINY,
        "--data",
        corpus,
        "--out",
        out,
        "--set",
        "train.batch_tokens=1000",
        out=out,
    )
    assert "train.batch_tokens=1,000" in line and "try --set train.batch_tokens=1024" in line


def test_a_size_too_large_for_the_machine(corpus, out):
    line = refused(
        "pretrain", "--size", "175b", "--data", corpus, "--out", out, "--nproc", 2, out=out
    )
    assert "size=175b" in line and "GiB" in line and "; try --size " in line


def test_an_unknown_size_names_the_nearest(corpus, out):
    assert "did you mean '1b'" in refused(
        "pretrain", "--size", "1bb", "--data", corpus, "--out", out, out=out
    )


def test_an_impossible_stage(corpus, out):
    assert "parallel.zero=5" in refused(
        "pretrain", *TINY, "--data", corpus, "--zero", 5, "--out", out, out=out
    )


def test_a_share_of_experts_that_does_not_divide_the_ranks(corpus, out):
    options = ("--arch", "moe", "--data", corpus, "--ep", 4, "--out", out)
    assert "parallel.ep=4 does not divide the 2 ranks; try --ep 2" in refused(
        "pretrain", *TINY, *options, out=out
    )


def test_an_engine_that_cannot(corpus, out):
    assert "--zero 0" in refused(
        "pretrain",
        *TINY,
        "--data",
        corpus,
        "--engine",
        "accelerate",
        "--zero",
        1,
        "--out",
        out,
        out=out,
    )


def test_a_length_without_end(corpus, out):
    assert "--flops" in refused(
        "pretrain", *TINY, "--data", corpus, "--flops", "1e308", "--out", out, out=out
    )


@pytest.mark.parametrize("place", ["nowhere", "file"])
def test_a_disk_to_offload_to_that_is_none(corpus, out, tmp_path, inside, place):
    (tmp_path / "file").touch()
    options = (
        "--zero",
        3,
        "--set",
        "parallel.offload.optimizer=nvme",
        "--data",
        corpus,
        "--out",
        out,
    )
    said = inside(
        "pretrain", *TINY, *options, "--set", f"parallel.offload.path={tmp_path / place}", code=2
    )
    assert f"parallel.offload.path={tmp_path / place}" in said
    assert not out.exists()


def test_an_unwritable_place(corpus):
    assert "/proc/run" in refused("pretrain", *TINY, "--data", corpus, "--out", "/proc/run")


@pytest.fixture
def begun(corpus, out) -> Path:
    launch("pretrain", *TINY, "--steps", 2, "--data", corpus, "--out", out)
    return out


def test_continuing_something_else(begun, corpus, tmp_path):
    """A run that exists, another config, another version, other data, another world: each is refused as itself."""
    before = {p: p.read_bytes() for p in begun.rglob("*") if p.is_file()}
    again = ("pretrain", *TINY, "--steps", 2, "--data", corpus, "--out", begun)
    assert "--resume" in refused(*again)
    line = refused(*again, "--resume", "--set", "optim.clip=0.5", "--seed", 9)
    assert "optim.clip was 1.0, now 0.5" in line and "seed was 1234, now 9" in line
    assert {p: p.read_bytes() for p in begun.rglob("*") if p.is_file()} == before

    again = ("pretrain", "--resume", "--out", begun)
    assert "optim.lr was" in refused(*again, "--set", "optim.lr=0.5")
    assert "nonsense is not a setting" in refused(*again, "--set", "nonsense=1")

    config = begun / "config.toml"
    config.write_text(before[config].decode().replace("version = 1", "version = 99"))
    assert "version=99" in refused("pretrain", "--resume", "--out", begun, "--nproc", 2)
    config.write_bytes(before[config])

    # unfinished, so that it has something to continue
    log = begun / "log.jsonl"
    log.write_text(
        "".join(
            line for line in log.read_text().splitlines(keepends=True) if '"finish"' not in line
        )
    )
    assert "try --nproc 4" in refused(
        "pretrain", "--resume", "--out", begun, "--nproc", 5, "--no-track"
    )

    other = tmp_path / "other"
    launch("data", "prepare", "--source", "synthetic", "--out", other, "--tokenizer", corpus / "tokenizer.model",
           "--seed", 2, "--limit-bytes", 300_000, "--valid-share", 0.2, "--quiet")  # fmt: skip
    config.write_text(before[config].decode().replace(str(corpus), str(other)))
    assert "other data" in refused(
        "pretrain", "--resume", "--out", begun, "--nproc", 2, "--no-track"
    )
    assert "--out of an existing run" in refused(
        "pretrain", "--resume", "--out", tmp_path / "nowhere"
    )


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 64 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def freeze(run: Path, number: signal.Signals) -> None:
    subprocess.run(
        ["pkill", f"-{number.name[3:]}", "-f", f"pipeline.train.worker {run}"], check=True
    )


def test_a_disk_that_fills_up_while_saving(corpus, small_disk):
    """Too little space, then full in the middle of a write: the checkpoint before it stays whole, nothing is left
    beside it, and --resume goes on once there is room."""
    from pipeline.config.layers import reload
    from pipeline.planner.memory import checkpoint_bytes

    out, filler = small_disk / "run", small_disk / "filler"
    often = (
        "--set",
        "train.save_every=10",
        "--set",
        "train.hang_s=100",
    )  # stopped on purpose, and woken
    asked = ("pretrain", *TINY, "--steps", 40, "--data", corpus, "--out", out, *often)
    for held, short_bytes in ((10, 100_000), (20, -20_000)):
        process = subprocess.Popen(
            command(*asked, *(("--resume",) if held > 10 else ())),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
        for line in process.stdout:
            if f"saved {held}" in line:
                break
        freeze(out, signal.SIGSTOP)  # or it would save again before the disk is full
        predicted = checkpoint_bytes(reload(out / "config.toml").model)
        with filler.open("wb") as file:
            file.write(b"\0" * (shutil.disk_usage(small_disk).free - predicted + short_bytes))
        freeze(out, signal.SIGCONT)
        process.stdout.read()
        stderr = process.stderr.read()
        assert process.wait(60) == 2, stderr
        errors = [line for line in stderr.splitlines() if line.strip()]
        assert (
            len(errors) == 1
            and "disk full" in errors[0]
            and f"step-000000{held} is intact" in errors[0]
        ), stderr
        filler.unlink()
        assert {p.name for p in (out / "checkpoints").iterdir()} <= {
            "step-00000010",
            f"step-000000{held}",
        }
    launch("pretrain", "--resume", "--out", out, "--nproc", 1, "--no-track")
    steps = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in steps if r["kind"] == "step"] == list(range(1, 41))


def test_two_jobs_never_write_one_run(corpus, tmp_path):
    """The launcher holds the directory from before anything is in it, and the workers do while they write, since they
    may outlive it for some seconds."""
    from pipeline.errors import RunError
    from pipeline.runs.directory import RunDir

    out = tmp_path / "run"
    held = RunDir(out).claim()
    try:
        assert "being written by another process" in refused(
            "pretrain", *TINY, "--data", corpus, "--out", out
        )
        assert [p.name for p in out.iterdir()] == [".launch"]
    finally:
        held.release()
    held = RunDir(out).lock()
    try:
        with pytest.raises(RunError, match="being written by another process"):
            RunDir(out).lock()
    finally:
        held.release()


@pytest.mark.parametrize(
    "name", [["--help"], ["pretrain", "--help"], ["show", "--help"], ["data", "prepare", "--help"]]
)
def test_help_has_examples_and_imports_nothing_heavy(name):
    code = (
        "import sys; sys.argv=['launch', *sys.argv[1:]]\n"
        "from launch.__main__ import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'ray', 'mlflow', 'datasets', 'deepspeed', 'scipy', 'plotly'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [command()[0], "-c", code, *name], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr
    assert "launch" in done.stdout and ("Examples" in done.stdout or name == ["--help"])
