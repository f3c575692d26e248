"""Heads built by hand, in-context scores against plain losses, and regression against the optimum."""

import itertools
import json

import pytest
import torch
import torch.nn.functional as F

from pipeline.bench.regression import Problem, build, configure, measure, predict, ridge, train
from pipeline.checkpoint.restore import load_model
from pipeline.data.corpus import Corpus
from pipeline.model.attention import ReportingSequence, Scoring, eager
from pipeline.model.context import make_mask
from pipeline.objective.batch import Micro
from pipeline.tasks.in_context import _watched, make_repeats, only, prefix_matching, used_pieces
from pipeline.train.measure import loader
from tests.conftest import launch
from tests.model.test_decode import KINDS, POSITIONS, SCORES, made
from tests.train.test_run import TINY

VOCAB = 80
SEQ = 140
EOD = 3
SHARP = 300.0  # a score so large leaves no attention for other keys
TOKEN, BEFORE, PLACE = 0, VOCAB, 2 * VOCAB  # where the stream holds them, each as one of many


def built(layers: int) -> torch.nn.Module:
    """A model whose stream contains the token and its position. Its heads do nothing yet."""
    attention = {"kind": "gqa", "heads": 1, "kv_heads": 1, "head_dim": SEQ}
    size = {"vocab": VOCAB, "seq": SEQ, "width": 2 * VOCAB + SEQ, "layers": layers}
    model = made(position="learned", attention=attention, **size)
    with torch.no_grad():
        for p in model.blocks.parameters():
            p.fill_(float(p.ndim == 1))
        model.embedding.weight.zero_()[:, TOKEN : TOKEN + VOCAB] = torch.eye(VOCAB)
        model.position.weight.zero_()[:, PLACE:] = torch.eye(SEQ)
    return model


@torch.no_grad()
def looks_back(model, distance: int) -> None:
    """The first layer attends to the token at a distance and writes which one it was."""
    attention = model.blocks[0].attention
    query, key, value = attention.qkv.weight.split(SEQ)
    query[:, PLACE:] = SHARP * torch.eye(SEQ)
    key[distance:, PLACE : PLACE + SEQ - distance] = torch.eye(SEQ - distance)
    value[:VOCAB, TOKEN : TOKEN + VOCAB] = torch.eye(VOCAB)
    attention.out.weight[BEFORE : BEFORE + VOCAB, :VOCAB] = torch.eye(VOCAB)


@torch.no_grad()
def matches(model, layer: int, to: int) -> None:
    """A layer attends from a token to positions where the stream contains the same one at `to`."""
    query, key, _value = model.blocks[layer].attention.qkv.weight.split(SEQ)
    query[:VOCAB, TOKEN : TOKEN + VOCAB] = SHARP * torch.eye(VOCAB)
    key[:VOCAB, to : to + VOCAB] = torch.eye(VOCAB)


def pieces(vocab: int) -> torch.Tensor:
    return torch.tensor([piece for piece in range(vocab) if piece != EOD])


def scores(model) -> torch.Tensor:
    repeats = make_repeats(model.cfg, pieces(VOCAB), EOD)
    return prefix_matching(lambda micro: model.eval()(**micro.inputs), model, repeats)


def test_an_induction_head_built_by_hand_matches_prefixes():
    model = built(layers=2)
    looks_back(model, 1)
    matches(model, 1, to=BEFORE)
    before, induction = scores(model).squeeze(1).tolist()
    assert induction > 0.99 and before < 0.01


def test_one_layer_cannot_match_prefixes():
    """The best it can do is a fixed distance, which is right in one row of sixteen."""
    best = 0.0
    for distance in range(40, 66):
        model = built(layers=1)
        looks_back(model, distance)
        best = max(best, scores(model).item())
    assert 0.05 < best < 0.1
    model = built(layers=1)
    matches(model, 0, to=TOKEN)
    assert scores(model).item() < 0.01


