"""Which parameters decay, how fast each learns, and the optimizer over them."""

from typing import Any

import torch
from torch import nn

from pipeline.config.schema import MuP, RunConfig


def groups(model: nn.Module, decay: float, mup: MuP | None = None, width: int = 1) -> list[dict[str, Any]]:
    """Matrices decay; embeddings, norms and biases do not (OLMo 3). A tied head counts as the embedding. Under muP the
    matrices with the width on their input side learn at base_width/width of the rate. Experts that ranks share have a
    group of their own, named as DeepSpeed knows them."""
    found: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        kept = parameter.ndim < 2 or name.startswith(("embedding.", "position."))
        slowed = mup is not None and not kept and not name.startswith("head.")
        shared = getattr(parameter, "group_name", None)
        key = shared or ("no_decay" if kept else "slow" if slowed else "decay")
        group: dict[str, Any] = {"params": [], "weight_decay": 0.0 if kept else decay, "lr_scale": 1.0, "name": key}
        if mup is not None and slowed:
            group["lr_scale"] = mup.base_width / width
        if shared:
            group["moe"] = True
        found.setdefault(key, group)["params"].append(parameter)
    return [found[key] for key in sorted(found, key=lambda key: ("moe" in found[key], "decay slow no_decay".find(key)))]


def adamw(model: nn.Module, config: RunConfig) -> torch.optim.AdamW:
    cfg, lr = config.optim.optimizer, config.optim.lr
    assert cfg.beta2 != "auto" and lr != "auto", "resolve the recipe first"
    rows = groups(model, cfg.decay, config.model.mup, config.model.width)
    return torch.optim.AdamW(rows, lr=lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, weight_decay=cfg.decay, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
