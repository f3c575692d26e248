"""Bad command lines: each ends in one line, in seconds, and leaves nothing behind."""

import pytest

from tests.attack.harness import LEGACY, expect_none, fault, run

LONG = "a" * 300
INTEGERS = ("abc", "-1", "0", "9" * 40, "1.5", "")
NUMBERS = ("abc", "-1", "0", "nan", "inf", "1e400", "")
WORDS = ("../../x", "", "💥", LONG, "--json")
PATHS = ("/proc/nope/x", "/dev/null", "", LONG, "a\nb")

FINETUNE = (
    "finetune --run RUN --data EXAMPLES --tokenizer TOKENIZER --batch 8 --no-track --nproc 1 --slurm "
    "--gpus-per-node 0 --dry-run --out OUT"
)
# Each command with arguments that make it valid and fast, and options with values to try.
BASES = {
    "show --size tiny": {
        "--size": WORDS, "--arch": WORDS, "--gpus": INTEGERS, "--cluster": WORDS, "--config": PATHS,
        "--set": ("x", "=", "model.layers=", "model.layers=1000000000000", "model.layers=abc",
                  "model.layers=-1", "model.d=0", "model.heads=0", "model.vocab=1e30", "x.y.z=1",
                  "cluster.rates.matmul_share=0", "train.steps=nan", "[]=1", "model={}",
                  "train.batch_tokens=-1", "model.seq=0", "parallel.zero=9", LONG + "=1"),
    },
    "pretrain --size tiny --no-track --slurm --dry-run --data DATA --out OUT": {
        "--size": WORDS, "--arch": WORDS, "--data": PATHS, "--nproc": INTEGERS,
        "--zero": INTEGERS, "--ep": INTEGERS, "--sp": INTEGERS, "--engine": WORDS,
        "--steps": INTEGERS, "--tokens": NUMBERS, "--flops": NUMBERS, "--dtype": WORDS,
        "--init": PATHS, "--branch": PATHS, "--experiment": WORDS, "--cluster": WORDS,
        "--config": PATHS, "--seed": INTEGERS, "--nodes": INTEGERS, "--gpus-per-node": INTEGERS,
        "--time": ("abc", "", "-1", "١٢:00:00", "99999999999:00:00", "00:00:00"),
    },
    "evaluate --run nowhere": {"--run": PATHS, "--data": PATHS, "--batches": INTEGERS},
    "generate --run nowhere": {
        "--run": PATHS, "--file": PATHS, "--shots": PATHS, "--seed": INTEGERS, "--prompt": ("\udcff",), "--max-new": INTEGERS, "--temperature": NUMBERS,
        "--top-k": INTEGERS, "--top-p": NUMBERS, "--beam": INTEGERS, "--tokenizer": PATHS,
    },
    FINETUNE: {
        "--run": PATHS, "--data": PATHS, "--valid": PATHS, "--valid-share": NUMBERS,
        "--epochs": (*NUMBERS, "1e300"), "--batch": INTEGERS, "--lr": NUMBERS, "--seq": INTEGERS,
        "--lm-weight": NUMBERS, "--lora": INTEGERS, "--tokenizer": PATHS, "--nodes": INTEGERS,
        "--set": ("model.layers=9", "init=x", "lora={}", "eval.tasks=x", "objective.kind=causal"),
    },
    "evaluate --run RUN --tokenizer TOKENIZER --tasks QUESTIONS --tokenizer TOKENIZER": {
        "--questions": INTEGERS, "--nproc": INTEGERS[:-1], "--data": PATHS, "--batches": ("1",),
    },
    "bench in-context --steps 1 --rows 2 --test-rows 2": {
        "--d": INTEGERS, "--examples": INTEGERS, "--noise": NUMBERS, "--rows": INTEGERS,
        "--set": ("model.vocab=5", "train.steps=9", "x"),
    },
    "export --run nowhere --to OUT": {"--run": PATHS, "--to": PATHS, "--dtype": WORDS},
    "import --from nowhere --out OUT": {"--from": PATHS, "--out": PATHS},
    "fit --runs .": {"--runs": PATHS, "--points": PATHS, "--law": WORDS, "--bootstrap": INTEGERS},
    "forecast --runs .": {"--targets": PATHS, "--forecasts": PATHS, "--gpus": INTEGERS},
    "forecast --runs . --size tiny": {"--tokens": NUMBERS, "--params": NUMBERS, "--set": WORDS},
    "score --runs .": {"--forecasts": PATHS, "--experiment": WORDS},
    "dashboard --runs . --static page.html": {
        "--runs": PATHS, "--experiment": WORDS, "--static": PATHS, "--port": INTEGERS, "--law": WORDS,
    },
    "data tokenizer --source nowhere --out OUT": {
        "--vocab-size": INTEGERS, "--kind": WORDS, "--weight": NUMBERS, "--sample-bytes": INTEGERS,
    },
    "data prepare --source nowhere --out OUT": {
        "--config": PATHS, "--vocab-size": INTEGERS, "--tokenizer": PATHS, "--seed": INTEGERS,
        "--valid-share": NUMBERS, "--limit-bytes": INTEGERS, "--malformed-share": NUMBERS,
    },
    "sweep plan cpu": {"--budget": NUMBERS, "--hours": NUMBERS, "--points": PATHS, "--mfu": NUMBERS},
    "bench loader nowhere": {"--rows": INTEGERS, "--seq": INTEGERS},
    "logs nowhere": {"--rank": INTEGERS},
    "sync nowhere": {"--wait": NUMBERS},
}  # fmt: skip

