"""Find the newest intact checkpoint, load it into an engine of any layout, or read its weights."""

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from pipeline.checkpoint.format import (
    CONFIG,
    Checkpoint,
    DamagedError,
    Reader,
    check_files,
    read_manifest,
)
from pipeline.config.dump import changed
from pipeline.config.layers import reload
from pipeline.config.schema import RunConfig
from pipeline.config.shape import Model
from pipeline.errors import RunError
from pipeline.model.adapter import is_adapter, merge_adapters
from pipeline.model.block import compile_blocks
from pipeline.model.build import build_model
from pipeline.model.stack import Decoder
from pipeline.model.teacher import Teacher
from pipeline.parallel import fragments
from pipeline.parallel.engine import Engine
from pipeline.parallel.fragments import WEIGHTS, Fragment, random_state, set_random_state, split
from pipeline.parallel.world import World
from pipeline.runs.directory import ROWS, list_checkpoints

# Keys of the tensors that have a row for each id.
_OF_VOCABULARY = re.compile(r"/(value_embeddings\.\d+|(.*\.)?(embedding|head))\.(weight|bias)")


def find(root: Path, world: World) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest intact checkpoint, and a line for each newer one that is damaged. The ranks
    share the check of the files. Every rank calls this while no save is in progress."""
    if world.first:
        for leftover in root.glob(".step-*"):  # of a process killed during a save or a removal
            shutil.rmtree(leftover, ignore_errors=True)
    # Only rank 0 lists them: a network file system may show another list to another node.
    paths = world.broadcast(list(list_checkpoints(root).values()) if world.first else [])
    damaged: list[str] = []
    for path in reversed(paths):
        checkpoint = None
        fault = ""
        try:
            checkpoint = read_manifest(path)
            files = sorted(checkpoint.manifest.files)
            check_files(checkpoint, files[world.rank :: world.size])
        except DamagedError as error:
            fault = str(error)
        faults = [each for each in world.gather(fault) if each]
        if not faults:
            return checkpoint, damaged
        damaged.append(f"checkpoint {path.name} is damaged ({faults[0]})")
    if damaged:
        raise RunError(
            f"{damaged[0]} and no older one in {root} is intact; restore it or use a new --out"
        )
    return None, []


def newest(path: Path, *, whole: bool = True) -> Checkpoint:
    """Open a checkpoint, or the newest of a run or its `checkpoints`. Check all of its files, or
    only its config if it need not be `whole`."""
    try:
        os.lstat(path)
    except OSError as error:
        problem = "does not exist" if isinstance(error, FileNotFoundError) else error.strerror
        remedy = "give a run directory or a checkpoint in it"
        raise RunError(f"{path}: {problem}; {remedy}") from None
    for root in (path / "checkpoints", path):
        found = list_checkpoints(root)
        if found:
            path = found[max(found)]
            break
    else:
        if (path / "run.json").exists():
            raise RunError(f"{path} has no checkpoint yet; wait for its first (train.save_every)")
        if (path / "config.json").is_file():
            remedy = f"first `launch import --from {path} --out RUN`"
            raise RunError(f"{path} is a Hugging Face directory; {remedy}")
    try:
        checkpoint = read_manifest(path)
        check_files(checkpoint, [n for n in checkpoint.manifest.files if whole or n == CONFIG])
    except DamagedError as error:
        raise RunError(
            f"no intact checkpoint at {path} ({error}); give a run directory or an older checkpoint"
        ) from None
    return checkpoint


def load(engine: Engine, checkpoint: Checkpoint, world: World) -> None:
    """Load a checkpoint into an engine, new or already trained; every rank calls this."""
    manifest = checkpoint.manifest
    reader = Reader(checkpoint)
    reader.fill(engine.state())  # views: this writes masters and moments in place
    fragments.set_steps(engine.optimizer, manifest.adam_steps)
    engine.sync_weights()
    # The random state of a rank means nothing in a world of another size.
    random = random_state(world)
    if manifest.world == world.size and all(f.key in manifest.tensors for f in random):
        reader.fill(random)
        set_random_state(random)


def starting_point(path: Path) -> Path:
    """Return the newest checkpoint of a run for another run to start from; refuse adapters."""
    checkpoint = newest(path)
    if any(is_adapter(key) for key in checkpoint.manifest.tensors):
        remedy = "merge it first with `launch export` and `launch import`"
        raise RunError(f"{path} was trained with LoRA; {remedy}")
    return checkpoint.path


def load_initial_weights(engine: Engine, path: Path) -> None:
    """Load the weights of another run, and not its optimizer state; every rank calls this."""
    _begin(engine.state(), cast(Decoder, engine.module).cfg, newest(path))
    engine.sync_weights()


def check_initial_weights(own: Model, path: Path) -> None:
    """Refuse a model that cannot start from a checkpoint. This reads no weights."""
    with torch.device("meta"):
        _begin(fragments.weights(build_model(own)), own, read_manifest(path))


def _begin(state: Iterable[Fragment], own: Model, checkpoint: Checkpoint) -> None:
    """Fill the weights of a model from a checkpoint, which may be of a different model."""
    known = checkpoint.manifest.tensors

    def is_new(fragment: Fragment) -> bool:
        # Adapters, and a row head for other labels, keep their initial values.
        head = fragment.key.startswith(f"{WEIGHTS}/row_head.")
        stored = known.get(fragment.key)
        other = stored is None or stored.numel != fragment.global_numel
        return is_adapter(fragment.key) or (head and other)

    stored = reload(checkpoint.path / CONFIG).model
    weights = []
    for fragment in state:
        kind, _, name = fragment.key.partition("/")
        if kind == WEIGHTS:
            source = replace(fragment, key=f"{WEIGHTS}/{_thinned(name, own, stored)}")
            weights += [] if is_new(source) else [source]
    # A larger vocabulary, such as one with a mask token, has more rows at the end.
    grown = [each.key for each in weights if _OF_VOCABULARY.search(each.key)]
    Reader(checkpoint).fill(weights, grown=grown if own.vocab > stored.vocab else ())


def _thinned(name: str, own: Model, stored: Model) -> str:
    """Return the name of the stored tensor that a tensor starts from. A model with fewer layers
    takes layers at equal distances, with the first and the last: 6 of 12 like DistilBERT."""
    sides = {
        "blocks.": (own.layers, stored.layers),
        "value_embeddings.": (own.layers, stored.layers),
        "encoder.blocks.": (own.source_layers, stored.source_layers),
    }
    for prefix, (layers, of) in sides.items():
        if name.startswith(prefix) and layers < of:
            number, _, rest = name.removeprefix(prefix).partition(".")
            return f"{prefix}{round(int(number) * (of - 1) / max(1, layers - 1))}.{rest}"
    return name


def load_teacher(config: RunConfig, device: torch.device) -> Teacher | None:
    """Load the teacher of a distilled run, in the dtype of the student's weights."""
    if config.distill is None:
        return None
    dtype = torch.bfloat16 if config.train.dtype == "bf16" else torch.float32
    path = Path(config.distill.teacher)
    model, found = load_model(path, dtype=dtype, device=device)
    if found.model != config.distill.model:
        text = f"distill.teacher={path} has another model than when this run was planned"
        raise RunError(f"{text}; restore that teacher, or start a new run")
    if config.train.compile:
        compile_blocks(model)
    return Teacher(model.requires_grad_(False).eval(), config.distill)


