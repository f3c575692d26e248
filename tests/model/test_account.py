"""Every count against the built model and against torch's own FLOP counter."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pipeline import account
from pipeline.config.load import load, names
from pipeline.model.build import build


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("arch", names("arch"))
@pytest.mark.parametrize("size", names("size"))
def test_parameters_are_exact_for_every_shipped_config(size, arch, tied):
    config = load(size=size, arch=arch, sets=[f"model.tied={str(tied).lower()}"])
    with torch.device("meta"):
        model = build(config.model)
    count = account.params(config.model)
    built = {name: p.numel() for name, p in model.named_parameters()}
    assert count.total == sum(built.values())
    assert count.embedding == built["embedding.weight"]
    assert count.head == built.get("head.weight", 0)
    assert count.norm == sum(n for name, n in built.items() if "norm" in name)
    assert count.scaling == count.non_embedding + config.model.vocab * config.model.width


@pytest.mark.parametrize(
    "sets", [[], ["model.ffn.activation=gelu"], ["model.attention.qk_norm=false", "model.tied=true"]]
)
def test_flops_match_torchs_counter(sets):
    config = load(size="500k", sets=["model.seq=64", "model.vocab=256", *sets])
    model = build(config.model)
    tokens = torch.randint(256, (2, 64))
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):  # logits and plain attention: every matmul is one that torch counts
        model(tokens).sum().backward()
    by_op = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    attention = by_op["aten.bmm"]
    flops = account.flops_per_token(config.model)
    assert sum(by_op.values()) - attention == flops.matmul * tokens.numel()
    assert attention == 2 * flops.attention * tokens.numel()  # the plain one computes the masked half too


def test_recompute_costs_one_more_forward_of_the_blocks():
    config = load(size="1b")
    plain, again = (account.flops_per_token(config.model, recompute=r) for r in (False, True))
    blocks = account.params(config.model).attention + account.params(config.model).ffn
    assert again.model == plain.model and again.hardware - plain.hardware == 2 * blocks + plain.attention // 3


def test_the_1b_shape_has_its_published_flops():
    flops = account.flops_per_token(load(size="1b").model)
    assert flops.model == 6_643_777_536  # 82.9k tokens/s at 55.7% of 989 TFLOP/s


def test_zero_shards_what_it_says():
    model = load(size="1b").model

    def states(zero, ranks):
        m = account.memory(model, dtype="bf16", zero=zero, ranks=ranks, micro_batch=1, loss_chunk=2048)
        return m.weights + m.gradients + m.optimizer

    total = account.params(model).total
    assert states(0, 8) == 16 * total
    assert states(1, 8) == pytest.approx((4 + 12 / 8) * total, rel=1e-6)
    assert states(2, 8) == pytest.approx((2 + 14 / 8) * total, rel=1e-6)
    assert states(3, 8) == pytest.approx(16 / 8 * total, rel=1e-6)
