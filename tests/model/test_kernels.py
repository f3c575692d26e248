"""Triton's kernels against the plain torch they stand for, through its interpreter where there is no GPU: as the model
calls them, forward and backward, in both dtypes and in sizes that fill no block."""

import os
import subprocess
import sys

import pytest

pytest.importorskip(
    "triton", reason="Triton comes with torch's GPU build, and with the test extra on aarch64"
)

FIRST = """
import torch
from torch import library
library.wrap_triton = lambda kernel: kernel  # straight to the interpreter
torch.manual_seed(0)
DTYPES = torch.float32, torch.bfloat16

def coming(t):
    '''A gradient, where there are heads as attention returns it: they before the sequence.'''
    whole = torch.randn((t.transpose(1, 2) if t.ndim == 4 else t).shape).to(t.dtype)
    return whole.transpose(1, 2) if t.ndim == 4 else whole

def same(kernel, plain, *given):
    '''What both make of it, and of the gradients that come back.'''
    found, back = [], None
    for form in (kernel, plain):
        leaves = [t.clone().requires_grad_() for t in given]
        out = form(*leaves)
        back = back or [coming(t) for t in out]
        torch.autograd.backward(out, back)
        found.append([*out, *(t.grad for t in leaves)])
    for got, want in zip(*found, strict=True):
        rtol, atol = (1e-4, 3e-5) if want.dtype == torch.float32 else (0.02, 0.02 * want.abs().max().item())
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol)
"""

SWIGLU = """
from pipeline.model.ffn import activate
from pipeline.model.kernels import swiglu
for dtype in DTYPES:
    for shape in ((3, 5), (7, 352), (2, 3, 331)):
        x = torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)
        same(lambda x: [swiglu(x)], lambda x: [activate(x, "swiglu")], x)
"""

TURN = """
from pipeline.model.kernels import norm_and_rotate
from pipeline.model.position import rotate
from torch.nn.functional import rms_norm

def plain(x, H, gains, table):
    G = (x.shape[2] - H) // 2
    q, k, v = x.split((H, G, G), dim=2)
    q, k = (t if gain is None else rms_norm(t, gain.shape, gain, 1e-6) for t, gain in zip((q, k), gains or (None,) * 2))
    return rotate(q, table), rotate(k, table), v

for dtype, shapes in zip(DTYPES, (((1, 5, 2, 1, 16), (2, 40, 2, 2, 64), (1, 23, 6, 3, 32)), ((2, 23, 6, 3, 16),))):
    for B, S, H, G, D in shapes:
        x, gains = torch.randn(B, S, H + 2 * G, D).to(dtype), [torch.randn(D).to(dtype) for _ in "qk"]
        for places in ((S,), (B, S), None):
            table = None if places is None else tuple(torch.randn(*places, D // 2) for _ in "cs")
            same(lambda x, *g: norm_and_rotate(x, H, g, 1e-6, table), lambda x, *g: plain(x, H, g, table), x, *gains)
            same(lambda x: norm_and_rotate(x, H, None, 1e-6, table), lambda x: plain(x, H, None, table), x)
"""

NORM = """
from pipeline.model import kernels
from pipeline.model.norm import StreamNorm
kernels._PROGRAMS = 4  # so that each takes several rows

def plain(x, y, gain):
    return torch.func.functional_call(StreamNorm(len(gain), 1e-6), {"gain": gain}, (x, y))

def kernel(x, y, gain):
    return kernels.add_norm(x, y, gain, 1e-6)

for dtype, shapes in zip(DTYPES, (((3, 5), (2, 37, 96), (1, 768), (2, 5000)), ((2, 19, 96), (3, 5)))):
    for shape in shapes:
        x, y, gain = (torch.randn(*size).to(dtype) for size in (shape, shape, shape[-1:]))
        same(kernel, plain, x, y, gain)
        same(lambda x, gain: kernel(x, None, gain), lambda x, gain: plain(x, None, gain), x, gain)
        same(lambda *given: kernel(*given)[1:], lambda *given: plain(*given)[1:], x, y, gain)  # the sum goes no further
"""

LOSS = """
from pipeline.objective import loss, loss_kernel

def form(terms, targets, z_loss, chunk):
    def run(h, weight):
        loss.terms = terms
        return [sum(loss.next_token_loss(h, weight, targets, z_loss=z_loss, chunk=chunk))]
    return run

for dtype in DTYPES:
    for tokens, vocab, chunk in ((5, 50, 2), (3, 4096, 3), (3, 9001, 2), (2, 20000, 8)):
        h, weight, targets = 3 * torch.randn(tokens, 4), torch.randn(vocab, 4), torch.randint(vocab, (tokens,))
        targets[1] = -1  # predicts nothing
        for z_loss in (0.0, 1e-2):
            ways = (form(terms, targets, z_loss, chunk) for terms in (loss_kernel.cross_entropy, loss.eager_terms))
            same(*ways, h.to(dtype), weight.to(dtype))
"""


@pytest.mark.parametrize(
    "script", [SWIGLU, TURN, NORM, LOSS], ids=["swiglu", "turn", "norm", "loss"]
)
def test_a_kernel_equals_plain_torch(script: str):
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", FIRST + script], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
