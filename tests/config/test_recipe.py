"""Settings that follow from the size, and refusals whose remedies work."""

import json
import re
from dataclasses import asdict, replace
from typing import Any
from unittest.mock import Mock, patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.dump import flags
from pipeline.config.layers import load, load_cluster, names
from pipeline.config.objective import Causal, padded_vocab
from pipeline.config.schema import RunConfig
from pipeline.data.corpus import Corpus
from pipeline.errors import ConfigError, UserError
from pipeline.planner.check import fit_to_devices, resolve
from pipeline.planner.count import flops_per_token, params
from pipeline.planner.memory import DeviceMemory, Layout
from pipeline.planner.recipe import rate_and_batch
from pipeline.train.request import Devices, Request, plan_run


def test_rate_and_batch_follow_the_published_ladder():
    sets = ["recipe=adamw", "train.tokens_per_param=20"]
    config = resolve(load(size="125m", sets=sets), ranks=8, gpu=True)
    n = params(config.model).non_embedding
    assert config.optim.lr == pytest.approx(0.5 * 0.0047 * (n / 108e6) ** (-1 / 3), rel=5e-3)
    # Rounded to 2^k or 3·2^k.
    assert config.train.batch_tokens == pytest.approx(2048 * 160 * (n / 108e6) ** (2 / 3), rel=0.25)
    assert config.optim.optimizer.beta2 == 0.99  # below 524,288 tokens


def rate(*sets, size="1b", arch="dense"):
    return resolve(load(size=size, arch=arch, sets=sets), ranks=8, gpu=True).optim.lr


def test_the_rate_follows_the_length_of_the_run_and_the_predicted_tokens_of_a_batch():
    for recipe, tokens, ratio in (
        ("adamw", 80, 0.5),
        ("adamw", 5, 0.25**0.307),
        ("muon", 80, 0.25**0.15),
    ):
        usual, other = (
            rate(f"recipe={recipe}", f"train.tokens_per_param={each}") for each in (20, tokens)
        )
        assert other / usual == pytest.approx(ratio, rel=1e-2)
    few = ["train.tokens_per_param=20", "objective.rate=0.15"]
    half = ["train.tokens_per_param=20", "objective.rate=0.6"]
    ratio = rate(*few, arch="modernbert") / rate(*half, arch="modernbert")
    assert ratio == pytest.approx(0.5, rel=0.1)  # √(0.15 / 0.6), up to the rounding of the batch
    # A T5 of 568 tokens reads 512 of them for 114 that it predicts.
    spec = load(size="125m", arch="t5", sets=["train.tokens_per_param=1"])
    t5 = resolve(spec, ranks=8, gpu=True)
    n = params(t5.model).active_non_embedding
    short = 0.5 * 0.0047 * (n / 108e6) ** (-1 / 3) * ((512 + 114) / 114 / 20) ** 0.307
    assert t5.optim.lr == pytest.approx(short, rel=1e-2)
    small = ["recipe=adamw", "train.tokens=1e8", "train.batch_tokens=65536"]
    whole = [*small[:2], "train.batch_tokens=262144"]
    assert rate(*small) / rate(*whole) == pytest.approx(0.5, rel=1e-2)


@pytest.mark.parametrize(
    ("arch", "width", "published"),
    [("transformer", 512, 7e-4), ("roberta", 768, 6e-4), ("roberta", 1024, 4e-4)],
)
def test_post_norm_models_take_a_published_rate_and_a_long_warmup(arch, width, published):
    sets = [f"model.width={width}", "train.steps=8000"]
    optim = resolve(load(size="125m", arch=arch, sets=sets), ranks=8, gpu=True).optim
    assert optim.lr == pytest.approx(published, rel=0.25)
    assert optim.schedule.warmup_steps == 2000
    before = resolve(load(size="125m", arch="modernbert", sets=sets[1:]), ranks=8, gpu=True).optim
    # With norms before the blocks.
    assert before.lr > 2 * optim.lr and before.schedule.warmup_steps < 800


def test_the_decay_of_a_few_steps_does_not_turn_weights_around():
    for steps, share in ((3, 0.1), (5000, 0.001)):
        optim = resolve(load(size="6m", sets=[f"train.steps={steps}"]), ranks=1, gpu=True).optim
        assert optim.lr * optim.optimizer.decay == pytest.approx(share, rel=0.01)


def test_muon_lowers_the_rate_of_an_embedding_that_is_also_the_head():
    for tied, ratio in (("false", 37.5), ("true", 2)):
        sets = ["recipe=muon", f"model.tied={tied}"]
        made = resolve(load(size="tiny", sets=sets), ranks=1, gpu=False).optim.optimizer
        assert made.embedding_rate == pytest.approx(ratio * made.head_rate, rel=0.01)


