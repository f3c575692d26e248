"""The benchmark's own promises: a ratio against another trainer, a micro-batch that fits, no host that waits."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from pipeline.config.layers import load
from pipeline.errors import ConfigError
from pipeline.parallel.build_engine import prepare_model
from pipeline.parallel.world import World
from pipeline.planner.recipe import resolve
from pipeline.runs.faults import out_of_memory
from pipeline.train.device_clock import peak_flops
from pipeline.train.request import Devices, Request, plan_run
from tests.conftest import command, environment, launch

SMALL = ["model.vocab=512", "model.seq=64", "train.batch_tokens=1024"]
# one chunk of logits outweighs all else: by the host's memory it fits, by the limit of the process it does not
# (ZeRO 0, since the buckets of the other stages are larger than that)
WIDE = ["model.vocab=32768", "model.seq=256", "train.batch_tokens=8192", "train.loss_chunk=1000000"]
LIMIT_KIB = 3 << 20
TERMINAL = {"TTY_COMPATIBLE": "1", "TERM": "xterm"}  # as rich is told of one


def limited(*arguments):
    return subprocess.run(
        ["bash", "-c", f'ulimit -d {LIMIT_KIB}; exec "$@"', "limited", *command(*arguments)],
        capture_output=True, text=True, env=environment(OMP_NUM_THREADS="1", **TERMINAL), timeout=800,
    )  # fmt: skip


def sets(values):
    return [part for value in values for part in ("--set", value)]


def test_a_step_is_held_against_hugging_face_and_what_stands_beside_it_is_priced():
    asked = [
        "bench",
        "train",
        "--size",
        "7k",
        "--arch",
        "moe",
        "--steps",
        "2",
        "--compare",
        "hf",
        "--overheads",
    ]
    room = "cluster.memory_bytes=300_777_669"  # 9 MB beside what the process takes for itself
    done = launch(
        *asked, "--auto-batch", "--cluster", "h200", *sets([*SMALL, room]), "--json", **TERMINAL
    )
    assert "step 2 of 2" not in done.stderr
    said = json.loads(done.stdout)
    why = r"micro-batch (\d+) of 16: account expects (\S+) GiB per rank, cluster.memory_bytes gives 0.26 GiB"
    assert (chosen := re.fullmatch(why, said["auto-batch"])) and int(chosen[1]) in (2, 4, 8)
    assert f"micro-batches of {chosen[1]} × 64" in said["batch"]
    ours, theirs = map(float, said["first loss, ours and HF's"].split())
    assert ours == pytest.approx(theirs, rel=0.02) and ours == pytest.approx(
        math.log(512), rel=0.01
    )
    ours, theirs = (
        float(x.replace(",", "")) for x in said["tokens/s, ours and HF's in turn"].split()
    )
    assert said["ours over HF"] == pytest.approx(ours / theirs, rel=0.01)
    costs = {name for name in said if name.startswith("cost of ")}
    assert len(costs) == 5 and all(isinstance(said[name], float) for name in costs)
    assert said["host reads in an update"] == said["host reads in a step"] == "0"
    assert said["MFU %"] == "unknown: this is CPU, not the cluster's H200"
    assert "head in, input embedding out" in said["convention"]


def test_fp8_is_held_against_its_twin_from_the_same_weights_on_the_same_batches(corpus):
    asked = [
        "bench",
        "train",
        "--size",
        "7k",
        "--steps",
        "13",
        "--compare",
        "bf16",
        "--no-parts",
        "--json",
    ]
    settings = sets([*SMALL[1:], "train.fp8=true"])
    said = json.loads(launch(*asked, "--data", corpus, *settings).stdout)
    losses = {what: value.split() for what, value in said.items() if what.startswith("loss of")}
    assert next(iter(losses)) == "loss of steps 1 to 2, ours and fp32's"  # on a CPU
    assert list(losses)[-2:] == [
        f"loss of {of}, ours and fp32's" for of in ("steps 13 to 13", "all 13 steps")
    ]
    *parts, whole = ([float(loss) for loss in value[:2]] for value in losses.values())
    for of, each in zip(whole, zip(*parts, strict=True), strict=True):
        assert of == pytest.approx((2 * sum(each[:-1]) + each[-1]) / 13, abs=1e-4)
    fp8, fp32 = whole
    assert 0 < abs(fp8 / fp32 - 1) < 0.01  # near, and not the same numbers
    percent = losses["loss of all 13 steps, ours and fp32's"][2]
    assert float(percent.removesuffix("%")) == pytest.approx(100 * (fp8 / fp32 - 1), abs=0.02)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("--compare bf16", "--compare bf16"),
        ("--compare it", "--compare it"),
        (
            "--set train.fp8=true --set model.width=72 --set model.attention.head_dim=20 "
            "--set model.ffn.hidden=200",
            "train.fp8=true",
        ),
    ],
)
def test_what_cannot_be_compared_or_rounded_is_refused_in_one_line(asked, said):
    error = launch(
        *["bench", "train", "--size", "7k"], *sets(SMALL[1:]), *asked.split(), code=2
    ).stderr
    assert said in error and error.startswith("error: ") and "Traceback" not in error


@pytest.mark.parametrize(
    ("cluster", "device", "here", "there"),
    [  # on a CPU, on an H200
        ("h200", "H200", None, 989e12),
        ("h200", "A100", None, None),
        ("h200", None, 989e12, 989e12),  # believed
        (None, None, None, 989e12),  # that of the shipped cluster whose device this is
    ],
)
def test_a_peak_is_of_the_device_that_is_there(monkeypatch, cluster, device, here, there):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    site = load(size="7k", cluster=cluster).cluster.model_copy(update={"device": device})
    assert [peak_flops(site, torch.device(kind)) for kind in ("cpu", "cuda")] == [here, there]


def test_several_ranks_print_one_table_and_end_a_save_together():
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "launch",
    ]
    asked = [
        "bench",
        "train",
        "--size",
        "7k",
        "--steps",
        "1",
        "--overheads",
        "--no-parts",
        "--json",
        "--profile",
    ]
    wish = [sys.executable, *torchrun, *asked, *sets(SMALL)]
    done = subprocess.run(
        wish, capture_output=True, text=True, env=environment(OMP_NUM_THREADS="1"), timeout=600
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["training blocked by one save, % of a step"] >= 0 and "Self CPU" in said["kernels"]


def test_a_benchmark_tries_the_next_micro_batch():
    """Of 36 rows: 36, 18, 12, 9 … until one trains, the divisors of all and not of the one before."""
    asked = [
        "bench",
        "train",
        "--size",
        "7k",
        "--zero",
        "0",
        "--steps",
        "1",
        "--no-parts",
        "--auto-batch",
    ]
    tried = limited(*asked, *sets([*WIDE, "train.batch_tokens=9216"]))
    assert tried.returncode == 0, tried.stderr[-2000:]
    failed = [int(micro) for micro in re.findall(r"micro-batch (\d+) does not fit", tried.stderr)]
    every = [36, 18, 12, 9, 6, 4, 3, 2, 1]
    assert failed == every[: len(failed)] and failed, tried.stderr
    assert "step 1 of 1" in tried.stderr and "step 1 of 1" not in tried.stdout  # what is waited for
    fits = every[len(failed)]
    assert re.search(
        rf"micro-batch {fits} of 36: .*; {failed[-1]} ran out of memory\n", tried.stdout
    )
    assert re.search(rf"in micro-batches of {fits} × 256\n(.*\n)*step ms", tried.stdout)


def test_a_run_that_runs_out_of_memory_goes_on_with_the_next_micro_batch(corpus, tmp_path):
    run = tmp_path / "run"
    asked = [
        "pretrain",
        "--size",
        "7k",
        "--nproc",
        "2",
        "--steps",
        "1",
        "--no-track",
        "--zero",
        "0",
        "--auto-batch",
    ]
    few = sets([*WIDE, "train.batch_tokens=18432", "train.eval_batches=1"])
    done = limited(*asked, "--data", corpus, "--out", run, *few)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "micro-batch 36 of 36" in done.stderr and "finished at step 1/1" in done.stdout
    faults = [json.loads(line) for line in (run / "faults.jsonl").read_text().splitlines()]
    assert faults and all(fault["lowered"] for fault in faults)
    micro = [36, 18, 12, 9, 6, 4, 3, 2, 1][len(faults)]
    assert faults[-1]["message"].endswith(f"train.micro_batch is lowered to {micro}")
    assert f"\nmicro_batch = {micro}\n" in (run / "config.toml").read_text()


def test_a_run_that_goes_on_looks_for_a_micro_batch_once(corpus, tmp_path):
    cpu = Devices(0, 2**34, "CPU")
    few = ["model.seq=64", "train.batch_tokens=32768"]
    wish = Request("7k", "dense", corpus, tmp_path / "run", 1, sets=few)
    first = plan_run(wish, cpu).commit().config
    again = Request(None, "dense", None, tmp_path / "run", 1, resume=True)
    look = replace(again, over={"train": {"auto_batch": True}})
    assert plan_run(again, cpu).config.train.micro_batch == first.train.micro_batch == 256
    assert plan_run(look, cpu).config.train.micro_batch == 512
    found = plan_run(look, Devices(0, 300 * 2**20, "CPU"))
    assert found.config.train.micro_batch == 128
    found.run.continue_with(found.config)
    for wish in (again, look):  # as it was found, or lowered
        assert plan_run(wish, cpu).config.train.micro_batch == 128
    with pytest.raises(
        ConfigError, match=r"^train.micro_batch=4 is given, and .*; take one of the two away$"
    ):
        plan_run(replace(again, sets=["train.micro_batch=4"]), cpu)


def test_fp8_from_weights_that_it_does_not_suit_is_remarked_on(corpus, tmp_path):
    def said(*settings: str) -> str:
        wish = Request("7k", "dense", corpus, tmp_path / "run", 1, sets=["model.seq=64", *settings])
        return plan_run(wish, Devices(0, 2**34, "CPU")).note

    assert said("train.fp8=true").startswith("train.fp8=true without model.scaled_embedding=true: ")
    assert said("train.fp8=true", "train.auto_batch=true").count("\n") == 1  # beside the other note
    for suits in (
        "model.scaled_embedding=true", "model.multipliers.embedding=4.0", "model.tied=true", "train.fp8=false"
    ):  # fmt: skip
        assert said("train.fp8=true", suits) == ""


@pytest.mark.parametrize(
    ("kind", "message", "lowers"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("RuntimeError", "err == 0. DefaultCPUAllocator: can't allocate", True),
        ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `f`", True),
        ("RuntimeError", "Triton Error [CUDA]: out of memory", True),
        ("AcceleratorError", "CUDA error: out of memory", True),
        ("RuntimeError", "CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_whatever_allocates_says_that_memory_ran_out(kind, message, lowers):
    assert out_of_memory(kind, message) == lowers


def test_what_cannot_be_measured_is_refused_at_once(inside, corpus, monkeypatch):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    refused = inside(
        "bench", "train", "--size", "7k", "--arch", "switch", "--compare", "hf", code=2
    )
    assert "activation='relu' has no counterpart" in refused
    both = ("--size", "7k", "--data", corpus, "--auto-batch", "--set", "train.micro_batch=2")
    for asked in ("bench", "train"), ("pretrain", "--out", corpus / "none"):
        assert "train.micro_batch=2 is given, and --auto-batch" in inside(*asked, *both, code=2)
    offload = ("--set", "parallel.zero=0", "--set", "parallel.offload.optimizer=cpu")
    shared = inside("bench", "train", "--size", "7k", *offload, code=2)
    assert "not zero=0" in shared  # as it was set
    small = ("--data", corpus, "--set", "model.vocab=64")
    assert "model.vocab=64 is smaller than" in inside(
        "bench", "train", "--size", "7k", *small, code=2
    )


@pytest.mark.parametrize(
    ("arch", "mtp", "kinds"), [("dense", 0, 2), ("moe", 0, 2), ("mla-moe", 0, 2), ("dense", 1, 2)]
)  # the first has nothing to add
def test_one_graph_per_kind_of_block_and_none_is_broken_or_made_again(
    arch, mtp, kinds, monkeypatch
):
    """Counted by Dynamo, which does the cutting; what compiles its graphs afterwards does not matter here."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    few = ["model.layers=3", f"model.mtp={mtp}", "train.compile=true", "train.dtype=bf16"]
    wish = [*SMALL, *few, *(["model.ffn.experts=8"] if "moe" in arch else [])]
    config = resolve(load(size="7k", arch=arch, sets=wish), ranks=1, gpu=False)
    model = prepare_model(config, World(0, 1, torch.device("cpu"))).bfloat16()
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
