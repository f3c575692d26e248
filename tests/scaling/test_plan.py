import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pipeline.errors import ConfigError, RunError
from pipeline.sweep.execute import claimed
from pipeline.sweep.grid import plan, read, within

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "scaling"


def test_an_isoflop_grid_surrounds_its_guess() -> None:
    sweep = read(CONFIGS / "isoflop.toml")
    runs = plan(sweep)
    for budget in sweep.budgets:
        group = [run for run in runs if abs(run.C / budget - 1) < 0.02]
        ratios = [run.D / run.N for run in group]
        assert sum(ratio > 20 for ratio in ratios) >= 2
        assert sum(ratio < 20 for ratio in ratios) >= 2
    assert len({run.name for run in runs}) == len(runs)


def test_an_earlier_fit_moves_the_center() -> None:
    sweep = read(CONFIGS / "isoflop.toml")
    guessed = plan(sweep)
    moved = plan(
        sweep.model_copy(update={"budgets": (1e17, 3e17, 9e17)}), best=lambda C: 0.02 * C**0.5
    )
    assert {run.size for run in moved} != {run.size for run in guessed}
    assert all(0.02 * run.C**0.5 / 8.5 < run.N < 0.02 * run.C**0.5 * 8.5 for run in moved)


def test_a_run_of_a_budget_is_not_shorter_than_a_step() -> None:
    """Such a run would cost more than the budget, here a thousand times as much."""
    sweep = read(CONFIGS / "isoflop.toml").model_copy(update={"nproc": 1_000_000})
    with pytest.raises(ConfigError, match="and one step of"):
        plan(sweep)


def test_an_optimum_bound_to_an_edge_is_refused() -> None:
    sweep = read(CONFIGS / "isoflop.toml").model_copy(
        update={"sizes": ("tiny", "500k", "1m", "3m")}
    )
    with pytest.raises(ConfigError, match="lie above N"):
        plan(sweep)
    with pytest.raises(ConfigError, match="three budgets"):
        plan(sweep.model_copy(update={"budgets": (1e16,)}))
    for lengths in ((), (5.0, 20.0)):
        with pytest.raises(ConfigError, match=r"tokens_per_param=\[.*has one"):
            plan(sweep.model_copy(update={"tokens_per_param": lengths}))


def test_a_total_is_kept() -> None:
    # With Muon, batches are smaller, and larger models would have a low MFU, too.
    sweep = read(CONFIGS / "isoflop.toml").model_copy(update={"set": ("recipe=adamw",)})
    runs = plan(within(sweep, 1e19))
    assert 0.5e19 < sum(run.cost for run in runs) <= 1e19
    short = plan(within(sweep, 1e19, hours=4.0))
    assert 2 < sum(run.hours or 0 for run in short) <= 4
    assert short[0].mfu is not None and short[0].mfu < 0.05 < 0.3 < (
        runs[-1].mfu or 0
    )  # small models do not keep a GPU busy
    with pytest.raises(ConfigError, match=r"budget=1e\+09 .* lie below .*; raise the budget"):
        within(sweep, 1e9)
    with pytest.raises(ConfigError, match=r"hours=1e\+09 .* lie above .*; lower the budget"):
        within(sweep, None, hours=1e9)
    few = sweep.model_copy(update={"sizes": ("tiny", "500k", "1m", "3m", "6m")})
    with pytest.raises(ConfigError, match=r"budget=1e\+19 .*; add sizes or raise wide$"):
        within(few, 1e19)
    for limits in ((float("nan"), None), (0.0, None), (None, -1.0)):
        with pytest.raises(ConfigError, match="must be a number above zero"):
            within(sweep, *limits)
    with pytest.raises(ConfigError, match="the least takes"):
        within(sweep, None, hours=0.1)


def test_the_ladder_is_printed_with_its_cost(launch) -> None:
    data = json.loads(launch("sweep", "plan", CONFIGS / "ladder.toml", "--json"))
    assert data["total"]["runs"] == 18
    assert data["total"]["flops"] == pytest.approx(sum(run["cost"] for run in data["runs"]))
    assert {round(run["D"] / run["N"]) for run in data["runs"]} == {5, 20, 80}
    printed = launch("sweep", "plan", CONFIGS / "ladder.toml")
    assert "18 runs" in printed and "Vocabulary: 32,768; --data" in printed


def test_runs_share_a_trunk_only_if_they_are_equal_before_the_decay() -> None:
    ladder = {"sizes": ("27k",), "tokens": (1_000_000, 4_000_000)}
    always = ("model.seq=128", "train.batch_tokens=1024", "optim.lr=0.03")
    shares = {"recipe=adamw": True, "recipe=muon": False, "optim.optimizer.decay=0.2": True}
    for setting, shared in shares.items():
        update = {**ladder, "set": (*always, setting)}
        short, _ = plan(read(CONFIGS / "cpu.toml").model_copy(update=update))
        assert (short.trunk is not None) == shared, setting  # Muon's decay follows from the length


