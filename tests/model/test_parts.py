"""Small parts against their definitions, and that each setting reaches the forward pass."""

import math

import pytest
import torch

from pipeline.model.context import Context
from pipeline.model.ffn import activate
from pipeline.model.norm import add_and_norm
from pipeline.model.position import sinusoidal
from pipeline.model.side import Seen
from tests.model.test_decode import KINDS, MOE, made, prompts


def test_activations_have_their_closed_forms():
    x = [-2.5, -1.0, -0.1, 0.0, 0.3, 1.7]
    up = [0.5, -2.0, 1.0, 3.0, -1.5, 0.7]
    sigmoid = lambda v: 1 / (1 + math.exp(-v))  # noqa: E731
    plain = {
        "relu": lambda v: max(v, 0.0),
        "relu2": lambda v: max(v, 0.0) ** 2,
        "gelu": lambda v: v * 0.5 * (1 + math.erf(v / math.sqrt(2))),
        "gelu_tanh": lambda v: (
            0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
        ),
        "silu": lambda v: v * sigmoid(v),
    }
    gates = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
    for kind, form in plain.items():
        torch.testing.assert_close(
            activate(torch.tensor(x), kind), torch.tensor([form(v) for v in x]), msg=kind
        )
    for kind, gate in gates.items():
        expected = torch.tensor([plain[gate](v) * u for v, u in zip(x, up, strict=True)])
        torch.testing.assert_close(activate(torch.tensor(x + up), kind), expected, msg=kind)


def test_sinusoidal_positions_are_the_papers():
    table = sinusoidal(torch.arange(50), 16)
    for place, pair in [(0, 0), (3, 0), (7, 2), (49, 7)]:
        angle = place / 10000 ** (2 * pair / 16)
        assert table[place, 2 * pair].item() == pytest.approx(math.sin(angle), abs=1e-5)
        assert table[place, 2 * pair + 1].item() == pytest.approx(math.cos(angle), abs=1e-5)


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_multipliers_scale_the_embedding_and_the_logits(tied):
    tokens = torch.tensor(prompts(9))
    scaled, plain = (
        made(tied=tied, multipliers=m)
        for m in ({"embedding": 3.0, "logits": 0.5}, {"embedding": 1.0, "logits": 1.0})
    )
    if tied:
        plain.head.weight = torch.nn.Parameter(plain.embedding.weight.clone())
    plain.embedding.weight.mul_(3.0)
    plain.head.weight.mul_(0.5)
    torch.testing.assert_close(scaled(tokens), plain(tokens), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_layers_take_position_and_window_in_turn():
    """Of four layers, every second has no position and every third attends beyond the window."""
    attention = {**KINDS["gqa"], "window": 3, "global_every": 3}
    model = made(layers=4, nope_every=2, attention=attention)
    tokens = torch.tensor(prompts(12))
    _, context = model.context(tokens, Seen())
    x = model.embedding(tokens)
    for layer, block in enumerate(model.blocks):
        mask = context.far if layer == 2 else context.near
        rotary = context.rotary if layer in (0, 2) else None
        x = sum(block(x, None, Context(rotary, None, mask, mask, rotary))[:2])
    torch.testing.assert_close(
        add_and_norm(model.norm, x, None)[1] @ model.head.weight.T, model(tokens)
    )
    assert context.near[0, 0].sum(-1).tolist() == [1, 2, *[3] * 10] and context.far is None


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_deepnorm_shrinks_values_outputs_and_ffn_at_the_start(kind):
    """arXiv 2203.00555, figure 2: β = (8·layers)^(-1/4) of a decoder, and 1 for queries and keys."""
    deep, plain = (made(kind, placement=p, layers=2, ffn=MOE) for p in ("deepnorm", "post"))
    beta = (8 * 2) ** -0.25
    a, b = deep.state_dict(), plain.state_dict()
    # All other placements start the outputs to the stream like this.
    output = 1 / math.sqrt(2 * 2)
    at = "blocks.1."
    for name, ratio in {"attention.out.weight": beta / output, "ffn.experts.up": beta, "ffn.shared.up.weight": beta,
                        "ffn.experts.out": beta / output, "ffn.router.weight": 1.0}.items():  # fmt: skip
        torch.testing.assert_close(a[at + name], ratio * b[at + name], msg=name)
    if kind == "gqa":
        ratio = (a[f"{at}attention.qkv.weight"] / b[f"{at}attention.qkv.weight"]).view(
            4 + 2 + 2, 8, -1
        )
        queries_and_keys, values = ratio[:6], ratio[6:]
    else:
        ratio = (a[f"{at}attention.kv_up.weight"] / b[f"{at}attention.kv_up.weight"]).view(
            4, 8 + 6, -1
        )
        queries_and_keys, values = ratio[:, :8], ratio[:, 8:]
        torch.testing.assert_close(a[f"{at}attention.q_up.weight"], b[f"{at}attention.q_up.weight"])
    torch.testing.assert_close(queries_and_keys, torch.ones_like(queries_and_keys))
    torch.testing.assert_close(values, torch.full_like(values, beta))