# These were accepted once, or failed after minutes.
REFUSED = (
    "",
    "nonsense",
    "show --sise tiny",
    "show --size tiny extra",
    "data",
    "data nonsense",
    "sweep plan",
    "import",
    "data prepare --source python --out OUT --vocab-size 0",
    "data prepare --source python --out OUT --vocab-size 3000000000",
    "data prepare --source python --out OUT --workers 100000",
    "sync nowhere",
    "logs nowhere",
    "cancel nowhere",
    "evaluate --run nowhere",
    "evaluate --run RUN --tokenizer TOKENIZER --tasks QUESTIONS --data DATA",
    "evaluate --run RUN --tokenizer TOKENIZER --tasks QUESTIONS --shots 3",
    "evaluate --run RUN --tokenizer TOKENIZER --tasks QUESTIONS --nproc 1000",
    "evaluate --run RUN --nproc 2",
    "generate --run RUN --tokenizer TOKENIZER --prompt a --beam 100000000",
    "generate --run RUN --tokenizer TOKENIZER --prompt a --temperature 1 --seed 99999999999999999999999",
    "generate --run RUN --tokenizer TOKENIZER --prompt a --max-new 99999999",
    *(f"evaluate --run RUN --tasks {task}" for task in ("''", ".", "x --task-dir nowhere")),
    *(
        f"pretrain --size tiny --no-track --slurm --dry-run --data DATA --out OUT --set distill.{each}"
        for each in ("teacher=nowhere", "teacher=/etc/passwd", "teacher=[1]", "soft=1")
    ),
    "bench in-context --set train.steps=9",
    "bench in-context --noise inf",
    *(
        f"{FINETUNE} {options}"
        for options in (
            "--lr 0",
            "--epochs inf",
            "--batch 99999999",
            "--lm-weight inf",
            "--lora 4 --scratch",
            "--resume",
            "--set model.layers=9",
            "--set init=x",
            "--batch 3 --nproc 2",
            "--batch 8 --nodes 1-3",
        )
    ),
    "finetune --resume --out RUN --epochs 9",
    "finetune --resume --out RUN --lora 4",
    "fit",
    "forecast --runs .",
    "dashboard --runs nowhere --static page.html",
    "dashboard --host not.a.host.example --port 0",
    "bench train --size nonsense",
    "bench train --size 7k --steps 99999999999999",
    "bench loader DATA --rows 99999999999999",
)


@pytest.fixture
def words(tmp_path, monkeypatch):
    """Split a line into words, in an empty directory with a corpus at hand."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path.parent / 'attack.db'}")
    examples = tmp_path.parent / "examples.jsonl"
    examples.write_text("".join(f'{{"text": "a {i}", "label": {i % 2}}}\n' for i in range(40)))
    questions = tmp_path.parent / "questions.jsonl"
    questions.write_text('{"good": "a", "bad": "b"}\n')
    places = {"RUN": LEGACY / "runs" / "dense", "EXAMPLES": examples, "QUESTIONS": questions}
    places["TOKENIZER"] = LEGACY / "corpus" / "tokenizer.model"
    places |= {"DATA": LEGACY / "corpus", "OUT": tmp_path.parent / "attack-out", "''": ""}
    return lambda line: [places.get(word, word) for word in line.split()]


@pytest.mark.parametrize("base", BASES)
def test_bad_values(base, words, tmp_path) -> None:
    out = tmp_path.parent / "attack-out"
    lines = [
        [*words(base), option, value] for option, values in BASES[base].items() for value in values
    ]
    expect_none(fault(line, out=out) for line in lines)


def test_refused_lines(words, tmp_path) -> None:
    out = tmp_path.parent / "attack-out"
    expect_none(fault(words(line), refuse=True, out=out) for line in REFUSED)


def test_the_lines_above_are_refused_for_their_last_option(words, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")  # without sbatch, which would refuse a job where SLURM is down
    for line in (FINETUNE, "evaluate --run RUN --tasks QUESTIONS --tokenizer TOKENIZER"):
        code, printed = run(*words(line))
        assert code == 0, printed


def test_there_are_enough() -> None:
    tried = sum(len(values) for options in BASES.values() for values in options.values())
    assert tried + len(REFUSED) >= 250
