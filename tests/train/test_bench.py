"""Benchmarks: a ratio to another trainer, a micro-batch that fits, no host that waits."""

import json
import math
import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from pipeline.bench.peers.generation import Sides, random_model
from pipeline.bench.peers.trainers import HuggingFace
from pipeline.config.layers import load
from pipeline.errors import ConfigError, RunError, first_line
from pipeline.hub.tensors import gather
from pipeline.objective.batch import Micro, random_batch
from pipeline.parallel.build_engine import prepare_model
from pipeline.parallel.world import World
from pipeline.planner.check import resolve
from pipeline.runs.directory import fault_line, out_of_memory
from pipeline.train.measure import peak_flops
from pipeline.train.request import Devices, Request, plan_run
from tests import forks
from tests.conftest import environment, launch

BENCH = ["bench", "train", "--size", "7k"]
SMALL = ["model.vocab=512", "model.seq=64", "train.batch_tokens=1024"]
# One chunk of logits needs more memory than all else. It fits the host, but not the process limit.
# ZeRO-0, because the buckets of the other stages are even larger.
WIDE = ["model.vocab=12288", "model.seq=256", "train.batch_tokens=8192", "train.loss_chunk=1000000"]
MICRO_BATCHES = [36, 18, 12, 9, 6, 4, 3, 2, 1]
LIMIT_BYTES = 1 << 30  # the process alone needs half of it, and 36 rows at least 1.3 GiB
TERMINAL = {"TTY_COMPATIBLE": "1", "TERM": "xterm"}  # so that rich treats the output as a terminal
CPU = Devices(0, 2**34, "CPU")


def limited(*arguments, limit=LIMIT_BYTES):
    return forks.run("tests.train.limited", [limit, *arguments], environment(**TERMINAL))


def words(text):
    return text.split()


def sets(values):
    return [part for value in values for part in ("--set", value)]


def test_a_step_is_compared_with_hugging_face_and_its_overheads_are_measured():
    asked = "--arch moe --steps 2 --compare hf --overheads --auto-batch --cluster h200 --json"
    memory = "cluster.memory_bytes=300_777_669"  # 9 MB more than the process itself needs
    done = limited(*BENCH, *asked.split(), *sets([*SMALL, memory]), limit=1 << 40)
    assert done.returncode == 0, done.stderr
    assert "step 2 of 2" not in done.stderr
    assert done.stderr.strip().endswith(
        "group left"
    )  # NCCL warns about a process group that was not destroyed
    found = json.loads(done.stdout)
    chosen = re.match(r"micro-batch (\d+) of 16: .* cluster.memory_bytes", found["auto-batch"])
    assert int(chosen[1]) in (2, 4, 8)
    assert f"micro-batches of {chosen[1]} × 64" in found["batch"]
    ours, theirs = map(float, found["first loss, ours and HF's"].split())
    assert ours == pytest.approx(theirs, rel=0.02)
    assert ours == pytest.approx(math.log(512), rel=0.01)
    ours, theirs = map(float, found["tokens/s, ours and HF's in turn"].replace(",", "").split())
    assert found["ours over HF"] == pytest.approx(ours / theirs, rel=0.01)
    costs = {name for name in found if name.startswith("cost of ")}
    assert len(costs) == 5 and all(isinstance(found[name], float) for name in costs)
    assert found["host reads in an update"] == found["host reads in a step"] == "0"
    assert found["MFU %"].startswith("unknown") and "H200" in found["MFU %"]
    assert "head in, input embedding out" in found["convention"]


