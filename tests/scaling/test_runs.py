import json
import math
import re
from pathlib import Path

import pytest

from pipeline.errors import ConfigError, DataError, RunError
from pipeline.runs.history import read_run, read_runs
from pipeline.scaling.points import points_of, read_csv
from pipeline.scaling.quality import point_warnings
from tests.scaling.made_runs import make_run


def test_a_point_is_a_finished_runs_last_held_out_loss(ladder: Path) -> None:
    make_run(ladder, "cut", 3e5, 9e6, finish=False)
    points = points_of(read_runs(ladder))
    assert points.run == ("tiny-20x", "mini-20x", "small-20x")
    assert points.dropped == ("cut: not finished (step 266 of 400)",)
    log = [
        json.loads(line) for line in (ladder / "mini-20x" / "log.jsonl").read_text().splitlines()
    ]
    final = [entry for entry in log if entry["kind"] == "eval"][-1]
    assert points.loss[1] == final["loss"]
    assert points.N[1] == 640000  # params.scaling, not total
    assert "without input embedding" in points.convention


def test_records_after_a_resume_replace_what_they_repeat(tmp_path: Path) -> None:
    path = make_run(tmp_path, "a", 1e5, 1e6)
    with (path / "log.jsonl").open("a") as log:
        log.write(
            json.dumps(
                {"kind": "eval", "step": 400, "tokens": 10**6, "flops": 6.4e11, "loss": 1.25}
            )
            + "\n"
        )
    run = read_run(path)
    assert [e["step"] for e in run.evals].count(400) == 1
    assert run.evals[-1]["loss"] == 1.25


def test_status(tmp_path: Path) -> None:
    assert read_run(make_run(tmp_path, "a", 1e5, 1e6)).status(now=1e9) == "finished"
    cut = read_run(make_run(tmp_path, "b", 1e5, 1e6, finish=False))
    assert (cut.status(now=300.0), cut.status(now=1e9)) == ("running", "stale")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer": "beef"}, "one tokenizer"),
        ({"convention": "6ND"}, "recount"),
        ({"arch": "moe"}, "one architecture"),
    ],
)
def test_mixing_is_an_error(ladder: Path, change: dict[str, str], words: str) -> None:
    make_run(ladder, "other", 3e5, 6e6, **change)
    for curves in (False, True):
        with pytest.raises(DataError, match=words):
            points_of(read_runs(ladder), curves=curves)


def test_recipes_and_optimizers_are_not_mixed(ladder: Path) -> None:
    """They are in config.toml. A run without this file has an unknown recipe, which matches any."""
    config = ladder / "tiny-20x" / "config.toml"
    config.write_text('recipe = "adamw"\noptim.optimizer.kind = "adamw"\n')
    other = make_run(ladder, "other", 3e5, 6e6) / "config.toml"
    for text, words in (
        ('recipe = "muon"', "recipe=adamw, muon are mixed; a law describes one recipe"),
        ('recipe = "adamw"\noptim.optimizer.kind = "muon"', "optimizer=adamw, muon are mixed"),
    ):
        other.write_text(text)
        with pytest.raises(DataError, match=words):
            points_of(read_runs(ladder))
    other.write_text("damaged")
    assert len(points_of(read_runs(ladder))) == 4


