"""Fine-tuning: the same run in every layout, what it learns, and files that it refuses."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from launch.trained import warn_of_labels
from pipeline.checkpoint.restore import Weights, load_model, newest, run_config
from pipeline.config.layers import load
from pipeline.config.objective import LABEL_DIGITS, Labels
from pipeline.data.corpus import Corpus
from pipeline.data.rows import Encoded, make_row
from pipeline.errors import ConfigError
from pipeline.hub.exporting import export
from pipeline.hub.sequences import export_family
from pipeline.model.adapter import adapt
from pipeline.model.build import build_model, init_weights
from pipeline.planner.memory import Layout, disk_bytes, memory
from pipeline.runs.directory import tokenizer_of
from pipeline.train.finetuning import FineTuning, prepare
from pipeline.train.measure import loader
from tests.conftest import worlds
from tests.train.test_run import hashes, losses, records

WORDS = ["red", "blue", "green", "one", "two", "three"]
SETTINGS = (
    "--no-track", "--quiet", "--set", "train.save_every=4", "--set", "train.keep_last=9",
    "--set", "train.micro_batch=4",
)  # fmt: skip
PRETRAIN = (
    "--size", "tiny", "--steps", 4, "--set", "model.seq=64", "--set", "train.batch_tokens=512",
    "--set", "model.layers=2", "--no-track", "--quiet",
)  # fmt: skip
SHORT = ("--batch", 8, "--epochs", 1, "--lr", 0.003)
LAYOUTS = {"one": (1, 1), "zero 2": (2, 2), "zero 3": (2, 3)}  # ranks, stage
# File, and the options of the run.
TASKS = {
    "classes": ("colors", ("--lm-weight", 0.5)),
    "numbers": ("lengths", ()),
    "answers": ("echo", ()),
    "lora": ("colors", ("--lora", 4)),
    "encoder": ("pairs", ()),
}


SKIPPED = {("numbers", "zero 2"), ("encoder", "zero 2"), ("lora", "zero 2"), ("classes", "zero 3")}
PAIRED = [
    (task, layout)
    for task in TASKS
    for layout in LAYOUTS
    if layout != "one" and (task, layout) not in SKIPPED
]


def lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_files(folder: Path) -> None:
    """Write tasks that the first word, the number of words, or a copy solves."""
    draw = random.Random(0)
    texts = [[draw.choice(WORDS) for _ in range(draw.randint(2, 6))] for _ in range(110)]
    kinds = [("color", "number")[WORDS.index(text[0]) > 2] for text in texts]
    joined = [" ".join(text) for text in texts]
    rows = list(zip(texts, kinds, joined, strict=True))
    lines(folder / "colors.jsonl", [{"text": text, "label": kind} for _, kind, text in rows])
    lines(folder / "lengths.jsonl", [{"text": text, "label": len(w) / 2} for w, _, text in rows])
    lines(folder / "echo.jsonl", [{"prompt": f"{t}>", "answer": w[0]} for w, _, t in rows])
    paired = [{"text": w[0], "text2": text, "label": len(w) % 2} for w, _, text in rows]
    lines(folder / "pairs.jsonl", paired)


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every task in every layout, and a run that is stopped and continued."""
    folder = tmp_path_factory.mktemp("finetune")
    write_files(folder)
    begin = (*PRETRAIN, "--data", corpus)
    jobs: list[dict] = []

    def launch(*arguments: object) -> None:
        jobs.append({"do": "launch", "arguments": [*arguments]})

    launch("pretrain", *begin, "--out", folder / "decoder-base")
    launch("pretrain", *begin, "--arch", "bert", "--out", folder / "encoder-base")
    for name, (file, options) in TASKS.items():
        base = folder / ("encoder-base" if name == "encoder" else "decoder-base")
        begin = ("finetune", "--run", base, "--data", folder / f"{file}.jsonl", *SETTINGS)
        for layout, (ranks, zero) in LAYOUTS.items():
            if (name, layout) in SKIPPED:
                continue
            where = ("--out", folder / name / layout, "--nproc", ranks, "--zero", zero)
            launch(*begin, *SHORT, *options, *where)
    # Answers of different lengths, in one micro-batch.
    begin = ("finetune", "--run", folder / "decoder-base", "--data", folder / "echo.jsonl", *SHORT)
    launch(*begin, *SETTINGS, "--set", "train.micro_batch=8", "--out", folder / "answers" / "whole")
    # A few steps of one layer, because bf16 is slow on a CPU. The head is the frozen embedding.
    tied = ("--set", "model.tied=true", "--set", "model.vocab=640", "--recipe", "adamw")
    tied += ("--set", "model.layers=1")
    launch("pretrain", *PRETRAIN, "--data", corpus, *tied, "--out", folder / "tied-base")
    begin = ("finetune", "--run", folder / "tied-base", "--data", folder / "echo.jsonl", *SHORT)
    begin = (*begin, *SETTINGS, "--set", "train.steps=3", "--lora", 4)
    for dtype in ("fp32", "bf16"):
        launch(*begin, "--dtype", dtype, "--out", folder / f"lora-{dtype}")
    # An imported model is fine-tuned, and is a teacher like the run that it comes from.
    base = folder / "decoder-base"
    launch("export", "--run", base, "--to", folder / "hub")
    launch("import", "--from", folder / "hub", "--out", folder / "imported")
    begin = ("finetune", "--init", folder / "imported", "--data", folder / "colors.jsonl")
    launch(*begin, *SETTINGS, "--epochs", 1, "--out", folder / "continued")
    teachers = {"run": base, "checkpoint": base / "checkpoints" / "step-00000004"}
    for name, teacher in {**teachers, "import": folder / "imported"}.items():
        taught = ("--set", f"distill.teacher={teacher}", "--out", folder / f"taught-by-{name}")
        launch("pretrain", *PRETRAIN, "--data", corpus, "--set", "train.steps=1", *taught)
    for name in ("classes", "lora"):
        out = folder / name / "stopped"
        jobs.append({"do": "copy", "src": folder / name / "one", "dst": out})
        jobs.append({"do": "cut", "out": out, "step": 8})
        launch("finetune", "--resume", "--out", out, "--no-track", "--quiet")
    # Long enough to learn the task.
    begin = ("finetune", "--run", folder / "decoder-base", *SETTINGS, "--lr", 0.003, "--epochs", 12)
    begin += ("--set", "train.save_every=1000", "--set", "train.micro_batch=8")
    launch(*begin, "--data", folder / "colors.jsonl", "--out", folder / "learned")
    launch(*begin, "--data", folder / "echo.jsonl", "--out", folder / "echoes", "--batch", 8)
    worlds(jobs, folder)
    return folder


