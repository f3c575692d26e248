"""Triton kernels that norm and rotate queries and keys. tests/model compares them with plain torch.

B batch · S sequence · H query heads · G key/value heads · D head width · A = H + 2G heads
The kernels count B·S tokens. HEADS heads, of one part and of neighboring tokens, share a program.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, library

from pipeline.model.kernels import pointer


@triton.jit
def _heads(tokens, H, G, HEADS: tl.constexpr):
    """Return a program's part (0 queries, 1 keys, 2 values), its tokens and heads, and the part's
    first head. Heads of a token are neighbors, because they read the same cosines and sines."""
    block = tl.program_id(0)
    part, first, heads = 0, 0, H
    if block >= tl.cdiv(tokens * H, HEADS):
        block -= tl.cdiv(tokens * H, HEADS)
        part, first, heads = 1, H, G
        if block >= tl.cdiv(tokens * G, HEADS):
            block -= tl.cdiv(tokens * G, HEADS)
            part, first = 2, H + G
    at = block * HEADS + tl.arange(0, HEADS)
    return part, at // heads, at % heads, first


@triton.jit
def _rotate_kernel(x, y, q_gain, k_gain, cos, sin, tokens, table_rows, H, G,
                   HALF: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr,
                   GAIN: tl.constexpr, ROPE: tl.constexpr, EPS: tl.constexpr):  # fmt: skip
    part, token, head, first = _heads(tokens, H, G, HEADS)
    pair = tl.arange(0, HALF)[None, :]
    inside = (token < tokens)[:, None] & (pair >= 0)
    at = (token.to(tl.int64) * (H + 2 * G) + first + head)[:, None] * (2 * HALF) + pair
    # The two channels of a pair are half a head apart.
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + at + HALF, mask=inside, other=0.0).to(tl.float32)
    if part < 2:
        if NORM:
            gain = q_gain if part == 0 else k_gain
            scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + EPS)[:, None]
            a = a * scale
            b = b * scale
            if GAIN:
                a = a * tl.load(gain + pair).to(tl.float32)
                b = b * tl.load(gain + HALF + pair).to(tl.float32)
        if ROPE:
            place = (token % table_rows)[:, None] * HALF + pair
            c = tl.load(cos + place, mask=inside, other=0.0)
            s = tl.load(sin + place, mask=inside, other=0.0)
            a, b = a * c - b * s, b * c + a * s
    if NORM:  # y has queries and keys only
        at = (token.to(tl.int64) * (H + G) + first + head)[:, None] * (2 * HALF) + pair
    tl.store(y + at, a, mask=inside)
    tl.store(y + at + HALF, b, mask=inside)


@triton.jit
def _rotate_backward_kernel(x, dq, dk, dv, dx, q_gain, k_gain, d_gain, cos, sin,
                            tokens, seq, table_rows, H, G, qb, qs, qh, kb, ks, kh, vb, vs, vh,
                            HALF: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr,
                            GAIN: tl.constexpr, ROPE: tl.constexpr,
                            EPS: tl.constexpr):  # fmt: skip
    part, token, head, first = _heads(tokens, H, G, HEADS)
    pair = tl.arange(0, HALF)[None, :]
    inside = (token < tokens)[:, None] & (pair >= 0)
    batch = (token // seq).to(tl.int64)
    place = token % seq
    # Attention returns gradients with heads before tokens. qb, qs and qh are the strides of dq.
    if part == 0:
        g = dq + (batch * qb + place * qs + head * qh)[:, None]
    elif part == 1:
        g = dk + (batch * kb + place * ks + head * kh)[:, None]
    else:
        g = dv + (batch * vb + place * vs + head * vh)[:, None]
    da = tl.load(g + pair, mask=inside, other=0.0).to(tl.float32)
    db = tl.load(g + HALF + pair, mask=inside, other=0.0).to(tl.float32)
    at = (token.to(tl.int64) * (H + 2 * G) + first + head)[:, None] * (2 * HALF) + pair
    if part < 2:
        if ROPE:
            angle = (token % table_rows)[:, None] * HALF + pair
            c = tl.load(cos + angle, mask=inside, other=0.0)
            s = tl.load(sin + angle, mask=inside, other=0.0)
            # The backward pass of a rotation is the rotation by the negative angle.
            da, db = da * c + db * s, db * c - da * s
        if NORM:
            gain = q_gain if part == 0 else k_gain
            a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(x + at + HALF, mask=inside, other=0.0).to(tl.float32)
            scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + EPS)[:, None]
            a = a * scale
            b = b * scale
            if GAIN:
                sums = d_gain + tl.program_id(0) * (2 * HALF) + tl.arange(0, HALF)
                tl.store(sums, tl.sum(da * a, 0))
                tl.store(sums + HALF, tl.sum(db * b, 0))
                da = da * tl.load(gain + pair).to(tl.float32)
                db = db * tl.load(gain + HALF + pair).to(tl.float32)
            along = ((tl.sum(da * a, 1) + tl.sum(db * b, 1)) / (2 * HALF))[:, None]
            da = scale * (da - a * along)
            db = scale * (db - b * along)
    tl.store(dx + at, da, mask=inside)
    tl.store(dx + at + HALF, db, mask=inside)


@library.triton_op("isoflop::rotate", mutates_args={})
def _rotate(
    x: Tensor, q_gain: Tensor | None, k_gain: Tensor | None,
    cos: Tensor | None, sin: Tensor | None, heads: int, norm: bool, eps: float,
) -> Tensor:  # fmt: skip
    """Return all heads or, with norm, only queries and keys: the backward pass of the norm keeps x
    anyway, and x holds the values."""
    B, S, A, D = x.shape
    groups = (A - heads) // 2
    y = x.new_empty(B, S, heads + groups if norm else A, D)
    blocks, sizes = _rotate_sizes(y, heads, groups, norm, q_gain, cos, eps)
    tensors = [pointer(x, tensor) for tensor in (q_gain, k_gain, cos, sin)]
    table_rows = 1 if cos is None else cos.numel() // cos.shape[-1]  # S, or B·S with documents
    grid = (sum(blocks) - (blocks[2] if norm else 0),)
    kernel = library.wrap_triton(_rotate_kernel)
    kernel[grid](x, y, *tensors, B * S, table_rows, heads, groups, **sizes)
    return y


@library.triton_op("isoflop::rotate_backward", mutates_args={})
def _rotate_backward(
    x: Tensor | None, dq: Tensor, dk: Tensor, dv: Tensor, q_gain: Tensor | None,
    k_gain: Tensor | None, cos: Tensor | None, sin: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    B, S, H, D = dq.shape
    G = dk.shape[2]
    dx = dq.new_empty(B, S, H + 2 * G, D)
    norm = x is not None
    blocks, sizes = _rotate_sizes(dx, H, G, norm, q_gain, cos, eps)
    d_gain = dq.new_empty(sum(blocks[:2]) if q_gain is not None else 0, D, dtype=torch.float32)
    dq, dk, dv = (t if t.stride(-1) == 1 else t.contiguous() for t in (dq, dk, dv))
    gains = (pointer(dx, q_gain), pointer(dx, k_gain))
    table = (pointer(dx, cos), pointer(dx, sin))
    table_rows = 1 if cos is None else cos.numel() // cos.shape[-1]
    strides = (step for t in (dq, dk, dv) for step in t.stride()[:3])
    kernel = library.wrap_triton(_rotate_backward_kernel)
    kernel[(sum(blocks),)](
        *(pointer(dx, x), dq, dk, dv, dx, *gains, d_gain, *table),
        *(B * S, S, table_rows, H, G, *strides),
        **sizes,
    )
    return dx, d_gain[: blocks[0]].sum(0), d_gain[blocks[0] :].sum(0)


def _rotate_sizes(
    x: Tensor, H: int, G: int, norm: bool, gain: Tensor | None, cos: Tensor | None, eps: float
) -> tuple[tuple[int, int, int], dict[str, float]]:
    """Return the numbers of programs for queries, keys and values, and the kernels' constants."""
    D = x.shape[-1]
    per_program = 64  # heads per program, side by side (docs/LOG.md)
    sizes = {"HALF": D // 2, "EPS": eps, "HEADS": per_program, "num_warps": max(1, D // 32)}
    sizes |= {"NORM": norm, "GAIN": gain is not None, "ROPE": cos is not None}
    queries = triton.cdiv(x.shape[0] * x.shape[1] * H, per_program)
    keys = triton.cdiv(x.shape[0] * x.shape[1] * G, per_program)
    return (queries, keys, keys), sizes


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, q_gain: Tensor | None, k_gain: Tensor | None,
        cos: Tensor | None, sin: Tensor | None, heads: int, norm: bool, eps: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        # The backward pass of a rotation does not need the input; that of a norm does.
        ctx.save_for_backward(x if norm else None, q_gain, k_gain, cos, sin)
        ctx.eps = eps
        groups = (x.shape[2] - heads) // 2
        y = x  # without norm and rotation, only the backward pass needs a kernel
        if norm or cos is not None:
            y = _rotate(x, q_gain, k_gain, cos, sin, heads, norm, eps)
        if not norm:
            return torch.split(y, [heads, groups, groups], dim=2)
        return y[:, :, :heads], y[:, :, heads:], x[:, :, heads + groups :]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, q_gain, k_gain, cos, sin = ctx.saved_tensors
        dx, dq_gain, dk_gain = _rotate_backward(x, *grads, q_gain, k_gain, cos, sin, ctx.eps)
        if q_gain is None:
            return dx, *[None] * 7
        return dx, dq_gain.to(q_gain.dtype), dk_gain.to(k_gain.dtype), *[None] * 5


def norm_and_rotate(
    qkv_BSAD: Tensor,
    heads: int,
    gains: tuple[Tensor | None, Tensor | None] | None,
    eps: float,
    table: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normed and rotated queries and keys, and unchanged values, in one pass over memory.

    Without a norm, `gains` is None; for a norm without gains it is (None, None)."""
    given = (*(gains or (None, None)), *(table or (None, None)))
    x = qkv_BSAD.contiguous()
    norm = gains is not None
    q, k, v = _Rotate.apply(x, *given, heads, norm, eps)  # type: ignore[no-untyped-call]
    return q, k, v
