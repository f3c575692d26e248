"""The chunked loss against the plain one in double precision."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.objective.loss import next_token_loss


def plain(h, weight, targets, z_loss, softcap, smoothing):
    logits = h @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    nll = F.cross_entropy(logits, targets)  # ignores −100
    smooth = F.cross_entropy(logits, targets, label_smoothing=smoothing)
    return smooth + z_loss * logits.logsumexp(-1)[targets >= 0].square().mean(), nll


@pytest.mark.parametrize("chunk", [1, 7, 32, 1000])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("ignored", [0, 9])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradients_equal_the_plain_ones(chunk, z_loss, ignored, softcap, smoothing):
    g = torch.Generator().manual_seed(0)
    h, weight = torch.randn(32, 16, generator=g), torch.randn(50, 16, generator=g)
    targets = torch.randint(50, (32,), generator=g)
    targets[3 : 3 + ignored] = -100
    ours, theirs = (
        (h.clone().requires_grad_(), weight.clone().requires_grad_()),
        (h.double().requires_grad_(), weight.double().requires_grad_()),
    )
    options = {"z_loss": z_loss, "softcap": softcap, "smoothing": smoothing}
    total, nll = next_token_loss(*ours, targets, chunk=chunk, **options)
    want_total, want_nll = plain(*theirs, targets, z_loss, softcap, smoothing)
    torch.testing.assert_close(total.double(), want_total, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(nll.double(), want_nll.detach(), atol=1e-5, rtol=1e-6)
    (3 * total).backward()  # gradient accumulation scales gradients
    (3 * want_total).backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, atol=1e-6, rtol=1e-5)


class Largest(TorchDispatchMode):
    """Record the largest number of elements that any operation returned."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            self.seen = max(self.seen, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
        return out


@pytest.mark.parametrize(("chunk", "most"), [(8, 8 * 500), (1000, 64 * 500)])
def test_logits_exist_one_chunk_at_a_time_forward_and_backward(chunk, most):
    h, weight = torch.randn(64, 4, requires_grad=True), torch.randn(500, 4, requires_grad=True)
    with Largest() as largest:
        total, _ = next_token_loss(h, weight, torch.arange(64), z_loss=1e-3, chunk=chunk)
        total.backward()
    assert largest.seen == most


def test_without_gradients_nothing_is_kept_for_them():
    h, weight = torch.randn(8, 4), torch.randn(10, 4)
    with torch.no_grad():
        total, nll = next_token_loss(
            h, weight, torch.zeros(8, dtype=torch.long), z_loss=0.0, chunk=3
        )
    assert not total.requires_grad and total == nll


def test_bf16_stays_near_fp32():
    g = torch.Generator().manual_seed(1)
    h, weight = torch.randn(64, 32, generator=g), torch.randn(100, 32, generator=g) * 0.2
    targets = torch.randint(100, (64,), generator=g)
    _, exact = next_token_loss(h, weight, targets, z_loss=0.0, chunk=16)
    _, rough = next_token_loss(h.bfloat16(), weight.bfloat16(), targets, z_loss=0.0, chunk=16)
    assert rough.dtype == torch.float32 and abs(rough - exact) < 2e-2
