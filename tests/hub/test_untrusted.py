"""`launch import` of hostile and damaged directories, and what exported files must look like."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from pipeline.config.layers import load as load_config
from pipeline.data.tokenizer import Tokenizer, train
from pipeline.errors import DataError, UserError
from pipeline.hub import importing
from pipeline.hub.exporting import export
from pipeline.hub.importing import import_model, load_hub_model
from pipeline.model.build import build_model, init_weights
from tests.data.conftest import some_texts
from tests.hub.test_hub import random_hub_model


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("good") / "model"
    random_hub_model("qwen3").save_pretrained(path)
    return path


@pytest.fixture
def source(good, tmp_path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "source"))


def set_config(source: Path, **changes) -> None:
    described = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**described, **changes}))


CODE = {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}


@pytest.mark.parametrize(("model_type", "works"), [("qwen3", True), ("evil", False)])
def test_import_never_runs_a_models_code(model_type, works, source, tmp_path, monkeypatch):
    marker = tmp_path / "executed"
    (source / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Config: ...\n")
    set_config(source, model_type=model_type, attn_implementation="evil/kernel", **CODE)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on stdin"))
    if works:
        assert import_model(source, tmp_path / "out").difference < 1e-5
    else:
        with pytest.raises(UserError, match="evil"):
            import_model(source, tmp_path / "out")
    assert not marker.exists()


def test_a_yes_on_stdin_runs_no_code(source, tmp_path, monkeypatch):
    """transformers asks before it runs code; here it sees the directory itself, not our copy."""
    marker = tmp_path / "executed"
    (source / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Config: ...\n")
    model, family = importing._load(source, source)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for model_type, call in {
        "evil": lambda: importing._load(source, source),
        "vit": lambda: importing.logit_difference(model, family, source),  # has no such class
    }.items():
        set_config(source, model_type=model_type, **CODE)
        with pytest.raises((UserError, ValueError)):
            call()
        assert not marker.exists(), model_type


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [("num_hidden_layers", 10**7, "tensors in all"), ("vocab_size", 10**12, "exceeds the files")],
)
def test_a_size_that_no_file_has_is_refused_before_it_is_built(key, value, reason, source):
    set_config(source, **{key: value})
    with pytest.raises(DataError, match=reason):
        load_hub_model(source)


def test_other_files_of_the_directory_are_not_read(source, tmp_path):
    for name in ("generation_config.json", "adapter_config.json", "pytorch_model.bin"):
        (source / name).unlink(missing_ok=True)
        os.mkfifo(source / name)  # opening one would block forever
    import_model(source, tmp_path / "out")


@pytest.mark.parametrize("name", ["tokenizer.model", "model.safetensors", "config.json"])
def test_a_link_out_of_the_directory_is_refused(name, source, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    if (source / name).exists():
        (source / name).rename(elsewhere)
    else:
        elsewhere.write_text("secret")
    (source / name).symlink_to(elsewhere)
    with pytest.raises(DataError, match=name):
        import_model(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_hubs_cache_of_links_is_imported(source, tmp_path):
    blobs = tmp_path / "hub" / "blobs"
    snapshot = tmp_path / "hub" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in source.iterdir():
        path.rename(blobs / f"hash-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/hash-{path.name}")
    load_hub_model(snapshot)


def exported(directory: Path, *sets: str) -> Path:
    cfg = load_config(size="tiny", arch="llama3", sets=["model.vocab=512", *sets]).model
    model = build_model(cfg)
    init_weights(model, cfg, seed=1)
    export(model, directory, Tokenizer(train(some_texts(300), 512)), torch.float32)
    return directory


YARN = 'model.position={kind="rope", theta=2e5, scaling={kind="yarn", factor=4.0, original_seq=64}}'


@pytest.mark.parametrize(("sets", "theta"), [((), 500_000.0), ((YARN,), 200_000.0)])
def test_transformers_4_and_5_find_their_own_keys(sets, theta, tmp_path):
    """transformers 4 uses a theta of 10,000 if it finds none, and adds token_type_ids."""
    umask = os.umask(0o027)
    try:
        directory = exported(tmp_path / "out", *sets)
    finally:
        os.umask(umask)
    config = json.loads((directory / "config.json").read_text())
    scaling = dict(config["rope_parameters"])
    assert config["rope_theta"] == scaling.pop("rope_theta") == theta
    assert config["rope_scaling"] == (scaling if sets else None)
    assert config["torch_dtype"] == config["dtype"] == "float32"
    about = json.loads((directory / "tokenizer_config.json").read_text())
    assert about["model_input_names"] == ["input_ids", "attention_mask"]
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o640}


def test_an_imported_model_without_a_tokenizer_is_exported(source, inside, tmp_path):
    inside("import", "--from", source, "--out", tmp_path / "run")
    printed = inside("export", "--run", tmp_path / "run", "--to", tmp_path / "hub")
    assert "--tokenizer" in printed
    assert not (tmp_path / "hub" / "tokenizer_config.json").exists()
    load_hub_model(tmp_path / "hub")
