"""The parts that mix the stream, each against its formula in plain torch: losses, gradients, decoding, documents."""

import math

import pytest
import torch
import torch.nn.functional as F

from pipeline.config.layers import load
from pipeline.config.shape import Model
from pipeline.errors import ConfigError
from pipeline.model.build import build_model, init_weights
from pipeline.model.context import Cache
from pipeline.model.decode import beam_search, generate
from tests.model.test_decode import made

PARTS = {
    "none": {},
    "value embeddings": {"value_embeddings": 2},
    "value embeddings everywhere": {"value_embeddings": 1},
    "embedding norm": {"embedding_norm": True},
    "logit softcap": {"logit_softcap": 3.0},
    "norm without gain": {"norm": {"gain": False}},
    "residual scales": {"residual_scales": True},
    "smear": {"smear": True},
    "backout": {"backout": True},
}
PARTS["all"] = {key: value for part in PARTS.values() for key, value in part.items()}
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 5 + [2] * 3, [0] * 12])


def model_of(part, **more):
    """Three layers with grouped queries. Every parameter differs from its initial value."""
    model = made(layers=3, **{**PARTS[part], **more})
    with torch.no_grad():
        for name, p in model.named_parameters():
            generator = torch.Generator().manual_seed(len(name))
            p.add_(torch.randn(p.shape, generator=generator) * 0.2)
    return model


def tokens_of(rows=2, length=13):
    return torch.randint(50, (rows, length), generator=torch.Generator().manual_seed(0))


def rotated(x, places):
    """(B, S, H, D) in pairs of i and i + half, as complex numbers."""
    half = x.shape[-1] // 2
    pair = torch.complex(x[..., :half], x[..., half:])
    angle = places[:, :, None, None] * 1e4 ** -(torch.arange(half) / half)
    turned = pair * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), -1)


def reference(model: torch.nn.Module, tokens, documents):
    """Compute the logits from the parameters by name."""
    c: Model = model.cfg
    w = dict(model.named_parameters())
    norm = lambda x, name: F.rms_norm(x, x.shape[-1:], w.get(f"{name}.gain"), 1e-6)  # noqa: E731
    B, S = tokens.shape
    same = documents[:, :, None] == documents[:, None, :]
    seen = same & torch.ones(S, S, dtype=torch.bool).tril()
    places = seen.sum(-1) - 1
    x = w["embedding.weight"][tokens]
    if c.embedding_norm:
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    if c.smear:
        before = torch.zeros_like(x)
        before[:, 1:] = x[:, :-1] * same.diagonal(1, 1, 2).unsqueeze(-1)
        x = x + w["smear.scale"] * torch.sigmoid(x[..., :24] @ w["smear.gate.weight"].T) * before
    first = middle = x
    for layer in range(c.layers):
        at = f"blocks.{layer}."
        if c.residual_scales:
            x = w[f"{at}scales.stream"] * x + w[f"{at}scales.first"] * first
        y = norm(x, f"{at}at_attention.before")
        q, k, v = (y @ w[f"{at}attention.qkv.weight"].T).view(B, S, 8, 8).split((4, 2, 2), 2)
        if c.value_embeddings and (c.layers - 1 - layer) % c.value_embeddings == 0:
            gate = 3 * torch.sigmoid(y[..., :12] @ w[f"{at}attention.value_gate.weight"].T)
            v = v + gate[..., None] * w[f"value_embeddings.{layer}.weight"][tokens].view(B, S, 2, 8)
        q = rotated(norm(q, f"{at}attention.q_norm"), places)
        k = rotated(norm(k, f"{at}attention.k_norm"), places)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2))
        scores = scores * c.attention.score_scale / math.sqrt(8)
        weights = scores.masked_fill(~seen[:, None], -math.inf).softmax(-1)
        y = torch.einsum("bhqk,bkhd->bqhd", weights, v.repeat_interleave(2, 2)).flatten(2)
        x = x + y @ w[f"{at}attention.out.weight"].T
        gate, up = (norm(x, f"{at}at_ffn.before") @ w[f"{at}ffn.up.weight"].T).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ w[f"{at}ffn.out.weight"].T
        middle = x if layer == c.layers // 2 else middle
    if c.backout:
        x = x - w["backout.scale"] * middle
    logits = norm(x, "norm") @ w["head.weight"].T
    return logits if c.logit_softcap is None else c.logit_softcap * torch.tanh(
        logits / c.logit_softcap
    )  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("recompute", [False, "selective", True])
