"""Triton's kernels against the plain torch they stand for, through its interpreter where there is no GPU."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton comes with torch's GPU build, and with the test extra on aarch64")

SWIGLU = """
import torch, triton
from pipeline.model.kernels import _BLOCK, _swiglu_backward
for rows, hidden in ((3, 5), (64, 352), (7, 1024)):
    x, g = torch.randn(rows, 2 * hidden, requires_grad=True), torch.randn(rows, hidden)
    gate, up = x.chunk(2, -1)
    (torch.nn.functional.silu(gate) * up).backward(g)
    dx = torch.full_like(x, float("nan")).detach()
    grid = (triton.cdiv(g.numel(), _BLOCK),)
    _swiglu_backward[grid](x.detach(), g, dx, hidden, g.numel(), BLOCK=_BLOCK)
    torch.testing.assert_close(dx, x.grad, atol=1e-5, rtol=1e-5)
"""

TURN = """
import torch
from torch import library as torch_ops
from pipeline.model import kernels
from pipeline.model.position import rotate
torch_ops.wrap_triton = lambda kernel: kernel  # straight to the interpreter
turned, backward = (op._init_fn for op in (kernels._turned, kernels._turned_backward))
for B, S, H, G, D in ((1, 5, 2, 1, 16), (2, 40, 2, 2, 64), (1, 70, 6, 3, 32)):
    for normed in (True, False):
        for places in ((S,), (B, S), None):
            x = torch.randn(B, S, H + 2 * G, D, requires_grad=True)
            gains = tuple(torch.randn(D, requires_grad=True) for _ in "qk") if normed else (None, None)
            table = (None, None) if places is None else tuple(torch.randn(*places, D // 2) for _ in "cs")
            norm = lambda t, gain: t if gain is None else torch.nn.functional.rms_norm(t, (D,), gain, 1e-6)
            q, k, v = x.split((H, G, G), dim=2)
            turn = None if places is None else table
            want = (rotate(norm(q, gains[0]), turn), rotate(norm(k, gains[1]), turn), v)
            got = turned(x.detach(), *gains, *table, H, 1e-6).split((H, G) if normed else (H, G, G), dim=2)
            # as attention gives them back: heads before the sequence
            grads = tuple(torch.randn(B, t.shape[2], S, D).transpose(1, 2) for t in want)
            torch.autograd.backward(want, grads)
            dx, dq_gain, dk_gain = backward(x.detach() if normed else None, *grads, *gains, *table, 1e-6)
            for a, b in zip(got, want):  # normed, the values stay where they are
                torch.testing.assert_close(a, b.detach(), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(dx, x.grad, atol=1e-5, rtol=1e-4)
            if normed:
                torch.testing.assert_close(dq_gain, gains[0].grad, atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(dk_gain, gains[1].grad, atol=1e-4, rtol=1e-4)
"""

NORM = """
import torch
from torch import library as torch_ops
from pipeline.model import kernels
torch_ops.wrap_triton = lambda kernel: kernel  # straight to the interpreter
kernels._PROGRAMS = 4
added, normed, backward = (op._init_fn for op in (kernels._added, kernels._normed, kernels._normed_backward))
for shape in ((3, 5), (2, 37, 96), (1, 768), (2, 5000)):
    for adds in (True, False):
        x, y, g, beside = (torch.randn(*shape) for _ in "xygb")
        gain = torch.randn(shape[-1], requires_grad=True)
        total = (x + y if adds else x).requires_grad_()
        out = torch.nn.functional.rms_norm(total, shape[-1:], gain, 1e-6)
        torch.autograd.backward((total * 1, out), (beside, g))
        if adds:
            got, got_out = added(x, y, gain.detach(), 1e-6)
            torch.testing.assert_close(got, total.detach())
        else:
            got_out = normed(x, gain.detach(), 1e-6)
        torch.testing.assert_close(got_out, out.detach(), atol=1e-5, rtol=1e-5)
        for stands in (beside, None):
            dx, d_gain = backward(total.detach(), g, stands, gain.detach(), 1e-6)
            wanted = total.grad - (0 if stands is not None else beside)
            torch.testing.assert_close(dx, wanted, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(d_gain, gain.grad, atol=1e-4, rtol=1e-4)
"""

LOSS = """
import torch
from pipeline.objective.kernels import cross_entropy
from pipeline.objective.loss import few_passes
for tokens, vocab in ((3, 50), (5, 4096), (2, 9000), (2, 20000)):
    logits, targets = 9 * torch.randn(tokens, vocab), torch.randint(vocab, (tokens,))
    share = torch.rand(tokens) * (torch.arange(tokens) != 1)  # one place predicts nothing
    for z_loss in (0.0, 1e-2):
        wanted = few_passes(logits, targets, share, z_loss)
        for got, want in zip(cross_entropy(logits.clone(), targets, share, z_loss), wanted):
            torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
"""


@pytest.mark.parametrize("script", [SWIGLU, TURN, NORM, LOSS], ids=["swiglu", "turn", "norm", "loss"])
def test_a_kernel_equals_plain_torch(script: str):
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
