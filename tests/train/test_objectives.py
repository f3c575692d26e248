"""Runs of every objective: the same loss and tokens in every layout, bit for bit after a stop."""

import json
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.restore import Weights, load_model, newest
from tests.conftest import worlds
from tests.train.test_run import hashes, losses, records

COMMON = (
    "--size", "27k", "--steps", 6, "--no-track", "--set", "model.seq=64",
    "--set", "train.save_every=3", "--set", "train.eval_every=3", "--set", "train.eval_batches=2",
    "--set", "optim.lr=0.01", "--set", "train.micro_batch=4", "--recipe", "adamw",
)  # fmt: skip
# The architecture names its objective. Eight rows; those of T5 write 14 tokens.
BATCH = "--set train.batch_tokens="
_OBJECTIVES = {
    "masked": f"--arch bert {BATCH}512",
    "windows": f"--arch modernbert --set model.attention.window=9 --set data.packing=best-fit {BATCH}512",
    "replaced": f"--arch electra {BATCH}512",
    "generator": f"--arch electra --set model.generator=0.5 {BATCH}512",
    "spans": f"--arch t5 {BATCH}112",
    "mixture": f"--arch t5 --set objective.kind=mixture {BATCH}368",
    "shared layers": f"--arch albert {BATCH}512",
    "denoise": f"--arch bart {BATCH}512",
    "prefix": f"--set objective.kind=prefix {BATCH}512",
}
OBJECTIVES = {name: options.split() for name, options in _OBJECTIVES.items()}
TURNED = (
    "--set", "model.stack=encoder", "--set", "objective.kind=masked", "--set", "model.vocab=576",
)  # fmt: skip
# Ranks, stage, and ranks that share a sequence, which a generator does not support.
LAYOUTS = {
    "one": (1, 1, 1), "zero 0": (2, 0, 1), "zero 2": (2, 2, 1), "zero 3": (2, 3, 1),
    "sequences": (4, 3, 2),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every objective in every layout, and a run that is stopped and continued."""
    folder = tmp_path_factory.mktemp("objectives")
    jobs: list[dict] = []
    for name, options in OBJECTIVES.items():
        for layout, (ranks, zero, sp) in LAYOUTS.items():
            out = folder / name / layout
            command = ["pretrain", *COMMON, *options, "--data", corpus, "--out", out]
            if name == "generator":
                ranks //= sp
                sp = 1
            command += ["--nproc", ranks, "--zero", zero, "--sp", sp]
            jobs.append({"do": "launch", "arguments": command})
    for name in OBJECTIVES:
        # A copy without the last steps is the same as a stopped run.
        out = folder / name / "stopped"
        jobs.append({"do": "copy", "src": folder / name / "one", "dst": out})
        jobs.append({"do": "cut", "out": out, "step": 3})
        resume = ["pretrain", "--resume", "--no-track", "--out", out]
        jobs.append({"do": "launch", "arguments": resume})
    # A decoder continues as an encoder. The mask needs a larger vocabulary.
    for name, options in {
        "decoder": ("--size", "tiny", "--steps", 2, "--set", "model.value_embeddings=1"),
        "encoder": ("--init", folder / "decoder", "--steps", 1, "--set", "optim.lr=1e-12"),
    }.items():
        command = ["pretrain", *COMMON[4:], *options, "--data", corpus, "--out", folder / name]
        command += ["--set", "train.batch_tokens=1024", *(TURNED if name == "encoder" else ())]
        jobs.append({"do": "launch", "arguments": command})
    worlds(jobs, folder)
    return folder


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_every_layout_trains_the_same_run(runs: Path, objective: str, layout: str) -> None:
    run = runs / objective / layout
    one = runs / objective / "one"
    assert hashes(run) == hashes(one)
    assert losses(run) == pytest.approx(losses(one), abs=1e-5)
    assert losses(run, "eval") == pytest.approx(losses(one, "eval"), abs=1e-5)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_stopped_run_continues_bit_for_bit(runs: Path, objective: str) -> None:
    stopped = runs / objective / "stopped"
    one = runs / objective / "one"
    assert [r["step"] for r in records(stopped, "event") if r["event"] == "resume"] == [3]
    assert losses(stopped) == losses(one)
    assert losses(stopped, "eval") == losses(one, "eval")
    assert hashes(stopped) == hashes(one)
    last = "checkpoints/step-00000006"
    weights = Weights(newest(stopped / last))
    for name, tensor in Weights(newest(one / last)).items():
        assert tensor.equal(weights[name]), name


def test_a_decoder_continues_as_an_encoder(runs: Path, corpus: Path, inside) -> None:
    before = Weights(newest(runs / "decoder"))
    after = Weights(newest(runs / "encoder"))
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert after[name].shape[1:] == tensor.shape[1:]
        # New ids have the last rows. One step at a tiny rate changes nothing else.
        torch.testing.assert_close(after[name][: len(tensor)], tensor, atol=1e-9, rtol=1e-6)
    assert len(after["embedding.weight"]) == 576 and after["embedding.weight"][512].std() > 1e-3
    model, config = load_model(runs / "encoder")
    assert config.objective.kind == "masked"
    tokens = torch.arange(64)[None]
    other = tokens.index_fill(1, torch.tensor([63]), 5)
    assert not torch.equal(model(tokens)[0, 0], model(other)[0, 0])  # it reads later tokens
    start = ("pretrain", "--init", runs / "decoder", "--data", corpus, "--out", runs / "refused")
    assert "objective.kind=masked" in inside(*start, "--set", "model.stack=encoder", code=2)
    longer = (
        "--init",
        runs / "masked" / "one",
        "--set",
        "model.seq=128",
        "--out",
        runs / "refused",
    )
    error = inside("pretrain", "--data", corpus, *longer, code=2)
    assert "model.seq=128" in error and "trained with 64; remove" in error
    error = inside(*start, *TURNED[:4], code=2)
    assert "set model.vocab=576" in error


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_loss_falls_and_is_that_of_evaluate(runs: Path, inside, objective: str) -> None:
    run = runs / objective / "one"
    assert losses(run)[-1] < 0.97 * losses(run)[0]
    found = json.loads(inside("evaluate", "--run", run, "--json"))
    logged = records(run, "eval")[-1]
    assert found["loss"] == pytest.approx(logged["loss"], abs=1e-6)
    assert load_model(run)[0].whole_prompts == (objective == "prefix")
    assert ("bpb" in found) == ("bpb" in logged) == (objective == "prefix")
