"""Speed of the run: tokens per second and the share of the device's peak that the model's own FLOPs use."""

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Meter:
    """`peak_flops` is of all ranks together; None where the device is unknown: no MFU is better than a guessed one."""

    tokens_per_step: int
    flops_per_token: int
    peak_flops: float | None
    _last: float = field(default_factory=time.perf_counter)

    def restart(self) -> None:
        """Leave out what was no training: an evaluation, a checkpoint."""
        self._last = time.perf_counter()

    def step(self, steps: int = 1) -> dict[str, float | None]:
        now = time.perf_counter()
        speed = steps * self.tokens_per_step / max(now - self._last, 1e-9)
        self._last = now
        mfu = None if self.peak_flops is None else speed * self.flops_per_token / self.peak_flops
        return {"tokens_per_s": speed, "mfu": mfu}
