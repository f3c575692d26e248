"""Branches: runs that start from the constant-rate phase of a longer run's WSD schedule.

Several lengths of training then cost one long run, the trunk, plus the decay of each shorter run.
The loader is a pure function of the step, so a branch sees the same tokens as a run from scratch.
"""

import os
import shutil
from fnmatch import fnmatch

from pipeline.atomic import replace
from pipeline.config.dump import differences
from pipeline.config.layers import reload
from pipeline.config.optimizer import WSD
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError, RunError
from pipeline.optim.schedule import decay_start
from pipeline.runs.directory import FREE, RunDir, checkpoint_path
from pipeline.runs.log import encode, read

# Settings that a branch may change, in addition to those that a resumed run may change.
_FREE = (
    *FREE,
    "train.steps",
    "optim.schedule.decay_share",
    "optim.schedule.decay_shape",
    "optim.schedule.final_share",
)


def branch_step(config: RunConfig, trunk: RunDir) -> int:
    """Return the step at which the branch starts; raise if the two runs differ before it, or if
    the trunk has no checkpoint of it."""
    flag = f"--branch {trunk.path}"
    if not trunk.exists:
        raise RunError(f"{flag} is not a run directory; name one, such as runs/ladder/tiny-60x")
    whole = reload(trunk.config)
    schedule = config.optim.schedule
    if not isinstance(schedule, WSD) or not isinstance(whole.optim.schedule, WSD):
        raise ConfigError(
            f"optim.schedule.kind={schedule.kind} has no plateau to branch from; use wsd in both"
        )
    changed = [
        f"{key} is {there!r} there and {here!r} in this run"
        for key, (there, here) in differences(whole, config).items()
        if not any(fnmatch(key, free) for free in _FREE)
    ]
    if changed:
        what = ", ".join(changed[:3])
        raise RunError(f"{flag} differs: {what}; make them equal, or train without --branch")
    step = decay_start(schedule, config.train.steps)
    last = decay_start(whole.optim.schedule, whole.train.steps)
    if step > last:
        raise RunError(f"{flag} decays from step {last}, this run from {step}; use a longer trunk")
    if not checkpoint_path(trunk.checkpoints, step).is_dir():
        text = f"{flag} has no checkpoint of step {step}, where this run's decay begins"
        raise RunError(f"{text}; train it with --set train.keep_at=[{step}]")
    return step


def copy_trunk(run: RunDir, trunk: RunDir, step: int) -> None:
    """Copy the trunk's checkpoint of a step, and its log up to it, into a new run."""
    shutil.rmtree(run.checkpoints, ignore_errors=True)  # left by an attempt that was killed here
    source = checkpoint_path(trunk.checkpoints, step)
    shutil.copytree(source, checkpoint_path(run.checkpoints, step), copy_function=_link)
    records = (record for record in read(trunk.log) if record["step"] <= step)
    replace(run.log, b"".join(map(encode, records)))


def _link(source: str, target: str) -> None:
    """Link instead of copying, because the files of a checkpoint never change."""
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
