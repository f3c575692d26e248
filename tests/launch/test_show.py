"""Commands that only look: they answer at once, in words and in JSON, without torch."""

import json
import subprocess

import pytest

from pipeline.config.layers import names
from tests.conftest import command, environment, launch


def test_show_counts_the_1b_shape():
    figures = json.loads(launch("show", "--size", "1b", "--gpus", 8, "--json").stdout)
    assert figures["params"]["total"] == 1_107_367_936
    assert figures["flops_per_token"]["model"] == 6_643_777_536
    assert "causal" in figures["convention"]
    totals = [figures["memory_bytes"][f"zero{stage}"]["total"] for stage in range(4)]
    assert totals == sorted(totals, reverse=True)
    text = launch("show", "--size", "1b", "--cluster", "h100").stdout
    assert "1.11B total" in text and "ZeRO" in text and "✓" in text and "--zero 1" in text


def test_show_lays_out_a_routed_model_over_nodes():
    of = (
        "show",
        "--size",
        "16b",
        "--arch",
        "deepseek-v2-lite",
        "--gpus",
        16,
        "--cluster",
        "h100",
        "--json",
    )
    figures = json.loads(launch(*of).stdout)
    take, rows = figures["recommended"], figures["layouts"]
    assert (
        take in rows and take["fits"] and {row["layout"]["ep"] for row in rows} == {1, 2, 4, 8, 16}
    )
    assert take["step_s"] <= 1.01 * min(row["step_s"] for row in rows if row["fits"])
    assert take["tokens_s"] * take["step_s"] == pytest.approx(figures["recipe"]["batch_tokens"])
    assert any(not row["fits"] for row in rows)
    assert (
        "--gpus 32" in launch("show", "--size", "70b", "--gpus", 8, "--cluster", "h100").stdout
    )  # none fits 8


def test_show_never_imports_torch():
    code = "import sys; sys.argv = ['launch', 'show', '--size', '175b', '--cluster', 'h100']\n"
    code += "from launch.__main__ import main\ntry: main()\nexcept SystemExit: pass\n"
    code += "assert not {'torch', 'numpy', 'scipy'} & set(sys.modules)"
    done = subprocess.run(
        [command()[0], "-c", code], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr


def test_the_whole_ladder():
    rows = json.loads(launch("show", "--sizes", "--json").stdout)
    assert sorted(row["size"] for row in rows) == sorted(names("size"))
    assert [row["params"] for row in rows] == sorted(row["params"] for row in rows)
    by_size = {row["size"]: row for row in rows}
    assert (
        by_size["tiny"]["non_embedding"] == pytest.approx(0.2e6, rel=0.1)
        and by_size["175b"]["params"] > 1.7e11
    )
    assert "175b" in launch("show", "--sizes").stdout


def test_doctor_finds_this_machine_fit():
    findings = {f["what"]: f for f in json.loads(launch("doctor", "--json").stdout)}
    for what in (
        "python",
        "torch",
        "deepspeed",
        "accelerate",
        "datasets",
        "sentencepiece",
        "ray",
        "mlflow",
    ):
        assert findings[what]["state"] == "ok", findings[what]
    assert {"devices", "slurm", "disk", "memory", "tracking"} <= findings.keys()
    assert all(f["remedy"] for f in findings.values() if f["state"] != "ok")


def test_doctor_prints_what_it_has_found_before_it_looks_further():
    with subprocess.Popen(
        command("doctor"), stdout=subprocess.PIPE, text=True, env=environment()
    ) as looking:
        assert looking.stdout and looking.stdout.readline().startswith("✓ python")
        assert looking.poll() is None  # every package is still to be imported
        looking.kill()


def test_doctor_names_a_broken_package_and_its_remedy(tmp_path):
    """A deepspeed that does not import, found first on the path."""
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("raise ImportError('no such luck')")
    done = launch("doctor", code=1, PYTHONPATH=str(tmp_path))
    line = next(line for line in done.stdout.splitlines() if "deepspeed" in line)
    assert "no such luck" in line and "pip install" in line


def test_shell_completion_is_there():
    assert "complete" in launch("--show-completion", "bash").stdout.lower()