@pytest.mark.parametrize(
    ("arch", "more"), [("mla", []), ("dense", ["model.attention.qk_norm=false"])]
)
def test_muon_halves_the_rate_without_norms_of_queries_and_keys(arch, more):
    length = ["recipe=muon", "train.steps=100", "train.batch_tokens=262144"]
    assert rate(*length, *more, arch=arch) == pytest.approx(rate(*length) / 2, rel=0.01)


def test_an_architecture_names_its_recipe():
    assert load(size="tiny").recipe == "muon"  # docs/RECIPE.md says where it was measured
    assert load(size="tiny", arch="llama3").recipe == "adamw"
    chosen = load(size="tiny", sets=["recipe=adamw"])
    assert (chosen.recipe, chosen.optim.optimizer.kind) == ("adamw", "adamw")


@pytest.mark.parametrize("size", names("size"))
def test_the_batch_is_the_same_on_1_2_4_and_8_ranks(size):
    batches = {resolve(load(size=size), ranks=r, gpu=True).train.batch_tokens for r in (1, 2, 4, 8)}
    assert len(batches) == 1


@pytest.mark.parametrize("ranks", [1, 3, 6, 7, 24, 64])
def test_any_world_size_divides_its_batch(ranks):
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
    sets = ["recipe=adamw", "model.vocab=32768", "model.seq=2048"]
    spec = load(size=size, arch=arch, sets=sets)
    assert resolve(spec, ranks=1, gpu=gpu).train.micro_batch == micro


def test_no_batch_is_empty_or_larger_than_memory():
    assert rate_and_batch(1e9, 1e-320, "muon") == (0.06, 8 * 2048)
    for recipe in ("adamw", "muon"):
        long = load(size="7k", sets=[f"recipe={recipe}", "train.steps=1000000"])
        assert resolve(long, ranks=2, gpu=False).train.batch_tokens <= 2**26
    huge = load(size="7k", sets=[f"train.batch_tokens={2**35}"])
    with pytest.raises(ConfigError, match=f"memory of 2 ranks.* train.batch_tokens={2**28}"):
        resolve(huge, ranks=2, gpu=False)


