"""Numbers on their way from the device, while the host goes on."""

import time
from typing import Any

import torch
from torch import Tensor


class Reading:
    def __init__(self, *numbers: Tensor) -> None:
        self._host = [each.to("cpu", non_blocking=True) for each in numbers]  # torch pins what it copies so
        self._there = None
        if any(each.is_cuda for each in numbers):
            self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._there.record()
        self.at = time.perf_counter()  # when they were there, as far as is known

    def get(self) -> list[Any]:
        """As lists; the one place where a training step waits for its device."""
        if self._there is not None:
            self._there.synchronize()
            self.at = time.perf_counter()
        return [each.tolist() for each in self._host]
