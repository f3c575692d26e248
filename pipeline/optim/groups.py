"""AdamW and its parameter groups: what decays, and how fast each parameter learns."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.config.schema import RunConfig
from pipeline.config.shape import Model

# torch marks these methods as not to be compiled by importing the compiler, which takes a tenth of
# the start of a process. The mark itself costs nothing.
for _method in (
    Optimizer.add_param_group,
    Optimizer.zero_grad,
    Optimizer.state_dict,
    Optimizer.load_state_dict,
):
    _method.__wrapped__.__dynamo_disable = _method.__wrapped__  # type: ignore[union-attr]


class AdamW(torch.optim.AdamW):
    step = torch.no_grad()(torch.optim.AdamW.step.__wrapped__)  # type: ignore[attr-defined]


def parameter_groups(module: nn.Module, decay: float, model: Model) -> list[dict[str, Any]]:
    """Groups with their weight decay and their factor of the learning rate.

    Matrices decay; embeddings, norms and biases do not (OLMo 3), and a tied head counts as the
    embedding. Under muP a matrix learns slower the wider its input is. A scaled embedding learns
    faster, as it is larger. Experts that ranks share have groups named as DeepSpeed knows them."""
    groups: dict[tuple[str, bool, float], dict[str, Any]] = {}
    for name, parameter in module.named_parameters():
        embedding = name.startswith("embedding.")
        no_decay = embedding or parameter.ndim < 2 or name.startswith("position.")
        scale = 1.0 if no_decay else model.narrower(name)
        if embedding:
            scale = model.embedding_scale
        expert_group = getattr(parameter, "group_name", "")
        # AdamW subtracts rate × decay; divided, it is the same at every width, as in muP's code
        weight_decay = 0.0 if no_decay else decay / scale
        group = {"params": [], "weight_decay": weight_decay, "lr_scale": scale}
        if expert_group:
            group |= {"moe": True, "name": expert_group}
        key = (expert_group, no_decay, -scale)
        groups.setdefault(key, group)["params"].append(parameter)
    # Sorted, so that every rank and every start has the groups in the same order.
    return [groups[key] for key in sorted(groups)]


def adamw(model: nn.Module, config: RunConfig) -> AdamW:
    cfg = config.optim.optimizer
    lr = config.optim.lr
    groups = parameter_groups(model, cfg.decay, config.model)
    betas = (cfg.beta1, cfg.beta2)
    optimizer = AdamW(groups, lr=lr, betas=betas, eps=cfg.eps, weight_decay=cfg.decay, fused=True)
    set_learning_rate(optimizer, lr)
    return optimizer


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def gate_step(optimizer: Optimizer, apply: Tensor) -> None:
    """Apply the next step only if `apply` is true; otherwise weights and moments stay unchanged.

    Fused AdamW reads this flag on the device, as for torch's loss scaler, so no host waits."""
    optimizer.found_inf = (~apply).float()  # type: ignore[attr-defined]
