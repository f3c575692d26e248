"""The optimizer of a run and its parameter groups: weight decay and rate of each parameter."""

from typing import Any, assert_never

from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.config import optimizer as settings
from pipeline.config.schema import RunConfig
from pipeline.config.shape import GATES, TABLES, Model
from pipeline.optim.matrices import matrices_of
from pipeline.optim.muon import AdamW, Muon


def build_optimizer(model: nn.Module, config: RunConfig) -> AdamW:
    """Build the optimizer at its peak rate. `muon_shards.bind` has to follow for Muon."""
    cfg = config.optim.optimizer
    lr = config.optim.lr
    optimizer: AdamW
    match cfg:
        case settings.AdamW():
            groups = parameter_groups(model, cfg.decay, config.model)
            optimizer = AdamW(groups, lr=lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, fused=True)
        case settings.Muon():
            groups = muon_groups(model, cfg, lr, config.model)
            optimizer = Muon(groups, matrices_of(model, config.model), cfg, lr)
        case _:
            assert_never(cfg)
    set_learning_rate(optimizer, lr)
    return optimizer


def parameter_groups(module: nn.Module, decay: float, model: Model) -> list[dict[str, Any]]:
    """Return AdamW's groups with their weight decay and their factor of the learning rate.

    Matrices decay; embeddings, norms and biases do not (OLMo 3), and a tied head counts as the
    embedding. Under muP, a matrix with a wider input has a lower rate. A scaled embedding has a
    higher rate, because it is larger. Experts have groups with the names that DeepSpeed uses."""
    groups: dict[tuple[str, bool, float], dict[str, Any]] = {}
    for name, parameter in module.named_parameters():
        embedding = name.startswith(("embedding.", "encoder.embedding."))
        # The gates of value embeddings and smear are small matrices, treated as vectors.
        no_decay = parameter.ndim < 2 or name.startswith(TABLES) or name.endswith(GATES)
        scale = 1.0 if no_decay else model.narrower(name)
        if embedding:
            scale = model.embedding_scale
        expert_group = getattr(parameter, "group_name", "")
        # Dividing by `scale` makes rate × decay the same at every width, as in muP's code.
        weight_decay = 0.0 if no_decay else decay / scale
        group = {"params": [], "weight_decay": weight_decay, "lr_scale": scale}
        if expert_group:
            group |= {"moe": True, "name": expert_group}
        key = (expert_group, no_decay, -scale)
        groups.setdefault(key, group)["params"].append(parameter)
    # Sorted, so that every rank and every start has the groups in the same order.
    return [groups[key] for key in sorted(groups)]


def muon_groups(
    module: nn.Module, cfg: settings.Muon, peak: float, model: Model
) -> list[dict[str, Any]]:
    """Return Muon's matrices, and the embeddings, head and vectors, which AdamW steps undecayed."""
    matrices = matrices_of(module, model)
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for name, parameter in module.named_parameters():
        group: dict[str, Any] = {"params": [], "weight_decay": 0.0}
        if name in matrices:
            kind = "matrices"
            group |= {"lr_scale": 1.0, "weight_decay": cfg.decay, "matrices": True}
            if cfg.decay_with_rate:
                group["decay_at_peak"] = (cfg.decay, peak)
        elif name.startswith(("embedding.", "encoder.embedding.")):  # a tied head too
            kind = "embedding"
            group["lr_scale"] = cfg.embedding_rate * model.embedding_scale
        elif name.startswith("value_embeddings."):
            kind = "value embeddings"
            group["lr_scale"] = cfg.embedding_rate
        elif name.startswith("head."):
            kind = "head"
            group["lr_scale"] = cfg.head_rate
        else:
            kind = "vectors"
            group["lr_scale"] = cfg.vector_rate
        expert_group = getattr(parameter, "group_name", "")
        if expert_group:
            group |= {"moe": True, "name": expert_group}
        groups.setdefault((expert_group, kind), group)["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
        if "decay_at_peak" in group:
            decay, peak = group["decay_at_peak"]
            group["weight_decay"] = decay * lr / peak


def gate_step(optimizer: Optimizer, apply: Tensor) -> None:
    """Apply the next step only if `apply` is true; otherwise weights and moments stay unchanged."""
    # A flag of torch's loss scaler, which fused AdamW and our Muon read on the device.
    optimizer.found_inf = (~apply).float()  # type: ignore[attr-defined]