@pytest.mark.parametrize(("task", "layout"), PAIRED)
def test_every_layout_trains_the_same_run(runs: Path, task: str, layout: str) -> None:
    run = runs / task / layout
    one = runs / task / "one"
    assert hashes(run) == hashes(one)
    assert losses(run) == pytest.approx(losses(one), abs=1e-5)
    last = records(run, "eval")[-1]
    figures = {key: value for key, value in records(one, "eval")[-1].items() if "/" in key}
    # A correlation is sensitive: it divides by a spread that is small early in training.
    assert {key: last[key] for key in figures} == pytest.approx(figures, abs=1e-3)
    assert last["loss"] == pytest.approx(losses(one, "eval")[-1], abs=1e-5)
    assert bool(figures) == (task != "answers")


def test_every_token_of_a_batch_counts_the_same(runs: Path) -> None:
    one = runs / "answers" / "one"
    assert losses(runs / "answers" / "whole") == pytest.approx(losses(one), abs=1e-5)


@pytest.mark.parametrize("task", ["classes", "lora"])
def test_a_stopped_run_continues_bit_for_bit(runs: Path, task: str) -> None:
    stopped = runs / task / "stopped"
    assert [r["step"] for r in records(stopped, "event") if r["event"] == "resume"] == [8]
    assert losses(stopped) == losses(runs / task / "one")


