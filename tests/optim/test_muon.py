"""Muon against torch.optim.Muon and torch.optim.AdamW, in one process."""

import math

import pytest
import torch
from torch import nn

from pipeline.bench.plain_run import plain_optimizer
from pipeline.config.layers import load, names
from pipeline.errors import ConfigError
from pipeline.model.build import build_model, init_weights
from pipeline.optim.groups import build_optimizer, gate_step, set_learning_rate
from pipeline.optim.matrices import matrices_of
from pipeline.optim.muon import iterate, normalize_rows
from pipeline.parallel.fragments import Piece
from pipeline.parallel.muon_shards import bind
from pipeline.parallel.world import World
from pipeline.planner.check import resolve
from pipeline.planner.count import matrices, orthogonalization_flops
from pipeline.planner.memory import matrix_params

ALONE = World(0, 1, torch.device("cpu"))
TOKENS = torch.arange(96).view(2, 48) * 7 % 64


def start(arch: str, *sets: str) -> tuple[nn.Module, torch.optim.Optimizer, float]:
    always = ["model.vocab=64", "model.seq=48", "model.layers=2"]
    # The optimizer alone: torch has none of the recipe's variants.
    always += ["recipe=adamw", "optim.optimizer.kind=muon"]
    config = resolve(load(size="tiny", arch=arch, sets=[*always, *sets]), ranks=1, gpu=False)
    model = build_model(config.model)
    init_weights(model, config.model, 1)
    optimizer = build_optimizer(model, config)
    pieces = [Piece(name, p, p, 0, 0, p.numel()) for name, p in model.named_parameters()]
    bind(optimizer, pieces, ALONE)
    return model, optimizer, config


def backward(model: nn.Module) -> None:
    model(TOKENS[:, :-1], TOKENS[:, 1:]).total.backward()


@pytest.mark.parametrize(
    ("arch", "sets"),
    [
        ("dense", ["model.attention.kv_heads=1", "model.scaled_embedding=true"]),
        ("mla-moe", ["model.attention.v_dim=24", "model.mtp=1", "model.ffn.experts=8"]),
    ],
)
def test_a_step_is_that_of_torch_bit_for_bit(arch, sets):
    model, optimizer, config = start(arch, *sets)
    other, _, _ = start(arch, *sets)
    step = plain_optimizer(other, config)  # torch.optim.Muon and torch.optim.AdamW
    before = {name: p.clone() for name, p in model.named_parameters()}
    for _ in range(12):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        backward(other)
        step()
        other.zero_grad()
    wanted = dict(other.named_parameters())
    for name, p in model.named_parameters():
        assert torch.equal(p, wanted[name]), name
        assert not torch.equal(p, before[name]), name


@pytest.mark.parametrize("normalize", ["false", "true"])
def test_a_skipped_step_changes_nothing_even_with_nan(normalize):
    model, optimizer, _ = start("mla-moe", f"optim.optimizer.normalize={normalize}")

    def everything() -> list[torch.Tensor]:
        state = [value for moments in optimizer.state.values() for value in moments.values()]
        variances = [owned.variance for owned in optimizer.owned() if owned.variance is not None]
        assert bool(variances) == (normalize == "true")
        return [t.detach().clone() for t in (*model.parameters(), *state, *variances)]

    def step(apply: bool, bad: float) -> None:
        backward(model)
        for p in model.parameters():
            p.grad[..., -1] += bad
        gate_step(optimizer, torch.tensor(apply))
        optimizer.step()
        optimizer.zero_grad()

    step(True, 0.0)
    before = everything()
    step(False, math.nan)
    step(False, 1.0)
    for now, old in zip(everything(), before, strict=True):
        assert torch.equal(now, old)
    step(True, 0.0)
    changed = [not torch.equal(now, old) for now, old in zip(everything(), before, strict=True)]
    assert all(changed)


