"""The recipe that fitted runs share, and the recipe of a larger run trained like them."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pipeline.config.dump import differences, idle
from pipeline.config.layers import RECIPE, as_sets, load, names, parse_set, refuse_idle, reload
from pipeline.config.schema import RunConfig
from pipeline.data.shards import Manifest
from pipeline.errors import ConfigError, DataError
from pipeline.planner.check import resolve
from pipeline.planner.count import params
from pipeline.planner.work import training_flops
from pipeline.runs.directory import FREE
from pipeline.runs.history import Run
from pipeline.scaling.points import Points
from pipeline.units import count

# Settings of a run that are not part of its ladder's recipe: its identity, length and machine.
OWN_SETTINGS = (
    *FREE,
    *("version", "seed", "init", "data.hash", "model.size", "model.arch", "model.vocab"),
    *("train.steps", "train.tokens", "train.flops", "train.dtype", "train.loss_chunk"),
)


@dataclass(frozen=True)
class Ladder:
    """The recipe that the fitted runs have in common, to which the law applies."""

    settings: dict[str, Any] = field(default_factory=dict)  # by dotted key, if not the default
    vocab: int | None = None
    data: str | None = None
    tokens: int | None = None  # of `data`, if the runs were trained on it as it is now
    recipe: str = field(default_factory=lambda: load(size="tiny").recipe)  # a CSV names none
    arch: str | None = None
    problem: str | None = None  # warning, if the settings could not be read
    out: str | None = None  # how the --out of a further run begins, so that `launch score` finds it
    experiment: str | None = None  # the name given with --experiment

    @property
    def named_arch(self) -> str | None:
        """The architecture, if it is one of ours; a CSV file may name any."""
        return self.arch if self.arch in names("arch") else None


@dataclass(frozen=True)
class Recipe:
    """A run as `launch pretrain` would train it."""

    name: str  # of the recipe, in configs/recipe
    N: float
    D: float
    C: float
    lr: float
    batch_tokens: int
    steps: int
    command: str | None = None


def ladder_of_table(points: Points) -> Ladder:
    """Return what the columns of a CSV file say about the recipe of its runs."""
    unknown = Ladder(vocab=points.vocab, arch=points.arch)
    recipe = points.kinds.get("recipe")
    if recipe in names("recipe"):
        return replace(unknown, recipe=recipe, settings={"recipe": recipe})
    return replace(unknown, recipe=load(size="tiny", arch=unknown.named_arch).recipe)


def ladder_of(runs: Sequence[Run]) -> Ladder:
    """Return the settings that all these runs share and that differ from the default recipe."""
    record = runs[0].record
    vocab = int(record["vocab"]) if record.get("vocab") else None
    try:
        configs = [reload(run.path / "config.toml") for run in runs]
    except ConfigError as error:  # runs from MLflow have no config.toml here
        here = any((run.path / "config.toml").exists() for run in runs)
        problem = f"{error}: the recipe of a forecast lacks the runs' settings." if here else None
        recipe = str(record.get("recipe", RECIPE))
        lengths = [key for key in ("seq", "source_seq") if record.get(key)]
        settings = {"recipe": recipe} | {f"model.{key}": int(record[key]) for key in lengths}
        arch = record.get("arch")
        return Ladder(settings, vocab, recipe=recipe, arch=arch, problem=problem)
    first, *others = [_own_recipe(config) for config in configs]
    # Settings that vary between the runs, such as a rate by size, are left to the rules.
    shared = {
        key: value
        for key, value in first.items()
        if all(other.get(key) == value for other in others)
    }
    if "eval.tasks" not in shared:  # tasks of other runs may be in other directories
        shared.pop("eval.questions", None)
    # One batch for several sizes belongs to the ladder, even if the rule gives it to each of them:
    # the rule gives many small sizes its smallest batch, but not a larger size.
    batches = {config.train.batch_tokens for config in configs}
    if len(batches) == 1 and len({config.model.size for config in configs}) > 1:
        shared["train.batch_tokens"] = batches.pop()
    # Without a common directory, the command gets the placeholder DATA.
    places = {config.data.dir for config in configs}
    data = places.pop() if len(places) == 1 else None
    tokens = None if data is None else _training_tokens(Path(data), runs)
    return Ladder(shared, vocab, data, tokens, configs[0].recipe, configs[0].model.arch)


def _training_tokens(data: Path, runs: Sequence[Run]) -> int | None:
    try:
        manifest = Manifest.load(data)
    except DataError:  # the data is on another machine
        return None
    # It may have been prepared again since.
    same = all(run.record.get("data") == manifest.hash for run in runs)
    return manifest.splits["train"].tokens if same else None


def _own_recipe(config: RunConfig) -> dict[str, Any]:
    """Return the settings of a run that differ from the recipe for its size and length."""
    model = config.model
    over = {
        "recipe": config.recipe,
        "model": {"vocab": model.vocab, "seq": model.seq},
        "train": {"tokens": config.train.steps * config.train.batch_tokens},
    }
    try:
        usual = load(size=model.size, arch=model.arch)
        default = resolve(load(size=model.size, arch=model.arch, over=over), ranks=1, gpu=False)
    except ConfigError:  # an imported model has none of our sizes
        return {}
    changed = {key: new for key, (_, new) in differences(default, config).items()}
    if model.seq != usual.model.seq:
        # `default` was loaded with this length, so `differences` cannot contain it.
        changed["model.seq"] = model.seq
    if config.recipe != usual.recipe:
        changed["recipe"] = config.recipe
    return {
        key: value
        for key, value in changed.items()
        if value is not None and not any(fnmatch(key, pattern) for pattern in OWN_SETTINGS)
    }


def recipe_of(
    size: str, arch: str | None, tokens: float | None, ladder: Ladder, sets: Sequence[str]
) -> Recipe:
    """Return the recipe of a size trained like the ladder, with exact N and FLOPs and a command."""
    if arch is not None and ladder.arch not in (None, arch):
        raise ConfigError(
            f"arch={arch}: the law is one of {ladder.arch}, and describes one architecture; fit "
            f"runs of {arch}, or leave out --arch"
        )
    given = as_sets(ladder.settings)
    over = {} if tokens is None else {"train": {"tokens": int(tokens)}}
    layer = {"model": {"vocab": ladder.vocab}} if ladder.vocab else {}
    loaded = load(size=size, arch=arch or ladder.arch, data=layer, sets=[*given, *sets], over=over)
    refuse_idle(loaded, sets)
    # A ladder of an older release may have idle settings, which `launch pretrain` would refuse.
    given = [text for text in given if not idle(loaded, parse_set(text))]
    # For a GPU, even if the ladder ran on CPUs, because a forecast is for a larger run.
    config = resolve(loaded, ranks=1, gpu=True)
    train = config.train
    lr = config.optim.lr
    # Like a sweep's commands: the recipe must not depend on where the run is started.
    spelled = {
        "optim.lr": lr,
        "optim.schedule.warmup_steps": config.optim.schedule.warmup_steps,
        "train.batch_tokens": train.batch_tokens,
    }
    every = {text.partition("=")[0]: text for text in (*given, *sets, *as_sets(spelled))}
    for length in ("tokens_per_param", "tokens", "flops", "steps"):
        every.pop(f"train.{length}", None)  # --steps replaces it
    words = ["launch", "pretrain", "--size", size, "--arch", config.model.arch]
    words += ["--data", ladder.data or "DATA"]
    words += ["--steps", str(train.steps)]
    words += [word for text in every.values() for word in ("--set", text)]
    D = float(train.steps * train.batch_tokens)
    if ladder.out is not None:  # named like the runs of a sweep
        words += ["--out", f"{ladder.out}{size}-{count(D)}"]
    words += ["--experiment", ladder.experiment] if ladder.experiment else []
    C = D * training_flops(config).model
    N = params(config.model).scaling
    batch_tokens = train.batch_tokens
    return Recipe(config.recipe, N, D, C, lr, batch_tokens, train.steps, shlex.join(words))
