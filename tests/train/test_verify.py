"""`launch verify`: real ranks in every layout compared with one plain process, and a deliberate error."""

import json
import math

import psutil
import pytest
import torch

from pipeline.bench.equivalence import Outcome, _differences
from tests.conftest import environment, launch
from tests.forks import Launched


def sets(text):
    return [part for value in text.split() for part in ("--set", value)]


@pytest.mark.parametrize(
    ("arch", "optimizer", "nproc", "layouts"),
    [
        ("mla-moe", "adamw", 4, "zero 0 ep 2,zero 1 ep 4,zero 2 ep 2,zero 3,zero 3 ep 4,accelerate,zero 3 ep 2 sp 2"),
        ("switch", "adamw", 2, "zero 1,zero 1 ep 2,zero 3 ep 2,zero 2 ep 2 sp 2,accelerate sp 2"),
        # Over 12 steps, against torch.optim.Muon.
        ("mla-moe", "muon", 4, "zero 0 ep 2,zero 1,zero 1 ep 4,zero 2 ep 2,zero 3,zero 3 ep 2 sp 2"),
    ],
)  # fmt: skip
def test_layouts_train_the_same_and_a_wrong_one_is_caught(arch, optimizer, nproc, layouts):
    options = ["--size", "tiny", "--arch", arch, "--nproc", nproc, "--layouts", layouts, "--json"]
    # A scaled embedding has a separate learning rate. Four rows per rank: gradients accumulate.
    shape = "model.layers=1 model.ffn.dense_layers=0" if optimizer == "muon" else "model.layers=2"
    few = sets(f"{shape} model.seq=16 train.batch_tokens={nproc * 64}")
    few += sets("recipe=adamw model.ffn.experts=8 model.scaled_embedding=true")
    few += sets(f"optim.optimizer.kind={optimizer}")
    *real, control = json.loads(launch("verify", *options, *few).stdout)
    # The reference is always trained.
    assert {row["layout"] for row in real} == {*layouts.split(","), "accelerate"}
    for row in real:
        assert row["passed"] and row["tokens"]
        assert max(row["loss"], row["grad_norm"], *row["gradients"].values()) < 1e-5
        assert (row["referee"] is None) == (row["layout"] == "accelerate")
        assert row["referee"] is None or 0 < row["referee"] < 1e-5
        assert {"experts", "router", "attention", "embedding", "head"} <= row["gradients"].keys()
    assert control["control"] and control["passed"]
    assert control["gradients"]["experts"] > 5e-3 and control["gradients"]["attention"] < 1e-5


@pytest.mark.parametrize(("arch", "more"), [("dense", ""), ("moe", "model.ffn.experts=8")])
def test_the_recipe_muon_trains_the_same(arch, more):
    """With normalized updates and cautious decay, which torch's Muon does not have."""
    few = sets(f"recipe=muon model.layers=1 model.seq=16 train.batch_tokens=128 {more}")
    asked = ["--size", "27k", "--arch", arch, "--nproc", 2, "--json", *few]
    *real, control = json.loads(launch("verify", *asked, "--layouts", "zero 1").stdout)
    assert all(row["passed"] for row in real) and control["passed"]


def test_bf16_has_its_own_bound():
    # Small, because bf16 is slow on a CPU.
    few = sets("model.ffn.experts=4 model.layers=2 model.seq=16 train.batch_tokens=128")
    asked = ["--size", "27k", "--arch", "switch", "--dtype", "bf16"]
    done = launch("verify", *asked, "--layouts", "zero 0,zero 1 ep 2 sp 2", *few)
    _no_reference, _header, *rows = done.stdout.splitlines()
    assert [row.split()[-1] for row in rows] == ["pass", "pass", "caught"]
    assert all(float(row[27:36]) < 1e-2 for row in rows)


@pytest.mark.parametrize("where", ["loss", "grad_norm", "gradients"])
def test_nan_does_not_pass(where):
    close = {"loss": 1e-9, "grad_norm": 1e-9, "gradients": {"head": 1e-9, "ffn": 1e-9}}
    wrong = {**close, where: {"head": 1e-9, "ffn": math.nan} if where == "gradients" else math.nan}
    row = {"layout": "zero 1", "tokens": True, "bound": 1e-5, "control": False}
    assert Outcome(**row, **close).passed and not Outcome(**row, **wrong).passed
    assert not Outcome(**{**row, "control": True}, **close).passed  # its error was not caught
    assert not Outcome(**{**row, "tokens": False}, **close).passed
    assert not any(Outcome(**row, **close, referee=far).passed for far in (2e-5, math.nan))
    weights = torch.nn.ModuleDict({"head": torch.nn.Linear(2, 2, bias=False)})
    want = torch.ones(2, 2)
    got = torch.tensor([[math.nan, 1.0], [1.0, 1.0]])
    difference = _differences({"head.weight": got}, {"head.weight": want}, weights)["head"]
    assert not difference <= 1e-5


def test_a_rank_that_waits_for_another_ends_with_the_command():
    process = Launched("launch", ["verify", "--size", "7k", "--nproc", 2], environment())
    process.stdout.readline()
    first, second = psutil.Process(process.pid).children()
    second.suspend()
    # By then the first rank waits in C++, where Python does not handle an interrupt.
    with pytest.raises(psutil.TimeoutExpired):
        first.wait(2)
    process.kill()
    gone, _ = psutil.wait_procs([first], timeout=30)
    second.kill()
    assert gone


def test_an_unknown_layout_is_one_line(inside):
    assert "--layouts zero 7" in inside("verify", "--nproc", 2, "--layouts", "zero 7", code=2)
