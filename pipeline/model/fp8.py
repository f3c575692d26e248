"""Matmuls in fp8, for linear layers: operands scaled to their largest value, products summed and given back in bf16.

T tokens · I inputs · O outputs

Values and weights are e4m3, gradients e5m2. Scales are of the whole tensor and of this very one, not of an earlier
step: nothing to keep, to save or to tune. Sums are in full precision: the tensor cores' fast ones keep 14 bits, too few
for thousands of tokens, and save 2 to 5% of a product. Where no tensor core multiplies fp8, the same rounded numbers
are multiplied in fp32, slowly.
"""

from typing import Any

import torch
from torch import Tensor, nn


def convert_to_fp8(module: nn.Module) -> int:
    """Every linear layer inside whose sides a tensor core can tile; how many there are."""
    linear = [layer for layer in module.modules() if type(layer) is nn.Linear]
    tiled = [layer for layer in linear if layer.in_features % 16 == 0 == layer.out_features % 16]
    for layer in tiled:
        layer.__class__ = Float8Linear
    return len(tiled)


class Float8Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Multiply.apply(x.flatten(0, -2), self.weight)  # type: ignore[no-untyped-call]
        y = y.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        return _product(
            _round(x_TI, torch.float8_e4m3fn), _round(weight_OI, torch.float8_e4m3fn), x_TI.dtype
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x_TI, weight_OI = ctx.saved_tensors
        grad, scale = _round(grads[0], torch.float8_e5m2)
        x, x_scale = _round(x_TI, torch.float8_e4m3fn)
        weight, weight_scale = _round(weight_OI, torch.float8_e4m3fn)
        dx_TI = _product((grad, scale), (weight.t().contiguous(), weight_scale), x_TI.dtype)
        dw_OI = _product(
            (grad.t().contiguous(), scale), (x.t().contiguous(), x_scale), weight_OI.dtype
        )
        return dx_TI, dw_OI


def _round(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tensor over its scale, and the scale."""
    scale = x.abs().amax().float().clamp(min=1e-12) / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype), scale


def _product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """a · bᵀ: both lie along what is summed over, as the tensor cores want them."""
    (a8, a_scale), (b8, b_scale) = a, b
    if not a8.is_cuda:
        return ((a8.float() @ b8.float().t()) * (a_scale * b_scale)).to(dtype)
    return torch._scaled_mm(a8, b8.t(), a_scale, b_scale, out_dtype=dtype)
