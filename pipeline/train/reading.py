"""Numbers on their way from the device, while the host goes on."""

import time
from typing import Any

import torch
from torch import Tensor


class Moment:
    """When the device has done all that was launched until now; where it is the host, just now."""

    def __init__(self, device: torch.device) -> None:
        self._event, self._at = None, time.perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def since(self, before: "Moment") -> float:
        """Seconds between two that have come."""
        if self._event is None:
            return self._at - before._at
        return float(before._event.elapsed_time(self._event)) / 1e3  # type: ignore[union-attr]


class Reading:
    def __init__(self, *numbers: Tensor) -> None:
        self._host = [
            each.to("cpu", non_blocking=True) for each in numbers
        ]  # torch pins what it copies so
        self.at = Moment(numbers[0].device)

    def get(self) -> list[Any]:
        """As lists; the one place where a training step waits for its device."""
        self.at.wait()
        return [each.tolist() for each in self._host]
