"""Numbers that follow from the size, held against the published rule."""

import re
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.layers import load, names
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError, UserError
from pipeline.planner.check import DeviceMemory, fit_to_devices
from pipeline.planner.count import flops_per_token, params
from pipeline.planner.recipe import resolve
from pipeline.train.request import Devices, Request, plan_run


def test_rate_and_batch_follow_the_published_ladder():
    config = resolve(load(size="125m", sets=["train.tokens_per_param=20"]), ranks=8, gpu=True)
    n = params(config.model).non_embedding
    assert config.optim.lr == pytest.approx(0.5 * 0.0047 * (n / 108e6) ** (-1 / 3), rel=5e-3)
    assert config.train.batch_tokens == pytest.approx(
        2048 * 160 * (n / 108e6) ** (2 / 3), rel=0.25
    )  # snapped
    assert config.optim.optimizer.beta2 == 0.99  # below 524,288 tokens


def test_longer_runs_take_a_smaller_rate():
    short, long = (
        resolve(load(size="1b", sets=[f"train.tokens_per_param={t}"]), ranks=8, gpu=True)
        for t in (20, 80)
    )
    assert long.optim.lr == pytest.approx(short.optim.lr / 2, rel=1e-2)


@pytest.mark.parametrize("size", names("size"))
def test_the_batch_is_the_same_on_1_2_4_and_8_ranks(size):
    batches = {resolve(load(size=size), ranks=r, gpu=True).train.batch_tokens for r in (1, 2, 4, 8)}
    assert len(batches) == 1


@pytest.mark.parametrize("ranks", [1, 3, 6, 7, 24, 64])
def test_any_world_gets_a_batch_that_cuts(ranks):
    train = resolve(load(size="1b"), ranks=ranks, gpu=True).train
    assert train.batch_tokens % (ranks * train.micro_batch * 2048) == 0


@pytest.mark.parametrize(
    ("size", "arch", "gpu", "micro"),
    [
        ("6m", "dense", True, 24),
        ("6m", "dense", False, 8),
        ("125m", "dense", True, 16),
        ("125m", "moe", True, 16),
        ("1b", "dense", True, 8),
        ("7b", "moe", True, 8),
    ],
)
def test_a_small_model_fills_a_gpu_with_more_rows_at_once(size, arch, gpu, micro):
    wish = load(size=size, arch=arch, sets=["model.vocab=32768", "model.seq=2048"])
    assert resolve(wish, ranks=1, gpu=gpu).train.micro_batch == micro


@pytest.mark.parametrize("length", ["train.steps=17", "train.tokens=1000000", "train.flops=1e15"])
def test_length_in_steps_tokens_or_flops(length):
    config = resolve(
        load(size="tiny", sets=["model.seq=128", "train.batch_tokens=2048", length]),
        ranks=2,
        gpu=False,
    )
    tokens = config.train.steps * 2048
    want = {"steps": 17 * 2048, "tokens": 1e6, "flops": 1e15 / flops_per_token(config.model).model}
    assert tokens == pytest.approx(want[length.split(".")[1].split("=")[0]], abs=2048)


