"""Models that cannot be: one line that names the setting, at load, through the command line."""

import pytest


@pytest.mark.parametrize(
    ("arch", "sets", "said"),
    [
        (
            "dense",
            ["attention.heads=3", "attention.kv_heads=2"],
            "heads=3 is not a multiple of kv_heads=2",
        ),
        ("dense", ["attention.head_dim=7"], "head_dim=7 is odd"),
        ("mla", ["attention.rope_dim=5"], "rope_dim=5 is odd"),
        ("mla", ["attention.kv_rank=100"], "kv_rank=100 is above width=64"),
        ("mla", ["attention.q_rank=65"], "q_rank=65 is above width=64"),
        ("mla", ["attention.kv_heads=2"], "kv_heads is not a setting"),
        ("moe", ["ffn.top_k=17"], "top_k=17 is above experts=16"),
        ("moe", ["ffn.groups=3"], "experts=16 is not a multiple of groups=3"),
        ("moe", ["ffn.groups=4", "ffn.top_groups=5"], "top_groups=5 is above groups=4"),
        ("moe", ["ffn.groups=8", "ffn.top_k=4"], "top_k=4 is above the 2 experts of top_groups=1"),
        ("moe", ["ffn.dense_layers=4"], "dense_layers=4 and every=1 leave none of layers=4 routed"),
        ("switch", ["ffn.every=5"], "every=5 leave none of layers=4 routed"),
        ("mixtral", ["ffn.top_k=1"], "the router learns nothing"),
        ("gpt2", ["nope_every=2"], 'position.kind="learned" is not given to layers'),
        ("dense", ["position.theta=1.0"], "position.theta=1.0"),
        (
            "dense",
            ['position.scaling={kind="llama3", factor=8.0, original_seq=64, low=4.0}'],
            "must exceed low=4.0",
        ),
        (
            "dense",
            ['position.scaling={kind="yarn", factor=8.0, original_seq=64, beta_fast=1.0}'],
            "beta_slow=1.0",
        ),
        (
            "mla",
            ["attention.rope_dim=2", 'position.scaling={kind="ntk", factor=8.0}'],
            "one pair is all there is",
        ),
        ("dense", ["norm.bias=true"], "an rmsnorm has none"),
        (
            "dense",
            ["parallel_block=true", 'placement="post"'],
            'parallel_block needs placement="pre"',
        ),
        ("dense", ["attention.global_every=2"], "global_every=2 needs a window"),
        (
            "dense",
            ['position={kind="relative", buckets=32, max_distance=16}'],
            "max_distance=16 must exceed half",
        ),
        ("dense", ['position={kind="sinusoidal"}', "width=63"], "width=63 is odd"),
        ("dense", ["mtp=2048"], "mtp=2048 predicts beyond seq=2048"),
        ("dense", ['ffn.activation="swish"'], "ffn.activation='swish'"),
        ("dense", ['position={kind="rotary"}'], "position"),
        ("dense", ['position.scaling={kind="yarn", factor=4.0}'], "original_seq is missing"),
        ("dense", ["mup_base.base_width=0"], "mup_base.base_width"),
        ("dense", ["layers=0"], "layers=0"),
    ],
)
def test_an_impossible_model_is_one_line(arch, sets, said, inside):
    arguments = [part for each in sets for part in ("--set", f"model.{each}")]
    assert said in inside("show", "--size", "tiny", "--arch", arch, *arguments, code=2)
