"""Decoding with a cache against the whole forward pass, and the properties of each sampling method."""

import itertools

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pipeline.config.layers import load
from pipeline.config.shape import Model
from pipeline.errors import ConfigError
from pipeline.model.build import build_model, init_weights
from pipeline.model.context import Cache
from pipeline.model.decode import Sampling, beam_search, generate, lay_out, pick, source_fields
from pipeline.planner import count as account
from pipeline.tasks.likelihood import Pair, scorer

MLA = {
    "kind": "mla",
    "heads": 4,
    "q_rank": 12,
    "kv_rank": 16,
    "nope_dim": 8,
    "rope_dim": 4,
    "v_dim": 6,
}
KINDS = {
    "mha": {"kind": "gqa", "heads": 4, "kv_heads": 4, "head_dim": 8},
    "gqa": {"kind": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 8, "qk_norm": True},
    "mqa": {"kind": "gqa", "heads": 4, "kv_heads": 1, "head_dim": 8, "bias": True},
    "mla": MLA,
    "mla, straight": {**MLA, "q_rank": None},
}
POSITIONS = {
    "rope": {"kind": "rope", "theta": 1e4},
    "yarn": {
        "kind": "rope",
        "theta": 1e4,
        "scaling": {"kind": "yarn", "factor": 4.0, "original_seq": 16},
    },
    "learned": {"kind": "learned"},
    "sinusoidal": {"kind": "sinusoidal"},
    "relative": {"kind": "relative", "buckets": 8, "max_distance": 32},
    "alibi": {"kind": "alibi"},
    "none": {"kind": "none"},
}
SCORES = {
    "plain": {},
    "window": {"window": 5},
    "window and global": {"window": 5, "global_every": 2},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
}
MOE = {"kind": "moe", "activation": "swiglu", "hidden": 16, "dense_hidden": 24, "experts": 8, "top_k": 2, "shared": 1,
       "router": "sigmoid", "bias_step": 0.001}  # fmt: skip


def made(kind="gqa", position="rope", scores="plain", seed=0, **more):
    table = {
        "vocab": 50,
        "seq": 64,
        "width": 32,
        "layers": 2,
        "norm": {},
        "position": POSITIONS[position],
        "tied": False,
        "init_std": 0.3,
        "attention": {**KINDS[kind], **SCORES[scores]},
        "ffn": {"kind": "ffn", "activation": "swiglu", "hidden": 48},
    }
    cfg = Model.model_validate(table | more)
    model = build_model(cfg)
    init_weights(model, cfg, seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("sinks"):
                p.normal_(generator=torch.Generator().manual_seed(1))
    return model.eval()


def prompts(*lengths, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 50, (n,), generator=g).tolist() for n in lengths]


def decode(model, cache, tokens, start, *, fixed, **source):
    """The logits from the end of a prompt of `start` tokens, then one token at a time."""
    parts = [model(tokens[:, :start], cache=cache, **source)]
    if fixed:
        cache.fix(torch.tensor([start]))
    for i in range(start, tokens.shape[1]):
        parts.append(model(tokens[:, i : i + 1], cache=cache))
        if fixed:
            cache.place.add_(1)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("arch", ["isoflop", "t5", "bart", "transformer"])
