"""`TRITON_INTERPRET=1 python -m tests.model.interpreted`: each Triton kernel against the plain torch
that it replaces, called as the model calls it, in both dtypes and in sizes that fill no block.

A separate process, because Triton reads the variable once, when it is imported.
"""

import torch
from torch import Tensor, library
from torch.nn.functional import rms_norm

library.wrap_triton = lambda kernel: kernel  # straight to the interpreter

from pipeline.config.parts import Norm  # noqa: E402
from pipeline.model import bias_kernel, kernels, rotary_kernel  # noqa: E402
from pipeline.model.attention import Scoring, eager  # noqa: E402
from pipeline.model.ffn import activate  # noqa: E402
from pipeline.model.norm import StreamNorm  # noqa: E402
from pipeline.model.position import rotate  # noqa: E402
from pipeline.objective import loss, loss_kernel  # noqa: E402

FP32 = torch.float32
BF16 = torch.bfloat16


def incoming(t: Tensor) -> Tensor:
    """A gradient. Attention returns its own with the heads before the sequence."""
    if t.ndim != 4:
        return torch.randn(t.shape).to(t.dtype)
    return torch.randn(t.transpose(1, 2).shape).to(t.dtype).transpose(1, 2)


def same(kernel, plain, *inputs: Tensor) -> None:
    """Compare the outputs and the gradients of the inputs."""
    found = []
    gradients = None
    for form in (kernel, plain):
        leaves = [t.clone().requires_grad_() for t in inputs]
        outputs = form(*leaves)
        gradients = gradients or [incoming(t) for t in outputs]
        torch.autograd.backward(outputs, gradients)
        found.append([*outputs, *(t.grad for t in leaves)])
    for got, want in zip(*found, strict=True):
        fp32 = want.dtype == FP32
        atol = 3e-5 if fp32 else 0.02 * want.abs().max().item()
        torch.testing.assert_close(got, want, rtol=1e-4 if fp32 else 0.02, atol=atol)


def swiglu(dtype: torch.dtype) -> None:
    for shape in ((3, 5), (7, 352), (2, 3, 331)):
        x = torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)
        same(lambda x: [kernels.swiglu(x)], lambda x: [activate(x, "swiglu")], x)


def gelu(dtype: torch.dtype) -> None:
    x = 4 * torch.randn(3, 700).to(dtype)
    same(lambda x: [kernels.gelu(x)], lambda x: [activate(x, "gelu")], x)


