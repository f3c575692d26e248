"""Numbers that follow from the size, held against the published rule."""

import pytest

from pipeline.account import flops_per_token, params
from pipeline.config.load import load, names
from pipeline.errors import ConfigError
from pipeline.recipe import resolve


def test_rate_and_batch_follow_the_published_ladder():
    config = resolve(load(size="125m", sets=["train.tokens_per_param=20"]), ranks=8, gpu=True)
    n = params(config.model).non_embedding
    assert config.optim.lr == pytest.approx(0.5 * 0.0047 * (n / 108e6) ** (-1 / 3), rel=5e-3)
    assert config.train.batch_tokens == pytest.approx(2048 * 160 * (n / 108e6) ** (2 / 3), rel=0.25)  # snapped
    assert config.optim.optimizer.beta2 == 0.99  # below 524,288 tokens


def test_longer_runs_take_a_smaller_rate():
    short, long = (resolve(load(size="1b", sets=[f"train.tokens_per_param={t}"]), ranks=8, gpu=True) for t in (20, 80))
    assert long.optim.lr == pytest.approx(short.optim.lr / 2, rel=1e-2)


@pytest.mark.parametrize("size", names("size"))
def test_the_batch_is_the_same_on_1_2_4_and_8_ranks(size):
    batches = {resolve(load(size=size), ranks=r, gpu=True).train.batch_tokens for r in (1, 2, 4, 8)}
    assert len(batches) == 1


@pytest.mark.parametrize("ranks", [1, 3, 6, 7, 24, 64])
def test_any_world_gets_a_batch_that_cuts(ranks):
    train = resolve(load(size="1b"), ranks=ranks, gpu=True).train
    assert train.batch_tokens % (ranks * train.micro_batch * 2048) == 0


@pytest.mark.parametrize("length", ["train.steps=17", "train.tokens=1000000", "train.flops=1e15"])
def test_length_in_steps_tokens_or_flops(length):
    config = resolve(load(size="tiny", sets=["model.seq=128", "train.batch_tokens=2048", length]), ranks=2, gpu=False)
    tokens = config.train.steps * 2048
    want = {"steps": 17 * 2048, "tokens": 1e6, "flops": 1e15 / flops_per_token(config.model).model}
    assert tokens == pytest.approx(want[length.split(".")[1].split("=")[0]], abs=2048)


def test_a_batch_that_does_not_divide_names_one_that_does():
    with pytest.raises(ConfigError, match=r"batch_tokens=3,000 is not a multiple of 512 .* try 3,072"):
        resolve(load(size="tiny", sets=["model.seq=256", "train.batch_tokens=3000"]), ranks=2, gpu=False)
    with pytest.raises(ConfigError, match=r"micro_batch=5 .*try 4"):
        resolve(load(size="tiny", sets=["model.seq=256", "train.micro_batch=5"]), ranks=2, gpu=False)
