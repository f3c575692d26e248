"""Compare scores of tasks with lm-eval's own Hugging Face backend and with plain torch."""

import gzip
import itertools
import json
import math
import os
import shutil
import signal

import pytest
import torch

from launch.generate import _lines
from pipeline.data.rows import read_examples
from pipeline.errors import ConfigError, DataError, RunError
from pipeline.tasks.harness import refuse_unknown
from pipeline.tasks.likelihood import Likelihood, Pair, encode_pair, score_parts, scorer
from pipeline.tasks.questions import Question, Task, read_task
from tests.conftest import launch
from tests.train.test_run import TINY

# A task of lm-eval whose data is a local file.
YAML = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
target_delimiter: ""
doc_to_text: "{{{{prompt}}}}"
{more}
"""
CHOICE = """doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
ROLLING = """doc_to_target: "{{prompt}}"
metric_list: [{metric: bits_per_byte}]
"""
UNTIL = """doc_to_target: " x"
generation_kwargs: {until: ["\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
"""
QUESTIONS = [
    {"prompt": "def f(x):\n    return", "choices": [" x", " import", " None, None"], "answer": 0},
    {"prompt": "import ", "choices": ["os", "the number of", "sys"], "answer": 2},
    {"prompt": "for i in range(10):\n    print(", "choices": ["i)", "zebra"], "answer": 0},
    {
        "prompt": "class A:\n    def __init__(self" + ", a" * 200,
        "choices": ["):", "\n"],
        "answer": 0,
    },
]


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("tasks") / "run"
    launch("pretrain", *TINY, "--data", corpus, "--out", out)
    return out


def test_scores_equal_lm_evals_own_backend_on_the_export(run, corpus, tmp_path):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    data = tmp_path / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    kinds = {"multiple_choice": CHOICE, "loglikelihood_rolling": ROLLING, "generate_until": UNTIL}
    for kind, more in kinds.items():
        (tmp_path / f"{kind}.yaml").write_text(
            YAML.format(name=f"our_{kind}", data=data, kind=kind, more=more)
        )
    launch("export", "--run", run, "--to", tmp_path / "hub")
    names = [f"our_{kind}" for kind in kinds]
    truth = lm_eval.simple_evaluate(
        HFLM(pretrained=str(tmp_path / "hub"), device="cpu", batch_size=2, dtype="float32"),
        tasks=names, bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
    )  # fmt: skip
    asked = [part for name in names for part in ("--tasks", name)]
    options = ("--task-dir", tmp_path, "--nproc", 2, "--tasks", data, "--json")
    found = json.loads(launch("evaluate", "--run", run, *asked, *options).stdout)["tasks"]
    gone = YAML.format(name="gone", data="gone", kind="multiple_choice", more=CHOICE)
    (tmp_path / "gone.yaml").write_text(gone)
    refused = launch("evaluate", "--run", run, "--tasks", "gone", "--task-dir", tmp_path, code=2)
    assert "--tasks gone" in refused.stderr
    wrong = YAML.format(name="wrong", data=data, kind="multiple_choice", more=CHOICE)
    (tmp_path / "wrong.yaml").write_text(wrong.replace("{{prompt}}", "{{absent}}"))
    refused = launch("evaluate", "--run", run, "--tasks", "wro*", "--task-dir", tmp_path, code=2)
    assert "wro*: UndefinedError: 'absent' is undefined; correct the YAML" in refused.stderr
    choice, rolling, until = (truth["results"][name] for name in names)
    assert found["our_multiple_choice"]["acc"] == choice["acc,none"]
    assert found["questions"]["accuracy"] == choice["acc,none"]
    assert found["our_generate_until"]["exact_match"] == until["exact_match,none"]
    bits = found["our_loglikelihood_rolling"]["bits_per_byte"]
    assert bits == pytest.approx(rolling["bits_per_byte,none"], rel=1e-4)
    # Compare the likelihoods themselves, not only their order, and the generated text.
    from pipeline.runs.directory import tokenizer_of
    from pipeline.tasks.answering import open_model
    from pipeline.tasks.harness import _adapter

    samples = [
        (kind, sample)
        for kind in ("multiple_choice", "generate_until")
        for sample in truth["samples"][f"our_{kind}"]
    ]
    for processes in (1, 2):
        with open_model(run, processes) as reader:
            ours = _adapter(reader, tokenizer_of(run, corpus))
            for kind, sample in samples:
                requests = [_Request(arguments) for arguments in sample["arguments"]]
                if kind == "generate_until":
                    assert ours.generate_until(requests) == sample["resps"][0]
                    continue
                likelihoods = [float(response[0][0]) for response in sample["resps"]]
                mine = [nats for nats, _ in ours.loglikelihood(requests, disable_tqdm=True)]
                assert mine == pytest.approx(likelihoods, abs=1e-4)


