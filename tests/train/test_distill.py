"""Distillation against the loss of DistilBERT in plain torch, and whole runs that have a teacher."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pipeline.checkpoint.restore import Weights, load_model, newest, run_config
from pipeline.config.distill import Distill
from pipeline.hub.importing import load_hub_model
from pipeline.hub.tensors import gather
from pipeline.model.side import Inputs
from pipeline.model.teacher import Teacher
from pipeline.objective.loss import Soft, next_token_loss
from pipeline.planner.count import flops_per_token, params
from pipeline.planner.memory import Layout, memory
from pipeline.planner.work import training_flops
from tests.conftest import worlds
from tests.hub.test_hub import LENGTH, VOCAB, random_hub_model
from tests.train.test_objectives import COMMON, OBJECTIVES
from tests.train.test_run import hashes, losses, records


def test_the_loss_and_its_gradients_are_those_of_distilbert(tmp_path: Path) -> None:
    """Compared with transformers' Distiller (research_projects/distillation), --restrict_ce_to_mask."""
    theirs = {}
    ours = {}
    for name in ("distilbert", "bert, masked only"):
        theirs[name] = random_hub_model(name)
        theirs[name].save_pretrained(tmp_path / name)
        ours[name] = load_hub_model(tmp_path / name)
    student = theirs["distilbert"]
    tokens, targets = torch.randint(3, VOCAB, (2, 2, LENGTH))
    targets[torch.rand(2, LENGTH) < 0.6] = -100
    with torch.no_grad():
        taught = theirs["bert, masked only"](tokens, output_hidden_states=True)
    out = student(tokens, output_hidden_states=True)
    kept = targets >= 0
    divergence = torch.nn.KLDivLoss(reduction="batchmean")(
        F.log_softmax(out.logits[kept] / 3.0, dim=-1), F.softmax(taught.logits[kept] / 3.0, dim=-1)
    )
    hidden = [each.hidden_states[-1].flatten(0, 1) for each in (out, taught)]
    cosine = torch.nn.CosineEmbeddingLoss(reduction="mean")(*hidden, torch.ones(len(hidden[0])))
    masked = F.cross_entropy(out.logits[kept], targets[kept])
    loss = 5.0 * 3.0**2 * divergence + 2.0 * masked + 1.0 * cosine
    loss.backward()

    settings = Distill(teacher="", temperature=3.0, soft=5.0, hard=2.0, hidden=1.0)
    model = ours["distilbert"].train()
    model.teacher = Teacher(ours["bert, masked only"].requires_grad_(False).eval(), settings)
    found = model(tokens, targets)
    found.total.backward()
    torch.testing.assert_close(found.total, loss.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.nll, masked.detach(), atol=1e-5, rtol=1e-5)  # what is logged
    state = dict(model.named_parameters())
    grads = {name: p.grad for name, p in student.named_parameters()}
    for name, grad in gather(model.cfg, "distilbert", state, grads.__getitem__):
        near = 1e-4 * float(grad.abs().max() + 1e-3)
        torch.testing.assert_close(state[name].grad, grad, atol=near, rtol=1e-4, msg=name)
    assert model.eval()(tokens, targets).total == found.nll  # only training uses the teacher


