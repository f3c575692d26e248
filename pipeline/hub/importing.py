"""Import the model of a Hugging Face directory as a checkpoint that a run can start from.

The directory is not trusted. None of its code is run, and only regular files inside it are opened.
transformers itself sees a temporary directory with a cleaned config.json and links to the weights.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from pipeline import atomic
from pipeline.checkpoint.save import save_weights
from pipeline.config.layers import CONFIGS, merge, read_toml, recipe_layer, validate
from pipeline.config.objective import Labels
from pipeline.config.schema import RunSpec
from pipeline.config.spans import Denoise
from pipeline.errors import ConfigError, DataError, RunError, UserError, first_line
from pipeline.hub.configuration_isoflop import IsoflopConfig
from pipeline.hub.families import FAMILIES, Family, from_hub_config
from pipeline.hub.modeling_isoflop import IsoflopForCausalLM
from pipeline.hub.sequences import row_logits
from pipeline.hub.tensors import gather
from pipeline.model.build import build_model
from pipeline.model.stack import Decoder
from pipeline.planner.check import resolve

# `import` and the check of an export use this class, never its copy in a directory.
AutoConfig.register("isoflop", IsoflopConfig)
AutoModelForCausalLM.register(IsoflopConfig, IsoflopForCausalLM)

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.model"
SPIECE = "spiece.model"  # the same kind of file in a directory of T5 or ALBERT
_JSON_BYTES = 64 * 2**20  # far above the index of any published model
# Code, kernels and quantizers that config.json can make transformers load.
_LOADS_CODE = re.compile(r"auto_map|.*_implementation(_internal)?|quantization_config")
# Endings of constant tables that older files keep among the weights.
_TABLES = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
# Keys of config.json that count layers.
_LAYER_KEYS = {
    key
    for family in FAMILIES
    for key, ours in family.keys.items()
    if ours in ("layers", "encoder_layers", "mtp")
}
_TOLERANCE = 1e-4  # of fp32 logits, relative to the largest


class Imported(NamedTuple):
    family: str
    parameters: int
    difference: float


def import_model(source: Path, out: Path) -> Imported:
    """Write a checkpoint at step 0 with the weights of a Hugging Face directory."""
    with new_directory(out, "--out") as temporary, _checked_copy(source) as folder:
        model, family = _load(folder, source)
        difference = check_logits(model, family, folder, f"--from {source}")
        # --out may be any path, but the name of a run allows few characters.
        name = re.sub(r"[^\w.-]", "-", out.resolve().name)[:64]
        layer: dict[str, Any] = {"name": name, "model": model.cfg.model_dump(exclude_none=True)}
        if model.cfg.stack == "encoder":
            pairs = "next" if model.cfg.row_classes else "none"
            layer["objective"] = {"kind": "masked", "pairs": pairs}
            if model.cfg.head == "replaced":
                layer["objective"] = {"kind": "replaced"}
        elif model.cfg.stack == "encoder-decoder":
            # A run that starts from these weights may choose another objective and other lengths.
            objective = Denoise()
            seq, source_seq = objective.lengths(model.cfg.learned_positions, None)
            layer["objective"] = objective.model_dump()
            layer["model"] |= {"seq": seq, "source_seq": source_seq}
        base = read_toml(CONFIGS / "base.toml")
        config = validate(RunSpec, reduce(merge, [base, recipe_layer(), layer]))
        # Without a tokenizer, commands that need one ask for --tokenizer.
        for file in (SPIECE, TOKENIZER):
            if (source / file).exists() and (source / file).stat().st_size:
                shutil.copyfile(_regular_file(source, file), temporary / TOKENIZER)
        save_weights(model, resolve(config, ranks=1, gpu=False), temporary / "checkpoints")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Imported(model.cfg.arch, parameters, difference)


def load_hub_model(directory: Path) -> Decoder:
    """Load the model of a Hugging Face directory, in fp32."""
    with _checked_copy(directory) as folder:
        return _load(folder, directory)[0]


# ── Files ────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def new_directory(directory: Path, option: str) -> Iterator[Path]:
    """Yield a temporary directory, which is renamed to `directory` when the block succeeds."""
    try:
        with atomic.directory(directory) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:  # the latter also on a full disk
        reason = getattr(error, "strerror", None) or error
        raise RunError(f"{option} {directory} cannot be written: {reason}; give another") from None


@contextmanager
def _checked_copy(source: Path) -> Iterator[Path]:
    """Yield a temporary directory with links to the weights and a config.json without code."""
    if not (source / CONFIG).is_file():
        raise DataError(f"--from {source} has no {CONFIG}; give a directory by save_pretrained")
    described = _read_json(_regular_file(source, CONFIG))
    if described.get("quantization_config"):
        raise ConfigError(
            f"quantization_config in {source / CONFIG}: quantized weights have no counterpart "
            "here; dequantize the model first"
        )
    names = {WEIGHTS}
    if (source / INDEX).exists():
        weight_map = _read_json(_regular_file(source, INDEX)).get("weight_map")
        files = list(weight_map.values()) if isinstance(weight_map, dict) else []
        plain = {file for file in files if isinstance(file, str) and file == Path(file).name}
        names = {INDEX, *plain}
        if not files or any(file not in plain for file in map(str, files)):
            raise DataError(f"{source / INDEX}: weight_map does not map tensors to file names")
    with tempfile.TemporaryDirectory(prefix="isoflop-import-") as temporary:
        folder = Path(temporary)
        for name in sorted(names):
            (folder / name).symlink_to(_regular_file(source, name))
        clean = {key: value for key, value in described.items() if not _LOADS_CODE.fullmatch(key)}
        (folder / CONFIG).write_text(json.dumps(clean), encoding="utf-8")
        yield folder


def _regular_file(directory: Path, name: str) -> Path:
    """Return the real path of a file; refuse a link out of the directory, a FIFO or a device."""
    root = directory.resolve()
    roots = [root]
    if root.parent.name == "snapshots":  # the Hub's cache: snapshots/COMMIT/* link to blobs/*
        roots.append(root.parent.parent / "blobs")
    try:
        real = (directory / name).resolve()
        inside = any(real.is_relative_to(root) for root in roots) and real.is_file()
    except (OSError, RuntimeError, ValueError):  # a loop of links, a name with a null byte
        inside = False
    if not inside:
        text = f"{directory / name} is missing, or not a regular file of that directory"
        raise DataError(f"{text}; copy all files of the model into one directory")
    return real


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _JSON_BYTES:
            raise ValueError(f"larger than {_JSON_BYTES:,} bytes")
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {first_line(error)}") from None
    if not isinstance(table, dict):
        raise DataError(f"{path} does not hold a JSON object")
    return table


class _Weights:
    """Tensors by name. A call reads one tensor from its safetensors file."""

    def __init__(self, folder: Path) -> None:
        try:
            files: list[Any] = [
                safe_open(path, framework="pt") for path in sorted(folder.glob("*.safetensors"))
            ]
        except (OSError, SafetensorError) as error:
            raise DataError(f"the weights cannot be read: {first_line(error)}") from None
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        self.bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        self.names = set(self._files)
        self.used: set[str] = set()  # a tensor that stays unused is an error

    def __call__(self, name: str) -> Tensor:
        # A model saved without its head has names without the prefix.
        for prefix in ("transformer.", "model."):
            if name not in self.names and name.removeprefix(prefix) in self.names:
                name = name.removeprefix(prefix)
        if name not in self.names:
            raise DataError(f"{name} is missing from the weights; the directory is not complete")
        self.used.add(name)
        tensor: Tensor = self._files[name].get_tensor(name)
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise DataError(f"{name} has dtype {tensor.dtype}; dequantize the model first")
        return tensor.float()


# ── The model ────────────────────────────────────────────────────────────────────────────────────


def _load(folder: Path, source: Path) -> tuple[Decoder, Family]:
    """Load a checked directory into our model. A tensor that is not used is an error."""
    weights = _Weights(folder)
    model, family = _empty_model(folder, source, weights)
    cfg = model.cfg
    ours = model.state_dict()
    if cfg.tied:
        ours.pop("head.weight")
    state = dict(gather(cfg, family.kind, ours, weights))
    left = weights.names - weights.used - ({"lm_head.weight"} if cfg.tied else set())
    left -= set(family.ignored)
    # The unused tensors of the layers for multi-token prediction copy the embedding and the head.
    ahead = tuple(f"model.layers.{cfg.layers + depth}." for depth in range(cfg.mtp))
    left = {name for name in left if not name.endswith(_TABLES) and not name.startswith(ahead)}
    if left:
        raise DataError(
            f"{min(left)} and {len(left) - 1} more tensors have no place in a {family.kind} "
            f"model of this {CONFIG}"
        )
    if cfg.tied:
        state["head.weight"] = state["embedding.weight"]
    stacks = {name: p.expert for name, p in model.named_parameters() if hasattr(p, "expert")}
    # The model is on the meta device, so there is no memory to copy into.
    model.load_state_dict(state, assign=True)
    model.tie()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(True)
        if name in stacks:  # `assign` replaced the parameter and lost its mark
            parameter.expert = stacks[name]  # type: ignore[attr-defined]
    return model, family


def _empty_model(folder: Path, source: Path, weights: _Weights) -> tuple[Decoder, Family]:
    """Build the model that config.json describes, without memory for its weights."""
    where = source / CONFIG
    described = _read_json(folder / CONFIG)
    # Limit the number of layers before any loop over them: each layer has at least one tensor.
    for key in _LAYER_KEYS:
        count = described.get(key, 0)
        if isinstance(count, int | float) and count > len(weights.names):
            raise DataError(f"{key}={count} in {where}, but {len(weights.names)} tensors in all")
    try:
        hub = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        cfg, family = from_hub_config(hub.to_dict())
        # Refuse a hostile size before transformers allocates memory for the comparison.
        if cfg.vocab * cfg.width > weights.bytes:
            text = f"vocab_size × hidden_size = {cfg.vocab} × {cfg.width}"
            raise DataError(f"{text} exceeds the files; correct config.json")
        # Some files lack the layers for multi-token prediction that their config.json counts.
        if f"model.layers.{cfg.layers}.enorm.weight" not in weights.names:
            cfg = cfg.model_copy(update={"mtp": 0})
        with torch.device("meta"):
            return build_model(cfg), family
    except UserError as error:
        raise type(error)(f"{where}: {error}") from None
    except Exception as error:  # transformers and torch raise any class for a bad value
        raise DataError(f"{where} does not describe a model: {first_line(error)}") from None


# ── Parity ───────────────────────────────────────────────────────────────────────────────────────


def check_logits(
    model: Decoder, family: Family, directory: Path, what: str, labels: Labels | None = None
) -> float:
    """Return the difference between our logits and transformers'; raise if it is not rounding."""
    try:
        difference = logit_difference(model, family, directory, labels)
    except Exception as error:  # transformers raises any class for bad files
        reason = first_line(error)
        raise RunError(f"{what}: transformers cannot run the model: {reason}") from error
    if not difference <= _TOLERANCE:  # NaN fails the comparison
        raise RunError(
            f"{what}: our logits and those of transformers differ by {difference:.2g} of the "
            f"largest, more than {_TOLERANCE:g}; nothing was written"
        )
    return difference