def test_repeats_have_one_match_per_query():
    """The pairs are compared with a search for the previous occurrence of each token."""
    for repeats in (made("gqa", seq=200, vocab=90), made("gqa", scores="window", seq=64, vocab=50)):
        found = make_repeats(repeats.cfg, pieces(repeats.cfg.vocab), EOD)
        rows = found.tokens_BS.tolist()
        for row, query, key in torch.stack(
            (found.rows_T, found.queries_T, found.keys_T), 1
        ).tolist():
            tokens = rows[row]
            earlier = [i for i in range(query) if tokens[i] == tokens[query]]
            assert earlier == [key - 1] and tokens[key] != EOD
            window = repeats.cfg.attention.window
            assert window is None or query - key < window
        assert found.shares_T.sum().item() == pytest.approx(1)


def test_repeats_are_of_pieces_that_the_text_uses(corpus):
    """A tokenizer also has pieces, such as single bytes, that a corpus may never use."""
    opened = Corpus.open(corpus)
    tokenizer = opened.manifest.tokenizer
    [shard] = opened.split("valid").shards
    found = used_pieces(opened)
    assert set(found.tolist()) == set(opened.tokens(shard).tolist()) - {tokenizer.eod}
    assert 0 < len(found) < tokenizer.vocab - 1


@pytest.mark.parametrize(
    ("kind", "position", "shape"),
    [
        *((kind, "rope", "plain") for kind in KINDS),
        *(("gqa", position, "plain") for position in POSITIONS),
        *(itertools.product(("gqa", "mla"), ("rope",), SCORES)),
    ],
)
def test_weights_are_those_that_the_layers_use(kind, position, shape):
    """A pass that reports them computes the same logits, and each layer reports once."""
    model = made(kind, position, shape).eval()
    tokens = torch.randint(50, (2, 33), generator=torch.Generator().manual_seed(0))
    reported = []
    with torch.no_grad():
        plain = model(tokens)
        with _watched(model, reported.append):
            watched = model(tokens)
        torch.testing.assert_close(watched, plain, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(model(tokens), plain, atol=0, rtol=0)
    assert [weights.shape for weights in reported] == [(2, 4, 33, 33)] * 2
    sums = reported[0].sum(-1)
    assert (sums < 1).all() if shape == "sinks" else (sums - 1).abs().max() < 1e-5


def test_the_block_mask_of_a_gpu_is_the_dense_mask():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 16, 8, generator=g) for heads in (4, 2, 2))
    how = {"window": 5, "documents_BK": torch.tensor([[0] * 5 + [1] * 11, [0] * 16])}
    dense, block = (make_mask(16, 16, q.device, **how, flex=flex) for flex in (False, True))
    reported = []
    scoring = Scoring(0.3, softcap=4.0)
    found = ReportingSequence(reported.append).attend(q, k, v, scoring._replace(mask=block))
    torch.testing.assert_close(found, eager(q, k, v, scoring._replace(mask=dense)))
    assert (reported[0][:, :, 10, :6] == 0).all()


def test_with_documents_the_token_is_counted_in_each():
    documents = torch.tensor([[0] * 5 + [1] * 11, [0] * 12 + [1, 1, 2, 2]])
    targets = torch.arange(32).view(2, 16)
    micro = Micro(targets, targets, documents)
    for token, wanted in {
        1: [0, 5, 16, 28, 30],
        2: [1, 6, 17, 29, 31],
        7: [11, 22],
        13: [],
    }.items():
        kept = only(micro, token).targets_BS
        assert kept[kept >= 0].tolist() == wanted


def test_a_run_logs_its_scores(corpus, tmp_path, inside):
    """With 1 process, and with 2 under ZeRO-3: the losses of whole rows, computed plainly."""
    logged = []
    for nproc, zero in ((1, 1), (2, 3)):
        out = tmp_path / f"{nproc}"
        sets = ("--set", "eval.in_context=true", "--set", f"parallel.zero={zero}")
        said = launch("pretrain", *TINY, "--data", corpus, "--out", out, "--nproc", nproc, *sets)
        assert "loss at token 57 minus loss at token 6 of 64" in said.stdout
        assert "in_context/score" in said.stdout
        evals = [r for r in map(json.loads, (out / "log.jsonl").open()) if r["kind"] == "eval"]
        logged.append(evals[-1])
    model, config = load_model(out)
    rows = loader(config, Corpus.open(corpus), "valid")
    losses = []
    for step in range(config.train.eval_batches):
        batch = rows.batch(step)
        with torch.no_grad():
            logits = model(batch.tokens_BS)
        losses.append(F.cross_entropy(logits.mT, batch.targets_BS, reduction="none"))
    by_token = torch.cat(losses).mean(0).tolist()
    best = max(map(max, logged[0]["prefix_matching_heads"]))
    for record in logged:
        assert record["in_context_tokens"] == [6, 57]
        # The 57th token of a row predicts with 57 tokens of context.
        assert record["in_context/score"] == pytest.approx(by_token[56] - by_token[5], abs=1e-5)
        assert record["in_context/prefix_matching"] == pytest.approx(best, abs=1e-4)
        assert len(record["prefix_matching_heads"]) == config.model.layers


