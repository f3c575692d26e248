"""What a rank holds of the training state, as runs of numbers inside global tensors: the same words for every layout.

fp32 masters, both moments of Adam and its step count determine a run; bf16 weights are the masters' cast. A global
tensor is a parameter, a buffer, or one expert of a stacked parameter, so that no key depends on how many experts a
rank holds.
"""

import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.parallel.world import World

WEIGHTS, MOMENTS = "model", ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Fragment:
    key: str  # model/NAME, exp_avg/NAME, exp_avg_sq/NAME
    shape: tuple[int, ...]  # of the global tensor
    offset: int  # of the first number, in the global tensor laid flat
    data: Tensor  # 1-D: a view of what is trained, so that writing to it loads

    @property
    def global_numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a rank keeps its run of one parameter's numbers: in which fp32 tensor of the optimizer, from where on."""

    name: str
    parameter: nn.Parameter
    master: Tensor
    start: int  # in the master laid flat
    offset: int  # in the parameter laid flat
    numel: int
    replica: tuple[int, int] = (
        0,
        1,
    )  # this rank and how many hold the same run; each saves its share


def state(
    pieces: Iterable[Piece], optimizer: torch.optim.Optimizer, *, share: bool
) -> Iterator[Fragment]:
    """Every fragment of this rank; with `share`, those of them that it saves."""
    for piece in pieces:
        low, high = _share(piece.numel, piece.replica) if share else (0, piece.numel)
        moments = optimizer.state[piece.master]
        for kind, whole in (
            (WEIGHTS, piece.master),
            *((moment, moments[moment]) for moment in MOMENTS),
        ):
            run = whole.detach().view(-1)[piece.start + low : piece.start + high]
            shape = tuple(
                getattr(piece.parameter, "ds_shape", piece.parameter.shape)
            )  # ZeRO-3 empties the parameter
            expert = getattr(piece.parameter, "expert", None)
            yield from split(f"{kind}/{piece.name}", shape, expert, piece.offset + low, run)


def buffers(module: nn.Module, replica: tuple[int, int], *, share: bool) -> Iterator[Fragment]:
    """What the model keeps besides parameters and would miss; the same on every rank."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if name not in parameters:
            low, high = _share(tensor.numel(), replica) if share else (0, tensor.numel())
            run = tensor.detach().view(-1)[low:high]
            yield from split(f"{WEIGHTS}/{name}", tuple(tensor.shape), None, low, run)


def split(
    key: str, shape: tuple[int, ...], expert: tuple[int, int] | None, offset: int, run: Tensor
) -> Iterator[Fragment]:
    """A run of a parameter's numbers as fragments of global tensors: cut where one expert ends and the next begins.
    `expert` is (index of the first local expert, experts in all) where the first dimension counts local experts."""
    if expert is None:
        if len(run):
            yield Fragment(key, shape, offset, run)
        return
    unit, end = math.prod(shape[1:]), offset + len(run)
    for local in range(offset // unit, -(-end // unit)):
        low, high = max(offset, local * unit), min(end, (local + 1) * unit)
        yield Fragment(
            f"{key}.{expert[0] + local}",
            shape[1:],
            low - local * unit,
            run[low - offset : high - offset],
        )


def ready(
    pieces: Iterable[Piece],
    optimizer: torch.optim.Optimizer,
    room: Callable[[Tensor], Tensor] = torch.zeros_like,
) -> None:
    """Adam's moments exist from its first step on; a run that is loaded needs them before."""
    for piece in pieces:
        if not optimizer.state[piece.master]:
            step = torch.zeros((), dtype=torch.float32, device=piece.master.device)
            moments = {moment: room(piece.master.detach()) for moment in MOMENTS}
            optimizer.state[piece.master] = {"step": step, **moments}


def steps(optimizer: torch.optim.Optimizer) -> int:
    """How often Adam has stepped, which its bias correction depends on."""
    counts = {int(moments["step"]) for moments in optimizer.state.values()}
    assert len(counts) == 1, (
        f"parameters of one model took different numbers of steps: {sorted(counts)}"
    )
    return counts.pop()


def set_steps(optimizer: torch.optim.Optimizer, count: int) -> None:
    for moments in optimizer.state.values():
        moments["step"].fill_(count)


def _share(numel: int, replica: tuple[int, int]) -> tuple[int, int]:
    index, count = replica
    return numel * index // count, numel * (index + 1) // count


def on_disk(like: Tensor, folder: str) -> Tensor:
    """Zeros of a host tensor's shape and type. The file has no name any more: however the process ends, its room is
    free again; all of it is taken now, so that a full disk is an error here and no death of the process later."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, max(1, like.nbytes))
            return torch.from_file(
                file.name, shared=True, size=like.numel(), dtype=like.dtype
            ).view(like.shape)
    except OSError as error:
        raise ConfigError(
            f"parallel.offload.path={folder}: {error.strerror} ({like.nbytes:,} bytes); give a directory with room on "
            "a disk of each node"
        ) from None


def random_state(world: World) -> list[Fragment]:
    states = {f"rng/cpu/{world.rank}": torch.get_rng_state()}
    if world.device.type == "cuda":
        states[f"rng/cuda/{world.rank}"] = torch.cuda.get_rng_state()
    return [Fragment(key, tuple(state.shape), 0, state) for key, state in states.items()]


def set_random_state(held: list[Fragment]) -> None:
    for fragment in held:
        if fragment.key.startswith("rng/cpu/"):
            torch.set_rng_state(fragment.data)
        else:
            torch.cuda.set_rng_state(fragment.data)
