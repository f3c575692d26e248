"""A rank's training state as fragments of global tensors: the same form in every layout.

A fragment is a contiguous part of a flattened tensor. The fp32 masters, the optimizer's moments and
its step count determine a run; bf16 weights are cast from the masters. A global tensor is a
parameter, a buffer, or one expert of a stacked parameter, so no key depends on the rank's experts.
"""

import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.optim.muon import VARIANCE, Muon
from pipeline.parallel.world import World

WEIGHTS = "model"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Fragment:
    key: str  # model/NAME, exp_avg/NAME, exp_avg_sq/NAME, momentum_buffer/NAME, row_variance/NAME
    shape: tuple[int, ...]  # shape of the global tensor
    offset: int  # place of the first number in the flattened global tensor
    data: Tensor  # 1-D: a view of the state, so that writing to it loads the state

    @property
    def global_numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous part of one parameter, kept as a slice of an fp32 tensor of the optimizer."""

    name: str
    parameter: nn.Parameter
    master: Tensor
    start: int  # in the flattened master
    offset: int  # in the flattened parameter
    numel: int
    replica: tuple[int, int] = (0, 1)  # index and number of copies; each rank saves its share


def state(
    pieces: Iterable[Piece], optimizer: torch.optim.Optimizer, *, share: bool
) -> Iterator[Fragment]:
    """Yield the fragments of this rank; with `share`, only those that this rank saves."""
    for piece in pieces:
        low, high = _share(piece.numel, piece.replica) if share else (0, piece.numel)
        moments = {k: v for k, v in optimizer.state[piece.master].items() if k != "step"}
        tensors = {WEIGHTS: piece.master, **moments}
        # ZeRO-3 empties the parameter and keeps its shape in `ds_shape`.
        shape = tuple(getattr(piece.parameter, "ds_shape", piece.parameter.shape))
        expert = getattr(piece.parameter, "expert", None)
        for kind, tensor in tensors.items():
            part = tensor.detach().view(-1)[piece.start + low : piece.start + high]
            yield from split(f"{kind}/{piece.name}", shape, expert, piece.offset + low, part)
    for owned in optimizer.owned() if isinstance(optimizer, Muon) else ():
        if owned.variance is not None:
            variance = owned.variance
            yield Fragment(f"{VARIANCE}/{owned.key}", tuple(variance.shape), 0, variance)


def buffers(module: nn.Module, replica: tuple[int, int], *, share: bool) -> Iterator[Fragment]:
    """Yield the persistent buffers, which are the same on every rank."""
    # With duplicates: the state dict lists a tied head under both of its names.
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if name not in parameters:
            low, high = _share(tensor.numel(), replica) if share else (0, tensor.numel())
            part = tensor.detach().view(-1)[low:high]
            yield from split(f"{WEIGHTS}/{name}", tuple(tensor.shape), None, low, part)


def weights(model: nn.Module) -> Iterator[Fragment]:
    """Yield the weights and buffers of a whole model."""
    yield from buffers(model, (0, 1), share=True)
    for name, p in model.named_parameters():
        flat = p.detach().contiguous().view(-1)
        expert = getattr(p, "expert", None)
        yield from split(f"{WEIGHTS}/{name}", tuple(p.shape), expert, 0, flat)


def split(
    key: str, shape: tuple[int, ...], expert: tuple[int, int] | None, offset: int, part: Tensor
) -> Iterator[Fragment]:
    """Turn a contiguous part of a parameter into fragments, cut where one expert ends. If the first
    dimension counts local experts, `expert` has the first one's index and the number of all."""
    if expert is None:
        if len(part):
            yield Fragment(key, shape, offset, part)
        return
    unit = math.prod(shape[1:])  # numbers of one expert
    end = offset + len(part)
    for local in range(offset // unit, -(-end // unit)):
        low = max(offset, local * unit)
        high = min(end, (local + 1) * unit)
        data = part[low - offset : high - offset]
        yield Fragment(f"{key}.{expert[0] + local}", shape[1:], low - local * unit, data)


def _share(numel: int, replica: tuple[int, int]) -> tuple[int, int]:
    """Return the part of a tensor that one of the ranks with a copy saves."""
    index, count = replica
    return numel * index // count, numel * (index + 1) // count


def create_moments(
    pieces: Iterable[Piece],
    optimizer: torch.optim.Optimizer,
    zeros_like: Callable[[Tensor], Tensor] = torch.zeros_like,
) -> None:
    """Create the moments before torch does at its first step, because loading needs them."""
    for piece in pieces:
        if isinstance(optimizer, Muon) and piece.name in optimizer.matrices:
            optimizer.create_state(piece.master)
        elif not optimizer.state[piece.master]:
            step = torch.zeros((), dtype=torch.float32, device=piece.master.device)
            moments = {moment: zeros_like(piece.master.detach()) for moment in MOMENTS}
            optimizer.state[piece.master] = {"step": step, **moments}


def steps(optimizer: torch.optim.Optimizer) -> int:
    """Return Adam's step count, which its bias correction depends on."""
    counts = {int(moments["step"]) for moments in optimizer.state.values()}
    assert len(counts) == 1, f"parameters of one model have different step counts: {sorted(counts)}"
    return counts.pop()


def set_steps(optimizer: torch.optim.Optimizer, count: int) -> None:
    for moments in optimizer.state.values():
        moments["step"].fill_(count)


def random_state(world: World) -> list[Fragment]:
    """Return this rank's random state, for random draws other than batches and initial weights. It
    is meaningful only in a world of the same size."""
    states = {f"rng/cpu/{world.rank}": torch.get_rng_state()}
    if world.device.type == "cuda":
        states[f"rng/cuda/{world.rank}"] = torch.cuda.get_rng_state()
    return [Fragment(key, tuple(state.shape), 0, state) for key, state in states.items()]


def set_random_state(fragments: Iterable[Fragment]) -> None:
    for fragment in fragments:
        if fragment.key.startswith("rng/cpu/"):
            torch.set_rng_state(fragment.data)
        else:
            torch.cuda.set_rng_state(fragment.data)


def on_disk(like: Tensor, folder: str) -> Tensor:
    """Return zeros of a host tensor's shape and type in a mapped file, for offloading to NVMe.

    The file is already deleted, so its disk space is freed however the process ends. All of the
    space is allocated now, so that a full disk is an error here and not a SIGBUS later."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, max(1, like.nbytes))
            flat = torch.from_file(file.name, shared=True, size=like.numel(), dtype=like.dtype)
            return flat.view(like.shape)
    except OSError as error:
        raise ConfigError(
            f"parallel.offload.path={folder}: {error.strerror} ({like.nbytes:,} bytes needed); "
            "give a directory with free space on a disk of each node"
        ) from None