@pytest.mark.parametrize("length", ["train.steps=17", "train.tokens=1000000", "train.flops=1e15"])
def test_length_in_steps_tokens_or_flops(length):
    spec = load(size="tiny", sets=["model.seq=128", "train.batch_tokens=2048", length])
    config = resolve(spec, ranks=2, gpu=False)
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
    cluster=st.sampled_from([None, "h100"]),
    parallel=st.fixed_dictionaries(
        {"engine": st.sampled_from(["deepspeed", "deepspeed", "accelerate"])},
        optional={
            "zero": st.integers(0, 3),
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
def test_the_remedy_of_a_refusal_is_accepted(
    corpus, size, arch, ranks, memory, gpu, keep, cluster, parallel, train
):
    """Whatever is wrong with a layout, the settings that the error names work together, without
    further changes, and fit the memory."""
    asked = {"size": size, "nproc": ranks}
    asked |= {f"parallel.{key}": value for key, value in parallel.items()}
    if not memory or "micro_batch" in train:
        train.pop("auto_batch", None)
    asked |= {f"train.{key}": value for key, value in train.items()}
    if keep:  # for a run that continues
        asked["train.batch_tokens"] = 256 * (1 + int(asked.get("train.batch_tokens", 0)) // 1000)

    def planned(asked: dict[str, Any]) -> RunConfig:
        sets = ["recipe=adamw", "model.seq=256"]  # Muon's optimizer is not offloaded
        sets += [f"{key}={value}" for key, value in asked.items() if "." in key]
        nproc = int(asked["nproc"])
        if keep:
            spec = load(size=asked["size"], arch=arch, cluster=cluster, sets=sets)
            device = DeviceMemory(memory, shared=not gpu)
            return fit_to_devices(spec, nproc, device, keep=True)[0]
        out = corpus / "none"
        request = Request(asked["size"], arch, corpus, out, nproc, cluster=cluster, sets=sets)
        with patch("shutil.disk_usage", return_value=Mock(free=2**60)):
            return plan_run(request, Devices(8 * gpu, memory, "device")).config

    try:
        planned(asked)
        return
    except ConfigError as error:
        line = str(error)
    assert "\n" not in line
    remedy, _, more = re.split("; (?:try|use) ", line)[-1].partition(", or ")
    if "nothing smaller fits" in line:
        assert memory and (keep or memory < 2**30)
        return
    if more:
        planned({**asked, "nproc": more.removesuffix(" ranks")})
    asked |= settings_in(remedy)
    config = planned(asked)
    readers = int(asked["nproc"]) // config.parallel.sp
    assert config.train.batch_tokens % (256 * readers * config.train.micro_batch) == 0
    assert not keep or config.train.batch_tokens == asked["train.batch_tokens"]
    if config.model.size != size:
        assert params(config.model).total < params(load(size=size, arch=arch).model).total


def settings_in(remedy: str) -> dict[str, str]:
    """The settings that a refusal names, by their keys in a config."""
    remedy = re.sub(r"^(\d+) of them with", r"--nproc \1", remedy)
    tables = {"dtype": "train.", "size": "", "nproc": ""}
    found = re.findall(r"--(?:set )?([\w.]+)[ =](\S+)", remedy)
    return {tables.get(k, "" if "." in k else "parallel.") + k: value for k, value in found}


@pytest.mark.parametrize(
    ("to", "host", "free", "key"),
    [
        ("cpu", 2**28, 2**40, "parallel.offload"),
        ("nvme", 2**28, 2**28, "parallel.offload.path="),
        ("nvme", 2**28, 2**40, None),
        ("cpu", 2**36, 2**28, None),
        ("cpu", None, 2**28, None),  # the memory of the host is not known
    ],
)
def test_offloaded_states_need_space_elsewhere(corpus, tmp_path, to, host, free, key):
    disk = tmp_path / "disk"
    disk.mkdir()
    sets = ["recipe=adamw", "parallel.zero=3"]
    sets += [f"parallel.offload.optimizer={to}", f"parallel.offload.path={disk}"]
    request = Request("125m", "dense", corpus, tmp_path / "run", 2, sets=sets)

    def usage(path):
        return Mock(free=free if path == disk else 2**60)

    with patch("shutil.disk_usage", side_effect=usage):
        if key is not None:
            with pytest.raises(UserError, match=key):
                plan_run(request, Devices(2, 2**36, "GPU", host))
            return
        plan_run(request, Devices(2, 2**36, "GPU", host))
        sets.append("parallel.offload.path=/nowhere")  # for a job, which runs on another machine
        plan_run(replace(request, fewest=2), Devices(2, 2**36, "GPU"))


@pytest.mark.parametrize(
    ("arch", "ranks", "sets", "remedy"),
    [
        ("dense", 2, ["train.batch_tokens=3000"], {"train.batch_tokens": "3072"}),
        ("dense", 2, ["train.micro_batch=5"], {"train.micro_batch": "4"}),
        ("moe", 6, ["parallel.ep=4", "train.batch_tokens=3000"], {"parallel.ep": "2", "train.batch_tokens": "3072"}),
        ("moe", 2, ["parallel.engine=accelerate", "parallel.zero=1", "parallel.ep=2"],
         {"parallel.zero": "0", "train.dtype": "fp32", "parallel.ep": "1"}),
    ],
)  # fmt: skip
def test_all_causes_are_named_at_once(arch, ranks, sets, remedy):
    spec = load(size="tiny", arch=arch, sets=["model.seq=256", *sets])
    with pytest.raises(ConfigError) as error:
        resolve(spec, ranks=ranks, gpu=False)
    message = str(error.value)
    assert all(each.split("=")[0].rpartition(".")[2] in message for each in sets)
    assert settings_in(message.rpartition("; try ")[2].partition(", or ")[0]) == remedy


@pytest.mark.parametrize(
    ("size", "gpus", "given"),
    [("1b", 8, ()), ("7b", 8, ()), ("7b", 16, ("parallel.zero=3",)), ("16b", 16, ()),
     ("1b", 8, ("train.micro_batch=2", "train.recompute=true"))],
)  # fmt: skip
def test_pretrain_uses_the_layout_that_show_recommends(corpus, tmp_path, inside, size, gpus, given):
    vocab = f"model.vocab={padded_vocab(Corpus.open(corpus).manifest.tokenizer.vocab, Causal())}"
    sets = [part for each in (vocab, *given) for part in ("--set", each)]
    shown = inside("show", "--size", size, "--gpus", gpus, "--cluster", "h100", "--json", *sets)
    cluster = load_cluster("h100")
    request = Request(size, None, corpus, tmp_path / "run", gpus, cluster="h100", sets=given)
    with patch("shutil.disk_usage", return_value=Mock(free=2**60)):
        planned = plan_run(request, Devices.of(cluster, 8))
    layout = Layout.of(planned.config, gpus)
    assert asdict(layout) == json.loads(shown)["recommended"]["layout"]
    assert flags(layout.change()) in planned.note