def test_loss_and_gradients_are_those_of_the_formula(part, recompute):
    """With documents, positions restart, and neither attention nor smear crosses their boundaries."""
    source = model_of(part, **({"attention": {**made().cfg.attention.model_dump(), "score_scale": 1.44}}
                               if part == "all" else {}))  # fmt: skip
    model = build_model(source.cfg, recompute=recompute, z_loss=1e-2, loss_chunk=5)
    model.load_state_dict(source.state_dict())
    tokens = tokens_of()
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    model(inputs, targets, DOCUMENTS).total.backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    logits = reference(model, inputs, DOCUMENTS)
    torch.testing.assert_close(model(inputs, None, DOCUMENTS), logits, atol=2e-5, rtol=1e-4)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    (loss + 1e-2 * logits.logsumexp(-1).square().mean()).backward()
    for name, p in model.named_parameters():
        atol = 1e-4 * p.grad.abs().max().item() + 1e-7
        torch.testing.assert_close(ours[name], p.grad, atol=atol, rtol=1e-3, msg=name)
        assert p.grad.abs().max() > 0, name


@pytest.mark.parametrize("part", PARTS)
@torch.no_grad()
def test_a_cached_step_equals_the_whole_forward_pass(part):
    """A prompt, a piece of three, then one token at a time; and beside it a row padded on the left."""
    model = model_of(part)
    tokens = tokens_of(2, 12)
    whole = model(tokens)
    alone = model(tokens[1:, 3:])
    cache = Cache(3, 12, torch.tensor([0, 3]))
    ends = [4, 7, 8, 9, 10, 11, 12]
    got = [model(tokens[:, a:b], cache=cache) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    at = torch.tensor(ends) - 1
    torch.testing.assert_close(torch.cat(got, 1)[0], whole[0, at], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat(got, 1)[1], alone[0, at - 3], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_beams_carry_their_own_last_token():
    model = model_of("all")
    prompt = tokens_of(1, 6)[0].tolist()
    best = beam_search(model, prompt, 5, None, 50**2)[0]  # wide enough to be exhaustive at first
    picked = generate(model, [prompt], 5)[0]
    for beam in (best.tokens, picked):
        likely = model(torch.tensor([prompt + list(beam)])).log_softmax(-1)[0, 5:-1]
        score = sum(likely[i, token].item() for i, token in enumerate(beam))
        assert score <= best.score + 1e-3
    # Greedy takes the largest each time.
    assert score == pytest.approx(sum(likely[i].max().item() for i in range(5)), abs=1e-3)


@torch.no_grad()
def test_the_leading_architecture_starts_as_it_was_measured():
    """Embedding 0.8, head 0.001, matrices 1/√width and up-projections 0.4 of it, gates and outputs 0."""
    cfg = load(size="1m", arch="isoflop", sets=["model.vocab=512"]).model
    model = build_model(cfg)
    init_weights(model, cfg, 0)
    width = cfg.width
    expected = {
        "embedding.weight": 0.8,
        "head.weight": 0.001,
        "value_embeddings.1.weight": width**-0.5,
        "blocks.1.attention.qkv.weight": width**-0.5,
        "blocks.1.ffn.up.weight": 0.4 * width**-0.5,
        "blocks.1.ffn.out.weight": 0.0,
        "blocks.1.attention.out.weight": 0.0,
        "blocks.1.attention.value_gate.weight": 0.0,
        "smear.gate.weight": 0.0,
    }
    state = model.state_dict()
    for name, std in expected.items():
        assert state[name].std().item() == pytest.approx(std, rel=0.05), name
    assert state["smear.scale"] == 0 and state["backout.scale"].item() == pytest.approx(0.2)
    assert not any(name.endswith("gain") for name in state)
    # Every block is the identity, and the head almost 0: each token is as likely as any other.
    tokens = tokens_of(2, 33)
    loss = model(tokens[:, :-1], tokens[:, 1:]).nll.item()
    assert loss == pytest.approx(math.log(512), rel=1e-3)


@pytest.mark.parametrize(
    ("arch", "sets", "message"),
    [
        ("mla", ["value_embeddings=2"], 'needs attention.kind="gqa"'),
        ("isoflop", ['parametrization="mup"'], 'init="fan_in"'),
        ("isoflop", ["scaled_embedding=true"], "embedding_std"),
        ("gpt2", ["norm.gain=false"], "bias=false"),
    ],
)
def test_impossible_combinations_are_refused_with_a_remedy(arch, sets, message):
    with pytest.raises(ConfigError) as refused:
        load(size="tiny", arch=arch, sets=[f"model.{each}" for each in sets])
    assert message in str(refused.value) and "\n" not in str(refused.value)
