"""A model of Hugging Face becomes ours and is converted back; logits, losses and gradients are equal."""

import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.checkpoint.restore import load_model
from pipeline.config.layers import load as load_config
from pipeline.config.layers import names
from pipeline.errors import ConfigError, RunError, UserError
from pipeline.hub import families
from pipeline.hub.exporting import export
from pipeline.hub.families import choose_family
from pipeline.hub.importing import import_model, load_hub_model
from pipeline.hub.tensors import gather
from pipeline.model.build import build_model, init_weights

VOCAB, LENGTH, SOURCE = 96, 24, 17
BERT = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
        "intermediate_size": 48, "max_position_embeddings": 32, "initializer_range": 0.2, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}  # fmt: skip
SIDES = {"vocab_size": VOCAB, "d_model": 32, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 32,
         "init_std": 0.2, "dropout": 0.0, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}  # fmt: skip
T5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 6, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 2,
      "num_heads": 4, "dropout_rate": 0.0, "relative_attention_num_buckets": 8,
      "relative_attention_max_distance": 16, "eos_token_id": None, "pad_token_id": None}  # fmt: skip
MODERN = {key: value for key, value in BERT.items() if "dropout" not in key}
SHAPE = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
         "num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
         "initializer_range": 0.2}  # fmt: skip
