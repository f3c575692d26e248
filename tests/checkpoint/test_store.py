"""What lies on the disk: whole, sealed, cut at experts, kept by rule."""

import json
import random
import subprocess
import sys
import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoint import manifest
from pipeline.checkpoint.load import find, load
from pipeline.checkpoint.save import Saver
from pipeline.checkpoint.weights import load_weights
from pipeline.config.layers import load as settings
from pipeline.errors import RunError
from pipeline.parallel.fragments import split
from pipeline.parallel.world import World
from pipeline.runs.directory import list_checkpoints
from tests.checkpoint.plain import Plain
from tests.conftest import environment

ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture
def saved(tmp_path):
    """Steps 1 to 3 of a small state; all but the newest two have been let go."""
    config = settings(size="tiny", arch="dense", sets=["model.vocab=64", "model.seq=8"])
    engine = Plain([(5, 3), (40,)])
    saver = Saver(engine, config, tmp_path, ALONE)
    for step in (1, 2, 3):
        engine.stamp(step)
        saver.save(step)
        engine.stamp(99)  # what comes after the copy is not in it
    saver.wait()
    return tmp_path


def test_a_step_waits_for_the_copy_and_nothing_else_does(tmp_path):
    """The writing thread kept busy: `save` returns, random numbers are drawn, and the next step waits its turn."""
    engine, free = Plain([(5, 3)]), threading.Event()
    saver = Saver(
        engine, settings(size="tiny", arch="dense", sets=["model.vocab=64"]), tmp_path, ALONE
    )
    engine.stamp(1)
    saver._thread.submit(free.wait)
    drawn_before = torch.get_rng_state()
    saver.save(1)
    torch.rand(3)
    threading.Timer(0.5, free.set).start()
    engine.stamp(2)
    assert free.is_set()
    saved = saver.wait()
    assert saved.step == 1 and 0.1 < saved.blocked_s <= saved.seconds  # the step's wait is counted
    load(other := Plain([(5, 3)]), manifest.newest(tmp_path), ALONE)
    assert other.step() == 1 and torch.equal(torch.get_rng_state(), drawn_before)


@given(
    experts=st.integers(1, 4),
    width=st.integers(1, 5),
    first=st.integers(0, 8),
    cuts=st.lists(st.integers(0, 20), max_size=4),
)
def test_a_stack_of_experts_is_cut_into_global_ones(experts, width, first, cuts):
    """However a stack is dealt out over ranks, each global expert's numbers arrive once and in place."""
    whole = torch.arange(experts * width, dtype=torch.float32)
    bounds = sorted({0, len(whole), *(c for c in cuts if c < len(whole))})
    found = {f"up.{first + e}": torch.full((width,), -1.0) for e in range(experts)}
    count = 0
    for low, high in pairwise(bounds):
        for fragment in split("up", (experts, width), (first, 64), low, whole[low:high]):
            assert fragment.shape == (width,)
            found[fragment.key][fragment.offset : fragment.offset + len(fragment.data)] = (
                fragment.data
            )
            count += len(fragment.data)
    assert count == len(whole) and torch.equal(torch.cat(list(found.values())), whole)


def test_what_was_saved_is_read(saved):
    for stray in ("step-00000003.bak", "step-backup", "step-4"):  # by hand: no business of ours
        (saved / stray).mkdir()
    assert manifest.newest(saved).step == 3 and list(list_checkpoints(saved)) == [2, 3]
    found, damaged = find(saved, ALONE)
    engine = Plain([(5, 3), (40,)])
    torch.manual_seed(5)
    load(engine, found, ALONE)
    assert (engine.step(), found.step, damaged) == (3, 3, [])
    assert torch.initial_seed() != 5  # the random state came along
    weights = load_weights(saved / "step-00000002", dtype=torch.bfloat16)
    assert {name: (tuple(w.shape), w.dtype, set(w.flatten().tolist())) for name, w in weights.items()} == {
        "p0": ((5, 3), torch.bfloat16, {2.0}), "p1": ((40,), torch.bfloat16, {2.0}),
    }  # fmt: skip
    with pytest.raises(RunError, match="another model"):
        load(Plain([(5, 4), (40,)]), found, ALONE)


def test_every_flipped_bit_is_found(saved):
    """200 of 200, in whichever file; and the checkpoint before it is used instead."""
    dice = random.Random(0)
    newest = saved / "step-00000003"
    files = sorted(newest.iterdir())
    assert {"manifest.json", "config.toml", "__0_0.distcp"} == {p.name for p in files}
    for _ in range(200):
        file = dice.choice(files)
        before = file.read_bytes()
        spoilt = bytearray(before)
        spoilt[dice.randrange(len(spoilt))] ^= 1 << dice.randrange(8)
        file.write_bytes(spoilt)
        found, damaged = find(saved, ALONE)
        assert found.step == 2 and "step-00000003 is damaged" in damaged[0]
        with pytest.raises(RunError, match=r"damaged|no checkpoint"):
            load_weights(saved)
        file.write_bytes(before)
    assert find(saved, ALONE)[0].step == 3


def test_a_manifest_cannot_point_elsewhere(saved):
    """Sealed anew by whoever changed it: still only files beside it that it has checksums of."""
    path = saved / "step-00000003" / "manifest.json"
    content = json.loads(path.read_text())
    del content["seal"]
    content["tensors"]["model/p0"]["chunks"][0][2] = "../step-00000002/__0_0.distcp"
    path.write_text(json.dumps({**content, "seal": manifest._seal(content)}))
    found, damaged = find(saved, ALONE)
    assert found.step == 2 and "not its own" in damaged[0]


@pytest.mark.parametrize(
    ("last", "every", "kept"),
    [
        (2, None, [90, 100]),
        (1, 50, [50, 100]),
        (3, 30, [30, 60, 80, 90, 100]),
        (99, 7, list(range(10, 101, 10))),
    ],
)
def test_which_are_kept(tmp_path, last, every, kept):
    (tmp_path / "step-00000100.bak").mkdir()
    for step in range(10, 101, 10):
        (tmp_path / f"step-{step:08d}").mkdir()
        manifest.prune(tmp_path, step, last, every)
    assert list(list_checkpoints(tmp_path)) == kept and (tmp_path / "step-00000100.bak").exists()
    (
        tmp_path / "step-00000095"
    ).mkdir()  # of a run that went back and on: 100 is not its own any more
    manifest.prune(tmp_path, 95, last, every)
    assert (tmp_path / "step-00000095").exists() and not (tmp_path / "step-00000100").exists()


def test_killed_a_hundred_times_while_saving(tmp_path):
    command = [sys.executable, "-m", "tests.checkpoint.killed", str(tmp_path), "100", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, env=environment())
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout)
    assert (
        seen["during"] >= 30 and seen["last"] >= 20
    )  # deaths in the middle of a save, and saves between deaths
