"""muP's coordinate check (arXiv 2203.03466, appendix D.1): what a few steps of Adam do to each activation does not
depend on the width; without it, it grows."""

import math

import torch

from pipeline.config.load import load
from pipeline.model.build import build, draw
from pipeline.optim.groups import groups, set_rate

WIDTHS = (64, 128, 256, 512)


def changes(width: int, mup: bool, steps: int = 3, lr: float = 0.01) -> dict[str, float]:
    """How far each activation has moved from where it began, root mean square."""
    shape = [f"model.width={width}", f"model.attention.heads={width // 16}", f"model.attention.kv_heads={width // 16}",
             f"model.ffn.hidden={3 * width}", "model.attention.head_dim=16", "model.layers=2", "model.vocab=64",
             "model.seq=32"]  # fmt: skip
    sets = [*shape, *(["model.parametrization=mup", "model.mup_base={base_width=64, base_head_dim=16}"] if mup else [])]
    cfg = load(size="tiny", sets=sets).model
    model = build(cfg)
    draw(model, cfg, seed=0)
    tokens = torch.randint(64, (2, 33), generator=torch.Generator().manual_seed(0))
    seen: dict[str, torch.Tensor] = {}
    for name, part in [("embedding", model.embedding), *((f"block {i}", b) for i, b in enumerate(model.blocks))]:
        keep = lambda _m, _i, out, n=name: seen.__setitem__(n, (out[0] if isinstance(out, tuple) else out).detach())  # noqa: E731
        part.register_forward_hook(keep)

    def look():
        with torch.no_grad():
            seen["logits"] = model(tokens[:, :-1])
        return {name: tensor.clone() for name, tensor in seen.items()}

    before = look()
    optimizer = torch.optim.AdamW(groups(model, 0.0, cfg), lr=lr, betas=(0.9, 0.95))
    set_rate(optimizer, lr)
    for _ in range(steps):
        model(tokens[:, :-1], tokens[:, 1:]).total.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: float((tensor - before[name]).square().mean().sqrt()) for name, tensor in look().items()}


def slopes(mup: bool) -> dict[str, float]:
    """Of log change over log width, least squares."""
    rows = [changes(width, mup) for width in WIDTHS]
    x = torch.tensor([math.log(w) for w in WIDTHS])
    x = x - x.mean()
    return {n: float(x @ torch.tensor([math.log(r[n]) for r in rows]) / x.square().sum()) for n in rows[0]}


def test_activations_move_alike_at_every_width_under_mup_alone():
    flat, steep = slopes(mup=True), slopes(mup=False)
    assert all(abs(slope) < 0.25 for slope in flat.values()), flat
    assert steep["block 0"] > 1 and steep["block 1"] > 1 and steep["logits"] > 0.4, steep