class _Request:
    def __init__(self, arguments):
        self.args = arguments


def test_likelihoods_do_not_depend_on_batch_or_padding():
    torch.manual_seed(0)
    table = torch.randn(50, 50)

    def logits(tokens_BS):
        return table[tokens_BS]  # the next token depends on the last one only

    pairs = [Pair((1,), (2, 3)), Pair(tuple(range(40)), (5,)), Pair((7, 8), tuple(range(9, 30)))]
    pairs.append(Pair((1, 2), (*range(50), *range(40))))  # longer than the context of the model
    score = scorer(logits, 32, 50, torch.device("cpu"))
    assert score([Pair((3,), ())]) == [(0.0, True)]
    found = score(pairs)
    for pair, likelihood in zip(pairs, found, strict=True):
        whole = [*pair.context, *pair.answer]
        wanted = 0.0
        greedy = True
        for last, token in list(itertools.pairwise(whole))[-len(pair.answer) :]:
            wanted += table[last].log_softmax(-1)[token].item()
            greedy &= table[last].argmax().item() == token
        assert likelihood.nats == pytest.approx(wanted, abs=1e-5) and likelihood.greedy == greedy


def test_the_logits_of_a_pass_do_not_grow_with_the_vocabulary():
    from pipeline.tasks.likelihood import pass_tokens

    tokens = [pass_tokens(vocab, torch.device("cuda")) for vocab in (512, 32768, 131072)]
    assert tokens == [65536, 16384, 4096]


def test_scores_follow_from_likelihoods():
    questions = (
        Question("a", "", ("right", "wrong one"), 0),
        Question("a", "", ("xy", "x"), 1),
        Question("b", "say", (" it",), 0),
    )
    found = [(-2.0, False), (-3.0, False), (-2.0, False), (-1.5, False), (-1.0, True)]
    parts = score_parts(Task("t", questions), [Likelihood(*each) for each in found])
    # By byte: −0.4 against −0.33, and −1 against −1.5.
    assert parts["a"][:2] == (1.0, 0.0) and parts["b"][:2] == (1.0, 1.0)
    bits = (2.0 / 5 + 1.5 / 1) / 2 / math.log(2)
    assert parts["a"].bits_per_byte == pytest.approx(bits) and parts["a"].questions == 2


@pytest.mark.parametrize(
    ("sizes", "most", "wanted"),
    [([990, 10], 500, [490, 10]), ([3] * 67, 32, [1] * 67), ([5, 99, 1, 99], 49, [5, 21, 1, 22])],
)
def test_a_sample_is_spread_over_the_parts(sizes, most, wanted):
    names = [str(part) for part, size in enumerate(sizes) for _ in range(size)]
    task = Task("t", tuple(Question(name, "", (str(i), "x"), 0) for i, name in enumerate(names)))
    sample = task.sample(most).questions
    assert [sum(q.part == str(part) for q in sample) for part in range(len(sizes))] == wanted


