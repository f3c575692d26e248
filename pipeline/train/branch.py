"""A run that begins in another's plateau: WSD gives several lengths from one trunk, for the price of their decays.

The loader is a pure function of the step, so a branch sees the tokens that a run of its own would have seen.
"""

import os
import shutil
from fnmatch import fnmatch

from pipeline.atomic import replace
from pipeline.config.dump import differences
from pipeline.config.layers import reload
from pipeline.config.schema import WSD, RunConfig
from pipeline.errors import ConfigError, RunError
from pipeline.optim.schedule import decay_start
from pipeline.runs.directory import FREE, RunDir, checkpoint_path
from pipeline.runs.log import encode, read


def meeting(config: RunConfig, trunk: RunDir) -> int:
    """The step up to which the two are one run; refused unless they are, and the trunk's checkpoint is there."""
    if not trunk.exists:
        raise RunError(
            f"--branch {trunk.path} is not a run directory; name one, such as runs/ladder/tiny-60x"
        )
    whole, schedule = reload(trunk.config), config.optim.schedule
    if not isinstance(schedule, WSD) or not isinstance(whole.optim.schedule, WSD):
        raise ConfigError(
            f"optim.schedule.kind={schedule.kind}: a branch leaves a plateau; set it to wsd in both runs"
        )
    free = (*FREE, "train.steps", "optim.schedule.decay_share", "optim.schedule.final_share")
    changed = {
        k: v
        for k, v in differences(whole, config).items()
        if not any(fnmatch(k, key) for key in free)
    }
    if changed:
        what = ", ".join(
            f"{key} is {a!r} there and {b!r} here" for key, (a, b) in list(changed.items())[:3]
        )
        raise RunError(
            f"--branch {trunk.path} is another run: {what}; make them alike, or train this one whole"
        )
    assert config.train.steps is not None and whole.train.steps is not None
    step = decay_start(schedule, config.train.steps)
    if step > (last := decay_start(whole.optim.schedule, whole.train.steps)):
        raise RunError(
            f"--branch {trunk.path} decays from step {last}, this run from {step}; branch from a longer one"
        )
    if not checkpoint_path(trunk.checkpoints, step).is_dir():
        raise RunError(
            f"--branch {trunk.path} has no checkpoint of step {step}, where this run's decay begins; train it with "
            f"--set train.keep_at=[{step}]"
        )
    return step


def begin(run: RunDir, trunk: RunDir, step: int) -> None:
    """Put the trunk's checkpoint and curve up to that step into a run that does not exist yet."""
    shutil.rmtree(run.checkpoints, ignore_errors=True)  # of an attempt that was killed here
    shutil.copytree(
        checkpoint_path(trunk.checkpoints, step),
        checkpoint_path(run.checkpoints, step),
        copy_function=_link,
    )
    replace(
        run.log, b"".join(encode(record) for record in read(trunk.log) if record["step"] <= step)
    )


def _link(source: str, target: str) -> None:
    """Checkpoints are never written to, so a second name for the same bytes will do."""
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
