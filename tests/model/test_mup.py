"""muP's coordinate check (arXiv 2203.03466, appendix D.1): what a few steps of Adam do to each activation does not
depend on the width; without it, it grows."""

import math

import pytest
import torch

from pipeline.config.layers import load
from pipeline.model.build import build_model, init_weights
from pipeline.optim.groups import parameter_groups, set_learning_rate

WIDTHS = (64, 128, 256, 512)
LATENT = '{kind="mla", heads=%d, q_rank=32, kv_rank=32, nope_dim=16, rope_dim=8, v_dim=16}'
ROUTED = '{kind="moe", activation="swiglu", experts=4, top_k=2, shared=1, hidden=%d, dense_hidden=16, router="sigmoid"}'


def changes(width: int, mup: bool, arch: str, steps: int = 3, lr: float = 0.01) -> dict[str, float]:
    """Return the root mean square change of each activation since the start."""
    heads = width // 16
    shape = [f"model.width={width}", "model.layers=2", "model.vocab=64", "model.seq=32"]
    shape.append("recipe=adamw")
    if arch == "dense":
        shape += [f"model.attention.heads={heads}", f"model.attention.kv_heads={heads}", "model.attention.head_dim=16",
                  f"model.ffn.hidden={3 * width}"]  # fmt: skip
    else:
        shape += [f"model.attention={LATENT % heads}", f"model.ffn={ROUTED % width}"]
    sets = [
        *shape,
        *(
            ["model.parametrization=mup", "model.mup_base={base_width=64, base_head_dim=16}"]
            if mup
            else []
        ),
    ]
    cfg = load(size="tiny", arch=arch, sets=sets).model
    model = build_model(cfg)
    init_weights(model, cfg, seed=0)
    tokens = torch.randint(64, (2, 33), generator=torch.Generator().manual_seed(0))
    seen: dict[str, torch.Tensor] = {}
    for name, part in [
        ("embedding", model.embedding),
        *((f"block {i}", b) for i, b in enumerate(model.blocks)),
    ]:

        def keep(_module, _inputs, out, name=name):
            seen[name] = (out[0] if isinstance(out, tuple) else out).detach()

        part.register_forward_hook(keep)

    def look():
        with torch.no_grad():
            seen["logits"] = model(tokens[:, :-1])
        return {name: tensor.clone() for name, tensor in seen.items()}

    before = look()
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.0, cfg), lr=lr, betas=(0.9, 0.95))
    set_learning_rate(optimizer, lr)
    for _ in range(steps):
        model(tokens[:, :-1], tokens[:, 1:]).total.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        name: float((tensor - before[name]).square().mean().sqrt())
        for name, tensor in look().items()
    }


def slopes(mup: bool, arch: str, widths: tuple[int, ...] = WIDTHS) -> dict[str, float]:
    """Return the slope of log change over log width, by least squares."""
    rows = [changes(width, mup, arch) for width in widths]
    x = torch.tensor([math.log(w) for w in widths])
    x = x - x.mean()
    return {
        n: float(x @ torch.tensor([math.log(r[n]) for r in rows]) / x.square().sum())
        for n in rows[0]
    }


def test_activations_change_equally_at_every_width_only_under_mup():
    flat, steep = slopes(True, "dense"), slopes(False, "dense")
    assert all(abs(slope) < 0.25 for slope in flat.values()), flat
    assert steep["block 0"] > 1 and steep["block 1"] > 1 and steep["logits"] > 0.4, steep
    flat = slopes(True, "mla-moe", WIDTHS[:3])
    assert all(abs(slope) < 0.25 for slope in flat.values()), flat


def test_scales_by_width_under_mup():
    """A latent's rank scales with its head, a router has few outputs. Decay is multiplied where the rate is divided."""
    sets = [
        "recipe=adamw",
        "model.parametrization=mup",
        "model.mup_base={base_width=16, base_head_dim=16}",
        "model.vocab=64",
    ]
    cfg = load(size="tiny", arch="mla-moe", sets=sets).model  # width 64, heads of 32
    model = build_model(cfg)
    init_weights(model, cfg, seed=0)
    rates = {
        id(p): (g["lr_scale"], g["weight_decay"])
        for g in parameter_groups(model, 0.1, cfg)
        for p in g["params"]
    }
    block, last = "blocks.1.attention.", math.sqrt(2 * 4)
    for name, rate, std in [
        ("embedding.weight", 1, 0.02),
        ("head.weight", 1, 0.02),
        ("norm.gain", 1, None),
        (f"{block}q_down.weight", 1 / 4, 0.02 / 2),
        (f"{block}q_up.weight", 1 / 2, 0.02 / math.sqrt(2)),
        (f"{block}kv_up.weight", 1 / 2, 0.02 / math.sqrt(2)),
        (f"{block}out.weight", 1 / 4, 0.02 / 2 / last),
        ("blocks.1.ffn.router.weight", 1 / 4, 0.02 / 4),
        ("blocks.1.ffn.experts.up", 1 / 4, 0.02 / 2),
    ]:
        p = model.get_parameter(name)
        kept = p.ndim < 2 or name.startswith("embedding")
        assert rates[id(p)] == (rate, 0.0 if kept else pytest.approx(0.1 / rate)), name
        assert std is None or float(p.detach().std()) == pytest.approx(std, rel=0.05), name
    assert cfg.logit_scale == 16 / 64
    # The base's own 1/√d, and ∝ 1/d.
    assert cfg.score_scale == pytest.approx(math.sqrt(16 / 32) / math.sqrt(32 + 16))
