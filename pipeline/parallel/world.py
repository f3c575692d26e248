"""The world as a value: the rank of this process, the number of ranks, the device.

Nothing in `World` waits for the device, except where a method says so.
"""

import socket
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, HashStore, Store, TCPStore

from pipeline.errors import ConfigError
from pipeline.process import STORE, share

T = TypeVar("T")
# Limit for one collective. The first collective waits for the slowest node's imports.
TIMEOUT = timedelta(minutes=30)
# On a CPU without bf16 instructions torch prints this with a stack of C++ frames.
warnings.filterwarnings("ignore", message="mkldnn_matmul failed")


@dataclass(frozen=True, slots=True)
class World:
    rank: int
    size: int
    device: torch.device

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> "World":
        """Read the variables of our supervisor, torchrun or srun; without them, one process."""
        local = int(env.get("LOCAL_RANK", 0))
        device = torch.device("cpu")
        if torch.cuda.is_available():
            gpus = torch.cuda.device_count()
            if local >= gpus:
                raise ConfigError(
                    f"LOCAL_RANK={local}, but this node has {gpus} GPUs; start one process per GPU"
                )
            device = torch.device("cuda", local)
            torch.cuda.set_device(device)  # NCCL and Triton use the current device
        return cls(rank=int(env.get("RANK", 0)), size=int(env.get("WORLD_SIZE", 1)), device=device)

    @property
    def backend(self) -> str:
        return "nccl" if self.device.type == "cuda" else "gloo"

    @property
    def first(self) -> bool:
        return self.rank == 0

    def reader(self, sp: int) -> tuple[int, int]:
        """Return this rank's share of a batch's rows and the number of shares."""
        return self.rank // sp, self.size // sp

    def to_device(self, values: Sequence[float]) -> Tensor:
        """Copy numbers to the device, in fp64."""
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.device.type == "cuda":
            # A copy from ordinary memory would wait for the device.
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor

    def sum(self, values: Tensor, more: Sequence[float] = ()) -> Tensor:
        """Sum each value over the ranks, in fp64: integers up to 2^53 stay exact. The sums of
        `more`, which are numbers of the host, follow those of `values`."""
        return self.reduce(torch.cat((values.detach().double().reshape(-1), self.to_device(more))))

    def reduce(self, values: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def differ(self, values: Tensor, every: int = 1) -> Tensor:
        """Return, on every rank, a mask of the integers that are not the same on all ranks. With
        `every`, compare only ranks whose numbers are equal modulo `every`."""
        # Each residue has a row. A rank leaves the other rows at the minimum, which never wins.
        both = values.new_full((every, 2 * len(values)), torch.iinfo(values.dtype).min)
        # One maximum gives both extremes: the smallest value has the largest complement.
        both[self.rank % every] = torch.cat((values, ~values))
        if self.size > 1:
            dist.all_reduce(both, op=dist.ReduceOp.MAX)
        top, bottom = both.chunk(2, dim=1)
        return (top != ~bottom).any(dim=0)

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order, on every rank. Waits for all ranks."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank. Waits for rank 0."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values)
        return values[0]


def join(world: World, env: Mapping[str, str]) -> None:
    """Create the process group, unless this process is already in one."""
    if dist.is_initialized():
        return
    store: Store | None
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = None  # the user's own torchrun serves a store, which env:// finds
    elif world.size == 1:
        store = HashStore()  # in memory: no port and no file
    elif STORE in env:
        share(Path(env[STORE]).parent)  # until this rank ends, even if its launcher is killed
        store = FileStore(env[STORE], world.size)  # one node: nothing listens on a port
    else:
        store = _network_store(world, env["MASTER_ADDR"], int(env["MASTER_PORT"]))
    dist.init_process_group(
        world.backend, store=store, rank=world.rank, world_size=world.size, timeout=TIMEOUT
    )


def leave() -> None:
    """Destroy the process group; NCCL warns about a process that ends without doing so."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _network_store(world: World, address: str, port: int) -> Store:
    """Return the store of a job on several nodes. Rank 0 serves it, on the job's network only."""
    if not world.first:
        return TCPStore(address, port, world.size, is_master=False, timeout=TIMEOUT)
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    if str(where[0]).startswith("127.0.1."):
        # Debian's /etc/hosts gives a host's own name this address, which no other node can reach.
        where = ("", port)
    listener = socket.create_server(where[:2], family=family, backlog=2 * world.size)
    return TCPStore(
        address,
        port,
        world.size,
        is_master=True,
        timeout=TIMEOUT,
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )
