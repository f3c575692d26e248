"""Fast attention against its eager twin, masks against their definitions, positions against transformers'."""

import itertools
import math

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.masking_utils import create_causal_mask
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pipeline.config.parts import RelativeBias, RoPE
from pipeline.model.attention import Scoring, attend, eager
from pipeline.model.context import make_mask
from pipeline.model.position import DistanceBias, alibi, distances, rotary
from tests.model.test_decode import MOE, POSITIONS, SCORES, made, prompts

DOCUMENTS = torch.tensor([[0] * 5 + [1] * 11, [0] * 12 + [1, 1, 2, 2]])
PADDING = torch.tensor([0, 6])
MASKS = {
    "causal": {},
    "window": {"window": 4},
    "documents": {"documents_BK": DOCUMENTS},
    "padding": {"padding_B": PADDING},
    "window and documents": {"window": 4, "documents_BK": DOCUMENTS},
    "all": {"causal": False},
    "both sides": {"causal": False, "window": 4},
    "both sides of documents": {"causal": False, "window": 4, "documents_BK": DOCUMENTS},
    "prefix": {"prefix_B": PADDING},
    "prefix of documents": {"prefix_B": PADDING, "documents_BK": DOCUMENTS},
}


def visible(row: int, query: int, key: int, how: dict) -> bool:
    """The definition of a mask, one pair at a time."""
    causal = how.get("causal", True)
    seen = key <= query or not causal
    if "prefix_B" in how:
        seen |= key < int(PADDING[row])
    if "window" in how:
        seen &= query - key < how["window"] and (causal or key - query < how["window"])
    if "documents_BK" in how:
        seen &= bool(DOCUMENTS[row, query] == DOCUMENTS[row, key])
    if "padding_B" in how:
        seen &= key >= int(PADDING[row]) or key == query
    return seen


def test_the_mask_of_a_prefix_is_that_of_transformers():
    """As in PaliGemma, the tokens of the prefix are one block."""
    config = AutoConfig.for_model("llama", attn_implementation="sdpa")
    block = torch.where(torch.arange(16) < PADDING[:, None], 0, -1)
    embedded = torch.zeros(2, 16, 8)
    theirs = create_causal_mask(config, embedded, None, None, block_sequence_ids=block)
    assert make_mask(16, 16, torch.device("cpu"), prefix_B=PADDING).equal(theirs)


def tensors(grouped: bool = True) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 16, 8), (2, 2 if grouped else 4, 16, 8), (2, 2 if grouped else 4, 16, 6)]
    return [torch.randn(shape, generator=g) for shape in shapes]


@pytest.mark.parametrize("how", MASKS)
def test_a_mask_hides_what_it_should(how):
    mask = make_mask(16, 16, torch.device("cpu"), **MASKS[how])
    if not isinstance(mask, Tensor):
        assert {None: "causal", "all": "all"}[mask] == how
        return
    for row in range(len(mask)):
        expected = [[visible(row, q, k, MASKS[how]) for k in range(16)] for q in range(16)]
        assert mask[row, 0].tolist() == expected
    # The last queries of a longer sequence.
    last = make_mask(3, 16, torch.device("cpu"), **MASKS[how])
    assert torch.equal(last, mask[:, :, -3:])


@pytest.mark.parametrize("flex", [False, True], ids=["sdpa", "flex"])
@pytest.mark.parametrize("how", MASKS)
def test_attention_equals_its_eager_twin(how, flex):
    """Compare values and, except for flex, whose backward needs a GPU, gradients."""
    q, k, v = tensors()
    truth = make_mask(16, 16, torch.device("cpu"), **MASKS[how])
    mask = make_mask(16, 16, torch.device("cpu"), **MASKS[how], flex=True) if flex else truth
    bias = alibi(distances(16, 16, q.device), 4)
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(1))
    shapes = [(None, None, None), (3.0, bias, sinks)]
    if not flex:
        shapes += [(3.0, None, None), (None, bias, None), (None, None, sinks)]
    if flex:  # only compiled code uses it
        torch._dynamo.reset()
    compiled = torch.compile(attend, backend="eager", fullgraph=True) if flex else attend
    for softcap, added, sink in shapes:
        inputs = [t.clone().requires_grad_(not flex) for t in (q, k, v)]
        twins = [t.clone().requires_grad_(not flex) for t in (q, k, v)]
        out = compiled(*inputs, Scoring(0.3, softcap, mask, added, sink))
        expected = eager(*twins, Scoring(0.3, softcap, truth, added, sink))
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        uncompiled = attend(*inputs, Scoring(0.3, softcap, mask, added, sink))
        torch.testing.assert_close(uncompiled, expected, atol=1e-5, rtol=1e-5)
        if not flex:
            out.square().sum().backward()
            expected.square().sum().backward()
            for a, b in zip(inputs, twins, strict=True):
                torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-4)