def test_other_directories_are_not_run_directories(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a directory"):
        read_runs(tmp_path / "nowhere")
    with pytest.raises(RunError, match="contains no run"):
        read_runs(tmp_path)
    make_run(tmp_path, "old", 1e5, 1e6, version=99)
    with pytest.raises(RunError, match="version=99"):
        read_runs(tmp_path)


def test_csv_drops_rows_with_reasons(tmp_path: Path) -> None:
    file = tmp_path / "p.csv"
    file.write_text(
        "N,D,loss,run\n1e6,2e7,3.5,a\n1e6,2e7,3.5,b\n2e6,4e7,nan,c\n2e6,4e7,,d\n3e6,-1,3,e\n3e6,6e7,3.1,f\n"
    )
    points = read_csv(file)
    assert points.run == ("a", "f")
    assert [reason.split(":")[0] for reason in points.dropped] == ["b", "c", "d", "e"]
    assert "loss=nan is not a number above zero" in points.dropped[1]
    assert "D=-1 is not" in points.dropped[3]
    assert points.convention == "C = 6·N·D"
    assert math.isclose(points.C[0], 6 * 1e6 * 2e7)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("N,loss\n1,2\n", r"columns \['D'\] are missing"),
        ("N,D,loss\n", "no rows"),
        ("N,D,loss\n1,2,three\n", "'three' is not a number"),
        ("N,D,loss,vocab\n1,2,3,32000\n1,3,3,50257\n", "within one vocabulary"),
        ("N,D,loss,vocab\n1,2,3,32000\n1,3,3,\n", "32000, none given are mixed"),
        (
            f"N,D,loss,convention\n1,2,3,{'long' * 20}\n1,3,3,{'other' * 20}\n",
            "convention=2 different ones are mixed",
        ),
        ("N,D,loss,convention\n1,2,3,a\n1,3,3,b\n", "mixed; they count N and C"),
        ("N;D;loss\n1;2;3\n", "commas"),
        ("N,D,loss,loss\n1,2,3,4\n", "column loss"),
    ],
)
def test_bad_csv(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "p.csv"
    file.write_text(text)
    with pytest.raises(DataError, match=words):
        read_csv(file)


def test_a_half_empty_column_is_refused(tmp_path: Path) -> None:
    """An empty cell in the first row must not make the reader ignore the column."""
    file = tmp_path / "p.csv"
    file.write_text(" loss,N , D,C,experts\r\n3.5,1e6,2e7,,1\r\n3.1,2e6,4e7,9e14,8\r\n")
    with pytest.raises(DataError, match=r"p\.csv:2: C= is empty"):
        read_csv(file)
    file.write_text("loss,N,D,C,experts\n3.5,1e6,2e7,,1\n3.1,2e6,4e7,,8\n")
    points = read_csv(file)  # a column without any value is ignored
    assert list(points.C) == [6 * 1e6 * 2e7, 6 * 2e6 * 4e7]
    assert points.experts is not None and list(points.experts) == [1, 8]


def test_a_warning_if_rows_count_compute_differently(tmp_path: Path) -> None:
    file = tmp_path / "p.csv"
    file.write_text("N,D,C,loss\n1e6,2e7,1.2e14,3.5\n2e6,4e7,4.8e17,3.2\n")
    (warning,) = (text for text in point_warnings(read_csv(file)) if "C / (N·D) ranges" in text)
    assert "from 6 (row 2) to 6e+03 (row 3)" in warning


@pytest.mark.parametrize("damage", ["last evaluation lost", "log of another run"])
def test_a_loss_before_the_end_is_not_a_point(damage: str, ladder: Path) -> None:
    log = ladder / "mini-20x" / "log.jsonl"
    if damage == "log of another run":
        log.write_text((ladder / "small-20x" / "log.jsonl").read_text())
    else:
        lines = log.read_text().splitlines(keepends=True)
        log.write_text("".join(x for x in lines if '"eval"' not in x or '"step": 400' not in x))
    points = points_of(read_runs(ladder))
    assert points.run == ("tiny-20x", "small-20x")
    assert "mini-20x: finished without a held-out loss of its last step" in points.dropped[0]
    assert points.dropped[0] in points.warnings


def test_damaged_runs_are_named(ladder: Path, launch) -> None:
    source = f"fit --json --bootstrap 0 --runs {ladder}"
    log = ladder / "mini-20x" / "log.jsonl"
    whole = log.read_text()
    log.write_text(re.sub(r'"tokens": \d+, ("flops": [^,]+, "loss": [^,]+, "bpb")', r"\1", whole))
    found = json.loads(launch(source))
    assert "mini-20x: D=nan is not a number above zero" in found["points"]["dropped"]
    log.write_text(whole)
    (ladder / "mini-20x" / "config.toml").write_text("[model\n")
    assert any(
        "lacks the runs' settings" in text for text in json.loads(launch(source))["warnings"]
    )
    record = ladder / "mini-20x" / "run.json"
    record.write_text(record.read_text().replace('"vocab": 4096', '"vocab": "4k"'))
    with pytest.raises(RunError, match="vocab is missing or invalid"):
        launch(source)
    for name in ("", ".."):
        with pytest.raises(ConfigError, match="experiment="):
            launch("fit", f"--experiment={name}")
