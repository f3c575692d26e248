"""fp8 matmuls against exact products of the rounded numbers, and against products without rounding."""

import torch
from torch import nn

from pipeline.config.layers import load
from pipeline.model.build import build_model, init_weights
from pipeline.model.fp8 import Float8Linear, convert_to_fp8


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scale = torch.finfo(dtype).max / x.abs().max().double()
    return (x.double() * scale).float().to(dtype).double() / scale


def test_a_layer_multiplies_rounded_numbers_exactly_and_stays_near_the_unrounded():
    torch.manual_seed(0)
    plain, x = nn.Linear(64, 48), torch.randn(2, 32, 64)
    eight = nn.Linear(64, 48)
    eight.load_state_dict(plain.state_dict())
    convert_to_fp8(eight)
    assert isinstance(eight, Float8Linear)
    grad = torch.randn(2, 32, 48) * 1e-3
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for layer, leaf in zip((plain, eight), inputs, strict=True):
        layer(leaf).backward(grad)
    x8, w8, g8 = (
        rounded(t.detach().flatten(0, -2), dtype)
        for t, dtype in (
            (x, torch.float8_e4m3fn),
            (plain.weight, torch.float8_e4m3fn),
            (grad, torch.float8_e5m2),
        )
    )
    exact = (x8 @ w8.T + plain.bias.double()).view(2, 32, 48)
    torch.testing.assert_close(eight(x).double(), exact, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(inputs[1].grad.double(), (g8 @ w8).view_as(x), atol=1e-8, rtol=1e-5)
    torch.testing.assert_close(eight.weight.grad.double(), g8.T @ x8, atol=1e-8, rtol=1e-5)
    for a, b in (
        (inputs[0].grad, inputs[1].grad),
        (plain.weight.grad, eight.weight.grad),
        (plain(x), eight(x)),
    ):
        assert 1e-4 < (a - b).norm() / a.norm() < 0.08


def test_a_decoder_converts_and_keeps_its_loss():
    sets = ["recipe=adamw", "model.vocab=256", "model.seq=32"]  # outputs that are not zero
    cfg = load(size="tiny", arch="mla-moe", sets=sets).model
    losses = []
    for eight in (False, True):
        model = build_model(cfg)
        init_weights(model, cfg, 1)
        if eight:
            convert_to_fp8(model)
            assert (
                sum(isinstance(layer, Float8Linear) for layer in model.modules()) >= 4 * cfg.layers
            )
        tokens = torch.arange(65).view(1, 65) % 256
        losses.append(model(tokens[:, :32], tokens[:, 1:33]).nll.item())
    assert 0 < abs(losses[0] - losses[1]) < 0.02
