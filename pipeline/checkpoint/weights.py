"""Weights out of a checkpoint and into one, on any machine: torch and Accelerate, no DeepSpeed, a tensor at a time."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from accelerate.utils import set_module_tensor_to_device
from torch import Tensor, nn

from pipeline.atomic import digest
from pipeline.checkpoint import manifest, store
from pipeline.checkpoint.manifest import CONFIG, Checkpoint, Manifest
from pipeline.config.layers import reload
from pipeline.config.schema import RunConfig
from pipeline.model.build import build_model
from pipeline.model.stack import Decoder
from pipeline.parallel.fragments import WEIGHTS, Fragment, buffers, split


class Weights(Mapping[str, Tensor]):
    """Global tensors by name (one per expert), read when asked for; fp32 masters, or their cast."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> None:
        self._path, self._about, self._dtype = checkpoint.path, checkpoint.manifest, dtype
        self._names = [
            key.removeprefix(f"{WEIGHTS}/")
            for key in self._about.tensors
            if key.startswith(f"{WEIGHTS}/")
        ]

    def __getitem__(self, name: str) -> Tensor:
        key = f"{WEIGHTS}/{name}"
        shape = tuple(self._about.shapes[key])
        stored: torch.dtype = getattr(torch, self._about.tensors[key]["dtype"])
        flat = torch.empty(self._about.tensors[key]["numel"], dtype=stored)
        store.read(self._path, self._about.tensors, [Fragment(key, shape, 0, flat)])
        return flat.to(self._dtype if self._dtype and stored.is_floating_point else stored).view(
            shape
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def fill(self, key: str, parameter: nn.Parameter | Tensor) -> Tensor:
        """A module's tensor whole: its experts, if it stacks them, one below the other."""
        dtype = self._dtype if self._dtype and parameter.is_floating_point() else parameter.dtype
        whole = torch.empty(parameter.shape, dtype=dtype)
        run = whole.view(-1)
        parts = split(
            f"{WEIGHTS}/{key}", tuple(parameter.shape), getattr(parameter, "expert", None), 0, run
        )
        store.read(self._path, self._about.tensors, list(parts))
        return whole


def load_weights(directory: Path, *, dtype: torch.dtype | None = None) -> Weights:
    """The newest checkpoint of a run directory, or a given one, after its checksums were held."""
    return Weights(manifest.newest(directory), dtype)


def save_weights(model: Decoder, config: RunConfig, root: Path) -> None:
    """A checkpoint at step 0 with no optimizer: what a new run can begin with."""
    aside = root / ".step-00000000.tmp"
    aside.mkdir(parents=True)
    held = list(buffers(model, (0, 1), share=True))
    for name, p in model.named_parameters():
        flat = p.detach().contiguous().view(-1)
        held += split(f"{WEIGHTS}/{name}", tuple(p.shape), getattr(p, "expert", None), 0, flat)
    index = store.write(aside, held, None)
    files = {p.name: digest(p) for p in aside.iterdir()}
    shapes = {f.key: list(f.shape) for f in held}
    manifest.commit(aside, config, Manifest(manifest.VERSION, 0, 0, 1, shapes, index, files))


def load_model(
    directory: Path, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[Decoder, RunConfig]:
    """The trained model, in evaluation mode, and its run's config. Built without memory and filled tensor by tensor, so
    that it costs its own size once, in the given dtype."""
    checkpoint = manifest.newest(directory)
    config = reload(checkpoint.path / CONFIG)
    weights = Weights(checkpoint, dtype)
    with torch.device("meta"):
        model = build_model(config.model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in model.state_dict():
            set_module_tensor_to_device(model, name, device, weights.fill(name, tensor))
    model.tie()
    return model.eval(), config
