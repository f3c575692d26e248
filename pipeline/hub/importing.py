"""A Hugging Face directory as our model, and as the start of continued pretraining."""

import json
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from pipeline.atomic import TEMPORARY
from pipeline.checkpoint.save import save_weights
from pipeline.config.layers import CONFIGS, merge, read_toml, validate
from pipeline.config.schema import RunConfig
from pipeline.errors import DataError, RunError
from pipeline.hub.families import from_hub_config
from pipeline.hub.tensors import gather
from pipeline.model.build import build_model
from pipeline.model.stack import Decoder
from pipeline.planner.recipe import resolve

_ROWS, _LENGTH = 2, 64
_TOLERANCE = 1e-4  # of logits in fp32, relative to the largest


def held(model: Decoder, directory: Path, what: str) -> float:
    """Their difference, if it is one of rounding."""
    apart = difference(model, directory)
    if not apart <= _TOLERANCE:
        raise RunError(
            f"{what}: our logits and transformers' differ by {apart:.2g} of the largest, more than {_TOLERANCE:g}; "
            "nothing was written"
        )
    return apart


@torch.no_grad()
def difference(model: Decoder, directory: Path) -> float:
    """The largest difference of two logits over the largest logit, on seeded random tokens, both in fp32."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    theirs = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True
    ).eval()
    shape = (_ROWS, min(_LENGTH, model.cfg.seq))
    tokens = torch.randint(model.cfg.vocab, shape, generator=torch.Generator().manual_seed(0))
    a, b = model.eval()(tokens), theirs(tokens).logits
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-6))


_TABLES = (
    "rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
)  # that older files keep beside the weights


@contextmanager
def appearing(directory: Path, option: str) -> Iterator[Path]:
    """A folder to fill, which takes its name when the block ends well; whatever is there already is refused."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise RunError(f"{option} {directory} is not empty; give another directory")
    aside = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        aside.mkdir(parents=True)
        yield aside
        if directory.exists():
            directory.rmdir()
        aside.rename(directory)
    except OSError as error:
        what = error.strerror or error
        raise RunError(
            f"{option} {directory} cannot be written: {what}; choose another place"
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


class Files:
    """Tensors by name out of safetensors files, each read when asked for."""

    def __init__(self, directory: Path) -> None:
        index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
        try:
            if index.exists():
                names = sorted(
                    set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
                )
            elif single.exists():
                names = [single.name]
            else:
                raise DataError(
                    f"{directory} holds no model.safetensors; save it with transformers' save_pretrained"
                )
            self._files: list[Any] = [
                safe_open(directory / Path(name).name, framework="pt") for name in names
            ]
        except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
            raise DataError(f"{directory}: cannot read the weights: {error}") from None
        self._where = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118
        self.names, self.read = set(self._where), set[str]()

    def __call__(self, name: str) -> Tensor:
        for prefix in (
            "transformer.",
            "model.",
        ):  # a model without its head is saved without its prefix
            if name not in self._where and name.removeprefix(prefix) in self._where:
                name = name.removeprefix(prefix)
        if name not in self._where:
            raise DataError(f"{name} is missing from the weights; the directory is not whole")
        self.read.add(name)
        tensor: Tensor = self._where[name].get_tensor(name)
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise DataError(f"{name} has dtype {tensor.dtype}; dequantise the model first")
        return tensor.float()


def load_hub_model(directory: Path) -> Decoder:
    """The model in fp32. Every tensor of the files is used, or it is an error."""
    if not (directory / "config.json").is_file():
        raise DataError(
            f"--from {directory} holds no config.json; give a directory that transformers wrote"
        )
    try:
        described = AutoConfig.from_pretrained(directory, local_files_only=True).to_dict()
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise DataError(f"{directory}/config.json: {str(error).splitlines()[0]}") from None
    cfg, family = from_hub_config(described)
    files = Files(directory)
    if f"model.layers.{cfg.layers}.enorm.weight" not in files.names:
        cfg = cfg.model_copy(update={"mtp": 0})
    with torch.device("meta"):
        model = build_model(cfg)
    ours = model.state_dict()
    if cfg.tied:
        ours.pop("head.weight")
    filled = dict(gather(cfg, family.kind, ours, files))
    left = sorted(files.names - files.read - ({"lm_head.weight"} if cfg.tied else set()))
    ahead = tuple(f"model.layers.{cfg.layers + i}." for i in range(cfg.mtp))
    left = [
        name
        for name in left
        if not name.endswith(_TABLES) and not (ahead and name.startswith(ahead))
    ]
    if left:
        raise DataError(
            f"{left[0]} and {len(left) - 1} more have no counterpart in a {family.kind} of this config"
        )
    stacks = {name: p.expert for name, p in model.named_parameters() if hasattr(p, "expert")}
    model.load_state_dict(
        {**filled, **({"head.weight": filled["embedding.weight"]} if cfg.tied else {})}, assign=True
    )
    model.tie()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(True)
        if name in stacks:
            parameter.expert = stacks[name]  # type: ignore[attr-defined]  # assigning makes new parameters
    return model


class Imported(NamedTuple):
    family: str
    parameters: int
    difference: float


def import_model(source: Path, out: Path) -> Imported:
    with appearing(out, "--out") as aside:
        model = load_hub_model(source)
        apart = held(model, source, f"--from {source}")
        name = re.sub(r"[^\w.-]", "-", out.resolve().name)[:64]
        layer = {"name": name, "model": model.cfg.model_dump(exclude_none=True)}
        config = validate(RunConfig, merge(read_toml(CONFIGS / "base.toml"), layer))
        if (source / "tokenizer.model").is_file():
            shutil.copyfile(source / "tokenizer.model", aside / "tokenizer.model")
        save_weights(model, resolve(config, ranks=1, gpu=False), aside / "checkpoints")
    return Imported(model.cfg.arch, sum(p.numel() for p in model.parameters()), apart)
