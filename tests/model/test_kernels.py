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


def test_swiglus_backward():
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", SWIGLU], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