@pytest.mark.parametrize("arch", ["dense", "roberta", "modernbert", "t5", "bart"])
def test_the_model_of_transformers_has_our_loss_with_our_weights(arch):
    """The same batch under the names that transformers uses, and targets that random weights distinguish."""
    torch.manual_seed(10)
    asked = ["recipe=adamw", "model.seq=64", "model.layers=4", "model.vocab=256"]
    config = resolve(load(size="27k", arch=arch, sets=asked), ranks=1, gpu=False)
    world = World(0, 1, torch.device("cpu"))
    peer = HuggingFace(config, world)
    model = prepare_model(config, world)
    kind = peer._model.config.model_type
    theirs = peer._model.state_dict().__getitem__
    found = gather(config.model, kind, dict(model.named_parameters()), theirs)
    model.load_state_dict(dict(found), strict=False)  # a tied head is the embedding
    micro = Micro(**random_batch(config, 1, range(4)).inputs)
    if arch == "dense":  # transformers shifts the targets, so it has one less
        micro.targets_BS[:, -1] = -100
    else:  # RoBERTa of transformers does not count padding in its positions
        micro.tokens_BS.clamp_(min=3)
    with torch.no_grad():
        ours = model(**micro.inputs).nll
    assert float(peer.step([micro], 0.0)) == pytest.approx(float(ours), rel=2e-6)


@pytest.mark.parametrize("arch", ["dense", "t5", "gpt2", "mixtral"])
def test_generation_is_compared_with_hugging_face_from_the_same_weights(arch, inside):
    few = ["--size", "27k", "--rows", "3", "--new-tokens", "12", "--rounds", "1", "--json"]
    found = json.loads(
        inside("bench", "generate", "--arch", arch, *few, "--set", "model.vocab=512")
    )
    assert found["rows with the same tokens"] == "3 of 3"
    assert found["first logits differ by"] < 1e-4
    assert all(float(ms) > 0 for ms in found["first token ms, ours and HF's"].split())
    ours, theirs = map(float, found["tokens/s, ours and HF's in turn"].replace(",", "").split())
    assert found["ours over HF"] == pytest.approx(ours / theirs, rel=0.02)


def test_generation_of_other_weights_or_without_a_class_is_refused(inside, tmp_path):
    model = random_model(load(size="7k", sets=["model.vocab=512"]), "cpu", torch.float32)
    sides = Sides(model, 2, 8)
    assert sides.difference() < 1e-5
    with torch.no_grad():
        model.blocks[-1].ffn.out.weight.mul_(1.1)
    with pytest.raises(RunError, match="first logits differ"):
        sides.difference()
    refused = {
        "model.arch=bert does not generate": ["--arch", "bert"],
        "model.arch=isoflop": ["--arch", "isoflop"],
        "--run has its own model": ["--run", tmp_path, "--size", "7k"],
    }
    for key, asked in refused.items():
        assert key in inside("bench", "generate", *asked, code=2)


def test_a_bench_that_fails_leaves_its_group():
    large = sets([*WIDE, "train.batch_tokens=9216", "train.micro_batch=36"])
    done = limited(*BENCH, *words("--zero 0 --steps 1 --no-parts"), *large)
    assert done.returncode and "train.micro_batch=36: out of memory" in done.stderr
    assert done.stderr.strip().endswith("group left")


def test_fp8_is_compared_with_its_twin_from_the_same_weights_on_the_same_batches(corpus):
    asked = words("--steps 13 --compare bf16 --no-parts --json")
    settings = sets([*SMALL[1:], "recipe=adamw", "train.fp8=true"])
    found = json.loads(launch(*BENCH, *asked, "--data", corpus, *settings).stdout)
    losses = {what: value.split() for what, value in found.items() if what.startswith("loss of")}
    first, *_, last, whole = losses
    assert first == "loss of steps 1 to 2, ours and fp32's"  # fp32 on a CPU
    assert last == "loss of steps 13 to 13, ours and fp32's"
    *parts, means = ([float(loss) for loss in value[:2]] for value in losses.values())
    for mean, part in zip(means, zip(*parts, strict=True), strict=True):
        assert mean == pytest.approx((2 * sum(part[:-1]) + part[-1]) / 13, abs=1e-4)
    fp8, fp32 = means
    assert 0 < abs(fp8 / fp32 - 1) < 0.01  # close but not equal
    percent = float(losses[whole][2].removesuffix("%"))
    assert percent == pytest.approx(100 * (fp8 / fp32 - 1), abs=0.02)


