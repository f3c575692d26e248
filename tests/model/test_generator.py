"""ELECTRA's generator against Hugging Face's two models, and only the predicted tokens at the head."""

import pytest
import scipy.stats
import torch
import transformers

from pipeline.config.layers import load
from pipeline.errors import ConfigError
from pipeline.hub import tensors
from pipeline.hub.exporting import export
from pipeline.hub.importing import load_hub_model
from pipeline.hub.sequences import export_family
from pipeline.hub.tensors import TENSORS
from pipeline.model.build import build_model, init_weights
from pipeline.model.generator import fill_masks, gumbel
from pipeline.model.side import Inputs
from pipeline.objective.batch import random_batch
from pipeline.planner.check import resolve
from pipeline.planner.count import params
from pipeline.planner.work import training_flops
from tests.hub.test_hub import BERT, LENGTH, VOCAB, assert_gradients, random_hub_model
from tests.hub.test_stacks import SMALL
from tests.model.test_account import counted

GENERATOR = {
    **TENSORS["electra"],
    "transform.dense": "generator_predictions.dense",
    "transform.norm": "generator_predictions.LayerNorm",
    "head": "generator_lm_head",
}


def hub_generator(**changed):
    return transformers.ElectraForMaskedLM(transformers.ElectraConfig(**{**BERT, **changed}))


def test_losses_and_gradients_are_those_of_both_models_of_transformers(tmp_path, monkeypatch):
    monkeypatch.setitem(TENSORS, "generator", GENERATOR)
    finds = random_hub_model("electra")
    finds.save_pretrained(tmp_path)
    fills = hub_generator(
        embedding_size=16, hidden_size=8, num_attention_heads=1, intermediate_size=12
    ).eval()
    # As in pretraining: one set of embeddings, which is also the generator's output.
    fills.electra.embeddings = finds.electra.embeddings
    fills.generator_lm_head.weight = finds.electra.embeddings.word_embeddings.weight

    cfg = load_hub_model(tmp_path).cfg.model_copy(update={"generator": 0.25})
    ours = build_model(cfg, most_targets=6, loss_chunk=5)
    ours.load_state_dict(load_hub_model(tmp_path).state_dict(), strict=False)
    own = dict(ours.generator.named_parameters())
    theirs = dict(fills.named_parameters(remove_duplicate=False))
    state = dict(tensors.gather(ours.generator.cfg, "generator", own, theirs.__getitem__))
    assert state.keys() == own.keys()
    with torch.no_grad():
        for name, tensor in state.items():
            own[name].copy_(tensor)

    tokens, targets = torch.randint(3, VOCAB, (2, 2, LENGTH))
    targets[0, 5:] = targets[1, :18] = -100  # five and six
    draws = torch.randint(2**32, (2, LENGTH))
    filled = fill_masks(ours.generator, Inputs(tokens), targets, draws)
    text = torch.where(targets >= 0, targets, tokens)
    changed = (filled.tokens_BS != text).long()
    assert changed.sum() > 5 and changed[targets < 0].sum() == 0
    assert filled.replaced_BS.equal(changed)
    # transformers' own losses: masked tokens, and binary cross-entropy of every token.
    loss = fills(tokens, labels=targets).loss + 50 * finds(filled.tokens_BS, labels=changed).loss
    loss.backward()
    out = ours(tokens, targets, draws_BS=draws)
    out.total.backward()
    torch.testing.assert_close(out.total, loss.detach(), atol=1e-4, rtol=1e-5)
    grads = [{n: p.grad for n, p in model.named_parameters()} for model in (finds, fills)]
    found = dict(ours.named_parameters())
    own = {name: p for name, p in found.items() if name.startswith("generator.")}
    own = {name.removeprefix("generator."): p for name, p in own.items()}
    outer = {name: p for name, p in found.items() if not name.startswith("generator.")}
    assert_gradients(ours, "electra", outer, grads[0].__getitem__)
    assert_gradients(ours.generator, "generator", own, grads[1].__getitem__)


def test_samples_have_the_probabilities_of_the_generator():
    cfg = load(
        size="27k", arch="electra", pieces=50, sets=["model.seq=16", "model.generator=1"]
    ).model
    model = build_model(cfg, most_targets=16)
    init_weights(model, cfg, 0)
    with torch.no_grad():
        model.generator.head.bias.normal_(0, 2)
    rows = 1500
    tokens = torch.full((rows, 16), 50)
    draws = torch.randint(2**32, (rows, 16))
    with torch.no_grad():
        filled = fill_masks(model.generator, Inputs(tokens), torch.zeros_like(tokens), draws)
        share = model.generator(tokens[:1]).softmax(-1).mean((0, 1)).double()
    found = torch.bincount(filled.tokens_BS.flatten(), minlength=cfg.vocab)
    count = rows * 16
    squares = (found - share * count).square() / (share * count)
    # Pearson's chi-square has as many degrees of freedom as tokens, less one.
    assert squares.sum() < cfg.vocab + 5 * (2 * cfg.vocab) ** 0.5
    assert share.max() > 0.1