@given(
    size=st.sampled_from(["7k", "tiny", "125m", "1b"]),
    arch=st.sampled_from(["dense", "moe", "mla-moe"]),
    ranks=st.integers(1, 24) | st.just(300),
    memory=st.none() | st.floats(25, 38).map(lambda power: int(2**power)),
    gpu=st.booleans(),
    keep=st.booleans(),
    parallel=st.fixed_dictionaries(
        {
            "zero": st.integers(0, 3),
            "engine": st.sampled_from(["deepspeed", "deepspeed", "accelerate"]),
        },
        optional={
            "ep": st.integers(1, 20),
            "sp": st.integers(1, 12),
            "offload.optimizer": st.just("cpu"),
            "offload.params": st.just("cpu"),
        },
    ),
    train=st.fixed_dictionaries(
        {"compile": st.sampled_from(["auto", "true"])},
        optional={
            "batch_tokens": st.integers(1, 40_000),
            "micro_batch": st.integers(1, 9),
            "dtype": st.sampled_from(["fp32", "bf16"]),
            "auto_batch": st.just("true"),
        },
    ),
)
@settings(deadline=None, max_examples=200)
def test_what_a_refusal_names_is_accepted_at_once(
    corpus, size, arch, ranks, memory, gpu, keep, parallel, train
):
    """Whatever stands against a layout, and however much of it: the settings named in the one line work, all of them
    and as they are, in the memory there is."""
    asked = {
        "size": size,
        "nproc": ranks,
        **{f"parallel.{key}": value for key, value in parallel.items()},
    }
    if not memory or "micro_batch" in train:
        train.pop("auto_batch", None)
    asked |= {f"train.{key}": value for key, value in train.items()}
    if keep:  # of a run that goes on
        asked["train.batch_tokens"] = 256 * (1 + int(asked.get("train.batch_tokens", 0)) // 1000)

    def settled(asked: dict[str, Any]) -> RunConfig:
        sets = ["model.seq=256", *(f"{key}={value}" for key, value in asked.items() if "." in key)]
        if keep:
            config = load(size=asked["size"], arch=arch, sets=sets)
            return fit_to_devices(
                config, int(asked["nproc"]), DeviceMemory(memory, shared=not gpu), keep=True
            )[0]
        request = Request(
            asked["size"], arch, corpus, corpus / "none", int(asked["nproc"]), sets=sets
        )
        with patch("shutil.disk_usage", return_value=Mock(free=2**60)):
            return plan_run(request, Devices(8 * gpu, memory, "device")).config

    try:
        settled(asked)
        return
    except ConfigError as error:
        line = str(error)
    assert "\n" not in line
    remedy, _, more = re.split("; (?:try|take) ", line)[-1].partition(", or ")
    if "nothing smaller fits" in line:
        assert memory and (keep or memory < 2**30)
        return
    if more:
        settled({**asked, "nproc": more.removesuffix(" ranks")})
    remedy = re.sub(r"^(\d+) of them with", r"--nproc \1", remedy)
    for key, value in re.findall(r"--(?:set )?([\w.]+)[ =](\S+)", remedy):
        table = {"dtype": "train.", "size": "", "nproc": ""}.get(
            key, "" if "." in key else "parallel."
        )
        asked[table + key] = value
    config = settled(asked)
    readers = int(asked["nproc"]) // config.parallel.sp
    assert config.train.batch_tokens % (256 * readers * config.train.micro_batch) == 0
    assert not keep or config.train.batch_tokens == asked["train.batch_tokens"]
    if config.model.size != size:
        assert params(config.model).total < params(load(size=size, arch=arch).model).total


@pytest.mark.parametrize(
    ("to", "host", "free", "said"),
    [
        (
            "cpu",
            2**28,
            2**40,
            r"offload to the CPU needs about .* 256.0 MiB are free; offload to nvme",
        ),
        (
            "nvme",
            2**28,
            2**28,
            r"offload.path=.* has 256.0 MiB free, the run needs .* there; give another disk",
        ),
        ("nvme", 2**28, 2**40, None),
        ("cpu", 2**36, 2**28, None),
        ("cpu", None, 2**28, None),  # a host that is not known
    ],
)
def test_what_leaves_a_gpu_needs_room_elsewhere(corpus, tmp_path, to, host, free, said):
    (disk := tmp_path / "disk").mkdir()
    sets = ["parallel.zero=3", f"parallel.offload.optimizer={to}", f"parallel.offload.path={disk}"]
    wish = Request("125m", "dense", corpus, tmp_path / "run", 2, sets=sets)
    with patch(
        "shutil.disk_usage", side_effect=lambda at: Mock(free=free if at == disk else 2**60)
    ):
        if said is None:
            plan_run(wish, Devices(2, 2**36, "GPU", host))
            plan_run(
                replace(wish, sets=[*sets, "parallel.offload.path=/nowhere"], fewest=2),
                Devices(2, 2**36, "GPU"),
            )
        else:
            with pytest.raises(UserError, match=said):
                plan_run(wish, Devices(2, 2**36, "GPU", host))


@pytest.mark.parametrize(
    ("arch", "ranks", "sets", "said"),
    [
        ("dense", 2, ["train.batch_tokens=3000"], r"batch_tokens=3,000 .* 512 .*; try --set train.batch_tokens=3072$"),
        ("dense", 2, ["train.micro_batch=5"], r"micro_batch=5 .*; try --set train.micro_batch=4$"),
        ("moe", 6, ["parallel.ep=4", "train.batch_tokens=3000"],
         r"ep=4 .*; try --set parallel.ep=2 --set train.batch_tokens=3072$"),
        ("moe", 2, ["parallel.engine=accelerate", "parallel.ep=2"],
         r"DDP.*ep=2; try --set parallel.zero=0 --set train.dtype=fp32 --set parallel.ep=1$"),
        ("dense", 2, ["parallel.zero=4"], r"^parallel.zero=4: must be 0, 1, 2 or 3$"),
        ("dense", 2, ["parallel.ep=0"], r"^parallel.ep=0: must be greater than 0$"),
    ],
)  # fmt: skip
def test_all_causes_are_told_at_once(arch, ranks, sets, said):
    with pytest.raises(ConfigError, match=said):
        resolve(load(size="tiny", arch=arch, sets=["model.seq=256", *sets]), ranks=ranks, gpu=False)