@pytest.mark.parametrize("chunk", [3, 100])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_soft_targets_equal_the_plain_loss(chunk: int, softcap: float | None) -> None:
    g = torch.Generator().manual_seed(0)
    h, weight, theirs = (torch.randn(n, 8, generator=g) for n in (16, 50, 16))
    targets = torch.randint(50, (16,), generator=g)
    targets[3:7] = -100

    def logits(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        made = h @ weight.T
        return made if softcap is None else softcap * torch.tanh(made / softcap)

    ours = [h.clone().requires_grad_(), weight.clone().requires_grad_()]
    plain = [h.double().requires_grad_(), weight.double().requires_grad_()]
    soft = Soft(theirs, weight * 2, None, softcap, 2.0, 0.7, 0.2)
    total, nll = next_token_loss(
        *ours, targets, z_loss=1e-2, chunk=chunk, softcap=softcap, soft=soft
    )
    made = logits(*plain)[targets >= 0]
    taught = logits(theirs.double(), 2 * weight.double())[targets >= 0]
    hard = F.cross_entropy(made, targets[targets >= 0])
    kl = F.kl_div(
        (made / 2).log_softmax(-1), (taught / 2).log_softmax(-1), log_target=True,
        reduction="batchmean",
    )  # fmt: skip
    want = 0.2 * (hard + 1e-2 * made.logsumexp(-1).square().mean()) + 0.7 * 4 * kl
    total.backward()
    want.backward()
    torch.testing.assert_close(total.double(), want, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(nll.double(), hard.detach(), atol=1e-6, rtol=1e-6)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, atol=1e-6, rtol=1e-5)


LAYOUTS = {"one": (1, 1), "zero 2": (2, 2), "zero 3": (2, 3)}  # ranks, stage


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT; DistilBERTs with half of its layers in every layout; one is stopped and continued."""
    folder = tmp_path_factory.mktemp("distill")
    bert = folder / "bert"
    common = [*COMMON, "--data", corpus]
    start = ["pretrain", *common, *OBJECTIVES["masked"]]
    jobs: list[dict] = [{"do": "launch", "arguments": [*start, "--out", bert]}]
    student = ["pretrain", *common[2:], "--init", bert, "--set", f"distill.teacher={bert}"]
    for setting in ("layers=1", "segments=0", "row_classes=0"):
        student += ["--set", f"model.{setting}"]
    student += ["--set", "objective.pairs=none", "--set", "train.batch_tokens=1024"]
    student += ["--set", "distill.hidden=0.2"]
    for name, (ranks, zero) in LAYOUTS.items():
        layout = ["--nproc", ranks, "--zero", zero, "--out", folder / name]
        jobs.append({"do": "launch", "arguments": [*student, *layout]})
    jobs.append({"do": "launch", "arguments": [*student, "--zero", 1, "--out", folder / "stopped"]})
    jobs.append({"do": "cut", "out": folder / "stopped", "step": 3})
    again = ["pretrain", "--resume", "--out", folder / "stopped", "--no-track"]
    jobs.append({"do": "launch", "arguments": again})
    worlds(jobs, folder)
    return folder


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_every_layout_learns_the_same_from_the_teacher(runs: Path, layout: str) -> None:
    assert hashes(runs / layout) == hashes(runs / "one")
    assert losses(runs / layout) == pytest.approx(losses(runs / "one"), abs=1e-5)
    assert losses(runs / "one")[-1] < losses(runs / "bert")[-1] + 0.1  # it has its layers


def test_a_distilled_run_continues_bit_for_bit(runs: Path) -> None:
    assert [r["step"] for r in records(runs / "stopped", "event") if r["event"] == "resume"] == [3]
    assert losses(runs / "stopped") == losses(runs / "one")


def test_the_teacher_is_counted_but_neither_saved_nor_mixed_into_a_law(runs: Path) -> None:
    config = run_config(runs / "one")
    teacher, _ = load_model(runs / "bert")
    # torch counts the forward pass; here attention is a batched matmul, which it counts, too.
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter, sdpa_kernel(SDPBackend.MATH):
        h_BSW = teacher.states(Inputs(torch.zeros(1, 64, dtype=torch.long))).h_BSW
        teacher.predict(h_BSW[:, :10], None)  # only for the predicted tokens, 15% of 64
    # The row head, of one token, is not part of these logits.
    row = (
        params(teacher.cfg).total - params(teacher.cfg.model_copy(update={"row_classes": 0})).total
    )
    added = training_flops(config).model - flops_per_token(config.model, predicted=10).model
    assert -2 <= added - counter.get_total_flops() / 64 <= 2 * row / 64
    record = records(runs / "one", "step")[-1]
    assert record["flops"] == record["tokens"] * training_flops(config).model
    held = memory(config, Layout(2, 3)).weights
    alone = memory(config.model_copy(update={"distill": None}), Layout(2, 3)).weights
    assert held - alone == 4 * params(teacher.cfg).total  # in fp32, complete on every rank
    names = set(Weights(newest(runs / "one")))
    assert {int(name.split(".")[1]) for name in names if name.startswith("blocks.")} == {0}
    facts = json.loads((runs / "one" / "run.json").read_text())
    assert facts["objective"] == "masked distilled"


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (("--arch", "electra"), "objective.kind"),
        (("--arch", "distilbert", "--set", "model.vocab=1024"), "model.vocab"),
        (("--arch", "distilbert", "--sp", 2), "parallel.sp"),
        (("--arch", "distilbert", "--size", "7k", "--set", "distill.hidden=1"), "model.width"),
        (("--arch", "distilbert", "--set", "distill.soft=0"), "soft"),
        (("--arch", "distilbert", "--set", "model.seq=128"), "model.seq"),
        (("--arch", "dense"), "objective.kind"),
    ],
)
def test_refused(runs: Path, corpus: Path, inside, options: tuple, key: str) -> None:
    teacher = ("--set", f"distill.teacher={runs / 'bert'}", "--out", runs / "refused")
    error = inside("pretrain", *COMMON, *teacher, "--data", corpus, *options, code=2)
    assert key in error


def test_a_missing_teacher_is_refused(corpus: Path, inside, tmp_path: Path) -> None:
    given = ("--set", f"distill.teacher={tmp_path}", "--out", tmp_path / "out")
    assert str(tmp_path) in inside("pretrain", *COMMON, "--data", corpus, *given, code=2)


def test_half_of_the_layers_are_those_of_distilbert() -> None:
    from pipeline.checkpoint.restore import _thinned
    from pipeline.config.layers import load

    bert, student = (load(size="60m", sets=[f"model.layers={n}"]).model for n in (12, 6))
    names = [_thinned(f"blocks.{layer}.norm.gain", student, bert) for layer in range(6)]
    # scripts/extract_distilbert.py of transformers' research projects.
    assert [int(name.split(".")[1]) for name in names] == [0, 2, 4, 7, 9, 11]
    # The table of a layer is kept with the layer.
    assert _thinned("value_embeddings.5.weight", student, bert) == "value_embeddings.11.weight"