def test_the_eager_twin_is_the_definition():
    """One query with all settings at once, computed by hand."""
    q, k, v = (t.double() for t in tensors())
    bias, sinks = torch.randn(4, 16, 16).double(), torch.randn(4).double()
    mask = make_mask(16, 16, torch.device("cpu"), window=4, documents_BK=DOCUMENTS)
    out = eager(q, k, v, Scoring(0.3, 2.0, mask, bias, sinks))
    row, head, query = 1, 3, 13
    keys = [key for key in range(16) if visible(row, query, key, MASKS["window and documents"])]
    dots = [float(q[row, head, query] @ k[row, head // 2, key]) for key in keys]
    scores = [
        2.0 * math.tanh(0.3 * dot / 2.0) + float(bias[head, query, key])
        for dot, key in zip(dots, keys, strict=True)
    ]
    weights = [math.exp(s) for s in scores]
    whole = sum(weights) + math.exp(float(sinks[head]))
    expected = sum(w / whole * v[row, head // 2, key] for w, key in zip(weights, keys, strict=True))
    torch.testing.assert_close(out[row, head, query], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("stack", ["decoder", "encoder"])
@pytest.mark.parametrize("kind", ["gqa", "mla"])
@torch.no_grad()
def test_documents_in_one_row_are_each_document_alone(kind, stack):
    """Positions of every kind restart in each document; routed experts without a capacity process tokens one by one."""
    first, second, third = (torch.tensor([p]) for p in prompts(5, 9, 2))
    row = torch.cat((first, second, third), 1)
    documents = torch.tensor([[0] * 5 + [1] * 9 + [2] * 2])
    cases = [{"position": p} for p in POSITIONS] + [{"scores": s} for s in SCORES] + [{"ffn": MOE}]
    for case in cases:
        model = made(kind, stack=stack, **case)
        packed = model(row, documents_BS=documents)
        alone = torch.cat([model(part) for part in (first, second, third)], 1)
        torch.testing.assert_close(packed, alone, atol=1e-4, rtol=1e-4, msg=str(case))
        assert (model(row)[:, 5:] - alone[:, 5:]).abs().max() > 1e-2, (
            "without the mask they would be seen"
        )


def test_buckets_are_t5s():
    # Imported here, because that takes two seconds.
    from transformers.models.t5.modeling_t5 import T5Attention

    shapes = [(32, 128), (8, 32), (16, 20)]
    for (buckets, far), causal in itertools.product(shapes, [True, False]):
        bias = DistanceBias(1, RelativeBias(buckets=buckets, max_distance=far), causal=causal)
        with torch.no_grad():
            bias.weight.copy_(torch.arange(buckets)[:, None])
        distance = distances(300, 300, torch.device("cpu"))
        theirs = T5Attention._relative_position_bucket(-distance, not causal, buckets, far)
        seen = (distance >= 0) | (not causal)
        assert torch.equal(bias(distance)[0].long()[seen], theirs[seen])


ROPES = {
    "linear": ({"kind": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        {"kind": "llama3", "factor": 8.0, "original_seq": 64, "low": 1.0, "high": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
    ),
    "yarn": (
        {"kind": "yarn", "factor": 4.0, "original_seq": 64},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "yarn, own": (
        {"kind": "yarn", "factor": 40.0, "original_seq": 4096, "beta_fast": 16.0, "beta_slow": 2.0, "attention": 1.25},
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 16.0,
         "beta_slow": 2.0, "attention_factor": 1.25},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPES)
def test_scaled_rotations_are_transformers(kind):
    ours, theirs = ROPES[kind]
    config = AutoConfig.for_model("llama", hidden_size=128, num_attention_heads=2, max_position_embeddings=256,
                                  rope_parameters={"rope_theta": 1e4, **theirs})  # fmt: skip
    turns, factor = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](config, torch.device("cpu"))
    cos, sin = rotary(torch.arange(9), 64, RoPE(theta=1e4, scaling=ours))
    angle = torch.arange(9.0)[:, None] * turns
    torch.testing.assert_close(cos, angle.cos() * factor)
    torch.testing.assert_close(sin, angle.sin() * factor)


def test_ntk_is_the_dynamic_formula_at_its_full_length():
    """transformers' dynamic base at seq_len s of an original L: factor·s/L − (factor − 1); ours is that at a factor."""
    config = AutoConfig.for_model(
        "llama",
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0},
    )
    turns, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=4 * 64)
    cos, _ = rotary(torch.arange(9), 64, RoPE(theta=1e4, scaling={"kind": "ntk", "factor": 4.0}))
    torch.testing.assert_close(cos, (torch.arange(9.0)[:, None] * turns).cos())


def test_alibi_slopes_are_the_papers():
    eight = alibi(torch.ones(1, 1), 8).flatten()
    torch.testing.assert_close(-eight, 2.0 ** -torch.arange(1.0, 9.0))
    twelve = alibi(torch.ones(1, 1), 12).flatten()
    torch.testing.assert_close(-twelve[8:], 2.0 ** -torch.tensor([0.5, 1.5, 2.5, 3.5]))
