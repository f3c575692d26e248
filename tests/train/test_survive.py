"""A run survives ranks that die or hang, at any step and repeatedly."""

import contextlib
import random
import re
import signal
import time
from itertools import chain
from pathlib import Path

import numpy as np
import psutil
import pytest

from pipeline.data.corpus import Corpus
from pipeline.data.shards import ShardWriter, Split
from pipeline.runs.directory import no_restart as verdict
from pipeline.runs.history import goodput, remaining_s, startup_cost
from tests.train.test_run import hashes, losses, pretrain, processes, records, train_all

STEPS = 40
STARTING, SAVING, EVALUATING = 0, 20, 30  # what the run does at these steps
OPTIONS = (
    "--size", "tiny", "--steps", STEPS, "--no-track", "--nproc", 2, "--set", "model.seq=64",
    "--set", "train.batch_tokens=1024", "--set", "train.save_every=10", "--set", "train.eval_every=30",
    "--set", "train.eval_batches=2", "--set", "optim.lr=0.001", "--set", "model.layers=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def few(corpus, tmp_path_factory) -> Path:
    """A corpus of a few documents: an epoch ends every seven steps or so."""
    out, whole = tmp_path_factory.mktemp("few"), Corpus.open(corpus)
    splits = {}
    for name, split in whole.manifest.splits.items():
        (shard,) = split.shards
        lengths = whole.lengths(shard)[:16]
        tokens = np.asarray(whole.tokens(shard)[: lengths.sum()], np.uint32)
        with (out / f"{name}.bin").open("wb") as file:
            writer = ShardWriter(file, whole.manifest.dtype)
            for document in np.split(tokens, np.cumsum(lengths)[:-1]):
                writer.add(document, shard.bytes // len(lengths))
        splits[name] = Split.of([writer.index(out / name, "synthetic")])
    (out / "tokenizer.model").write_bytes((corpus / "tokenizer.model").read_bytes())
    whole.manifest.model_copy(update={"splits": splits}).save(out)
    return out


# Options, and which rank has which fault at which step. Faults are some steps apart, because a
# rank continues until it notices that it lost the other.
CASES = {
    "zero 1": (
        ("--zero", 1, "--set", "train.eval_batches=40"),
        ((STARTING, "stop 1"), (range(2, 7), "kill 1"), (range(12, 17), "kill 0"),
         (SAVING, "stop 0"), (EVALUATING, "stop 1")),
    ),
    "zero 3, experts shared": (
        ("--zero", 3, "--arch", "mla-moe", "--ep", 2, "--set", "model.ffn.experts=8"),
        ((range(2, 17), "kill 1"), (range(22, 37), "stop 0")),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(few, tmp_path_factory) -> Path:
    runs = tmp_path_factory.mktemp("undisturbed")
    train_all(runs, {name: options for name, (options, _) in CASES.items()}, few, OPTIONS)
    return runs


@pytest.mark.parametrize("case", CASES)
def test_the_curve_of_a_disturbed_run_is_that_of_an_undisturbed_one(
    few, undisturbed, tmp_path, case
):
    """Faults at random steps, each past another checkpoint and the first of them before any, and in every phase."""
    options, plan = CASES[case]
    steps = [when if isinstance(when, int) else random.choice(when) for when, _ in plan]
    print(f"at steps {steps}")  # pytest shows it when the test fails
    faults, base, out = [fault for _, fault in plan], undisturbed / case, tmp_path / "run"
    disturb(out, steps, faults, "--data", few, *options)
    assert losses(out) == losses(base) and hashes(out) == hashes(base)
    assert losses(out, "eval") == losses(base, "eval")
    restarts = [r for r in records(out, "event") if r["event"] == "restart"]
    assert len(restarts) == len(faults) and all(r["reason"] for r in restarts)
    assert not processes(f"pipeline.train.worker.*{out}"), "orphans"
    for fault, restart in zip(faults, restarts, strict=True):
        what, rank = fault.split()
        expected = (
            f"rank {rank} was killed by SIGKILL" if what == "kill" else f"HangError: rank {rank} "
        )
        assert expected in restart["reason"]
    share = goodput(records(out, "step") + records(out, "event"))
    assert records(out, "event")[-1]["goodput"] < 1
    assert share["replay_s"] > 0 and share["start_s"] > 0


def disturb(out: Path, steps: list[int], faults: list[str], *options: object) -> None:
    """Run to the end, doing each fault when its step is printed after the restart for the one before, or as soon as
    there are ranks."""
    process = pretrain(*OPTIONS, "--out", out, *options)
    output, due, well = "", list(zip(steps, faults, strict=True)), True
    while due[0][0] == STARTING and len(ranks(out)) < 2:
        time.sleep(0.1)
    for line in chain([f"step {STARTING}/"], process.stdout):
        output, well = output + line, well or "restart" in line
        if well and due and re.match(rf"step +{due[0][0]}/", line):
            (what, whom), well = due.pop(0)[1].split(), False
            there = ranks(out)
            there[whom].send_signal(signal.SIGKILL if what == "kill" else signal.SIGSTOP)
    assert process.wait(120) == 0 and not due, output


def ranks(out: Path) -> dict[str, psutil.Process]:
    """The ranks of a run by their number, which is in the name of the log that they write to."""
    there = {}
    for pid in processes(f"pipeline.train.worker {out}"):
        with contextlib.suppress(OSError):  # it has ended
            log = Path(f"/proc/{pid}/fd/2").readlink().stem
            if log.startswith("rank-"):  # the preloader has another log
                there[log.removeprefix("rank-")] = psutil.Process(pid)
    return there


def test_a_repeated_fault_is_not_retried_forever():
    def fault(step: int, saved: int = 0, kind: str = "RuntimeError", user: bool = False) -> dict:
        return {"step": step, "saved": saved, "kind": kind, "user": user, "message": "why\nwhere"}

    assert verdict([fault(7, user=True)], 3) == "why\nwhere"  # a person must fix it
    assert verdict([fault(7)], 3) is None
    assert verdict([fault(7), fault(8)], 3) is None
    assert verdict([fault(7), fault(7, kind="exit")], 3) is None
    assert "twice at step 7: RuntimeError: why" in (verdict([fault(7), fault(7)], 3) or "")
    in_vain = [fault(step) for step in (5, 6, 7, 8)]
    assert verdict(in_vain[:3], 3) is None and "4 times" in (verdict(in_vain, 3) or "")
    # a new checkpoint is progress
    assert verdict([*in_vain[:3], fault(12, saved=8)], 3) is None
    assert "failed after step 0" in (verdict([fault(7)], 0) or "")


def at(time: float, kind: str = "event", **values: object) -> dict:
    return {"time": time, "kind": kind, **values}


def test_goodput_is_what_the_steps_left():
    log = [
        at(5, event="start", start_s=5.0),
        at(6, kind="step", wait_s=0.25),
        at(7, event="save", seconds=0.5),
        # steps of 3.5 s were lost, and it trained again after 20 s
        at(30, event="restart", start_s=20.0, replay_s=3.5),
        at(31, event="interrupt"),
        at(1000, event="resume", start_s=4.0),  # time while it is not running does not count
        at(1003, event="skip", seconds=1.0),
    ]
    share = goodput(log)
    assert share["wall_s"] == pytest.approx(5 + 1.5 + 23.5 + 1 + 4 + 3)
    assert share["goodput"] == pytest.approx(1 - (5 + 20 + 4 + 3.5 + 0.25 + 0.5 + 1) / 38)
    # the clock is set back by an hour between two steps
    log = [at(4000, event="start", start_s=2.0), at(4001, kind="step"), at(402, kind="step")]
    share = goodput([*log, at(403, kind="step")])
    assert (share["wall_s"], share["goodput"]) == (4, 0.5)
    assert remaining_s([{**each, "step": step} for step, each in enumerate(log)], 9) is None
    costs = startup_cost([{**log[0], "time": time.time() + 60, "step": 0}], 0, failed=True)
    assert costs["start_s"] == 0


def test_a_save_that_is_logged_late_does_not_count_as_a_kept_step(monkeypatch):
    log = [
        at(5, event="start", step=0, start_s=5.0),
        at(6, kind="step", step=1, wait_s=0.0),
        at(7, kind="step", step=2, wait_s=0.0),
        at(7.5, event="save", step=1, seconds=1.5, blocked_s=0.25),
        at(8, kind="step", step=3, wait_s=0.0),
    ]
    kept = [record for record in log if record["step"] <= 1]
    monkeypatch.setattr(time, "time", lambda: 20.0)
    back = at(20, event="rollback", step=1, **startup_cost(log, 1, failed=True))
    share = goodput([*kept, back])
    seconds = (back["start_s"], back["replay_s"], share["checkpoint_s"], share["wall_s"])
    assert seconds == (12, 1.75, 0.25, 20)
    assert goodput(log)["wall_s"] == 8
    # a branch does not repeat steps: they are its trunk's
    assert startup_cost(kept, 1, failed=False)["replay_s"] == 0
