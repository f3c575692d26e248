"""Checkpoints on disk: complete, checked, cut at experts, pruned by rule."""

import json
import os
import pickle
import random
import shutil
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.atomic import digest
from pipeline.checkpoint.format import _checksum
from pipeline.checkpoint.restore import Weights, find, load, newest
from pipeline.checkpoint.save import Saver, prune, remove
from pipeline.errors import RunError
from pipeline.parallel.fragments import split
from pipeline.parallel.world import World
from pipeline.runs.directory import list_checkpoints
from tests import forks
from tests.attack.harness import NODES
from tests.checkpoint.plain import Plain, small_config
from tests.conftest import environment
from tests.test_legacy import LEGACY

ALONE = World(0, 1, torch.device("cpu"))
NUMBERS = "rank-00000.bin"


@pytest.fixture
def saved(tmp_path):
    """Steps 2 and 3 of a small state; step 1 has been pruned."""
    engine = Plain([(5, 3), (40,)])
    saver = Saver(engine, small_config(), tmp_path, ALONE)
    for step in (1, 2, 3):
        engine.stamp(step)
        saver.save(step)
        engine.stamp(99)  # changes after the copy are not saved
    saver.wait()
    return tmp_path


def test_only_the_next_step_waits_for_the_copy(tmp_path):
    """With a busy writing thread `save` returns and random draws go on; the next step waits."""
    engine = Plain([(5, 3)])
    free = threading.Event()
    saver = Saver(engine, small_config(), tmp_path, ALONE)
    engine.stamp(1)
    saver._thread.submit(free.wait)
    drawn_before = torch.get_rng_state()
    saver.save(1)
    torch.rand(3)
    threading.Timer(0.5, free.set).start()
    engine.stamp(2)
    assert free.is_set()
    done = saver.wait()
    assert done.step == 1 and 0.1 < done.blocked_s <= done.seconds
    other = Plain([(5, 3)])
    load(other, newest(tmp_path), ALONE)
    assert other.step() == 1 and torch.equal(torch.get_rng_state(), drawn_before)


@given(
    experts=st.integers(1, 4),
    width=st.integers(1, 5),
    first=st.integers(0, 8),
    cuts=st.lists(st.integers(0, 20), max_size=4),
)
def test_a_stack_of_experts_is_cut_into_global_experts(experts, width, first, cuts):
    """For every division among ranks, each global expert gets its own numbers exactly once."""
    whole = torch.arange(experts * width, dtype=torch.float32)
    bounds = sorted({0, len(whole), *(c for c in cuts if c < len(whole))})
    found = {f"up.{first + e}": torch.full((width,), -1.0) for e in range(experts)}
    count = 0
    for low, high in pairwise(bounds):
        for fragment in split("up", (experts, width), (first, 64), low, whole[low:high]):
            assert fragment.shape == (width,)
            end = fragment.offset + len(fragment.data)
            found[fragment.key][fragment.offset : end] = fragment.data
            count += len(fragment.data)
    assert count == len(whole) and torch.equal(torch.cat(list(found.values())), whole)


def test_a_saved_state_is_read_back(saved):
    for stray in ("step-00000003.bak", "step-backup", "step-4"):  # directories of a user
        (saved / stray).mkdir()
    assert newest(saved).step == 3 and list(list_checkpoints(saved)) == [2, 3]
    found, damaged = find(saved, ALONE)
    engine = Plain([(5, 3), (40,)])
    torch.manual_seed(5)
    load(engine, found, ALONE)
    assert (engine.step(), found.step, damaged) == (3, 3, [])
    assert torch.initial_seed() != 5  # the random state is restored
    weights = Weights(newest(saved / "step-00000002"), torch.bfloat16)
    read = {
        name: (tuple(w.shape), w.dtype, set(w.flatten().tolist())) for name, w in weights.items()
    }
    assert read == {"p0": ((5, 3), torch.bfloat16, {2.0}), "p1": ((40,), torch.bfloat16, {2.0})}
    with pytest.raises(RunError, match="model/p0"):
        load(Plain([(5, 4), (40,)]), found, ALONE)