def test_an_easy_task_is_learned(runs: Path, corpus: Path, inside) -> None:
    assert records(runs / "learned", "eval")[-1]["labels/accuracy"] == 1
    found = json.loads(inside("evaluate", "--run", runs / "learned", "--json"))
    assert found["labels/accuracy"] == 1
    text = ("evaluate", "--run", runs / "learned", "--data", corpus)
    assert "in rows of 40 tokens" in inside(*text, code=2)  # its tokens are no labels
    out = inside("generate", "--run", runs / "echoes", "--prompt", "blue one red>", "--json")
    assert json.loads(out)["text"] == "blue"
    assert json.loads(out)["ended"]


def test_text_of_a_run_that_learned_labels_alone_has_a_warning(runs: Path, capsys) -> None:
    for task, warned in {"lora": True, "classes": False, "answers": False}.items():
        run = runs / task / "one"
        warn_of_labels(run, run_config(run))
        assert ("labels only" in capsys.readouterr().err) == warned


def test_runs_that_cannot_serve_are_refused_before_anything_is_written(
    runs: Path, corpus: Path, inside
) -> None:
    begin = ("finetune", "--run", runs / "lora" / "one", "--data", runs / "colors.jsonl")
    assert "was trained with LoRA" in inside(*begin, "--out", runs / "again", code=2)
    assert not (runs / "again").exists()
    begin = ("pretrain", *PRETRAIN, "--data", corpus, "--recipe", "adamw", "--out", runs / "again")
    for value in ("lora.rank=2", f"init={runs / 'decoder-base'}"):
        assert inside(*begin, "--set", value, code=2).startswith(f"error: {value}")
    begin = ("pretrain", "--init", runs / "classes" / "one", "--data", corpus, "--steps", 1)
    remedy = ("objective.kind=causal", "model.seq=64", "model.row_classes=0")
    asked = inside(*begin, "--out", runs / "again", code=2)
    assert asked.strip().endswith("with --set " + " --set ".join(remedy))
    sets = [part for value in remedy for part in ("--set", value)]
    inside(*begin, *sets, "--no-track", "--quiet", "--out", runs / "on-text")
    pairs = lines(runs / "t.jsonl", [{"good": "red", "bad": "one"}])
    begin = ("evaluate", "--run", runs / "encoder-base", "--tasks", pairs)
    assert "tasks need a decoder" in inside(*begin, code=2)
    begin = ("generate", "--run", runs / "encoder-base", "--source", "red")
    assert "cannot continue a text" in inside(*begin, code=2)


def test_adapters_merge_into_the_model_that_was_trained(runs: Path) -> None:
    """Compared with LoRA as in its paper: W + scale·BA; all other weights are unchanged."""
    run = runs / "lora" / "one"
    trained = Weights(newest(run))
    start = Weights(newest(runs / "decoder-base"))
    merged, config = load_model(run)
    assert config.lora is not None
    weights = merged.state_dict()
    learned = [name for name in trained if name.endswith(".lora_up")]
    assert len(learned) == 4 * config.model.layers  # qkv, out, up and down of each block
    for name in start:
        path = name.removesuffix(".weight")
        torch.testing.assert_close(trained[name], start[name], rtol=0, atol=0)
        update = torch.zeros(())
        if f"{path}.lora_up" in trained:
            assert trained[f"{path}.lora_up"].abs().max() > 0
            update = 2.0 * trained[f"{path}.lora_up"] @ trained[f"{path}.lora_down"]
        torch.testing.assert_close(weights[name], start[name] + update)
    # The model with adapters, as it was trained.
    unmerged = build_model(config.model, token_weight=0.0)
    adapt(unmerged, config.lora, seed=0)
    unmerged.load_state_dict({name: trained[name] for name in trained})
    tokens = torch.randint(512, (2, 32), generator=torch.Generator().manual_seed(0))
    rows = {"targets_BS": tokens, "labels_B": torch.tensor([0, 1]), "last_B": torch.tensor([9, 31])}
    ours = merged(tokens, **rows).rows_BC
    torch.testing.assert_close(unmerged.eval()(tokens, **rows).rows_BC, ours, rtol=0, atol=1e-5)
    with torch.no_grad():  # two models with logits of zero would also be equal
        assert ours.abs().max() > 1e-3


