"""Triton kernels where the compiler's own are slow. tests/model compares each with plain torch.

SwiGLU   N rows · H hidden width; gate and up lie side by side in (N, 2H)
norm     rows of the model's width
rotation B batch · S sequence · H query heads · G key/value heads · D head width · A = H + 2G heads
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, library

_BLOCK = 1024  # numbers per program of an elementwise pass
_PROGRAMS = 1024  # programs of a pass that sums over rows: several per core of the GPU

# ── SwiGLU ───────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _swiglu_backward_kernel(x, g, dx, hidden, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # may exceed 2^31
    inside = at < numel
    gate_at = at // hidden * (2 * hidden) + at % hidden  # up lies one hidden width further
    gate = tl.load(x + gate_at, mask=inside).to(tl.float32)
    up = tl.load(x + gate_at + hidden, mask=inside).to(tl.float32)
    grad = tl.load(g + at, mask=inside).to(tl.float32)
    # d silu(gate)/d gate = s + gate·s·(1 - s)
    s = tl.sigmoid(gate)
    silu = gate * s
    tl.store(dx + gate_at, grad * up * (s + silu * (1 - s)), mask=inside)
    tl.store(dx + gate_at + hidden, grad * silu, mask=inside)


@library.triton_op("isoflop::swiglu_backward", mutates_args={})
def _swiglu_backward(x: Tensor, g: Tensor) -> Tensor:
    dx = torch.empty_like(x)
    grid = (triton.cdiv(g.numel(), _BLOCK),)
    kernel = library.wrap_triton(_swiglu_backward_kernel)
    kernel[grid](x, g, dx, g.shape[-1], g.numel(), BLOCK=_BLOCK)
    return dx


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        dx: Tensor = _swiglu_backward(x, grads[0].contiguous())
        return dx


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) · up, with a backward in one pass.

    The compiler writes the two halves of the gradient by a `cat`, for which it reads every input
    twice: half the speed."""
    y: Tensor = _SwiGLU.apply(x.contiguous())  # type: ignore[no-untyped-call]
    return y


# ── Sum and RMSNorm ──────────────────────────────────────────────────────────────────────────────


