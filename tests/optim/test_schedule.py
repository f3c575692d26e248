import math
from itertools import pairwise

import pytest
import torch

from pipeline.config.layers import load
from pipeline.config.optimizer import WSD, Cosine, InverseSqrt
from pipeline.errors import ConfigError
from pipeline.hub.families import choose_family
from pipeline.model.build import build_model, init_weights
from pipeline.optim.groups import build_optimizer, parameter_groups, set_learning_rate
from pipeline.optim.schedule import learning_rate
from pipeline.planner.check import resolve


def test_wsd_warms_up_stays_and_decays():
    cfg = WSD(warmup_steps=10, decay_share=0.2, final_share=0.0)
    rates = [learning_rate(cfg, 1.0, s, 100) for s in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0)
    assert set(rates[9:80]) == {1.0}
    assert rates[90] == pytest.approx(1 - math.sqrt(0.5)) and 0 < rates[99] < 0.03
    assert rates[80:] == sorted(rates[80:], reverse=True)


def test_no_decay_share_means_constant():
    assert {learning_rate(WSD(warmup_steps=0, decay_share=0.0), 1.0, s, 50) for s in range(50)} == {
        1.0
    }


def test_the_inverse_square_root_is_that_of_the_transformer():
    """d^-0.5 · min(n^-0.5, n · warmup^-1.5), whose peak is at n = warmup."""
    warmup = 40
    width = 512
    peak = (width * warmup) ** -0.5
    cfg = InverseSqrt(warmup_steps=warmup)
    for step in range(400):
        n = step + 1
        wanted = width**-0.5 * min(n**-0.5, n * warmup**-1.5)
        assert learning_rate(cfg, peak, step, 400) == pytest.approx(wanted)
    assert learning_rate(InverseSqrt(warmup_steps=0), 1.0, 3, 10) == 0.5


def test_cosine_ends_above_its_final_share():
    cfg = Cosine(warmup_steps=10, final_share=0.1)
    rates = [learning_rate(cfg, 2.0, s, 110) for s in range(110)]
    assert (
        rates[10] == 2.0
        and rates[60] == pytest.approx(2 * (0.1 + 0.9 * 0.5))
        and rates[109] == pytest.approx(0.2, rel=2e-2)
    )


@pytest.mark.parametrize("tied", ["false", "true"])
def test_only_matrices_decay(tied):
    cfg = load(size="tiny", sets=["model.vocab=64", f"model.tied={tied}"]).model
    model = build_model(cfg)
    decay, kept = parameter_groups(model, 0.1, cfg)
    assert decay["weight_decay"] == 0.1 and kept["weight_decay"] == 0.0
    assert all(p.ndim == 2 for p in decay["params"])
    names = {id(p): n for n, p in model.named_parameters()}
    assert {names[id(p)].split(".")[0] for p in kept["params"] if p.ndim == 2} == {"embedding"}
    assert len(decay["params"]) + len(kept["params"]) == len(names)


def test_a_scaled_embedding_equals_a_multiplication_by_root_width():
    """arXiv 2312.16903 multiplies; larger first weights that learn faster make the same steps, and leave no factor in
    the model. Only Adam's epsilon makes a difference."""
    tokens = torch.arange(96).view(2, 48) * 7 % 64
    outs = []
    for way in ("model.scaled_embedding=true", "model.multipliers.embedding=8.0"):
        sets = ["model.vocab=64", "model.seq=48", "optim.lr=1e-3", "optim.optimizer.eps=1e-14", way]
        sets.append("recipe=adamw")
        config = resolve(load(size="tiny", sets=sets), ranks=1, gpu=False)
        model = build_model(config.model)
        init_weights(model, config.model, 1)
        optimizer = build_optimizer(model, config)
        for _ in range(5):
            set_learning_rate(optimizer, 1e-3)
            (loss := model(tokens[:, :-1], tokens[:, 1:]).total).backward()
            optimizer.step()
            optimizer.zero_grad()
        outs.append(model(tokens).detach())
        assert model.embedding.weight.std().item() == pytest.approx(
            0.16 if "scaled" in way else 0.02, rel=0.1
        )
    torch.testing.assert_close(*outs, atol=1e-4, rtol=1e-4)
    assert loss.item() < 0.95 * math.log(64)


def test_a_scaled_embedding_is_not_the_head():
    sets = ["recipe=adamw", "model.scaled_embedding=true"]
    with pytest.raises(ConfigError, match="scaled_embedding"):
        load(size="tiny", sets=[*sets, "model.tied=true"])
    assert choose_family(load(size="tiny", sets=sets).model).kind == "qwen3"


def test_linear_decay_is_a_line_to_the_final_share():
    cfg = WSD(warmup_steps=0, decay_share=0.5, decay_shape="linear", final_share=0.1)
    rates = [learning_rate(cfg, 1.0, step, 100) for step in range(100)]
    assert rates[:51] == [1.0] * 51
    assert rates[75] == pytest.approx(0.1 + 0.9 * 0.5)
    falls = [a - b for a, b in pairwise(rates[50:])]
    assert falls == pytest.approx([0.9 / 50] * 49)
