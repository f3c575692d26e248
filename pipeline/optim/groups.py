"""Which parameters decay, and the optimizer over them."""

from typing import Any

import torch
from torch import nn

from pipeline.config.schema import AdamW


def groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Matrices decay; embeddings, norms and biases do not (OLMo 3). A tied head counts as the embedding."""
    named = dict(model.named_parameters())
    kept = {n for n, p in named.items() if p.ndim < 2 or n.startswith("embedding.")}
    return [
        {"params": [p for n, p in named.items() if n not in kept], "weight_decay": decay, "name": "decay"},
        {"params": [p for n, p in named.items() if n in kept], "weight_decay": 0.0, "name": "no_decay"},
    ]


def adamw(model: nn.Module, cfg: AdamW, lr: float) -> torch.optim.AdamW:
    assert cfg.beta2 != "auto", "resolve the recipe first"
    return torch.optim.AdamW(
        groups(model, cfg.decay), lr=lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, weight_decay=cfg.decay, fused=True
    )
