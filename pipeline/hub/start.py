"""A Hugging Face directory as the start of continued pretraining: a checkpoint at step 0, weights alone."""

import re
import shutil
from pathlib import Path
from typing import NamedTuple

from pipeline.checkpoint.weights import save_weights
from pipeline.config.load import CONFIGS, merge, read_toml, validate
from pipeline.config.schema import RunConfig
from pipeline.hub.aside import appearing
from pipeline.hub.import_model import load
from pipeline.hub.parity import held
from pipeline.planner.recipe import resolve


class Started(NamedTuple):
    family: str
    parameters: int
    difference: float


def start(source: Path, out: Path) -> Started:
    with appearing(out, "--out") as aside:
        model = load(source)
        apart = held(model, source, f"--from {source}")
        name = re.sub(r"[^\w.-]", "-", out.resolve().name)[:64]
        layer = {"name": name, "model": model.cfg.model_dump(exclude_none=True)}
        config = validate(RunConfig, merge(read_toml(CONFIGS / "base.toml"), layer))
        if (source / "tokenizer.model").is_file():
            shutil.copyfile(source / "tokenizer.model", aside / "tokenizer.model")
        save_weights(model, resolve(config, ranks=1, gpu=False), aside / "checkpoints")
    return Started(model.cfg.arch, sum(p.numel() for p in model.parameters()), apart)