def test_every_flipped_bit_is_found(saved):
    """All of 200 flips in any file are found, and the checkpoint before is used instead."""
    dice = random.Random(0)
    files = sorted((saved / "step-00000003").iterdir())
    assert {"manifest.json", "config.toml", NUMBERS} == {p.name for p in files}
    for _ in range(200):
        file = dice.choice(files)
        before = file.read_bytes()
        content = bytearray(before)
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        file.write_bytes(content)
        passed_over(saved)
        file.write_bytes(before)
    assert find(saved, ALONE)[0].step == 3


def passed_over(root, to=2):
    """The newest checkpoint is damaged: one line, and the one before it is used."""
    path = list(list_checkpoints(root).values())[-1]
    found, damaged = find(root, ALONE)
    assert found.step == to
    (line,) = damaged
    assert path.name in line and "\n" not in line
    with pytest.raises(RunError) as refused:
        newest(path)
    assert path.name in str(refused.value) and "\n" not in str(refused.value)


def run_of(manifest, **changes):
    """Change fields of the first run of a tensor, in either version of the manifest."""
    fields = ("offset", "numel", "file", "start", "length")
    tensor = next(iter(manifest["tensors"].values()))
    run = tensor["runs" if "runs" in tensor else "chunks"][0]
    for field, change in changes.items():
        at = fields.index(field)
        run[at] = change(run[at]) if callable(change) else change


HOSTILE_MANIFESTS = {
    "file elsewhere": lambda m: run_of(m, file="../step-00000002/rank-00000.bin"),
    "file without checksum": lambda m: run_of(m, file="other.bin"),
    "listed file elsewhere": lambda m: m["files"].update({"../../etc/passwd": "0"}),
    "listed file missing": lambda m: m["files"].update({"rank-00009.bin": "0"}),
    "negative byte": lambda m: run_of(m, start=-64),
    "byte beyond the file": lambda m: run_of(m, start=1 << 40),
    "byte beyond 64 bits": lambda m: run_of(m, start=1 << 80),
    "more bytes than the file has": lambda m: run_of(m, length=lambda n: n + (1 << 30)),
    "negative offset": lambda m: run_of(m, offset=-1),
    "gap": lambda m: run_of(m, offset=1),
    "zero numbers": lambda m: run_of(m, numel=0),
    "fewer numbers": lambda m: run_of(m, numel=lambda n: n - 1),
    "more numbers": lambda m: run_of(m, numel=1 << 40),
    "no runs": lambda m: next(iter(m["tensors"].values()))["runs"].clear(),
    "negative shape": lambda m: next(iter(m["tensors"].values())).update(shape=[-5, -3]),
    "huge shape": lambda m: next(iter(m["tensors"].values())).update(shape=[10**9] * 9),
    "unknown dtype": lambda m: next(iter(m["tensors"].values())).update(dtype="load"),
    "half the dtype": lambda m: next(iter(m["tensors"].values())).update(dtype="float16"),
    "tensors as a list": lambda m: m.update(tensors=[]),
    "world as text": lambda m: m.update(world="abc"),
    "another step": lambda m: m.update(step=7),
    "later version": lambda m: m.update(version=99),
    "no files": lambda m: m.pop("files"),
    "extra key": lambda m: m.update(code="import os"),
}


def reseal(path, change):
    """Change a manifest as an attacker would: with a correct checksum of it."""
    content = json.loads((path / "manifest.json").read_text())
    del content["seal"]
    change(content)
    content["seal"] = _checksum(content)
    (path / "manifest.json").write_text(json.dumps(content))


@pytest.mark.parametrize("change", HOSTILE_MANIFESTS.values(), ids=HOSTILE_MANIFESTS)
def test_a_hostile_manifest_is_a_damaged_checkpoint(saved, change):
    reseal(saved / "step-00000003", change)
    passed_over(saved)


@pytest.mark.parametrize("name", ["manifest.json", "config.toml", NUMBERS])
@pytest.mark.parametrize("damage", [*NODES, "cut", "pickle", "digits"])
@pytest.mark.timeout(60)
def test_a_broken_file_is_a_damaged_checkpoint(saved, name, damage):
    path = saved / "step-00000003" / name
    content = path.read_bytes()
    path.unlink()
    match damage:
        case "cut":
            path.write_bytes(content[: len(content) // 2])
        case "pickle":
            path.write_bytes(pickle.dumps({"a": 1}))
        case "digits":
            path.write_bytes(b"9" * 10_000)
        case _:
            NODES[damage](path)
    passed_over(saved)


def test_no_intact_checkpoint_is_one_line(saved):
    for path in list_checkpoints(saved).values():
        (path / NUMBERS).unlink()
    with pytest.raises(RunError, match="step-00000003"):
        find(saved, ALONE)


class Evil:
    def __reduce__(self):
        return os.system, ("touch executed",)


LEGACY_FILE = "__0_0.distcp"


@pytest.mark.parametrize(
    "change",
    [
        lambda content, run: pickle.dumps(Evil()).ljust(run[4], b".") + content[run[4] :],
        lambda content, run: bytes(run[4]) + content[run[4] :],
        lambda content, run: content[: run[3] + run[4] // 2],
    ],
    ids=["pickle", "zeros", "cut"],
)
def test_a_hostile_legacy_checkpoint_is_damaged_and_not_executed(tmp_path, monkeypatch, change):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "checkpoints"
    shutil.copytree(LEGACY / "runs" / "dense" / "checkpoints", root)
    path = root / "step-00000004"
    manifest = json.loads((path / "manifest.json").read_text())
    chunks = [chunk for tensor in manifest["tensors"].values() for chunk in tensor["chunks"]]
    first = min(chunk for chunk in chunks if chunk[2:4] == [LEGACY_FILE, 0])
    file = path / LEGACY_FILE
    file.write_bytes(change(file.read_bytes(), first))
    reseal(path, lambda m: m["files"].update({LEGACY_FILE: digest(file)}))
    passed_over(root)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("last", "every", "kept"),
    [
        (2, None, [90, 100]),
        (1, 50, [50, 100]),
        (3, 30, [30, 60, 80, 90, 100]),
        (99, 7, list(range(10, 101, 10))),
    ],
)
def test_which_checkpoints_are_kept(tmp_path, last, every, kept):
    (tmp_path / "step-00000100.bak").mkdir()
    for step in range(10, 101, 10):
        (tmp_path / f"step-{step:08d}").mkdir()
        prune(tmp_path, step, last, every)
    assert list(list_checkpoints(tmp_path)) == kept and (tmp_path / "step-00000100.bak").exists()
    # The run was rolled back and continued: step 100 does not belong to it any more.
    (tmp_path / "step-00000095").mkdir()
    prune(tmp_path, 95, last, every)
    assert (tmp_path / "step-00000095").exists() and not (tmp_path / "step-00000100").exists()
    remove(tmp_path / "step-00000100")  # a user removed it first


def test_a_checkpoint_is_found_by_any_path(saved, monkeypatch):
    monkeypatch.chdir(saved / "step-00000003")
    (saved / "latest").symlink_to("step-00000002")
    assert [newest(Path(path)).step for path in (".", "..", "../latest")] == [3, 3, 2]


def test_every_rank_reads_the_checkpoints_that_rank_0_sees(saved, monkeypatch):
    """A network file system may show them to another node later."""
    monkeypatch.setattr(World, "broadcast", lambda *_: [saved / "step-00000003"])
    monkeypatch.setattr(World, "gather", lambda _, value: [value])
    monkeypatch.setattr("pipeline.checkpoint.restore.list_checkpoints", lambda _: {})
    assert find(saved, World(1, 2, ALONE.device))[0].step == 3


@pytest.mark.slow
def test_killed_a_hundred_times_while_saving(tmp_path):
    done = forks.run("tests.checkpoint.killed", [tmp_path, 100, 1], environment())
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout)
    # Deaths in the middle of a save, and saves between deaths.
    assert seen["during"] >= 30 and seen["last"] >= 20
