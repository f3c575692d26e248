"""How a model is built, and how its weights are drawn."""

import hashlib

import pytest
import torch

from pipeline.config.layers import load
from pipeline.model.build import build_model, init_weights


def test_recompute_changes_no_number():
    cfg = load(size="tiny", sets=["model.vocab=64", "model.seq=16"]).model
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(1))
    grads = []
    for recompute in (False, "selective", True):
        model = build_model(cfg, recompute=recompute)
        init_weights(model, cfg, seed=1)
        model(tokens[:, :-1], tokens[:, 1:]).total.backward()
        grads.append([p.grad for p in model.parameters()])
    for plain, selective, full in zip(*grads, strict=True):
        assert torch.equal(plain, selective) and torch.equal(plain, full)


def test_the_draw_depends_on_seed_and_name_alone():
    """Nor on threads. Torch itself draws no weights."""
    sets = ["recipe=adamw", "model.vocab=64"]
    cfg = load(size="tiny", sets=sets).model
    deeper = load(size="tiny", sets=[*sets, "model.layers=6"]).model
    models = []
    for c, seed in ((cfg, 1), (cfg, 1), (deeper, 1), (cfg, 2)):
        before = torch.manual_seed(len(models)).get_state()  # the global generator must not matter
        models.append(build_model(c))
        init_weights(models[-1], c, seed)
        assert torch.equal(torch.random.get_rng_state(), before)
    name, key = "blocks.0.ffn.up.weight", hashlib.sha256(b"1/blocks.0.ffn.up.weight").digest()[:8]
    alone = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
    up = models[0].get_parameter(name)
    assert torch.equal(up, torch.empty_like(up).normal_(0.0, 0.02, generator=alone))
    weights = [m.blocks[0].ffn.up.weight for m in models]
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[3])
    out = models[0].blocks[0].ffn.out.weight
    assert out.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.05)
    assert weights[0].std().item() == pytest.approx(0.02, rel=0.05)