class Weights(Mapping[str, Tensor]):
    """Global tensors by name, one per expert, read on access; fp32 masters, or cast to `dtype`."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> None:
        self._tensors = checkpoint.manifest.tensors
        self._reader = Reader(checkpoint)
        self._dtype = dtype
        keys = (key.partition("/") for key in self._tensors)
        self._names = [name for kind, _, name in keys if kind == WEIGHTS]

    def __getitem__(self, name: str) -> Tensor:
        key = f"{WEIGHTS}/{name}"
        stored = self._tensors[key]
        dtype = self._cast(stored.torch_dtype)
        tensor = torch.empty(stored.shape, dtype=dtype)
        self._reader.fill([Fragment(key, tuple(stored.shape), 0, tensor.view(-1))])
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def like(self, name: str, parameter: Tensor) -> Tensor:
        """Return a module's tensor. If the module stacks experts, they are stacked here too."""
        shape = tuple(parameter.shape)
        tensor = torch.empty(shape, dtype=self._cast(parameter.dtype))
        expert = getattr(parameter, "expert", None)
        self._reader.fill(split(f"{WEIGHTS}/{name}", shape, expert, 0, tensor.view(-1)))
        return tensor

    def _cast(self, dtype: torch.dtype) -> torch.dtype:
        # Integer counters of the routers keep their type.
        return self._dtype if self._dtype and dtype.is_floating_point else dtype


def run_config(directory: Path) -> RunConfig:
    """Return the config of a run, or of the run that a checkpoint belongs to."""
    return _config_of(newest(directory, whole=False))


def _config_of(checkpoint: Checkpoint) -> RunConfig:
    config = reload(checkpoint.path / CONFIG)
    rows = checkpoint.path.absolute().parent.parent / ROWS
    # The run may have been moved, and another one may be at its old place.
    if config.objective.examples and rows.is_dir():
        config = changed(config, {"data.dir": str(rows)})
    return config


def load_model(
    directory: Path, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[Decoder, RunConfig]:
    """Return a trained model in evaluation mode, and the config of its run.

    The model is built without memory and filled tensor by tensor: weights exist only once."""
    checkpoint = newest(directory)
    config = _config_of(checkpoint)
    weights = Weights(checkpoint, dtype)
    with torch.device("meta"):
        model = build_model(
            config.model,
            token_weight=config.objective.token_weight,
            most_targets=config.objective.most_targets(config.model.seq),
        )
    saved = model.state_dict()
    tensors: dict[str, nn.Parameter | Tensor] = dict(model.named_parameters())
    tensors.update(model.named_buffers())
    filled = {
        name: weights.like(name, tensor).to(device)
        for name, tensor in tensors.items()
        if name in saved
    }
    if config.lora is not None:
        merge_adapters(filled, Weights(checkpoint), config.lora)
    # Not strict: of tied weights only one name is filled, and `tie` restores the other.
    model.load_state_dict(filled, strict=False, assign=True)
    model.tie()
    model.whole_prompts = config.objective.whole_prompts
    return model.eval(), config
