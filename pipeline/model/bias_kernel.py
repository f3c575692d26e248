"""Attention with a trained bias on its scores, as in T5. tests/gpu compares it with plain torch.

Only one kernel of SDPA returns the gradient of a bias, and that kernel is slow, because it adds the
gradients of all rows in memory. Here a Triton kernel computes that gradient, and cuDNN everything
else. Each Triton program keeps one tile of the gradient in registers and loops over the batch.

B batch · H heads · Q queries · K keys · D head width
g gradient of the output · lse log of the softmax's denominator · delta Σ g·y over D, per query
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, library

_TILE_Q = 64
_TILE_K = 128
_WIDTHS = (32, 64, 128)  # head widths
_aten = torch.ops.aten


def supports(q_BHQD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor) -> bool:
    """Return whether `attend_with_bias` supports these tensors. Partial tiles have no mask."""
    return (
        q_BHQD.is_cuda
        and q_BHQD.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(q_BHQD.device) >= (9, 0)
        and q_BHQD.shape[1] == k_BHKD.shape[1]
        and q_BHQD.shape[3] == v_BHKD.shape[3]
        and q_BHQD.shape[3] in _WIDTHS
        and q_BHQD.shape[2] % _TILE_Q == 0
        and k_BHKD.shape[2] % _TILE_K == 0
    )


@triton.jit
def _bias_gradient_kernel(q, k, v, g, bias, lse, delta, out, B, H, Q, K,
                          qb, qh, qs, kb, kh, ks, vb, vh, vs, gb, gh, gs,
                          SCALE: tl.constexpr, D: tl.constexpr,
                          TQ: tl.constexpr, TK: tl.constexpr):  # fmt: skip
    # qb, qh and qs are the strides of q over batch, heads and positions; likewise for k, v and g.
    head = tl.program_id(0)
    i = tl.program_id(1) * TQ + tl.arange(0, TQ)
    j = tl.program_id(2) * TK + tl.arange(0, TK)
    d = tl.arange(0, D)
    tile = (head * Q + i)[:, None] * K + j[None, :]
    bias_ij = tl.load(bias + tile).to(tl.float32)
    # Keys and values are read transposed. The loop advances the pointers through the batch.
    q += head * qh + i[:, None] * qs + d[None, :]
    g += head * gh + i[:, None] * gs + d[None, :]
    k += head * kh + j[None, :] * ks + d[:, None]
    v += head * vh + j[None, :] * vs + d[:, None]
    lse += head * Q + i
    delta += head * Q + i
    total = tl.zeros((TQ, TK), tl.float32)
    for _ in range(B):
        scores = tl.dot(tl.load(q), tl.load(k)) * SCALE + bias_ij
        weights = tl.exp(scores - tl.load(lse)[:, None])
        d_weights = tl.dot(tl.load(g), tl.load(v))
        # The backward pass of the softmax.
        total += weights * (d_weights - tl.load(delta)[:, None])
        q += qb
        g += gb
        k += kb
        v += vb
        lse += H * Q
        delta += H * Q
    tl.store(out + tile, total)


@library.triton_op("isoflop::bias_gradient", mutates_args={})
def _bias_gradient(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, bias: Tensor, lse: Tensor, delta: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    B, H, Q, D = q.shape
    K = k.shape[2]
    out = torch.empty_like(bias)
    strides = (step for t in (q, k, v, g) for step in t.stride()[:3])
    library.wrap_triton(_bias_gradient_kernel)[(H, Q // _TILE_Q, K // _TILE_K)](
        *(q, k, v, g, bias, lse, delta, out, B, H, Q, K, *strides),
        SCALE=scale,
        D=D,
        TQ=_TILE_Q,
        TK=_TILE_K,
        num_warps=8,
        num_stages=3,
    )
    return out


class _AttendWithBias(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias_HQK: Tensor, scale: float
    ) -> Tensor:
        y, lse, _, _, max_q, max_k, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, bias_HQK[None], True, scale=scale
        )
        ctx.save_for_backward(q, k, v, bias_HQK, y, lse, seed, offset)
        ctx.lengths = (max_q, max_k)
        ctx.scale = scale
        out: Tensor = y
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias_HQK, y, lse, seed, offset = ctx.saved_tensors
        g = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        scale = ctx.scale
        dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
            *(g, q, k, v, y, lse, seed, offset, bias_HQK[None], None, None, *ctx.lengths),
            *(0.0, False),  # no dropout, not causal
            scale=scale,
        )
        delta = (g.float() * y.float()).sum(-1)
        lse = lse.reshape(delta.shape)
        return dq, dk, dv, _bias_gradient(q, k, v, g, bias_HQK, lse, delta, scale), None


def attend_with_bias(
    q_BHQD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, bias_HQK: Tensor, scale: float
) -> Tensor:
    """Attention without a mask, (B, H, Q, D), with a bias that all rows share."""
    inputs = (q_BHQD, k_BHKD, v_BHKD, bias_HQK.type_as(q_BHQD).contiguous(), scale)
    y: Tensor = _AttendWithBias.apply(*inputs)  # type: ignore[no-untyped-call]
    return y
