"""Commands that only print: they answer at once, as text and as JSON."""

import json
import os
import re
import shlex
import signal
import subprocess

import pytest

from pipeline.config.layers import names
from tests.conftest import command, environment, launch


def test_show_counts_the_1b_shape(inside):
    figures = json.loads(inside("show", "--size", "1b", "--gpus", 8, "--json"))
    assert figures["params"]["total"] == 1_107_367_936
    assert figures["flops_per_token"]["model"] == 6_643_777_536
    assert "causal" in figures["convention"]
    totals = [figures["memory_bytes"][f"zero{stage}"]["total"] for stage in range(4)]
    assert totals == sorted(totals, reverse=True)
    text = inside("show", "--size", "1b", "--cluster", "h100")
    assert "1.11B total" in text and "ZeRO" in text and "✓" in text and "--zero 1" in text
    assert "least memory within 1% of the fastest" in " ".join(text.split())
    assert "seq 512 → 114" in inside("show", "--size", "27k", "--arch", "t5")


def test_show_lays_out_a_routed_model_over_nodes(inside):
    routed = ("show", "--size", "16b", "--arch", "deepseek-v2-lite", "--cluster", "h100")
    figures = json.loads(inside(*routed, "--gpus", 16, "--json"))
    take = figures["recommended"]
    rows = figures["layouts"]
    assert take in rows and take["fits"]
    assert {row["layout"]["ep"] for row in rows} == {1, 2, 4, 8, 16}
    assert take["step_s"] <= 1.01 * min(row["step_s"] for row in rows if row["fits"])
    assert take["tokens_s"] * take["step_s"] == pytest.approx(figures["recipe"]["batch_tokens"])
    assert any(not row["fits"] for row in rows)


def test_show_names_the_nearest_layout_that_fits(inside):
    """It named a smaller size only, though sequences that are shared by two GPUs fit."""
    found = "none of these fits; on 32 GPUs, `launch pretrain` fits with --zero 3 "
    assert found in inside("show", "--size", "70b", "--gpus", 8, "--cluster", "h100")
    at = ("show", "--size", "7b", "--gpus", 16, "--cluster", "h100", "--set")
    nearest = json.loads(inside(*at, "model.seq=131072", "--json"))["nearest"]
    assert nearest["sp"] > 1
    sets = [f"--set=parallel.{key}={nearest.pop(key)}" for key in ("zero", "sp")]
    assert set(nearest) == {"train.micro_batch", "train.recompute"}
    sets += [f"--set={key}={json.dumps(value)}" for key, value in nearest.items()]
    chosen = json.loads(inside(*at, "model.seq=131072", *sets, "--json"))["recommended"]
    assert chosen["fits"]


def test_show_derives_the_recipe_of_a_run_length(inside):
    longer = json.loads(inside("show", "--size", "tiny", "--tokens", "2B", "--json"))
    key = "train.tokens=2000000000"
    assert longer == json.loads(inside("show", "--size", "tiny", "--set", key, "--json"))
    assert longer["recipe"]["tokens"] == pytest.approx(2e9, rel=0.01)
    assert longer["recipe"]["lr"] < 0.06  # of 20 tokens per parameter
    assert "'--tokens': 2Q is not a number" in inside("show", "--tokens", "2Q", code=2)


def test_show_refuses_what_no_run_accepts(inside):
    said = inside("show", "--size", "tiny", "--set", "model.segments=2", code=2)
    assert "model.segments=2 has no effect without" in said


def test_the_whole_ladder(inside):
    rows = json.loads(inside("show", "--sizes", "--json"))
    assert sorted(row["size"] for row in rows) == sorted(names("size"))
    assert [row["params"] for row in rows] == sorted(row["params"] for row in rows)
    by_size = {row["size"]: row for row in rows}
    assert by_size["tiny"]["non_embedding"] == pytest.approx(0.2e6, rel=0.1)
    assert by_size["175b"]["params"] > 1.7e11
    assert "175b" in inside("show", "--sizes")


def test_help_fits_80_columns(inside, monkeypatch):
    """A long word in a narrow column is cut off with an ellipsis."""
    monkeypatch.setenv("COLUMNS", "80")
    found = re.findall(r"^│ ([a-z-]+) ", inside("--help"), re.MULTILINE)
    groups = ("data", "bench", "sweep")
    inner = {g: re.findall(r"^│ ([a-z-]+) ", inside(g, "--help"), re.MULTILINE) for g in groups}
    commands = [(name,) for name in found] + [(g, name) for g in groups for name in inner[g]]
    assert len(commands) > 30
    for words in commands:
        assert not re.search(r"… *│", inside(*words, "--help")), words


@pytest.mark.slow
def test_doctor_names_a_broken_package_and_its_remedy(tmp_path):
    """The first sentencepiece on the path does not import; everything else works here."""
    (tmp_path / "sentencepiece").mkdir()
    (tmp_path / "sentencepiece" / "__init__.py").write_text("raise ImportError('no such luck')")
    done = launch("doctor", "--json", code=1, PYTHONPATH=str(tmp_path))
    assert "packages" in done.stderr  # imports take half a minute on a cold disk
    findings = {f["what"]: f for f in json.loads(done.stdout)}
    broken = findings["sentencepiece"]
    assert "no such luck" in json.dumps(broken) and "pip install" in broken["remedy"]
    for what in ("python", "torch", "deepspeed", "accelerate", "datasets", "ray", "mlflow"):
        assert findings[what]["state"] == "ok", findings[what]
    assert {"devices", "slurm", "disk", "memory", "tracking"} <= findings.keys()
    assert all(f["remedy"] for f in findings.values() if f["state"] != "ok")


def test_doctor_prints_what_it_has_found_before_it_looks_further():
    pipe = subprocess.PIPE
    env = environment()
    with subprocess.Popen(
        command("doctor"), stdout=pipe, text=True, env=env, start_new_session=True
    ) as looking:
        assert looking.stdout and looking.stdout.readline().startswith("✓ python")
        assert looking.poll() is None  # no package is imported yet
        os.killpg(looking.pid, signal.SIGKILL)  # also ends the processes that import packages


def test_shell_completion_is_there():
    # The command asks which shell started it. A single command would replace the shell.
    words = shlex.join(command("--show-completion"))
    shown = subprocess.check_output(["bash", "-c", f"{words}; exit $?"], text=True)
    assert "complete" in shown.lower()


def test_every_derived_setting_has_its_rule(inside):
    sets = ("--set", "optim.lr=0.01")
    shown = json.loads(inside("show", "--size", "tiny", "--recipe", "muon", "--json", *sets))
    rules = {row["key"]: row for row in shown["rules"]}
    assert rules["optim.lr"] == {"key": "optim.lr", "value": 0.01, "rule": "given"}
    # The decay follows from the rate that was given.
    steps = shown["recipe"]["steps"]
    assert rules["optim.optimizer.decay"]["value"] == pytest.approx(5 / (0.01 * steps), rel=5e-3)
    assert rules["train.batch_tokens"]["rule"] != "given"