@torch.no_grad()
def test_a_fixed_cache_decodes_the_same(arch):
    """As for a CUDA graph, with smeared tokens, relative biases and cross-attention."""
    cfg = load(size="tiny", arch=arch, sets=["model.vocab=512", "model.seq=64"]).model
    model = build_model(cfg.model_copy(update={"init_out": "same"})).eval()
    init_weights(model, model.cfg, 1)
    tokens = torch.tensor(prompts(12, 12))
    source = {} if arch == "isoflop" else source_fields(model, prompts(9, 5))
    grown, fixed = (
        decode(model, Cache(4, 16), tokens, 5, fixed=fixed, **source) for fixed in (False, True)
    )
    torch.testing.assert_close(fixed, grown, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_cached_step_equals_the_whole_forward_pass(kind):
    """With every position and with every shape of the scores; a prompt, then one token at a time; and a second prompt
    beside it, padded on the left."""
    tokens = torch.tensor(prompts(12, 12))
    for position, scores in [
        *((p, "plain") for p in POSITIONS),
        *(("rope", s) for s in SCORES),
        ("alibi", "window"),
    ]:
        model = made(kind, position, scores)
        whole = model(tokens)
        alone = model(tokens[1:, 3:])
        for padding, fixed in itertools.product((None, torch.tensor([0, 3])), (False, True)):
            cache = Cache(2, 16 if fixed else 12, padding)
            got = decode(model, cache, tokens, 7, fixed=fixed)
            torch.testing.assert_close(
                got[0], whole[0, 6:], atol=1e-4, rtol=1e-4, msg=f"{position}, {scores}"
            )
            expected = whole[1, 6:] if padding is None else alone[0, 3:]
            torch.testing.assert_close(
                got[1], expected, atol=1e-4, rtol=1e-4, msg=f"{position}, {scores}, {padding}"
            )
        # arXiv 2405.04434, table 1: in each layer, MLA caches the latent and the rope part.
        numbers = 16 + 4 if kind.startswith("mla") else 2 * KINDS[kind]["kv_heads"] * 8
        kept = [tensor[0, 0] for layer in cache.layers for tensor in layer.kept]
        assert sum(tensor.nbytes for tensor in kept) == numbers * 2 * 4


@torch.no_grad()
def test_routed_and_parallel_blocks_decode_as_they_train():
    for more in (
        {"ffn": MOE},
        {"parallel_block": True},
        {"placement": "sandwich"},
        {"mtp": 1, "nope_every": 2},
    ):
        model = made(**more)
        tokens = torch.tensor(prompts(12))
        cache = Cache(2, 12)
        got = torch.cat([model(tokens[:, i : i + 1], cache=cache) for i in range(12)], 1)
        torch.testing.assert_close(got, model(tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "position"), [("gqa", "rope"), ("mla", "rope"), ("mqa", "alibi"), ("mha", "learned")]
)
def test_greedy_takes_the_likeliest_and_a_batch_is_each_prompt_alone(kind, position):
    model, given = made(kind, position), prompts(3, 9, 1)
    out = generate(model, given, 8)
    for prompt, new in zip(given, out, strict=True):
        assert generate(model, [prompt], 8) == [new]
        tokens = list(prompt)
        for token in new:
            with torch.no_grad():
                assert token == int(model(torch.tensor([tokens]))[0, -1].argmax())
            tokens.append(token)


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_a_prefix_model_reads_prompts_and_contexts_in_both_directions(kind):
    model, given = made(kind), prompts(3, 9, 6)
    causal = generate(model, given, 8)
    model.whole_prompts = True
    out = generate(model, given, 8)
    assert out != causal
    pairs = [Pair(tuple(prompt), tuple(new)) for prompt, new in zip(given, out, strict=True)]
    found = scorer(model, 64, 50, torch.device("cpu"), whole_contexts=True)(pairs)
    for prompt, new, scored in zip(given, out, found, strict=True):
        whole = torch.tensor([[*prompt, *new]])
        with torch.no_grad():
            logits = model(whole, prefix_B=torch.tensor([len(prompt)]))[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == new
        beam = beam_search(model, prompt, 8, None, 1)[0]
        nats = logits.log_softmax(-1).amax(-1).sum().item()
        assert list(beam.tokens) == new and beam.score == pytest.approx(nats, abs=1e-4)
        assert scored.greedy and scored.nats == pytest.approx(nats, abs=1e-4)


def test_it_stops_at_the_end_of_text_and_no_sooner():
    model, given = made(), prompts(3, 9, 4)
    free = generate(model, given, 12)
    end = free[0][4]
    stopped = generate(model, given, 12, end=end)
    for a, b in zip(free, stopped, strict=True):
        assert b == (a[: a.index(end) + 1] if end in a else a)


def test_a_draw_depends_on_the_seed_and_its_row_alone():
    model, given = made(), prompts(5, 2)
    a, b = (generate(model, given, 20, sampling=Sampling(1.0, seed=3)) for _ in range(2))
    assert a == b != generate(model, given, 20, sampling=Sampling(1.0, seed=4))
    assert generate(model, given[:1], 20, sampling=Sampling(1.0, seed=3)) == a[:1]
    assert generate(model, given, 20, sampling=Sampling(1e-4, seed=3)) == generate(model, given, 20)


def test_draws_follow_the_softmax_within_what_top_k_and_top_p_leave():
    chances = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15])
    logits, rows = chances.log().expand(4000, 5), 4000
    draws = [torch.Generator().manual_seed(i) for i in range(rows)]

    def seen(**how):
        picked = pick(logits, Sampling(**how), draws)
        return torch.bincount(picked, minlength=5) / rows

    torch.testing.assert_close(seen(temperature=1.0), chances, atol=0.03, rtol=0)
    half = chances.sqrt() / chances.sqrt().sum()
    torch.testing.assert_close(seen(temperature=2.0), half, atol=0.03, rtol=0)
    two = torch.tensor([0, 0.4, 0, 0.3, 0]) / 0.7
    torch.testing.assert_close(seen(temperature=1.0, top_k=2), two, atol=0.03, rtol=0)
    torch.testing.assert_close(seen(temperature=1.0, top_p=0.65), two, atol=0.03, rtol=0)
    assert seen(temperature=1.0, top_p=0.0)[1] == 1  # at least the likeliest remains


