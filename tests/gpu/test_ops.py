"""Triton kernels, FlexAttention and fp8 against plain torch, forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.model.attention import Scoring, attend, eager
from pipeline.model.context import make_mask
from pipeline.model.fp8 import Float8Linear, convert_to_fp8
from pipeline.model.position import alibi, distances, rotate
from pipeline.objective.loss import eager_terms, next_token_loss
from pipeline.objective.loss_kernel import cross_entropy

DEVICE = "cuda"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def compare(fast, plain, *inputs: Tensor) -> None:
    """Outputs and input gradients of two functions; the plain one computes in fp32."""
    found = []
    grads = None
    for function, dtype in ((fast, None), (plain, torch.float32)):
        leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in inputs]
        outputs = function(*leaves)
        grads = grads or [torch.randn_like(out) for out in outputs]
        torch.autograd.backward(
            outputs, [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)]
        )
        found.append([*outputs, *(leaf.grad for leaf in leaves)])
    rtol = 1e-4 if inputs[0].dtype == torch.float32 else 0.02
    for got, want in zip(*found, strict=True):
        largest = float(want.abs().max())
        torch.testing.assert_close(got.float(), want, rtol=rtol, atol=rtol * largest)


def plain_swiglu(x: Tensor) -> list[Tensor]:
    gate, up = x.chunk(2, dim=-1)
    return [F.silu(gate) * up]


@dtypes
@pytest.mark.parametrize("shape", [(3, 10), (7, 704), (2, 300, 5504)])
def test_swiglu(dtype, shape):
    from pipeline.model.kernels import swiglu

    compare(lambda x: [swiglu(x)], plain_swiglu, randn(*shape, dtype=dtype))


@dtypes
def test_gelu(dtype):
    from pipeline.model.kernels import gelu

    x = 4 * randn(300, 3072, dtype=dtype)
    compare(lambda x: [gelu(x)], lambda x: [torch.nn.functional.gelu(x)], x)


@dtypes
@pytest.mark.parametrize("shape", [(3, 5), (2, 37, 96), (4, 512, 2048), (2, 5000)])
def test_add_norm(dtype, shape):
    from pipeline.model.kernels import add_norm

    def plain(x, gain, y=None):
        x = x if y is None else x + y
        return [x, F.rms_norm(x, gain.shape, gain, 1e-6)]

    x, y, gain = (randn(*size, dtype=dtype) for size in (shape, shape, shape[-1:]))
    compare(lambda x, gain, y: add_norm(x, y, gain, 1e-6), plain, x, gain, y)
    compare(lambda x, gain: add_norm(x, None, gain, 1e-6), plain, x, gain)


@dtypes
@pytest.mark.parametrize("normed", [True, False], ids=["norm", "no norm"])
@pytest.mark.parametrize("rows", [None, 1, 2], ids=["no table", "shared table", "table per row"])
def test_norm_and_rotate(dtype, normed, rows):
    from pipeline.model.rotary_kernel import norm_and_rotate

    heads, groups, dim, seq = 6, 3, 64, 130
    places = () if rows == 1 else (2,)
    table = None
    if rows is not None:
        angle = torch.rand(*places, seq, dim // 2, device=DEVICE) * 6
        table = (angle.cos(), angle.sin())

    def plain(x, *gains):
        q, k, v = x.split((heads, groups, groups), dim=2)
        if gains:
            q, k = (F.rms_norm(t, (dim,), g, 1e-6) for t, g in zip((q, k), gains, strict=True))
        return rotate(q, table), rotate(k, table), v

    gains = [randn(dim, dtype=dtype) for _ in "qk"] if normed else []
    x = randn(2, seq, heads + 2 * groups, dim, dtype=dtype)
    fast = lambda x, *gains: norm_and_rotate(x, heads, gains or None, 1e-6, table)  # noqa: E731
    compare(fast, plain, x, *gains)


@dtypes
@pytest.mark.parametrize("vocab", [50, 9001, 32768])
@pytest.mark.parametrize("softcap", [None, 5.0, 60.0])
def test_cross_entropy(dtype, vocab, softcap):
    logits = 3 * randn(33, vocab, dtype=dtype)
    targets = torch.randint(vocab, (33,), device=DEVICE)
    share = torch.rand(33, device=DEVICE) / 33
    want = eager_terms(logits.float(), targets, share, 1e-3, softcap)
    got = cross_entropy(logits.clone(), targets, share, 1e-3, softcap)  # overwrites its logits
    tolerance = 1e-4 if dtype == torch.float32 else 0.02
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(
            a.float(), b, rtol=tolerance, atol=tolerance * float(b.abs().max())
        )


def test_the_chunked_loss_equals_the_one_of_a_cpu():
    h, weight = randn(70, 64), randn(1000, 64)
    targets = torch.randint(1000, (70,), device=DEVICE)
    targets[5] = -100
    found = []
    for device in (DEVICE, "cpu"):
        leaves = [t.detach().to(device).requires_grad_() for t in (h, weight)]
        total, nll = next_token_loss(*leaves, targets.to(device), z_loss=1e-3, chunk=32)
        total.backward()
        found.append([total, nll, *(leaf.grad for leaf in leaves)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-3, atol=1e-5)


SEQ = 384
DOCUMENTS = (torch.arange(SEQ) // torch.tensor([[100], [250]])).long()
MASKS = {
    "causal": {},
    "window": {"window": 100},
    "documents": {"documents_BK": DOCUMENTS},
    "window and documents": {"window": 100, "documents_BK": DOCUMENTS},
}


@pytest.mark.parametrize("shaped", [False, True], ids=["plain", "soft-cap, bias and sinks"])
@pytest.mark.parametrize("how", MASKS)
def test_flex_attention(how, shaped):
    device = torch.device(DEVICE)
    given = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in MASKS[how].items()}
    dense = make_mask(SEQ, SEQ, device, **given)
    flex = make_mask(SEQ, SEQ, device, **given, flex=True)
    bias = alibi(distances(SEQ, SEQ, device), 4) if shaped else None
    sinks = randn(4) if shaped else None
    compiled = torch.compile(attend)
    fast_scoring, scoring = (
        Scoring(0.2, 5.0 if shaped else None, m, bias, sinks) for m in (flex, dense)
    )
    fast = lambda q, k, v: [compiled(q, k, v, fast_scoring)]  # noqa: E731
    plain = lambda q, k, v: [eager(q, k, v, scoring)]  # noqa: E731
    q, k, v = (randn(2, heads, SEQ, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    compare(fast, plain, q, k, v)


def test_attention_with_a_trained_bias():
    bias = randn(4, SEQ, SEQ, dtype=torch.bfloat16)
    q, k, v = (randn(2, SEQ, 4, 64, dtype=torch.bfloat16).transpose(1, 2) for _ in "qkv")
    compiled = torch.compile(attend)
    fast, plain = (
        lambda q, k, v, b, f=f: [f(q, k, v, Scoring(1.0, mask="all", bias_HQK=b))]
        for f in (compiled, eager)
    )
    compare(fast, plain, q, k, v, bias)


def test_fp8_is_near_bf16():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8 matmuls")
    plain = nn.Linear(512, 1024, device=DEVICE, dtype=torch.bfloat16)
    eight = nn.Linear(512, 1024, device=DEVICE, dtype=torch.bfloat16)
    eight.load_state_dict(plain.state_dict())
    assert convert_to_fp8(eight) == 1 and isinstance(eight, Float8Linear)
    inputs = randn(4, 64, 512, dtype=torch.bfloat16)
    grad = randn(4, 64, 1024, dtype=torch.bfloat16) * 1e-3
    found = []
    for layer in (plain, torch.compile(eight)):
        x = inputs.clone().requires_grad_()
        y = layer(x)
        y.backward(grad)
        found.append((y, x.grad))
    pairs = [*zip(*found, strict=True), (plain.weight.grad, eight.weight.grad)]
    for a, b in pairs:
        assert 1e-4 < (a - b).float().norm() / a.float().norm() < 0.08
