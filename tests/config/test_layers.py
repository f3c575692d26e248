"""Layers, one-line errors that name the key, and a dump that loads back to itself."""

import re
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config.dump import differences, to_toml
from pipeline.config.layers import CONFIGS, load, merge, names, parse_set, read_toml, reload
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError, UserError
from pipeline.planner.check import resolve
from pipeline.train.request import Devices, Request, plan_run


def refusal(**arguments):
    with pytest.raises(ConfigError) as error:
        load(**arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_later_layers_win(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("seed = 7\n[optim]\nclip = 0.5\n[train]\nkeep_last = 9\n")
    over = {"experiment": "mine"}
    config = load(size="1b", cluster="h100", file=file, sets=["optim.clip=0.25"], over=over)
    assert (config.seed, config.optim.clip, config.train.keep_last) == (7, 0.25, 9)
    assert (config.cluster.name, config.experiment, config.model.width) == ("h100", "mine", 2048)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"size": "1bb"}, ["size='1bb'", "'1b'"]),
        ({"size": "2b"}, ["size='2b'", "'2.7b'"]),
        ({"size": "8B"}, ["size='8B'", "'7b'"]),
        ({"size": "0.5b"}, ["size='0.5b'", "'350m'"]),
        ({"size": "0b"}, ["size='0b'"]),
        ({"size": "9t"}, ["size='9t'", "'671b'"]),
        ({"arch": "dens"}, ["arch='dens'", "'dense'"]),
        ({"cluster": "h10"}, ["cluster='h10'", "'h100'"]),
    ],
)
def test_unknown_names_suggest_the_nearest(arguments, parts):
    message = refusal(**{"size": "1b", **arguments})
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("sets", "parts"),
    [
        (["optim.lrr=1"], ["optim.lrr", "'optim.lr'"]),
        (["optim.schedule.warmup=1"], ["optim.schedule.warmup", "'optim.schedule.warmup_steps'"]),
        (["parallel.zero=4"], ["parallel.zero=4"]),
        (["optim.lr=fast"], ["optim.lr='fast'"]),
        (["train.steps=1", "train.tokens=9"], ["steps and tokens"]),
        (["steps"], ["--set 'steps'"]),
        (["name='a\\nb'"], ["name="]),
        # Numbers that no library accepts, or with which a count takes minutes.
        ([f"train.steps={10**30}"], ["train.steps="]),
        ([f"seed={2**70}"], ["seed="]),
        (["model.layers=1000000000000"], ["model.layers=1000000000000"]),
        (["cluster.peak_flops=1e15", 'cluster.rates={matmul_share=0}'], ["rates.matmul_share=0"]),
        ([f"model.seq={'[' * 3000}{']' * 3000}"], ["--set model.seq"]),
        # Names that become paths or arguments.
        (["experiment=../../x"], ["experiment='../../x'"]),
        (["experiment=/x"], ["experiment='/x'"]),
        (["name=.."], ["name='..'"]),
        (["cluster.slurm.time=١٢:00:00"], ["cluster.slurm.time="]),
        (['cluster.slurm.container={kind="apptainer", image="--writable"}'], ["container.image="]),
        (["cluster.slurm.setup=-x"], ["cluster.slurm.setup="]),
        (['cluster.slurm.modules=["-x"]'], ["cluster.slurm.modules"]),
    ],
)  # fmt: skip
def test_bad_settings_are_one_line_with_their_key(sets, parts):
    message = refusal(size="1b", sets=sets)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("arch", "sets", "key"),
    [
        ("dense", ["attention.heads=3", "attention.kv_heads=2"], "kv_heads=2"),
        ("dense", ["attention.head_dim=7"], "head_dim=7"),
        ("mla", ["attention.rope_dim=5"], "rope_dim=5"),
        ("mla", ["attention.kv_rank=100"], "kv_rank=100"),
        ("mla", ["attention.q_rank=65"], "q_rank=65"),
        ("mla", ["attention.kv_heads=2"], "attention.kv_heads"),
        ("moe", ["ffn.top_k=17"], "top_k=17"),
        ("moe", ["ffn.groups=3"], "groups=3"),
        ("moe", ["ffn.groups=4", "ffn.top_groups=5"], "top_groups=5"),
        ("moe", ["ffn.groups=8", "ffn.top_k=4"], "top_k=4"),
        ("moe", ["ffn.dense_layers=4"], "dense_layers=4"),
        ("switch", ["ffn.every=5"], "every=5"),
        ("mixtral", ["ffn.top_k=1"], "top_k=1"),
        ("gpt2", ["nope_every=2"], "nope_every=2"),
        ("dense", ["position.theta=1.0"], "position.theta=1.0"),
        ("dense", ['position.scaling={kind="llama3", factor=8.0, original_seq=64, low=4.0}'], "low=4.0"),
        ("dense", ['position.scaling={kind="yarn", factor=8.0, original_seq=64, beta_fast=1.0}'], "beta_fast=1.0"),
        ("dense", ['position.scaling={kind="yarn", factor=4.0}'], "original_seq"),
        ("mla", ["attention.rope_dim=2", 'position.scaling={kind="ntk", factor=8.0}'], "position.scaling.kind"),
        ("dense", ["norm.bias=true"], "bias=true"),
        ("dense", ["parallel_block=true", 'placement="post"'], "parallel_block"),
        ("dense", ["attention.global_every=2"], "global_every=2"),
        ("dense", ['position={kind="relative", buckets=32, max_distance=16}'], "max_distance=16"),
        ("dense", ['position={kind="sinusoidal"}', "width=63"], "width=63"),
        ("dense", ["seq=8", "mtp=8"], "mtp=8"),
        ("dense", ["mtp=2048"], "mtp=2048"),
        ("dense", ['ffn.activation="swish"'], "ffn.activation='swish'"),
        ("dense", ['position={kind="rotary"}'], "position"),
        ("dense", ["mup_base.base_width=0"], "mup_base.base_width=0"),
        ("dense", ["layers=0"], "layers=0"),
        ("dense", ["init_std=1e300"], "init_std=1e+300"),
    ],
)  # fmt: skip
def test_an_impossible_model_is_one_line_with_its_key(arch, sets, key):
    assert key in refusal(size="tiny", arch=arch, sets=[f"model.{each}" for each in sets])