def test_adapters_in_bf16_stay_near_fp32(runs: Path) -> None:
    assert losses(runs / "lora-bf16") == pytest.approx(losses(runs / "lora-fp32"), abs=2e-2)
    trained = Weights(newest(runs / "lora-bf16"))
    start = Weights(newest(runs / "tied-base"))
    assert all(torch.equal(trained[name], start[name].bfloat16()) for name in start)
    moved = [trained[name].abs().max() > 0 for name in trained if name.endswith(".lora_up")]
    assert all(moved) and moved
    # What the planner predicts for it.
    config = run_config(runs / "lora-bf16")
    size = sum(file.stat().st_size for file in newest(runs / "lora-bf16").path.iterdir())
    assert size < disk_bytes(config, 1) < 2 * size
    held = memory(config, Layout.of(config, 1))
    assert held.weights == 2 * sum(trained[name].numel() for name in trained)
    assert held.optimizer == 12 * sum(trained[n].numel() for n in trained if ".lora_" in n)


@pytest.mark.parametrize(
    ("task", "name"),
    [("lora", "Qwen3ForSequenceClassification"), ("encoder", "BertForSequenceClassification"),
     ("numbers", "Qwen3ForSequenceClassification")],
)  # fmt: skip
def test_transformers_predicts_the_same(
    runs: Path, inside, tmp_path: Path, task: str, name: str
) -> None:
    run = runs / task / "one"
    done = json.loads(inside("export", "--run", run, "--to", tmp_path / "hub", "--json"))
    assert done["architecture"] == name
    theirs = getattr(transformers, name).from_pretrained(tmp_path / "hub").eval()
    model, config = load_model(run)
    # Every held-out row, as `launch evaluate` reads them: padded on the right.
    batch = loader(config, Corpus.open(run / "examples"), "valid").batch(0)
    with torch.no_grad():
        ours = model(**batch.inputs).rows_BC
        inputs = {"input_ids": batch.tokens_BS}
        if batch.last_B is None:
            inputs["attention_mask"] = (batch.documents_BS == 0).long()
            inputs["token_type_ids"] = batch.segments_BS
        else:
            inputs["attention_mask"] = torch.arange(config.model.seq) <= batch.last_B[:, None]
            inputs["input_ids"] = torch.where(inputs["attention_mask"], batch.tokens_BS, 3)  # <pad>
        found = theirs(**inputs).logits
    torch.testing.assert_close(found, ours, rtol=0, atol=1e-5)
    assert found.shape[1] == config.model.row_classes == theirs.config.num_labels
    # The rows are as short as the examples, but the model reads as much as before.
    assert theirs.config.max_position_embeddings == 64 == config.model.longest
    assert (config.model.seq < 64) == (task != "encoder")  # learned positions keep their number
    if task == "lora":
        assert list(theirs.config.id2label.values()) == ["color", "number"]
        # The exported tokenizer frames a text as training does.
        text = json.loads((runs / "colors.jsonl").read_text().splitlines()[0])["text"]
        pieces = transformers.AutoTokenizer.from_pretrained(tmp_path / "hub")
        mine = tokenizer_of(run, config.data.dir)
        assert pieces(text)["input_ids"] == [*mine.encode(text), mine.eod]


def test_an_imported_model_is_tuned_and_exported(runs: Path, inside, tmp_path: Path) -> None:
    run = runs / "continued"
    config = run_config(run)
    # A small rate, because published models are trained for long.
    assert config.optim.lr < run_config(runs / "learned").optim.lr / 2
    inside("export", "--run", run, "--to", tmp_path / "hub")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hub")
    pieces = transformers.AutoTokenizer.from_pretrained(tmp_path / "hub")
    model, _ = load_model(run)
    tokens = torch.tensor([pieces("red one two")["input_ids"]])
    last = torch.tensor([tokens.shape[1] - 1])
    with torch.no_grad():
        found = theirs.eval()(tokens).logits
        ours = model(tokens, targets_BS=tokens, labels_B=torch.tensor([0]), last_B=last).rows_BC
    torch.testing.assert_close(found, ours, rtol=0, atol=1e-5)


def test_a_vocabulary_may_be_larger_than_that_of_the_data(runs: Path, corpus: Path, inside) -> None:
    run = runs / "tied-base"
    found = json.loads(inside("evaluate", "--run", run, "--data", corpus, "--json"))
    assert found["loss"] == pytest.approx(losses(run, "eval")[-1], abs=1e-5)
    less = ("--set", "model.vocab=512", "--out", runs / "refused")
    error = inside("pretrain", "--init", run, "--data", corpus, *less, code=2)
    assert "model.vocab=512: the weights of" in error and "640; remove this setting" in error


