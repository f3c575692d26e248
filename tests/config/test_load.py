"""Layers, errors in one line, and a dump that loads back to itself."""

import tomllib

import pytest

from pipeline.config.dump import differences, to_toml
from pipeline.config.layers import load, merge, names, parse_set, reload
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError
from pipeline.planner.recipe import resolve


def test_later_layers_win(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("seed = 7\n[optim]\nclip = 0.5\n[train]\nkeep_last = 9\n")
    config = load(
        size="1b", cluster="h100", file=file, sets=["optim.clip=0.25"], over={"experiment": "mine"}
    )
    assert (config.seed, config.optim.clip, config.train.keep_last) == (
        7,
        0.25,
        9,
    )  # file < --set, file > base
    assert (config.cluster.name, config.experiment, config.model.width) == ("h100", "mine", 2048)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"size": "1bb"}, ["size='1bb'", "'1b'"]),
        ({"size": "2b"}, ["size='2b'", "did you mean '2.7b'"]),
        ({"size": "8B"}, ["size='8B'", "did you mean '7b'"]),
        ({"size": "0.5b"}, ["did you mean '350m'"]),
        ({"size": "0b"}, ["did you mean"]),
        ({"size": "9t"}, ["did you mean '671b'"]),
        ({"size": "1b", "arch": "dens"}, ["arch='dens'", "'dense'"]),
        ({"size": "1b", "cluster": "h10"}, ["cluster='h10'", "'h100'"]),
        ({"size": "1b", "sets": ["optim.lrr=1"]}, ["optim.lrr", "'lr'"]),
        ({"size": "1b", "sets": ["optim.schedule.warmup=1"]}, ["warmup", "'warmup_steps'"]),
        ({"size": "1b", "sets": ["parallel.zero=4"]}, ["parallel.zero=4", "3"]),
        ({"size": "1b", "sets": ["optim.lr=fast"]}, ["optim.lr", "fast"]),
        ({"size": "1b", "sets": ["model.attention.kv_heads=3"]}, ["heads=16", "kv_heads=3"]),
        ({"size": "1b", "sets": ["train.steps=1", "train.tokens=9"]}, ["steps and tokens"]),
        ({"size": "1b", "sets": ["steps"]}, ["--set", "key.subkey=value"]),
        ({"size": "1b", "sets": ["name='a\\nb'"]}, ["name"]),
    ],
)
def test_bad_settings_are_one_line_with_a_remedy(arguments, parts):
    with pytest.raises(ConfigError) as error:
        load(**arguments)
    text = str(error.value)
    assert "\n" not in text
    for part in parts:
        assert part in text


def test_a_kind_that_changes_replaces_its_table():
    cosine = load(size="tiny", sets=["optim.schedule.kind=cosine"]).optim.schedule
    assert cosine.kind == "cosine" and not hasattr(cosine, "decay_share")
    assert merge({"a": {"kind": "x", "b": 1}}, {"a": {"c": 2}}) == {
        "a": {"kind": "x", "b": 1, "c": 2}
    }


def test_set_values_are_toml_or_strings():
    assert parse_set("a.b=3e-4") == {"a": {"b": 3e-4}}
    assert parse_set("a=auto") == {"a": "auto"}
    assert parse_set("a='x=y'") == {"a": "x=y"}


@pytest.mark.parametrize(
    ("size", "arch"),
    [*((s, "dense") for s in names("size")), *(("tiny", a) for a in names("arch"))],
)
def test_resolved_config_survives_the_disk(size, arch, tmp_path):
    config = resolve(load(size=size, arch=arch), ranks=2, gpu=False)
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert reload(path) == config
    assert "'auto'" not in str(tomllib.loads(path.read_text()))


def test_a_config_from_before_a_setting_has_its_default(tmp_path):
    config = resolve(
        load(size="tiny", sets=["train.check_every=5", "optim.schedule.kind=cosine"]),
        ranks=2,
        gpu=False,
    )
    path = tmp_path / "config.toml"
    path.write_text(
        "".join(
            line for line in to_toml(config).splitlines(True) if not line.startswith("check_every")
        )
    )
    assert differences(config, reload(path)) == {"train.check_every": (5, 1)}


def test_a_config_of_another_version_is_refused(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(to_toml(load(size="tiny")).replace("version = 1", "version = 99"))
    with pytest.raises(ConfigError, match=r"version=99.*version 1"):
        reload(path)


def test_differences_are_named():
    a = load(size="tiny")
    b = load(size="tiny", sets=["seed=1", "optim.clip=2.0"])
    assert differences(a, b) == {"seed": (1234, 1), "optim.clip": (1.0, 2.0)}
    assert isinstance(b, RunConfig)