def test_a_run_is_scored_while_it_trains(run, corpus, tmp_path, inside):
    """With 1 and 2 processes and ZeRO-3, the same scores as `launch evaluate` gives afterwards."""
    data = tmp_path / "quiz.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    logged = []
    for nproc, zero in ((1, 1), (2, 3)):
        out = tmp_path / f"{nproc}"
        tasks = ("--set", f'eval.tasks=["{data}"]', "--set", f"parallel.zero={zero}")
        tasks += ("--set", f"eval.share={nproc - 1}")
        said = launch("pretrain", *TINY, "--data", corpus, "--out", out, "--nproc", nproc, *tasks)
        assert "quiz/accuracy" in said.stdout
        # Tasks may take none of the time with one process, and all of it with two.
        wanted = "% of the time, more than eval.share=0; raise train.eval_every"
        assert said.stdout.count(wanted) == (nproc == 1)
        evals = [r for r in map(json.loads, (out / "log.jsonl").open()) if r["kind"] == "eval"]
        logged.append(evals[-1])
    after = json.loads(launch("evaluate", "--run", out, "--tasks", data, "--json").stdout)
    for record in logged:
        assert 0 < record["tasks_s"] < 60
        assert record["quiz/accuracy"] == after["tasks"]["quiz"]["accuracy"]
        bits = after["tasks"]["quiz"]["bits_per_byte"]
        assert record["quiz/bpb"] == pytest.approx(bits, rel=1e-4)
    refused = {'["none.jsonl"]': "eval.tasks: /", f'["{data}", "{data}"]': "two task files"}
    for name in ("labels", "in_context"):  # of other figures
        (tmp_path / f"{name}.jsonl").write_text(data.read_text())
        refused[f'["{tmp_path}/{name}.jsonl"]'] = f"{name} is a reserved name; rename"
    for value, words in refused.items():
        asked = ("--data", corpus, "--out", tmp_path / "x", "--set", f"eval.tasks={value}")
        assert words in inside("pretrain", *TINY, *asked, code=2)


def test_an_answer_takes_the_spaces_before_it(corpus):
    from pipeline.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.open(corpus / "tokenizer.model")
    spaced = encode_pair(tokenizer, "import  ", "os")
    assert spaced == encode_pair(tokenizer, "import", "  os")
    assert tokenizer.decode([*spaced.context, *spaced.answer]) == "import  os"
    assert encode_pair(tokenizer, "", "os").context == (tokenizer.eod,)


def test_an_answer_has_a_token_even_if_it_merges_with_the_context(run, corpus):
    from pipeline.data.tokenizer import Tokenizer
    from pipeline.tasks.answering import Model
    from pipeline.tasks.harness import _adapter

    tokenizer = Tokenizer.open(corpus / "tokenizer.model")
    words = (tokenizer.decode([token]) for token in range(tokenizer.vocab))
    word = next(w for w in words if w.isalpha() and len(w) > 2 and len(tokenizer.encode(w)) == 1)
    context, answer = encode_pair(tokenizer, word[:2], word[2:])
    assert context == (tokenizer.eod,) and answer == tuple(tokenizer.encode(word))
    longer = encode_pair(tokenizer, f"1\n{word[:2]}", word[2:])
    assert [*longer.context, *longer.answer] == tokenizer.encode(f"1\n{word}").tolist()
    adapter = _adapter(Model(run, torch.device("cpu")), tokenizer)
    requests = [_Request((text, word[2:])) for text in (word[:2], f"1\n{word[:2]}", " ")]
    for nats, _greedy in adapter.loglikelihood(requests, disable_tqdm=True):
        assert nats < 0


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("[1, 2]", "not a JSON object"),
        ("{", "not a JSON object"),
        ('{"good": "a"}', "bad=None"),
        ('{"good": 1, "bad": "b"}', "good=1"),
        ('{"prompt": "a"}', "choices=None"),
        ('{"prompt": "a", "choices": ["b"], "answer": 0}', "choices="),
        ('{"prompt": "a", "choices": ["b", 2], "answer": 0}', "choices=2"),
        ('{"prompt": "a", "choices": ["b", "c"], "answer": 2}', "answer=2"),
        ('{"prompt": "a", "choices": ["b", "c"], "answer": true}', "answer=True"),
        ('{"choices": ["b", "c"], "answer": 0}', "prompt=None"),
        ('{"prompt": "a", "continuation": ""}', "continuation=''"),
        (r'{"prompt": "a", "continuation": "\ud800"}', "continuation=.*surrogate"),
        ('{"good": "a", "bad": "b", "prompt": "c"}', "good and prompt are of two forms"),
        ('{"good": "a", "bad": "b", "continuation": "d"}', "two forms"),
        ("", "no lines"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, key):
    file = tmp_path / "task.jsonl"
    file.write_text(line)
    with pytest.raises(DataError, match=key):
        read_task(file)


