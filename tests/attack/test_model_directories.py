"""Hostile Hugging Face directories: `launch import` refuses each in one line and leaves nothing."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.attack.harness import DEEP, LEGACY, NODES, expect_none, fault, run

# Values of config.json's keys.
VALUES = {
    "hidden_size": (0, -1, "x", None, 10**9, 1.5, [], 10**400),
    "num_attention_heads": (0, -1, 7, "x", None),
    "num_key_value_heads": (0, 3, "x"),
    "num_hidden_layers": (0, -1, 10**7, "x", 3),
    "intermediate_size": (0, "x", 10**18),
    "vocab_size": (0, 1, 10**12, "x"),
    "max_position_embeddings": (0, "x"),
    "rms_norm_eps": ("x", -1),
    "model_type": ("nonsense", None, 3),
    "quantization_config": ({"quant_method": "fp8"},),
    "rope_parameters": ("x", [1, 2], {"rope_type": "nonsense"}),
    "tie_word_embeddings": ("x",),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """A model directory that imports well."""
    to = tmp_path_factory.mktemp("hub") / "model"
    tokenizer = LEGACY / "corpus" / "tokenizer.model"
    code, printed = run(
        "export", "--run", LEGACY / "runs" / "dense", "--to", to, "--tokenizer", tokenizer
    )
    assert code == 0, printed
    return to


@pytest.fixture
def attack(exported, tmp_path, monkeypatch):
    """Damage a copy of the model, then import it."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")

    def call(damage, *, refuse: bool = True) -> str:
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(exported, copy)
        damage(copy)
        out = tmp_path / "out"
        wrong = fault(["import", "--from", copy, "--out", out], refuse=refuse, out=out)
        return f"{damage.__doc__}: {wrong}" if wrong else ""

    return call


def edit(key: str, value: object):
    def damage(model: Path) -> None:
        file = model / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))

    damage.__doc__ = f"{key}={str(value)[:40]}"
    return damage


def test_config_values(attack) -> None:
    assert sum(map(len, VALUES.values())) + 2 * len(NODES) >= 40
    expect_none(attack(edit(key, value)) for key, values in VALUES.items() for value in values)


def test_special_files(attack) -> None:
    def put(name: str, node: str):
        def damage(model: Path) -> None:
            (model / name).unlink()
            NODES[node](model / name)

        damage.__doc__ = f"{name} is {node}"
        return damage

    names = ("config.json", "model.safetensors")
    expect_none(attack(put(name, node)) for name in names for node in NODES)


def test_weights_that_are_elsewhere_or_cut(attack) -> None:
    def index(weight_map: object):
        def damage(model: Path) -> None:
            text = json.dumps({"weight_map": weight_map})
            (model / "model.safetensors.index.json").write_text(text)

        damage.__doc__ = f"weight_map={weight_map}"
        return damage

    def cut(model: Path) -> None:
        """weights that end early"""
        os.truncate(model / "model.safetensors", 1000)

    files = (3, ["model.safetensors"], "../other/model.safetensors", "\0")
    maps = [{"model.norm.weight": file} for file in files]
    expect_none(map(attack, (cut, *map(index, [*maps, ["model.safetensors"]]))))


def test_nested_configs(attack) -> None:
    def nested(content: str):
        def damage(model: Path) -> None:
            (model / "config.json").write_text(content)

        damage.__doc__ = content[:20]
        return damage

    lists = '{"a": ' + DEEP + "]" * len(DEEP) + "}"
    objects = '{"a":' * 100_000 + "1" + "}" * 100_000
    damages = map(nested, ('{"a": ' + DEEP, lists, objects, "{", "[]"))
    expect_none(map(attack, damages))