def test_what_cannot_be_measured_is_refused(corpus, tmp_path, inside):
    on = ("--set", "eval.in_context=true")
    for words, asked in {
        "needs objective.kind": (*on, "--arch", "bert"),
        "parallel.sp=2": (*on, "--set", "parallel.sp=2"),
        "model.seq of 16 or more": (*on, "--set", "model.seq=8"),
        "at most model.seq=64": ("--set", "eval.in_context=[9, 65]"),
        "two tokens in order": ("--set", "eval.in_context=[9, 9]"),
        "true, false or two positive": ("--set", "eval.in_context=[9]"),
    }.items():
        options = ("--data", corpus, "--out", tmp_path / "x", *asked)
        assert words in inside("pretrain", *TINY, *options, code=2)


def test_ridge_is_the_mean_given_the_examples():
    """Against the plain normal equations of each prefix, and against any other linear predictor."""
    problem = Problem(dimensions=3, examples=6, noise=0.7)
    x, y = problem.draw(5, 0, torch.device("cpu"))
    found = ridge(x, y, problem.noise)
    for row, k in itertools.product(range(5), range(6)):
        before, seen = x[row, :k], y[row, :k]
        penalty = 0.49 * torch.eye(3)
        w = torch.linalg.inv(before.T @ before + penalty) @ before.T @ seen
        assert found[row, k].item() == pytest.approx((w @ x[row, k]).item(), abs=1e-4)
    x, y = problem.draw(20_000, 1, torch.device("cpu"))
    best = (ridge(x, y, problem.noise) - y).square().mean(0)
    assert best[0].item() == pytest.approx(3 + 0.49, rel=0.03)  # no example is known yet
    for noise in (0.35, 1.4):
        assert ((ridge(x, y, noise) - y).square().mean(0)[1:] > best[1:]).all()


def test_a_trained_model_nears_the_optimum():
    """A model that ignores the examples is 80% to 230% above the optimum."""
    problem = Problem(dimensions=1, examples=4, noise=0.5)
    config = configure(problem, "27k", None, 250, 64, [])
    cpu = torch.device("cpu")
    steps = []
    trained = train(config, problem, cpu, lambda step, _: steps.append(step))
    untrained = measure(build(config, problem, cpu), problem, 4096, cpu).excess
    excess = measure(trained, problem, 4096, cpu).excess
    assert steps[-1] == 240 and max(excess) < 0.35 and min(untrained[1:]) > 0.7


def test_prediction_sees_only_what_came_before():
    problem = Problem(dimensions=2, examples=5, noise=0.5)
    cpu = torch.device("cpu")
    model = build(configure(problem, "27k", None, 1, 8, []), problem, cpu)
    x, y = problem.draw(2, 0, cpu)
    before = predict(model, x, y)
    y[:, 2:] += 1
    x[:, 3:] += 1
    after = predict(model, x, y)
    assert (before[:, :3] == after[:, :3]).all() and (before[:, 3:] != after[:, 3:]).all()


def test_regression_on_the_command_line(inside):
    small = ("--d", 1, "--examples", 3, "--steps", 2, "--test-rows", 64)
    found = json.loads(inside("bench", "in-context", *small, "--json"))
    assert [row["k"] for row in found["errors"]] == [0, 1, 2]
    assert "largest excess" in inside("bench", "in-context", *small)
    assert "needs tokens" in inside("bench", "in-context", "--arch", "isoflop", code=2)
    assert "use a decoder" in inside("bench", "in-context", "--arch", "bert", code=2)
    rate = ("--set", "optim.lr=1e20", "--json")
    diverged = inside("bench", "in-context", *small, *rate, code=2)
    assert "lower --set optim.lr" in diverged
