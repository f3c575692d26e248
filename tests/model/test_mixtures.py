"""Named architectures with parts exchanged at random: refused in one line, or trained, decoded and exported."""

import tempfile
import tomllib
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.config.dump import to_toml
from pipeline.config.layers import load, names
from pipeline.config.shape import Model
from pipeline.errors import ConfigError
from pipeline.hub.exporting import export
from pipeline.hub.families import choose_family
from pipeline.model.build import build_model, init_weights
from pipeline.model.context import Cache

SMALL = ["model.vocab=64", "model.seq=32", "model.layers=3", "model.init_std=0.2"]
CHANGES = [
    'placement="post"', 'placement="sandwich"', 'placement="deepnorm"', "parallel_block=true", "tied=true",
    'norm={kind="layernorm", eps=1e-6, bias=true}', 'norm={kind="layernorm", eps=1e-6}', "norm.eps=1e-6",
    'position={kind="learned"}', 'position={kind="sinusoidal"}', 'position={kind="relative"}',
    'position={kind="alibi"}', 'position={kind="none"}', 'position={kind="rope", theta=1e4}', "nope_every=2",
    'position={kind="rope", theta=1e4, scaling={kind="linear", factor=2.0}}',
    'position={kind="rope", theta=1e4, scaling={kind="ntk", factor=2.0}}',
    'position={kind="rope", theta=1e4, scaling={kind="yarn", factor=2.0, original_seq=16}}',
    'position={kind="rope", theta=1e4, scaling={kind="llama3", factor=2.0, original_seq=16}}',
    "attention.window=5", "attention.global_every=2", "attention.softcap=20.0", "attention.sinks=true",
    "attention.kv_heads=1", "attention.qk_norm=true", "attention.bias=true", "attention.out_bias=true",
    "attention.q_rank=24", "attention.rope_dim=2", "mtp=1", "multipliers.embedding=3.0", "multipliers.residual=0.5",
    "multipliers.logits=2.0", "parametrization=mup", "ffn.bias=true", *(f'ffn.activation="{a}"' for a in
    ("swiglu", "geglu", "reglu", "gelu", "gelu_tanh", "silu", "relu", "relu2")), "ffn.top_k=1", "ffn.top_k=3",
    "ffn.shared=2", 'ffn.router="softmax"', 'ffn.router="sigmoid"', "ffn.normalize=false", "ffn.scale=2.0",
    "ffn.groups=4", "ffn.top_groups=2", "ffn.capacity=1.0", "ffn.aux_loss=0.01", "ffn.seq_aux_loss=0.01",
    "norm.gain=false", "attention.score_scale=1.44", "embedding_norm=true", "value_embeddings=2", "smear=true",
    "residual_scales=true", "backout=true", "logit_softcap=15.0", "ffn.init_scale=0.4", 'init="fan_in"', 'init_out="zero"',
    "embedding_std=0.8", "head_std=0.1", "ffn.z_loss=0.01", "ffn.bias_step=0.001", "ffn.dense_layers=2", "ffn.every=3",
]  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(names("arch")), st.lists(st.sampled_from(CHANGES), max_size=5, unique=True))
def test_any_mixture_is_refused_in_a_line_or_works(arch, changes):
    try:
        config = load(
            size="tiny", arch=arch, sets=[*SMALL, *(f"model.{change}" for change in changes)]
        )
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    cfg = config.model
    assert Model.model_validate(tomllib.loads(to_toml(config))["model"]) == cfg
    model = build_model(cfg)
    init_weights(model, cfg, seed=0)
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(0))
    more = {"source_BE": tokens} if cfg.stack == "encoder-decoder" else {}
    if cfg.row_classes:
        more["labels_B"] = torch.zeros(2, dtype=torch.long)
    targets = tokens[:, 1:] % (2 if cfg.head == "replaced" else 64)
    model(tokens[:, :-1], targets, **more).total.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        for router in model.routers():  # the choice of experts must not depend on rounding
            router.weight.normal_(0, 0.2, generator=torch.Generator().manual_seed(1))
        model.eval()
    if cfg.stack == "decoder":
        agrees_with_its_cache(model, cfg, tokens)
    try:
        choose_family(cfg)
    except ConfigError as error:
        assert "model." in str(error) and "\n" not in str(error)
        return
    with tempfile.TemporaryDirectory() as out:
        assert export(model, Path(out) / "hub", None, torch.float32).difference < 1e-4


def agrees_with_its_cache(model, cfg, tokens):
    with torch.no_grad():
        cache = Cache(cfg.layers, 16)
        cached = [
            model(tokens[:, a:b], cache=cache)
            for a, b in ((0, 9), *((i, i + 1) for i in range(9, 16)))
        ]
        if getattr(cfg.ffn, "capacity", None) is None:
            whole = model(tokens[:, :16])[:, 8:]
            assert (
                torch.cat(cached, 1) - whole
            ).abs().max() < 1e-4 * whole.abs().max()  # logits may be large