def test_a_file_that_is_nested_too_deeply_is_refused(tmp_path):
    file = tmp_path / "deep.toml"
    file.write_text(f"a = {'[' * 3000}{']' * 3000}")
    with pytest.raises(ConfigError, match=str(file)):
        read_toml(file)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"sets": ["data.dir=/nonexistent"]}, "data.dir=/nonexistent"),
        ({"sets": ["model.segments=2"]}, 'no effect without model.stack="encoder"'),
        ({"sets": ["model.mup_base={base_width=32}"]}, "mup_base.base_width=32 has no effect"),
        ({"out": Path("x" * 300)}, "--out"),
        ({"sets": [f"train.steps={10**17}"]}, "--steps"),
    ],
)
def test_refused_before_anything_is_created(change, key, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = {"size": "tiny", "arch": None, "data": corpus, "out": tmp_path / "run", "nproc": 1}
    with pytest.raises(UserError, match=key):
        plan_run(Request(**{**asked, **change}), Devices(0, 2**36, "CPU"))
    assert not list(tmp_path.iterdir())


def test_a_step_to_keep_after_the_last_one_is_reported(corpus, tmp_path):
    sets = ["train.steps=4", "train.keep_at=[2,5]"]
    request = Request("tiny", None, data=corpus, out=tmp_path / "run", nproc=1, sets=sets)
    assert "train.keep_at=[5] has no effect" in plan_run(request, Devices(0, 2**36, "CPU")).note


def test_an_empty_path_is_refused(inside):
    for words in ("pretrain --size tiny", "data prepare --source python"):
        assert "path is empty" in inside(*words.split(), "--out", "", code=2)


def test_a_published_size_brings_its_architecture():
    assert load(size="671b").model.arch == "deepseek-v3"
    assert load(size="236b").model.arch == "deepseek-v2"
    assert load(size="16b").model.arch == "deepseek-v2-lite"
    assert load(size="671b", arch="dense").model.arch == "dense"
    assert load(size="70b").model.arch == "dense"


# Published lengths of rows, and of those that an encoder reads beside a decoder.
LENGTHS = dict.fromkeys(("bert", "roberta", "albert", "electra", "distilbert"), (512, None))
LENGTHS |= {"modernbert": (1024, None), "t5": (114, 512), "t5-v1.1": (114, 512)}
LENGTHS |= {"bart": (512, 512), "transformer": (256, 256)}


@pytest.mark.parametrize("arch", names("arch"))
def test_rows_have_the_published_length_unless_another_is_given(arch, tmp_path, monkeypatch):
    def longest(**given):
        return load(size="tiny", arch=arch, **given).model.learned_positions

    model = load(size="tiny", arch=arch).model
    assert (model.seq, model.source_seq) == LENGTHS.get(arch, (2048, None))
    base = Path(shutil.copytree(CONFIGS, tmp_path / "configs"), "base.toml")
    base.write_text(base.read_text().replace("seq = 2048", "seq = 64"))
    monkeypatch.setattr("pipeline.config.layers.CONFIGS", base.parent)
    (tmp_path / "run.toml").write_text("model.seq = 96")
    file = longest(file=tmp_path / "run.toml")
    assert (longest(), file, longest(sets=["model.seq=2048"])) == (64, 96, 2048)


@pytest.mark.parametrize(("arch", "source"), [("t5", 2048), ("bart", 4096)])
def test_a_run_of_an_older_release_keeps_its_length(corpus, tmp_path, arch, source):
    sets = [f"model.source_seq={source}"] if arch == "bart" else []
    asked = Request("tiny", arch, data=corpus, out=tmp_path / "run", sets=sets)
    before = replace(asked, sets=[*sets, "model.seq=2048"])
    first = plan_run(before, Devices(0, 2**36, "CPU")).commit().config
    again = plan_run(replace(asked, resume=True), Devices(0, 2**36, "CPU"))
    assert (again.config, first.model.source_seq) == (first, source)


def test_a_kind_that_changes_replaces_its_table():
    cosine = load(size="tiny", sets=["optim.schedule.kind=cosine"]).optim.schedule
    assert cosine.kind == "cosine" and not hasattr(cosine, "decay_share")
    kept = merge({"a": {"kind": "x", "b": 1}}, {"a": {"c": 2}})
    assert kept == {"a": {"kind": "x", "b": 1, "c": 2}}


def test_set_values_are_toml_or_strings():
    assert parse_set("a.b=3e-4") == {"a": {"b": 3e-4}}
    assert parse_set("a=auto") == {"a": "auto"}
    assert parse_set("a='x=y'") == {"a": "x=y"}


@pytest.mark.parametrize(
    ("size", "arch"), [*((s, None) for s in names("size")), *(("tiny", a) for a in names("arch"))]
)
def test_resolved_config_survives_the_disk(size, arch, tmp_path):
    config = resolve(load(size=size, arch=arch), ranks=2, gpu=False)
    assert type(config) is RunConfig
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert reload(path) == config
    assert "'auto'" not in str(tomllib.loads(path.read_text()))


def test_an_older_config_without_a_setting_gets_its_default(tmp_path):
    sets = ["train.check_every=5", "optim.schedule.kind=cosine"]
    config = resolve(load(size="tiny", sets=sets), ranks=2, gpu=False)
    path = tmp_path / "config.toml"
    lines = to_toml(config).splitlines(True)
    path.write_text("".join(line for line in lines if not line.startswith("check_every")))
    assert differences(config, reload(path)) == {"train.check_every": (5, 1)}


@pytest.mark.parametrize(("old", "new", "key"), [
    ("version = 1", "version = 99", "version=99"),
    ("steps = 3", 'steps = "auto"', "train.steps='auto'"),
])  # fmt: skip
def test_a_damaged_config_is_refused(tmp_path, old, new, key):
    path = tmp_path / "config.toml"
    config = resolve(load(size="tiny", sets=["train.steps=3"]), ranks=1, gpu=False)
    path.write_text(re.sub(f"^{old}$", new, to_toml(config), flags=re.MULTILINE))
    with pytest.raises(ConfigError, match=key):
        reload(path)


def test_differences_are_named():
    a = load(size="tiny")
    b = load(size="tiny", sets=["seed=1", "optim.clip=2.0"])
    assert differences(a, b) == {"seed": (1234, 1), "optim.clip": (1.0, 2.0)}