GROUPED = {**SHAPE, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 3, "n_routed_experts": 8, "n_shared_experts": 2,
           "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}  # fmt: skip
LATENT = {**SHAPE, **EXPERTS, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
          "qk_nope_head_dim": 8, "v_head_dim": 6}  # fmt: skip
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
TINY = ["model.vocab=128", "model.seq=64", "model.layers=4"]
# A model_type and its settings, for its usual class; or a class and its settings.
CASES = {
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2,
             "bos_token_id": None, "eos_token_id": None},
    "llama": {**GROUPED, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    "llama, tied": {**GROUPED, "tie_word_embeddings": True, "rope_parameters": {**YARN, "attention_factor": 1.3}},
    "qwen3": GROUPED,
    "qwen3, window": {**GROUPED, "use_sliding_window": True, "sliding_window": 8,
                      "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "mistral": {**GROUPED, "sliding_window": 8,
                "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "mixtral": {**GROUPED, "num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": {**GROUPED, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
                  "mlp_only_layers": [0], "norm_topk_prob": True},
    "deepseek_v2": {**LATENT, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy",
                    "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    "deepseek_v2, straight": {**LATENT, "q_lora_rank": None},
    "deepseek_v3": {**LATENT, "n_group": 4, "topk_group": 2,
                    "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "dots1": {**GROUPED, **EXPERTS, "norm_topk_prob": True},
    "bert": ("BertForPreTraining", BERT),
    "bert, masked only": ("BertForMaskedLM", {**BERT, "hidden_act": "gelu_new"}),
    "roberta": ("RobertaForMaskedLM", {**BERT, "pad_token_id": 1, "type_vocab_size": 1}),
    "modernbert": ("ModernBertForMaskedLM", {**MODERN, "local_attention": 8, "cls_token_id": None,
                                             "sep_token_id": None}),
    "modernbert, biased": ("ModernBertForMaskedLM", {
        **MODERN, "local_attention": 8, "cls_token_id": None, "sep_token_id": None, "norm_bias": True,
        "attention_bias": True, "mlp_bias": True, "classifier_bias": True}),
    "distilbert": ("DistilBertForMaskedLM", {
        "vocab_size": VOCAB, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "dropout": 0.0,
        "attention_dropout": 0.0, "max_position_embeddings": 32, "initializer_range": 0.2, "pad_token_id": None}),
    "albert": ("AlbertForPreTraining", {**BERT, "embedding_size": 16, "classifier_dropout_prob": 0.0}),
    "electra": ("ElectraForPreTraining", {**BERT, "embedding_size": 16}),
    "electra, one width": ("ElectraForPreTraining", {**BERT, "embedding_size": 32}),
    "t5": ("T5ForConditionalGeneration", T5),
    "t5, v1.1": ("T5ForConditionalGeneration", {
        **T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "bart": ("BartForConditionalGeneration", SIDES),
    "marian": ("MarianMTModel", {**SIDES, "activation_function": "relu", "scale_embedding": True}),
}  # fmt: skip


def random_hub_model(case):
    torch.manual_seed(0)
    settings = CASES[case]
    make = AutoModelForCausalLM.from_config
    if isinstance(settings, tuple):
        make = getattr(transformers, settings[0])
        settings = settings[1]
    theirs = make(AutoConfig.for_model(case.partition(",")[0], **settings))
    if case == "t5, v1.1":  # transformers ties the head until the file has one
        theirs.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, 32))
        theirs.config.tie_word_embeddings = False
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if p.ndim < 2:  # gains of 1 and biases of 0 would hide a mistake
                p.add_(torch.randn_like(p) * 0.2)
            elif p.requires_grad and case.startswith("t5") and "shared" not in name:
                p.normal_(0, 0.2)
            elif "gate.weight" in name:  # the choice of experts must not depend on rounding
                p.normal_(0, 1.0)
        for name, b in theirs.named_buffers():
            if name.endswith("e_score_correction_bias"):
                b.copy_(torch.randint(-200, 200, b.shape) * 0.001)
    return theirs.eval()


def inputs(case):
    """Return tokens, targets and row labels as inputs of our model, and the same as inputs of theirs."""
    g = torch.Generator().manual_seed(1)
    tokens, source = (torch.randint(3, VOCAB, (2, n), generator=g) for n in (LENGTH, SOURCE))
    if case.startswith(("t5", "bart", "marian")):
        return (
            {"tokens_BS": tokens, "source_BE": source},
            {"input_ids": source, "decoder_input_ids": tokens},
        )
    ours, theirs = {"tokens_BS": tokens}, {"input_ids": tokens}
    if case.startswith(("bert", "albert", "electra")):
        segments = (torch.arange(LENGTH) > 9).long().expand(2, -1)
        ours["segments_BS"] = theirs["token_type_ids"] = segments
    return ours, theirs


def their_loss(case, out, targets, labels):
    if case.startswith("electra"):
        kept = targets >= 0
        return F.binary_cross_entropy_with_logits(out.logits[kept], targets[kept].float())
    logits = their_logits(out)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    if case in ("bert", "albert"):
        rows = out.seq_relationship_logits if case == "bert" else out.sop_logits
        loss = loss + F.cross_entropy(rows, labels)
    return loss


def their_logits(out):
    return out.prediction_logits if hasattr(out, "prediction_logits") else out.logits


@pytest.mark.parametrize("case", CASES)
def test_a_model_of_theirs_becomes_ours_and_goes_back(case, tmp_path):
    theirs = random_hub_model(case)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_hub_model(tmp_path / "theirs")
    given, their_inputs = inputs(case)
    out = theirs(**their_inputs)
    # The tolerance is relative to the largest logit: rounding in fp32 depends on the processor.
    near = 1e-5 * max(1.0, float(their_logits(out).abs().max()))
    torch.testing.assert_close(ours(**given), their_logits(out), atol=near, rtol=1e-5)

    g = torch.Generator().manual_seed(2)
    classes = 2 if case.startswith("electra") else VOCAB
    targets = torch.randint(classes, (2, LENGTH), generator=g)
    targets[torch.rand(2, LENGTH, generator=g) < 0.6] = -100
    labels = torch.tensor([1, 0])
    loss = their_loss(case, out, targets, labels)
    loss.backward()
    losses = ours(**given, targets_BS=targets, labels_B=labels)
    losses.total.backward()
    # The balance losses of experts, which theirs do not have, are zero.
    torch.testing.assert_close(losses.total, loss.detach(), atol=1e-5, rtol=1e-5)
    state = dict(ours.named_parameters())
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    assert_gradients(ours, case.partition(",")[0], state, lambda name: hub_gradient(grads, name))

    done = export(ours, tmp_path / "ours", None, torch.float32, shard_bytes=20_000)
    assert done.difference < 1e-5 and done.architecture == type(theirs).__name__
    assert (tmp_path / "ours" / "model.safetensors.index.json").exists()
    again = type(theirs).from_pretrained(tmp_path / "ours").eval()(**their_inputs)
    torch.testing.assert_close(their_logits(again), their_logits(out), atol=1e-5, rtol=1e-5)


def assert_gradients(ours, family, parameters, read):
    """Compare the gradients of our parameters with theirs, which `read` returns by their names."""
    found = dict(gather(ours.cfg, family, parameters, read))
    assert found.keys() == parameters.keys()
    for name, p in parameters.items():
        near = 1e-4 * float(found[name].abs().max() + 1e-3)
        torch.testing.assert_close(p.grad, found[name], atol=near, rtol=1e-4, msg=name)


def hub_gradient(grads, name):
    """Return gradients by the name on disk: in memory, transformers has fused experts."""
    name = name.replace("block_sparse_moe", "mlp")
    if name in grads:
        return grads[name]
    at, _, rest = name.partition(".experts.")
    expert, part, _ = rest.split(".")
    if part in ("down_proj", "w2"):
        return grads[f"{at}.experts.down_proj"][int(expert)]
    return grads[f"{at}.experts.gate_up_proj"][int(expert)].chunk(2)[part in ("up_proj", "w3")]


@pytest.mark.parametrize("arch", [arch for arch in names("arch") if arch != "switch"])
def test_every_named_architecture_but_switch_has_a_counterpart(arch, tmp_path):
    """Our named architectures with random weights, exported, imported and compared."""
    sets = ["model.attention.window=8"] if arch == "mistral" else []
    cfg = load_config(size="tiny", arch=arch, sets=[*TINY, *sets]).model
    model = build_model(cfg)
    init_weights(model, cfg, seed=1)
    torch.manual_seed(1)  # of the router's steps and the tokens
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8 if p.ndim > 1 and cfg.stack == "decoder" else 1)  # far from even routing
        for router in model.routers():
            if router.steps is not None:
                router.steps += torch.randint(-30, 30, router.steps.shape)
    done = export(model, tmp_path / "out", None, torch.float32)
    assert done.difference < 1e-5
    assert import_model(tmp_path / "out", tmp_path / "begun").difference < 1e-5
    again = load_model(tmp_path / "begun")[0]  # through a checkpoint
    assert again.cfg.mtp == (cfg.mtp if choose_family(cfg).kind == "deepseek_v3" else 0)
    if cfg.stack == "decoder":
        tokens = torch.randint(128, (1, 20))
        torch.testing.assert_close(again(tokens), model(tokens))
    a, b = model.state_dict(), again.state_dict()
    assert [name for name in a if name not in b and not name.startswith("ahead.")] == []
    for name in b:
        if name.endswith("router.steps"):  # zero-mean at use: a constant is lost
            assert (a[name] - b[name]).float().std() < 0.51
        else:
            assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize(
    ("arch", "sets", "names_"),
    [
        ("switch", [], "ffn.capacity=1.25"),
        ("mixtral", ["model.ffn.capacity=1.25"], "ffn.capacity=1.25"),
        ("gpt2", ['model.position={kind="alibi"}'], "position.kind='alibi'"),
        ("mla", ["model.norm.eps=1e-5"], "norm.eps=1e-05"),
        ("dense", ["recipe=adamw", "model.parametrization=mup"], "parametrization='mup'"),
        ("t5", ["model.share_layers=encoder"], "share_layers='encoder'"),
    ],
)
def test_settings_without_a_counterpart_are_named(arch, sets, names_):
    with pytest.raises(ConfigError) as error:
        choose_family(load_config(size="tiny", arch=arch, sets=[*TINY, *sets]).model)
    assert names_ in str(error.value) and "\n" not in str(error.value)


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    """A rotary base that config.json does not have: transformers computes something else from the same weights."""
    cfg = load_config(size="tiny", arch="llama3", sets=TINY).model
    model = build_model(cfg)
    init_weights(model, cfg, seed=1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8)
    old = families.to_hub_config
    lie = lambda *a: {**old(*a), "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}  # noqa: E731
    monkeypatch.setattr("pipeline.hub.exporting.to_hub_config", lie)
    with pytest.raises(RunError, match="--to"):
        export(model, tmp_path / "out", None, torch.float32)
    assert not list(tmp_path.iterdir())


def test_an_import_is_whole_or_refused(tmp_path):
    theirs = random_hub_model("qwen3")
    theirs.save_pretrained(tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    described = json.loads((tmp_path / "a" / "config.json").read_text())
    for what, change, config in [
        ("model.norm.weight is missing", {"model.norm.weight": None}, {}),
        ("model.extra.weight and 0 more", {"model.extra.weight": torch.ones(2)}, {}),
        ("has shape", {"model.norm.weight": torch.ones(7)}, {}),
        ("hidden_act='gelu'", {}, {"hidden_act": "gelu"}),
        ("model_type='gpt_neox'", {}, {"model_type": "gpt_neox"}),
        (
            "rope_type='dynamic'",
            {},
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        ),
    ]:
        kept = {k: v for k, v in {**tensors, **change}.items() if v is not None}
        save_file(kept, tmp_path / "a" / "model.safetensors", {"format": "pt"})
        (tmp_path / "a" / "config.json").write_text(json.dumps({**described, **config}))
        with pytest.raises(UserError) as error:
            load_hub_model(tmp_path / "a")
        assert what in str(error.value) and "\n" not in str(error.value)
