"""Linear layers that multiply in fp8: operands scaled by their largest value, results in bf16.

T tokens · I inputs · O outputs

Activations and weights are e4m3, gradients e5m2. Each tensor has one scale, computed from the
tensor itself and not from earlier steps, so there is nothing to save or to tune. Sums have full
precision: the fast sums of the tensor cores keep only 14 bits, too few for thousands of tokens, and
save only 2 to 5% of the time. Without fp8 tensor cores, the same rounded numbers are multiplied in
fp32, slowly.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

Scaled = tuple[Tensor, Tensor]  # fp8 numbers, and the scale that multiplies them


def convert_to_fp8(module: nn.Module) -> int:
    """Convert every linear layer whose sides fit the tensor cores' tiles; return their number."""
    converted = 0
    for layer in module.modules():
        if type(layer) is nn.Linear and math.gcd(layer.in_features, layer.out_features) % 16 == 0:
            # Only the class changes; names, parameters and hooks stay.
            layer.__class__ = Float8Linear
            converted += 1
    return converted


class Float8Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Multiply.apply(x.flatten(0, -2), self.weight)  # type: ignore[no-untyped-call]
        y = y.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        x = _round(x_TI, torch.float8_e4m3fn)
        weight = _round(weight_OI, torch.float8_e4m3fn)
        return _product(x, weight, x_TI.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x_TI, weight_OI = ctx.saved_tensors
        grad = _round(grads[0], torch.float8_e5m2)
        # Rounded again, because fp8 copies kept from the forward would take memory.
        x = _round(x_TI, torch.float8_e4m3fn)
        weight = _round(weight_OI, torch.float8_e4m3fn)
        dx_TI = _product(grad, _transposed(weight), x_TI.dtype)
        dw_OI = _product(_transposed(grad), _transposed(x), weight_OI.dtype)
        return dx_TI, dw_OI


def _round(x: Tensor, dtype: torch.dtype) -> Scaled:
    # The clamp keeps a tensor of zeros from dividing by zero.
    scale = x.abs().amax().float().clamp(min=1e-12) / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype), scale


def _transposed(x: Scaled) -> Scaled:
    # A copy, because fp8 tensor cores read both operands along the summed dimension.
    return x[0].t().contiguous(), x[1]


def _product(a: Scaled, b: Scaled, dtype: torch.dtype) -> Tensor:
    """a · bᵀ: both are contiguous along the summed dimension, as the tensor cores need them."""
    a8, a_scale = a
    b8, b_scale = b
    if not a8.is_cuda:
        return ((a8.float() @ b8.float().t()) * (a_scale * b_scale)).to(dtype)
    # Without use_fast_accum, whose sums shrink toward zero by up to 6e-4 (docs/LOG.md).
    return torch._scaled_mm(a8, b8.t(), a_scale, b_scale, out_dtype=dtype)