def test_a_ladder_has_no_budget(launch) -> None:
    with pytest.raises(ConfigError, match="kind is 'ladder'"):
        launch("sweep", "plan", CONFIGS / "ladder.toml", "--budget", "1e19")


def test_a_wrong_key_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text('kind = "isoflop"\nexperiment = "x"\nbugdets = [1e18]\n')
    with pytest.raises(ConfigError, match="bugdets"):
        read(file)


def test_two_keys_for_the_lengths_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    text = 'kind = "ladder"\nexperiment = "x"\nsizes = ["tiny"]\ntokens_per_param = [5, 20]\n'
    file.write_text(f"{text}tokens = []\n")  # `--save` writes an empty list
    assert read(file).tokens_per_param == (5, 20)
    file.write_text(f"{text}tokens = [1e6]\n")
    words = r"tokens=\[1000000\.0\] in .*tokens_per_param=\[5\.0, 20\.0\].*; remove one"
    with pytest.raises(ConfigError, match=words):
        read(file)
    file.write_text(text.replace('"tiny"', '"tiny", "7k", "tiny"'))
    with pytest.raises(ConfigError, match="a size occurs twice"):
        read(file)
    file.write_text(text.replace("ladder", "isoflop").replace("tokens_per_param", "tokens"))
    with pytest.raises(ConfigError, match=r"tokens=.*the budgets of an isoFLOP grid"):
        read(file)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("tokens = [inf]", "tokens=inf"),
        ("tokens = [2e7, 2.001e7]", "2 runs would be named tiny-20M"),
        ("tokens = [20]", "tiny-20 has 20 tokens, and one step"),
        ("tokens_per_param = []", r"tokens_per_param=\[\]"),
        ("tokens_per_param = [1e308]", r"tokens_per_param=1e\+308"),
        ("wide = inf", "wide=inf"),
        ('cluster = ""', "cluster=''"),
        ('set = ["train={steps=9}"]', "sets train.steps .* use tokens"),
        ('set = ["optim.lr=1e-3", "optim.lr=2e-3"]', "set=optim.lr=2e-3 .* is set twice"),
        ("budgets = [1e16]", "a ladder has sizes and lengths"),
        ('set = ["train.steps=9"]', r"set=train\.steps=9 .* use tokens"),
        ('set = ["name=y"]', "sets name .* use experiment"),
        ('set = ["model.arch = moe"]', "sets model.arch .* use arch"),
        ('experiment = ".."', r"experiment='\.\.'"),
    ],
)
def test_a_sweep_that_means_something_else_is_refused(
    more: str, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "s.toml"
    name = "" if "experiment" in more else 'experiment = "x"\n'
    file.write_text(f'kind = "ladder"\nsizes = ["tiny"]\n{name}{more}\n')
    with pytest.raises(ConfigError, match=words):
        plan(read(file))


def test_options_that_would_be_ignored_are_refused(launch) -> None:
    for words, key in {
        "ladder --points nowhere.csv": "points=nowhere.csv centers an isoFLOP grid",
        "gpu --target-size=": "size=''",
        "--target-size 1b --width=": "width=",
    }.items():
        with pytest.raises(ConfigError, match=key):
            launch("sweep", "plan", *words.split())


def test_a_shipped_sweep_has_a_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory has no configs/, as for an installed wheel."""
    monkeypatch.chdir(tmp_path)
    assert read("ladder") == read(CONFIGS / "ladder.toml")
    with pytest.raises(ConfigError, match=r"sweep='lader'.*ladder"):
        read("lader")
    with pytest.raises(ConfigError, match=r"ladder\.toml"):
        read("configs/scaling/ladder.toml")


def test_an_installed_wheel_has_the_shipped_sweeps(tmp_path: Path) -> None:
    """The folders are copied as pyproject.toml configures the build."""
    root = CONFIGS.parents[1]
    build = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    wheel = build["targets"]["wheel"]
    packages = {name: name for name in wheel["packages"]}
    for source, to in {**packages, **wheel["force-include"]}.items():
        shutil.copytree(root / source, tmp_path / to, dirs_exist_ok=True)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-P", "-m", "launch", "sweep", "plan", "ladder", "--json"]
    done = subprocess.run(command, cwd=tmp_path.parent, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_two_sweeps_do_not_share_a_directory(tmp_path: Path) -> None:
    sweep = read("ladder")
    with claimed(tmp_path / "runs", sweep):
        with pytest.raises(RunError, match="--out"), claimed(tmp_path / "runs", sweep):
            pass
        assert (tmp_path / "runs" / "sweep.json").exists()
    with claimed(tmp_path / "runs", sweep):
        pass
