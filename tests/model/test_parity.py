"""Our decoder against Hugging Face's: the same weights give the same logits and gradients."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from pipeline.config.load import load
from pipeline.model.build import build, draw


def pair(qk_norm, tied):
    flags = [f"model.attention.qk_norm={str(qk_norm).lower()}", f"model.tied={str(tied).lower()}"]
    cfg = load(size="500k", sets=["model.vocab=128", "model.seq=48", "model.attention.kv_heads=1", *flags]).model
    ours = build(cfg, loss_chunk=17)
    draw(ours, cfg, seed=3)
    shape = {
        "vocab_size": cfg.vocab,
        "hidden_size": cfg.width,
        "intermediate_size": cfg.ffn.hidden,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.attention.heads,
        "num_key_value_heads": cfg.attention.kv_heads,
        "head_dim": cfg.attention.head_dim,
        "rms_norm_eps": cfg.norm.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.position.theta},
        "tie_word_embeddings": tied,
    }
    theirs = Qwen3ForCausalLM(Qwen3Config(**shape)) if qk_norm else LlamaForCausalLM(LlamaConfig(**shape))
    theirs.load_state_dict(translate(ours, cfg, tied), strict=True)
    return ours, theirs


def translate(ours, cfg, tied):
    a, heads = cfg.attention, (cfg.attention.heads, cfg.attention.kv_heads, cfg.attention.kv_heads)
    out = {"model.embed_tokens.weight": ours.embedding.weight, "model.norm.weight": ours.norm.gain}
    out["lm_head.weight"] = ours.embedding.weight if tied else ours.head.weight
    for i, block in enumerate(ours.blocks):
        at = f"model.layers.{i}."
        for name, part in zip("qkv", block.attention.qkv.weight.split([h * a.head_dim for h in heads]), strict=True):
            out[f"{at}self_attn.{name}_proj.weight"] = part
        gate, up = block.ffn.up.weight.chunk(2)
        out |= {
            f"{at}self_attn.o_proj.weight": block.attention.out.weight,
            f"{at}mlp.gate_proj.weight": gate,
            f"{at}mlp.up_proj.weight": up,
            f"{at}mlp.down_proj.weight": block.ffn.out.weight,
            f"{at}input_layernorm.weight": block.at_attention.before.gain,
            f"{at}post_attention_layernorm.weight": block.at_ffn.before.gain,
        }
        if a.qk_norm:
            out |= {f"{at}self_attn.{c}_norm.weight": getattr(block.attention, f"{c}_norm").gain for c in "qk"}
    return {k: v.detach().clone() for k, v in out.items()}


@pytest.mark.parametrize(("qk_norm", "tied"), [(True, False), (True, True), (False, False)])
def test_logits_loss_and_gradients_equal_hugging_faces(qk_norm, tied):
    ours, theirs = pair(qk_norm, tied)
    tokens = torch.randint(128, (3, 49), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    theirs.eval()
    logits = theirs(inputs).logits
    torch.testing.assert_close(ours(inputs), logits, atol=1e-5, rtol=0)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    losses = ours(inputs, targets)
    losses.total.backward()
    torch.testing.assert_close(losses.nll, loss.detach(), atol=1e-6, rtol=0)
    a = ours.blocks[1].attention.qkv.weight.grad[: theirs.model.layers[1].self_attn.q_proj.weight.shape[0]]
    torch.testing.assert_close(a, theirs.model.layers[1].self_attn.q_proj.weight.grad, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(ours.embedding.weight.grad, theirs.model.embed_tokens.weight.grad, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(ours.norm.gain.grad, theirs.model.norm.weight.grad, atol=1e-6, rtol=1e-4)


def test_recompute_changes_no_number():
    cfg = load(size="tiny", sets=["model.vocab=64", "model.seq=16"]).model
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(1))
    grads = []
    for recompute in (False, True):
        model = build(cfg, recompute=recompute)
        draw(model, cfg, seed=1)
        model(tokens[:, :-1], tokens[:, 1:]).total.backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_the_draw_depends_on_seed_and_name_alone():
    cfg = load(size="tiny", sets=["model.vocab=64"]).model
    deeper = load(size="tiny", sets=["model.vocab=64", "model.layers=6"]).model
    models = []
    for c, seed in ((cfg, 1), (cfg, 1), (deeper, 1), (cfg, 2)):
        torch.manual_seed(len(models))  # the global generator must not matter
        models.append(build(c))
        draw(models[-1], c, seed)
    weights = [m.blocks[0].ffn.up.weight for m in models]
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[3])
    out = models[0].blocks[0].ffn.out.weight
    assert out.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.05)
    assert weights[0].std().item() == pytest.approx(0.02, rel=0.05)
