"""Routing, experts, further tokens and norm placement, each against a computation written out by hand."""

import math

import pytest
import torch
import torch.nn.functional as F

from pipeline.config.parts import MoE
from pipeline.model.ffn import activate
from pipeline.model.moe import MixtureOfExperts
from pipeline.model.norm import add_and_norm
from pipeline.model.side import Seen
from tests.model.test_decode import made, prompts

BASE = {"activation": "swiglu", "hidden": 16, "dense_hidden": 24, "experts": 8, "top_k": 2}


def routed(seed=0, **more) -> MixtureOfExperts:
    cfg = MoE.model_validate({**BASE, **more})
    layer = MixtureOfExperts(12, cfg, range(cfg.experts))
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(0, 0.5, generator=g)
    return layer


def inputs(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def looped(experts, rows_NW, load_E):
    parts = zip(torch.split(rows_NW, load_E.tolist()), experts.up, experts.out, strict=True)
    return torch.cat([activate(x @ up, experts.activation) @ out for x, up, out in parts])


@pytest.mark.parametrize("activation", ["swiglu", "relu"])
def test_grouped_experts_equal_the_loop(activation):
    layer, load = routed(activation=activation), torch.tensor([3, 0, 5, 1, 0, 4, 2, 5])
    rows = inputs(20, 12)
    results = []
    for run in (layer.experts, lambda x, n: looped(layer.experts, x, n)):
        x = rows.clone().requires_grad_()
        layer.zero_grad()
        y = run(x, load)
        y.square().sum().backward()
        results.append([y, x.grad, layer.experts.up.grad.clone(), layer.experts.out.grad.clone()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_layer_is_the_weighted_sum_of_its_tokens_experts(router, normalize):
    layer = routed(router=router, normalize=normalize, shared=1, scale=2.5, top_k=3)
    x = inputs(2, 5, 12)
    out, routing = layer(x)
    expected = []
    for token in x.flatten(0, 1):
        logits = layer.router.weight @ token
        scores = logits.softmax(0) if router == "softmax" else logits.sigmoid()
        best = scores.argsort(descending=True)[:3]
        weights = scores[best] / (scores[best].sum() if normalize else 1.0)
        y = layer.shared(token)
        for weight, e in zip(weights, best, strict=True):
            gate, up = (token @ layer.experts.up[e]).chunk(2)
            y = y + 2.5 * weight * ((F.silu(gate) * up) @ layer.experts.out[e])
        expected.append(y)
    torch.testing.assert_close(out.flatten(0, 1), torch.stack(expected), atol=1e-4, rtol=1e-4)
    assert int(routing.load_E.sum()) == 2 * 5 * 3


def test_capacity_drops_the_last_rows_of_each_sequence():
    layer = routed(top_k=1, capacity=1.0, experts=4, normalize=False)
    x = inputs(3, 8, 12)
    with torch.no_grad():
        out, routing = layer(x)
        chosen = (x @ layer.router.weight.T).argmax(-1)
        dropped = 0
        for row in range(3):
            free = [math.ceil(1.0 * 8 / 4)] * 4
            for place in range(8):
                e = int(chosen[row, place])
                free[e] -= 1
                kept = free[e] >= 0
                dropped += not kept
                assert bool(out[row, place].abs().sum() > 0) == kept
    assert dropped and float(routing.dropped) == pytest.approx(dropped / 24)


def test_a_token_chooses_within_its_best_groups():
    for router, best in (("softmax", 1), ("sigmoid", 2)):
        layer = routed(router=router, groups=4, top_groups=2, top_k=3)
        x = inputs(1, 40, 12)
        choice, _ = layer.router(x)
        scores = x[0] @ layer.router.weight.detach().T
        scores = scores.softmax(-1) if router == "softmax" else scores.sigmoid()
        outside = 0
        for token, experts in zip(scores, choice.experts_TK, strict=True):
            rank = token.view(4, 2).sort(descending=True).values[:, :best].sum(1)
            groups = set(rank.argsort(descending=True)[:2].tolist())
            allowed = [e for e in range(8) if e // 2 in groups]
            assert set(experts.tolist()) == set(sorted(allowed, key=lambda e: -float(token[e]))[:3])
            outside += set(experts.tolist()) != set(token.argsort(descending=True)[:3].tolist())
        assert outside, "the limit never bound"


def test_the_balancing_bias_evens_a_skewed_load_and_changes_no_weight():
    layer = routed(router="sigmoid", bias_step=0.005, normalize=False)
    x = inputs(4, 64, 12) + 0.7
    loads = []
    for _ in range(200):
        choice, routing = layer.router(x)
        scores = (x.flatten(0, 1) @ layer.router.weight.T).sigmoid()
        torch.testing.assert_close(choice.weights_TK, scores.gather(1, choice.experts_TK))
        layer.router.balance(routing.load_E)
        loads.append(float(routing.load_E.max() / routing.load_E.mean()))
    assert loads[0] > 1.8 and loads[-1] < 1.2, (loads[0], loads[-1])


def test_balance_losses_have_their_closed_forms():
    x = inputs(2, 6, 12)
    logits = x @ routed().router.weight.T
    chance = logits.softmax(-1)
    # Shares of a token's choices, (B, S, E).
    share = F.one_hot(logits.topk(2).indices, 8).sum(2).float() / 2
    forms = {
        "aux_loss": 8 * (share.mean((0, 1)) * chance.mean((0, 1))).sum(),
        "seq_aux_loss": (8 * (share.mean(1) * chance.mean(1)).sum(-1)).mean(),
        "z_loss": logits.logsumexp(-1).square().mean(),
    }
    for key, form in forms.items():
        _, routing = routed(**{key: 0.1}).router(x)
        torch.testing.assert_close(routing.loss, 0.1 * form)
    even = routed(aux_loss=1.0)
    with torch.no_grad():
        even.router.weight.zero_()
    # Even chances: 1, whatever was chosen.
    assert float(even.router(x)[1].loss) == pytest.approx(1.0)
    entropy = -(chance * chance.log()).sum(-1).mean()
    torch.testing.assert_close(routed().router(x)[1].entropy, entropy)


def test_further_tokens_are_predicted_as_in_the_paper():
    """arXiv 2412.19437, eq. 21–25, for two further tokens."""
    model = made(mtp=2, mtp_weight=0.3).train()
    tokens = torch.tensor(prompts(13, 13))
    inputs_, targets = tokens[:, :-1], tokens[:, 1:]
    losses = model(inputs_, targets)
    _, context = model.context(inputs_, Seen())
    h = model.embedding(inputs_)
    for block in model.blocks:
        h = sum(block(h, None, context)[:2])
    main = F.cross_entropy(
        (add_and_norm(model.norm, h, None)[1] @ model.head.weight.T).flatten(0, 1),
        targets.flatten(),
    )
    further = []
    for depth, ahead in enumerate(model.ahead, start=1):
        # The depth-th next token of every place.
        known = torch.cat((tokens[:, depth:-1], tokens[:, -depth:]), 1)
        h = ahead.join(torch.cat((ahead.h_norm(h), ahead.e_norm(model.embedding(known))), -1))
        h = sum(ahead.block(h, None, context)[:2])
        places = tokens.shape[1] - 1 - depth  # those whose answer exists
        logits = add_and_norm(ahead.norm, h[:, :places], None)[1] @ model.head.weight.T
        further.append(F.cross_entropy(logits.flatten(0, 1), tokens[:, depth + 1 :].flatten()))
    torch.testing.assert_close(losses.nll, main, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(losses.total, main + 0.3 / 2 * sum(further), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(inputs_, targets).total, main, atol=1e-5, rtol=1e-5)


def test_further_tokens_are_predicted_from_a_prompt_without_targets():
    model = made(mtp=2, mtp_weight=0.3).train()
    tokens = torch.tensor(prompts(13, 13))
    read = []
    for ahead in model.ahead:
        ahead.e_norm.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0][:, :10]))
    targets = tokens[:, 1:]
    model(tokens[:, :-1], targets)
    model(tokens[:, :-1], torch.where(torch.arange(12) < 6, -100, targets))
    torch.testing.assert_close(read[2:], read[:2], atol=0, rtol=0)


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "deepnorm"])
def test_norms_are_placed_correctly(placement):
    model = made(placement=placement, multipliers={"residual": 0.7})
    block = model.blocks[0]
    x = inputs(1, 6, 32)
    _, context = model.context(torch.zeros(1, 6, dtype=torch.long), Seen())
    rms = lambda t: t * torch.rsqrt(t.square().mean(-1, keepdim=True) + 1e-6)  # noqa: E731

    def by_hand(x, layer):
        match placement:
            case "pre":
                return x + 0.7 * layer(rms(x))
            case "post":
                return rms(x + 0.7 * layer(x))
            case "sandwich":
                return x + 0.7 * rms(layer(rms(x)))
            case "deepnorm":
                return rms((2 * 2) ** 0.25 * x + 0.7 * layer(x))

    expected = by_hand(by_hand(x, lambda t: block.attention(t, context)), block.ffn)
    stream, given, _ = block(x, None, context)
    assert (given is None) == (placement in ("post", "deepnorm"))  # they norm the sum itself
    torch.testing.assert_close(
        stream if given is None else stream + given, expected, atol=1e-4, rtol=1e-4
    )
    assert isinstance(model.norm, torch.nn.Identity) == (placement in ("post", "deepnorm"))


def test_a_parallel_block_reads_one_normed_input():
    model = made(parallel_block=True)
    block, x = model.blocks[0], inputs(1, 6, 32)
    _, context = model.context(torch.zeros(1, 6, dtype=torch.long), Seen())
    _, normed = block.at_attention.read(x, None)
    torch.testing.assert_close(
        sum(block(x, None, context)[:2]), x + block.attention(normed, context) + block.ffn(normed)
    )
