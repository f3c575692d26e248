"""Muon's state in checkpoints: the same in every layout, and a run that continues bit for bit."""

from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.restore import newest
from tests.checkpoint.test_layouts import BF16, check_sizes, losses, settings, tensors
from tests.conftest import worlds

STEPS = 4
# A low rate: see launch/verify.py.
MUON = [
    "optim.optimizer.kind=muon",
    "optim.optimizer.normalize=true",
    "optim.lr=0.000002",
    *(f"optim.optimizer.{part}_rate=500" for part in ("embedding", "head", "vector")),
]
CHAIN = ((2, 1, 2, 1), (1, 0, 1, 2), (3, 3, 1, 3))  # processes, ZeRO, ep, resumed from
CONVERTED = {
    "zero 0, ep 2": (4, {"parallel": {"zero": 0, "ep": 2}}),
    "bf16, zero 0": (2, {"parallel": {"zero": 0, "ep": 1}, **BF16}),
    "zero 1, ep 2": (4, {"parallel": {"zero": 1, "ep": 2}}),
    "bf16, zero 3": (2, {"parallel": {"zero": 3, "ep": 2}, **BF16}),
    "accelerate": (2, {"parallel": {"engine": "accelerate", "zero": 0, "ep": 1}}),
}
RESUMED = {
    "accelerate": (2, {"parallel": {"engine": "accelerate", "zero": 0}}),
    "bf16, zero 0": (2, {"parallel": {"zero": 0}, **BF16}),
    "bf16, zero 2": (2, {"parallel": {"zero": 2}, **BF16}),
    "bf16, zero 3": (2, {"parallel": {"zero": 3}, **BF16}),
}


def test_a_muon_run_moves_through_worlds_and_skips_steps_in_each(corpus, tmp_path):
    """Each conversion loads a checkpoint, rejects a step of NaN, and saves the same numbers."""
    whole = tmp_path / "whole"
    moved = tmp_path / "moved"
    small = {"model": {"ffn": {"experts": 8, "top_k": 2}}, "parallel": {"zero": 2, "ep": 4}}
    sets = [*settings(1, STEPS), *MUON, "train.micro_batch=1"]  # it divides every rank's rows
    start = {"out": whole, "nproc": 4, "over": small, "arch": "mla-moe", "sets": sets}
    jobs = [{"do": "train", "data": corpus, **start}, {"do": "copy", "src": whole, "dst": moved}]
    for nproc, zero, ep, step in CHAIN:
        over = {"parallel": {"zero": zero, "ep": ep}}
        jobs.append({"do": "cut", "out": moved, "step": step})
        jobs.append({"do": "train", "out": moved, "nproc": nproc, "over": over, "data": corpus})
    for layout, (nproc, over) in CONVERTED.items():
        convert = {"do": "convert", "out": moved, "nproc": nproc, "over": over, "reject": True}
        jobs.append({**convert, "to": tmp_path / layout})
    worlds(jobs, tmp_path)

    assert losses(moved) == pytest.approx(losses(whole), rel=1e-6)
    assert losses(moved) != losses(whole)  # it did run elsewhere
    want = tensors(newest(moved))
    kinds = {key.split("/")[0] for key in want}
    assert kinds == {"model", "exp_avg", "exp_avg_sq", "momentum_buffer", "row_variance"}
    up = "blocks.1.ffn.experts.up.7"
    assert f"momentum_buffer/{up}" in want and f"exp_avg/{up}" not in want
    assert all(want[key].any() for key in want if key.startswith("row_variance/"))
    for layout in CONVERTED:
        there = newest(tmp_path / layout)
        found = tensors(there)
        assert there.manifest.adam_steps == STEPS
        assert found.keys() == want.keys()
        assert all(torch.equal(found[key], want[key]) for key in want), layout
    check_sizes(whole / "checkpoints", moved / "checkpoints")
    check_sizes(*(tmp_path / layout for layout in CONVERTED))


def test_a_muon_run_continues_bit_for_bit(corpus, tmp_path):
    jobs: list[dict] = []
    for layout, (nproc, over) in RESUMED.items():
        whole = tmp_path / layout
        train = {"do": "train", "nproc": nproc, "over": over, "data": corpus}
        jobs += [
            {**train, "out": whole, "arch": "dense", "sets": [*settings(2, 4), *MUON]},
            {"do": "copy", "src": whole, "dst": Path(f"{whole} resumed")},
            {"do": "cut", "out": Path(f"{whole} resumed"), "step": 2},
            {**train, "out": Path(f"{whole} resumed")},
        ]
    worlds(jobs, tmp_path)
    for layout in RESUMED:
        whole = tmp_path / layout
        resumed = tmp_path / f"{layout} resumed"
        assert losses(resumed) == losses(whole), layout
        assert newest(resumed).manifest == newest(whole).manifest, layout
