"""User errors: one line with key, value and remedy, exit code 2, nothing lost or half-written."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from pipeline.config.layers import reload
from pipeline.data.shards import Manifest
from pipeline.errors import RunError
from pipeline.planner.memory import checkpoint_bytes
from pipeline.runs.directory import RunDir
from pipeline.tasks import harness
from pipeline.train.request import Devices
from tests.conftest import command, environment, flip_bit, launch, records
from tests.scaling.made_runs import make_run
from tests.train.test_run import pretrain

RUN = ("--no-track", "--nproc", 2)
SMALL = ("--set", "model.seq=64", "--set", "train.batch_tokens=1024")
TINY = ("--size", "tiny", *RUN, *SMALL)


@pytest.fixture
def broken(corpus, tmp_path) -> Path:
    """A copy of the corpus to damage."""
    return shutil.copytree(corpus, tmp_path / "data")


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "run"


def test_a_shard_with_one_flipped_bit(broken, out, inside):
    shard = max(broken.rglob("*.bin"), key=lambda p: p.stat().st_size)
    flip_bit(shard)
    assert shard.stem in inside("pretrain", *TINY, "--data", broken, "--out", out, code=2)
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ("--data .", ["manifest.json"]),
        ("", ["--data"]),
        ("--data DATA --set model.vocab=256", ["model.vocab=256", "512"]),
        ("--data DATA --set model.seq=10000000", ["10,000,001", "model.seq", "split 'train'"]),
        ("--data DATA --set train.batch_tokens=1000", ["=1,000", "train.batch_tokens=1024"]),
        ("--data DATA --size 175b", ["size=175b", "GiB", "; try --size "]),
        ("--data DATA --size 1bb", ["did you mean '1b'"]),
        ("--data DATA --set train.seed=1", ["train.seed is not", "did you mean 'seed'?"]),
        ("--data DATA --set optim.beta2=0.9", ["did you mean 'optim.optimizer.beta2'?"]),
        ("--data DATA --config .", ["config file . cannot be read: not a regular file; check"]),
        ("--data DATA --zero 5", ["parallel.zero=5"]),
        ("--data DATA --arch moe --ep 4", ["parallel.ep=4", "2 ranks", "--ep 2"]),
        ("--data DATA --arch moe --set model.width=66", ["model.width=66", "of 4; try --set model.width=64"]),
        ("--data DATA --engine accelerate --zero 1", ["--zero 0"]),
        ("--data DATA --flops 1e308", ["train.flops=1e+308: must be less than or equal to 1e38"]),
        ("--data DATA --out /proc/run", ["/proc/run"]),
        ("--data DATA --out file --slurm --dry-run", ["--out file: Not a directory; choose another"]),
        ("--data DATA --gpus-per-node 0", ["--gpus-per-node", "--slurm"]),
        ("--data DATA --recipe adamw --zero 3 --set parallel.offload.optimizer=nvme --set parallel.offload.path=nowhere",
         ["parallel.offload.path=nowhere"]),
        ("--data DATA --recipe adamw --zero 3 --set parallel.offload.optimizer=nvme --set parallel.offload.path=file",
         ["parallel.offload.path=file"]),
    ],
)  # fmt: skip
def test_impossible_runs_are_refused(corpus, out, tmp_path, monkeypatch, inside, options, keys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    words = [str(corpus) if word == "DATA" else word for word in options.split()]
    printed = inside("pretrain", *TINY, "--out", out, *words, code=2)
    assert all(key in printed for key in keys), printed
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        ("show --gpus 0", "error: --gpus=0: must be greater than or equal to 1; see `launch show --help`"),
        ("pretrain --nproc two", "error: --nproc=two: must be a valid integer"),
        ("sweep plan --mfu 7", "see `launch sweep plan --help`"),
        ("pretrain --nprocs 2", "--nproc)"),
        ("show --size", "'--size' requires an argument; see `launch --help`"),
        ("import", "Missing option '--from'"),
        ("nonsense", "'nonsense'"),
    ],
)  # fmt: skip
def test_words_that_no_command_has_are_one_line_too(inside, words, printed):
    assert printed in inside(*words.split(), code=2)


@pytest.fixture
def begun(corpus, out) -> Path:
    launch("pretrain", *TINY, "--steps", 2, "--data", corpus, "--out", out)
    return out


def test_continuing_something_else(begun, corpus, tmp_path):
    """Resume with another config, version or data, or refuse a run that exists."""

    def refused(*arguments: object) -> str:
        """In a separate process, which frees the lock of a refused run when it ends."""
        (line,) = launch(*arguments, code=2).stderr.splitlines()
        return line

    before = {p: p.read_bytes() for p in begun.rglob("*") if p.is_file()}
    again = ("pretrain", *TINY, "--steps", 2, "--data", corpus, "--out", begun)
    assert "--resume" in refused(*again)
    line = refused(*again, "--resume", "--set", "optim.clip=0.5", "--seed", 9)
    assert "optim.clip was 1.0, now 0.5" in line and "seed was 1234, now 9" in line
    assert {p: p.read_bytes() for p in begun.rglob("*") if p.is_file()} == before

    again = ("pretrain", "--resume", "--out", begun, "--no-track")
    assert "optim.lr was" in refused(*again, "--set", "optim.lr=0.5")
    assert "nonsense" in refused(*again, "--set", "nonsense=1")
    no_size = "--arch moe has no effect without --size; remove it"
    assert f"{no_size}, or" in refused(*again, "--arch", "moe")
    assert refused(*again[:1], "--init", begun, "--arch", "moe").strip().endswith(no_size)

    config = begun / "config.toml"
    config.write_text(before[config].decode().replace("version = 1", "version = 99"))
    assert "version=99" in refused(*again, "--nproc", 2)
    config.write_bytes(before[config])

    # An unfinished run has something to continue.
    log = begun / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if '"finish"' not in line))
    assert "try --nproc 4" in refused(*again, "--nproc", 5)

    other = shutil.copytree(corpus, tmp_path / "other")
    Manifest.load(other).model_copy(update={"plan": "0" * 32}).save(other)
    config.write_text(before[config].decode().replace(str(corpus), str(other)))
    assert "other data" in refused(*again, "--nproc", 2)
    assert "--out" in refused("pretrain", "--resume", "--out", tmp_path / "nowhere")

    # Without run.json no fit would find the run; without config.toml another run would begin here.
    config.write_bytes(before[config])
    (begun / "run.json").unlink()
    assert "but no run.json" in refused(*again, "--nproc", 2)
    config.unlink()
    fresh = ("pretrain", *TINY, "--steps", 2, "--data", corpus, "--out")
    assert "but no config.toml" in refused(*fresh, begun)
    remedy = fresh[:1] + fresh[3:]  # without --size
    launch(*remedy, tmp_path / "more", "--init", begun)


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
    out = small_disk / "run"
    filler = small_disk / "filler"
    # The ranks are suspended on purpose, which must not count as a hang. No preloader starts.
    sets = ("model.layers=1", "train.save_every=10", "train.hang_s=100", "train.max_restarts=0")
    often = [part for each in sets for part in ("--set", each)]
    asked = (*TINY, "--steps", 40, "--data", corpus, "--out", out, *often)
    alone = ("--nproc", 1, "--resume")
    for held, short_bytes, more in ((10, 100_000, ()), (20, -20_000, alone)):
        process = pretrain(*asked, *more)
        for line in process.stdout:
            if f"saved {held}" in line:
                break
        freeze(out, signal.SIGSTOP)  # otherwise it saves again before the disk is full
        predicted = checkpoint_bytes(reload(out / "config.toml"))
        with filler.open("wb") as file:
            file.write(b"\0" * (shutil.disk_usage(small_disk).free - predicted + short_bytes))
        freeze(out, signal.SIGCONT)
        process.stdout.read()
        stderr = process.stderr.read()
        assert process.wait(60) == 2, stderr
        (error,) = (line for line in stderr.splitlines() if line.strip())
        assert "disk full" in error and f"step-000000{held} is intact" in error
        filler.unlink()
        left = {p.name for p in (out / "checkpoints").iterdir()}
        assert left <= {"step-00000010", f"step-000000{held}"}
    launch("pretrain", *alone, "--out", out, "--no-track")
    assert [r["step"] for r in records(out, "step")] == list(range(1, 41))


def test_two_jobs_never_write_one_run(corpus, tmp_path, inside):
    """The launcher holds the directory from before anything is in it, and the workers do while they write, since they
    may outlive it for some seconds."""
    out = tmp_path / "run"
    held = RunDir(out).lock(".launch")
    try:
        assert f"{out}" in inside("pretrain", *TINY, "--data", corpus, "--out", out, code=2)
        assert [p.name for p in out.iterdir()] == [".launch"]
    finally:
        held.release()
    held = RunDir(out).lock()
    try:
        with pytest.raises(RunError, match=str(out)):
            RunDir(out).lock()
    finally:
        held.release()


IMPORTED = """
import sys
from launch.__main__ import main
try: main()
except SystemExit: pass
heavy = {"torch", "ray", "mlflow", "datasets", "deepspeed", "lm_eval", "numpy", "scipy", "plotly"}
heavy |= {"pyarrow"}
print("heavy", *heavy & set(sys.modules))
"""


def run_alone(*words: object) -> subprocess.CompletedProcess[str]:
    """Run a command in a new process, which at its end prints the large modules it imported."""
    program = [command()[0], "-P", "-c", IMPORTED, *map(str, words)]
    return subprocess.run(program, capture_output=True, text=True, env=environment())


@pytest.mark.parametrize(
    "line", ["--help", "pretrain --help", "data prepare --help", "show --size 175b --cluster h100"]
)
def test_commands_that_only_print_import_nothing_heavy(line):
    done = run_alone(*line.split())
    assert done.stdout.splitlines()[-1] == "heavy", done.stdout + done.stderr
    assert line == "--help" or "--help" not in line or "Examples" in done.stdout


def test_an_unknown_task_is_refused_before_large_imports(tmp_path):
    done = run_alone("evaluate", "--run", tmp_path, "--tasks", "hella")
    assert done.stdout.startswith("heavy") and not {"torch", "lm_eval"} & {*done.stdout.split()}
    assert done.stderr.startswith("error: --tasks hella: neither a file nor a task of lm-eval")
    harness.refuse_unknown(["hellaswag", "arc_*"], None)
    (tmp_path / "mine.yaml").write_text("task: hella\n")
    harness.refuse_unknown(["hella"], tmp_path)


def test_a_dangling_link_is_named(tmp_path, inside):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    for words in (
        "pretrain --size tiny --data none --out",
        "finetune --run none --data none --out",
        "data prepare --source synthetic --out",
        "data tokenizer --source synthetic --out",
        "sweep run cpu --data none --out",
        "export --run none --to",
        "import --from none --out",
    ):
        for out in (link, link / "run"):
            error = inside(*words.split(), out, code=2)
            assert f"{link} is a link to {tmp_path / 'gone'}, which does not exist" in error


def test_runs_that_are_missing_have_a_remedy_that_works(tmp_path, inside, monkeypatch):
    """The remedy once named the missing directory itself."""
    monkeypatch.chdir(tmp_path)
    for words in ("fit", "forecast --size 1b", "score", "dashboard --static page.html"):
        error = inside(*words.split(), "--runs", "runs/demo", code=2)
        assert "runs=runs/demo is not a directory" in error and "`make demo`" in error


def test_a_static_page_replaces_only_a_page(tmp_path, inside):
    """It once replaced any file, and a page without runs was a success."""
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    static = ("dashboard", "--runs", tmp_path, "--static")
    assert "contains no run; check --runs" in inside(*static, tmp_path / "page.html", code=2)
    make_run(tmp_path, "a", 1e6, 1e7, steps=20)
    assert "exists and is not a page" in inside(*static, notes, code=2)
    assert notes.read_text() == "mine"
    for _ in range(2):
        assert "(1 run)" in inside(*static, tmp_path / "page.html")


def test_a_sweep_for_gpus_is_refused_without_one(corpus, tmp_path, inside, monkeypatch):
    """It once began a ladder for 8 H100s on two cores, without a warning."""
    out = tmp_path / "runs"
    monkeypatch.setattr(Devices, "here", lambda: Devices(0, 2**34, "CPU"))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    run = ("sweep", "run", "ladder", "--data", corpus, "--out", out)
    error = inside(*run, code=2)
    assert "sweep=ladder is for 8 × h100" in error and "about 20,000 hours on 2 cores" in error
    assert "the sweep `cpu`" in error and "--cpu" in error and not out.exists()
    assert "hours on 8 × h100" in " ".join(inside("sweep", "plan", "ladder").split())
    planned = json.loads(inside("sweep", "plan", "ladder", "--data", corpus, "--json"))["runs"]
    for each in planned[1:]:  # the hours are those of the missing run
        make_run(out, each["name"], 1e6, 1e7, steps=20)
    assert "about 20,000 hours" not in inside(*run, code=2)
