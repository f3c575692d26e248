"""The planner's arithmetic against closed forms, and its times against what others published."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config.dump import changed
from pipeline.config.layers import load
from pipeline.config.schema import RunSpec
from pipeline.errors import ConfigError
from pipeline.planner import count as account
from pipeline.planner.check import fit_to_devices, resolve, smaller_micro_batch, widen_micro_batch
from pipeline.planner.memory import PROCESS_BYTES, DeviceMemory, Layout, memory, offloaded
from pipeline.planner.speed import ERROR, Estimate, best, estimate, plan, traffic
from tests.config.test_recipe import settings_in
from tests.published import OTHER, SAME, ladder_rows


def config(size, arch, ranks, rows=None, cluster="h100", seq=2048, vocab=32768, **sets):
    flat = [
        "recipe=adamw",  # the numbers here were measured, published or counted for AdamW
        f"model.vocab={vocab}",
        f"model.seq={seq}",
        "train.steps=1",
        "train.loss_chunk=2048",
        *(f"{k}={v}" for k, v in sets.items()),
    ]
    if rows:
        flat.append(f"train.batch_tokens={rows * seq}")
    loaded = load(size=size, arch=arch, cluster=cluster, sets=flat)
    return resolve(loaded, ranks=ranks, gpu=True)


@pytest.mark.parametrize("micros", [1, 5])
def test_bytes_of_zero_are_the_known_multiples_of_the_parameters(micros):
    """(g + w)·ψ·(d − 1)/d with bf16 gradients and weights: ZeRO's paper (arXiv 1910.02054, section 7) and, where
    micro-batches accumulate, what DeepSpeed does in each."""
    model, d = load(size="1b").model, 8
    psi = account.params(model).total
    whole = 2 * psi * (d - 1) // d
    expected = {0: 2 * whole, 1: 2 * whole, 2: (micros + 1) * whole, 3: 3 * micros * whole}
    for zero, total in expected.items():
        sent = traffic(model, Layout(d, zero), dtype="bf16", micros=micros)
        assert (sent.total, sent.tokens) == (total, 0)


def test_bytes_of_experts_by_hand():
    """DeepSeek-V3: 58 routed layers and one that predicts further, 8 of 256 experts, width 7168."""
    model = load(size="671b", arch="deepseek-v3", sets=["model.seq=4096"]).model
    layout, micros = Layout(64, 1, ep=16, micro_batch=2), 3
    sent = traffic(model, layout, dtype="bf16", micros=micros)
    tokens = 3 * 2 * 4096
    # there and back, forward and backward
    assert sent.tokens == 4 * tokens * 59 * 8 * 7168 * 2 * 15 // 16
    again = traffic(model, replace(layout, recompute=True), dtype="bf16", micros=micros)
    assert again.tokens == sent.tokens * 3 // 2
    experts, total = 59 * 256 * 3 * 7168 * 2048, account.params(model).total
    assert account.params(model).experts == experts
    # ranks that hold the same experts are 64 / 16; the rest is shared by all 64
    one_way = 2 * (total - experts) * 63 // 64 + 2 * (experts // 16) * 3 // 4
    assert sent.gradients == one_way == sent.weights


def test_bytes_of_shared_sequences_by_hand():
    """Llama-3 8B: 32 layers, 32 query and 8 key/value heads of 128. Over 16 ranks each key/value head is on two."""
    model = load(size="7b", arch="llama3", sets=["model.seq=32768"]).model
    tokens = 3 * 2 * 32768 // 16  # of one rank
    sent = traffic(model, Layout(16, 1, micro_batch=2, sp=16), dtype="bf16", micros=3)
    # forward and backward
    assert sent.heads == 2 * tokens * 32 * (32 + 16 + 16 + 32) * 128 * 2 * 15 // 16
    assert traffic(model, Layout(16, 1, micro_batch=2), dtype="bf16", micros=3).heads == 0


# ── What a GPU holds ─────────────────────────────────────────────────────────────────────────────────────────────────

MOE = "layers=16 attention.heads=8 attention.kv_heads=2 attention.head_dim=128 attention.qk_norm=false ffn.hidden=1792 "
MOE += "ffn.experts=16 ffn.top_k=2 ffn.shared=0"
MLA = "layers=16 attention.heads=8 attention.nope_dim=96 attention.rope_dim=32 attention.v_dim=128 ffn.hidden=512 "
MLA += "ffn.dense_layers=0"


@pytest.mark.parametrize(
    ("size", "arch", "model", "micro", "batch", "zero", "measured"),
    [  # GiB at the peak of a step on one H200, bf16: docs/BENCHMARKS.md
        ("1b", "dense", "", 16, 524288, 1, 58.8),
        ("1b", "dense", "seq=8192", 4, 524288, 1, 58.8),
        ("3b", "dense", "", 16, 524288, 1, 132.2),
        ("350m", "moe", MOE, 32, 524288, 1, 69.5),
        ("350m", "mla-moe", MLA, 16, 524288, 1, 63.6),
        ("125m", "dense", "", 128, 524288, 1, 86.7),
        ("1b", "dense", "", 16, 262144, 3, 58.8),
        ("1b", "dense", "", 8, 32768, 1, 38.7),
        ("1b", "dense", "", 8, 131072, 1, 39.2),
        ("3b", "dense", "", 2, 8192, 1, 61.4),  # in the update
        ("3b", "dense", "", 4, 8192, 1, 61.4),  # before any gradient exists
    ],
)
def test_memory_is_what_was_measured(size, arch, model, micro, batch, zero, measured):
    sets = ["recipe=adamw", "model.vocab=32768", f"parallel.zero={zero}"]
    sets += [f"model.{pair}" for pair in model.split()]
    sets += [f"train.micro_batch={micro}", f"train.batch_tokens={batch}"]
    c = resolve(load(size=size, arch=arch, sets=sets), ranks=1, gpu=True)
    error = 0.02 if batch > micro * c.model.seq else 0.04
    assert memory(c, Layout.of(c, 1)).total / 2**30 == pytest.approx(measured, rel=error)


def test_the_update_by_hand():
    """3b on 4 ranks: gradients and their copies by stage."""
    c = config("3b", "dense", 4, rows=64)
    count = account.params(c.model)
    every, matrices = count.total, count.total - count.embedding
    whole = {
        0: 2 * every + 4 * every,  # all in fp32 at once
        1: 2 * every + 2 * every // 4,  # while those of this rank are copied from all
        2: 2 * every // 4 + (2 + 4) * (matrices // 4),
        3: 2 * every // 4 + (2 + 4) * (matrices // 4),
    }
    for zero, bytes_ in whole.items():
        assert memory(c, Layout(4, zero)).update == pytest.approx(bytes_, abs=8)
    large = config("70b", "dense", 4, rows=64)
    gathered = 2 * account.params(large.model).total // 4 + 6 * 10**9
    assert memory(large, Layout(4, 3)).update == gathered
    once = memory(config("3b", "dense", 4, rows=4), Layout(4, 1))
    assert once.gradients == 0 < once.update
    away = config("3b", "dense", 4, rows=4, **{"parallel.offload.optimizer": "cpu"})
    assert memory(away, Layout(4, 1)).update == 2 * every + once.activations // c.model.layers


# ── How long it takes ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_step_by_hand():
    """1b on two nodes of H100 at ZeRO-1, with every term computed here again."""
    c = config("1b", "dense", 16, rows=128)
    e = estimate(c, Layout(16, 1, micro_batch=8))
    matmul, attention, psi = 6_241_124_352, 402_653_184, 1_107_367_936
    kept = 16 * 2 * (4 * 2048 + 3 * (16 + 4) * 128 + 3 * 8192)
    token = (matmul / 0.66 + attention / 0.16) / 989e12 + 5 * kept / 1.9e12
    compute = 8 * 2048 * token + 16 * 2e-4 + 36 * psi // 16 / 1.9e12
    collectives = 2 * 2 * psi * 15 / 16 / 320e9 + 8e-6 * 2 * 15
    assert e.compute_s == pytest.approx(compute, rel=1e-6)
    assert e.collectives_s == pytest.approx(collectives, rel=1e-6)
    assert e.step_s == pytest.approx(compute + 0.5 * collectives, rel=1e-6)
    assert e.tokens_s == pytest.approx(128 * 2048 / e.step_s)
    assert e.mfu == pytest.approx((matmul + attention) * 128 * 2048 / e.step_s / 16 / 989e12)
    assert e.gpu_hours == pytest.approx(e.step_s * 16 / 3600)


def test_more_of_anything_costs_what_it_should():
    c = config("7b", "moe", 64, rows=512)

    def at(config=c, **change) -> Estimate:
        return estimate(config, replace(Layout(64, 1, ep=8, micro_batch=2), **change))

    rates = c.cluster.rates.model_copy(update={"inter_bytes_s": 1e9})
    slow = changed(c, {"cluster.rates": rates})
    assert at(slow).collectives_s > at().collectives_s and at(slow).compute_s == at().compute_s
    # beyond the node, and to no other rank
    assert at(ep=16).exchanges_s > 2 * at(ep=8).exchanges_s > 0 == at(ep=1).exchanges_s
    assert at(recompute=True).compute_s > 1.2 * at().compute_s
    assert at(recompute=True).memory.total < at().memory.total
    assert at(micro_batch=8).compute_s < at(micro_batch=1).compute_s
    stages = [at(zero=zero) for zero in range(4)]
    assert [e.memory.total for e in stages] == sorted(
        (e.memory.total for e in stages), reverse=True
    )
    assert [e.traffic.total for e in stages] == sorted(e.traffic.total for e in stages)
    away = config("7b", "moe", 64, rows=512, **{"parallel.offload.optimizer": "cpu"})
    assert at().memory.total - at(away).memory.total == at().memory.optimizer > 0
    shared = at(sp=4)
    assert shared.memory.activations * 4 == at().memory.activations
    assert shared.exchanges_s > at().exchanges_s


def test_the_plan_uses_the_fastest_layout_that_fits():
    c = config("7b", "moe", 64, rows=512)
    rows = plan(c, 64)
    assert [(e.layout.zero, e.layout.ep) for e in rows] == [
        (z, ep) for z in range(4) for ep in (1, 2, 4, 8, 16)
    ]
    take = best(rows)
    assert take.fits and all(take.step_s <= 1.01 * e.step_s for e in rows if e.fits)
    assert take.memory.total <= 0.92 * c.cluster.memory_bytes
    assert not best(plan(changed(c, {"cluster.memory_bytes": 2**30}), 64)).fits


# ── What is refused ──────────────────────────────────────────────────────────────────────────────────────────────────

GIB = 2**30


@pytest.mark.parametrize(
    ("size", "arch", "ranks", "memory", "sets", "words"),
    [
        ("tiny", "moe", 6, None, {"parallel.ep": 4}, ["parallel.ep=4", "; try --ep 2, or 8"]),
        ("tiny", "moe", 3, None, {"parallel.ep": 2}, ["; try --ep 1, or 4 ranks"]),
        ("1b", "moe", 8, None, {"parallel.ep": 3}, ["the 8 ranks; try --ep 4"]),
        ("1b", "moe", 6, None, {"parallel.ep": 3}, ["experts=16; try --ep 2"]),
        ("1b", "dense", 8, 28 * GIB, {}, [" 26.3 GiB", " 25.8 GiB", "; try --zero 2"]),
        ("1b", "dense", 8, 20 * GIB, {}, ["; try --set train.micro_batch=4"]),
        ("1b", "dense", 8, 12 * GIB, {"parallel.zero": 3}, ["; try --set train.micro_batch=3"]),
        ("7b", "moe", 16, 80 * GIB, {"train.micro_batch": 1}, ["; try --zero 3"]),
        ("7b", "dense", 8, 24 * GIB, {},
         ["; try --zero 3 --set train.micro_batch=4 --set train.recompute=true"]),
        ("tiny", "moe", 3, None, {"parallel.sp": 2}, ["parallel.sp=2", "; try --sp 1, or 4"]),
        ("tiny", "dense", 2, None, {"parallel.offload.params": "cpu", "parallel.zero": 1}, ["; try --zero 3"]),
        ("tiny", "dense", 2, None, {"parallel.offload.optimizer": "nvme"}, ["parallel.offload.path=DIR"]),
        ("1b", "dense", 8, 80 * GIB, {"model.seq": 524288},
         ["; try --sp 2 --set train.micro_batch=1 --set train.recompute=true"]),
        ("70b", "dense", 8, 80 * GIB, {}, ["; use 32 of them with --zero 3"]),
        ("7b", "moe", 16, 20 * GIB, {"parallel.ep": 3}, ["; use 64 of them with --ep 4 --zero 3"]),
        ("1b", "mla-moe", 2, 80 * GIB, {"parallel.ep": 3}, ["parallel.ep=3", "size=1b", "; try --ep 2"]),
        ("7b", "dense", 2, 80 * GIB, {"parallel.engine": "accelerate"}, ["; try --size 3b"]),
        ("70b", "dense", 2, 80 * GIB, {"train.batch_tokens": 4096}, ["; try --size 7b --zero 3"]),
        ("tiny", "dense", 100_000, 22 * GIB, {}, [" 100000 ranks ", " 22.0 GiB", "; try --nproc 16"]),
        ("tiny", "dense", 8, 4 * GIB, {}, ["; try --nproc 2"]),
        ("tiny", "dense", 2, GIB // 64, {}, ["nothing smaller fits"]),
    ],
)  # fmt: skip
def test_a_refusal_names_the_nearest_layout_that_works(size, arch, ranks, memory, sets, words):
    shared = size == "tiny"

    def fit(size: str, ranks: int, sets: dict[str, str | int]) -> None:
        def sized(size: str) -> RunSpec:
            fixed = {"model.vocab": 32768, "train.steps": 1, "train.loss_chunk": 2048, **sets}
            given = [f"{k}={value}" for k, value in fixed.items()]
            return load(size=size, arch=arch, sets=["recipe=adamw", *given])

        device = DeviceMemory(memory, "H100", shared=shared)
        fit_to_devices(sized(size), ranks, device, resized=sized)

    with pytest.raises(ConfigError) as refused:
        fit(size, ranks, sets)
    message = str(refused.value)
    assert "\n" not in message and all(word in message for word in words), message
    if "; try" in message or "; use" in message:  # and the remedy works
        remedy = re.split("; (?:try|use) ", message)[-1].partition(", or ")[0]
        named = settings_in(remedy)
        fit(named.pop("size", size), int(named.pop("nproc", ranks)), {**sets, **named})


def test_cpu_memory_includes_offloaded_states_and_the_checkpoint_copy():
    here = config("tiny", "dense", 2)
    away = config("tiny", "dense", 2, **{"parallel.offload.optimizer": "cpu"})
    layout, cpu, gpu = Layout.of(here, 2), DeviceMemory(None, shared=True), DeviceMemory(None)
    each = memory(here, layout)
    assert gpu.need(here, layout) == each.total == gpu.need(away, layout) + each.optimizer
    copy = 12 * account.params(here.model).total
    both = 2 * (each.total + PROCESS_BYTES) + copy
    assert cpu.need(here, layout) == cpu.need(away, layout) == both


@pytest.mark.parametrize("optimizer", ["cpu", "nvme"])
@pytest.mark.parametrize("params", ["cpu", "nvme"])
def test_cpu_memory_excludes_states_that_are_offloaded_to_disk(optimizer, params):
    sets = {"parallel.zero": 3, "parallel.offload.path": "/"}
    here = config("tiny", "dense", 2, **sets)
    sets |= {"parallel.offload.optimizer": optimizer, "parallel.offload.params": params}
    away = config("tiny", "dense", 2, **sets)
    layout, cpu = Layout.of(here, 2), DeviceMemory(None, shared=True)
    each, copy = memory(here, layout), 12 * account.params(here.model).total
    gone = 2 * (each.optimizer * (optimizer == "nvme") + each.weights * (params == "nvme"))
    assert offloaded(away, layout, "nvme") == gone
    assert cpu.need(here, layout) - cpu.need(away, layout) == gone + (copy if gone else 0)


# ── The largest micro-batch ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("shared", "gib", "first", "then"),
    [
        # this needs about 110.9 GiB; all 24 rows at once need 168.3
        (False, 139.8, 12, [8, 6, 4, 3, 2, 1]),
        (False, 152, 24, [12, 8, 6, 4, 3, 2, 1]),  # within its error: a trial decides
        (True, 200, 8, [6, 4, 3, 2, 1]),  # 174.7, in fp32; the 216.7 of 12 would be within it too
    ],
)
def test_micro_batches_that_divide_the_batch_are_tried_from_the_largest_that_may_fit(
    shared, gib, first, then
):
    sets = ["recipe=adamw", "model.vocab=32768", f"train.batch_tokens={24 * 2048}"]
    device = DeviceMemory(int(gib * GIB), "H200", shared=shared)
    c, note = fit_to_devices(load(size="3b", sets=[*sets, "train.auto_batch=true"]), 1, device)
    assert c.train.micro_batch == first and note.startswith(
        f"micro-batch {first} of 24: needs about "
    )
    tried = []
    while lower := smaller_micro_batch(c, 1):
        tried.append((c := lower).train.micro_batch)
    assert tried == then
    again, note = widen_micro_batch(c, 1, device, below=8)
    assert again.train.micro_batch == 6 and note.endswith("; 8 ran out of memory")


# ── Beside what others published ─────────────────────────────────────────────────────────────────────────────────────


def test_published_runs_are_met_within_the_stated_error():
    for run in SAME:
        assert abs(run.predict().tokens_s / run.gpus / run.published - 1) <= ERROR, run.row()


def test_the_page_agrees_with_the_planner():
    """Every row of docs/SCALE.md, as `python -m tests.published` prints it."""
    page = (Path(__file__).parents[1] / "docs" / "SCALE.md").read_text("utf-8").splitlines()
    rows = [*ladder_rows(), *(run.row() for run in SAME + OTHER)]
    assert [row for row in rows if row not in page] == []
