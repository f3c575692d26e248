"""Encoders and encoder–decoders: published sizes, and texts as transformers generates them."""

import pytest
import torch

from pipeline.config.layers import load
from pipeline.errors import ConfigError
from pipeline.hub.families import choose_family
from pipeline.hub.importing import load_hub_model
from pipeline.model.build import build_model
from pipeline.model.decode import beam_search, generate
from pipeline.objective.batch import Batch
from pipeline.objective.noise import Pair, join_pairs
from pipeline.planner.count import params
from tests.hub.test_hub import LENGTH, SOURCE, VOCAB, inputs, random_hub_model

_SIDES = ("source_BE", "tokens_BS")
# Published counts: transformers' class, size, vocabulary, other settings, parameters.
BASE = "125m"
SMALL = ["width=256", "layers=12", "ffn.hidden=1024"]
SMALL += [f"attention.{key}" for key in ("heads=4", "kv_heads=4", "head_dim=64")]
PUBLISHED = {
    "bert": (BASE, 30522, [], 110_106_428),
    "bert, large": ("350m", 30522, ["row_classes=0"], 335_174_458),
    "roberta": (BASE, 50265, [], 124_697_433),
    "modernbert": (BASE, 50368, ["layers=22"], 149_655_232),
    "albert": (BASE, 30000, [], 11_683_584),
    "electra": ("15m", 30522, SMALL, 13_549_057),
    "distilbert": (BASE, 30522, ["layers=6"], 66_362_880),
    "transformer": ("30m", 37000, ["layers=6"], 64_131_072),
    "t5": (BASE, 32128, [], 222_903_552),
    "t5-v1.1": (BASE, 32128, [], 247_577_856),
    "bart": (BASE, 50265, ["layers=6", "seq=1024"], 139_420_416),
}


# Published for the classes without heads.
HEADS = {"albert": ("head.", "transform.", "row_head.out."), "distilbert": ("head.", "transform.")}
# Marian counts two tables of 1,024 sinusoidal positions, which are not trained.
FIXED = {"transformer": 2 * 1024 * 512}


@pytest.mark.parametrize("case", PUBLISHED)
def test_published_models_have_their_published_counts(case):
    size, vocab, sets, published = PUBLISHED[case]
    settings = [f"model.{each}" for each in (f"vocab={vocab}", *sets)]
    settings += ["objective.pairs=none"] if "row_classes=0" in sets else []
    cfg = load(size=size, arch=case.partition(",")[0], sets=settings).model
    with torch.device("meta"):
        counts = {name: p.numel() for name, p in build_model(cfg).named_parameters()}
    bare = sum(n for name, n in counts.items() if not name.startswith(HEADS.get(case, ("-",))))
    assert bare + FIXED.get(case, 0) == published
    assert params(cfg).total == sum(counts.values())


# Narang et al. 2021, table 1: T5 base with these settings, in millions of parameters.
NARANG = {
    "vanilla": ([], 223),
    "GeGLU": (["ffn.activation=geglu", "ffn.hidden=2048"], 223),
    "SwiGLU": (["ffn.activation=swiglu", "ffn.hidden=2048"], 223),
    "block sharing": (["share_layers=true", "tied=false"], 65),
    "and factorized": (["share_layers=true", "tied=false", "embedding_rank=128"], 45),
    "and shared": (["share_layers=true", "embedding_rank=128"], 20),
    "encoder sharing": (["share_layers=encoder", "tied=false"], 170),
    "decoder sharing": (["share_layers=decoder", "tied=false"], 144),
    "factorized": (["tied=false", "embedding_rank=128"], 227),
    "factorized and shared": (["embedding_rank=128"], 202),
    "tied inputs": (["tied=false"], 248),
    "tied decoder": (["own_encoder_embedding=true"], 248),
    "untied": (["tied=false", "own_encoder_embedding=true"], 273),
    "24 layers": (["layers=24", "ffn.hidden=1536", "attention.heads=6", "attention.kv_heads=6"], 223.5),
    "18 layers": (["layers=18", "ffn.hidden=2048", "attention.heads=8", "attention.kv_heads=8"], 223),
    "6 layers": (["layers=6", "ffn.hidden=6144", "attention.heads=24", "attention.kv_heads=24"], 223),
}  # fmt: skip


