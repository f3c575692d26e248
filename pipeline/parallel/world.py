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
from torch._C._distributed_c10d import FileStore, HashStore, Store, TCPStore

from pipeline.errors import ConfigError
from pipeline.process import STORE

T = TypeVar("T")
TIMEOUT = timedelta(minutes=30)  # of one collective; the first waits for the slowest node's imports
# of a CPU without bf16, which torch has to say with a stack of C++ frames
warnings.filterwarnings("ignore", message="mkldnn_matmul failed")


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


def join(world: World, env: Mapping[str, str]) -> None:
    """Create the process group, unless this process is already in one."""
    if dist.is_initialized():
        return
    store: Store | None
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = None  # started by the user's own torchrun, which serves the store: env:// finds it
    elif world.size == 1:
        store = HashStore()
    elif STORE in env:
        store = FileStore(env[STORE], world.size)
    else:
        store = _network_store(world, env["MASTER_ADDR"], int(env["MASTER_PORT"]))
    dist.init_process_group(
        world.backend, store=store, rank=world.rank, world_size=world.size, timeout=TIMEOUT
    )


def _network_store(world: World, address: str, port: int) -> Store:
    """The store of a job on several nodes; rank 0 serves it, on the job's network only."""
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
