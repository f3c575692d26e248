"""Speed of the run: tokens per second and the share of the device's peak that the model's own FLOPs use."""

import resource
import sys
from dataclasses import dataclass

import torch

from pipeline.config.layers import CONFIGS, read_toml
from pipeline.config.schema import Cluster
from pipeline.train.reading import Moment


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def peak_flops(cluster: Cluster, device: torch.device) -> float | None:
    """Of one device: the chosen cluster's if it is one of them, without one that of the shipped cluster whose device
    this is, else unknown."""
    name = device_name(device)
    if cluster.peak_flops is not None:
        return cluster.peak_flops if cluster.has(name) else None
    for path in sorted((CONFIGS / "cluster").glob("*.toml")):
        table = read_toml(path)["cluster"]
        if "device" in table and table["device"] in name:
            return float(table["peak_flops"])
    return None


def peak_memory_bytes() -> float:
    """The most this rank has held so far: on its device, or as a process where there is none."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(most if sys.platform == "darwin" else most * 1024)  # Linux counts in KiB


@dataclass(slots=True)
class Meter:
    """`peak_flops` is of all ranks together; None where the device is unknown: no MFU is better than a guessed one."""

    tokens_per_step: int
    flops_per_token: int
    peak_flops: float | None
    _last: Moment
    took_s: float = 0.0  # the last step
    idle_s: float = 0.0  # the device, before it

    def restart(self, now: Moment) -> None:
        """Leave out what was no training: an evaluation, a checkpoint."""
        self._last = now

    def step(self, began: Moment, now: Moment) -> dict[str, float | None]:
        """One that was launched and done then, by the device's clock: the host sees that a step is done when it has
        launched the next, and of the last before an evaluation at once."""
        self.idle_s, self.took_s, self._last = (
            began.since(self._last),
            max(now.since(self._last), 1e-9),
            now,
        )
        speed = self.tokens_per_step / self.took_s
        mfu = None if self.peak_flops is None else speed * self.flops_per_token / self.peak_flops
        return {"tokens_per_s": speed, "mfu": mfu, "memory_bytes": peak_memory_bytes()}