@pytest.mark.parametrize("shape", [(16, 64), (64, 16)])
def test_a_batch_is_orthogonalized_like_its_matrices(shape):
    """GPUs use batches. The result is nearly orthogonal: its singular values are between 0.7 and 1.2."""
    torch.manual_seed(1)
    batch = torch.randn(5, *shape).bfloat16()
    single = torch.stack([iterate(matrix.clone()) for matrix in batch])
    found = iterate(batch)
    torch.testing.assert_close(found, single, rtol=0, atol=1e-2)
    values = torch.linalg.svdvals(found.float())
    assert values.min() > 0.6 and values.max() < 1.25


def test_rows_are_normalized_and_the_norm_stays():
    """NorMuon's formula over single rows; two steps, so that the running mean counts."""
    torch.manual_seed(1)
    size = torch.tensor([1.0, 10.0, 0.1])
    variance = torch.zeros(1, 3)
    for step in range(2):
        update = (torch.randn(3, 8) * size[:, None]).bfloat16()
        found, now = normalize_rows(update[None].clone(), variance)
        mean = update.float().square().mean(1)
        want = variance[0] * 0.95 + mean * 0.05
        torch.testing.assert_close(now[0], want)
        rows = update.float() / want.sqrt()[:, None]
        rows *= update.float().norm() / rows.norm()
        torch.testing.assert_close(found[0].float(), rows, rtol=2e-2, atol=0)
        norm = update.float().norm().item()
        assert found.float().norm().item() == pytest.approx(norm, rel=1e-2)
        if step == 0:
            norms = found[0].float().norm(dim=1)
            assert norms.max() < 1.02 * norms.min()  # the first step makes all rows equal
        variance = now


def test_a_cautious_decay_spares_weights_that_the_update_enlarges():
    found = {}
    for cautious, decay in (("true", 0.5), ("false", 0.5), ("true", 0.0)):
        sets = [f"optim.optimizer.cautious={cautious}", f"optim.optimizer.decay={decay}"]
        model, optimizer, _ = start("dense", *sets)
        old = model.blocks[0].ffn.up.weight.detach().clone()
        backward(model)
        optimizer.step()
        found[cautious, decay] = model.blocks[0].ffn.up.weight.detach()
    plain = found["true", 0.0]
    shrunk = old * (plain - old) <= 0  # the update points to zero
    expected = torch.where(shrunk, found["false", 0.5], plain)
    torch.testing.assert_close(found["true", 0.5], expected)
    assert 0.2 < shrunk.float().mean() < 0.8


def test_the_decay_follows_the_schedule_if_asked():
    _, optimizer, config = start("dense", "optim.optimizer.decay_with_rate=true")
    set_learning_rate(optimizer, config.optim.lr / 4)
    decays = {group["weight_decay"] for group in optimizer.param_groups if "matrices" in group}
    assert decays == {config.optim.optimizer.decay / 4}


@pytest.mark.parametrize("arch", names("arch"))
def test_the_planner_counts_the_matrices_of_the_built_model(arch):
    cfg = load(size="tiny", arch=arch).model
    if cfg.stack == "decoder":
        cfg = load(size="tiny", arch=arch, sets=["model.mtp=1"]).model
    with torch.device("meta"):
        built = matrices_of(build_model(cfg), cfg).values()
    counted = matrices(cfg)
    assert matrix_params(cfg) == sum(len(each.keys) * each.numel for each in built)
    flops = sum(number * orthogonalization_flops(m, n) for m, n, number in counted)
    assert flops == sum(len(each.keys) * each.flops for each in built)


@pytest.mark.parametrize("setting", ["parallel.offload.optimizer=cpu", "model.parametrization=mup"])
def test_unsupported_muon_settings_are_refused_with_a_remedy(setting):
    with pytest.raises(ConfigError, match=f"{setting.split('=')[0]}.*use .*--recipe adamw"):
        start("dense", setting)