@triton.jit
def _add_norm_kernel(x, y, total, out, gain, rows, width,
                     ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                     EPS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (col < width)[None, :]
    at = row.to(tl.int64)[:, None] * width + col[None, :]
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        # the norm reads the sum as it is stored, after rounding
        a = (a + tl.load(y + at, mask=inside, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + at, a, mask=inside)
        a = a.to(tl.float32)
    scale = tl.rsqrt(tl.sum(a * a, 1) / width + EPS)[:, None]
    w = tl.load(gain + col, mask=col < width, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, a * scale * w, mask=inside)


@triton.jit
def _norm_backward_kernel(x, g, beside, dx, gain, d_gain, rows, width, per,
                          BESIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                          EPS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    col = tl.arange(0, BLOCK)
    w = tl.load(gain + col, mask=col < width, other=0.0).to(tl.float32)[None, :]
    # A program sums the gain's gradient over its rows; a second pass adds those of all.
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    first = tl.program_id(0) * per
    for start in tl.range(first, first + per, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (col < width)[None, :]
        at = row.to(tl.int64)[:, None] * width + col[None, :]
        a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(a * a, 1) / width + EPS)[:, None]
        a *= scale
        sums += d * a
        d *= w
        # The norm removes the part of the gradient along its own output.
        d = scale * (d - a * (tl.sum(d * a, 1) / width)[:, None])
        # The gradient that reaches the sum without passing through the norm.
        if BESIDE:
            d += tl.load(beside + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, d, mask=inside)
    tl.store(d_gain + tl.program_id(0) * width + col, tl.sum(sums, 0), mask=col < width)


def _norm_sizes(x: Tensor, eps: float) -> tuple[int, dict[str, float]]:
    """How many rows there are, and the constants of the kernels."""
    block = triton.next_power_of_2(x.shape[-1])
    # Two rows at a time reach 4.1 TB/s on an H200; the compiler reaches 2.8 to 3.5 (docs/LOG.md).
    sizes = {"BLOCK": block, "ROWS": max(1, min(2, 4096 // block)), "EPS": eps}
    return x.numel() // x.shape[-1], sizes | {"num_warps": min(32, max(1, block // 256))}


@library.triton_op("isoflop::add_norm", mutates_args={})
def _add_norm(x: Tensor, y: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = torch.empty_like(x, dtype=torch.promote_types(x.dtype, y.dtype))
    out = torch.empty_like(total)
    rows, sizes = _norm_sizes(x, eps)
    grid = (triton.cdiv(rows, sizes["ROWS"]),)
    kernel = library.wrap_triton(_add_norm_kernel)
    kernel[grid](x, y, total, out, gain, rows, x.shape[-1], ADD=True, **sizes)
    return total, out


@library.triton_op("isoflop::norm", mutates_args={})
def _norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    rows, sizes = _norm_sizes(x, eps)
    grid = (triton.cdiv(rows, sizes["ROWS"]),)
    kernel = library.wrap_triton(_add_norm_kernel)
    kernel[grid](x, x, x, out, gain, rows, x.shape[-1], ADD=False, **sizes)
    return out


@library.triton_op("isoflop::norm_backward", mutates_args={})
def _norm_backward(
    x: Tensor, g: Tensor, beside: Tensor | None, gain: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(x)
    rows, sizes = _norm_sizes(x, eps)
    width = x.shape[-1]
    per = triton.cdiv(triton.cdiv(rows, _PROGRAMS), sizes["ROWS"]) * sizes["ROWS"]
    programs = triton.cdiv(rows, per)
    stages = 3 if width <= 4096 else 1  # what they hold has to fit the memory of a core
    d_gain = x.new_empty(programs, width, dtype=torch.float32)
    kernel = library.wrap_triton(_norm_backward_kernel)
    kernel[(programs,)](
        *(x, g, _or(x, beside), dx, gain, d_gain, rows, width, per),
        BESIDE=beside is not None,
        STAGES=stages,
        **sizes,
    )
    return dx, d_gain.sum(0)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, gain: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if y is None:
            total, out = x.view_as(x), _norm(x, gain, eps)
        else:
            total, out = _add_norm(x, y, gain, eps)
        ctx.save_for_backward(total, gain)
        ctx.eps = eps
        ctx.alone = y is None
        # Without it autograd would fill a missing gradient with zeros and read them again.
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    def backward(ctx: Any, beside: Tensor | None, g: Tensor) -> tuple[Tensor | None, ...]:
        total, gain = ctx.saved_tensors
        beside = None if beside is None else beside.contiguous()
        dx, d_gain = _norm_backward(total, g.contiguous(), beside, gain, ctx.eps)
        return dx, None if ctx.alone else dx, d_gain.to(gain.dtype), None


def add_norm(x: Tensor, y: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y and its RMSNorm.

    The backward is one pass, which also adds the gradient that reaches the sum beside the norm; the
    compiler's takes 1.2 to 1.8 times as long."""
    y = y if y is None else y.contiguous()
    total, out = _AddNorm.apply(x.contiguous(), y, gain, eps)  # type: ignore[no-untyped-call]
    return total, out


# ── Norm and rotation of queries and keys ────────────────────────────────────────────────────────


@triton.jit
def _heads(rows, H, G, ROWS: tl.constexpr):
    """Part (queries, keys, values), positions and heads of a program.

    The heads of a position lie side by side, so that its few cosines and sines serve all of them
    from the cache."""
    block = tl.program_id(0)
    part, first, heads = 0, 0, H
    if block >= tl.cdiv(rows * H, ROWS):
        block -= tl.cdiv(rows * H, ROWS)
        part, first, heads = 1, H, G
        if block >= tl.cdiv(rows * G, ROWS):
            block -= tl.cdiv(rows * G, ROWS)
            part, first = 2, H + G
    at = block * ROWS + tl.arange(0, ROWS)
    return part, at // heads, at % heads, first


@triton.jit
def _rotate_kernel(x, y, q_gain, k_gain, cos, sin, rows, places, H, G,
                   HALF: tl.constexpr, ROWS: tl.constexpr,
                   NORM: tl.constexpr, ROPE: tl.constexpr, EPS: tl.constexpr):  # fmt: skip
    part, row, head, first = _heads(rows, H, G, ROWS)
    pair = tl.arange(0, HALF)[None, :]
    inside = (row < rows)[:, None] & (pair >= 0)
    at = (row.to(tl.int64) * (H + 2 * G) + first + head)[:, None] * (2 * HALF) + pair
    # The two channels of a pair lie half a head apart.
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + at + HALF, mask=inside, other=0.0).to(tl.float32)
    if part < 2:
        if NORM:
            gain = q_gain if part == 0 else k_gain
            scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + EPS)[:, None]
            a = a * scale * tl.load(gain + pair).to(tl.float32)
            b = b * scale * tl.load(gain + HALF + pair).to(tl.float32)
        if ROPE:
            place = (row % places)[:, None] * HALF + pair
            c = tl.load(cos + place, mask=inside, other=0.0)
            s = tl.load(sin + place, mask=inside, other=0.0)
            a, b = a * c - b * s, b * c + a * s
    if NORM:  # y has no values
        at = (row.to(tl.int64) * (H + G) + first + head)[:, None] * (2 * HALF) + pair
    tl.store(y + at, a, mask=inside)
    tl.store(y + at + HALF, b, mask=inside)


@triton.jit
def _rotate_backward_kernel(x, dq, dk, dv, dx, q_gain, k_gain, d_gain, cos, sin,
                            rows, seq, places, H, G, qb, qs, qh, kb, ks, kh, vb, vs, vh,
                            HALF: tl.constexpr, ROWS: tl.constexpr,
                            NORM: tl.constexpr, ROPE: tl.constexpr, EPS: tl.constexpr):  # fmt: skip
    part, row, head, first = _heads(rows, H, G, ROWS)
    pair = tl.arange(0, HALF)[None, :]
    inside = (row < rows)[:, None] & (pair >= 0)
    batch = (row // seq).to(tl.int64)
    place = row % seq
    # Attention returns gradients with heads before positions: read them by their strides.
    if part == 0:
        g = dq + (batch * qb + place * qs + head * qh)[:, None]
    elif part == 1:
        g = dk + (batch * kb + place * ks + head * kh)[:, None]
    else:
        g = dv + (batch * vb + place * vs + head * vh)[:, None]
    da = tl.load(g + pair, mask=inside, other=0.0).to(tl.float32)
    db = tl.load(g + HALF + pair, mask=inside, other=0.0).to(tl.float32)
    at = (row.to(tl.int64) * (H + 2 * G) + first + head)[:, None] * (2 * HALF) + pair
    if part < 2:
        if ROPE:
            angle = (row % places)[:, None] * HALF + pair
            c = tl.load(cos + angle, mask=inside, other=0.0)
            s = tl.load(sin + angle, mask=inside, other=0.0)
            # The backward of a rotation is the rotation by the negative angle.
            da, db = da * c + db * s, db * c - da * s
        if NORM:
            gain = q_gain if part == 0 else k_gain
            a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(x + at + HALF, mask=inside, other=0.0).to(tl.float32)
            scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + EPS)[:, None]
            a = a * scale
            b = b * scale
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
    cos: Tensor | None, sin: Tensor | None, heads: int, eps: float,
) -> Tensor:  # fmt: skip
    """With gains, queries and keys only: the backward of the norm keeps x, which has the values."""
    B, S, A, D = x.shape
    groups = (A - heads) // 2
    y = x.new_empty(B, S, A if q_gain is None else heads + groups, D)
    blocks, sizes = _rotate_sizes(y, heads, groups, q_gain, cos, eps)
    tensors = [_or(x, tensor) for tensor in (q_gain, k_gain, cos, sin)]
    places = 1 if cos is None else cos.numel() // cos.shape[-1]  # S, or B·S with documents
    grid = (sum(blocks) - (0 if q_gain is None else blocks[2]),)
    kernel = library.wrap_triton(_rotate_kernel)
    kernel[grid](x, y, *tensors, B * S, places, heads, groups, **sizes)
    return y


@library.triton_op("isoflop::rotate_backward", mutates_args={})
def _rotate_backward(
    x: Tensor | None, dq: Tensor, dk: Tensor, dv: Tensor, q_gain: Tensor | None,
    k_gain: Tensor | None, cos: Tensor | None, sin: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    B, S, H, D = dq.shape
    G = dk.shape[2]
    dx = dq.new_empty(B, S, H + 2 * G, D)
    blocks, sizes = _rotate_sizes(dx, H, G, q_gain, cos, eps)
    d_gain = dq.new_empty(sum(blocks[:2]) if q_gain is not None else 0, D, dtype=torch.float32)
    dq, dk, dv = (t if t.stride(-1) == 1 else t.contiguous() for t in (dq, dk, dv))
    gains = (_or(dx, q_gain), _or(dx, k_gain))
    table = (_or(dx, cos), _or(dx, sin))
    places = 1 if cos is None else cos.numel() // cos.shape[-1]
    strides = (step for t in (dq, dk, dv) for step in t.stride()[:3])
    kernel = library.wrap_triton(_rotate_backward_kernel)
    kernel[(sum(blocks),)](
        *(_or(dx, x), dq, dk, dv, dx, *gains, d_gain, *table, B * S, S, places, H, G, *strides),
        **sizes,
    )
    return dx, d_gain[: blocks[0]].sum(0), d_gain[blocks[0] :].sum(0)


def _rotate_sizes(
    x: Tensor, H: int, G: int, gain: Tensor | None, cos: Tensor | None, eps: float
) -> tuple[tuple[int, int, int], dict[str, float]]:
    """Programs for queries, keys and values, and the constants of the kernels."""
    D = x.shape[-1]
    rows = 64  # heads per program, side by side (docs/LOG.md)
    sizes = {"HALF": D // 2, "NORM": gain is not None, "ROPE": cos is not None, "EPS": eps}
    sizes |= {"ROWS": rows, "num_warps": max(1, D // 32)}
    queries = triton.cdiv(x.shape[0] * x.shape[1] * H, rows)
    keys = triton.cdiv(x.shape[0] * x.shape[1] * G, rows)
    return (queries, keys, keys), sizes


def _or(x: Tensor, given: Tensor | None) -> Tensor:
    """A kernel needs a pointer for every tensor, also for one that it will not read."""
    return x if given is None else given


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, q_gain: Tensor | None, k_gain: Tensor | None,
        cos: Tensor | None, sin: Tensor | None, heads: int, eps: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        # A rotation is undone without its input; the backward of a norm needs it.
        ctx.save_for_backward(None if q_gain is None else x, q_gain, k_gain, cos, sin)
        ctx.eps = eps
        groups = (x.shape[2] - heads) // 2
        y: Tensor = _rotate(x, q_gain, k_gain, cos, sin, heads, eps)
        if q_gain is None:
            return torch.split(y, [heads, groups, groups], dim=2)
        return y[:, :, :heads], y[:, :, heads:], x[:, :, heads + groups :]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, q_gain, k_gain, cos, sin = ctx.saved_tensors
        dx, dq_gain, dk_gain = _rotate_backward(x, *grads, q_gain, k_gain, cos, sin, ctx.eps)
        if q_gain is None:
            return dx, None, None, None, None, None, None
        return dx, dq_gain.to(q_gain.dtype), dk_gain.to(k_gain.dtype), None, None, None, None


def norm_and_rotate(
    qkv_BSAD: Tensor,
    heads: int,
    gains: tuple[Tensor, Tensor] | None,
    eps: float,
    table: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys normed and rotated, values unchanged, in one pass; and one in the backward.

    The compiler makes four passes, and a fifth that lays the three gradients side by side."""
    given = (*(gains or (None, None)), *(table or (None, None)))
    x = qkv_BSAD.contiguous()
    q, k, v = _Rotate.apply(x, *given, heads, eps)  # type: ignore[no-untyped-call]
    return q, k, v
