"""A Hugging Face directory as the start of continued pretraining: a checkpoint at step 0, weights alone."""

import re
import shutil
from pathlib import Path
from typing import NamedTuple

from pipeline.checkpoint.weights import save_weights
from pipeline.config.load import CONFIGS, merge, read_toml, validate
from pipeline.config.schema import RunConfig
from pipeline.errors import RunError
from pipeline.interop.load import load
from pipeline.interop.parity import difference
from pipeline.recipe import resolve

_TOLERANCE = 1e-4


class Started(NamedTuple):
    family: str
    parameters: int
    difference: float


def start(source: Path, out: Path) -> Started:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"--out {out} is not empty; give another directory")
    model = load(source)
    apart = difference(model, source)
    if not apart <= _TOLERANCE:
        raise RunError(f"--from {source}: our logits differ from transformers' by {apart:.2g} of the largest, more "
                       f"than {_TOLERANCE:g}; nothing was imported")  # fmt: skip
    name = re.sub(r"[^\w.-]", "-", out.resolve().name)[:64]
    layer = {"name": name, "model": model.cfg.model_dump(exclude_none=True)}
    config = validate(RunConfig, merge(read_toml(CONFIGS / "base.toml"), layer))
    try:
        out.mkdir(parents=True, exist_ok=True)
        if (source / "tokenizer.model").is_file():
            shutil.copyfile(source / "tokenizer.model", out / "tokenizer.model")
        save_weights(model, resolve(config, ranks=1, gpu=False), out / "checkpoints")
    except OSError as error:
        raise RunError(f"--out {out} cannot be written: {error.strerror or error}; choose another place") from None
    return Started(model.cfg.arch, sum(p.numel() for p in model.parameters()), apart)