@torch.no_grad()
def logit_difference(
    model: Decoder, family: Family, directory: Path, labels: Labels | None = None
) -> float:
    """Return the largest difference over the largest logit, on seeded random tokens, in fp32."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    loader = AutoModelForCausalLM
    if model.cfg.stack != "decoder" or labels is not None:
        loader = getattr(transformers, family.architecture)
    theirs = loader.from_pretrained(
        directory,
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    ).eval()
    # Short enough for a CPU, and long enough to show a wrong rotation, mask or route.
    shape = (2, min(64, model.cfg.seq))
    tokens = torch.randint(model.cfg.vocab, shape, generator=torch.Generator().manual_seed(0))
    padding = theirs.config.pad_token_id
    if padding is not None:  # RoBERTa has no position for it
        tokens[tokens == padding] = (padding + 1) % model.cfg.vocab
    if model.cfg.stack == "encoder-decoder":
        # Another source than the decoder's input, so that the two cannot be confused.
        source = tokens.flip(1)
        logits = theirs(input_ids=source, decoder_input_ids=tokens).logits
        ours = model.eval()(tokens, source_BE=source)
    elif labels is not None:
        ours, logits = row_logits(model, theirs, tokens, labels)
    else:
        out = theirs(tokens)
        logits = out.prediction_logits if hasattr(out, "prediction_logits") else out.logits
        ours = model.eval()(tokens)
    difference = (ours - logits).abs().max()
    # A head of zeros has logits of zero.
    return float(difference / logits.abs().max().clamp(min=1e-6))
