"""The benchmark's own promises: a ratio against another trainer, a micro-batch that fits, no host that waits."""

import json
import math
import re
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from pipeline.config.load import load
from pipeline.parallel.build import _model
from pipeline.parallel.world import World
from pipeline.recipe import resolve
from tests.conftest import command, environment, launch

SMALL = ["model.vocab=512", "model.seq=64", "train.batch_tokens=1024"]
# one chunk of logits outweighs all else: by the host's memory it fits, by the limit of the process it does not
# (ZeRO 0, since the buckets of the other stages are larger than that)
WIDE = ["model.vocab=32768", "model.seq=256", "train.batch_tokens=8192", "train.loss_chunk=1000000"]
# DeepSpeed's own: whether a norm is finite, asked by whoever makes it and by whoever clips by it; the device has just
# been waited for by then, since the loop reads loss and norm there
READS = "4: zero.py:check ×1, utils.py:is_invalid_grad_norm ×3"
LIMIT_KIB = 3 << 20


def limited(*arguments):
    return subprocess.run(
        ["bash", "-c", f'ulimit -d {LIMIT_KIB}; exec "$@"', "limited", *command(*arguments)],
        capture_output=True, text=True, env=environment(OMP_NUM_THREADS="1"), timeout=800,
    )  # fmt: skip


def sets(values):
    return [part for value in values for part in ("--set", value)]


def test_a_step_is_held_against_hugging_face_and_what_stands_beside_it_is_priced():
    asked = ("bench", "train", "--size", "7k", "--arch", "moe", "--steps", 2, "--compare", "hf", "--overheads")
    room = "cluster.memory_bytes=300_777_669"  # 9 MB beside what the process takes for itself
    said = json.loads(launch(*asked, "--auto-batch", *sets([*SMALL, room]), "--json").stdout)
    why = r"micro-batch (\d+) of 16: account expects (\S+) GiB per rank, cluster.memory_bytes gives 0.26 GiB"
    assert (chosen := re.fullmatch(why, said["auto-batch"])) and int(chosen[1]) in (2, 4, 8)
    assert f"micro-batches of {chosen[1]} × 64" in said["batch"]
    ours, theirs = map(float, said["first loss, ours and HF's"].split())
    assert ours == pytest.approx(theirs, rel=0.02) and ours == pytest.approx(math.log(512), rel=0.01)
    ours, theirs = (float(x.replace(",", "")) for x in said["tokens/s, ours and HF's in turn"].split())
    assert said["ours over HF"] == pytest.approx(ours / theirs, rel=0.01)
    costs = {name for name in said if name.startswith("cost of ")}
    assert len(costs) == 5 and all(isinstance(said[name], float) for name in costs)
    assert said["host reads in an update"] == READS
    assert said["MFU %"].startswith("unknown") and "head in, input embedding out" in said["convention"]


def test_several_ranks_print_one_table_and_end_a_save_together(tmp_path):
    asked = ["bench", "train", "--size", "7k", "--steps", "1", "--overheads", "--no-parts", "--json", *sets(SMALL)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "launch"]
    wish = [sys.executable, *torchrun, *asked, "--profile", str(tmp_path / "kernels.txt")]
    done = subprocess.run(wish, capture_output=True, text=True, env=environment(OMP_NUM_THREADS="1"), timeout=600)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["training blocked by one save, % of a step"] >= 0
    assert "Self CPU" in (tmp_path / "kernels.txt").read_text()


def test_a_benchmark_tries_the_next_micro_batch():
    tried = limited(
        "bench", "train", "--size", "7k", "--zero", 0, "--steps", 1, "--no-parts", "--auto-batch", *sets(WIDE)
    )
    assert tried.returncode == 0, tried.stderr[-2000:]
    assert "micro-batch 32 of 32" in tried.stdout and "micro-batch 32 does not fit" in tried.stderr
    assert re.search(r"in micro-batches of (1|2|4|8|16) × 256\n(.*\n)*step ms", tried.stdout)


def test_a_run_that_runs_out_of_memory_goes_on_with_the_next_micro_batch(corpus, tmp_path):
    run = tmp_path / "run"
    asked = ("pretrain", "--size", "7k", "--data", corpus, "--nproc", 2, "--steps", 1, "--out", run, "--no-track")
    done = limited(
        *asked, "--zero", 0, "--auto-batch", *sets([*WIDE, "train.batch_tokens=16384", "train.eval_batches=1"])
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "micro-batch 32 of 32" in done.stderr and "finished at step 1/1" in done.stdout
    faults = [json.loads(line) for line in (run / "faults.jsonl").read_text().splitlines()]
    assert faults and all(fault["lowered"] for fault in faults)
    assert f"\nmicro_batch = {32 >> len(faults)}\n" in (run / "config.toml").read_text()


def test_what_cannot_be_measured_is_refused_at_once(inside, corpus, monkeypatch):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    refused = inside("bench", "train", "--size", "7k", "--arch", "switch", "--compare", "hf", code=2)
    assert "activation='relu' has no counterpart" in refused
    assert "is no directory" in inside("bench", "train", "--size", "7k", "--profile", "nowhere/kernels.txt", code=2)
    small = ("--data", corpus, "--set", "model.vocab=64")
    assert "model.vocab=64 is smaller than" in inside("bench", "train", "--size", "7k", *small, code=2)


@pytest.mark.parametrize(
    ("arch", "mtp", "kinds"), [("dense", 0, 2), ("moe", 0, 2), ("mla-moe", 0, 2), ("dense", 1, 2)]
)  # the first has nothing to add
def test_one_graph_per_kind_of_block_and_none_is_broken_or_made_again(arch, mtp, kinds, monkeypatch):
    """Counted by Dynamo, which does the cutting; what compiles its graphs afterwards does not matter here."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    wish = [
        *SMALL,
        "model.layers=3",
        f"model.mtp={mtp}",
        "train.compile=true",
        "train.dtype=bf16",
        *(["model.ffn.experts=8"] if "moe" in arch else []),
    ]
    config = resolve(load(size="7k", arch=arch, sets=wish), ranks=1, gpu=False)
    model = _model(config, World(0, 1, torch.device("cpu"))).bfloat16()
    random = torch.Generator().manual_seed(0)

    def forward(documents):
        tokens = torch.randint(512, (4, 65), generator=random)
        apart = (torch.rand(4, 64, generator=random) < 0.1).long().cumsum(1) if documents else None
        return model(tokens[:, :-1], tokens[:, 1:], apart)

    for documents in (False, True):
        torch._dynamo.reset()
        counters.clear()
        seen = []
        for evaluate in (False, False, True, False, True, False):
            model.train(not evaluate)
            with torch.set_grad_enabled(not evaluate):
                loss = forward(documents).total
            if not evaluate:
                loss.backward()
            seen.append(counters["stats"]["unique_graphs"])
        assert not counters["graph_break"]
        assert seen == [kinds] * 2 + [2 * kinds] * 4  # without gradients they are others