@pytest.mark.parametrize("row", NARANG)
def test_modifications_have_the_published_counts(row):
    # 24 layers have 222,949,248, also in transformers' T5ForConditionalGeneration. The table rounds
    # to 224 what is at least 223.5.
    sets, millions = NARANG[row]
    sets = [f"model.{each}" for each in ("vocab=32128", "seq=512", *sets)]
    assert params(load(size="125m", arch="t5", sets=sets).model).total / 1e6 == pytest.approx(
        millions, abs=1
    )


@pytest.mark.parametrize("case", ["t5", "bart", "marian"])
def test_an_encoder_decoder_generates_what_theirs_does(case, tmp_path):
    """Greedy and beam search with sources of several lengths; batching does not change the result."""
    theirs = random_hub_model(case)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_hub_model(tmp_path / "theirs").eval()
    g = torch.Generator().manual_seed(3)
    sources = [torch.randint(3, VOCAB, (n,), generator=g).tolist() for n in (11, 5)]
    found = generate(ours, [[2], [2]], 9, sources=sources)
    for source, tokens in zip(sources, found, strict=True):
        row = [2]
        for _ in range(9):  # their whole forward pass, without a cache
            logits = theirs(
                input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([row])
            ).logits
            row.append(int(logits[0, -1].argmax()))
        assert tokens == row[1:]
        beams = beam_search(ours, [2], 9, None, 3, source)
        assert beams[0].score >= beam_search(ours, [2], 9, None, 1, source)[0].score - 1e-4
        assert list(beam_search(ours, [2], 9, None, 1, source)[0].tokens) == tokens
    with pytest.raises(ConfigError, match="needs a source"):
        generate(ours, [[2]], 3)


@pytest.mark.parametrize("case", ["t5", "bart", "marian"])
def test_a_padded_source_is_the_source_alone(case, tmp_path):
    """The logits of theirs with an attention mask, and of ours without padding."""
    theirs = random_hub_model(case)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_hub_model(tmp_path / "theirs").eval()
    given, said = inputs(case)
    length = SOURCE - 6
    padding = torch.zeros(2, SOURCE, dtype=torch.long)
    padding[1, length:] = 1
    padded = ours(**given, source_documents_BE=padding)
    want = theirs(**said, attention_mask=1 - padding).logits
    torch.testing.assert_close(padded, want, atol=1e-5, rtol=1e-5)
    alone = ours(given["tokens_BS"][1:], source_BE=given["source_BE"][1:, :length])
    torch.testing.assert_close(padded[1:], alone, atol=1e-5, rtol=1e-5)
    # Two pairs in one row, with padding on both sides, have the logits of separate rows.
    pairs = [
        Pair(s.numpy(), 2, t.numpy()) for s, t in zip(*(given[n] for n in _SIDES), strict=True)
    ]
    row = Batch.stack([join_pairs(pairs, 2 * LENGTH + 3, 2 * SOURCE + 5, 2)], [0]).inputs
    logits = ours(**{name: tensor for name, tensor in row.items() if name != "targets_BS"})
    for number, pair in enumerate(pairs):
        tokens = torch.tensor([[2, *pair.target[:-1]]])
        alone = ours(tokens, source_BE=given["source_BE"][number : number + 1])
        here = logits[:, number * LENGTH : (number + 1) * LENGTH]
        torch.testing.assert_close(here, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_step_of_global_layers_may_exceed_the_layers(layers):
    more = [f"model.layers={layers}", "model.vocab=96", "model.seq=32"]
    assert choose_family(load(size="tiny", arch="modernbert", sets=more).model).kind == "modernbert"
    more += ["model.attention.window=8", "model.attention.global_every=4"]
    assert choose_family(load(size="tiny", arch="qwen3", sets=more).model).kind == "qwen3"


def test_an_encoder_does_not_generate():
    cfg = load(size="tiny", arch="bert", sets=["model.vocab=96", "model.seq=32"]).model
    with pytest.raises(ConfigError, match="encoder"):
        generate(build_model(cfg), [[2]], 3)
