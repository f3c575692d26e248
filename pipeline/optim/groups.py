"""Which parameters decay, how fast each learns, and the optimizer over them."""

from typing import Any

import torch
from torch import nn

from pipeline.config.schema import MuP, RunConfig


def groups(model: nn.Module, decay: float, mup: MuP | None = None, width: int = 1) -> list[dict[str, Any]]:
    """Matrices decay; embeddings, norms and biases do not (OLMo 3). A tied head counts as the embedding. Under muP the
    matrices with the width on their input side learn at base_width/width of the rate."""
    named = dict(model.named_parameters())
    kept = {n for n, p in named.items() if p.ndim < 2 or n.startswith(("embedding.", "position."))}
    slowed = {n for n in named if mup is not None and n not in kept and not n.startswith("head.")}
    slow = 1.0 if mup is None else mup.base_width / width
    rows = [
        ("decay", named.keys() - kept - slowed, decay, 1.0),
        ("slow", slowed, decay, slow),
        ("no_decay", kept, 0.0, 1.0),
    ]
    return [
        {"params": [p for n, p in named.items() if n in names], "weight_decay": wd, "lr_scale": scale, "name": name}
        for name, names, wd, scale in rows
        if names
    ]


def adamw(model: nn.Module, config: RunConfig) -> torch.optim.AdamW:
    cfg, lr = config.optim.optimizer, config.optim.lr
    assert cfg.beta2 != "auto" and lr != "auto", "resolve the recipe first"
    rows = groups(model, cfg.decay, config.model.mup, config.model.width)
    return torch.optim.AdamW(rows, lr=lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, weight_decay=cfg.decay, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
