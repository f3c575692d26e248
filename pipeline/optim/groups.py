"""Which parameters decay, how fast each learns, and the optimizer over them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.config.schema import RunConfig
from pipeline.config.shape import Model

# torch's optimizers import the compiler, a tenth of a process's start, only to stay out of it
for _kept_out in (
    Optimizer.add_param_group,
    Optimizer.zero_grad,
    Optimizer.state_dict,
    Optimizer.load_state_dict,
):
    _kept_out.__wrapped__.__dynamo_disable = _kept_out.__wrapped__  # type: ignore[union-attr]


class AdamW(torch.optim.AdamW):
    step = torch.no_grad()(torch.optim.AdamW.step.__wrapped__)  # type: ignore[attr-defined]


def parameter_groups(module: nn.Module, decay: float, model: Model) -> list[dict[str, Any]]:
    """Matrices decay; embeddings, norms and biases do not (OLMo 3). A tied head counts as the embedding. Under muP a
    matrix learns slower the wider its input is; a scaled embedding learns faster, as it is larger. Experts that ranks
    share have a group of their own, named as DeepSpeed knows them."""
    found: dict[tuple[str, bool, float], dict[str, Any]] = {}
    for name, parameter in module.named_parameters():
        kept = parameter.ndim < 2 or name.startswith(("embedding.", "position."))
        scale = (
            model.embedding_scale
            if name.startswith("embedding.")
            else 1.0
            if kept
            else model.narrower(name)
        )
        shared = getattr(parameter, "group_name", "")
        # AdamW takes rate × decay off the weights: the same at every width, as in the authors' own optimizer
        group = {"params": [], "weight_decay": 0.0 if kept else decay / scale, "lr_scale": scale}
        group |= {"moe": True, "name": shared} if shared else {}
        found.setdefault((shared, kept, -scale), group)["params"].append(parameter)
    return [found[key] for key in sorted(found)]


def adamw(model: nn.Module, config: RunConfig) -> AdamW:
    cfg, lr = config.optim.optimizer, config.optim.lr
    assert cfg.beta2 != "auto" and lr != "auto", "resolve the recipe first"
    rows = parameter_groups(model, cfg.decay, config.model)
    built = AdamW(
        rows, lr=lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, weight_decay=cfg.decay, fused=True
    )
    set_learning_rate(built, lr)
    return built


def gate_step(optimizer: Optimizer, apply: Tensor) -> None:
    """Whether its next step is taken, or leaves weights, moments and counts as they are: fused AdamW asks the device
    itself, as torch's loss scaler has it."""
    optimizer.found_inf = (~apply).float()  # type: ignore[attr-defined]


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
