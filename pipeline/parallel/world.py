"""The world as a value: which process this is, how many there are, on what device. Read once, at the edge."""

import socket
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.errors import ConfigError

T = TypeVar("T")
# of a CPU without bf16, which torch has to say with a stack of C++ frames
warnings.filterwarnings("ignore", message="mkldnn_matmul failed")


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as free:
        return int(free.getsockname()[1])


def joining(rank: int, size: int, port: int) -> dict[str, str]:
    """The environment of one of this node's processes that meet at a port, where neither torchrun nor srun sets it."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    return {"MASTER_ADDR": "localhost", **{name: str(number) for name, number in numbers.items()}}


@dataclass(frozen=True, slots=True)
class World:
    rank: int
    size: int
    device: torch.device

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> "World":
        """As torchrun and srun set it; alone, one process."""
        local = int(env.get("LOCAL_RANK", 0))
        if torch.cuda.is_available():
            if local >= torch.cuda.device_count():
                raise ConfigError(
                    f"local rank {local} but this node has {torch.cuda.device_count()} GPUs; start one process per GPU"
                )
            device = torch.device("cuda", local)
            torch.cuda.set_device(device)
        else:
            device = torch.device("cpu")
        return cls(rank=int(env.get("RANK", 0)), size=int(env.get("WORLD_SIZE", 1)), device=device)

    @property
    def backend(self) -> str:
        return "nccl" if self.device.type == "cuda" else "gloo"

    @property
    def first(self) -> bool:
        return self.rank == 0

    def reader(self, sp: int) -> tuple[int, int]:
        """Which share of a batch's rows this rank reads, of how many: ranks that share sequences read the same."""
        return self.rank // sp, self.size // sp

    def put(self, values: Sequence[float]) -> Tensor:
        """On the device, in fp64; nothing here waits for it."""
        here = torch.tensor(values, dtype=torch.float64)
        return (
            here.pin_memory().to(self.device, non_blocking=True)
            if self.device.type == "cuda"
            else here
        )

    def sum(self, values: Sequence[float], first: Tensor | None = None) -> Tensor:
        """Sum over ranks, in fp64: integers up to 2^53 stay exact. `first`, still being computed on the device, is put
        before the values; nothing here waits for the device."""
        total = self.put(values)
        if first is not None:
            total = torch.cat((first.detach().double().reshape(-1), total))
        return self.reduce(total)

    def reduce(self, values: Tensor) -> Tensor:
        """Sum over ranks, in place; nothing here waits for the device."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def differ(self, values: Tensor, every: int = 1) -> Tensor:
        """Where the integers of every so-manieth rank are not all the same, on every rank; nothing here waits for the
        device."""
        both = values.new_full((every, 2 * len(values)), torch.iinfo(values.dtype).min)
        both[self.rank % every] = torch.cat(
            (values, ~values)
        )  # the largest complement is that of the smallest
        if self.size > 1:
            dist.all_reduce(both, op=dist.ReduceOp.MAX)
        top, bottom = both.chunk(2, dim=1)
        return (top != ~bottom).any(dim=0)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank, in rank order."""
        out = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(out, value)
        return out

    def first_says(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box)
        return box[0]

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


TIMEOUT = timedelta(minutes=30)  # of one collective; the first waits for the slowest node's imports