def test_a_teacher_is_a_run_a_checkpoint_or_an_import(runs: Path) -> None:
    by_run, *others = (losses(runs / f"taught-by-{n}") for n in ("run", "checkpoint", "import"))
    assert others == [by_run, by_run]


@pytest.mark.parametrize("content", [None, b"", b"no model"])
def test_an_import_without_a_tokenizer(runs: Path, inside, tmp_path: Path, content) -> None:
    start = tmp_path / "imported"
    shutil.copytree(runs / "imported", start, ignore=shutil.ignore_patterns("tokenizer.model"))
    if content is not None:
        (start / "tokenizer.model").write_bytes(content)
    asked = ("--init", start, "--data", runs / "colors.jsonl", "--out", tmp_path / "run")
    (error,) = inside("finetune", *asked, code=2).strip().splitlines()
    assert "tokenizer" in error


@pytest.mark.parametrize("arch", ["llama3", "mistral", "mixtral", "gpt2", "bert"])
def test_every_family_with_a_class_for_sequences(arch: str, tmp_path: Path) -> None:
    reads = "first" if arch == "bert" else "last"
    labels = Labels(names=("a", "b", "c"), reads=reads, special=3 if arch == "bert" else 0)
    shape = ["model.row_classes=3", "model.seq=64", "model.vocab=512", "objective.kind=labels"]
    shape += ['objective.names=["a", "b", "c"]', f"objective.reads={reads}"]
    cfg = load(size="tiny", arch=arch, sets=shape).model
    model = build_model(cfg, token_weight=0.0)
    init_weights(model, cfg, seed=0)
    done = export(model, tmp_path / "hub", None, torch.float32, labels=labels)
    assert done.architecture.endswith("ForSequenceClassification")
    assert done.difference < 1e-5


def test_labels_without_a_class_for_sequences_name_the_architecture() -> None:
    cfg = load(size="tiny", arch="roberta", sets=["model.seq=64", "model.vocab=512"]).model
    with pytest.raises(ConfigError, match="arch=roberta with labels has no counterpart"):
        export_family(cfg.model_copy(update={"row_classes": 3}), Labels(reads="first"))


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], (), "no lines"),
        ([{"text": "a"}], (), "label=None is neither"),
        ([{"text": "", "label": 1}], (), "text='' is not a text"),
        ([{"prompt": "a"}], (), "answer=None is not a text"),
        ([{"prompt": "a", "answer": "b"}, {"text": "a", "label": 1}], (), ":2: another form"),
        ([{"prompt": "a", "answer": "b", "text": "a", "label": 1}], (), "of two forms"),
        ([{"text": f"t{i}", "label": i} for i in range(9)], (), "--regression if labels are numbers"),
        ([{"text": "a", "label": 1}, {"text": "b", "text2": "c", "label": 1}], (), "has text2"),
        ([{"text": "a", "label": 1}], ("--valid", "v.jsonl"), "--valid-share 0.5 both choose"),
        ([{"text": "a", "label": 1}, {"text": "b", "label": "x"}], (), "all texts or all numbers"),
        ([{"text": t, "label": "x"} for t in "abcdef"], ("--regression",), "remove --regression"),
        ([{"text": t, "label": 1} for t in "abcdef"], (), "training examples is 1"),
        ([{"text": t, "label": 2**53 + i} for i, t in enumerate("abcdefghij")], ("--regression",), "equal as 32-bit floats"),
        ([{"text": t, "label": -1e30 * i} for i, t in enumerate("abcdefghij")], (), "scale labels to at most 1e+18"),
        ([{"text": "a", "label": 1}], (), "--valid-share 0.5 leaves"),
        ([{"prompt": t, "answer": t} for t in "abcdef"], ("--lm-weight", 1), "is for labels"),
        ([{"prompt": t, "answer": t} for t in "abcdef"], ("--lora", 1000, "--quiet"), "lora.rank=1000"),
        ([{"text": "a", "label": True}], (), "label=True is neither"),
        ([{"text": "a", "label": float("nan")}], (), "is not finite"),
        ([{"text": "a", "label": 1e39}], (), "is not finite"),
        ([{"text": "a", "label": 10**400}], (), "is not finite"),
    ],
)  # fmt: skip
def test_bad_files_are_one_line(
    runs: Path, inside, tmp_path: Path, rows: list[dict], options: tuple, message: str
) -> None:
    file = lines(tmp_path / "file.jsonl", rows)
    start = ("finetune", "--run", runs / "decoder-base", "--data", file, "--valid-share", 0.5)
    assert message in inside(*start, "--out", tmp_path / "run", *options, code=2)
    assert not (tmp_path / "run").exists()


