"""Our own class in an exported directory, run by a process that has transformers and nothing of ours."""

import json
import os
import subprocess
import sys

import pytest
import torch

from pipeline.config.layers import load
from pipeline.errors import UserError
from pipeline.hub.exporting import export
from pipeline.hub.families import choose_family
from pipeline.hub.importing import import_model, load_hub_model
from pipeline.model.build import build_model, init_weights
from pipeline.model.decode import beam_search, generate
from tests.hub.test_hub import assert_gradients

SMALL = ["model.vocab=96", "model.seq=64", "model.layers=3", "model.width=32"]
QUIET = ["ffn.aux_loss=0.0", "ffn.seq_aux_loss=0.0", "ffn.z_loss=0.0"]  # only we have them
MODELS = {
    "isoflop": ("isoflop", []),
    "grouped": ("isoflop", ["attention.kv_heads=1", "residual_scales=true", "attention.window=6"]),
    "other norms": (
        "gpt2",
        ['placement="sandwich"', 'position={kind="none"}', "tied=true", "attention.sinks=true"],
    ),
    "routed": (
        "moe",
        [
            "value_embeddings=1",
            "smear=true",
            "logit_softcap=20.0",
            'ffn.activation="relu2"',
            *QUIET,
        ],
    ),
}
# Pads the shorter prompt on the left. Beam search reorders the cache.
THEIRS = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM
for path in map(Path, sys.argv[1:]):
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, dtype=torch.float32).eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    tokens = torch.load(path / "tokens.pt")
    out = model(tokens[:, :-1])
    torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    settings = dict(attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        greedy = model.generate(tokens, **settings)[:, tokens.shape[1]:]
        beams = model.generate(tokens[:1], num_beams=3, max_new_tokens=6, do_sample=False, pad_token_id=0)
    loss = model(tokens, labels=tokens).loss
    torch.save(dict(logits=out.logits, grads=grads, greedy=greedy, beams=beams, loss=loss), path / "out.pt")
assert not any(name.split(".")[0] in ("pipeline", "launch") for name in sys.modules)
"""


def made(arch, changes, seed=1):
    cfg = load(size="tiny", arch=arch, sets=[*SMALL, *(f"model.{each}" for each in changes)]).model
    model = build_model(cfg)
    init_weights(model, cfg, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():  # zeros and ones would hide a mistake
            p.add_(torch.randn(p.shape, generator=generator) * (0.5 if "router" in name else 0.2))
    return model.eval()


def test_exported_code_gives_our_logits_gradients_and_texts(tmp_path):
    models = {name: made(*how) for name, how in MODELS.items()}
    tokens = torch.randint(1, 96, (2, 20), generator=torch.Generator().manual_seed(0))
    for name, model in models.items():
        assert choose_family(model.cfg).kind == "isoflop"
        assert export(model, tmp_path / name, None, torch.float32).difference < 1e-5
        torch.save(tokens, tmp_path / name / "tokens.pt")
    paths = [str(tmp_path / name) for name in models]
    done = subprocess.run(
        [sys.executable, "-P", "-c", THEIRS, *paths],
        env={**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    for name, model in models.items():
        theirs = torch.load(tmp_path / name / "out.pt")
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        torch.testing.assert_close(model(inputs), theirs["logits"], atol=1e-5, rtol=1e-5, msg=name)
        losses = model(inputs, targets)
        losses.total.backward()
        torch.testing.assert_close(losses.nll, theirs["loss"], atol=1e-5, rtol=1e-5)
        state = {key: p for key, p in model.named_parameters() if not key.startswith("ahead.")}
        assert_gradients(model, "isoflop", state, theirs["grads"].__getitem__)
        prompts = [tokens[0].tolist(), tokens[1, 5:].tolist()]
        assert theirs["greedy"].tolist() == generate(model, prompts, 6), name
        best = beam_search(model, prompts[0], 6, None, 3)[0]
        assert theirs["beams"][0, 20:].tolist() == list(best.tokens), name


def test_import_uses_our_class_and_runs_no_file_of_the_directory(tmp_path):
    model = made(*MODELS["isoflop"])
    export(model, tmp_path / "hub", None, torch.float32)
    marker = tmp_path / "executed"
    for name in ("modeling_isoflop.py", "configuration_isoflop.py"):
        (tmp_path / "hub" / name).write_text(f"open({str(marker)!r}, 'w')\n")
    assert import_model(tmp_path / "hub", tmp_path / "begun").difference < 1e-5
    assert not marker.exists()
    again = load_hub_model(tmp_path / "hub")
    free = {"init", "init_out", "embedding_std", "head_std", "size", "arch", "init_std"}
    dumped = [each.cfg.model_dump(exclude={*free, "ffn"}) for each in (model, again)]
    assert dumped[0] == dumped[1]
    state = model.state_dict()
    assert all(torch.equal(state[name], p) for name, p in again.state_dict().items())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("position_type", "learned"),
        ("norm_type", "batch"),
        ("ffn_type", 3),
        ("value_embeddings", 0),
    ],
)
def test_a_setting_without_counterpart_is_refused_in_a_line(key, value, tmp_path):
    export(made(*MODELS["isoflop"]), tmp_path / "hub", None, torch.float32)
    described = json.loads((tmp_path / "hub" / "config.json").read_text())
    (tmp_path / "hub" / "config.json").write_text(json.dumps({**described, key: value}))
    with pytest.raises(UserError) as refused:
        import_model(tmp_path / "hub", tmp_path / "begun")
    assert "\n" not in str(refused.value) and not (tmp_path / "begun").exists()
