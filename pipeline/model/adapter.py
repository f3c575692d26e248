"""LoRA (arXiv 2106.09685): adds a product of two thin matrices to each frozen matrix of the blocks.

I inputs · O outputs · R rank

A frozen weight is a buffer: no engine looks for its gradient, no optimizer has a state for it, and
a checkpoint stores it under its own name. Loading a trained model merges the product into it.
"""

from collections.abc import Mapping, MutableMapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.config.schema import Lora
from pipeline.config.shape import BLOCKS, GATES
from pipeline.model.build import draw_normal

_DOWN = "lora_down"
_UP = "lora_up"


class AdaptedLinear(nn.Module):
    """A linear layer with a frozen weight and a learned low-rank update."""

    def __init__(self, linear: nn.Linear, lora: Lora) -> None:
        super().__init__()
        self.scale = lora.scale
        self.weight = linear.weight  # `freeze` turns weight and bias into buffers
        self.bias = linear.bias
        self.lora_down = nn.Parameter(torch.empty(lora.rank, linear.in_features))
        self.lora_up = nn.Parameter(torch.zeros(linear.out_features, lora.rank))

    def forward(self, x: Tensor) -> Tensor:
        learned = F.linear(F.linear(x, self.lora_down), self.lora_up)
        return F.linear(x, self.weight, self.bias) + self.scale * learned


def adapt(model: nn.Module, lora: Lora, seed: int, dtype: torch.dtype = torch.float32) -> None:
    """Add adapters to the matrices of the blocks; freeze everything except them and the row head.

    The product starts at zero, so that the model is unchanged at first. Like all weights, those of
    an adapter are drawn by name, from N(0, 1/inputs)."""
    for name, module in list(model.named_modules()):
        gate = f"{name}.weight".endswith(GATES)  # too small for an adapter
        if isinstance(module, nn.Linear) and name.startswith(BLOCKS) and not gate:
            adapted = AdaptedLinear(module, lora)
            draw_normal(adapted.lora_down, module.in_features**-0.5, f"{seed}/{name}.{_DOWN}")
            model.set_submodule(name, adapted)
    freeze(model, dtype)


def freeze(model: nn.Module, dtype: torch.dtype) -> None:
    """Turn parameters into buffers of a dtype, except those of adapters and of the row head."""
    frozen: dict[int, Tensor] = {}
    for name, module in model.named_modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            if leaf in (_DOWN, _UP) or name.startswith("row_head"):
                continue
            # Engines do not cast buffers. A tied head is saved with the embedding.
            tied = id(parameter) in frozen
            buffer = frozen.setdefault(id(parameter), parameter.detach().to(dtype))
            delattr(module, leaf)
            module.register_buffer(leaf, buffer, persistent=not tied)


def is_adapter(name: str) -> bool:
    return name.endswith((f".{_DOWN}", f".{_UP}"))


def merge_adapters(
    weights: MutableMapping[str, Tensor], stored: Mapping[str, Tensor], lora: Lora
) -> None:
    """Add the adapters' products to the frozen matrices, in fp32."""
    for name in filter(is_adapter, stored):
        path, _, part = name.rpartition(".")
        if part == _UP:
            update = lora.scale * (stored[name].float() @ stored[f"{path}.{_DOWN}"].float())
            weight = weights[f"{path}.weight"]
            total = weight.float() + update.to(weight.device)
            weights[f"{path}.weight"] = total.to(weight.dtype)