def test_labels_that_only_valid_has_are_refused(runs: Path, inside, tmp_path: Path) -> None:
    """A decimal point among held-out labels does not turn the classes of --data into numbers."""
    file = lines(tmp_path / "file.jsonl", [{"text": f"t{i}", "label": i % 2} for i in range(9)])
    for label in (1.0, 0.5, 2):
        valid = lines(tmp_path / "valid.jsonl", [{"text": "t", "label": label}])
        start = ("finetune", "--run", runs / "decoder-base", "--data", file, "--valid", valid)
        refused = inside(*start, "--out", tmp_path / "run", code=2)
        assert f"valid.jsonl:1: label={label} " in refused


def test_a_directory_of_the_user_is_kept(runs: Path, inside, tmp_path: Path) -> None:
    """`--out .` in a directory that contains one with the name of the run's corpus."""
    start = ("finetune", "--run", runs / "decoder-base", "--data", runs / "colors.jsonl")
    (tmp_path / "examples").mkdir()
    lines(tmp_path / "examples" / "mine.txt", [])
    assert "examples exists" in inside(*start, "--out", tmp_path, code=2)
    assert (tmp_path / "examples" / "mine.txt").exists()


def test_a_moved_run_continues(runs: Path, inside, tmp_path: Path) -> None:
    shutil.copytree(runs / "classes" / "one", tmp_path / "moved")
    config = tmp_path / "moved" / "config.toml"
    config.write_text(config.read_text().replace(str(runs), "/nowhere"))
    inside("finetune", "--resume", "--out", tmp_path / "moved", "--no-track", "--quiet")
    assert "/nowhere/classes" not in config.read_text()
    found = json.loads(inside("evaluate", "--run", tmp_path / "moved", "--json"))
    assert found["data"] == str(tmp_path / "moved" / "examples")  # not those at the old path


def test_long_texts_are_cut_and_counted(runs: Path, tmp_path: Path) -> None:
    rows = [{"text": "red " * (1 + 60 * (i == 0)) + str(i), "label": i % 2} for i in range(20)]
    file = lines(tmp_path / "file.jsonl", rows)
    asked = FineTuning(
        *(runs / "decoder-base", file, None, 0.3, 32, 4, 1.0, None, False, None, None, False, None)
    )
    prepared = prepare(asked, tmp_path / "run")
    reads = Labels(names=("a", "b"), reads="first")  # three special tokens for two texts
    assert len(make_row(Encoded([4, 5, 6], [7, 8], 0, 0), reads, 2, 0)[0]) == 2 + LABEL_DIGITS
    assert "1 examples are longer" in prepared.note
    model = {"seq": 32, "context": 64, "row_classes": 2, "mtp": 0, "generator": None}
    assert prepared.defaults["model"] == model
    Corpus.open(prepared.rows, verify=True).check_rows(32 + LABEL_DIGITS)
    # The base was trained on 64 tokens at a time, and the longest text has more.
    longer = prepare(replace(asked, seq=100_000), tmp_path / "longer")
    assert longer.defaults["model"]["seq"] > 64
    assert "warning: --seq 100000" in longer.note and "lower it to 64" in longer.note
    assert "--seq" not in prepare(replace(asked, seq=100, scratch=True), tmp_path / "new").note
    with pytest.raises(ConfigError, match="--seq 100: the model has 64 learned positions"):
        prepare(replace(asked, start=runs / "encoder-base", seq=100), tmp_path / "no")