@pytest.mark.parametrize("read", [read_task, read_examples, _lines])
def test_an_error_counts_blank_lines(tmp_path, read):
    file = tmp_path / "task.jsonl"
    file.write_text("\n \n\n[]\n")
    with pytest.raises(DataError, match=r"task\.jsonl:4: not a JSON object"):
        read(file)


def test_a_compressed_file_cannot_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.data.json_lines._MAX_BYTES", 1000)
    file = tmp_path / "task.jsonl.gz"
    file.write_bytes(gzip.compress(b" " * 100_000))
    with pytest.raises(DataError, match="unpacks to more than 1,000 bytes"):
        read_task(file)


def test_only_a_newline_ends_a_line(tmp_path):
    """U+2028, which also ends a line for Python, may stand in a JSON string."""
    file = tmp_path / "task.jsonl"
    file.write_text('\ufeff{"good": "a\u2028b", "bad": "b"}\r\n\r\n')
    assert read_task(file).questions == (Question("task", "", ("a\u2028b", "b"), 0),)


def test_bad_requests_are_one_line(run, tmp_path, inside):
    broken = tmp_path / "t.jsonl.gz"
    broken.write_bytes(gzip.compress(b"{}")[:-9])
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    for task, words in {
        str(pipe): "not a regular file",
        "no/such.jsonl": "no such file",
        str(broken): "cannot be read",
        "no_such_task": "neither a file nor a task",
    }.items():
        assert words in inside("evaluate", "--run", run, "--tasks", task, code=2)
    odd = tmp_path / "odd.jsonl"  # some names look like rich's markup
    odd.write_text(
        "".join(f'{{"task": "{part}", "good": "a", "bad": "b"}}\n' for part in ("[/b]", "c"))
    )
    assert "odd/[/b]" in inside("evaluate", "--run", run, "--tasks", odd)
    (tmp_path / "run.json").write_text("{}")  # a run that has just started
    assert "no checkpoint yet" in inside("generate", "--run", tmp_path, "--prompt", "a", code=2)
    (tmp_path / "base").write_text("doc_to_text: the a b\ntag:\n  - mine\n")  # others include it
    refuse_unknown(["mine", "m*e", "[lm]?ne"], tmp_path)
    # A name that is only mentioned, and a byte from the shell that is not UTF-8.
    for name in ("a b", "\udcff", "mi*zz", "[!m]ine"):
        with pytest.raises(ConfigError, match="neither a file nor a task"):
            refuse_unknown([name], tmp_path)
    assert "add --tasks" in inside("evaluate", "--run", run, "--shots", 2, code=2)
    assert "lm-eval, the first" in " ".join(inside("evaluate", "--help").split())


def test_without_lm_eval_only_its_tasks_are_refused(run, tmp_path, inside, monkeypatch):
    monkeypatch.setattr("pipeline.tasks.harness.find_spec", lambda name: None)
    refused = inside("evaluate", "--run", run, "--tasks", "hellaswag", code=2)
    assert "--tasks hellaswag: lm-eval is not installed; run `pip install" in refused
    (tmp_path / "mine.jsonl").write_text('{"good": "a", "bad": "b"}')
    assert "mine" in inside("evaluate", "--run", run, "--tasks", tmp_path / "mine.jsonl")


def test_without_a_connection_an_error_comes_at_once(run, tmp_path):
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    refused = launch("evaluate", "--run", run, "--tasks", "hellaswag", code=2, **nowhere).stderr
    assert "--tasks hellaswag: the questions cannot be loaded" in refused
    assert "OfflineModeIsEnabled" in refused and "Retrying" not in refused


def test_an_error_in_a_worker_process_is_reported_as_such(run, tmp_path):
    from pipeline.tasks.answering import open_model

    damaged = tmp_path / "run"
    shutil.copytree(run, damaged, symlinks=True)
    with open_model(damaged, 2) as pool:  # the files are good until here
        for file in damaged.rglob("*.bin"):
            file.write_bytes(b"")
        with pytest.raises(RunError, match="no intact checkpoint"):
            pool.score([Pair((1,), (2,))])
        ends = pool._workers.submit(signal.getsignal, signal.SIGINT).result()
        assert ends == signal.SIG_DFL  # without a traceback