def test_beam_search_finds_what_brute_force_finds():
    model, end, most = made(vocab=6), 5, 4
    prompt = [1, 2, 3]

    @torch.no_grad()
    def scored(tails):
        likely = model(torch.tensor([[*prompt, *tail] for tail in tails])).log_softmax(-1)[
            :, len(prompt) - 1 : -1
        ]
        return zip(
            likely.gather(-1, torch.tensor(tails)[..., None]).sum((1, 2)).tolist(),
            tails,
            strict=True,
        )

    ends = [[(*head, end) for head in itertools.product(range(5), repeat=n)] for n in range(most)]
    whole = list(itertools.product(range(5), repeat=most))
    truth = sorted((pair for tails in [*ends, whole] for pair in scored(tails)), reverse=True)
    found = beam_search(model, prompt, most, end, width=200)
    assert [beam.tokens for beam in found[:20]] == [tokens for _, tokens in truth[:20]]
    assert found[0].score == pytest.approx(truth[0][0], abs=1e-4)
    one = beam_search(model, prompt, most, end, width=1)[0]
    assert list(one.tokens) == generate(model, [prompt], most, end)[0]


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_a_step_costs_one_token_and_its_attention(kind):
    model, (prompt,) = made(kind, seq=256), prompts(1)
    cfg, c = model.cfg, model.cfg.attention

    def cost(context):
        cache = Cache(2, context + 1)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            model(torch.tensor([prompt * context]), cache=cache)
            with FlopCounterMode(display=False) as counter:
                model(torch.tensor([prompt]), cache=cache)
        return counter.get_total_flops()

    near, far = cost(10), cost(110)
    # absorbed heads read keys of the latent and rope part, and values of the latent
    per_key = (
        2 * c.heads * (2 * c.head_dim if kind == "gqa" else 2 * c.kv_rank + c.rope_dim) * cfg.layers
    )
    assert far - near == 100 * per_key
    assert near - 11 * per_key == account.flops_per_token(cfg).matmul // 3


def test_generation_beyond_learned_positions_is_refused():
    with pytest.raises(ConfigError, match="at most --max-new 54"):
        generate(made(position="learned"), prompts(10), 60)
    with pytest.raises(ConfigError, match="give a shorter prompt"):
        generate(made(position="learned"), prompts(64), 1)


def test_a_tiny_temperature_is_greedy() -> None:
    logits = torch.tensor([[1.0, 5.0, 4.999, -3.0]])
    for temperature in (1e-4, 1e-44, 1e-300):
        assert pick(logits, Sampling(temperature), [torch.Generator()]).tolist() == [1]


def test_inference_and_another_layout_of_the_weights_give_the_same() -> None:
    model = made("gqa").requires_grad_(False)
    model.blocks[0].attention.q_norm.gain.fill_(0.7)
    tokens = torch.tensor(prompts(12, 12))
    whole = model(tokens)
    lay_out(model)
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens), whole)
    assert model.head.weight.stride() == (1, 50)
