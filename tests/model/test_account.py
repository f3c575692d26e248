"""Every count against the built model and against torch's own FLOP counter."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pipeline.config.layers import load, names
from pipeline.config.schema import Lora
from pipeline.config.shape import Model
from pipeline.model.adapter import adapt
from pipeline.model.build import build_model, init_weights
from pipeline.model.norm import LayerNorm, RMSNorm, StreamNorm
from pipeline.optim.matrices import matrices_of
from pipeline.planner import count as account
from pipeline.planner.memory import Layout, matrix_params, model_memory
from pipeline.planner.work import frozen_params, trained_params, training_flops


def built(cfg):
    with torch.device("meta"):
        return build_model(cfg)


def exact(cfg):
    model, count = built(cfg), account.params(cfg)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    norms = {
        id(p)
        for m in model.modules()
        if isinstance(m, RMSNorm | StreamNorm | LayerNorm)
        for p in m.parameters()
    }
    ends = ("embedding_norm.", "embedding_projection.", "transform.", "row_head.", "head.bias")
    ends += tuple(f"encoder.{end}" for end in ends[:2])
    apart = [p for name, p in model.named_parameters() if name.startswith(("ahead.", *ends))]
    norms -= {id(p) for p in apart}
    experts = sum(p.numel() for p in model.parameters() if hasattr(p, "expert"))
    assert count.total == sum(sizes.values())
    tables = ("embedding.weight", "encoder.embedding.weight")
    assert count.embedding == sum(sizes.get(name, 0) for name in tables)
    assert count.ends == sum(n for name, n in sizes.items() if name.startswith(ends))
    assert count.value_embeddings == sum(
        n for name, n in sizes.items() if name.startswith("value_embeddings.")
    )
    mixing = ("smear.", "backout.")
    assert count.mixing == sum(
        n for name, n in sizes.items() if name.startswith(mixing) or ".scales." in name
    )
    places = ("position.", "encoder.position.", "segments.")
    assert count.position == sum(n for name, n in sizes.items() if name.startswith(places))
    assert count.head == sizes.get("head.weight", 0)
    assert count.mtp == sum(n for name, n in sizes.items() if name.startswith("ahead."))
    assert count.norm == sum(p.numel() for p in model.parameters() if id(p) in norms)
    assert count.experts == experts
    if experts:
        idle = (1 - cfg.ffn.top_k / cfg.ffn.experts) * sum(
            p.numel()
            for name, p in model.named_parameters()
            if hasattr(p, "expert") and not name.startswith("ahead.")
        )
        assert count.active == pytest.approx(count.total - count.mtp - idle, rel=1e-12)
    else:
        assert count.active == count.total - count.mtp
    assert count.scaling == count.active_non_embedding + model.head.weight.numel()
    stepped = sum(each.numel * len(each.keys) for each in matrices_of(model, cfg).values())
    assert stepped == matrix_params(cfg)


@pytest.mark.parametrize("size", names("size"))
def test_parameters_are_exact_for_every_size(size):
    exact(load(size=size).model)


@pytest.mark.parametrize("arch", names("arch"))
def test_parameters_are_exact_for_every_architecture_and_it_crosses_with_every_size(arch):
    for size in ("tiny", "125m", "1b"):
        exact(load(size=size, arch=arch).model)
    assert all(account.params(load(size=size, arch=arch).model).total for size in names("size"))


@pytest.mark.parametrize(
    ("arch", "size", "vocab", "seq", "total", "active"),
    [  # billions, as published
        ("llama3", "7b", 128256, 8192, 8.03, 8.03),
        ("llama3", "70b", 128256, 8192, 70.6, 70.6),
        ("mixtral", "7b", 32000, 4096, 46.7, 12.9),
        ("deepseek-v2-lite", "16b", 102400, 4096, 15.7, 2.4),
        ("deepseek-v2", "236b", 102400, 4096, 236, 21),
        ("deepseek-v3", "671b", 129280, 4096, 671, 37),
        ("gpt3", "175b", 50257, 2048, 175, 175),
    ],
)
def test_published_giants_build_with_their_published_counts(arch, size, vocab, seq, total, active):
    cfg = load(
        size=size, arch=arch, sets=[f"model.vocab={vocab}", f"model.seq={seq}", "model.mtp=0"]
    ).model
    count = account.params(cfg)
    assert sum(p.numel() for p in built(cfg).parameters()) == count.total
    assert count.total / 1e9 == pytest.approx(total, rel=0.0025)
    # DeepSeek counts active parameters without the input embedding, Mistral with it
    counted = count.active - (count.embedding if arch.startswith("deepseek") else 0)
    assert counted / 1e9 == pytest.approx(active, rel=0.025)


def any_of(**options):
    """A table with one of the options for each key."""
    return st.fixed_dictionaries({key: st.sampled_from(each) for key, each in options.items()})


BOTH = [False, True]
ACTIVATIONS = ["swiglu", "geglu", "reglu", "gelu", "gelu_tanh", "silu", "relu", "relu2"]
NORMS = [
    *({"kind": kind, "gain": gain} for kind in ("rmsnorm", "layernorm") for gain in BOTH),
    {"kind": "layernorm", "bias": True},
]
YARN = {"kind": "yarn", "factor": 4.0, "original_seq": 16}
BY_LAYER = [
    {"kind": "rope", "theta": 1e4},
    {"kind": "rope", "theta": 1e4, "scaling": YARN},
    {"kind": "relative", "buckets": 8, "max_distance": 32},
    {"kind": "alibi"},
]
POSITIONS = [*BY_LAYER, {"kind": "learned"}, {"kind": "sinusoidal"}, {"kind": "none"}]
SOFTCAPS = [None, None, 20.0]
SCORES = any_of(softcap=SOFTCAPS, sinks=BOTH)
SCORES |= any_of(window=[8], global_every=[None, 2], softcap=SOFTCAPS, sinks=BOTH)
HEADS = {"heads": [2, 4]}
GQA = any_of(kind=["gqa"], **HEADS, head_dim=[4, 8], qk_norm=BOTH, bias=BOTH, out_bias=BOTH)
MLA = any_of(kind=["mla"], **HEADS, nope_dim=[4, 8], rope_dim=[4], v_dim=[4, 8], q_rank=[None, 12],
             kv_rank=[8, 16])  # fmt: skip
FFN = any_of(kind=["ffn"], activation=ACTIVATIONS, hidden=[24, 40], bias=BOTH)
MOE = any_of(kind=["moe"], activation=ACTIVATIONS, hidden=[16], dense_hidden=[24], experts=[8], top_k=[1, 2, 3],
             shared=[0, 1, 2], router=["softmax", "sigmoid"], groups=[1, 4], top_groups=[2], dense_layers=[0, 1],
             every=[1, 2], capacity=[None, 1.25], aux_loss=[0.01], seq_aux_loss=[0.01], z_loss=[0.01],
             bias_step=[0.0, 0.001], normalize=BOTH)  # fmt: skip
ANY = any_of(vocab=[64], seq=[32], width=[32], layers=[3], init_std=[0.02], norm=NORMS, position=POSITIONS,
             placement=["pre", "post", "sandwich", "deepnorm"], embedding_rank=[None, None, 16], head_transform=BOTH,
             head_bias=BOTH, tied=BOTH, embedding_norm=[False, True, "sum"], init=["fixed", "fan_in"],
             init_out=["scaled", "zero"], logit_softcap=[None, 15.0])  # fmt: skip
ONE_STACK = any_of(segments=[0, 2], smear=BOTH, residual_scales=BOTH, backout=BOTH)
TWO_STACKS = any_of(encoder_layers=[2], source_seq=[None, 64], own_encoder_embedding=BOTH)


@st.composite
def models(draw):
    """Draw any architecture that the types allow."""
    pick = lambda *options: draw(st.sampled_from(options))  # noqa: E731
    attention = draw(GQA | MLA) | draw(SCORES)
    grouped = attention["kind"] == "gqa"
    if grouped:
        attention["kv_heads"] = pick(1, 2, attention["heads"])
    ffn = draw(FFN | MOE)
    if ffn["kind"] == "moe":
        ffn["normalize"] &= ffn["top_k"] > 1
        ffn["top_groups"] = min(ffn["groups"], ffn["top_groups"])
    model = draw(ANY) | {"attention": attention, "ffn": ffn}
    two = grouped and model["placement"] != "deepnorm"
    stack = pick("decoder", "encoder", *(["encoder-decoder"] if two else []))
    model |= draw(TWO_STACKS if stack == "encoder-decoder" else ONE_STACK)
    shared = ffn["kind"] == "ffn" and "global_every" not in attention and draw(st.booleans())
    model |= {"stack": stack, "share_layers": shared, "first_norm": shared or pick(*BOTH)}
    if stack != "encoder-decoder":
        model["parallel_block"] = model["placement"] == "pre" and pick(*BOTH)
        model["value_embeddings"] = pick(None, 1, 2) if grouped and not shared else None
    if model["position"] in BY_LAYER and not shared:
        model["nope_every"] = pick(None, 2)
    if stack == "encoder":
        model["row_classes"] = pick(0, 2)
    if stack == "decoder":
        model["mtp"] = pick(0, 0, 1, 2)
    return Model.model_validate(model)


def grouped(a, b, *_args, out_shape=None, **_kwargs):
    """Rows times a stack of matrices, or the gradient of the stack: either way every row meets one matrix."""
    return 2 * a[0] * a[1] * b[-1]


def counted(model, tokens, **fields):
    """FLOPs of a step by torch's operation, and the numbers that autograd kept of it."""
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped})
    with counter, sdpa_kernel(SDPBackend.MATH):  # torch counts every matmul of a step
        model(tokens[:, :-1], tokens[:, 1:], **fields).total.backward()
    return {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(models())
def test_any_architecture_has_exact_parameters_and_flops_and_a_gradient_everywhere(cfg):
    exact(cfg)
    model = build_model(cfg, loss_chunk=64)
    init_weights(model, cfg, 0)
    tokens = torch.randint(cfg.vocab, (2, cfg.seq + 1), generator=torch.Generator().manual_seed(0))
    fields = {}
    if cfg.source_layers:
        fields["source_BE"] = torch.randint(cfg.vocab, (2, cfg.source_length))
    if cfg.row_classes:
        fields["labels_B"] = torch.tensor([0, 1])
    by_op = counted(model, tokens, **fields)
    flops, full = (
        account.flops_per_token(cfg),
        cfg.model_copy(
            update={
                "attention": cfg.attention.model_copy(update={"window": None, "global_every": None})
            }
        ),
    )
    # The first token of a row is a share of a token, which the count rounds down.
    matmul = sum(by_op.values()) - by_op["aten.bmm"]
    assert 0 <= matmul - flops.matmul * 2 * cfg.seq <= 6 * 2 * cfg.seq * bool(cfg.row_classes)
    # plain attention also computes what the mask of a decoder hides
    seen = account.flops_per_token(full).attention
    causal = account.sum_blocks(full, lambda _, layer: account._scores(full, layer))
    assert by_op["aten.bmm"] == (seen + causal * cfg.causal) * 2 * cfg.seq
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_window_counts_what_it_sees():
    cfg = load(size="1b", arch="mistral", sets=["model.seq=64", "model.attention.window=16"]).model
    a = cfg.attention
    seen = sum(min(i + 1, 16) for i in range(64))  # keys seen by all queries
    exact_flops = 12 * cfg.layers * a.heads * a.head_dim * seen / 64
    # The diagonal, of which the convention counts half.
    half = 12 * cfg.layers * a.heads * a.head_dim / 2
    assert abs(account.flops_per_token(cfg).attention - exact_flops) <= half


@pytest.mark.parametrize(
    ("arch", "more"),
    [
        ("gpt3", ()),
        ("dense", ["model.placement=sandwich"]),
        ("dense", ["model.parallel_block=true"]),
        ("mla-moe", ()),
    ],
)
def test_recomputed_flops_equal_torchs_count(arch, more):
    """Selective: the feed-forward's matmuls, of a plain one without the last, whose output nothing needs. In full: one
    more forward of the blocks, of which torch too leaves out at most the last matrix of each."""
    sets = ["model.vocab=64", "model.seq=32", "model.width=32", "model.layers=2", "model.mtp=1"]
    cfg = load(size="tiny", arch=arch, sets=[*sets, *more]).model
    tokens = torch.randint(cfg.vocab, (2, cfg.seq + 1), generator=torch.Generator().manual_seed(0))
    flops, expected = [], []
    for recompute in (False, "selective", True):
        model = build_model(cfg, loss_chunk=64, recompute=recompute)
        init_weights(model, cfg, 0)
        flops.append(sum(counted(model, tokens).values()))
        expected.append(
            account.flops_per_token(cfg, recompute=recompute).recompute * tokens[:, 1:].numel()
        )
    assert flops[1] - flops[0] == expected[1] > 0
    counts = [account.flops_per_token(cfg, recompute=each) for each in (False, "selective", True)]
    assert len({each.model for each in counts}) == 1  # recomputed FLOPs do not count for MFU
    # Plain attention also computes what the mask hides.
    hidden = account.flops_per_token(cfg).attention // 3 * 64
    last = 2 * 3 * cfg.width * getattr(cfg.ffn, "dense_hidden", cfg.ffn.hidden) * 64
    assert expected[2] + hidden - last <= flops[2] - flops[0] <= expected[2] + hidden


@pytest.mark.parametrize("arch", names("arch"))
def test_adapters_are_counted(arch):
    cfg = load(size="27k", arch=arch, sets=["model.vocab=512"]).model
    if account.params(cfg).experts:
        return  # they have no adapters
    model = built(cfg)
    every = sum(p.numel() for p in model.parameters())
    adapt(model, Lora(rank=3), seed=0)
    trained = sum(p.numel() for p in model.parameters())
    assert trained_params(cfg, Lora(rank=3)) == trained
    own = sum(p.numel() for name, p in model.named_parameters() if name.startswith("row_head"))
    assert frozen_params(cfg, Lora(rank=3)) == every - own


@pytest.mark.parametrize("arch", ["dense", "gpt2", "mla", "isoflop"])
def test_adapters_have_exact_flops(arch):
    sets = ["model.seq=64", "model.vocab=512", "lora.rank=3", "recipe=adamw"]
    spec = load(size="27k", arch=arch, sets=sets)
    model = build_model(spec.model, loss_chunk=64)
    init_weights(model, spec.model, 0)
    tokens = torch.randint(512, (2, 65), generator=torch.Generator().manual_seed(0))
    whole = sum(counted(model, tokens).values())
    adapt(model, spec.lora, seed=0)
    saved = whole - sum(counted(model, tokens).values())
    expected = account.flops_per_token(spec.model).model - training_flops(spec).model
    # Nothing below the first matrix is trained, so it has no gradient for its inputs either.
    first = 2 * (
        account.params(spec.model).attention // spec.model.layers + spec.model.smear_inputs
    )
    first += 2 * 3 * 2 * spec.model.width  # its adapter
    assert expected <= saved / 128 <= expected + first


def test_zero_shards_states_by_stage():
    model = load(size="1b").model

    def states(zero, ranks):
        m = model_memory(model, Layout(ranks, zero), "bf16", loss_chunk=2048)
        return m.weights + m.gradients + m.optimizer

    total = account.params(model).total
    assert states(0, 8) == 16 * total
    assert states(1, 8) == pytest.approx((4 + 12 / 8) * total, rel=1e-6)
    assert states(2, 8) == pytest.approx((2 + 14 / 8) * total, rel=1e-6)
    assert states(3, 8) == pytest.approx(16 / 8 * total, rel=1e-6)
    block = (count := account.params(model)).attention // 16 + count.ffn // 16 + 2 * 2048 + 2 * 128
    whole = [model_memory(model, Layout(8, zero), "bf16").gathered for zero in range(4)]
    assert whole == [0, 0, 2 * block, 3 * 2 * block]
