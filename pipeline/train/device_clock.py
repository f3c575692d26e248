"""Time as the device measures it, and the speed and memory of training."""

import resource
import sys
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pipeline.config.layers import CONFIGS, read_toml
from pipeline.config.schema import Cluster


class DeviceTime:
    """The time at which the device has done everything launched so far.

    On a CPU that is now. On a GPU it is known only once the device has come that far (`wait`).
    """

    def __init__(self, device: torch.device) -> None:
        self._event = None
        self._host_s = time.perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: "DeviceTime") -> float:
        """Seconds from an earlier time; both must have been reached."""
        if self._event is None:
            return self._host_s - earlier._host_s
        return float(earlier._event.elapsed_time(self._event)) / 1e3  # type: ignore[union-attr]


class Speed(NamedTuple):
    seconds: float  # of the step, and of what the device waited for before it
    idle_s: float  # the device was idle before the step
    tokens_per_s: float
    mfu: float | None  # model FLOPs utilization; None if the peak of the device is unknown


@dataclass
class Meter:
    """Measures the speed of steps; evaluations and checkpoints are left out."""

    tokens_per_step: int
    flops_per_token: int
    peak_flops: float | None  # of all ranks together
    device: torch.device

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Leave out the time since the last step."""
        self._last = DeviceTime(self.device)

    def step(self, began: DeviceTime, ended: DeviceTime) -> Speed:
        seconds = max(ended.since(self._last), 1e-9)
        idle_s = began.since(self._last)
        self._last = ended
        tokens_per_s = self.tokens_per_step / seconds
        mfu = None
        if self.peak_flops is not None:
            mfu = tokens_per_s * self.flops_per_token / self.peak_flops
        return Speed(seconds, idle_s, tokens_per_s, mfu)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def peak_flops(cluster: Cluster, device: torch.device) -> float | None:
    """Peak FLOP/s of one device; None if it is unknown, since a guess would give a wrong MFU.

    It is the cluster's own figure if this is one of its devices. Without a cluster, it is that of
    the shipped cluster with the same device.
    """
    name = device_name(device)
    if cluster.peak_flops is not None:
        return cluster.peak_flops if cluster.has(name) else None
    for path in sorted((CONFIGS / "cluster").glob("*.toml")):
        table = read_toml(path)["cluster"]
        if "device" in table and table["device"] in name:
            return float(table["peak_flops"])
    return None


def peak_memory_bytes() -> float:
    """The most memory that this rank has used so far: of its GPU, or of the process on a CPU."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(most if sys.platform == "darwin" else most * 1024)  # Linux counts in KiB
