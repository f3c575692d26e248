"""A Hugging Face directory as our model."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig

from pipeline.errors import DataError
from pipeline.hub.families import read
from pipeline.hub.tensors import gather
from pipeline.model.build import build
from pipeline.model.stack import Decoder

_TABLES = (
    "rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
)  # that older files keep beside the weights


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


def load(directory: Path) -> Decoder:
    """The model in fp32. Every tensor of the files is used, or it is an error."""
    if not (directory / "config.json").is_file():
        raise DataError(
            f"--from {directory} holds no config.json; give a directory that transformers wrote"
        )
    try:
        described = AutoConfig.from_pretrained(directory, local_files_only=True).to_dict()
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise DataError(f"{directory}/config.json: {str(error).splitlines()[0]}") from None
    cfg, family = read(described)
    files = Files(directory)
    if f"model.layers.{cfg.layers}.enorm.weight" not in files.names:
        cfg = cfg.model_copy(update={"mtp": 0})
    with torch.device("meta"):
        model = build(cfg)
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
