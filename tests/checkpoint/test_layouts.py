"""A checkpoint of one layout loads in another: the same numbers, the same run."""

import tempfile
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.format import CONFIG, Checkpoint, Reader, read_manifest
from pipeline.checkpoint.restore import load_model, newest
from pipeline.config.layers import reload
from pipeline.parallel.fragments import Fragment
from pipeline.planner.memory import disk_bytes
from pipeline.runs.directory import list_checkpoints
from tests.conftest import records, worlds

BF16 = {"train": {"dtype": "bf16"}}
DISK = {"optimizer": "nvme", "params": "nvme", "path": tempfile.gettempdir()}
ACCELERATE = (2, {"parallel": {"engine": "accelerate", "zero": 0, "ep": 1}})
BF16_ZERO_0 = (2, {"parallel": {"zero": 0, "ep": 1}, **BF16})
# A low rate: see launch/verify.py. A micro-batch of 1 divides the rows of every rank.
MUON = [
    *("optim.optimizer.kind=muon", "optim.optimizer.normalize=true"),
    *("optim.lr=0.000002", "train.micro_batch=1"),
    *(f"optim.optimizer.{part}_rate=500" for part in ("embedding", "head", "vector")),
]
# Processes, ZeRO, expert parallel, sequence parallel, resumed from.
CHAIN = ((2, 1, 2, 1, 1), (1, 0, 1, 1, 2), (3, 3, 1, 1, 3), (4, 3, 2, 2, 4))
MOVED = {  # settings, the chain, and for each layout that it is converted to: processes, settings
    "adamw": (
        [],
        CHAIN,
        {
            "zero 0, ep 2": (4, {"parallel": {"zero": 0, "ep": 2}}),
            "bf16, zero 0": BF16_ZERO_0,
            "accelerate": ACCELERATE,
            "zero 3, on a disk": (2, {"parallel": {"zero": 3, "ep": 2, "offload": DISK}, **BF16}),
        },
    ),
    "muon": (
        MUON,
        CHAIN[:3],
        {
            "zero 0, ep 2": (4, {"parallel": {"zero": 0, "ep": 2}}),
            "bf16, zero 0": BF16_ZERO_0,
            "zero 1, ep 2": (4, {"parallel": {"zero": 1, "ep": 2}}),
            "bf16, zero 3": (2, {"parallel": {"zero": 3, "ep": 2}, **BF16}),
            "accelerate": ACCELERATE,
        },
    ),
}
RESUMED = {
    "zero 0": (2, {"parallel": {"zero": 0}}),
    "zero 2, offloaded": (2, {"parallel": {"zero": 2, "offload": {"optimizer": "cpu"}}}),
    "zero 3, on a disk": (2, {"parallel": {"zero": 3, "offload": DISK}}),
    "bf16, zero 0": (2, {"parallel": {"zero": 0}, **BF16}),
    "bf16, zero 1": (2, {"parallel": {"zero": 1}, **BF16}),
    "accelerate": ACCELERATE,
    "zero 1, experts": (2, {"parallel": {"zero": 1}}),
    "muon, accelerate": ACCELERATE,
    "muon, bf16, zero 0": (2, {"parallel": {"zero": 0}, **BF16}),
    "muon, bf16, zero 2": (2, {"parallel": {"zero": 2}, **BF16}),
    "muon, bf16, zero 3": (2, {"parallel": {"zero": 3}, **BF16}),
}  # ZeRO-1 and 3 in fp32: tests/train


def settings(every: int, steps: int) -> list[str]:
    train = f"steps={steps} batch_tokens=192 save_every={every} keep_last=9 eval_every={steps}"
    return [
        "name='run'",
        *("recipe=adamw", "model.seq=16", "model.layers=2"),
        *(f"train.{key}" for key in f"{train} eval_batches=1".split()),
        *(f"optim.{key}" for key in ("lr=0.001", "clip=0.3", "schedule.warmup_steps=1")),
    ]


def losses(run: Path) -> list[float]:
    return [r["loss"] for r in records(run, "step")]


def tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return masters and moments as whole, flat tensors."""
    stored = checkpoint.manifest.tensors
    keys = [key for key in stored if not key.startswith("rng/")]
    whole = {key: torch.empty(stored[key].numel) for key in keys}
    parts = [Fragment(key, tuple(stored[key].shape), 0, whole[key]) for key in keys]
    Reader(checkpoint).fill(parts)
    return whole


def check_sizes(*roots: Path) -> None:
    """A checkpoint on disk is at most as large as the planner predicts, and not much smaller."""
    for root in roots:
        for path in list_checkpoints(root).values():
            ranks = read_manifest(path).manifest.world
            config = reload(path / CONFIG)
            size = sum(file.stat().st_size for file in path.iterdir())
            bound = disk_bytes(config, ranks)
            assert size < bound < 2 * size, path


@pytest.mark.parametrize("optimizer", MOVED)
def test_a_run_resumes_in_other_layouts_with_the_same_losses(corpus, tmp_path, optimizer):
    """A model with experts and router counters, compared with the run that kept its layout.

    4 ranks at ZeRO-2 with 2 experts each, then each from the one before: 2 at ZeRO-1 with 4 each,
    1 rank, 3 at ZeRO-3, 4 at ZeRO-3 with 4 experts each and half of each sequence. And other
    layouts that load a checkpoint and save it at once write the same numbers; with Muon they reject
    a step of NaN in between.
    """
    sets, chain, converted = MOVED[optimizer]
    steps = len(chain) + 1
    muon = optimizer == "muon"
    whole = tmp_path / "whole"
    moved = tmp_path / "moved"
    small = {"model": {"ffn": {"experts": 8, "top_k": 2}}, "parallel": {"zero": 2, "ep": 4}}
    start = {"do": "train", "out": whole, "nproc": 4, "over": small, "arch": "mla-moe"}
    start |= {"data": corpus, "sets": [*settings(1, steps), *sets]}
    jobs = [start, {"do": "copy", "src": whole, "dst": moved}]
    for nproc, zero, ep, sp, step in chain:
        over = {"parallel": {"zero": zero, "ep": ep, "sp": sp}}
        jobs.append({"do": "cut", "out": moved, "step": step})
        jobs.append({"do": "train", "out": moved, "nproc": nproc, "over": over, "data": corpus})
    for layout, (nproc, over) in converted.items():
        convert = {"do": "convert", "out": moved, "nproc": nproc, "over": over, "reject": muon}
        jobs.append({**convert, "to": tmp_path / layout})
    worlds(jobs, tmp_path)

    assert losses(moved) == pytest.approx(losses(whole), rel=1e-6)
    # The layout is really another one: sums in another order round differently.
    assert losses(moved) != losses(whole)
    want = tensors(newest(moved))
    kinds = {"model", "exp_avg", "exp_avg_sq"}
    kinds |= {"momentum_buffer", "row_variance"} if muon else set()
    assert {key.split("/")[0] for key in want} == kinds
    up = "blocks.1.ffn.experts.up"
    assert (f"momentum_buffer/{up}.7" in want) == muon == (f"exp_avg/{up}.7" not in want)
    assert all(want[key].any() for key in want if key.startswith("row_variance/"))
    assert any(key.endswith("steps") for key in want)
    model, config = load_model(moved, dtype=torch.bfloat16)
    assert config.model.ffn.experts == 8 and not any(p.is_meta for p in model.parameters())
    experts = model.get_parameter(up)
    assert torch.equal(experts[7].flatten(), want[f"model/{up}.7"].bfloat16())
    assert torch.equal(model.embedding.weight.flatten(), want["model/embedding.weight"].bfloat16())
    for layout in converted:
        there = newest(tmp_path / layout)
        found = tensors(there)
        assert there.manifest.adam_steps == steps
        assert found.keys() == want.keys()
        assert all(torch.equal(found[key], want[key]) for key in want), layout
        if "disk" in layout:
            maps = (tmp_path / layout / "maps").read_text()
            # Weights, masters, two moments and the copy to save are mapped files.
            assert maps.count(f"{tempfile.gettempdir()}/tmp") >= 5
    check_sizes(*(run / "checkpoints" for run in (whole, moved)))
    check_sizes(*(tmp_path / layout for layout in converted))


def test_the_same_layout_continues_bit_for_bit(corpus, tmp_path):
    """Every file of the last checkpoint is the same: masters, moments and random state."""
    jobs: list[dict] = []
    for layout, (nproc, over) in RESUMED.items():
        whole = tmp_path / layout
        resumed = tmp_path / f"{layout} resumed"
        train = {"do": "train", "nproc": nproc, "over": over, "data": corpus}
        arch = "moe" if "experts" in layout else "dense"
        # Few tokens, because bf16 is slow on a CPU.
        sets = [*settings(2, 4), "train.batch_tokens=64", *(MUON if "muon" in layout else [])]
        jobs += [
            {**train, "out": whole, "arch": arch, "sets": sets},
            {"do": "copy", "src": whole, "dst": resumed},
            {"do": "cut", "out": resumed, "step": 2},
            {**train, "out": resumed},
        ]
    worlds(jobs, tmp_path)
    check_sizes(*(tmp_path / layout / "checkpoints" for layout in RESUMED))
    for layout in RESUMED:
        whole = tmp_path / layout
        resumed = tmp_path / f"{layout} resumed"
        assert losses(resumed) == losses(whole), layout
        assert newest(resumed).manifest == newest(whole).manifest, layout
        assert newest(whole).manifest.adam_steps == 4  # without an additional step of DeepSpeed
        if "experts" in layout or "muon" in layout:
            continue  # another model, another optimizer
        bf16 = layout.startswith("bf16")
        expected = losses(tmp_path / ("bf16, zero 1" if bf16 else "zero 0"))
        assert losses(whole) == pytest.approx(expected, abs=1e-3 if bf16 else 1e-6), layout
