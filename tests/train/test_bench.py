"""The benchmark's own promises: a ratio against another trainer, a micro-batch that fits, no host that waits."""

import json
import math
import re
import subprocess

import pytest

from tests.conftest import command, environment, launch

SMALL = ["model.vocab=512", "model.seq=64", "train.batch_tokens=1024"]
# one chunk of logits outweighs all else: by the host's memory it fits, by the limit of the process it does not
WIDE = ["model.vocab=32768", "model.seq=256", "train.batch_tokens=8192", "train.loss_chunk=1000000"]
LIMIT_KIB = 9 << 19


def limited(*arguments):
    return subprocess.run(
        ["bash", "-c", f'ulimit -d {LIMIT_KIB}; exec "$@"', "limited", *command(*arguments)],
        capture_output=True, text=True, env=environment(OMP_NUM_THREADS="1"), timeout=280,
    )  # fmt: skip


def sets(values):
    return [part for value in values for part in ("--set", value)]


def test_a_step_is_held_against_hugging_face_and_what_stands_beside_it_is_priced():
    asked = ("bench", "train", "--size", "7k", "--arch", "moe", "--steps", 2, "--compare", "hf", "--overheads")
    room = "cluster.memory_bytes=9_000_000"
    said = json.loads(launch(*asked, "--auto-batch", *sets([*SMALL, room]), "--json").stdout)
    why = r"micro-batch (\d+) of 16: account expects (\S+) GiB per rank, cluster.memory_bytes gives 0.01 GiB"
    assert (chosen := re.fullmatch(why, said["auto-batch"])) and int(chosen[1]) in (2, 4, 8)
    assert f"micro-batches of {chosen[1]} × 64" in said["batch"]
    ours, theirs = map(float, said["first loss, ours and HF's"].split())
    assert ours == pytest.approx(theirs, rel=0.02) and ours == pytest.approx(math.log(512), rel=0.01)
    ours, theirs = (float(x.replace(",", "")) for x in said["tokens/s, ours and HF's in turn"].split())
    assert said["ours over HF"] == pytest.approx(ours / theirs, rel=0.01)
    costs = {name for name in said if name.startswith("cost of ")}
    assert len(costs) == 5 and all(isinstance(said[name], float) for name in costs)
    assert said["MFU %"].startswith("unknown") and "head in, input embedding out" in said["convention"]


def test_a_micro_batch_that_does_not_fit_after_all_is_lowered(corpus, tmp_path):
    tried = limited("bench", "train", "--size", "7k", "--steps", 1, "--no-parts", "--auto-batch", *sets(WIDE))
    assert tried.returncode == 0, tried.stderr[-2000:]
    assert "micro-batch 32 of 32" in tried.stdout and re.search(r"in micro-batches of (1|2|4|8|16) × 256", tried.stdout)
    run = tmp_path / "run"
    asked = ("pretrain", "--size", "7k", "--data", corpus, "--nproc", 2, "--steps", 1, "--out", run, "--no-track")
    done = limited(*asked, "--auto-batch", *sets([*WIDE, "train.batch_tokens=16384", "train.eval_batches=1"]))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "micro-batch 32 of 32" in done.stderr and "finished at step 1/1" in done.stdout
    faults = [json.loads(line) for line in (run / "faults.jsonl").read_text().splitlines()]
    assert faults and all(fault["lowered"] for fault in faults)
    assert f"\nmicro_batch = {32 >> len(faults)}\n" in (run / "config.toml").read_text()