@pytest.mark.parametrize(
    ("cluster", "device", "here", "there"),
    [  # the last two: the peak on a CPU and on an H200
        ("h200", "H200", None, 989e12),
        ("h200", "A100", None, None),
        ("h200", None, 989e12, 989e12),  # used as given
        (None, None, None, 989e12),  # from the shipped cluster that has this device
    ],
)
def test_the_peak_is_that_of_the_local_device(monkeypatch, cluster, device, here, there):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    site = load(size="7k", cluster=cluster).cluster.model_copy(update={"device": device})
    assert [peak_flops(site, torch.device(kind)) for kind in ("cpu", "cuda")] == [here, there]


def test_several_ranks_print_one_table_and_end_a_save_together():
    torchrun = words("--standalone --nproc-per-node 2 -m launch")
    asked = words("--steps 1 --overheads --no-parts --json --profile")
    program = [*torchrun, *BENCH, *asked, *sets(SMALL)]
    done = forks.run("torch.distributed.run", program, environment(OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["training blocked by one save, % of a step"] >= 0
    assert "Self CPU" in found["kernels"]


def test_a_benchmark_tries_the_next_micro_batch():
    """The divisors of 36 rows are tried from the largest on, until one fits."""
    asked = words("--zero 0 --steps 1 --no-parts --auto-batch")
    done = limited(*BENCH, *asked, *sets([*WIDE, "train.batch_tokens=9216"]))
    assert done.returncode == 0, done.stderr[-2000:]
    failed = [int(micro) for micro in re.findall(r"micro-batch (\d+) does not fit", done.stderr)]
    assert failed and failed == MICRO_BATCHES[: len(failed)], done.stderr
    assert "step 1 of 1" in done.stderr and "step 1 of 1" not in done.stdout  # the status
    fits = MICRO_BATCHES[len(failed)]
    assert re.search(rf"micro-batch {fits} of 36: .*\b{failed[-1]} ran out of memory", done.stdout)
    assert re.search(rf"in micro-batches of {fits} × 256\n(.*\n)*step ms", done.stdout)


def test_a_run_out_of_memory_continues_with_the_next_micro_batch(corpus, tmp_path):
    run = tmp_path / "run"
    asked = words("pretrain --size 7k --nproc 2 --steps 1 --no-track --zero 0 --auto-batch")
    few = sets([*WIDE, "train.batch_tokens=18432", "train.eval_batches=1"])
    done = limited(*asked, "--data", corpus, "--out", run, *few)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "micro-batch 36 of 36" in done.stderr and "finished at step 1/1" in done.stdout
    faults = [json.loads(line) for line in (run / "faults.jsonl").read_text().splitlines()]
    assert faults and all(fault["lowered"] for fault in faults)
    micro = MICRO_BATCHES[len(faults)]
    assert "train.micro_batch" in faults[-1]["message"]
    assert f"\nmicro_batch = {micro}\n" in (run / "config.toml").read_text()


def test_an_error_without_text_is_still_one_line():
    assert fault_line({"kind": "OutOfMemoryError", "message": ""}) == "OutOfMemoryError: "
    assert fault_line({"kind": "ValueError", "message": "\nbad\nworse"}) == "ValueError: bad"
    assert (first_line(OSError()), first_line(OSError(" a\nb"))) == ("OSError", "a")


def test_a_resumed_run_searches_for_a_micro_batch_once(corpus, tmp_path):
    few = ["model.seq=64", "train.batch_tokens=32768"]
    request = Request("7k", "dense", corpus, tmp_path / "run", 1, sets=few)
    first = plan_run(request, CPU).commit().config
    again = Request(None, None, None, tmp_path / "run", 1, resume=True)
    search = replace(again, over={"train": {"auto_batch": True}})
    assert plan_run(again, CPU).config.train.micro_batch == first.train.micro_batch == 256
    assert plan_run(search, CPU).config.train.micro_batch == 512
    found = plan_run(search, Devices(0, 300 * 2**20, "CPU"))
    assert found.config.train.micro_batch == 128
    found.run.continue_with(found.config)
    for request in (again, search):  # the earlier result is used
        assert plan_run(request, CPU).config.train.micro_batch == 128
    with pytest.raises(ConfigError, match=r"train\.micro_batch=4"):
        plan_run(replace(again, sets=["train.micro_batch=4"]), CPU)


def test_fp8_with_unscaled_embeddings_prints_a_note(corpus, tmp_path):
    def note(*settings: str) -> str:
        few = ["recipe=adamw", "model.seq=64", "train.fp8=true", *settings]
        return plan_run(Request("7k", "dense", corpus, tmp_path / "run", 1, sets=few), CPU).note

    assert "model.scaled_embedding" in note()
    assert note("train.auto_batch=true").count("\n") == 1  # below the note on the micro-batch
    suitable = "model.scaled_embedding=true model.multipliers.embedding=4.0 model.tied=true"
    for setting in (*suitable.split(), "recipe=muon", "train.fp8=false"):
        assert note(setting) == ""


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
def test_out_of_memory_is_recognized_from_any_allocator(kind, message, lowers):
    assert out_of_memory(kind, message) == lowers


def test_a_wrong_request_is_refused_before_anything_is_timed(inside, corpus, monkeypatch):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    odd_width = ["model.width=72", "model.attention.head_dim=20", "model.ffn.hidden=200"]
    refused = {
        "model.ffn.capacity": ["--arch", "switch", "--compare", "hf"],
        "model.arch=isoflop": ["--arch", "isoflop", "--compare", "hf"],
        "model.row_classes=2": ["--arch", "bert", "--compare", "hf"],
        "objective.kind='replaced'": ["--arch", "electra", "--compare", "hf"],
        "--compare bf16": ["--compare", "bf16"],
        "--compare it": ["--compare", "it"],
        "zero=0": sets(["recipe=adamw", "parallel.zero=0", "parallel.offload.optimizer=cpu"]),
        "model.vocab=64": ["--data", corpus, "--set", "model.vocab=64"],
        "train.fp8=true": sets([*SMALL[1:], *odd_width, "train.fp8=true"]),
        "train.micro_batch=2": ["--auto-batch", "--set", "train.micro_batch=2"],
    }
    for key, asked in refused.items():
        assert key in inside(*BENCH, *asked, code=2)
    pretrain = ("pretrain", "--size", "7k", "--data", corpus, "--out", corpus / "none")
    asked = refused["train.micro_batch=2"]
    assert "train.micro_batch=2" in inside(*pretrain, *asked, code=2)


@pytest.mark.parametrize(
    ("arch", "mtp", "kinds"), [("dense", 0, 2), ("moe", 0, 2), ("mla-moe", 0, 2), ("dense", 1, 2)]
)  # the first has nothing to add
def test_one_graph_per_kind_of_block_without_breaks_or_recompilation(arch, mtp, kinds, monkeypatch):
    """Counted by Dynamo, which creates the graphs; the compiler that runs afterwards does not matter here."""
    from torch._dynamo.utils import counters  # here, because it takes seconds in every test process

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    few = ["model.layers=3", f"model.mtp={mtp}", "train.compile=true", "train.dtype=bf16"]
    settings = [*SMALL, *few, *(["model.ffn.experts=8"] if "moe" in arch else [])]
    config = resolve(load(size="7k", arch=arch, sets=settings), ranks=1, gpu=False)
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
        assert seen == [kinds] * 2 + [2 * kinds] * 4  # other graphs without gradients