def norm_and_rotate(dtype: torch.dtype) -> None:
    """Norms with gains, without gains, and no norm; tables per row, for all rows, and none."""
    for B, S, H, G, D in ((1, 5, 2, 1, 16), (2, 9, 6, 3, 32)):
        x = torch.randn(B, S, H + 2 * G, D).to(dtype)
        gains = [torch.randn(D).to(dtype) for _ in "qk"]
        for places in ((S,), (B, S), None):
            table = None
            if places:
                table = tuple(torch.randn(*places, D // 2) for _ in ("cos", "sin"))
            for scales in (gains, (None, None), None):
                kernel, plain = turns(H, G, table, scales)
                same(kernel, plain, x, *(gains if scales is gains else ()))


def turns(H: int, G: int, table, scales):
    """The kernel and its twin, as functions of the projections and of the gains if there are any."""

    def kernel(x: Tensor, *gains: Tensor):
        return rotary_kernel.norm_and_rotate(x, H, gains or scales, 1e-6, table)

    def plain(x: Tensor, *gains: Tensor):
        q, k, v = x.split((H, G, G), dim=2)
        if scales is not None:
            pairs = zip((q, k), gains or scales, strict=True)
            q, k = (rms_norm(t, t.shape[-1:], gain, 1e-6) for t, gain in pairs)
        return rotate(q, table), rotate(k, table), v

    return kernel, plain


def bias_gradient(dtype: torch.dtype) -> None:
    """cuDNN, which computes the other gradients, exists on a GPU only. The interpreter multiplies
    matrices of fp16, but not of bf16."""
    dtype = torch.float16 if dtype == BF16 else dtype
    B, H, Q, K, D = 3, 2, 128, 256, 32
    q, k, v, g = (torch.randn(B, size, H, D).to(dtype).transpose(1, 2) for size in (Q, K, K, Q))
    bias = torch.randn(H, Q, K).to(dtype).requires_grad_()
    y = eager(q, k, v, Scoring(0.3, mask="all", bias_HQK=bias))
    y.backward(g)
    delta = (g.float() * y.float()).sum(-1)
    scores = 0.3 * (q.float() @ k.float().mT) + bias.float()
    lse = scores.logsumexp(-1)
    found = bias_kernel._bias_gradient(q, k, v, g, bias, lse.detach(), delta.detach(), 0.3)
    atol = (1e-4 if dtype == FP32 else 0.02) * bias.grad.abs().max().item()
    torch.testing.assert_close(found, bias.grad, rtol=0, atol=atol)


def add_norm(dtype: torch.dtype) -> None:
    kernels._PROGRAMS = 4  # so that each program has several rows

    def plain(x: Tensor, y: Tensor | None, gain: Tensor | None):
        norm = StreamNorm(x.shape[-1], Norm(gain=gain is not None))
        state = {} if gain is None else {"gain": gain}
        return torch.func.functional_call(norm, state, (x, y))

    def kernel(x: Tensor, y: Tensor | None, gain: Tensor | None):
        return kernels.add_norm(x, y, gain, 1e-6)

    shapes = [(3, 5), (2, 37, 96), (1, 768), (2, 5000)]
    for shape in shapes if dtype == FP32 else shapes[:2]:
        x, y, gain = (torch.randn(*size).to(dtype) for size in (shape, shape, shape[-1:]))
        same(kernel, plain, x, y, gain)
        same(lambda x, gain: kernel(x, None, gain), lambda x, gain: plain(x, None, gain), x, gain)
        same(lambda x, y: kernel(x, y, None), lambda x, y: plain(x, y, None), x, y)
        same(lambda x: kernel(x, None, None), lambda x: plain(x, None, None), x)
        # The last block's sum is used by nothing else.
        same(lambda *given: kernel(*given)[1:], lambda *given: plain(*given)[1:], x, y, gain)


def loss_with(terms, targets: Tensor, **options):
    """The loss of hidden states and head weights, with one of the two cross-entropies."""

    def form(h: Tensor, weight: Tensor) -> list[Tensor]:
        loss.eager_terms = terms
        return [sum(loss.next_token_loss(h, weight, targets, **options))]

    return form


def cross_entropy(dtype: torch.dtype) -> None:
    forms = (loss_kernel.cross_entropy, loss.eager_terms)
    for tokens, vocab, chunk in ((5, 50, 2), (3, 4096, 3), (3, 9001, 2), (2, 20000, 8)):
        h = 3 * torch.randn(tokens, 4)
        weight = torch.randn(vocab, 4)
        targets = torch.randint(vocab, (tokens,))
        targets[1] = -1  # predicts nothing
        cases = ((0.0, None, 0.0), (1e-2, None, 0.1), (1e-2, 5.0, 0.0), (0.0, 5.0, 0.3))
        for z_loss, softcap, smoothing in cases:
            options = {"z_loss": z_loss, "softcap": softcap, "smoothing": smoothing}
            kernel, plain = (loss_with(form, targets, chunk=chunk, **options) for form in forms)
            same(kernel, plain, h.to(dtype), weight.to(dtype))


if __name__ == "__main__":
    torch.manual_seed(0)
    for check in (swiglu, gelu, norm_and_rotate, bias_gradient, add_norm, cross_entropy):
        for dtype in (FP32, BF16):
            check(dtype)
            print(f"{check.__name__} {dtype}", flush=True)