def test_noise_is_gumbel_and_a_function_of_its_key():
    keys = torch.randint(2**32, (2000,), generator=torch.Generator().manual_seed(0))
    noise = gumbel(keys, 500)
    assert noise.isfinite().all() and noise[7:8].equal(gumbel(keys[7:8], 500))
    kept = scipy.stats.kstest(noise.flatten().double().numpy(), "gumbel_r")
    assert kept.statistic < 1.6e-3  # of a million numbers; 1.63e-3 is the 99% quantile
    neighbors = torch.corrcoef(torch.stack((noise[:-1].flatten(), noise[1:].flatten())))
    assert neighbors[0, 1].abs() < 4e-3


def test_an_export_leaves_the_generator_out(tmp_path):
    sets = ["model.vocab=96", "model.seq=32", "model.generator=0.5"]
    cfg = load(size="tiny", arch="electra", sets=sets).model
    model = build_model(cfg)
    init_weights(model, cfg, 0)
    assert export_family(cfg, None).architecture == "ElectraForPreTraining"
    assert export(model, tmp_path / "out", None, torch.float32).difference < 1e-5


@pytest.mark.parametrize("share", [0.25, 1.0])  # of ELECTRA-small in the paper, and as published
def test_parameters_are_those_of_transformers(share):
    sets = [f"model.{each}" for each in ("vocab=30522", "seq=512", *SMALL, f"generator={share}")]
    cfg = load(size="15m", arch="electra", sets=sets).model
    heads = round(4 * share)
    with torch.device("meta"):
        theirs = hub_generator(
            vocab_size=30522, embedding_size=128, hidden_size=64 * heads, num_hidden_layers=12,
            num_attention_heads=heads, intermediate_size=256 * heads, max_position_embeddings=512,
        )  # fmt: skip
        ours = build_model(cfg)
    own = {
        name: p.numel() for name, p in theirs.named_parameters()
        if not name.startswith("electra.embeddings.")
    }  # fmt: skip
    total = 13_549_057 + sum(own.values())
    assert sum(p.numel() for p in ours.parameters()) == params(cfg).total == total


@pytest.mark.parametrize("arch", ["bert", "modernbert", "electra"])
def test_only_predicted_tokens_reach_the_head_and_the_count_follows(arch):
    more = ["model.generator=0.5"] if arch == "electra" else []
    spec = load(size="tiny", arch=arch, sets=["model.seq=64", *more], pieces=500)
    config = resolve(spec, ranks=1, gpu=False)
    batch = random_batch(config, 0, range(2)).inputs
    most = spec.objective.most_targets(64)
    assert int((batch["targets_BS"] >= 0).sum(1).max()) == most
    results = []
    for few in (most, 64):
        model = build_model(spec.model, most_targets=few)
        init_weights(model, spec.model, 0)
        out = model(**batch)
        out.total.backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        results.append((out.total.detach(), out.nll, grads))
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=1e-5)
    model = build_model(spec.model, most_targets=most)
    init_weights(model, spec.model, 0)
    tokens = torch.cat((batch.pop("tokens_BS"), batch["targets_BS"][:, -1:]), dim=1)
    targets = batch.pop("targets_BS")

    class Whole(torch.nn.Module):  # `counted` passes a text and its next tokens
        def forward(self, tokens_BS, _next_BS, **fields):
            return model(tokens_BS, targets, **fields)

    by_op = counted(Whole(), tokens, **batch)
    flops = sum(by_op.values()) - by_op["aten.bmm"]
    want = training_flops(spec).matmul * 2 * 64
    # The generator's logits are computed once more, to sample from them.
    head = 2 * spec.model.vocab * spec.model.input_width + 2 * spec.model.input_width * 32
    again = 2 * most * head if more else 0
    # A product looks up the segments, forward and backward. The count has no lookups.
    pairs = "segments_BS" in batch
    lookup = 2 * 2 * 2 * 64 * spec.model.segments * spec.model.input_width * pairs
    assert abs(flops - again - lookup - want) <= 12 * 2 * 64


@pytest.mark.parametrize(
    ("sets", "key"),
    [
        (["model.generator=0.5", "objective.trained=false"], "model.generator"),
        (["objective.trained=true"], "model.generator"),
        (["model.generator=0.5", "data.packing=best-fit"], "data.packing"),
        (["model.generator=0.5", "parallel.sp=2"], "parallel.sp"),
        (["model.generator=1.5"], "model.generator"),
        (
            ["model.generator=0.5", "objective.rate=0.7"],
            "objective.rate=0.7 is too high for model.generator",
        ),
        (["model.generator=0.5", "model.replaced_weight=0"], "model.replaced_weight"),
        (["model.logit_softcap=15"], "logit_softcap=15.0 conflicts with head"),
        (["objective.kind=causal"], "or --set objective.kind=replaced"),
        (["model.generator=0.5", "model.parametrization=mup"], "generator"),
    ],
)
def test_refused(sets, key):
    with pytest.raises(ConfigError, match=key):
        load(size="tiny", arch="electra", sets=sets, pieces=500)
