"""Bad numbers: a harmful step is not applied, and every flipped bit is found."""

import json
import math
import os
import random
import re
import shutil
import statistics
import subprocess
import time
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipeline.errors import RunError
from pipeline.parallel.world import World
from pipeline.runs.directory import RunDir
from pipeline.train.guard import Guard, RollbackError, relevant
from pipeline.train.request import Devices, Request, plan_run
from pipeline.train.watchdog import Watchdog
from tests import forks
from tests.conftest import environment
from tests.train.test_run import hashes, losses, records

STEPS, BAD = 27, (2, 20, 21, 22)


def forked(module: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    return forks.run(f"tests.train.{module}", arguments, environment(DS_ACCELERATOR="cpu"))


def step(number: int, loss: float = 3.0, norm: float = 1.0) -> dict:
    return {"kind": "step", "step": number, "loss": loss, "grad_norm": norm}


def noise(count: int) -> list[dict]:
    source = random.Random(1)
    return [step(i, 3 + source.gauss(0, 0.1), 1 + source.gauss(0, 0.05)) for i in range(count)]


def judge(guard: Guard, loss: float, norm: float, number: int = 1000) -> str:
    """Decide as the device does; return the host's reason if the step is rejected."""
    values, limits = torch.tensor([(loss, norm), guard.limits(number)], dtype=torch.float64)
    return "" if (values <= limits).all() else guard.reason(number, loss, norm)


def test_nonfinite_and_outlying_steps_are_refused():
    young, old = Guard(noise(63)), Guard(noise(200))
    for guard in (young, old):
        assert judge(guard, math.nan, 1.0) == "loss is nan"
        assert judge(guard, 3.0, math.inf) == "gradient norm is inf"
        assert judge(guard, 3.3, 1.1) == "" and judge(guard, 0.5, 0.1) == ""
    assert judge(young, 30.0, 50.0) == ""  # too few steps for a limit
    assert "σ above the usual 3" in judge(old, 3.9, 1.0)
    assert "gradient norm 25 is 6.4σ" in judge(old, 3.0, 25.0)
    still = Guard([step(i) for i in range(128)])
    assert judge(still, 3.017, 1.0) == "" and judge(still, 3.019, 1.0)  # σ is zero


@pytest.mark.parametrize("log_every", [1, 4])
def test_heavy_tailed_norms_are_accepted_and_real_spikes_are_not(log_every):
    """Loss and norm of the demo's 1m, 1,306 clean steps of 1,024 tokens: the largest norm is seven times the usual."""
    lines = (Path(__file__).parent / "clean.txt").read_text().splitlines()
    clean = [tuple(map(float, line.split())) for line in lines]
    norms = [norm for _, norm in clean[1155:1283]]  # the largest is next, far beyond 6σ
    assert clean[1283][1] > statistics.mean(norms) + 40 * statistics.stdev(norms)
    guard, reasons, missed = Guard([]), [], []
    for number, (loss, norm) in enumerate(clean, 1):
        reasons += [judge(guard, loss, norm, number)]
        if number > 65 * log_every:
            faults = ((loss, 40 * norm), (6 * loss, norm), (loss, math.nan))
            missed += [number for fault in faults if not judge(guard, *fault, number)]
        if number % log_every == 0:
            guard.update(step(number, loss, norm))
    assert len(reasons) == 1306 and not any(reasons) and not missed


def test_repeated_skips_roll_back_and_then_end_the_run():
    guard = Guard(noise(100))

    def skip(number: int) -> None:
        guard.update({"kind": "event", "event": "skip", "step": number})
        guard.escalate(number, "loss is nan")

    skip(100)
    skip(120)
    skip(130)  # three skips, but not close together
    with pytest.raises(RollbackError) as back:
        skip(135)
    assert (back.value.first, back.value.last) == (120, 135)
    rollback = {"kind": "event", "event": "rollback", "step": 110, "first": 120, "last": 135}
    guard = Guard([*noise(100), rollback])
    assert [n for n in range(115, 140) if guard.is_excluded(n)] == list(range(120, 136))
    skip(150)
    skip(151)
    with pytest.raises(RunError, match="going back from step 135 did not help"):
        skip(152)


def test_a_resumed_guard_decides_like_an_uninterrupted_one():
    """One more step in the log makes no difference: the limits come from steps up to two before."""
    log = noise(300)
    log.insert(250, {"kind": "event", "event": "skip", "step": 250, "loss": math.nan})
    whole, resumed = Guard(log), Guard(relevant(log))
    assert vars(whole) == vars(resumed)
    behind, settled = Guard(relevant(log[:-1])), Guard(relevant(log))  # up to step 298, and 299
    assert behind.limits(300) == settled.limits(300) != settled.limits(301)
    assert len(set(map(tuple, map(settled.limits, (301, 302, 400))))) == 1


def test_finished_steps_are_logged_before_an_error_and_a_rollback_keeps_its_save(corpus, tmp_path):
    run = made(corpus, tmp_path / "one", nproc=1)
    for begun in ([], ["resume"]):
        assert forked("poisoned", run, 1, STEPS, 17).returncode != 0
        assert "no memory in step 17" in RunDir(run).fault()["message"]
        assert [r["step"] for r in records(run, "step")] == [*range(1, 17)]
        events = [(r["event"], r["step"]) for r in records(run, "event")]
        expected = [("start", 0), ("save", 9), *((each, 9) for each in begun)]
        assert sorted(events, key=itemgetter(1)) == expected


def test_every_engine_skips_cleanly_and_finds_every_flipped_bit():
    done = forked("corruption", 25, 100)
    lines = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert len(lines) == 2, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    seen = lines[0] | lines[1]
    assert all(all(layout.values()) for layout in seen["skipped"].values()), seen["skipped"]
    assert set(seen["caught"].values()) == {5}, seen["caught"]
    assert seen["alarms"] == []
    assert set(seen["waits"].values()) == {"0"}, seen["waits"]
    assert [line[:7] for line in seen["looped"]] == ["step 2:", "step 1:"], seen["looped"]
    assert all("the weights of rank 1 changed" in line for line in seen["looped"]), seen["looped"]
    assert all("the weights of rank 1 differ" in line for line in seen["routed"]), seen["routed"]


@pytest.fixture(scope="module")
def poisoned(corpus, tmp_path_factory) -> Path:
    """Two processes, rank 1 of which gets NaN for its rows in four of the steps and hangs in the last."""
    run = made(corpus, tmp_path_factory.mktemp("poisoned") / "two", nproc=2)
    assert forked("poisoned", run, 2, STEPS, STEPS, *BAD).returncode != 0
    return run


def made(corpus: Path, out: Path, nproc: int) -> Path:
    sets = ("recipe=adamw", "model.seq=64", "train.batch_tokens=1024", "train.save_every=9", "train.eval_every=27",
            "train.eval_batches=2", "optim.lr=0.001", f"train.steps={STEPS}")  # fmt: skip
    request = Request("tiny", "dense", corpus, out, nproc, sets=sets)
    return plan_run(request, Devices(0, 2**34, "CPU")).commit().run.path


def test_a_run_without_steps_keeps_its_world_and_needs_disk_space(corpus, tmp_path, monkeypatch):
    run = made(corpus, tmp_path / "four", nproc=4)
    assert RunDir(run).world == 4  # although it has logged nothing
    plan_run(Request(None, None, None, run, 4, resume=True), Devices(0, 2**34, "CPU"))
    for stray in ("step-00000009.bak", "step-backup"):  # names that never count as checkpoints
        (run / "checkpoints" / stray).mkdir()
    assert RunDir(run).note_fault(1)["saved"] == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(RunError, match=r"3 checkpoints need .* are free"):
        plan_run(Request(None, None, None, run, 4, resume=True), Devices(0, 2**34, "CPU"))


def test_bad_batches_are_skipped_and_left_out_and_the_rest_is_trained(poisoned):
    events = {(r["event"], r["step"]) for r in records(poisoned, "event")}
    assert {("skip", 2), ("rollback", 18), ("omit", 20), ("omit", 21), ("omit", 22)} <= events
    steps = [n for n in range(1, STEPS) if n not in BAD]
    logged = [r["step"] for r in records(poisoned, "step")]
    # The last step is logged only if this rank reads it before it notices the end of the other.
    assert logged in (steps, steps[:-1])
    (back,) = [r for r in records(poisoned, "event") if r["event"] == "rollback"]
    assert (back["first"], back["last"], back["reason"]) == (20, 22, "loss is nan")
    assert all(map(math.isfinite, losses(poisoned)))
    saves = [r["step"] for r in records(poisoned, "event") if r["event"] == "save"]
    assert saves == [9, 18]  # it went back to 18


def test_a_stuck_rank_is_found_with_its_stacks(poisoned):
    fault = json.loads((poisoned / "error.json").read_text())
    assert fault["kind"] == "HangError"
    assert re.match(rf"step {STEPS} did not .*every rank waits", fault["message"])
    logs = (poisoned / "logs" / f"stacks-rank-{rank}.txt" for rank in range(2))
    waits, hangs = (log.read_text() for log in logs)
    assert "all_reduce" in waits.partition("last collectives")[2] and "loop.py" in waits
    assert "in poison" in hangs


def test_a_hanging_start_is_found_after_first_s(tmp_path):
    (tmp_path / "logs").mkdir()
    if (child := os.fork()) == 0:
        Watchdog(RunDir(tmp_path), World(0, 2, torch.device("cpu")), hang_s=60.0, first_s=0.5)
        (tmp_path / "logs" / "stacks-rank-1.txt").touch()  # rank 1 has also written its stacks
        time.sleep(120)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    fault = json.loads((tmp_path / "error.json").read_text())
    assert fault["kind"] == "HangError" and "limit 0.5 s): rank 1 is stuck" in fault["message"]
    assert "in start 0" in (tmp_path / "logs" / "stacks-rank-0.txt").read_text()


def test_a_limit_from_few_durations_is_generous(tmp_path, monkeypatch):
    """The second evaluation on a busy machine may take four times as long as the first."""
    (tmp_path / "logs").mkdir()
    clock = [0.0]
    monkeypatch.setattr("pipeline.train.watchdog.time.monotonic", lambda: clock[0])
    watch = Watchdog(RunDir(tmp_path), World(0, 1, torch.device("cpu")), hang_s=7.0, first_s=600.0)
    limits = []
    for _ in range(128):
        watch.enter("evaluation", 1)
        limits.append(watch._limit_s())
        clock[0] += 6.27
    watch.close()
    assert limits[0] == 600 and limits[1] > 100 and limits[2] > 60
    assert limits == sorted(limits, reverse=True) and limits[-1] == pytest.approx(26.4, abs=0.05)


def test_one_process_decides_the_same_and_gives_up_after_a_failed_rollback(
    poisoned, corpus, tmp_path
):
    run = made(corpus, tmp_path / "one", nproc=1)
    done = forked("poisoned", run, 1, 0, 0, *BAD, 24, 25, 26)
    assert done.returncode != 0
    fault = json.loads((run / "error.json").read_text())
    assert fault["user"] and fault["message"].startswith("step 26: loss is nan")
    assert losses(run) == pytest.approx(losses(poisoned)[: len(losses(run))], abs=1e-5)
    assert hashes(run) == hashes(poisoned)[: len(hashes(run))] and len(hashes(run)) == 19
